"""Run one optimizer step of a model that is cut into pipeline stages: PyTorch's schedules, on our stages.

`torch.distributed.pipelining` decides in which order a rank runs the micro-batches of its stages forward and backward,
and sends hidden states and their gradients; the forward of a stage is here. A stage gets the number of a micro-batch,
not its tensors: each rank has the batch, and computes masks and positions from it. Losses are summed over
micro-batches, never averaged, so nothing is scaled. FSDP2 sees the same calls as without a pipeline, one forward and
one backward for each micro-batch, and gathers and reduces in each of them. Torch's own way, for stages that are FSDP
modules, gathers and reduces once, but keeps all parameters and gradients of a stage unsharded meanwhile.

    B rows, S positions of a full row
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)
from transformers.utils.generic import ModelOutput

from expertmesh.config.errors import ExpertmeshError, InputError
from expertmesh.distributed.layout import Layout
from expertmesh.parallel.pipeline import Pipeline, running
from expertmesh.parallel.sequence import Batch, SequenceShare, lengthened, not_paddable, sequence_share
from expertmesh.state.other_code import media_in
from expertmesh.step.base_model import model_inputs, run_base


@dataclass(frozen=True, slots=True)
class StageOutput:
    """The result of a stage's forward of one micro-batch; the last three fields are those of `run_base`."""

    number: int
    """Number of the micro-batch."""
    is_last: bool
    """True for the stage with the head."""
    base: ModelOutput
    """Has the decoder's result on the last stage alone."""
    empty_logits: torch.Tensor
    """The root's logits of no token, which keep it in the graph."""
    router_logits: tuple[torch.Tensor, ...]
    """Router logits of the stage's MoE layers, `[T, E]`; empty if none were requested."""


# What a stage adds for a micro-batch to the sum that is differentiated: 0-dim, or None.
StageTerm = Callable[[StageOutput], torch.Tensor | None]


def run_pipeline(
    model: nn.Module, pipeline: Pipeline, batches: Sequence[Batch], term: StageTerm, *, router_logits: bool = False
) -> None:
    """Run all `batches` (of one shape, see `same_shape`) through all stages; backward too where gradients are enabled.

    Args:
        term: Called on every rank for each of its stages and micro-batches, in forward order. The sum of all that it
            returns, on all ranks, is differentiated.

    Collectives: every rank calls it; sends and receives along pp, and within a stage the collectives of the model's
    forward and backward, in one order on all its ranks.
    """
    count, backward = len(batches), torch.is_grad_enabled()
    run = _PipelineRun(model, pipeline, batches, term, router_logits)
    stages = [_torch_stage(run, number, backward) for number in pipeline.local_stages]
    kind: Any = schedule_kind(pipeline.mesh.layout, count)
    one_each = pipeline.mesh.layout.pp_virtual_stages == 1
    # The last stage's output is the loss. Gradients are sums: torch must not divide them by the micro-batches.
    loss: dict[str, Any] = {"loss_fn": lambda output, target: output, "scale_grads": False}
    schedule = kind(stages[0] if one_each else stages, count, **loss)
    # torch cuts its arguments into micro-batches: of numbers, each stage gets the one of its micro-batch.
    numbers = torch.arange(count)
    first = (torch.zeros(count),) if pipeline.local_stages[0] == 0 else ()
    target = {"target": numbers} if any(map(pipeline.is_last, pipeline.local_stages)) else {}
    try:
        (schedule.step if backward else schedule.eval)(*first, number=numbers, **target)
    except RuntimeError as error:
        # torch wraps the exception of a stage; raise our own sentence in its place.
        if isinstance(error.__cause__, ExpertmeshError):
            raise error.__cause__ from error
        raise


def schedule_kind(layout: Layout, micro_batches: int) -> type:
    """Return the schedule of a step.

    Where too few micro-batches are left for the configured one (as in the last step of an epoch), all forwards run
    before all backwards; results are the same.
    """
    if layout.pp_virtual_stages > 1:
        return ScheduleInterleaved1F1B if interleaves(micro_batches, layout.pp) else ScheduleLoopedBFS
    return Schedule1F1B if layout.pp_schedule == "1f1b" and micro_batches >= layout.pp else ScheduleGPipe


def interleaves(micro_batches: int, pp: int) -> bool:
    """Return whether torch's interleaved 1F1B takes that many micro-batches: it needs equal rounds."""
    return micro_batches % max(1, micro_batches // pp) == 0


def same_shape(batches: Sequence[Batch], share: SequenceShare) -> list[Batch]:
    """Pad micro-batches to equally many rows and positions, so that messages have one size.

    Positions become a multiple of `share.parts`. Padding is on the right and behind; it has no target and does not
    count as real.
    """
    for batch in batches:
        if media := media_in(model_inputs(batch)):
            raise takes_text_alone(f"a batch has {', '.join(media)}")
    rows = max(len(batch["input_ids"]) for batch in batches)
    length = max(batch["input_ids"].shape[1] for batch in batches)
    length += -length % share.parts
    why, by_length = "cannot be padded for a pipeline", share.rotates_by_length
    return [_with_rows(lengthened(batch, length, why, by_length), rows) for batch in batches]


def takes_text_alone(what: str) -> InputError:
    return InputError(
        f"parallel.pp: {what}, and stages hand on text alone; set parallel.pp to 1", key="layout.pp-takes-text-alone"
    )


def _with_rows(batch: Batch, rows: int) -> Batch:
    """Return `batch` with copies of its first row that have no target and are not real."""
    ids = batch["input_ids"]
    missing = rows - len(ids)
    if not missing:
        return batch
    real = batch.get("real_tokens", batch.get("attention_mask", torch.ones_like(ids)))
    if real.shape != ids.shape:
        what = f"attention_mask {list(real.shape)} of a batch cannot be padded for a pipeline"
        raise not_paddable(what, "give [B, S]")
    longer = {}
    for key, tensor in batch.items():
        # Position ids may be shared by all rows, or have several axes before the rows.
        dim = -2 if key == "position_ids" else 0
        if tensor.dim() >= 2 and tensor.shape[dim] != len(ids):
            longer[key] = tensor
            continue
        copies = [tensor, *[tensor.narrow(dim if tensor.dim() > 1 else 0, 0, 1)] * missing]
        longer[key] = torch.cat(copies, dim=dim if tensor.dim() > 1 else 0)
    longer["real_tokens"] = F.pad(real.bool(), (0, 0, 0, missing), value=False)
    if "labels" in longer:
        longer["labels"] = F.pad(batch["labels"], (0, 0) * (batch["labels"].dim() - 1) + (0, missing), value=-100)
    return longer


def _torch_stage(run: "_PipelineRun", number: int, backward: bool) -> PipelineStage:
    """Make torch's stage, with the shapes of its messages given, so that torch need not run anything to learn them."""
    pipeline = run.pipeline
    rows, length = run.batches[0]["input_ids"].shape
    shape = (rows, length // sequence_share(run.model).parts, *pipeline.hidden)
    hidden = torch.empty(shape, dtype=pipeline.dtype, device="meta", requires_grad=backward)
    return PipelineStage(
        _Stage(run, number),
        number,
        len(pipeline.stages),
        pipeline.mesh.device,
        input_args=(torch.empty(1, device="meta") if number == 0 else hidden,),
        output_args=(torch.empty(1, device="meta", requires_grad=backward) if pipeline.is_last(number) else hidden,),
        group=pipeline.mesh.pp_group,
    )


class _Stage(nn.Module):
    """The module that torch's stage calls. The model is not its child: torch would take over its FSDP2 groups."""

    def __init__(self, run: "_PipelineRun", stage: int) -> None:
        super().__init__()
        self.run_stage, self.stage = run, stage

    def forward(self, received: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return self.run_stage.forward(self.stage, int(number), received)


@dataclass(slots=True)
class _PipelineRun:
    """The forwards and backwards of this rank's stages in one call of `run_pipeline`, whose arguments it has."""

    model: nn.Module
    pipeline: Pipeline
    batches: Sequence[Batch]
    term: StageTerm
    router_logits: bool
    backwards: dict[int, int] = field(default_factory=dict)
    """Backwards that have run, by stage."""

    def forward(self, stage: int, number: int, received: torch.Tensor) -> torch.Tensor:
        """Return the hidden state for the next stage; on the last one the stage's term, `[1]`."""
        is_last = self.pipeline.is_last(stage)
        with running(self.model, self.pipeline, stage, received if stage else None) as result:
            base, empty_logits, logits = run_base(self.model, self.batches[number], router_logits=self.router_logits)
        term = self.term(StageOutput(number, is_last, base, empty_logits, logits))
        if is_last:
            total = torch.zeros((), device=received.device) if term is None else term
            out = total.float().reshape(1)
        else:
            hidden = result.hidden
            assert hidden is not None
            if hidden.dtype != self.pipeline.dtype:
                raise InputError(
                    f"parallel.pp: the hidden state behind {self.pipeline.blocks[self.pipeline.stages[stage][-1]]} is "
                    f"{hidden.dtype}, not {self.pipeline.dtype}, and would be rounded on its way to the next stage; "
                    "set parallel.pp to 1, or precision.compute to float32",
                    key="layout.pp-rounds-hidden-state",
                )
            # The root's output is in the graph, so that FSDP2's root hook runs in backward. The zero requires a
            # gradient, because torch's schedule runs backward on every stage's output, whatever trains before it.
            root = torch.zeros((), device=hidden.device, requires_grad=torch.is_grad_enabled()) + empty_logits.sum()
            out = _WithTerm.apply(hidden, root if term is None else root + term).contiguous()
        if out.requires_grad and self.pipeline.mesh.layout.replicate > 1:
            out.register_hook(lambda gradient: self._begin_backward(stage))
        return out

    def _begin_backward(self, stage: int) -> None:
        """Reduce between replicas once per step: in the last backward of each stage."""
        self.backwards[stage] = self.backwards.get(stage, 0) + 1
        last = self.backwards[stage] == len(self.batches)
        blocks = [self.model.get_submodule(self.pipeline.blocks[block]) for block in self.pipeline.stages[stage]]
        for module in blocks:
            assert isinstance(module, FSDPModule)
            module.set_requires_all_reduce(last)
        # Groups outside the blocks (embedding, head, root) run with the first and the last stage.
        if stage == 0 or self.pipeline.is_last(stage):
            inside = {id(part) for name in self.pipeline.blocks for part in self.model.get_submodule(name).modules()}
            for module in self.model.modules():
                if isinstance(module, FSDPModule) and id(module) not in inside:
                    module.set_requires_all_reduce(last, recurse=False)


class _WithTerm(torch.autograd.Function):
    """Return the hidden state unchanged; backward gives the stage's own term, on which no later stage depends, its
    gradient of 1.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
        ctx.like = term.dtype
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, gradient.new_ones((), dtype=ctx.like)
