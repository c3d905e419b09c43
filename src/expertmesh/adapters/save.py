"""Write adapters as a plain PEFT directory, each rank its part, without the frozen base.

The file does not depend on the layout. B of routed experts is stored with the expert index fastest, across all ranks,
so these tensors are gathered one at a time; no rank ever holds more than its shards and one tensor.

`unread_by_engines` follows the readers of vLLM 0.33 (`vllm/lora`) and SGLang 0.5.23 (`sglang/srt/lora`), which
tests/adapters/test_serving_readers.py runs; no engine is imported.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from expertmesh.adapters.base import base_bytes
from expertmesh.adapters.peft_format import BASE_FILE, CONFIG_FILE, WEIGHTS_FILE, file_tensors
from expertmesh.adapters.plan import AdapterPlan, plan_of
from expertmesh.config.errors import InputError
from expertmesh.distributed.all_ranks import collective_device, raise_on_all_ranks
from expertmesh.io.directory import check_target, io_errors
from expertmesh.io.safetensors_writer import FilesLayout, lay_out_file, write_synced
from expertmesh.state.model_view import ModelView
from expertmesh.state.shards import held_parts, owns_copy
from expertmesh.weights.companions import Tokenizer, generation_files, write_tokenizer
from expertmesh.weights.lazy import LazyTensor
from expertmesh.weights.write import StateReader, live_values, write_directory

_VLLM_MOST_RANK = 512


def unread_by_engines(model: PreTrainedModel, plan: AdapterPlan, *, per_expert: bool = False) -> tuple[str, ...]:
    """Return a sentence for each thing that an engine would refuse or compute differently. No communication.

    Args:
        per_expert: The file has keys for each expert.
    """
    return (*_of_experts(model, plan, per_expert), *_of_modules(plan), *_of_config(plan))


def _of_experts(model: PreTrainedModel, plan: AdapterPlan, per_expert: bool) -> Iterator[str]:
    """Yield sentences about adapters on experts."""
    weights = [target.name for target in plan.targets if target.experts is not None]
    if not weights:
        return
    rules = get_model_conversion_mapping(ModelView(model).full)
    if any(".experts.*." in f".{source}" for rule in rules for source in rule.source_patterns):
        if not per_expert:
            yield (
                "vLLM, SGLang: experts of this family from keys for each expert (expertmesh export RUN "
                "--adapter-format per-expert)"
            )
    else:
        yield "SGLang: no adapters on experts that a model's files keep in one tensor; merge for it"
    endings = {name.rpartition(".")[2] for name in weights}
    if len(endings) == 1:
        yield f"vLLM: experts with an adapter on {endings.pop()} alone; it wants both matrices, so merge for it"


def _of_modules(plan: AdapterPlan) -> Iterator[str]:
    """Yield sentences about adapters on other modules."""
    names = {target.name.removesuffix(".weight").rpartition(".")[2] for target in plan.targets}
    if "kv_b_proj" in names:
        yield "vLLM: kv_b_proj, which decoding has absorbed without its adapter; merge for it"
    if ("q_proj" in names and "v_proj" not in names) or (names & {"k_proj", "v_proj"} and "q_proj" not in names):
        yield "SGLang: q_proj, k_proj or v_proj without both q_proj and v_proj; merge for it"
    if any(target.group == "router" for target in plan.targets):
        yield "SGLang: routers; merge for it"


def _of_config(plan: AdapterPlan) -> Iterator[str]:
    """Yield sentences about settings of all adapters."""
    lora = plan.lora
    if not plan.is_uniform:
        yield "vLLM, SGLang: rank_pattern and alpha_pattern, which they do not look at; merge for them"
    if lora.r > _VLLM_MOST_RANK:
        yield f"vLLM: rank {lora.r}; it takes {_VLLM_MOST_RANK} at most"
    if lora.use_rslora:
        alpha = lora.alpha * math.sqrt(lora.r)
        yield (
            f"SGLang: use_rslora, which it does not look at; for it set lora_alpha to {alpha:g} and use_rslora to "
            "false in adapter_config.json"
        )


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """An adapter that was saved."""

    directory: Path
    tensors: int
    total_bytes: int
    """The size of the weights file."""
    bytes_written: int
    """The bytes that this rank wrote."""
    filled: dict[str, tuple[float, ...]]
    """The fraction of B that is not zero for each expert, by name of the adapted parameter of experts.

    It stays 0 for an expert that has never seen a token.
    """
    untrained: tuple[str, ...] = ()
    """The names of the other targets all of whose B is zero."""
    unread: tuple[str, ...] = ()
    """Sentences about what inference engines cannot read of it."""


@torch.no_grad()
def save_adapter(model: PreTrainedModel, directory: str | Path, *, tokenizer: Tokenizer | None = None) -> AdapterReport:
    """Write the adapters as trained and their config, as `peft.PeftModel.from_pretrained(base, directory)` reads them.

    Beside them it writes the tokenizer and the generation config that the model has now, which a base may not have.

    Args:
        directory: On a file system that all ranks share; must not exist, or be empty.

    Raises:
        InputError: The model has no adapters, the directory is not empty, or the disk is full.

    Collectives: every rank calls it with the same arguments; the all-gathers of one expert adapter after the other, and
    a few small ones on the default group. Errors are raised on all ranks.
    """
    directory = Path(directory).absolute()
    with raise_on_all_ranks("planning what to save"):
        plan = plan_of(model)
        if plan is None:
            raise InputError(
                f"{type(model).__name__} has no adapters; load it with lora, or use save_model", key="model.no-adapters"
            )
        check_target(directory)
        view = ModelView(model)
        files = file_tensors(view.adapters, plan.targets)
        small = small_files(model, plan) | generation_files(view)
    layout, written = write_adapter(directory, files, small, tokenizer, live_values)
    filled, untrained = _filled(model, plan)
    return AdapterReport(directory, len(files), layout.size, written, filled, untrained, unread_by_engines(model, plan))


def write_adapter(
    directory: Path,
    files: Mapping[str, LazyTensor],
    small: Mapping[str, bytes],
    tokenizer: Tokenizer | None,
    values: StateReader,
    dtype: torch.dtype | None = None,
) -> tuple[FilesLayout, int]:
    """Write the tensors `files` and the `small` files into a directory that appears when it is complete.

    Args:
        values: Reads the model's tensors behind `files`.
        dtype: The dtype of all tensors in the file; None keeps theirs.

    Returns:
        The layout of the file, and the bytes that this rank wrote.

    Collectives: every rank calls it; it raises and communicates as `save_adapter` does.
    """

    def lay_out_in(temporary: Path) -> FilesLayout:
        shaped = {
            name: torch.empty(tuple(lazy.shape), dtype=dtype or lazy.dtype, device="meta")
            for name, lazy in files.items()
        }
        return FilesLayout((lay_out_file(temporary / WEIGHTS_FILE, shaped, {"format": "pt"}),), None)

    def write_others(temporary: Path, layout: FilesLayout) -> None:
        with io_errors(temporary, layout.size):
            for name, content in small.items():
                write_synced(temporary / name, content)
            if tokenizer is not None:
                write_tokenizer(tokenizer, temporary)

    return write_directory(directory, files, lay_out_in, write_others, values)


def small_files(model: PreTrainedModel, plan: AdapterPlan) -> dict[str, bytes]:
    """Return PEFT's config and our description of the base, by file name."""
    return {CONFIG_FILE: plan.config(model), BASE_FILE: base_bytes(model)}


def _filled(model: PreTrainedModel, plan: AdapterPlan) -> tuple[dict[str, tuple[float, ...]], tuple[str, ...]]:
    """Return `AdapterReport.filled` and `AdapterReport.untrained`.

    Collectives: every rank calls it; one all-reduce on the default group, of `[targets, most experts]` int64.
    """
    adapters = ModelView(model).adapters
    counts_TE = torch.zeros(len(plan.targets), max(target.experts or 1 for target in plan.targets), dtype=torch.int64)
    sizes = []
    for row, target in enumerate(plan.targets):
        whole = adapters[f"{target.module}.{target.leaves[1]}"]
        sizes.append(whole.numel() // (target.experts or 1))
        if owns_copy(whole):
            for box, local in held_parts(whole):
                first, last = box[0] if target.experts else (0, 1)
                rows = local.flatten(1) if target.experts else local.reshape(1, -1)
                counts_TE[row, first:last] += rows.count_nonzero(1).cpu()
    counts_TE = counts_TE.to(collective_device())
    if dist.is_initialized():
        dist.all_reduce(counts_TE)
    filled, untrained = {}, []
    for target, counts, size in zip(plan.targets, counts_TE.tolist(), sizes, strict=True):
        if target.experts:
            filled[target.name] = tuple(count / size for count in counts[: target.experts])
        elif counts[0] == 0:
            untrained.append(target.name)
    return filled, tuple(untrained)
