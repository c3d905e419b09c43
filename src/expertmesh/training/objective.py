"""Choose what a run minimises, and compute what it compares the model with: a reference, the model as it was before
the first step, or a teacher.

With new adapters the reference is the base with adapters off, run beside each step. Otherwise its log-probabilities
are computed once, of all rows, before the first step, and every checkpoint has them: the weights to compute them again
may be absent or changed when the run goes on, and a run that goes on has to take the same steps as before. A teacher is
a second model, frozen, in the layout of the first, which runs beside each step too. So does the model itself for kto,
on mismatched rows. Nothing here takes an optimizer step.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from expertmesh.adapters.plan import adapters_off
from expertmesh.checkpoint.manifest import read_manifest
from expertmesh.checkpoint.small_files import read_small
from expertmesh.config import Config, ObjectiveConfig
from expertmesh.config.errors import InputError
from expertmesh.data import BatchLayout, EvaluationBatches, TokenizedDataset
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.distributed.layout import Layout
from expertmesh.distributed.mesh import Mesh
from expertmesh.io.terminal import tracked
from expertmesh.model import ModelOptions, build_model, fill_and_audit, plan_model
from expertmesh.parallel.apply import shard_model
from expertmesh.parallel.sequence import Batch
from expertmesh.parallel.shard_plan import ShardOptions, ShardPlan
from expertmesh.step.forward_backward import evaluate_terms
from expertmesh.step.loss import LogProbabilities, NextWords, Objective
from expertmesh.step.objectives import Distill, Kto, objective_of, reference_of
from expertmesh.weights.audit import AuditMode
from expertmesh.weights.meta_model import read_model_config

REFERENCE_FILE = "reference/log_probabilities.safetensors"
# transformers' own default for families that do not say how they are initialised.
_INITIALIZER_RANGE = 0.02
# What bf16 may make of the difference of two sums over long responses that are equal.
_ROUNDING_OF_PAIRS = 0.05
_DIFFERENT_TARGETS = 100


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen model with its plan; on meta until it is loaded.

    It is planned, refused, sharded and filled as the model itself is; its parameters get no gradient, and no checkpoint
    or result has them. Like a base under adapters it is in precision.compute, its experts and linear layers in
    precision.frozen.
    """

    model_config: PreTrainedConfig
    directory: Path
    model: PreTrainedModel
    plan: ShardPlan

    @classmethod
    def of(cls, config: Config, student: PreTrainedConfig, layout: Layout, *, weights: bool = True) -> "Teacher | None":
        """Return objective.teacher, built on meta and planned for `layout`; None without one. No communication.

        Args:
            student: The config of the model that learns.
            weights: Whether the weights of a hub repository are downloaded.

        Raises:
            InputError: Its vocabulary has another size, or it cannot be laid out so.
        """
        name = config.objective.teacher
        if name is None:
            return None
        try:
            model_config, directory = read_model_config(
                name, trust_remote_code=config.model.trust_remote_code, weights=weights
            )
            theirs, own = (int(each.get_text_config().vocab_size) for each in (model_config, student))
            if theirs != own:
                raise InputError(
                    f"its vocabulary has {theirs:,} tokens, and that of the model {own:,}; distill compares the "
                    "probabilities of the same tokens: choose a teacher of the same vocabulary",
                    key="model.other-vocabulary",
                )
            return cls.planned(config, model_config, directory, layout)
        except InputError as error:
            raise type(error)(f"objective.teacher {name}: {error}", key=error.key) from error

    @classmethod
    def planned(cls, config: Config, model_config: PreTrainedConfig, directory: Path, layout: Layout) -> "Teacher":
        """Return the model of `model_config` on meta, planned for `layout`. No communication."""
        precision = config.precision.model_copy(update={"params": config.precision.compute})
        options = replace(ModelOptions.of(config), precision=precision, lora=None, frozen=True)
        model = build_model(model_config, directory, options)
        # It is not balanced, and runs without gradients: nothing is counted or recomputed.
        unbalanced = {"aux_loss_coef": 0.0, "z_loss_coef": 0.0, "bias_update_rate": 0.0}
        moe = config.moe.unplaced.model_copy(update=unbalanced)
        return cls(model_config, directory, model, plan_model(model, layout, ShardOptions(precision, moe)))

    @property
    def kept(self) -> str:
        """Words of the plan about how its weights are kept."""
        precision = self.plan.options.precision
        packed = "" if precision.frozen is None else f", experts and linear layers in {precision.frozen}"
        return f"frozen, in {precision.compute}{packed}"

    def shard(self, mesh: "Mesh") -> None:
        """Shard the model, which stays on meta. Collectives: every rank calls it; those of `shard_model`."""
        shard_model(self.model, self.plan, mesh)

    def load(self, mesh: "Mesh", audit: AuditMode) -> None:
        """Read the weights. Collectives: every rank calls it; those of `fill_and_audit`."""
        fill_and_audit(self.model, self.directory, mesh, audit)


@dataclass(frozen=True, slots=True)
class RunObjective:
    """The objective of a run's steps."""

    config: ObjectiveConfig
    precomputes: bool = False
    """True if the data sets get a `reference` before the first step."""
    adapters_off: bool = False
    """True if each step runs the reference model as well."""
    teacher: Teacher | None = None
    """The model that it learns from, which each step runs as well."""

    @classmethod
    def of(cls, config: Config, teacher: Teacher | None = None) -> "RunObjective":
        if not config.objective.reference:
            return cls(config.objective, teacher=teacher)
        # An adapter that is continued is part of what the run starts from.
        continued = config.checkpoint.resume_weights_only or (config.lora is not None and config.lora.from_adapter)
        new_adapters = config.lora is not None and not continued
        return cls(config.objective, not new_adapters, new_adapters)

    @property
    def runs_another(self) -> bool:
        """True if each step runs more than its own rows: the reference, a teacher or mismatched rows."""
        return self.adapters_off or self.teacher is not None or self.config.judged

    def line(self) -> str | None:
        """Return the line about the objective in the plan, or None."""
        if self.config.facts.rewards:
            return f"{self.config.name}; the head gives each sequence a number, at its last token"
        if not self.config.facts.keys:
            return None
        options = self.config.options.items()
        shown = [f"{key} {f'{value:g}' if isinstance(value, float) else value}" for key, value in options]
        said = ", ".join([self.config.name, *shown])
        if self.teacher is not None:
            return f"{said}; the teacher is {self.teacher.kept}"
        if not self.config.reference:
            return f"{said}; no reference"
        reference = "the base with adapters off" if self.adapters_off else "its log-probabilities before the first step"
        return f"{said}; reference: {reference}"

    def of_step(self, *, rows: int, target_tokens: int, evaluated: bool = False) -> Objective:
        """Return the objective of a step with that many rows and targets, or of an evaluation, with its figures."""
        return objective_of(self.config, rows=rows, target_tokens=target_tokens, evaluated=evaluated)

    def with_comparison(
        self, model: nn.Module, batches: Sequence[Batch], objective: Objective
    ) -> tuple[Objective, Sequence[Batch]]:
        """Run the reference or the teacher on `batches`, and return the objective and the batches with what it gives.

        Every rank calls it: a forward if each step runs the reference or a teacher, else nothing.
        """
        if self.teacher is not None:
            assert isinstance(objective, Distill)
            return objective.beside(self.teacher.model, batches)
        if not self.adapters_off:
            return objective, batches
        return objective, [
            batch if row_B is None else {**batch, "reference": row_B}
            for batch, row_B in zip(batches, self._of_reference(model, batches), strict=True)
        ]

    def with_kl_of_step(
        self, model: nn.Module, objective: Objective, mismatched: Iterable[Sequence[Batch]], desirable: int, mesh: Mesh
    ) -> Objective:
        """Return the objective of a step, or of an evaluation, with what kto estimates by all its mismatched rows.

        Args:
            mismatched: This rank's batches, as many at a time as run together; read for kto alone.
            desirable: Desirable rows of the whole step.

        Collectives: every rank calls it; for kto forwards without gradients and one all-reduce of a number.
        """
        if not isinstance(objective, Kto):
            return objective
        ratios = []
        for batches in mismatched:
            values = by_row(model, batches, LogProbabilities())
            _, compared = self.with_comparison(model, batches, objective)
            for batch, value_B in zip(compared, values, strict=True):
                if value_B is not None and _counts(mesh):
                    ratios.append((value_B - reference_of("kto", batch)) * batch["real_tokens"].any(dim=1))
        return objective.measured(ratios, desirable, mesh.device)

    def _of_reference(self, model: nn.Module, batches: Sequence[Batch]) -> list[torch.Tensor | None]:
        with adapters_off(model) if self.adapters_off else nullcontext():
            return by_row(model, batches, LogProbabilities())

    def give_reference(
        self,
        model: nn.Module,
        mesh: Mesh,
        datasets: Sequence[TokenizedDataset],
        layout: BatchLayout,
        checkpoint: Path | None,
        mismatched: Sequence[TokenizedDataset] = (),
    ) -> None:
        """Give each data set its `reference`: that of the `checkpoint` to go on from, else by `model` as it is now.

        Args:
            mismatched: For kto, the mismatched rows of the run, and of each evaluation, in the order of `datasets`.

        Collectives: every rank calls it; forwards over all samples, and one all-reduce of a number for each.
        """
        if checkpoint is not None:
            with raise_on_all_ranks("reading the checkpoint's reference"):
                _read_reference(checkpoint, datasets, mismatched)
            return
        for dataset in datasets:
            dataset.reference = self.table(model, mesh, dataset, layout)
        for dataset, others in zip(datasets, mismatched, strict=False):
            dataset.mismatched_reference = self.table(model, mesh, others, layout)

    def table(
        self, model: nn.Module, mesh: Mesh, dataset: TokenizedDataset, layout: BatchLayout
    ) -> npt.NDArray[np.float64]:
        """Return the reference's log-probability of each sample of `dataset`, by `model` as it is now.

        Collectives: every rank calls it and gets it; forwards over all samples, and one all-reduce.
        """
        groups = in_groups(EvaluationBatches(dataset, layout), mesh, "the reference")
        return table_of_rows(len(dataset), mesh, ((group, self._of_reference(model, group)) for group in groups))

    def first_loss_lines(self, model_config: Any, loss: float, target_tokens: int) -> Iterator[str]:
        """Return what the first step's loss means, for the terminal."""
        if self.config.of_responses or self.teacher is not None:
            return first_loss_of_responses_lines(self.config, loss)
        return first_loss_lines(model_config, loss, target_tokens)


def reference_file(datasets: Sequence[TokenizedDataset]) -> dict[str, bytes]:
    """Return what a checkpoint has of the data sets' references, by path: a table by the hash of each data set."""
    tables = {each.sha256(): torch.from_numpy(each.reference) for each in datasets if each.reference is not None}
    for name, dataset in zip(_mismatched_names(datasets), datasets, strict=True):
        if dataset.mismatched_reference is not None:
            tables[name] = torch.from_numpy(dataset.mismatched_reference)
    return {REFERENCE_FILE: safetensors.torch.save(tables)} if tables else {}


def _mismatched_names(datasets: Sequence[TokenizedDataset]) -> list[str]:
    """Return the names of the tables of mismatched rows: the first data set is trained on, over and over."""
    return [f"{each.sha256()}/{'run' if each is datasets[0] else 'evaluation'}" for each in datasets]


def _read_reference(
    checkpoint: Path, datasets: Sequence[TokenizedDataset], mismatched: Sequence[TokenizedDataset]
) -> None:
    """Read it. Raises `InputError` for data or steps that the run did not begin with, else `IntegrityError`."""
    tables = safetensors.torch.load(read_small(checkpoint, read_manifest(checkpoint), REFERENCE_FILE))
    for dataset in datasets:
        table = tables.get(dataset.sha256())
        if table is None:
            raise InputError(
                f"{checkpoint} has no log-probabilities of the reference for data.eval, which has changed, and the "
                "weights that the run began with have been trained since; put data.eval back",
                key="checkpoint.no-reference",
            )
        dataset.reference = table.numpy()
    for name, dataset, others in zip(_mismatched_names(datasets), datasets, mismatched, strict=False):
        known = dataset.mismatched_reference = tables[name].numpy()
        if len(known) < len(others):
            raise InputError(
                f"{checkpoint} has log-probabilities of the reference for the {len(known):,} rows that the run was to "
                f"have, not for {len(others):,}, and the weights that it began with have been trained since; put "
                "train.num_epochs and train.max_steps back",
                key="checkpoint.no-reference",
            )


def table_of_rows(
    rows: int, mesh: Mesh, groups: Iterable[tuple[Sequence[Batch], Sequence[torch.Tensor | None]]]
) -> npt.NDArray[np.float64]:
    """Return `[rows]`, by row number, from what each rank has of its batches (`by_row`); the same on every rank.

    Collectives: every rank calls it; one all-reduce.
    """
    table = torch.zeros(rows, dtype=torch.float64, device=mesh.device)
    for batches, values in groups:
        for batch, value_B in zip(batches, values, strict=True):
            # Of the ranks that share a row one counts. Rows that only keep a rank busy are not real.
            if value_B is not None and _counts(mesh):
                table.index_add_(0, batch["row_numbers"], value_B * batch["real_tokens"].any(dim=1))
    dist.all_reduce(table)
    return table.cpu().numpy()


def _counts(mesh: Mesh) -> bool:
    """Return whether this rank counts, of those that share rows."""
    return mesh.coordinate("cp") == mesh.coordinate("tp") == 0


def by_row(
    model: nn.Module, batches: Sequence[Batch], objective: LogProbabilities | NextWords
) -> list[torch.Tensor | None]:
    """Return the figures of each row, `[B]` float64 for each batch; None on ranks without the last pipeline stage.

    The model computes as in evaluation, and does not count routing. Every rank calls it, with equally many batches.
    """
    with evaluating(model):
        terms = evaluate_terms(model, batches, objective)
    if not terms:
        return [None] * len(batches)
    # Behind a batch's own rows may be some that a pipeline has added.
    return [term.figures_F[: len(batch["input_ids"])] for batch, term in zip(batches, terms, strict=True)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch the model's randomness and its counting of routing off inside the block."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def in_groups(batches: EvaluationBatches, mesh: Mesh, what: str) -> Iterator[list[Batch]]:
    """Yield batches on the device, as many at a time as keep the stages of a pipeline busy.

    `what`: what is being done with them, for the progress bar; no bar without it.
    """
    remaining = tracked(batches, len(batches), what, "batches") if what else iter(batches)
    at_a_time = 4 * mesh.layout.pp if mesh.layout.pp > 1 else 1
    while group := list(itertools.islice(remaining, at_a_time)):
        yield [on_device(batch, mesh.device) for batch in group]


def on_device(batch: Batch, device: torch.device) -> dict[str, torch.Tensor]:
    """Return a batch with its tensors on `device`."""
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}


def first_loss_lines(config: Any, loss: float, target_tokens: int) -> Iterator[str]:
    """Return lines about `loss`, the mean over `target_tokens` tokens before the first update.

    `config` is the model's. Returns nothing for a loss that is not finite: the step reports that itself.
    """
    if not math.isfinite(loss):
        return
    text = config.get_text_config()
    vocabulary = int(text.vocab_size)
    uniform = math.log(vocabulary)
    yield f"first loss {loss:.3f} before any update; a uniform guess scores ln {vocabulary:,} = {uniform:.3f}"
    untrained = uniform + untrained_excess(text, target_tokens)
    if loss > untrained:
        yield (
            f"warning: step 1 loss {loss:.3f} is worse than a uniform guess (ln {vocabulary:,} = {uniform:.3f}), and "
            f"than an untrained model of this shape would be ({untrained:.3f}): the weights may not be what the config "
            "describes, or the data not what the tokenizer was made for"
        )


def first_loss_of_responses_lines(objective: ObjectiveConfig, loss: float) -> Iterator[str]:
    """Return the same for an objective of responses: before an update a model is its reference, and its loss known."""
    if not math.isfinite(loss):
        return
    if objective.at_reference is None:
        yield f"first loss {loss:.4f} before any update"
        return
    words, value = objective.at_reference
    yield f"first loss {loss:.4f} before any update; a model that equals its reference has {words} = {value:.4f}"
    if abs(loss - value) > _ROUNDING_OF_PAIRS:
        yield (
            f"warning: step 1 loss {loss:.4f} is not {words}: the reference is not the model that training starts "
            "from, or its log-probabilities are far from exact in precision.compute"
        )


def untrained_excess(text_config: Any, target_tokens: int) -> float:
    """Return how far above ln(V) the loss of freely initialised weights can lie.

    The last norm leaves hidden states of RMS 1, so logits are normal with σ = initializer_range · √hidden. Their mean
    loss is ln(V) + σ²/2; the mean over n targets spreads by σ/√n, of which three are allowed. A text repeats its
    tokens, whose logits hardly differ between positions, so that n is 100 at most (one by the sum of the squared shares
    of its tokens, 0.010 to 0.013 in English).
    """
    initializer = float(getattr(text_config, "initializer_range", None) or _INITIALIZER_RANGE)
    sigma = initializer * math.sqrt(int(text_config.hidden_size))
    return sigma**2 / 2 + 3 * sigma / math.sqrt(min(max(target_tokens, 1), _DIFFERENT_TARGETS))
