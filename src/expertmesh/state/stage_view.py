"""A model of which this rank holds one pipeline stage, seen as the whole model: names, shapes and ties of all of it.

Files, checkpoints and audits are about whole models and must not know how one was cut. So a cut model keeps a twin on
meta, uncut; tensors of other stages are the twin's, marked as elsewhere: they have a name, a shape and a dtype, and
every rank of another stage holds an empty part of them. For a model that was never cut all this is the model itself.
Nothing here communicates.
"""

from collections.abc import Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

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


@dataclass(frozen=True, slots=True)
class StageView:
    """What a cut model remembers: its twin on meta; the names of tensors that this stage shares with an earlier one
    (`copies`) or with a later one (`copied`); whether this rank is the first of its stage.
    """

    twin: nn.Module
    copies: frozenset[str]
    copied: frozenset[str]
    is_first_rank: bool


def meta_twin(model: _Module) -> _Module:
    """A copy of `model`, without values: parameters and buffers on meta, ties kept."""
    memo: dict[int, object] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        # `deepcopy` takes what it is told has been copied already, so that no value ever is.
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    return deepcopy(model, memo)


def attach_stage_view(model: nn.Module, whole: StageView) -> None:
    """Remember on `model`, which is being cut, what it was."""
    # Not a child: the twin has no place in the model's own modules.
    object.__setattr__(model, "_expertmesh_whole", whole)


def is_cut(model: nn.Module) -> bool:
    """Whether this rank holds one of several pipeline stages of `model`."""
    return isinstance(getattr(model, "_expertmesh_whole", None), StageView)


def full_model(model: nn.Module) -> nn.Module:
    """The uncut model, on meta if `model` is cut: for questions about its structure, never for its values."""
    whole = getattr(model, "_expertmesh_whole", None)
    return whole.twin if isinstance(whole, StageView) else model


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the whole model, in its order; tied tensors are one object under each of their names."""
    own = dict(model.state_dict(keep_vars=True))
    whole = getattr(model, "_expertmesh_whole", None)
    if not isinstance(whole, StageView):
        return own
    twins = dict(whole.twin.state_dict(keep_vars=True))
    held = {id(twins[name]): _placed(tensor, whole, name) for name, tensor in own.items()}
    return {name: held.get(id(twin), _elsewhere(twin)) for name, twin in twins.items()}


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
    place = getattr(tensor, "_expertmesh_place", None)
    return place if isinstance(place, StagePlacement) else None


def is_on_other_stage(tensor: Tensor) -> bool:
    """Whether only other stages hold `tensor`."""
    place = placement_of(tensor)
    return place is not None and place.on_other_stage


def on_other_stage(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Stands for a tensor that only other stages hold."""
    return _elsewhere(torch.empty(shape, dtype=dtype, device="meta"))


def is_tied_replica(tensor: Tensor) -> bool:
    """Whether another stage holds `tensor` as well and answers for it."""
    place = placement_of(tensor)
    return place is not None and place.is_tied_replica


def placed_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Mark `tensor` (an optimizer's, say) as being where `other` is; returns it."""
    place = placement_of(other)
    if place is not None:
        tensor._expertmesh_place = place  # type: ignore[attr-defined]
    return tensor


def _placed(tensor: Tensor, whole: StageView, name: str) -> Tensor:
    replica = name in whole.copies
    place = StagePlacement(
        is_tied_replica=replica, has_tied_replica=replica or name in whole.copied, is_first_rank=whole.is_first_rank
    )
    tensor._expertmesh_place = place  # type: ignore[attr-defined]
    return tensor


def _elsewhere(twin: Tensor) -> Tensor:
    twin._expertmesh_place = StagePlacement(on_other_stage=True)  # type: ignore[attr-defined]
    return twin
