"""Report a run: each event of the loop goes to `metrics.jsonl`, to trackers when requested, to log and terminal.

Only rank 0 writes. Numbers that are not finite are written as null, because JSON has no NaN. What a start is stands in
run.json (start.py), not here.
"""

import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from expertmesh.checkpoint.manifest import read_manifest
from expertmesh.checkpoint.small_files import read_state_file
from expertmesh.config.errors import InputError
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.io.directory import io_errors, replace_synced
from expertmesh.io.reading import MAX_METRICS_BYTES, opened, rows
from expertmesh.io.terminal import bars, has_bars
from expertmesh.training.control import Stopped
from expertmesh.training.optimizers.build import warmup_steps
from expertmesh.training.reporting.metrics import EvalMetrics, ExpertLoad, StepMetrics
from expertmesh.training.reporting.record import MoeLayer
from expertmesh.training.reporting.start import record_start, write_data_record
from expertmesh.training.reporting.trackers import Trackers, open_trackers

if TYPE_CHECKING:
    from expertmesh.training.reporting.record import Forecast
    from expertmesh.training.resume import Counters
    from expertmesh.training.startup.prepare import Prepared

log = logging.getLogger(__name__)
# Collapse: how near to ln(vocabulary) a loss is that of a guess, and from how many tokens an expert should have some.
_NEARLY = 0.005
_TOKENS_PER_EXPERT = 32
# What reading a line that is no row raises.
_NO_ROW = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)
Event = StepMetrics | EvalMetrics
"""A report of the loop, which is a row of metrics.jsonl."""


def keep_rows(path: Path, done: int) -> float:
    """Drop the rows of steps after `done` from a metrics.jsonl, and a last line that was cut short.

    Raises `InputError` for a file that cannot be read or written, or has a line that is no row. Returns
    `elapsed_seconds` of the last row that had one, dropped ones too; 0 without any.
    """
    kept, line, elapsed = [], b"\n", 0.0
    with io_errors(path, path.stat().st_size if path.exists() else 0):
        if path.exists():
            with opened(path, MAX_METRICS_BYTES) as file:
                for number, line in enumerate(rows(file, path), start=1):
                    with suppress(*_NO_ROW):
                        seconds = float(json.loads(line)["elapsed_seconds"])
                        elapsed = max(0.0, seconds) if math.isfinite(seconds) else elapsed
                    if done and line.endswith(b"\n") and _step_of(line, path, number) <= done:
                        kept.append(line)
        if done and not line.endswith(b"\n"):  # blocks of zeros are what a power loss leaves
            what = "zeros" if line.strip(b"\0") == b"" else "a row that was cut short"
            log.info(f"{path}: ended in {what}; cut back to its last whole row")
        replace_synced(path, b"".join(kept))
    return elapsed


def _step_of(line: bytes, path: Path, number: int) -> int:
    try:
        return int(json.loads(line)["step"])
    except _NO_ROW as error:
        raise InputError(
            f"{path}:{number}: is no row of metrics; remove the line, or move the file away", key="run.damaged-metrics"
        ) from error


class MetricsFile:
    """The metrics.jsonl of a run that goes on after `done` steps.

    `before`: the seconds that its rows covered, including those that are dropped.
    """

    def __init__(self, path: Path, done: int) -> None:
        self.before = keep_rows(path, done)
        self.path = path
        self.file = path.open("ab", buffering=0)

    def take(self, event: Event) -> None:
        self.write(event.row())

    def write(self, row: dict[str, Any]) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        line = json.dumps(finite, allow_nan=False).encode() + b"\n"
        with io_errors(self.path, len(line)):
            while line:
                line = line[self.file.write(line) :]

    def sync(self) -> None:
        with io_errors(self.path, 0):
            os.fsync(self.file.fileno())

    def close(self, failed: bool = False) -> None:
        self.file.close()


@dataclass(slots=True)
class Collapse:
    """Signs that a run no longer learns, each reported once. Experts are counted where a step has at least
    _TOKENS_PER_EXPERT tokens for each.
    """

    vocabulary: int | None
    """The model's vocabulary size; None if the loss is no cross-entropy."""
    layer: MoeLayer
    """Any: all have as many experts."""
    warmup: int = 0
    """Steps before which routers are not looked at: those of a random model may need as long to spread."""
    reports: int = 50
    """Reports in a row with collapsed routers after which the user is warned."""
    _seen: Counter[int] = field(default_factory=Counter)

    def lines(self, metrics: StepMetrics) -> Iterator[str]:
        """Return the lines to print after this report."""
        if metrics.skipped:
            return
        uniform = math.log(self.vocabulary) if self.vocabulary is not None else math.inf
        many = metrics.target_tokens * (self.layer.top_k or 1) >= _TOKENS_PER_EXPERT * self.layer.experts
        loads = [(load["max_over_mean"], load["dead"]) for load in metrics.expert_load]
        collapsed = [each for each in loads if self.layer.has_collapsed(*each)] if many else []
        load, dead = max(collapsed, key=lambda each: each[::-1], default=(0.0, 0))
        signs = (
            ("the gradient norm has been 0: nothing is trained", metrics.grad_norm == 0, 3),
            (
                f"the loss has been that of a uniform guess, ln {self.vocabulary or 0:,} = {uniform:.2f}: the model "
                "has collapsed, or learns nothing",
                abs(metrics.loss - uniform) < _NEARLY * uniform,
                20,
            ),
            (
                f"routers have collapsed, now in {len(collapsed)} of {len(loads)} layers: in one {dead} of "
                f"{self.layer.experts} experts are without a token, and the busiest has {load:.1f} times the mean of "
                f"at most {self.layer.most_load:.3g}; lower optim.learning_rate, raise moe.aux_loss_coef or "
                "moe.bias_update_rate, or set moe.router to frozen",
                bool(collapsed) and metrics.step > self.warmup,
                self.reports,
            ),
        )
        for number, (sign, shows, reports) in enumerate(signs):
            warned = self._seen[number] >= reports
            self._seen[number] = self._seen[number] + 1 if shows or warned else 0
            if not warned and self._seen[number] == reports:
                yield f"warning: for {reports} reports in a row {sign}"


class Console:
    """Lines for the log, and on a terminal a bar below them."""

    def __init__(self, total_steps: int, done: int, devices: int, collapse: Collapse) -> None:
        self.total_steps, self.devices, self.collapse = total_steps, devices, collapse
        self._began: tuple[int, float] | None = None
        self._open = ExitStack()
        self._bars = self._open.enter_context(bars()) if has_bars() else None
        self._task = self._bars.add_task("training", total=total_steps, completed=done) if self._bars else None

    def take(self, event: Event) -> None:
        if isinstance(event, EvalMetrics):
            for line in event.lines():
                log.info(f"step {event.step}  {line}")
            return
        log.info(event.line(self.total_steps, self._seconds_left(event), self.devices, self.collapse.layer))
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=event.step, description=f"training  loss {event.loss:.4f}")
        for line in self.collapse.lines(event):
            log.warning(line)

    def _seconds_left(self, event: StepMetrics) -> float:
        """Return the seconds left at the pace since this start's first report, pauses included."""
        now, left = time.monotonic(), self.total_steps - event.step
        if self._began is None:
            self._began = event.step, now
            return left * event.step_seconds
        step, began = self._began
        return left * (now - began) / (event.step - step)

    def sync(self) -> None:
        pass  # what is printed is on its way

    def close(self, failed: bool = False) -> None:
        self._open.close()


@dataclass(slots=True)
class Reporter:
    """The one stream of what a run reports: each event goes to all sinks. A context that closes them.

    Only rank 0 has sinks; on the other ranks events go nowhere.
    """

    sinks: list["MetricsFile | Console | Trackers"] = field(default_factory=list)
    peak_tokens_per_second: float | None = None
    """`Forecast.peak_tokens_per_second`; without it there is no `mfu`."""

    def emit(self, event: Event) -> None:
        """Report a step or an evaluation."""
        if isinstance(event, StepMetrics) and self.peak_tokens_per_second is not None:
            event = replace(event, mfu=event.tokens_per_second / self.peak_tokens_per_second)
        for sink in self.sinks:
            sink.take(event)

    def sync(self) -> None:
        """Let the disk hold every row so far: a checkpoint that is resumed must not have lost its steps' rows."""
        for sink in self.sinks:
            sink.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for sink in self.sinks:
            sink.close(failed=kind is not None and not issubclass(kind, Stopped))


def open_reporter(run: "Prepared") -> Reporter:
    """Open what may refuse before weights are read: the trackers.

    Raises `InputError` on all ranks if one cannot be opened. Collectives: every rank calls it; one small all-reduce.
    """
    reporter = Reporter()
    with raise_on_all_ranks("opening the trackers"):
        if run.mesh.rank == 0:
            done = 0 if run.start is None else read_state_file(run.start, read_manifest(run.start)).step
            reporter.sinks = [trackers := open_trackers(run.config, done)]
            for name, tracker in trackers.trackers.items():
                log.info(f"tracker    {name}: {tracker.known_as}")
    return reporter


def start_reports(
    reporter: Reporter, run: "Prepared", forecast: "Forecast | None", counters: "Counters", began: float
) -> ExpertLoad:
    """Open `output_dir/metrics.jsonl` and the display that fits the terminal; add this start to the run's run.json.

    A run that continues after some steps goes on in the same file; rows of later steps are removed. `began`: when this
    process began, of `time.monotonic()`.

    Raises `InputError` on all ranks if rank 0 cannot write. Collectives: every rank calls it; one all-gather of five
    integers and two small all-reduces.
    """
    lost = 0.0
    with raise_on_all_ranks("opening the metrics"):
        if run.mesh.rank == 0:
            experts, objective = run.checked.anatomy.experts[0], run.config.objective
            vocabulary = None if objective.of_responses or objective.teacher is not None else run.checked.vocab_size
            layer = MoeLayer(name=experts.name, experts=experts.num_experts, top_k=experts.top_k)
            collapse = Collapse(
                vocabulary,
                layer,
                warmup_steps(run.config.schedule, run.total_steps),
                min(50, max(10, run.total_steps // run.config.log.every_steps // 5)),
            )
            rows = MetricsFile(Path(run.config.output_dir) / "metrics.jsonl", counters.step)
            reporter.sinks.insert(0, rows)
            write_data_record(run)
            reporter.sinks.append(Console(run.total_steps, counters.step, run.mesh.layout.world_size, collapse))
            reporter.peak_tokens_per_second = None if forecast is None else forecast.peak_tokens_per_second
            lost = max(0.0, rows.before - counters.elapsed_seconds)
    record_start(run, forecast, counters, startup_seconds=time.monotonic() - began, lost_seconds=lost)
    return ExpertLoad(run.model, run.checked.anatomy, run.mesh, run.checked.plan.experts.placement)
