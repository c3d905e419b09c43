"""A model of which this rank holds one pipeline stage, seen as the full model: names, shapes and ties of all of it.

Files, checkpoints and audits are about full models and must not know how one was cut. So a cut model keeps the full one
on meta; tensors of other stages are taken from there and marked: they have a name, a shape and a dtype, and this rank
holds an empty part of them. For a model that was never cut all this is the model itself. Nothing here communicates.
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
    """Where a tensor of a cut model is.

    `on_other_stage`: only other stages hold it. `is_tied_replica`: another stage holds it as well and answers for it.
    `has_tied_replica`: this or another one is such a replica. `is_first_rank`: of those that hold the stage.
    """

    on_other_stage: bool = False
    is_tied_replica: bool = False
    has_tied_replica: bool = False
    is_first_rank: bool = False


_OTHER_STAGE = StagePlacement(on_other_stage=True)


def meta_twin(model: _Module) -> _Module:
    """A copy of `model`, without values: parameters and buffers on meta, ties kept."""
    memo: dict[int, object] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        # `deepcopy` takes what it is told has been copied already, so that no value ever is.
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    return deepcopy(model, memo)


class MetaTwin:
    """The twin on meta of a model, made when it is first needed. Whoever runs or changes it puts it back."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @cached_property
    def module(self) -> nn.Module:
        return meta_twin(self._model)


def is_cut(model: nn.Module) -> bool:
    """Whether this rank holds one of several pipeline stages of `model`."""
    return sharded(model).stage_view is not None


def full_model(model: nn.Module) -> nn.Module:
    """The uncut model, on meta if `model` is cut: for questions about its structure, never for its values."""
    view = sharded(model).stage_view
    return model if view is None else view.meta_model


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the whole model, in its order; tied tensors are one object under each of their names."""
    own = dict(model.state_dict(keep_vars=True))
    view = sharded(model).stage_view
    if view is None:
        return own
    full = dict(view.meta_model.state_dict(keep_vars=True))
    held = {id(full[name]): _place(tensor, _placement(view, name)) for name, tensor in own.items()}
    return {name: held.get(id(meta), _place(meta, _OTHER_STAGE)) for name, meta in full.items()}


def stage_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of this rank's stage by the names that they have in the whole model: the first, of tied ones."""
    if not is_cut(model):
        return dict(model.named_parameters())
    state = full_state(model)
    own = {id(parameter) for parameter in model.parameters()}
    return {name: state[name] for name, _ in full_model(model).named_parameters() if id(state[name]) in own}  # type: ignore[misc]


def stage_names(model: nn.Module, names: Collection[str]) -> Iterator[str]:
    """Those of `names`, of modules of the whole model, that this rank's stage has. In order."""
    held = {name for name, _ in model.named_modules()}
    return (name for name in names if name in held)


def placement_of(tensor: Tensor) -> StagePlacement | None:
    """None for a tensor of a model that was never cut."""
    placement = getattr(tensor, "_expertmesh_stage_placement", None)
    return placement if isinstance(placement, StagePlacement) else None


def is_on_other_stage(tensor: Tensor) -> bool:
    """Whether only other stages hold `tensor`."""
    placement = placement_of(tensor)
    return placement is not None and placement.on_other_stage


def on_other_stage(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Stands for a tensor that only other stages hold."""
    return _place(torch.empty(shape, dtype=dtype, device="meta"), _OTHER_STAGE)


def is_tied_replica(tensor: Tensor) -> bool:
    """Whether another stage holds `tensor` as well and answers for it."""
    placement = placement_of(tensor)
    return placement is not None and placement.is_tied_replica


def placed_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Mark `tensor` (an optimizer's, say) as being where `other` is; returns it."""
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
