"""Export a checkpoint as a plain Hugging Face or PEFT directory: one process, no GPU, no process group, no pickle.

For `expertmesh export` and `verify`. The model is built on meta from the config that the checkpoint brings along, and
its values are read a block at a time. The files are, byte for byte, those that `save_model` would have written of the
live model, or `save_adapter` of a LoRA run; layout, casts and publishing are their code. Never reads optimizer files.

`--adapter-format per-expert` writes `…mlp.experts.3.gate_proj.lora_A.weight` rather than PEFT's layout of fused
experts. Gate and up share one A; each gets its rows of B. Names come from transformers' own rules.
"""

import json
import math
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertmesh.adapters.peft_config import config_bytes, patterns_of
from expertmesh.adapters.peft_format import (
    BASE_FILE,
    CONFIG_FILE,
    PREFIX,
    WEIGHTS_FILE,
    file_tensors,
    is_parameter,
    name_of,
    new_values,
    published_parts,
)
from expertmesh.adapters.plan import AdapterPlan, adapt
from expertmesh.adapters.save import unread_by_engines, write_adapter
from expertmesh.checkpoint.manifest import Manifest, unsafe_content
from expertmesh.checkpoint.read import OpenCheckpoint, check_fits, check_hashes, open_state
from expertmesh.checkpoint.small_files import ADAPTER, HUGGINGFACE, read_layout, read_save_dtype, read_small
from expertmesh.checkpoint.state import model_state
from expertmesh.config import LoraConfig
from expertmesh.config.errors import InputError, SecurityError
from expertmesh.io.boxes import Box
from expertmesh.io.directory import check_target
from expertmesh.io.safetensors_reader import DTYPES
from expertmesh.state.model_view import ModelView, sharded
from expertmesh.weights.lazy import LazyTensor, as_lazy
from expertmesh.weights.load import remember
from expertmesh.weights.mapping import StateTensor
from expertmesh.weights.meta_model import build_meta_model, give_dtypes, labels_of, read_model_config
from expertmesh.weights.quantised.encode import unsuited
from expertmesh.weights.save import SavedDtype, SaveReport, dtype_of, save_values
from expertmesh.weights.sidecars import CopiedFiles
from expertmesh.weights.write import StateReader

AdapterFormat = Literal["peft", "per-expert"]


def export(
    checkpoint: Path,
    target: Path,
    *,
    dtype: SavedDtype = None,
    max_shard_bytes: int = 5_000_000_000,
    trust_remote_code: bool = False,
    adapter_format: AdapterFormat | None = None,
) -> tuple[Manifest, SaveReport]:
    """Write the model of the checkpoint directory `checkpoint` to `target`, which must not exist or be empty.

    Of a LoRA run, that is its adapter in one file. No communication.

    Args:
        dtype: That of `save_model`; None takes the run's `save.dtype`, and leaves adapters as trained. A checkpoint of
            a version that noted none is written as trained.
        adapter_format: None or "peft" for PEFT's own keys, "per-expert" for keys for each expert.

    Raises, before anything is written:
        InputError: No such checkpoint, newer format, target not empty, disk too small, remote code without the flag, an
            `adapter_format` of what is no adapter or has no such format.
        SecurityError: A pickle, or a link that leads out of the checkpoint.
        IntegrityError: Damaged.

    Disk full and values that `dtype` cannot hold are raised later, with nothing left behind.
    """
    check_target(target)
    with open_state(checkpoint) as state:
        check_hashes(state, optimizer=False)
        if adapter_format is not None and not holds_adapters(state):
            raise InputError(
                f"{checkpoint}: holds a whole model, no adapter; export writes it without --adapter-format",
                key="checkpoint.no-adapter",
            )
        model = stored_model(state, trust_remote_code=trust_remote_code)
        # Saving reads tensors of the model, the checkpoint knows them by name.
        names = {id(tensor): name for name, tensor in model_state(model).items()}

        def values(leaf: StateTensor, box: Box) -> Tensor:
            read = state.read(names[id(leaf.tensor)], box)
            state.check_finite(names[id(leaf.tensor)], box, read)
            return read

        if holds_adapters(state):
            cast = dtype_of(dtype)
            if cast is None and dtype not in (None, "auto"):
                raise unsuited(dtype, f"{checkpoint} holds an adapter, which is never in codes; give a plain dtype")
            return state.manifest, _export_adapter(state, model, target, values, cast, adapter_format or "peft")
        report = save_values(
            ModelView(model),
            target,
            values,
            tokenizer=CopiedFiles(sidecar_files(state)),
            dtype=dtype or read_save_dtype(state.directory, state.manifest),
            max_shard_bytes=max_shard_bytes,
        )
    return state.manifest, report


def stored_model(state: OpenCheckpoint, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the checkpoint's model on meta, in its stored dtypes, to be saved in the layout of training's first files.

    A checkpoint of a LoRA run holds the adapters alone; files then have the family's published layout. Reads config and
    layout, whose hashes the caller has compared.

    Raises:
        InputError: transformers cannot build it, or it needs remote code without the flag.
        IntegrityError: The checkpoint is not one of this model.
    """
    config, directory = read_model_config(str(state.directory / HUGGINGFACE), trust_remote_code=trust_remote_code)
    model = build_meta_model(
        config,
        torch.float32,
        directory=directory,
        trust_remote_code=trust_remote_code,
        num_labels=labels_of(config),
    )
    has_adapters = holds_adapters(state)
    if has_adapters:
        adapt(model, LoraConfig(from_adapter=str(state.directory / ADAPTER)), torch.float32, None)
    targets = model_state(model)
    give_dtypes(targets, {name: DTYPES[entry.dtype] for name, entry in state.manifest.model.items()})
    check_fits(state, targets)
    layout = read_layout(model, state.directory, state.manifest)
    if not has_adapters:
        remember(model, *layout)
    return model


def holds_adapters(state: OpenCheckpoint) -> bool:
    """Return whether the checkpoint holds the adapters of a LoRA run, without the model under them."""
    return f"{ADAPTER}/{CONFIG_FILE}" in state.manifest.by_name


def sidecar_files(state: OpenCheckpoint) -> dict[str, Path]:
    """Return the files that belong beside the model's weights (config, tokenizer, template, code), by their path there.

    Raises:
        SecurityError: A link leads out of the checkpoint, or a file is a pickle.
    """
    prefix = f"{HUGGINGFACE}/"
    names = [file.name for file in state.manifest.files if file.name.startswith(prefix)]
    for name in names:
        if (reason := unsafe_content(state.directory / name, state.directory)) is not None:
            raise SecurityError(reason, key="checkpoint.unsafe")
    return {name.removeprefix(prefix): state.directory / name for name in names}


@dataclass(frozen=True, slots=True)
class _PerExpertAdapter:
    """An adapter with keys for each expert."""

    tensors: dict[str, LazyTensor]
    """The file's, by key."""
    modules: tuple[str, ...]
    """The last parts of the names of the modules that adapter_config.json is to target."""
    ranks: Mapping[str, tuple[int, float]]
    """Rank and alpha by the names of published matrices, and by those of the weights that PEFT joins them to."""
    joined: Mapping[str, int]
    """The number of one expert's matrices that PEFT joins, by the weight's name."""

    def config(self, content: Mapping[str, Any], plan: AdapterPlan) -> bytes:
        """Return adapter_config.json, made of PEFT's own `content`.

        Dense MLPs and shared experts stay parameters: PEFT takes modules of these names for routed experts.
        """
        dense = [target.weight for target in plan.targets if is_parameter(target) and not target.parameter]
        endings = content.get("target_parameters") or ()
        kept = [ending for ending in endings if any(name.endswith(f".{ending}") for name in dense)]
        patterns = patterns_of(self.ranks, plan.lora, self.joined)
        targeted = {"target_modules": list(self.modules), "target_parameters": kept or None}
        return config_bytes({**content, **patterns, **targeted})


def _per_expert_adapter(model: PreTrainedModel, plan: AdapterPlan) -> _PerExpertAdapter:
    """Build the adapter with keys for each expert from the adapters of `model`, in the family's published layout.

    Raises `InputError` for a model whose files do not hold one matrix per expert (GPT-OSS and others with all experts
    of a layer in one tensor).
    """
    adapters, ranks, joined = ModelView(model).adapters, dict[str, tuple[int, float]](), Counter[str]()
    named, files, modules = Counter[str](), dict[str, LazyTensor](), dict[str, None]()
    for target, key, part in published_parts(model, plan.targets):
        if part is None:
            _refuse(model, target.weight, key)
        a, b = (LazyTensor.of(StateTensor(name, adapters[name])) for name in target.factors)
        rows = slice(*part.rows)
        chosen = (a, b[rows]) if part.expert is None else (a[part.expert], b[part.expert, rows])
        files |= zip(part.keys, map(as_lazy, chosen), strict=True)
        named[target.name] += part.rows[1] - part.rows[0]
        joined[name_of(target)] += part.expert in (None, 0)
        ranks[re.sub(r"\.experts\.\d+\.", ".experts#.", part.key.removeprefix(PREFIX))] = target.r, target.alpha
        if target.parameter or not is_parameter(target):
            modules[part.key.rpartition(".")[2]] = None
    for target in plan.targets:
        if named[target.name] != target.out_features * (target.experts or 1):
            _refuse(model, target.weight, "not all of it")
        count, name = joined[name_of(target)], name_of(target)
        # PEFT joins gate and up to one adapter of twice the rank, which has to keep the scaling of each.
        ranks[name] = count * target.r, target.alpha * (math.sqrt(count) if plan.lora.use_rslora else count)
    return _PerExpertAdapter(files, tuple(modules), ranks, joined)


def _refuse(model: PreTrainedModel, weight: str, key: str) -> NoReturn:
    raise InputError(
        f"{ModelView(model).family.__name__}: its published files hold {weight} otherwise than as one matrix per "
        f"expert ({key}), so there are no per-expert names for it; leave --adapter-format out: readers of such models "
        "take PEFT's own layout",
        key="adapter.no-per-expert-names",
    )


@torch.no_grad()
def _export_adapter(
    state: OpenCheckpoint,
    model: PreTrainedModel,
    target: Path,
    values: StateReader,
    dtype: torch.dtype | None,
    adapter_format: AdapterFormat,
) -> SaveReport:
    """Write the adapter of a LoRA run.

    Args:
        model: On meta, with its adapters.
        values: Reads their values from `state`.
        dtype: None for the dtypes that they were trained in.
    """
    started = time.monotonic()
    directory, plan = target.absolute(), sharded(model).lora_plan
    assert plan is not None
    small = {
        name: read_small(state.directory, state.manifest, f"{ADAPTER}/{name}") for name in (CONFIG_FILE, BASE_FILE)
    }
    if adapter_format == "peft":
        files = file_tensors(ModelView(model).adapters, plan.targets, plan.replaced)
    else:
        adapter = _per_expert_adapter(model, plan)
        files = adapter.tensors | new_values(ModelView(model).adapters, plan.replaced)
        small[CONFIG_FILE] = adapter.config(json.loads(small[CONFIG_FILE]), plan)
    # Of what is beside a model's weights, what says something of the tokenizer or of generation.
    found = sidecar_files(state)
    beside = {name: found[name] for name in found if name != "config.json" and not name.endswith(".py")}
    layout, written = write_adapter(directory, files, small, CopiedFiles(beside), values, dtype)
    return SaveReport(
        directory=directory,
        files=(WEIGHTS_FILE,),
        tensors=len(files),
        dtype=dtype or next(lazy.dtype for lazy in files.values()),
        total_bytes=layout.size,
        bytes_written=written,
        seconds=time.monotonic() - started,
        kept=(),
        dropped=(),
        unread=unread_by_engines(model, plan, per_expert=adapter_format == "per-expert"),
    )
