"""Replay or record which experts tokens choose.

A chooser is the module whose code chooses: the block around the experts, or a router where experts stand in a decoder
block or sort their rows. While it runs with routes, every `topk` that takes k of all experts gives the routes' experts,
and their scores as they are now. All that follows is the family's code: weights, normalisation, scaling, gradients.
introspection/routes_proof.py proves it for each kind of chooser.

Routes belong to a micro-batch. A context holds them while its forward runs, and again while a block is recomputed.

    T tokens, L MoE layers of the full model, E experts, K top-k
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from expertmesh.anatomy import Anatomy, ExpertsSpec
from expertmesh.config.errors import InputError
from expertmesh.state.patching import replace_forward


@dataclass(eq=False, slots=True)
class Routing:
    """The routes of one forward."""

    rows: int
    """Rows of the micro-batch."""
    routes_TLK: torch.Tensor | None
    """Experts to replay, on the device of the model; -1 where the router chooses. None: it chooses everywhere."""
    chosen: dict[int, torch.Tensor] | None = None
    """The experts chosen, `[T, K]` int32 by number of the MoE layer; None if nobody records them."""


routing: ContextVar[Routing | None] = ContextVar("expertmesh_routing", default=None)
"""The routes that forwards replay or record now."""


class Choice(TorchFunctionMode):
    """Replaces and records the choices of one MoE layer."""

    def __init__(self, spec: ExpertsSpec, number: int, now: Routing) -> None:
        super().__init__()
        self._spec, self._number, self._now = spec, number, now

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (func is torch.topk or func is torch.Tensor.topk) and self._chooses(*args, **kwargs):
            return self._choose(func, args, kwargs)
        return func(*args, **kwargs)

    def _chooses(self, input: torch.Tensor, k: int, dim: int = -1, *rest: Any, **options: Any) -> bool:
        """Return whether a call of `topk` chooses experts. Groups of experts are fewer, and so are their members."""
        last = dim in (-1, input.dim() - 1)
        return last and input.shape[-1] == self._spec.num_experts and k == self._spec.top_k

    def _choose(self, func: Any, args: Any, kwargs: Any) -> Any:
        scores = args[0] if args else kwargs["input"]
        if self._now.routes_TLK is None:
            result = func(*args, **kwargs)
        else:
            if len(self._now.routes_TLK) * scores.shape[-1] != scores.numel():
                raise InputError(
                    f"routes: {self._spec.name} gets {scores.numel() // scores.shape[-1]} of a micro-batch's "
                    f"{len(self._now.routes_TLK)} tokens, so that it is not known which; leave routes out",
                    key="model.routes-unsupported",
                )
            # Not only where routes have -1: activation checkpointing records each call of topk. Not values: their
            # gradient is that of the gather.
            with torch.no_grad():
                index = func(*args, **kwargs).indices
            route = self._now.routes_TLK[:, self._number].to(index.dtype).view_as(index)
            index = torch.where(route >= 0, route, index)
            result = torch.return_types.topk((torch.gather(scores, -1, index), index))
        if self._now.chosen is not None:
            # A block may choose among a group that has all experts first: the last choice counts.
            self._now.chosen[self._number] = result.indices.detach().reshape(-1, self._spec.top_k).to(torch.int32)
        return result


def chooser_of(anatomy: Anatomy, spec: ExpertsSpec) -> str:
    """Return the name of the module that chooses the experts of `spec`."""
    if spec.router is not None:
        return f"{spec.name}.{spec.router}"
    parent = spec.name.rpartition(".")[0]
    routers = [name for name in anatomy.routers if name.rpartition(".")[0] == parent]
    # Attention in a decoder block may use topk as well.
    return routers[0] if parent in anatomy.blocks and len(routers) == 1 else parent


def follow_routes(model: nn.Module, anatomy: Anatomy, held: Callable[[str], bool]) -> None:
    """Make the choosers of `model` replay and record `routing`.

    Args:
        anatomy: That of the full model, whose MoE layers are counted.
        held: Returns whether this rank's pipeline stages have a module.
    """
    for number, spec in enumerate(anatomy.experts):
        if not held(spec.name):
            continue
        chooser = model.get_submodule(chooser_of(anatomy, spec))
        replace_forward(chooser, partial(_forward, chooser.forward, spec, number))


def _forward(own: Callable[..., Any], spec: ExpertsSpec, number: int, *args: Any, **kwargs: Any) -> Any:
    now = routing.get()
    if now is None:
        return own(*args, **kwargs)
    with Choice(spec, number, now):
        return own(*args, **kwargs)
