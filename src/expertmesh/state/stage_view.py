"""Mark the tensors of a model of which this rank holds one pipeline stage with their placement.

A model that was split stores the full one on meta. Tensors of other stages are taken from there: they have a name, a
shape and a dtype, and this rank holds an empty part of them. `ModelView` (model_view.py) presents the full model.
Nothing here communicates.
"""

from collections.abc import Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn

from expertmesh.state.sharded_model import StageView, sharded

_Module = TypeVar("_Module", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """The location of a tensor of a model that was split into stages."""

    on_other_stage: bool = False
    """Only other stages hold it."""
    is_tied_replica: bool = False
    """Another stage also holds it, and owns it."""
    has_tied_replica: bool = False
    """This tensor, or one on another stage that is tied to it, is a tied replica."""
    is_first_rank: bool = False
    """This rank is the first of the ranks that hold the stage."""


_OTHER_STAGE = StagePlacement(on_other_stage=True)


def meta_twin(model: _Module) -> _Module:
    """Return a copy of `model` without values: parameters and buffers on meta, with the same ties."""
    memo: dict[int, object] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        # `deepcopy` treats entries of `memo` as already copied, so that it never copies a value.
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    return deepcopy(model, memo)


class MetaTwin:
    """The meta copy of a model, made at the first access. Code that runs or changes it must restore it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @cached_property
    def module(self) -> nn.Module:
        return meta_twin(self._model)


def placed_in(model: nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of the full model of a stage, each tensor marked with its placement.

    Args:
        own: The stage's state dict, with its parameters as they are.
    """
    view = sharded(model).stage_view
    assert view is not None
    full = dict(view.meta_model.state_dict(keep_vars=True))
    held = {id(full[name]): _place(tensor, _placement(view, name)) for name, tensor in own.items()}
    return {name: held.get(id(meta), _place(meta, _OTHER_STAGE)) for name, meta in full.items()}


def stage_names(model: nn.Module, names: Collection[str]) -> Iterator[str]:
    """Yield those of `names`, names of modules of the full model, that this rank's stage has, in order."""
    held = {name for name, _ in model.named_modules()}
    return (name for name in names if name in held)


def placement_of(tensor: Tensor) -> StagePlacement | None:
    """Return where `tensor` is; None for a tensor of a model that was never split."""
    placement = getattr(tensor, "_expertmesh_stage_placement", None)
    return placement if isinstance(placement, StagePlacement) else None


def is_on_other_stage(tensor: Tensor) -> bool:
    """Return whether only other stages hold `tensor`."""
    placement = placement_of(tensor)
    return placement is not None and placement.on_other_stage


def on_other_stage(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a placeholder on meta for a tensor that only other stages hold."""
    return _place(torch.empty(shape, dtype=dtype, device="meta"), _OTHER_STAGE)


def is_tied_replica(tensor: Tensor) -> bool:
    """Return whether another stage also holds `tensor`, and owns it."""
    placement = placement_of(tensor)
    return placement is not None and placement.is_tied_replica


def placed_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Mark `tensor` (an optimizer's state, for example) as located where `other` is, and return it."""
    placement = placement_of(other)
    return tensor if placement is None else _place(tensor, placement)


def _placement(view: StageView, name: str) -> StagePlacement:
    replica = name in view.tied_replicas
    return StagePlacement(
        is_tied_replica=replica,
        has_tied_replica=replica or name in view.tied_originals,
        is_first_rank=view.is_first_rank,
    )


def _place(tensor: Tensor, placement: StagePlacement) -> Tensor:
    tensor._expertmesh_stage_placement = placement  # type: ignore[attr-defined]
    return tensor
