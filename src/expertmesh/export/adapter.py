"""The adapter of a LoRA run's checkpoint as one file: as PEFT has it, or with keys for each expert.

For checkpoint.py.

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
    Part,
    file_tensors,
    is_parameter,
    name_of,
    published_parts,
)
from expertmesh.adapters.plan import AdapterPlan, plan_of
from expertmesh.adapters.save import unread_by_engines, write_adapter
from expertmesh.adapters.targets import Target
from expertmesh.checkpoint.read import SavedState
from expertmesh.checkpoint.small_files import ADAPTER, read_small
from expertmesh.config.errors import InputError
from expertmesh.export.stored_model import companion_files
from expertmesh.state.model_view import ModelView
from expertmesh.weights.companions import CopiedFiles
from expertmesh.weights.lazy import LazyTensor
from expertmesh.weights.mapping import StateTensor
from expertmesh.weights.save import SaveReport
from expertmesh.weights.write import StateReader


@dataclass(frozen=True, slots=True)
class PerExpertAdapter:
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


def per_expert_adapter(model: PreTrainedModel, plan: AdapterPlan) -> PerExpertAdapter:
    """Build the adapter with keys for each expert from the adapters of `model`, in the family's published layout.

    Raises `InputError` for a model whose files do not hold one matrix per expert (GPT-OSS and others with all experts
    of a layer in one tensor).
    """
    adapters, ranks, joined = ModelView(model).adapters, dict[str, tuple[int, float]](), Counter[str]()
    named, files, modules = Counter[str](), dict[str, LazyTensor](), dict[str, None]()
    for target, key, part in published_parts(model, plan.targets):
        if part is None:
            _refuse(model, target.weight, key)
        files |= zip(part.keys, _factors(adapters, target, part), strict=True)
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
    return PerExpertAdapter(files, tuple(modules), ranks, joined)


def _factors(adapters: Mapping[str, Tensor], target: Target, part: Part) -> tuple[LazyTensor, LazyTensor]:
    names = [f"{target.module}.{leaf}" for leaf in target.leaves]
    a, b = (LazyTensor.of(StateTensor(name, adapters[name])) for name in names)
    rows = slice(*part.rows)
    chosen = (a, b[rows]) if part.expert is None else (a[part.expert], b[part.expert, rows])
    assert all(isinstance(each, LazyTensor) for each in chosen)
    return chosen  # type: ignore[return-value]


def _refuse(model: PreTrainedModel, weight: str, key: str) -> NoReturn:
    raise InputError(
        f"{ModelView(model).family.__name__}: its published files hold {weight} otherwise than as one matrix per "
        f"expert ({key}), so there are no per-expert names for it; leave --adapter-format out: readers of such models "
        "take PEFT's own layout",
        key="adapter.no-per-expert-names",
    )


AdapterFormat = Literal["peft", "per-expert"]


@torch.no_grad()
def export_adapter(
    state: SavedState,
    model: PreTrainedModel,
    target: Path,
    values: StateReader,
    dtype: torch.dtype | None,
    adapter_format: AdapterFormat,
) -> SaveReport:
    """Write the adapter of a LoRA run: `model` on meta, with its adapters, and `values` to read theirs from `state`."""
    started = time.monotonic()
    directory, plan = target.absolute(), plan_of(model)
    assert plan is not None
    small = {
        name: read_small(state.directory, state.manifest, f"{ADAPTER}/{name}") for name in (CONFIG_FILE, BASE_FILE)
    }
    if adapter_format == "peft":
        files = file_tensors(ModelView(model).adapters, plan.targets)
    else:
        adapter = per_expert_adapter(model, plan)
        files = adapter.tensors
        small[CONFIG_FILE] = adapter.config(json.loads(small[CONFIG_FILE]), plan)
    # Of what is beside a model's weights, what says something of the tokenizer or of generation.
    found = companion_files(state)
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
