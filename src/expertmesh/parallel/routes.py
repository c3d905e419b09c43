"""Take routes from a batch and hand out those that a forward chose, in whole rows of the full model.

The hooks are on the root, so they work for every way to run a model: its own call, a loss, layers, stages. Only a
rank's positions reach its layers (sequence.py). Numbers of experts and of MoE layers are those of the full model.

    B rows, S positions of a full row, a rank holds s of them; L MoE layers, E experts, K top-k
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from expertmesh.anatomy import Anatomy
from expertmesh.config.errors import InputError
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.distributed.sequence_collectives import gather
from expertmesh.experts.routes import Routing, follow_routes, routing
from expertmesh.introspection.routes_proof import confirm_routes
from expertmesh.parallel.pipeline import pipeline_of
from expertmesh.parallel.sequence import Batch, refuse_length, sequence_share
from expertmesh.state.model_view import attach, mesh_of, sharded

_recording: ContextVar[tuple[nn.Module, list[torch.Tensor]] | None] = ContextVar("expertmesh_record", default=None)


@contextmanager
def record_routes(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collect the experts that each forward of `model` chooses inside the block, with gradients or without.

        with em.record_routes(model) as recorded, torch.no_grad():
            model(**batch)
        loss = em.causal_lm_loss(model, {**batch, "routes": recorded[0]}, target_tokens=n)

    Yields:
        A list that gets one int32 tensor `[rows, positions, MoE layers, top-k]` for each forward; after `generate`,
        `torch.cat(recorded, dim=1)` has all positions. Padding has routes too: under cp and tp also the positions by
        which `causal_lm_loss` makes rows longer, which a batch may give back. A forward that replays routes records
        what was used.

    Raises:
        InputError: The model was never parallelized, has pipeline stages, or chooses experts by other code than a
            `topk` of scores; a forward in it runs layer by layer.

    Collectives: every rank enters it; under cp and tp, one all-gather along each of them for each forward.
    """
    if mesh_of(model).layout.pp > 1:
        raise _not_recorded("parallel.pp: a rank runs the layers of its stages alone; set parallel.pp to 1")
    _confirm(model)
    recorded: list[torch.Tensor] = []
    token = _recording.set((model, recorded))
    try:
        yield recorded
    finally:
        _recording.reset(token)


def install_routes(model: nn.Module, anatomy: Anatomy, held: Callable[[str], bool]) -> None:
    """Let forwards of a sharded model take `routes`, and record them. Comes last: it replaces forwards.

    Args:
        anatomy: The anatomy of the full model.
        held: Returns whether this rank's pipeline stages have a module.

    Collectives: none.
    """
    follow_routes(model, anatomy, held)
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
                _refuse(model, batch["routes"], tuple(batch["input_ids"].shape))


def _refuse(model: nn.Module, routes: Any, rows: tuple[int, ...]) -> None:
    experts = sharded(model).shard_plan.anatomy.experts
    wanted, spec = (*rows, len(experts), experts[0].top_k), experts[0]
    shape = tuple(routes.shape)
    if shape != wanted or routes.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"routes {shape} {routes.dtype} of a batch do not fit input_ids {rows}; give int32 {wanted}: rows, "
            "positions, MoE layers, top-k",
            key="data.batch-shape",
        )
    order = routes.sort(-1).values
    twice = (order[..., 1:] == order[..., :-1]) & (order[..., 1:] >= 0)
    wrong = (routes < -1) | (routes >= spec.num_experts) | ((routes < 0) != (routes[..., :1] < 0))
    # The host waits here once, for all of it.
    places = (wrong.any(-1) | twice.any(-1)).nonzero()[:1].tolist()
    for row, position, layer in places:
        raise InputError(
            f"routes of row {row}, position {position}, MoE layer {layer} are {routes[row, position, layer].tolist()}; "
            f"give {spec.top_k} different experts from 0 to {spec.num_experts - 1}, or -1 for all of them",
            key="data.routes",
        )


def _confirm(model: nn.Module) -> None:
    """Raise `InputError` for a family that cannot replay; proven at the first use."""
    if not sharded(model).follows_routes:
        plan = sharded(model).shard_plan
        confirm_routes(plan.view.meta, plan.anatomy)
        attach(model, follows_routes=True)


def _enter(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take `routes` out of the arguments of a forward, and let its routers follow them; a pre-hook of the root."""
    recording = _recording.get()
    records = recording is not None and recording[0] is model
    routes, others = kwargs.get("routes"), {key: value for key, value in kwargs.items() if key != "routes"}
    if routes is None and not records:
        return args, others
    _confirm(model)
    # A token has one place in either: embeddings have a dim more.
    ids = next(x for x in (others.get("input_ids"), others.get("inputs_embeds"), *args) if x is not None)
    routes_TLK = None
    if routes is not None:
        share = sequence_share(model)
        if pipeline_of(model) is None:  # with stages, what runs them has compared the ranks
            refuse_routes(model, [{"input_ids": ids[..., 0] if ids.is_floating_point() else ids, "routes": routes}])
        refuse_length(ids.shape[1], share)
        routes_TLK = share.own(routes, 1).flatten(0, 1).to(mesh_of(model).device)
    routing.set(Routing(len(ids), routes_TLK, {} if records else None))
    return args, others


def _leave(model: nn.Module, args: Any, output: Any) -> None:
    """Give out what a forward has chosen; a hook of the root, called after an error as well."""
    now, recording = routing.get(), _recording.get()
    routing.set(None)
    if output is None or recording is None or recording[0] is not model or now is None or now.chosen is None:
        return
    layers = range(len(sharded(model).shard_plan.anatomy.experts))
    if set(now.chosen) != set(layers):
        raise _not_recorded(
            f"record_routes: a forward ran {len(now.chosen)} of {len(layers)} MoE layers; accumulate by_micro_batch"
        )
    chosen_BsLK = torch.stack([now.chosen[layer] for layer in layers], dim=1).unflatten(0, (now.rows, -1))
    share, dense = sequence_share(model), mesh_of(model).dense
    for axis, size in (("tp", share.tp), ("cp", share.cp)):
        if size > 1:
            chosen_BsLK = gather(chosen_BsLK, 1, dense.get_group(axis))
    recording[1].append(chosen_BsLK)


def _not_recorded(why: str) -> InputError:
    return InputError(why, key="layout.routes-not-recorded")
