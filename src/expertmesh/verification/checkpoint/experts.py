"""Check each expert of a checkpoint: its hash, its norm, and whether it is dead or a copy of another expert.

For verify.py. Byte-identical experts in one layer are the sign that one rank's experts have overwritten another's. Only
one block of one expert is in memory at a time.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from expertmesh.adapters.plan import AdapterPlan, plan_of
from expertmesh.checkpoint.read import SavedState
from expertmesh.io.boxes import Box, blocks, full_box
from expertmesh.io.safetensors_reader import as_bytes
from expertmesh.state.model_view import ModelView
from expertmesh.weights.audit import HashedSlice
from expertmesh.weights.load import ExpertTensors, expert_tensors

_BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class VerifiedExperts:
    """The experts of one module; in a LoRA run, their adapters."""

    module: str
    """The name of the experts module."""
    layer: str
    """A short name for reports: the layer's number if that is unique, else the module."""
    slices: tuple[HashedSlice, ...]
    """The tensor slices of an expert, in the order in which they are hashed."""
    sha256: tuple[str, ...]
    """The hash of each expert over its `slices`, each row-major; independent of the layout."""
    norm: tuple[float, ...]
    """The norm of each expert over its `slices`."""
    filled: tuple[float, ...] | None
    """The share of nonzero elements in each expert's B in a LoRA run; else None."""


def look_at_experts(model: PreTrainedModel, stored: SavedState) -> Iterator[VerifiedExperts]:
    """Read all experts of `model` (on meta) from `stored`, or their adapters if the model has any.

    Raises:
        InputError: If the experts are not recognised.
    """
    plan = plan_of(model)
    view = ModelView(model)
    state = view.tensors if plan is None else view.adapters
    modules = expert_tensors(model) if plan is None else _adapters(plan)
    numbers = Counter(_number(tensors.module) for tensors in modules)
    for tensors in modules:
        number = _number(tensors.module)
        boxes = {
            name: [
                (tensors.rows(state[name], expert), *full_box(state[name].shape)[1:]) for expert in range(tensors.count)
            ]
            for name in tensors.names
        }
        looked = [_look_at(tensors, boxes, expert, stored) for expert in range(tensors.count)]
        yield VerifiedExperts(
            module=tensors.module,
            layer=f"layer {number}" if number is not None and numbers[number] == 1 else tensors.module,
            slices=tuple(HashedSlice.of(tensors, name, state[name]) for name in tensors.names),
            sha256=tuple(look.sha256 for look in looked),
            norm=tuple(look.norm for look in looked),
            filled=None if plan is None else tuple(look.filled for look in looked),
        )


def what_is_odd(modules: Sequence[VerifiedExperts]) -> Iterator[str]:
    """Yield a sentence for each dead expert and for each group of byte-identical experts."""
    for experts in modules:
        same: dict[str, list[int]] = {}
        for expert, (digest, norm) in enumerate(zip(experts.sha256, experts.norm, strict=True)):
            if norm == 0:
                yield f"expert {expert} of {experts.layer} is dead: all its weights are 0 ({experts.module})"
            else:
                same.setdefault(digest, []).append(expert)
        for twins in same.values():
            if len(twins) > 1:
                listed = " and ".join(f"expert {expert}" for expert in twins)
                yield f"{listed} of {experts.layer} are byte-identical ({experts.module})"


@dataclass(frozen=True, slots=True)
class _Look:
    """The figures of one expert."""

    sha256: str
    """The hash of its tensors."""
    norm: float
    """The norm of its tensors."""
    filled: float
    """The share of nonzero elements in all its B; 0 if it has none."""


def _look_at(tensors: ExpertTensors, boxes: dict[str, list[Box]], expert: int, stored: SavedState) -> _Look:
    digest, square, filled, places = hashlib.sha256(), 0.0, 0, 0
    for name in tensors.names:
        for part in blocks(boxes[name][expert], _BLOCK_ELEMENTS):
            values = stored.read(name, part)
            digest.update(as_bytes(values).numpy().data)
            square += float(values.double().square().sum())
            if name.endswith("lora_B"):
                filled, places = filled + int(values.count_nonzero()), places + values.numel()
    return _Look(digest.hexdigest(), math.sqrt(square), filled / max(places, 1))


def _adapters(plan: AdapterPlan) -> list[ExpertTensors]:
    """Return the adapter matrices A and B of each experts module."""
    leaves: dict[tuple[str, int], list[str]] = {}
    for target in plan.targets:
        if target.experts is not None:
            names = [f"{target.module}.{leaf}" for leaf in target.leaves]
            leaves.setdefault((target.module, target.experts), []).extend(names)
    return [ExpertTensors(module, count, tuple(names)) for (module, count), names in leaves.items()]


def _number(module: str) -> str | None:
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", module)
    return found[1] if found else None
