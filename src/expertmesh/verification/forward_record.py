"""Record a forward of the job on its samples: the output of every block, the chosen experts, the logits.

Hooks record each micro-batch, without gradients. The forward is that of evaluation, or of training with train.compile.
A rank computes some positions (tp, cp) or some blocks (pp) of its data rank's samples; they are gathered here, so that
the layers of the proof compare full samples of full models.

    B rows, S positions, T a data rank's tokens, X any last dimension, K top-k
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.utils.generic import ModelOutput

from expertmesh.anatomy import Anatomy, decoder_blocks, is_classifier
from expertmesh.distributed import sequence_collectives
from expertmesh.distributed.all_ranks import gather_objects
from expertmesh.distributed.mesh import Mesh
from expertmesh.experts.pairs import sorted_choice
from expertmesh.parallel.sequence import padded, sequence_share
from expertmesh.parallel.stages import Placeholder
from expertmesh.state.model_view import sharded
from expertmesh.step.base_model import model_inputs
from expertmesh.step.loss import LogProbabilities, Term, head_logits, loss_of_base, loss_of_batch
from expertmesh.step.pipeline_schedule import StageOutput, run_pipeline, same_shape
from expertmesh.verification.job import ProvenJob
from expertmesh.verification.setup import PlacedSample, StepData

# The number of elements to compare of a large tensor, in tokens chosen at random.
_MOST_ELEMENTS = 1 << 24
TEACHER, MISMATCHED = "teacher: ", "mismatched: "


@dataclass(frozen=True, slots=True)
class ForwardRecord:
    """The results of a forward on this data rank's samples, on the host."""

    tensors: dict[str, Tensor]
    """The outputs of blocks and the logits, `[T, X]` by name; of many tokens a random part (`kept_tokens`)."""
    choices: dict[str, Tensor]
    """The chosen expert ids, `[T, K]` by module."""

    def beside(self, other: "ForwardRecord", prefix: str) -> "ForwardRecord":
        """Return this record with another one, that of a teacher or of mismatched rows, whose names get `prefix`."""
        both = ((self.tensors, other.tensors), (self.choices, other.choices))
        return ForwardRecord(*({**own, **{f"{prefix}{name}": v for name, v in more.items()}} for own, more in both))


def kept_tokens(value_TX: Tensor) -> Tensor:
    """Return rows of `[T, X]` on the host, in fp32 or wider; of many, a random part that depends on the shape alone."""
    most = max(1, _MOST_ELEMENTS // max(1, value_TX.shape[-1]))
    if len(value_TX) > most:
        order = torch.randperm(len(value_TX), generator=torch.Generator().manual_seed(0))
        value_TX = value_TX[order[:most].sort().values.to(value_TX.device)]
    return value_TX.cpu().to(torch.promote_types(value_TX.dtype, torch.float32))


@contextmanager
def recording(
    modules: Mapping[str, nn.Module], anatomy: Anatomy, outputs: dict[str, Tensor], choices: dict[str, Tensor]
) -> Iterator[None]:
    """Record the forward of `modules` inside the block.

    Args:
        modules: The modules of the model, by name.
        anatomy: Names the blocks, the experts and the routers.
        outputs: Gets the output of each block of the decoder, by the block's name.
        choices: Gets the expert ids `[T, K]` with which each experts module is called, by the module's name; for a
            router that sorts rows, by the router's name.
    """

    def keep_output(name: str, module: nn.Module, args: Any, output: Any) -> None:
        outputs[name] = (output if isinstance(output, Tensor) else output[0]).detach()

    def keep_choice(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        choices[name] = next(v for v in (*args, *kwargs.values()) if not v.is_floating_point()).detach()

    def keep_sorted(name: str, module: nn.Module, args: Any, output: Any) -> None:
        order_P, _, weight_P, counts, *_ = output
        choices[name] = sorted_choice(order_P, weight_P.detach(), counts, len(args[0]))[0]

    with ExitStack() as stack:
        for name in modules.keys() & set(anatomy.sorting_routers):
            stack.enter_context(modules[name].register_forward_hook(partial(keep_sorted, name)))
        for name in modules.keys() & set(decoder_blocks(anatomy)):
            stack.enter_context(modules[name].register_forward_hook(partial(keep_output, name)))
        for spec in anatomy.experts:
            module = modules.get(spec.name)
            if module is not None and spec.call in ("interface", "pairs") and not isinstance(module, nn.ModuleList):
                hook = partial(keep_choice, spec.name)
                stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield


@torch.no_grad()
def record_forward(job: ProvenJob, data: StepData) -> ForwardRecord:
    """Record a forward of this data rank's samples, without gradients; also of a teacher and of mismatched rows."""
    step, placed = job.batches(data), data.placed(job.mesh.layout, job.mesh.rank)
    modules = {name: m for name, m in job.model.named_modules() if not isinstance(m, Placeholder)}
    recorder = _JobRecorder(job, placed)
    # Compiled blocks round differently and may choose other experts. They run compiled in training mode alone.
    job.model.train(job.setup.config.train.compile)
    with recording(modules, job.setup.anatomy, recorder.last_outputs, recorder.last_choices):
        if (pipeline := sharded(job.model).pipeline) is None:
            share = sequence_share(job.model)
            for number, batch in enumerate(padded(each, share) for each in step.micro_batches):
                if is_classifier(job.model):
                    recorder.keep_rewards(batch, loss_of_batch(job.model, batch, LogProbabilities()))
                else:
                    recorder.last_outputs["logits"] = job.model(**model_inputs(batch), use_cache=False).logits
                recorder.keep(number, batch)
        else:
            batches = same_shape(step.micro_batches, sequence_share(job.model))

            def look(output: StageOutput) -> None:
                batch = batches[output.number]
                if output.is_last and is_classifier(job.model):
                    of_rows = LogProbabilities()
                    recorder.keep_rewards(
                        batch, loss_of_base(job.model, output.base, output.empty_logits, batch, of_rows)
                    )
                elif output.is_last:
                    recorder.last_outputs["logits"] = _logits(job.model, output.base)
                recorder.keep(output.number, batch)

            run_pipeline(job.model, pipeline, batches, look)  # with the run's schedule
    job.model.train()
    tensors = {name: kept_tokens(torch.cat(parts)) for name, parts in recorder.outputs.items()}
    choices = {name: torch.cat(parts).cpu() for name, parts in recorder.choices.items()}
    if job.mesh.layout.pp > 1:
        tensors, choices = (_of_all_stages(job.mesh, own) for own in (tensors, choices))
    record = ForwardRecord(tensors, choices)
    if (of_teacher := job.of_teacher) is not None:
        record = record.beside(record_forward(of_teacher, data), TEACHER)
        of_teacher.model.eval()
    if (mismatched := data.mismatched) is not None:
        record = record.beside(record_forward(job, mismatched), MISMATCHED)
    return record


@dataclass(slots=True)
class _JobRecorder:
    """Collects the outputs and the chosen experts of all micro-batches."""

    job: ProvenJob
    placed: list[PlacedSample]
    """The samples of this data rank, in the order of its micro-batches."""
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    """The outputs `[T, X]` of each micro-batch, by name."""
    choices: dict[str, list[Tensor]] = field(default_factory=dict)
    """The expert ids `[T, K]` of each micro-batch, by module."""
    last_outputs: dict[str, Tensor] = field(default_factory=dict)
    """This rank's outputs in the last forward, not yet gathered."""
    last_choices: dict[str, Tensor] = field(default_factory=dict)
    """This rank's expert ids in the last forward, not yet gathered."""

    def keep_rewards(self, batch: Mapping[str, Tensor], term: Term) -> None:
        """Take the reward of each row, by `LogProbabilities`, for the logits of this rank's positions of it."""
        length = batch["input_ids"].shape[1] // sequence_share(self.job.model).parts
        self.last_outputs["logits"] = term.figures_F.view(-1, 1, 1).expand(-1, length, 1)

    def keep(self, number: int, batch: Mapping[str, Tensor]) -> None:
        """Store the real tokens of the last forward, which was of micro-batch `number`. Stages run them in order.

        Collectives: every rank calls it; those of `_full_rows` for each tensor.
        """
        rows, positions = batch["input_ids"].shape
        mine = [sample for sample in self.placed if sample.micro == number]
        for name, value in self.last_outputs.items():
            self.outputs.setdefault(name, []).append(_cut_out(_full_rows(self.job, value), mine))
        for name, index in self.last_choices.items():
            # If tp does not split attention, its router gets full rows.
            is_whole = name in self.job.setup.anatomy.sorting_routers and index.shape[0] == rows * positions
            if is_whole or index.shape[0] * sequence_share(self.job.model).parts == rows * positions:
                index_BSK = index.view(rows, -1, index.shape[-1])
                index_BSK = index_BSK if is_whole else _full_rows(self.job, index_BSK)
                self.choices.setdefault(name, []).append(_cut_out(index_BSK, mine))
        self.last_outputs.clear()
        self.last_choices.clear()


def _logits(model: nn.Module, base: ModelOutput) -> Tensor:
    """Return the logits of the last stage from the decoder's result; unshard the head for it, as evaluation does."""
    hidden_BSH = base["last_hidden_state"]
    others = {key: value for key, value in base.items() if key != "last_hidden_state"}
    root = cast(FSDPModule, model)
    root.unshard()
    logits = head_logits(model, hidden_BSH.flatten(0, 1), partial(type(base), **others))
    root.reshard()
    return logits.view(*hidden_BSH.shape[:2], -1)


def _full_rows(job: ProvenJob, value_BSX: Tensor) -> Tensor:
    """Return all positions of the rows, gathered from the ranks that share them.

    Collectives: every rank calls it; one all-gather each over tp and cp, if the axis is larger than 1.
    """
    for axis in ("tp", "cp"):
        if job.mesh.layout.size(axis) > 1:
            value_BSX = sequence_collectives.gather(value_BSX, 1, job.mesh.dense.get_group(axis))
    return value_BSX


def _of_all_stages(mesh: Mesh, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of all stages for the same samples.

    Collectives: every rank calls it; one all-gather of objects over pp.
    """
    whole: dict[str, Tensor] = {}
    for part in gather_objects(own, mesh.pp_group):
        assert not whole.keys() & part.keys(), f"{whole.keys() & part.keys()} ran on two stages"
        whole |= part
    return whole


def _cut_out(value_BSX: Tensor, placed: list[PlacedSample]) -> Tensor:
    """Return the samples' real tokens of a micro-batch, `[T, X]`, sample after sample."""
    parts = [value_BSX[sample.row, sample.start : sample.start + len(sample)] for sample in placed]
    return torch.cat(parts) if parts else value_BSX[:0].flatten(0, 1)
