"""What a forward of the job shows of its samples: the output of every block, the experts chosen, the logits.

Hooks note it, micro-batch by micro-batch, in evaluation and without gradients, by the forward that evaluation runs.
Ranks see parts of a data rank's samples, some positions (tp, cp) or some blocks (pp), and put them together here, so
that whoever compares has whole samples and whole models.

    B rows, S positions, T a data rank's tokens, X whatever else, K top-k
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.utils.generic import ModelOutput

from expertmesh.distributed.mesh import Mesh
from expertmesh.distributed.sequence_collectives import gather
from expertmesh.parallel.pipeline import Placeholder, pipeline_of
from expertmesh.parallel.sequence import padded, sequence_share
from expertmesh.step.loss import head_logits
from expertmesh.step.pipeline_schedule import StageOutput, run_pipeline, same_shape
from expertmesh.verification.samples import Placed, StepData
from expertmesh.verification.subject import Subject


@dataclass(frozen=True, slots=True)
class Seen:
    """What a forward showed of this data rank's samples: `tensors` by name `[T, ...]`, `choices` `[T, K]` by module."""

    tensors: dict[str, Tensor]
    choices: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Places:
    """Which of a data rank's tokens are kept of wide tensors: all of them, or a sample that `seed` decides."""

    tokens: int
    elements: int = 1 << 24
    seed: int = 0

    def pick(self, name: str, value_TX: Tensor) -> Tensor:
        """Rows of `[T, X]`, in fp32 or wider, on the host."""
        most = max(1, self.elements // max(1, value_TX.shape[-1]))
        if len(value_TX) > most:
            order = torch.randperm(len(value_TX), generator=torch.Generator().manual_seed(self.seed))
            value_TX = value_TX[order[:most].sort().values.to(value_TX.device)]
        return value_TX.cpu().to(torch.promote_types(value_TX.dtype, torch.float32))


@torch.no_grad()
def forward(subject: Subject, data: StepData, places: Places) -> Seen:
    """Logits, what every block gives, and the experts chosen, of the samples of this data rank; in evaluation.

    Every rank calls it: the collectives of a forward, those of `_whole_rows` and, with stages, of `_of_all_stages`.
    """
    step, placed = subject.batches(data), data.placed(subject.mesh.layout, subject.mesh.rank)
    subject.model.eval()
    with _noting(subject) as noted:
        if pipeline_of(subject.model) is None:
            _run(subject, step.micro_batches, placed, noted)
        else:
            _run_stages(subject, step.micro_batches, placed, noted)
    subject.model.train()
    tensors = {name: places.pick(name, _joined(parts)) for name, parts in noted.outputs.items()}
    choices = {name: _joined(parts).cpu() for name, parts in noted.choices.items()}
    if subject.mesh.layout.pp > 1:
        tensors, choices = (_of_all_stages(subject.mesh, own) for own in (tensors, choices))
    return Seen(tensors, choices)


def chosen(args: Any, kwargs: Any) -> Tensor:
    """The expert ids `[T, K]` among the arguments of an experts module."""
    index: Tensor = next(value for value in (*args, *kwargs.values()) if not value.is_floating_point())
    return index.detach()


@dataclass(slots=True)
class _Noted:
    """By name and micro-batch. `now_*` are of the forward that has just run, as this rank saw it."""

    outputs: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    choices: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    now_outputs: dict[str, Tensor] = field(default_factory=dict)
    now_choices: dict[str, Tensor] = field(default_factory=dict)

    def keep(self, subject: Subject, number: int, shape: tuple[int, int], placed: list[Placed]) -> None:
        """Of micro-batch `number` of so many rows and positions, the samples' own tokens."""
        mine, parts = [sample for sample in placed if sample.micro == number], sequence_share(subject.model).parts
        for name, value in self.now_outputs.items():
            self.outputs.setdefault(name, {})[number] = _cut_out(_whole_rows(subject, value), mine)
        for name, index in self.now_choices.items():
            if index.shape[0] * parts == shape[0] * shape[1]:
                index_BSK = _whole_rows(subject, index.view(shape[0], -1, index.shape[-1]))
                self.choices.setdefault(name, {})[number] = _cut_out(index_BSK, mine)
        self.now_outputs.clear()
        self.now_choices.clear()


def _joined(parts: dict[int, Tensor]) -> Tensor:
    return torch.cat([parts[number] for number in sorted(parts)])


def _run(subject: Subject, batches: Any, placed: list[Placed], noted: _Noted) -> None:
    """All micro-batches through a model that this rank has whole."""
    share = sequence_share(subject.model)
    for number, batch in enumerate(padded(each, share) for each in batches):
        inputs = {key: v for key, v in batch.items() if key not in ("labels", "row_numbers", "real_tokens")}
        noted.now_outputs["logits"] = subject.model(**inputs, use_cache=False).logits
        noted.keep(subject, number, _shape(batch), placed)


def _run_stages(subject: Subject, micro_batches: Any, placed: list[Placed], noted: _Noted) -> None:
    """All micro-batches through the stages, by the run's own schedule."""
    model, pipeline = subject.model, pipeline_of(subject.model)
    assert pipeline is not None
    batches = same_shape(micro_batches, sequence_share(model).parts)

    def look(output: StageOutput) -> None:
        if output.is_last:
            noted.now_outputs["logits"] = _logits(model, output.base)
        noted.keep(subject, output.number, _shape(batches[output.number]), placed)

    run_pipeline(model, pipeline, batches, look)


def _shape(batch: Any) -> tuple[int, int]:
    rows, positions = batch["input_ids"].shape
    return rows, positions


def _logits(model: nn.Module, base: ModelOutput) -> Tensor:
    """What the last stage's head makes of the decoder's result; gathered for that, as for the loss in evaluation."""
    hidden_BSH = base["last_hidden_state"]
    others = {key: value for key, value in base.items() if key != "last_hidden_state"}
    root = cast(FSDPModule, model)
    root.unshard()
    logits = head_logits(model, hidden_BSH.flatten(0, 1), partial(type(base), **others))
    root.reshard()
    return logits.view(*hidden_BSH.shape[:2], -1)


@contextmanager
def _noting(subject: Subject) -> Iterator[_Noted]:
    """Hooks on blocks and experts, of those that compute on this rank."""
    noted = _Noted()
    modules = {name: m for name, m in subject.model.named_modules() if not isinstance(m, Placeholder)}

    def output_of(name: str) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            noted.now_outputs[name] = output if isinstance(output, Tensor) else output[0]

        return note

    def choice_of(name: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            noted.now_choices[name] = chosen(args, kwargs)

        return note

    anatomy = subject.setup.anatomy
    hooks = [modules[name].register_forward_hook(output_of(name)) for name in anatomy.blocks if name in modules]
    hooks += [
        modules[spec.name].register_forward_pre_hook(choice_of(spec.name), with_kwargs=True)
        for spec in anatomy.experts
        if spec.name in modules and spec.call != "dense"
    ]
    try:
        yield noted
    finally:
        for hook in hooks:
            hook.remove()


def _whole_rows(subject: Subject, value_BSX: Tensor) -> Tensor:
    """What the ranks that share rows have of them, all positions. Collective over tp and cp: one all-gather each."""
    for axis in ("tp", "cp"):
        if subject.mesh.layout.size(axis) > 1:
            value_BSX = gather(value_BSX, 1, subject.mesh.dense.get_group(axis))
    return value_BSX


def _of_all_stages(mesh: Mesh, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """What every stage has of the same samples, on each of their ranks. Collective over pp: one gathering of names, and
    one broadcast for each of them.
    """
    everyone: list[Any] = [None] * mesh.layout.pp
    described = [(name, tuple(value.shape), value.dtype) for name, value in own.items()]
    dist.all_gather_object(everyone, described, group=mesh.pp_group)
    whole: dict[str, Tensor] = {}
    for rank, parts in enumerate(everyone):
        here = rank == mesh.coordinate("pp")
        for name, shape, dtype in parts:
            assert name not in whole, f"{name} ran on two stages"
            value = own[name].to(mesh.device) if here else torch.empty(shape, dtype=dtype, device=mesh.device)
            if value.numel():
                dist.broadcast(value, src=dist.get_global_rank(mesh.pp_group, rank), group=mesh.pp_group)
            whole[name] = value.cpu()
    return whole


def _cut_out(value_BSX: Tensor, placed: list[Placed]) -> Tensor:
    """The samples' own tokens of a micro-batch, one sample after the other."""
    parts = [value_BSX[sample.row, sample.start : sample.start + len(sample)] for sample in placed]
    return torch.cat(parts) if parts else value_BSX[:0].flatten(0, 1)
