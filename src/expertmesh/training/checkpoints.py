"""Decide when a run saves a checkpoint, what it holds beside the tensors, and what is printed about it.

The loop asks after each step; checkpoint/write.py writes. All ranks decide the same, from numbers that all of them
have: the step, rank 0's clock, the status of every writer in the step's exchange, and evaluations, which tell the best
checkpoint and whether training still helps.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from expertmesh.checkpoint.directory import CHECKPOINTS, clean, step_name
from expertmesh.checkpoint.small_files import STATE_FILE, companions, state_bytes
from expertmesh.checkpoint.write import CheckpointWriter, SavedCheckpoint
from expertmesh.config import Config, dump_config
from expertmesh.config.errors import ExpertmeshError
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.io.terminal import gib
from expertmesh.training.objective import reference_file
from expertmesh.training.resume import Best, Counters
from expertmesh.training.startup.uploads import RunUploads, start_uploads
from expertmesh.weights.companions import CopiedFiles, model_files, tokenizer_files

if TYPE_CHECKING:
    from expertmesh.training.resume import Counters
    from expertmesh.training.run_state import RunState
    from expertmesh.training.startup.prepare import Prepared

log = logging.getLogger(__name__)
# When `every_minutes: auto` saves for the first time in a start, to know what a save costs.
FIRST_SECONDS = 300.0
# Of the time that ranks wait for each other, what an upload before a stop may take.
_SHARE_OF_TIMEOUT = 0.8
# From which change of the interval on it is said.
_WORTH_A_LINE = 0.2


@dataclass(slots=True)
class Selection:
    """The rules of `checkpoint.keep_best` and `train.early_stop`; their state is in `counters`."""

    config: Config
    counters: Counters

    def saw(self, step: int, row: Mapping[str, Any]) -> bool:
        """Take the figures of an evaluation; return whether to save a checkpoint because they are the best so far."""
        stop, counters = self.config.train.early_stop, self.counters
        if stop is not None:
            before = counters.least
            counters.least = _better(before, stop.figure, row[stop.figure], step, stop.min_change)
            counters.no_better = 0 if counters.least is not before else counters.no_better + 1
        figure = self.config.checkpoint.keep_best
        if figure is None:
            return False
        best = counters.best
        counters.best = _better(best, figure, row[figure], step)
        return counters.best is not best

    def ends(self) -> bool:
        """Return whether the run is over."""
        stop = self.config.train.early_stop
        return stop is not None and self.counters.no_better >= stop.patience

    def last_lines(self) -> list[str]:
        """Return the lines for the end of the run."""
        lines, counters, stop = [], self.counters, self.config.train.early_stop
        if self.ends() and stop is not None and counters.least is not None:
            lines.append(
                f"stopped early: {stop.figure} was best ({counters.least.value:.4f}) after step {counters.least.step}, "
                f"{counters.no_better} evaluations ago"
            )
        if counters.best is not None:
            best = counters.best
            lines.append(f"best {best.figure} {best.value:.4f}: checkpoint {step_name(best.step)}")
        return lines


def _better(before: Best | None, figure: str, value: float, step: int, min_change: float = 0.0) -> Best | None:
    """Return `before`, or the new value if it is better; a NaN never is."""
    if math.isnan(value):
        return before
    if before is None or before.figure != figure:
        return Best(figure, value, step)
    gain = before.value - value if figure.endswith("loss") else value - before.value
    return Best(figure, value, step) if gain > min_change else before


@dataclass(slots=True)
class RunCheckpoints:
    """The checkpoints of one run. Every rank has one and uses it in step; make it with `open_checkpoints`."""

    run: "Prepared"
    optimizer: Optimizer
    writer: CheckpointWriter
    files: Mapping[str, bytes]
    """Content of small files that every checkpoint holds, by name."""
    beside_weights: CopiedFiles
    """The files that rank 0 writes with the result in place of the tokenizer: the base may be deleted by then."""
    saved_step: int
    """The step of the last checkpoint."""
    selection: Selection
    uploads: RunUploads | None
    saved_at: float = field(default_factory=time.monotonic)
    """`time.monotonic()` of the last checkpoint."""
    best_seconds: float = FIRST_SECONDS
    """Seconds between saves for `every_minutes: auto`, by the cost of the last save."""

    def overdue(self) -> bool:
        """Return whether `every_minutes` have passed by this rank's clock; only rank 0's answer counts."""
        minutes = self.run.config.checkpoint.every_minutes
        seconds = self.best_seconds if minutes == "auto" else None if minutes is None else 60 * minutes
        return seconds is not None and time.monotonic() - self.saved_at >= seconds

    def is_due(self, step: int, overdue: bool) -> bool:
        """Return whether to save after `step` by the rules; `overdue` is rank 0's."""
        every = self.run.config.checkpoint.every_steps
        return (overdue or (every is not None and step % every == 0)) and step != self.saved_step

    def saves_last(self) -> bool:
        """Return whether to save after the last step."""
        return self.run.config.checkpoint.every_steps is not None

    def settle(self, ranks: Sequence[int]) -> None:
        """Publish what all ranks have written by now; `ranks` as in `CheckpointWriter.settle`."""
        self._tell(self.writer.settle(ranks))

    def save(self, counters: "Counters") -> None:
        """Save the state after `counters.step`, first waiting for an earlier checkpoint. Every rank calls it."""
        self._tell(self.writer.finish())
        state: dict[str, Any] = {"identity": asdict(self.run.identity), "counters": asdict(counters)}
        state["total_steps"] = self.run.total_steps
        self.writer.keep_step = counters.best.step if counters.best is not None else None
        files = {**self.files, STATE_FILE: state_bytes(counters.step, state, self.optimizer)}
        saved = self.writer.save(self.run.model, self.optimizer, counters.step, files)
        self.saved_step, self.saved_at = counters.step, time.monotonic()
        self._tell(saved)

    def finish(self) -> None:
        """Wait until the last checkpoint is on the disk. Every rank calls it."""
        self._tell(self.writer.close())

    def upload_before_stopping(self) -> None:
        """Upload the last checkpoint to object storage: a machine that stops may not come back.

        Takes no longer than the time that leaves the other ranks waiting; what cannot be uploaded is reported, and the
        run goes on from its own directory. Every rank calls it: launchers end all ranks when the first has ended.
        """
        if self.uploads is None:
            return
        with raise_on_all_ranks("uploading the last checkpoint"):
            if self.run.mesh.rank == 0:
                try:
                    self.uploads.finish(_SHARE_OF_TIMEOUT * self.run.config.distributed.timeout_seconds)
                except ExpertmeshError as error:
                    log.warning(f"warning: {error}")

    def _tell(self, saved: SavedCheckpoint | None) -> None:
        if saved is None:
            return
        config, ranks = self.run.config.checkpoint, self.run.mesh.layout.world_size
        before = self.best_seconds
        self.best_seconds = best_interval(saved, 3600 * config.device_hours_per_failure / ranks)
        if self.run.mesh.rank == 0:
            log.info(
                f"checkpoint {saved.directory.name}: {saved.files} files, {gib(saved.total_bytes)}, "
                f"written in {saved.seconds:.1f} s, training paused {saved.paused_seconds:.2f} s"
            )
            told = abs(self.best_seconds / before - 1) < _WORTH_A_LINE
            if config.every_minutes == "auto" and not told:
                log.info(
                    f"           saved every {self.best_seconds / 60:.3g} minutes from here on: a save pauses training "
                    f"for {saved.paused_seconds:.2f} s, and {ranks} ranks fail every "
                    f"{config.device_hours_per_failure / ranks:,.3g} h (checkpoint.device_hours_per_failure)"
                )


def best_interval(saved: SavedCheckpoint, seconds_between_failures: float) -> float:
    """Return the seconds between saves that lose least by pauses and by work done again (Young's rule).

    It is never less than a save takes.
    """
    return max(math.sqrt(2 * saved.paused_seconds * seconds_between_failures), saved.seconds)


def open_checkpoints(run: "Prepared", state: "RunState") -> RunCheckpoints:
    """Prepare for saving, and remove what interrupted saves have left.

    Collectives: every rank calls it; two small all-reduces, and with `checkpoint.remote` a broadcast.
    """
    config, is_main, output = run.config, run.mesh.rank == 0, Path(run.config.output_dir)
    directory = output / CHECKPOINTS
    files: dict[str, bytes] = {}
    beside: dict[str, bytes] = {}
    with raise_on_all_ranks("preparing checkpoints"):
        if is_main:
            beside = tokenizer_files(run.data.tokenizer, run.checked.directory)
            if config.lora is None:
                beside |= model_files(run.checked.directory, code=config.model.trust_remote_code)
            own = companions(run.model, CopiedFiles(beside), config.save.dtype)
            files = {"config.yaml": dump_config(config).encode(), **own}
            files |= reference_file(run.data.datasets)
    with raise_on_all_ranks("cleaning up after interrupted checkpoints"):
        if is_main and (leftovers := [*clean(directory), *clean(output)]):
            log.info(f"removed what interrupted saves left: {', '.join(leftovers)}")
    keep_last, asynchronous = config.checkpoint.keep_last, config.checkpoint.asynchronous
    best = state.counters.best
    uploads = start_uploads(config, None if best is None else best.step)
    queue = None if uploads is None else uploads.queue
    writer = CheckpointWriter(directory, keep_last=keep_last, asynchronous=asynchronous, uploads=queue)
    selection = Selection(config, state.counters)
    step, copied = state.counters.step, CopiedFiles(beside)
    return RunCheckpoints(run, state.optimizer, writer, files, copied, step, selection, uploads)
