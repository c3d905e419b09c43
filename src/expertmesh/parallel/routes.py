"""Take routes from a batch and give out those that a forward chose, in whole rows of the full model.

The hooks are on the root, so they work for every way to run a model: its own call, a loss, layers, stages. A rank's
layers get its positions alone (sequence.py).

    B rows, s positions of a rank, L MoE layers of the full model, K top-k
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn

from expertmesh.anatomy import Anatomy
from expertmesh.config.errors import InputError
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.distributed.sequence_collectives import gather
from expertmesh.experts.routes import Routing, chooser_of, confirm_routes, routed, routing
from expertmesh.parallel.pipeline import pipeline_of
from expertmesh.parallel.sequence import Batch, refuse_length, sequence_share
from expertmesh.state.model_view import attach, mesh_of, sharded
from expertmesh.state.patching import replace_forward

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
        with raise_on_all_ranks("reading routes"):
            for batch in given:
                _refuse(model, batch["routes"], tuple(batch["input_ids"].shape[:2]))


def _refuse(model: nn.Module, routes: torch.Tensor, rows: tuple[int, ...]) -> None:
    experts = sharded(model).shard_plan.anatomy.experts
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
        plan = sharded(model).shard_plan
        confirm_routes(plan.view.meta, plan.anatomy)
        attach(model, follows_routes=True)
    ids = next(x for x in (others.get("input_ids"), others.get("inputs_embeds"), *args) if x is not None)
    if routes is not None:
        share = sequence_share(model)
        if pipeline_of(model) is None:  # with stages, what runs them has compared the ranks
            refuse_routes(model, [{"input_ids": ids, "routes": routes}])
        refuse_length(ids.shape[1], share)
        routes = share.own(routes, 1).flatten(0, 1).to(mesh_of(model).device)
    routing.set(Routing(len(ids), routes, recorded))
    return args, others


def _leave(model: nn.Module, args: Any, output: Any) -> None:
    """Give out what a forward has chosen; a hook of the root, called after an error as well."""
    now = routing.get()
    routing.set(None)
    if output is None or now is None or now.recorded is None:
        return
    experts = sharded(model).shard_plan.anatomy.experts
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
