"""Write adapters as a plain PEFT directory, each rank its part; stream the model's tensors to inference engines.

The file does not depend on the layout. B of routed experts is stored with the expert index fastest, across all ranks,
so these tensors are gathered one at a time; no rank ever holds more than its shards and one tensor.

`iter_hf_weights` yields what `save_model` writes, or, with adapters merged, what `expertmesh merge` writes. Beside the
yielded tensor, a rank holds a block of it and A and B of its adapted weights, or of the last two. Nothing here changes
the model.

`unread_by_engines` follows the readers of vLLM 0.33 (`vllm/lora`) and SGLang 0.5.23 (`sglang/srt/lora`), which
tests/adapters/test_serving_readers.py runs; no engine is imported.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from expertmesh.adapters.peft_format import BASE_FILE, CONFIG_FILE, WEIGHTS_FILE, file_tensors
from expertmesh.adapters.plan import AdapterPlan, no_adapters
from expertmesh.adapters.start import base_bytes
from expertmesh.adapters.targets import Replaced, Target, new_values_of
from expertmesh.distributed.all_ranks import collective_device, raise_on_all_ranks
from expertmesh.io.boxes import Box, extents, full_box, slices
from expertmesh.io.directory import check_target, io_errors, write_synced
from expertmesh.io.safetensors_writer import FilesLayout, lay_out_file, too_narrow
from expertmesh.state.model_view import ModelView, sharded
from expertmesh.state.shards import held_parts, owns_copy
from expertmesh.weights.lazy import LazyTensor
from expertmesh.weights.mapping import StateTensor, plan_save
from expertmesh.weights.save import saved_specs
from expertmesh.weights.sidecars import Tokenizer, generation_files, write_tokenizer
from expertmesh.weights.write import (
    StateReader,
    compute_full,
    gather,
    is_computed,
    live_values,
    owned_values,
    write_directory,
)

_T = TypeVar("_T")
_VLLM_MOST_RANK = 512
_BLOCK_ELEMENTS = 1 << 22


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
        plan = sharded(model).lora_plan
        if plan is None:
            raise no_adapters(model, "use save_model")
        check_target(directory)
        view = ModelView(model)
        files = file_tensors(view.adapters, plan.targets, plan.replaced)
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

    shaped = {
        name: torch.empty(tuple(lazy.shape), dtype=dtype or lazy.dtype, device="meta") for name, lazy in files.items()
    }
    layout = FilesLayout((lay_out_file(directory / WEIGHTS_FILE, shaped, {"format": "pt"}),), None)

    def write_small_files(temporary: Path) -> None:
        with io_errors(temporary, layout.size):
            for name, content in small.items():
                write_synced(temporary / name, content)
            if tokenizer is not None:
                write_tokenizer(tokenizer, temporary)

    return layout, write_directory(directory, files, layout, write_small_files, values)


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
        whole = adapters[target.factors[1]]
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


@torch.no_grad()
def iter_hf_weights(
    model: PreTrainedModel, *, dtype: torch.dtype | None = None, merge: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of every tensor of the model's files, one after the other, on every rank's device.

        llm.load_weights(em.iter_hf_weights(model, dtype=torch.bfloat16))  # an inference engine on the same ranks

    The names, shapes and bits are those that `save_model(model, dtype=dtype)` writes, per-expert files included.
    Unmapped tensors of the files (MTP layers), which never change, are left out. Works in every layout.

    Args:
        dtype: None for the dtypes that `save_model` chooses.
        merge: Merge adapters as `expertmesh merge` does: added in fp64 and rounded once.

    Yields:
        The name and the full tensor.

    Raises:
        InputError: The save cannot be planned.
        IntegrityError: Values do not fit in `dtype`.

    Collectives: every rank iterates to the end, or to the same place. One all-reduce of each tensor's bytes on the
    default group; for adapted weights an all-gather of A and B; for conversions that compute, one of their inputs
    instead. Errors are raised on all ranks.
    """
    with raise_on_all_ranks("planning what to stream"):
        view = ModelView(model)
        lazies = plan_save(view)
        specs = saved_specs(view, lazies, dtype)
    plan = sharded(model).lora_plan if merge else None
    values = _Values(view, plan)
    mesh = sharded(model).mesh
    device = next(model.parameters()).device if mesh is None else mesh.device
    for name, lazy in lazies.items():
        values.prepare(lazy)
        shape = tuple(lazy.shape)
        # The last byte reports values that do not fit: the all-reduce of the tensor also brings the error to all ranks.
        stored = torch.zeros(lazy.numel() * specs[name][0].itemsize + 1, dtype=torch.uint8, device=device)
        tensor = stored[:-1].view(specs[name][0]).view(shape)
        if is_computed(lazy):
            fits = _copy(compute_full(lazy, {}, values), full_box(shape), tensor)
        else:
            # A list, not a generator: `all` must not stop before every part is copied.
            fits = all([_copy(part, box, tensor) for box, part in owned_values(lazy, values, _BLOCK_ELEMENTS)])
            stored[-1] = not fits
            if dist.is_initialized():
                # MAX over bytes, of which one rank has each and the others zero: exact, and keeps the sign of zeros.
                dist.all_reduce(stored, dist.ReduceOp.MAX)
            fits = not bool(stored[-1])
        if not fits:
            raise too_narrow(name, tensor.dtype)
        yield name, tensor


class _Values:
    """A reader of the model's values that merges adapters; merged values are in fp32 or wider."""

    def __init__(self, view: ModelView, plan: AdapterPlan | None) -> None:
        self._targets = {} if plan is None else {target.weight: target for target in plan.targets}
        self._replaced: Mapping[str, Replaced] = {} if plan is None else plan.replaced
        self._adapters: Mapping[str, Tensor] = view.adapters if plan is not None else {}
        self._factors: dict[str, tuple[Tensor, Tensor]] = {}
        self._new_values: dict[str, Tensor] = {}
        self._gathered: dict[str, Tensor] = {}

    def prepare(self, lazy: LazyTensor) -> None:
        """Gather the tensors that `lazy` needs from other ranks.

        Collectives: every rank calls it; those of `gather` for computed tensors, for A and B of adapted weights, and
        for new values of replaced ones.
        """
        self._gathered = gather(lazy) if is_computed(lazy) else {}
        names = list(dict.fromkeys(leaf.name for leaf in lazy.leaves()))
        # Two are held at least, because files have an expert's two projections in turn.
        _hold(self._factors, [name for name in names if name in self._targets], self._gather_factors, 2)
        _hold(self._new_values, [name for name in names if name in self._replaced], self._gather_new_values, 1)

    def __call__(self, leaf: StateTensor, box: Box) -> Tensor:
        """Return the values of `box` of a tensor, with its adapter merged if it has one. Call `prepare` first."""
        gathered = self._gathered.get(leaf.name)
        values = live_values(leaf, box) if gathered is None else gathered[slices(box)]
        target = self._targets.get(leaf.name)
        if leaf.name in self._replaced:
            new = self._new_values[leaf.name]
            return replace_values(values, box, self._replaced[leaf.name], lambda part: new[slices(part)])
        if target is None:
            return values
        merged = values.to(torch.promote_types(values.dtype, torch.float32), copy=True)
        add_delta(merged, box, target, self._factors[leaf.name])
        return merged

    def _gather_factors(self, weight: str) -> tuple[Tensor, Tensor]:
        """Return the full A and B of an adapted weight."""
        a, b = map(self._whole, self._targets[weight].factors)
        return a, b

    def _gather_new_values(self, weight: str) -> Tensor:
        return self._whole(new_values_of(weight))

    def _whole(self, name: str) -> Tensor:
        whole = gather(LazyTensor.of(StateTensor(name, self._adapters[name])))
        return whole.get(name, self._adapters[name]).detach()


def _hold(held: dict[str, _T], names: Sequence[str], make: Callable[[str], _T], least: int) -> None:
    """Let `held` have all of `names`, what is missing by `make`, and no more than these or `least`, the latest ones."""
    for name in names:
        held[name] = held.pop(name) if name in held else make(name)
    for name in list(held)[: -max(least, len(names))]:
        del held[name]


def replace_values(values: Tensor, box: Box, each: Replaced, new: Callable[[Box], Tensor]) -> Tensor:
    """Return `values` of `box` of a weight with its new values, or with those of some rows, in a dtype that holds both.

    Args:
        new: Returns a box of the new values.
    """
    if each.scaling is not None:
        return values.double().add_(new(box).double(), alpha=each.scaling)
    if each.rows is None:
        return new(box)
    (first, last), *others = box
    rows = {
        row - first: new(((number, number + 1), *others))[0]
        for number, row in enumerate(each.rows)
        if first <= row < last
    }
    replaced = values.to(reduce(torch.promote_types, (row.dtype for row in rows.values()), values.dtype), copy=True)
    for number, row in rows.items():
        replaced[number] = row
    return replaced


def add_delta(values: Tensor, box: Box, target: Target, factors: tuple[Tensor, Tensor]) -> None:
    """Add the part of `scaling · B A` in `box` of an adapted weight to `values`.

    Products and sums are in fp64, so that the result does not depend on how the weight was cut into boxes.

    Args:
        values: The values of `box`, in fp32 or wider.
        factors: A `[E, r, in]` and B `[E, out, r]`, without E for a matrix.
    """
    a_ErK, b_ENr = (factor if target.experts is not None else factor.unsqueeze(0) for factor in factors)
    (first, last), rows, columns = box if target.experts is not None else ((0, 1), *box)
    parts = values if target.experts is not None else values.unsqueeze(0)
    for expert, part in zip(range(first, last), parts, strict=True):
        a_rK, b_Nr = a_ErK[expert].double(), b_ENr[expert].double()
        left, right = (a_rK.t(), b_Nr.t()) if target.transposed else (b_Nr, a_rK)
        part.copy_(part.double().addmm_(left[slice(*rows)], right[:, slice(*columns)], alpha=target.scaling))


def _copy(values: Tensor, box: Box, tensor: Tensor) -> bool:
    """Copy `values` into the box of `tensor`, and return whether its dtype can hold them."""
    part = tensor[slices(box)]
    assert tuple(part.shape) == extents(box), (part.shape, box)
    part.copy_(values)
    return part.dtype == values.dtype or bool(torch.equal(part.isfinite(), values.isfinite().to(part.device)))


def unread_by_engines(model: PreTrainedModel, plan: AdapterPlan, *, per_expert: bool = False) -> tuple[str, ...]:
    """Return a sentence for each thing that an engine would refuse or compute differently. No communication.

    Args:
        per_expert: The file has keys for each expert.
    """
    return tuple(_unread(model, plan, per_expert))


def _unread(model: PreTrainedModel, plan: AdapterPlan, per_expert: bool) -> Iterator[str]:
    weights = [target.name for target in plan.targets if target.experts is not None]
    rules = get_model_conversion_mapping(ModelView(model).full) if weights else []
    if any(".experts.*." in f".{source}" for rule in rules for source in rule.source_patterns):
        if not per_expert:
            yield (
                "vLLM, SGLang: experts of this family from keys for each expert (expertmesh export RUN "
                "--adapter-format per-expert)"
            )
    elif weights:
        yield "SGLang: no adapters on experts that a model's files keep in one tensor; merge for it"
    endings = {name.rpartition(".")[2] for name in weights}
    if len(endings) == 1:
        yield f"vLLM: experts with an adapter on {endings.pop()} alone; it wants both matrices, so merge for it"
    names = {target.name.removesuffix(".weight").rpartition(".")[2] for target in plan.targets}
    if "kv_b_proj" in names:
        yield "vLLM: kv_b_proj, which decoding has absorbed without its adapter; merge for it"
    if ("q_proj" in names and "v_proj" not in names) or (names & {"k_proj", "v_proj"} and "q_proj" not in names):
        yield "SGLang: q_proj, k_proj or v_proj without both q_proj and v_proj; merge for it"
    if any(target.group == "router" for target in plan.targets):
        yield "SGLang: routers; merge for it"
    if plan.lora.lora_bias:
        yield "vLLM, SGLang: lora_bias; merge for it"
    if any(each.scaling is None for each in plan.replaced.values()):
        yield "vLLM, SGLang: modules_to_save and trainable_token_indices; merge for them"
    if not plan.is_uniform:
        yield "vLLM, SGLang: rank_pattern and alpha_pattern, which they do not look at; merge for them"
    if plan.lora.r > _VLLM_MOST_RANK:
        yield f"vLLM: rank {plan.lora.r}; it takes {_VLLM_MOST_RANK} at most"
    if plan.lora.use_rslora:
        alpha = plan.lora.alpha * math.sqrt(plan.lora.r)
        yield (
            f"SGLang: use_rslora, which it does not look at; for it set lora_alpha to {alpha:g} and use_rslora to "
            "false in adapter_config.json"
        )
