"""Run the training loop, to be read from top to bottom: steps, accumulation, clipping, update, report, evaluation.

It gets a sharded model and batches, and does not know how they were made. Every rank runs it in step: each call of
`_train_step` is the same sequence of collectives on all of them. With `train --profile 3:5` some of its steps are
recorded by torch.profiler, at the end of this file.
"""

import itertools
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from expertmesh.compat import memory_page, record_memory
from expertmesh.data import Step
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.distributed.mesh import set_timeout
from expertmesh.experts.balance import attached_balance, update_router_bias
from expertmesh.experts.placement import LOAD_FILE
from expertmesh.io.terminal import plural
from expertmesh.parallel.sequence import Batch
from expertmesh.step.forward_backward import run_step
from expertmesh.step.grad_norm import clip_grad_norm_
from expertmesh.training.control import Control, Stopped
from expertmesh.training.evaluation import evaluate
from expertmesh.training.exchange import NonFiniteGuard, RankFacts, StepFacts, exchange
from expertmesh.training.objective import on_device
from expertmesh.training.reporting.metrics import ExpertLoad, StepMetrics, tokens_are_due
from expertmesh.training.reporting.reporter import Reporter
from expertmesh.training.resume import Counters
from expertmesh.training.run_state import RunCheckpoints, RunState
from expertmesh.training.startup.prepare import Prepared

log = logging.getLogger(__name__)
_MEMORY_EVENTS = 200_000


@dataclass(slots=True)
class TrainingLoop:
    """Everything that a run needs after its setup."""

    run: Prepared
    """Configuration, mesh, sharded model and batches."""
    state: RunState
    """Optimizer and schedule of this rank's shards, and the counters, which are part of every checkpoint."""
    reporter: Reporter
    """The sinks of metrics."""
    expert_load: ExpertLoad
    """Tokens per expert since the last report."""
    checkpoints: RunCheckpoints
    """Saves and uploads, and when they are due."""
    control: Control
    """Requests to stop, and the progress for the launcher."""

    def train(self) -> None:
        """Train up to `total_steps` optimizer steps.

        Raises:
            Stopped: On all ranks, when one was requested to stop: after the step, with its checkpoint on the disk.
            IntegrityError: Losses stay non-finite.
        """
        config, counters = self.run.config, self.state.counters
        clock = _Clock(counters)
        guard = NonFiniteGuard(counters.skipped_in_a_row)
        selection = self.checkpoints.selection
        first = counters.step + 1
        self.expert_load.restore(counters.expert_load, first)
        profile = profiling(self.control.profile, Path(config.output_dir, "profile"), self.run.mesh.rank)
        with self.control.accepting_stop(), profile as end_step:
            self.control.progress.at(first, "reading data")
            # A run that stopped early trains no further step when it is started again.
            steps: Iterator[Step] = iter(())
            if not selection.ends():
                left = self.run.total_steps - counters.step
                steps = itertools.islice(self.run.batches.steps(counters.step, counters.stream), left)
            for number, step in enumerate(steps, start=first):
                result = self._train_step(number, step, guard)
                counters.step, counters.skipped_in_a_row = number, guard.in_a_row
                counters.tokens += step.tokens
                counters.steps += 1
                counters.stream = step.position
                # The first step has a longer timeout.
                if number == first:
                    set_timeout(self.run.mesh, config.distributed.timeout_seconds)
                if number == 1 and self.run.mesh.rank == 0:
                    for line in self.run.checked.objective.first_loss_lines(
                        self.run.model.config, result.facts.loss, step.target_tokens
                    ):
                        (log.warning if line.startswith("warning") else log.info)(line)
                # Publish a checkpoint that all ranks have written; never waits.
                self.checkpoints.settle(result.facts.statuses)
                due = number % config.log.every_steps == 0 or number == self.run.total_steps
                if reported := due or result.skipped is not None:
                    self._report(number, step, result, clock)
                every = config.train.eval_every_steps
                last, saves_last = number == self.run.total_steps, config.checkpoint.every_steps is not None
                best = False
                if self.run.evaluation and (last or (every and number % every == 0)):
                    best = self._evaluate(number, clock)
                end_step()
                ends = selection.ends()
                if ends and not reported:
                    self._report(number, step, result, clock)
                last = last or ends
                self._checkpoint(number, result.facts, clock, wanted=best or (last and saves_last))
                if last:
                    break
                self.control.progress.at(number + 1, "reading data")
            self._write_load()
            for line in (*selection.last_lines(), *self.expert_load.last_lines()) if self.run.mesh.rank == 0 else ():
                log.info(line)
            self.control.progress.at(counters.step, "waiting for the last checkpoint")
            self.checkpoints.finish()

    def _report(self, number: int, step: Step, result: "_StepResult", clock: "_Clock") -> None:
        tokens_LE, peak_memory = self.expert_load.take(number)
        elapsed, seconds = clock.read()
        clock.restart()
        counters = self.state.counters
        balance = attached_balance(self.run.model)
        due = tokens_are_due(number, self.run.config.log.every_steps, self.run.total_steps)
        self.reporter.emit(
            StepMetrics(
                step=number,
                epoch=step.progress,
                loss=result.facts.loss,
                grad_norm=result.facts.grad_norm,
                learning_rate=result.learning_rate,
                target_tokens=step.target_tokens,
                tokens_per_second=counters.tokens / seconds,
                peak_memory_bytes=peak_memory,
                elapsed_seconds=elapsed,
                step_seconds=seconds / counters.steps,
                expert_load=self.expert_load.summary(tokens_LE),
                expert_tokens=tokens_LE.tolist() if due else None,
                figures=result.facts.figures,
                aux_loss=result.facts.aux_loss if balance.aux_loss_coef else None,
                z_loss=result.facts.z_loss if balance.z_loss_coef else None,
                skipped=result.skipped,
            )
        )
        counters.tokens = counters.steps = 0

    def _evaluate(self, number: int, clock: "_Clock") -> bool:
        """Evaluate and report; return whether the figures are the best so far."""
        self.control.progress.at(number, "evaluating")
        paused = time.monotonic()
        figures = evaluate(self.run)
        figures = replace(figures, step=number, seconds=time.monotonic() - paused)
        self.reporter.emit(figures)
        best = self.checkpoints.selection.saw(number, figures.row())
        clock.skip(time.monotonic() - paused)
        return best

    def _checkpoint(self, number: int, facts: StepFacts, clock: "_Clock", *, wanted: bool) -> None:
        """Save if it is `wanted`, by the rules, or after a request to stop; raise `Stopped` after the latter."""
        if facts.stop or wanted or self.checkpoints.is_due(number, facts.overdue):
            self.control.progress.at(number, "saving a checkpoint")
            paused = time.monotonic()
            self.state.counters.elapsed_seconds, self.state.counters.seconds = clock.read()
            self.state.counters.expert_load = self.expert_load.pending() if self.state.counters.tokens else None
            self.reporter.sync()
            self._write_load()
            self.checkpoints.save()
            clock.skip(time.monotonic() - paused)
        if facts.stop:
            self.checkpoints.finish()
            if self.run.mesh.rank == 0:
                also = "" if self.run.config.checkpoint.resume == "auto" else " with checkpoint.resume=auto"
                log.info(f"stopped by {facts.stop} after step {number}; the same command{also} continues from there")
            self.checkpoints.upload_before_stopping()
            raise Stopped(facts.stop)

    def _write_load(self) -> None:
        with raise_on_all_ranks(f"writing {LOAD_FILE}"):
            if self.run.mesh.rank == 0:
                self.expert_load.write(Path(self.run.config.output_dir))

    def _train_step(self, number: int, step: Step, guard: NonFiniteGuard) -> "_StepResult":
        """Run one optimizer step: backward over all micro-batches, one norm, one decision, one update.

        A skipped step uses up its place in the schedule.
        """
        model, mesh, chosen = self.run.model, self.run.mesh, self.run.checked.objective
        self.control.progress.at(number, "forward and backward")
        # 1. The objective. It divides by numbers of the whole step, which every rank knows without a collective.
        batches: Sequence[Batch] = [on_device(batch, mesh.device) for batch in step.micro_batches]
        objective = chosen.of_step(rows=step.rows, target_tokens=step.target_tokens)
        # For kto: forwards of the mismatched rows without gradients, and one all-reduce of a number.
        mismatched = [on_device(batch, mesh.device) for batch in step.mismatched]
        objective = chosen.with_kl_of_step(model, objective, [mismatched], step.desirable, mesh)
        # With a reference or a teacher: one more forward of each micro-batch, without gradients.
        objective, batches = chosen.with_comparison(model, batches, objective)
        # 2. Forward and backward of all micro-batches; gradients are reduced over the ranks.
        losses = run_step(model, batches, objective, order=self.run.checked.order)
        self.control.progress.at(number, "update")
        # 3. One norm over all shards, and clipping by it; a norm that is not finite scales nothing.
        grad_norm = clip_grad_norm_(model, self.run.config.optim.max_grad_norm)
        # 4. One decision for all ranks, with the only wait for the device after backward.
        own = RankFacts(self.control.stop_requested(), self.checkpoints.overdue(), self.checkpoints.writer.status())
        facts = exchange(losses, grad_norm, own, objective.figures, mesh.device)
        learning_rate = float(self.state.optimizer.param_groups[0]["lr"])
        skipped = guard.check(number, facts, losses, model)
        # 5. The update. Muon and 8-bit blocks communicate: no rank may skip it alone, and `skipped` is equal on all.
        if skipped is None:
            self.state.optimizer.step()
        # After a skipped step too, whose counts of tokens must not move the biases in the next one.
        update_router_bias(model, skipped=skipped is not None)
        self.state.optimizer.zero_grad(set_to_none=True)
        with warnings.catch_warnings() if skipped else nullcontext():
            # Where it is the first step, torch would blame the order of the calls.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            self.state.schedule.step()
        return _StepResult(facts, learning_rate, skipped)


@dataclass(frozen=True, slots=True)
class _StepResult:
    facts: StepFacts
    learning_rate: float
    skipped: str | None
    """The reason why the optimizer did not step; None if it did."""


class _Clock:
    """Seconds since the run began and since the last report, over all its interruptions."""

    def __init__(self, counters: Counters) -> None:
        self._began = time.monotonic() - counters.elapsed_seconds
        self._reported = time.monotonic() - counters.seconds

    def read(self) -> tuple[float, float]:
        """Return (since the run began, since the last report)."""
        now = time.monotonic()
        return now - self._began, now - self._reported

    def restart(self) -> None:
        """Begin a new interval after a report."""
        self._reported = time.monotonic()

    def skip(self, seconds: float) -> None:
        """Leave `seconds` out of the time since the last report."""
        self._reported += seconds


@contextmanager
def profiling(steps: tuple[int, int] | None, directory: Path, rank: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call at the end of each step inside the block, which records some steps of this rank.

    One trace a rank, for ui.perfetto.dev or chrome://tracing. Expert layers have spans `expertmesh::dispatch`,
    `experts` and `combine`; their backward goes by the names of autograd functions. On CUDA also the history of memory,
    for torch's own viewer. Outside of these steps nothing is recorded, and nothing costs.

    `steps`: the first and the last, counted from the start of the block; the step before the first warms the profiler
    up. No communication.
    """
    if steps is None:
        yield lambda: None
        return
    # Kineto prints marks for tracing tools (USDT) above its errors; it reads the level when it first profiles.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    first, last = steps
    prefix, done, written = directory / f"steps-{first}-{last}-rank-{rank}", 0, False

    def write(profiler: profile) -> None:
        nonlocal written
        try:
            directory.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(f"{prefix}.json.gz")
            if torch.cuda.is_available():
                Path(f"{prefix}-memory.html").write_text(memory_page(), encoding="utf-8")
                record_memory(None)
        except (OSError, RuntimeError) as error:
            log.warning(f"warning: the profile cannot be written: {error}")
            return
        written = True
        if rank == 0:
            log.info(f"profile    steps {first} to {last} of this start: {prefix}.json.gz, and one for each other rank")

    def end_step() -> None:
        nonlocal done
        done += 1
        if done == first - 1 and torch.cuda.is_available():
            record_memory(_MEMORY_EVENTS)
        profiler.step()

    warm_up = min(1, first - 1)
    with warnings.catch_warnings():  # of a first step, before which there is none to warm up in
        warnings.filterwarnings("ignore", "Profiler won't be using warmup")
        when = schedule(wait=first - 1 - warm_up, warmup=warm_up, active=last - first + 1, repeat=1)
    if first == 1 and torch.cuda.is_available():
        record_memory(_MEMORY_EVENTS)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=kinds, schedule=when, on_trace_ready=write) as profiler:
        yield end_step
    if rank == 0 and not written:
        log.warning(
            f"warning: nothing was profiled: this start had {plural(done, 'step')}, and --profile begins at {first}"
        )
