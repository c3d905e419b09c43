"""Run forward and backward over the micro-batches of one optimizer step, in every layout.

The trainer calls it, and so do training loops of users. A step without pipeline stages, as `run_step` takes it:

1. `router_losses` (router_losses.py) counts which experts the whole step chooses, if `moe` has an auxiliary loss;
   `copies_of_step` (experts/layer.py) exchanges the adapters of copied experts, if it has replicas.
2. For each micro-batch, `loss_of_batch` (loss.py) runs the model with its head on no token: `run_base` (base_model.py).
   Its expert layers send tokens to their experts and back (experts/layer.py).
3. The objective asks `TokenLosses` (loss.py) for its share of the loss. The head runs on chunks of the
   hidden states that predict targets, and their gradients are computed at once.
4. `backward` goes on from these gradients. FSDP2 sums the gradients over ranks.
5. The caller measures one norm, clips (grad_norm.py) and updates: `TrainingLoop._train_step` (training/loop.py).

By layer, all micro-batches of a round go through a block before the next one (by_layer.py). With stages, a schedule
runs the micro-batches through all of them (pipeline_schedule.py).
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from expertmesh.compat import trains_a_tower
from expertmesh.config.errors import InputError
from expertmesh.config.sections import refuse_wrong_order
from expertmesh.experts.layer import copies_of_step
from expertmesh.parallel.pipeline import Layers, Pipeline, layers_of, not_by_layer
from expertmesh.parallel.routes import refuse_routes
from expertmesh.parallel.sequence import Batch, sequence_share
from expertmesh.state.model_view import ModelView, mesh_of, sharded
from expertmesh.state.other_code import refuse_dropped_router_losses, refuse_media_on_some_ranks
from expertmesh.state.shards import placement_of, to_local
from expertmesh.step.base_model import model_inputs
from expertmesh.step.by_layer import Round, layers_held, reduced_in_full
from expertmesh.step.loss import (
    CrossEntropy,
    Objective,
    Term,
    loss_of_base,
    loss_of_batch,
    refuse_counts,
    refuse_labels,
)
from expertmesh.step.pipeline_schedule import StageOutput, StageTerm, run_pipeline, same_shape
from expertmesh.step.router_losses import RouterLosses, router_losses

_T = TypeVar("_T")
# Arguments of a model's forward that are of its loss, or that are set for its blocks.
_NOT_OF_BLOCKS = {"num_items_in_batch", "use_cache", "output_router_logits", "return_dict"}


@dataclass(frozen=True, slots=True)
class StepLosses:
    """This rank's shares of a step's values: fp64, on the rank's device, without graph.

    The values are the sums of the shares over all ranks.
    """

    loss: torch.Tensor
    """The objective's, 0-dim."""
    aux_loss: torch.Tensor
    """The routers', without its factor; zero if it is off."""
    z_loss: torch.Tensor
    """The routers', without its factor; zero if it is off."""
    figures_F: torch.Tensor
    """Figures in the order of the objective's `figures`."""


def forward_backward(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    *,
    target_tokens: int | torch.Tensor,
    chunk_tokens: int = 1024,
    accumulate: Literal["by_micro_batch", "by_layer"] = "by_micro_batch",
    round: int | None = None,
    keep_inputs: Literal["device", "host"] = "device",
) -> StepLosses:
    """Add the gradients of one optimizer step to those of the model, with the router losses that `moe` asks for.

        losses = em.forward_backward(model, micro_batches, target_tokens=n)
        grad_norm = em.clip_grad_norm_(model, max_norm=1.0)
        optimizer.step(); optimizer.zero_grad()

    Args:
        micro_batches: This rank's share of the step, on its device, each as `causal_lm_loss` takes it. All ranks have
            equally many; ranks along pp, cp and tp have the same ones.
        target_tokens: The targets of the whole step, over all data ranks and micro-batches; of a classifier its rows,
            with `labels` `[B]` in the batches, -100 for a row without one.
        chunk_tokens: How many target tokens get logits at a time.
        accumulate: The order, as the key of `train` (docs/training.md): each micro-batch through the model, or all of
            a round through one block after the other.
        round: How many micro-batches go through the blocks together by layer; None for all.
        keep_inputs: Where the inputs of blocks wait for their backward by layer.

    Returns:
        This rank's shares of the losses.

    Raises:
        InputError: The step has no target or no micro-batch, labels do not fit the model, only some ranks give images,
            or the model cannot be trained by layer; `accumulate`, `round` or `keep_inputs` has a wrong value.

    Collectives: every rank calls it once per step; those of forward and backward, with pp also sends and receives
    between stages.
    """
    refuse_counts(target_tokens, chunk_tokens)
    refuse_wrong_order(accumulate, round, keep_inputs)
    order = Order(accumulate == "by_layer", round, inputs_on_host=keep_inputs == "host")
    refuse_media_on_some_ranks(model, [model_inputs(batch) for batch in micro_batches])
    refuse_labels(model, micro_batches)
    return run_step(model, micro_batches, CrossEntropy(target_tokens), chunk_tokens, order)


def accumulate_by_layer(
    model: nn.Module,
    batches: Sequence[Batch],
    micro_step: Callable[[int], _T],
    *,
    round: int | None = None,
    keep_inputs: Literal["device", "host"] = "device",
) -> list[_T]:
    """Run the micro-steps of a loop with losses of its own, as that of `like_ddp`, by layer.

        def micro_step(number):
            accelerator.backward(loss_of(model(**batches[number])))

        em.accumulate_by_layer(model, batches, micro_step)  # for number in range(len(batches)): micro_step(number)

    Args:
        batches: What each micro-step calls the model with, by name, on its device; all ranks have equally many.
        micro_step: Called with each number, in order. Calls the model once, for its last layer, and runs backward.
        round: How many micro-batches go through the blocks together; None for all.
        keep_inputs: Where the inputs of blocks wait for their backward.

    Returns:
        What each micro-step returned.

    Raises:
        InputError: The model cannot be trained by layer, a batch asks for outputs of all layers, `moe` asks for router
            losses that a micro-step's loss lacks, or a value is wrong.

    Collectives: every rank calls it; those of forward and backward, and of the micro-steps.
    """
    _refuse_no_batches(batches)
    refuse_wrong_order("by_layer", round, keep_inputs)
    refuse_dropped_router_losses(model)
    order, layers = Order(True, round, inputs_on_host=keep_inputs == "host"), layers_of(model)
    router_logits = any(_asks_for("output_router_logits", model, batch) for batch in batches)
    _refuse_calls(model, batches)
    of_blocks = [{name: value for name, value in batch.items() if name not in _NOT_OF_BLOCKS} for batch in batches]
    refuse_media_on_some_ranks(model, [model_inputs(batch) for batch in of_blocks])
    results: list[_T] = []

    def run_last(start: int, number: int) -> None:
        results.append(micro_step(start + number))

    with copies_of_step(model), reduced_in_full(model):
        for start, stop in order.spans(len(batches)):
            run = Round(
                model,
                layers,
                of_blocks[start:stop],
                router_logits=router_logits,
                inputs_on_host=order.inputs_on_host,
                last=partial(run_last, start),
            )
            with layers_held(model, layers):
                run.forward()
                run.backward(all_reduce=stop == len(batches))
    return results


def _refuse_no_batches(batches: Sequence[Batch]) -> None:
    """Raise `InputError` for a step without a micro-batch: the ranks that have some would wait."""
    if not batches:
        raise InputError("a step needs a micro-batch; give each rank as many as the others", key="data.no-micro-batch")


def _refuse_calls(model: nn.Module, batches: Sequence[Batch]) -> None:
    """Raise `InputError` for calls of the model by layer that need what no forward has."""
    for batch in batches:
        for name in ("output_hidden_states", "output_attentions"):
            if _asks_for(name, model, batch):
                raise not_by_layer(f"the model is called with {name}, and no forward runs all layers")
        if "input_ids" not in batch:
            raise not_by_layer("the model is called without input_ids")


def _asks_for(output: str, model: Any, batch: Batch) -> bool:
    """Return whether a call of the model with `batch` has to give an output that its config may ask for, too."""
    given = batch.get(output)
    return bool(getattr(model.config.get_text_config(), output, False) if given is None else given)


@dataclass(frozen=True, slots=True)
class Order:
    """The order of the micro-batches of a step."""

    by_layer: bool = False
    """True if all micro-batches of a round go through one block before the next one."""
    round: int | None = None
    """Micro-batches of a round at most, if `by_layer`; None for all."""
    inputs_on_host: bool = False
    """True if the inputs of blocks wait in host memory for their backward, if `by_layer`."""

    def rounds(self, micro_batches: int) -> int:
        """Return the number of rounds of a step by layer."""
        return 1 if self.round is None else -(-micro_batches // self.round)

    def spans(self, micro_batches: int) -> list[tuple[int, int]]:
        """Return the first micro-batch of each round, and the one behind its last; rounds are nearly equal."""
        count = self.rounds(micro_batches)
        return list(itertools.pairwise(micro_batches * number // count for number in range(count + 1)))


def run_step(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    objective: Objective,
    chunk_tokens: int = 1024,
    order: Order = Order(),
) -> StepLosses:
    """Run forward and backward of one optimizer step for any objective, by layer, through stages, or batch by batch.

    Called by the trainer, the verification and `forward_backward`, which describes the arguments.

    Returns:
        This rank's shares of the losses; the gradients are added to those of the parameters.

    Collectives: as `forward_backward`.
    """
    _refuse_no_batches(micro_batches)
    with copies_of_step(model), reduced_in_full(model):  # 1
        sums = _Sums(micro_batches, objective)
        if order.by_layer and len(micro_batches) > 1:
            return _by_layer(model, layers_of(model), micro_batches, objective, sums, chunk_tokens, order)
        if (pipeline := sharded(model).pipeline) is not None:
            return _through_stages(model, pipeline, micro_batches, objective, sums, chunk_tokens)
        return _one_by_one(model, micro_batches, objective, sums, chunk_tokens)


def _one_by_one(
    model: nn.Module, micro_batches: Sequence[Batch], objective: Objective, sums: "_Sums", chunk_tokens: int
) -> StepLosses:
    """Run the step one micro-batch after the other. Collectives: as `forward_backward`."""
    # Replicas need one all-reduce per step; earlier ones would only add communication. With a tower that trains each
    # micro-batch has one: FSDP2 would not catch up in the last one if that is of text, without gradients of the tower.
    at_once = mesh_of(model).layout.replicate > 1 and not trains_a_tower(model)
    with router_losses(model, micro_batches) as router_loss:  # 1
        for index, batch in enumerate(micro_batches, start=1):
            if isinstance(model, FSDPModule) and at_once:
                model.set_requires_all_reduce(index == len(micro_batches))
            term = loss_of_batch(model, batch, objective, chunk_tokens)  # 2 and 3
            (term.loss + router_loss()).backward()  # 4
            sums.add(term)
            del term  # free what the graph still holds before the next forward
    return sums.with_router_losses(router_loss)


@torch.no_grad()
def evaluate_terms(model: nn.Module, batches: Sequence[Batch], objective: Objective) -> list[Term]:
    """Return the objective's terms of `batches`, without gradients; none on ranks without the last pipeline stage.

    Collectives: every rank calls it, with equally many batches (the same ones along pp); those of the model's forward.
    """
    pipeline = sharded(model).pipeline
    if pipeline is None:
        return [loss_of_batch(model, batch, objective) for batch in batches]
    batches = same_shape(batches, sequence_share(model))
    refuse_routes(model, batches)
    terms: dict[int, Term] = {}

    def keep(output: StageOutput) -> None:
        if output.is_last:
            terms[output.number] = loss_of_base(
                model, output.base, output.empty_logits, batches[output.number], objective
            )

    run_pipeline(model, pipeline, batches, keep)
    return [terms[number] for number in sorted(terms)]


class _Sums:
    """The sums of a step's shares, on the device of the batches. Ranks whose stages add nothing have them as well, so
    that all ranks can reduce them.
    """

    def __init__(self, batches: Sequence[Batch], objective: Objective) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=batches[0]["input_ids"].device)
        self.figures_F = self.loss.new_zeros(len(objective.figures))

    def add(self, term: Term) -> None:
        """Add one micro-batch's share."""
        self.loss = self.loss + term.loss.detach()
        self.figures_F = self.figures_F + term.figures_F

    def with_router_losses(self, router_loss: RouterLosses) -> StepLosses:
        """Return this rank's shares of the step's losses."""
        return StepLosses(self.loss, router_loss.aux_loss, router_loss.z_loss, self.figures_F)


def _through_stages(
    model: nn.Module,
    pipeline: Pipeline,
    micro_batches: Sequence[Batch],
    objective: Objective,
    sums: _Sums,
    chunk_tokens: int,
) -> StepLosses:
    """Run the step of a model with pipeline stages. Collectives: as `forward_backward`."""
    batches = same_shape(micro_batches, sequence_share(model))
    refuse_routes(model, batches)
    # Trained parameters that both the first and the last stage hold, in the same order on both. Their gradients of this
    # step are summed: those of an earlier call were summed then.
    places = [(parameter, placement_of(parameter)) for parameter in ModelView(model).parameters.values()]
    tied = [p for p, place in places if p.requires_grad and place is not None and place.has_tied_replica]
    before = [parameter.grad for parameter in tied]
    for parameter in tied:
        parameter.grad = None
    with router_losses(model, batches) as router_loss:
        has_losses = router_loss.balance.has_losses
        term = _term_of_stage(model, batches, objective, sums, router_loss if has_losses else None, chunk_tokens)
        run_pipeline(model, pipeline, batches, term, router_logits=has_losses)
    for parameter, earlier in zip(tied, before, strict=True):
        _sum_with_other_stage(pipeline, parameter)
        if earlier is not None:
            parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad
    return sums.with_router_losses(router_loss)


def _by_layer(
    model: nn.Module,
    layers: Layers,
    micro_batches: Sequence[Batch],
    objective: Objective,
    sums: _Sums,
    chunk_tokens: int,
    order: Order,
) -> StepLosses:
    """Run the step in rounds, layer by layer. Collectives: as `forward_backward`."""
    rounds = [micro_batches[start:stop] for start, stop in order.spans(len(micro_batches))]
    router_loss = RouterLosses(model, micro_batches, layers.count)
    # With one round its own forward gives the step's fractions before its backward needs them.
    if router_loss.balance.aux_loss_coef and len(rounds) > 1:
        router_loss.run_ahead(micro_batches)
    with router_loss.collecting():
        has_losses = router_loss.balance.has_losses
        for batches in rounds:
            run = Round(model, layers, batches, router_logits=has_losses, inputs_on_host=order.inputs_on_host)
            losses = router_loss if has_losses else None
            term = _term_of_stage(model, run.batches, objective, sums, losses, chunk_tokens)
            with layers_held(model, layers):
                run.forward()
                if has_losses:
                    router_loss.set_fractions([run.router_logits(number) for number in range(len(batches))])
                run.backward(term, all_reduce=batches is rounds[-1])
    return sums.with_router_losses(router_loss)


def _term_of_stage(
    model: nn.Module,
    batches: Sequence[Batch],
    objective: Objective,
    sums: _Sums,
    router_loss: RouterLosses | None,
    chunk_tokens: int,
) -> StageTerm:
    """Return what a stage or layer adds to the differentiated sum: router losses, on the last one the objective."""

    def term(output: StageOutput) -> torch.Tensor | None:
        batch = batches[output.number]
        routers = None
        if router_loss is not None:
            router_loss.add(output.router_logits, batch)
            routers = router_loss()
        if not output.is_last:
            return routers
        share = loss_of_base(model, output.base, output.empty_logits, batch, objective, chunk_tokens)
        sums.add(share)
        return share.loss if routers is None else share.loss + routers

    return term


def _sum_with_other_stage(pipeline: Pipeline, parameter: nn.Parameter) -> None:
    """Give both stages the sum of their gradients, with equal bits.

    Collectives: the first and the last stage call it, in the same order of parameters; one send and one receive of
    this rank's shard.
    """
    layout, rank = pipeline.mesh.layout, pipeline.mesh.coordinate("pp")
    first, last = 0, (len(pipeline.stages) - 1) % layout.pp
    gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    local = to_local(gradient)
    received = torch.empty_like(local)
    peer = dist.get_global_rank(pipeline.mesh.pp_group, last if rank == first else first)
    if local.numel():  # both stages shard the weight equally, so the peer skips an empty shard as well
        sends = dist.P2POp(dist.isend, local.contiguous(), peer, pipeline.mesh.pp_group)
        receives = dist.P2POp(dist.irecv, received, peer, pipeline.mesh.pp_group)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()
        local.add_(received)  # of two numbers: the same in either order
    parameter.grad = gradient
