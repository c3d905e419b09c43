"""Replay or record which experts tokens choose.

A chooser is the module whose code chooses: the block around the experts, or a router where experts stand in a decoder
block or sort their rows. While it runs with routes, each `topk` that takes k of all experts gives the routes' experts
and their scores as they are now. All that follows is the family's code: weights, normalisation, scaling, gradients.
`confirm_routes` proves it for each kind of chooser, without weights. Nothing here communicates.

    T tokens, L MoE layers of the full model, E experts, K top-k, H hidden
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from expertmesh.anatomy import Anatomy, ExpertsSpec, is_inside, settings
from expertmesh.anatomy.expert_module import small_copy
from expertmesh.compat import parameter_slots
from expertmesh.config.errors import InputError
from expertmesh.experts.lora_state import drop_adapters
from expertmesh.experts.pairs import sorted_choice
from expertmesh.state.patching import exchanged, replace_forward

_TOKENS = 7


@dataclass(eq=False, slots=True)
class Routing:
    """The routes of one forward; a recomputed block gets them again."""

    rows: int
    """Rows of the micro-batch."""
    routes_TLK: torch.Tensor | None
    """Experts to replay, on the device of the model; -1 where the router chooses. None: it chooses everywhere."""
    recorded: list[torch.Tensor] | None = None
    """The place for what the forward chooses; None if nobody records it."""
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)
    """The experts chosen, `[T, K]` int32 by number of the MoE layer."""


routing: ContextVar[Routing | None] = ContextVar("expertmesh_routing", default=None)
"""The routes that forwards replay or record now."""


class _Choice(TorchFunctionMode):
    """Replaces and records the choice of one MoE layer."""

    def __init__(self, spec: ExpertsSpec, number: int, now: Routing) -> None:
        super().__init__()
        self._spec, self._number, self._now = spec, number, now

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = self._topk if func is torch.topk or func is torch.Tensor.topk else func
        return run(*args, **(kwargs or {}))

    def _topk(self, input: torch.Tensor, k: int, dim: int = -1, *rest: Any, **options: Any) -> Any:
        experts, routes = self._spec.num_experts, self._now.routes_TLK
        # A choice of groups, or inside of them, is among fewer.
        if dim not in (-1, input.dim() - 1) or input.shape[-1] != experts or k != self._spec.top_k:
            return torch.topk(input, k, dim, *rest, **options)
        # Also with routes: activation checkpointing records each call. Values come from the gather, with its gradient.
        with torch.no_grad():
            index = torch.topk(input, k, dim, *rest, **options).indices
        if routes is not None:
            tokens = input.numel() // experts
            if tokens != len(routes):
                raise InputError(
                    f"routes: {self._spec.name} gets {tokens} of a micro-batch's {len(routes)} tokens, so that it is "
                    "not known which; leave routes out",
                    key="model.routes-unsupported",
                )
            route = routes[:, self._number].to(index.dtype).view_as(index)
            index = torch.where(route >= 0, route, index)
        # A block may first take two of a group, if that holds all experts: the last choice counts.
        self._now.chosen[self._number] = index.reshape(-1, k).to(torch.int32)
        return torch.return_types.topk((torch.gather(input, -1, index), index))


def chooser_of(anatomy: Anatomy, spec: ExpertsSpec) -> str:
    """Return the name of the module that chooses the experts of `spec`."""
    parent = spec.name.rpartition(".")[0]
    if spec.router is not None:
        return f"{spec.name}.{spec.router}"
    # Attention in a decoder block may use topk as well.
    routers = [name for name in anatomy.routers if name.rpartition(".")[0] == parent and parent in anatomy.blocks]
    return routers[0] if len(routers) == 1 else parent


def routed(own: Callable[..., Any], spec: ExpertsSpec, number: int, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of the chooser of MoE layer `number`, which replays and records `routing`."""
    now = routing.get()
    if now is None:
        return own(*args, **kwargs)
    with _Choice(spec, number, now):
        return own(*args, **kwargs)


def confirm_routes(model: nn.Module, anatomy: Anatomy) -> None:
    """Raise `InputError`, naming the module, if a `model` on meta does not compute the experts that routes choose.

    A family may choose by other code than a `topk` of scores, or weigh experts outside of its own groups by scores that
    it has masked.
    """
    choosers = {chooser_of(anatomy, spec): spec for spec in anatomy.experts}
    for name in {settings(model.get_submodule(name)): name for name in reversed(choosers)}.values():
        spec, follows = choosers[name], False
        with suppress(Exception):  # code of another project, called as it may not be: then nothing is proven
            follows = spec.top_k == anatomy.experts[0].top_k and _follows(model, anatomy, name, spec)
        if not follows:
            raise InputError(
                f"routes: {type(model).__name__} is not known to take a choice of experts in {name}; leave routes out",
                key="model.routes-unsupported",
            )


def _follows(model: nn.Module, anatomy: Anatomy, name: str, spec: ExpertsSpec) -> bool:
    """Return whether every token's experts, and no others, are those of random routes and have weights."""
    generator, config, given = torch.Generator().manual_seed(0), model.config, list[Any]()
    shared, inside = [part for part in anatomy.shared_experts if is_inside(part, name)], is_inside(spec.name, name)
    with ExitStack() as stack:
        # Experts may be large, and what they compute is not needed.
        for part in [*shared, *([spec.name] if inside else ())]:
            for slots in map(parameter_slots, model.get_submodule(part).modules()):
                stack.enter_context(exchanged(slots, dict.fromkeys(slots)))
        copy = small_copy(model.get_submodule(name), {}, generator).float().eval()
    for module in copy.modules():
        drop_adapters(module)
    for part in shared:
        replace_forward(copy.get_submodule(part.removeprefix(f"{name}.")), lambda hidden, *_: torch.zeros_like(hidden))
    if inside:
        experts = copy.get_submodule(spec.name.removeprefix(f"{name}."))
        replace_forward(experts, lambda *args, **kwargs: given.append((*args, *kwargs.values())))
    routes_TK = torch.rand(_TOKENS, spec.num_experts, generator=generator).argsort(-1)[:, : spec.top_k]
    width = getattr(config.get_text_config(), "hidden_size", spec.hidden_size)  # type: ignore[union-attr, operator]
    hidden_TH = torch.randn(_TOKENS, width, generator=generator)
    # A block fails behind its experts, which give nothing.
    with torch.no_grad(), suppress(Exception), _Choice(spec, 0, Routing(1, routes_TK[:, None])):
        given.append(copy(hidden_TH.unsqueeze(0) if inside else hidden_TH))
    wanted_TE = torch.zeros(_TOKENS, spec.num_experts, dtype=torch.bool).scatter_(1, routes_TK, True)
    return torch.equal(_weights(spec, given[0]).ne(0), wanted_TE)


def _weights(spec: ExpertsSpec, given: tuple[Any, ...]) -> torch.Tensor:
    """Return a number for each token and expert, zero without a weight, of what experts get or a router returns."""
    if spec.call == "dense":
        return given[0].view(spec.num_experts, _TOKENS, -1).abs().sum(-1).T  # type: ignore[no-any-return]
    if spec.call == "sorted":
        index_TK, weight_TK = sorted_choice(given[0], given[2], given[3], _TOKENS)
    else:
        # A router may return its scores as well, in any order.
        index_TK = next(x for x in given if not x.is_floating_point())
        weight_TK = next(x for x in given if x.is_floating_point() and x.shape == index_TK.shape)
    index_TK, weight_TK = index_TK.reshape(_TOKENS, -1), weight_TK.reshape(_TOKENS, -1)
    return weight_TK.new_zeros(_TOKENS, spec.num_experts).scatter(1, index_TK, weight_TK)
