"""Take routes from a batch and give out those that a forward chose, in full rows of the full model.

Hooks on the root work for every way to run a model: its own call, a loss, layers, stages. A rank's layers get its
positions alone (sequence.py). A *chooser* is the module whose code chooses: the block around the experts, or a router
where experts stand in a decoder block or sort their rows. While it runs with routes, each `topk` that takes k of all
experts gives the routes' experts and their scores as they are now. All that follows is the family's code: weights,
normalisation, scaling, gradients. `confirm_routes` proves it for each kind of chooser, without weights.

    B rows, s positions of a rank, T tokens, L MoE layers of the full model, E experts, K top-k, H hidden
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from expertmesh.anatomy import Anatomy, ExpertsSpec, is_inside, settings
from expertmesh.anatomy.expert_module import small_copy
from expertmesh.compat import parameter_slots
from expertmesh.config.errors import InputError
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.distributed.sequence_collectives import gather
from expertmesh.experts.lora_state import drop_adapters
from expertmesh.experts.micro_batch import Routing, routing
from expertmesh.experts.pairs import sorted_choice
from expertmesh.parallel.sequence import Batch, refuse_length, sequence_share
from expertmesh.state.model_view import attach, mesh_of, shard_plan_of, sharded
from expertmesh.state.patching import exchanged, replace_forward

_TOKENS = 7
_recording: ContextVar[tuple[nn.Module, list[torch.Tensor]] | None] = ContextVar("expertmesh_recording", default=None)


@contextmanager
def record_routes(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collect the experts that each forward of `model` chooses inside the block, with gradients or without.

        with em.record_routes(model) as recorded, torch.no_grad():
            model(**batch)
        loss = em.causal_lm_loss(model, {**batch, "routes": recorded[0]}, target_tokens=n)

    Yields:
        A list that gets one int32 tensor `[rows, positions, MoE layers, top-k]` for each forward; after `generate`,
        `torch.cat(recorded, dim=1)` has all positions. Padding has routes too: under cp and tp also the positions by
        which `causal_lm_loss` makes rows longer, which a batch may give back.

    Raises:
        InputError: The model was never parallelized, has pipeline stages, or chooses experts by other code than a
            `topk` of scores; a forward inside the block runs layer by layer.

    Collectives: every rank enters it; under cp and tp, one all-gather along each of them for each forward.
    """
    if mesh_of(model).layout.pp > 1:
        raise InputError(
            "record_routes: with parallel.pp a rank runs only layers of its stages; set parallel.pp to 1",
            key="layout.routes-not-recorded",
        )
    recorded: list[torch.Tensor] = []
    token = _recording.set((model, recorded))
    try:
        yield recorded
    finally:
        _recording.reset(token)


def install_routes(model: nn.Module, anatomy: Anatomy, held: Callable[[str], bool]) -> None:
    """Let forwards of a sharded model take `routes`, and record them. Comes last: it replaces forwards.

    `anatomy` is that of the full model; `held` returns whether this rank's pipeline stages have a module.
    """
    for number, spec in enumerate(anatomy.experts):
        if held(spec.name):
            chooser = model.get_submodule(chooser_of(anatomy, spec))
            replace_forward(chooser, partial(routed, chooser.forward, spec, number))
    model.register_forward_pre_hook(_enter, with_kwargs=True)
    model.register_forward_hook(_leave, always_call=True)


def refuse_routes(model: nn.Module, batches: Sequence[Batch]) -> None:
    """Raise `InputError` on all ranks if the routes of a batch on one of them are wrong.

    Collectives: every rank calls it; one all-reduce of an integer on the default group if the batches have routes,
    which all ranks' have or none's.
    """
    given = [batch for batch in batches if batch.get("routes") is not None]
    if given:
        # Another rank's routes may be the wrong ones: all ranks raise, or the others would hang in the forward.
        with raise_on_all_ranks("reading routes"):
            for batch in given:
                _refuse(model, batch["routes"], tuple(batch["input_ids"].shape[:2]))


def _refuse(model: nn.Module, routes: torch.Tensor, rows: tuple[int, ...]) -> None:
    """Raise `InputError` unless `routes` are int `[B, S, L, K]`, each token's experts different, or all -1."""
    experts = shard_plan_of(model).anatomy.experts
    wanted, last = (*rows, len(experts), experts[0].top_k), experts[0].num_experts - 1
    if tuple(routes.shape) != wanted or routes.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"routes {tuple(routes.shape)} {routes.dtype} of a batch do not fit input_ids {rows}; give int32 {wanted}: "
            "rows, positions, MoE layers, top-k",
            key="data.batch-shape",
        )
    order = routes.sort(-1).values
    wrong = (order[..., 1:] == order[..., :-1]) & (order[..., 1:] >= 0) | (order[..., 1:] >= 0) & (order[..., :1] < 0)
    wrong = wrong.any(-1) | (order[..., 0] < -1) | (order[..., -1] > last)
    # The host waits here, once.
    for row, position, layer in wrong.nonzero()[:1].tolist():
        raise InputError(
            f"routes of row {row}, position {position}, MoE layer {layer} are {routes[row, position, layer].tolist()}; "
            f"give {wanted[-1]} different experts from 0 to {last}, or -1 for all of them",
            key="data.routes",
        )


def _enter(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take `routes` out of the arguments of a forward, and let its routers follow them; a pre-hook of the root."""
    recording = _recording.get()
    recorded = recording[1] if recording is not None and recording[0] is model else None
    routes, others = kwargs.get("routes"), {key: value for key, value in kwargs.items() if key != "routes"}
    if routes is None and recorded is None:
        return args, others
    if not sharded(model).follows_routes:  # proven at the first use
        plan = shard_plan_of(model)
        confirm_routes(plan.view.meta, plan.anatomy)
        attach(model, follows_routes=True)
    ids = next(x for x in (others.get("input_ids"), others.get("inputs_embeds"), *args) if x is not None)
    if routes is not None:
        share = sequence_share(model)
        if sharded(model).pipeline is None:  # with stages, what runs them has compared the ranks
            refuse_routes(model, [{"input_ids": ids, "routes": routes}])
        refuse_length(ids.shape[1], share)
        routes = share.local(routes, 1).flatten(0, 1).to(mesh_of(model).device)
    routing.set(Routing(len(ids), routes, recorded))
    return args, others


def _leave(model: nn.Module, args: Any, output: Any) -> None:
    """Give out what a forward has chosen; a hook of the root, called after an error as well."""
    now = routing.get()
    routing.set(None)
    if output is None or now is None or now.recorded is None:
        return
    experts = shard_plan_of(model).anatomy.experts
    if len(now.chosen) < len(experts):
        raise InputError(
            f"record_routes: a forward ran {len(now.chosen)} of {len(experts)} MoE layers; accumulate by_micro_batch",
            key="layout.routes-not-recorded",
        )
    chosen = [now.chosen[number] for number in range(len(experts))]
    chosen_BsLK = torch.stack(chosen, dim=1).unflatten(0, (now.rows, -1))
    share, dense = sequence_share(model), mesh_of(model).dense
    for axis, size in (("tp", share.tp), ("cp", share.cp)):
        if size > 1:
            chosen_BsLK = gather(chosen_BsLK, 1, dense.get_group(axis))
    now.recorded.append(chosen_BsLK)


class _Choice(TorchFunctionMode):
    """Replaces and records the choice of one MoE layer."""

    def __init__(self, spec: ExpertsSpec, number: int, now: Routing) -> None:
        super().__init__()
        self._spec, self._number, self._now = spec, number, now

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = self._topk if func is torch.topk or func is torch.Tensor.topk else func
        return run(*args, **(kwargs or {}))

    def _topk(self, input: torch.Tensor, k: int, dim: int = -1, *flags: Any, **options: Any) -> Any:
        """Run `torch.topk`; where it chooses experts, give the routes' experts and their scores."""
        experts, routes = self._spec.num_experts, self._now.routes_TLK
        # A choice of groups, or inside of them, is among fewer.
        if dim not in (-1, input.dim() - 1) or input.shape[-1] != experts or k != self._spec.top_k:
            return torch.topk(input, k, dim, *flags, **options)
        # Also with routes: activation checkpointing records each call. Values come from the gather, with its gradient.
        with torch.no_grad():
            index = torch.topk(input, k, dim, *flags, **options).indices
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


def routed(forward: Callable[..., Any], spec: ExpertsSpec, number: int, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of the chooser of MoE layer `number`, which replays and records `routing`."""
    now = routing.get()
    with nullcontext() if now is None else _Choice(spec, number, now):
        return forward(*args, **kwargs)


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
