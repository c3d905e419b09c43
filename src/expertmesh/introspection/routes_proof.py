"""Prove that the experts of a batch's routes are those that a family computes, with weights from their scores.

A family may choose by other code than a `topk` of scores, or take the weights of experts outside of its own groups from
scores that it has masked. So one chooser of each kind is copied, without its experts, and runs on random tokens with
random routes: its experts must be called with these, each with a weight. It needs no weights and does not communicate.

    T tokens, E experts, K top-k, H hidden
"""

from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import nn

from expertmesh.anatomy import Anatomy, ExpertsSpec, is_inside, settings
from expertmesh.anatomy.expert_module import small_copy
from expertmesh.compat import parameter_slots
from expertmesh.config.errors import InputError
from expertmesh.experts.lora_state import drop_adapters
from expertmesh.experts.pairs import sorted_choice
from expertmesh.experts.routes import Choice, Routing, chooser_of
from expertmesh.state.patching import exchanged, replace_forward

_TOKENS = 7


def confirm_routes(model: nn.Module, anatomy: Anatomy) -> None:
    """Raise `InputError`, naming the module, if a `model` on meta does not compute the experts that routes choose."""
    family = model.config.model_type  # type: ignore[union-attr]
    proven = set()
    for spec in anatomy.experts:
        name = chooser_of(anatomy, spec)
        kind = settings(model.get_submodule(name))
        if kind in proven:
            continue
        proven.add(kind)
        try:
            reason = None if _follows(model, anatomy, spec, name) else "do not follow a choice that is given"
        except Exception as cause:
            # Code of another project, at a size it was not written for: any exception means that nothing is proven.
            reason = f"cannot be run on a copy ({cause}), so it is not known how they are chosen"
        if reason is not None or spec.top_k != anatomy.experts[0].top_k:
            raise InputError(
                f"routes: {family}: the experts of {name} {reason or 'are another number for each token than before'}, "
                "so routes can be neither recorded nor replayed; leave routes out",
                key="model.routes-unsupported",
            )


class _Reached(Exception):
    """Experts were called; carries their arguments."""


def _follows(model: nn.Module, anatomy: Anatomy, spec: ExpertsSpec, name: str) -> bool:
    """Return whether every token's experts, and no others, are those of random routes and have weights."""
    assert spec.top_k is not None
    generator, chooser = torch.Generator().manual_seed(0), model.get_submodule(name)
    inside, config = is_inside(spec.name, name), model.config.get_text_config()  # type: ignore[union-attr, operator]
    shared = [part for part in anatomy.shared_experts if is_inside(part, name)]
    with ExitStack() as stack:
        # They may be large, and what they compute is not needed.
        for part in [*shared, *([spec.name] if inside else ())]:
            for slots in map(parameter_slots, model.get_submodule(part).modules()):
                stack.enter_context(exchanged(slots, dict.fromkeys(slots)))
        copy = small_copy(chooser, {}, generator).float().eval()
    for module in copy.modules():
        drop_adapters(module)
    for part in shared:
        replace_forward(copy.get_submodule(part.removeprefix(f"{name}.")), lambda hidden, *_: torch.zeros_like(hidden))
    if inside:
        replace_forward(copy.get_submodule(spec.name.removeprefix(f"{name}.")), _reached)
    routes_TK = torch.rand(_TOKENS, spec.num_experts, generator=generator).argsort(-1)[:, : spec.top_k]
    hidden_TH = torch.randn(_TOKENS, getattr(config, "hidden_size", spec.hidden_size), generator=generator)
    with torch.no_grad(), Choice(spec, 0, Routing(1, routes_TK[:, None])):
        try:
            given = copy(hidden_TH.unsqueeze(0) if inside else hidden_TH)
        except _Reached as reached:
            given = reached.args
    wanted_TE = torch.zeros(_TOKENS, spec.num_experts, dtype=torch.bool).scatter_(1, routes_TK, True)
    return torch.equal(_weighted(spec, given), wanted_TE)


def _reached(*args: Any, **kwargs: Any) -> NoReturn:
    raise _Reached(*args, *kwargs.values())


def _weighted(spec: ExpertsSpec, given: tuple[Any, ...]) -> torch.Tensor:
    """Return where a token has a weight for an expert, bool `[T, E]`, from what experts get or a router returns."""
    if spec.call == "dense":
        rows_ETH: torch.Tensor = given[0].view(spec.num_experts, _TOKENS, -1)
        return rows_ETH.ne(0).any(-1).T
    if spec.call == "sorted":
        order_P, _, weight_P, counts, *_ = given
        index_TK, weight_TK = sorted_choice(order_P, weight_P, counts, _TOKENS)
    else:
        # A router may return its scores as well, in any order.
        index_TK = next(x for x in given if not x.is_floating_point())
        weight_TK = next(x for x in given if x.is_floating_point() and x.shape == index_TK.shape)
    index_TK, weight_TK = index_TK.reshape(_TOKENS, -1), weight_TK.reshape(_TOKENS, -1)
    return weight_TK.new_zeros(_TOKENS, spec.num_experts).scatter(1, index_TK, weight_TK).ne(0)
