"""Run the training loop, to be read from top to bottom: steps, accumulation, clipping, update, report, evaluation.

It gets a sharded model and batches, and does not know how they were made. Every rank runs it in step: each call of
`_train_step` is the same sequence of collectives on all of them.
"""

import itertools
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from expertmesh.config import Config
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.distributed.mesh import Mesh, set_timeout
from expertmesh.experts.balance import attached_balance, update_router_bias
from expertmesh.experts.placement import LOAD_FILE
from expertmesh.step.forward_backward import Order, minimise
from expertmesh.step.grad_norm import clip_grad_norm_
from expertmesh.training.checkpoints import RunCheckpoints
from expertmesh.training.control import Control, Stopped
from expertmesh.training.evaluation import Evaluation
from expertmesh.training.exchange import NonFiniteGuard, RankFacts, StepFacts, exchange
from expertmesh.training.objective import RunObjective, on_device
from expertmesh.training.reporting.metrics import ExpertLoad, StepMetrics, tokens_are_due
from expertmesh.training.reporting.profiling import profiling

if TYPE_CHECKING:
    from expertmesh.data import Step, StreamBatches, TrainingBatches
    from expertmesh.training.reporting.reporter import Reporter
    from expertmesh.training.resume import Counters

log = logging.getLogger(__name__)


@dataclass(slots=True)
class TrainingLoop:
    """Everything that a run needs after its setup. `run` trains from `counters.step` to the end."""

    config: Config
    mesh: Mesh
    model: nn.Module
    objective: RunObjective
    order: Order
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    train_batches: "TrainingBatches | StreamBatches"
    evaluation: Evaluation
    total_steps: int
    reporter: "Reporter"
    expert_load: ExpertLoad
    checkpoints: RunCheckpoints
    control: Control
    counters: "Counters"

    def run(self) -> None:
        """Train up to `total_steps` optimizer steps.

        Raises:
            Stopped: On all ranks, when one of them was asked to stop: after the step, with its checkpoint on the disk.
            IntegrityError: Losses stay non-finite.
        """
        clock = _Clock(self.counters, self.config.log.every_steps)
        guard = NonFiniteGuard(self.counters.skipped_in_a_row)
        selection = self.checkpoints.selection
        first = self.counters.step + 1
        self.expert_load.restore(self.counters.expert_load, first)
        profile = profiling(self.control.profile, Path(self.config.output_dir, "profile"), self.mesh.rank)
        with self.control.accepting_stop(), profile as end_step:
            self.control.progress.at(first, "reading data")
            steps = iter(()) if selection.ends() else self._steps()
            for number, step in enumerate(steps, start=first):
                result = self._train_step(number, step, guard)
                self.counters.step, self.counters.skipped_in_a_row = number, guard.in_a_row
                self.counters.tokens += step.tokens
                self.counters.stream = step.position
                if number == first:
                    set_timeout(self.mesh, self.config.distributed.timeout_seconds)
                if number == 1 and self.mesh.rank == 0:
                    for line in self.objective.first_loss_lines(
                        self.model.config, result.facts.loss, step.target_tokens
                    ):
                        (log.warning if line.startswith("warning") else log.info)(line)
                self.checkpoints.settle(result.facts.statuses)
                if result.skipped or number % self.config.log.every_steps == 0 or number == self.total_steps:
                    self._report(number, step, result, clock)
                every = self.config.train.eval_every_steps
                last = number == self.total_steps
                best = False
                if self.evaluation.sets and (last or (every and number % every == 0)):
                    self.control.progress.at(number, "evaluating")
                    paused = time.monotonic()
                    best = selection.saw(number, self._evaluate(number))
                    clock.skip(time.monotonic() - paused)
                end_step()
                last = last or selection.ends()
                self._checkpoint(number, result.facts, clock, wanted=best or (last and self.checkpoints.saves_last()))
                if last:
                    break
                self.control.progress.at(number + 1, "reading data")
            self._write_load()
            for line in (*selection.last_lines(), *self.expert_load.last_lines()) if self.mesh.rank == 0 else ():
                log.info(line)
            self.control.progress.at(self.counters.step, "waiting for the last checkpoint")
            self.checkpoints.finish()

    def _report(self, number: int, step: "Step", result: "_StepResult", clock: "_Clock") -> None:
        tokens_LE, peak_memory = self.expert_load.take(number)
        elapsed, seconds = clock.read()
        steps = clock.restart(number)
        balance = attached_balance(self.model)
        due = tokens_are_due(number, self.config.log.every_steps, self.total_steps)
        self.reporter.step(
            StepMetrics(
                step=number,
                epoch=step.progress,
                loss=result.facts.loss,
                grad_norm=result.facts.grad_norm,
                learning_rate=result.learning_rate,
                target_tokens=step.target_tokens,
                tokens_per_second=self.counters.tokens / seconds,
                peak_memory_bytes=peak_memory,
                elapsed_seconds=elapsed,
                step_seconds=seconds / steps,
                expert_load=self.expert_load.summary(tokens_LE),
                expert_tokens=tokens_LE.tolist() if due else None,
                figures=result.facts.figures,
                aux_loss=result.facts.aux_loss if balance.aux_loss_coef else None,
                z_loss=result.facts.z_loss if balance.z_loss_coef else None,
                skipped=result.skipped,
            )
        )
        self.counters.tokens = 0

    def _evaluate(self, number: int) -> dict[str, Any]:
        """Evaluate on every set and report it; return the row of `metrics.jsonl`."""
        began = time.monotonic()
        metrics = replace(self.evaluation.metrics(self.model), seconds=time.monotonic() - began)
        self.reporter.evaluation(number, metrics)
        return metrics.row()

    def _checkpoint(self, number: int, facts: StepFacts, clock: "_Clock", *, wanted: bool) -> None:
        """Save if it is `wanted`, by the rules, or after a request to stop; raise `Stopped` after the latter."""
        if facts.stop or wanted or self.checkpoints.is_due(number, facts.overdue):
            self.control.progress.at(number, "saving a checkpoint")
            paused = time.monotonic()
            if self.checkpoints.saved_step != number:
                self.counters.elapsed_seconds, self.counters.seconds = clock.read()
                self.counters.expert_load = self.expert_load.pending() if self.counters.tokens else None
                self.reporter.sync()
                self._write_load()
                self.checkpoints.save(self.counters)
            clock.skip(time.monotonic() - paused)
        if facts.stop:
            self.checkpoints.finish()
            if self.mesh.rank == 0:
                log.info(f"stopped by {facts.stop} after step {number}; the same command continues from there")
            self.checkpoints.upload_before_stopping()
            raise Stopped(facts.stop)

    def _write_load(self) -> None:
        with raise_on_all_ranks(f"writing {LOAD_FILE}"):
            if self.mesh.rank == 0:
                self.expert_load.write(Path(self.config.output_dir))

    def _steps(self) -> Iterator["Step"]:
        """Yield the steps after `counters.step`."""
        steps = self.train_batches.steps(self.counters.step, self.counters.stream)
        return itertools.islice(steps, self.total_steps - self.counters.step)

    def _train_step(self, number: int, step: "Step", guard: NonFiniteGuard) -> "_StepResult":
        """Run one optimizer step: backward over all micro-batches, one norm, one decision, one update.

        A skipped step uses up its place in the schedule.
        """
        self.control.progress.at(number, "forward and backward")
        batches = [on_device(batch, self.mesh.device) for batch in step.micro_batches]
        objective = self.objective.over(rows=step.rows, target_tokens=step.target_tokens)
        mismatched = [on_device(batch, self.mesh.device) for batch in step.mismatched]
        objective = self.objective.measured(self.model, objective, [mismatched], step.desirable, self.mesh)
        objective, rows = self.objective.beside(self.model, batches, objective)
        losses = minimise(self.model, rows, objective, order=self.order)
        self.control.progress.at(number, "update")
        grad_norm = clip_grad_norm_(self.model, self.config.optim.max_grad_norm)

        own = RankFacts(self.control.stop_requested(), self.checkpoints.overdue(), self.checkpoints.writer.status())
        facts = exchange(losses, grad_norm, own, objective.figures, self.mesh.device)
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        skipped = guard.check(number, facts, losses, self.model)
        if skipped is None:
            self.optimizer.step()
        update_router_bias(self.model, skipped=skipped is not None)
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        return _StepResult(facts, learning_rate, skipped)


@dataclass(frozen=True, slots=True)
class _StepResult:
    facts: StepFacts
    learning_rate: float
    skipped: str | None
    """The reason why the optimizer did not step; None if it did."""


class _Clock:
    """Seconds since the run began and since the last report, over all its interruptions."""

    def __init__(self, counters: "Counters", every: int) -> None:
        # Of a resumed run; the row of a skipped step in between is not known.
        self._step = counters.step - (counters.step % every if counters.tokens else 0)
        self._began = time.monotonic() - counters.elapsed_seconds
        self._reported = time.monotonic() - counters.seconds

    def read(self) -> tuple[float, float]:
        """Return (since the run began, since the last report)."""
        now = time.monotonic()
        return now - self._began, now - self._reported

    def restart(self, step: int) -> int:
        """Begin a new interval after the report of `step`; return how many steps the last one had."""
        self._reported, steps, self._step = time.monotonic(), step - self._step, step
        return steps

    def skip(self, seconds: float) -> None:
        """Leave `seconds` out of the time since the last report."""
        self._reported += seconds
