"""When a run saves a checkpoint, what goes in beside the tensors, and what is said about it.

The loop asks after each step; checkpoint/write.py does the writing. All ranks decide alike, from numbers that all of
them have: the step, and what rank 0's clock and every writer said in the step's exchange.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from expertmesh.checkpoint.companions import companions
from expertmesh.checkpoint.directory import CHECKPOINTS, clean
from expertmesh.checkpoint.small_files import STATE_FILE, state_bytes
from expertmesh.checkpoint.write import CheckpointWriter, SavedCheckpoint
from expertmesh.config import dump_config
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.io.terminal import gib
from expertmesh.training.lock import RunLock
from expertmesh.training.objective import reference_file
from expertmesh.training.resume import Counters
from expertmesh.training.run_state import RunState
from expertmesh.training.startup.prepare import Prepared

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RunCheckpoints:
    """The checkpoints of one run. Every rank has one and uses it in step; make it with `open_checkpoints`.

    `paused_seconds` is how long the last step's saving held training up.
    """

    run: Prepared
    optimizer: Optimizer
    writer: CheckpointWriter
    files: Mapping[str, bytes]
    lock: RunLock | None
    saved_step: int
    saved_at: float = field(default_factory=time.monotonic)

    def overdue(self) -> bool:
        """Whether `every_minutes` have passed by this rank's clock; only rank 0's answer counts."""
        minutes = self.run.config.checkpoint.every_minutes
        return minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes

    def is_due(self, step: int, last_step: int, overdue: bool) -> bool:
        """Whether to save after `step`; `overdue` is rank 0's."""
        every = self.run.config.checkpoint.every_steps
        by_rule = overdue or (every is not None and (step % every == 0 or step == last_step))
        return by_rule and step != self.saved_step

    def settle(self, ranks: Sequence[int]) -> None:
        """Publish what all ranks have written by now; `ranks` as in `CheckpointWriter.settle`."""
        self._tell(self.writer.settle(ranks))

    def save(self, counters: Counters) -> None:
        """Save the state after `counters.step`, first waiting for an earlier checkpoint. Every rank calls it."""
        self._tell(self.writer.finish())
        with raise_on_all_ranks("checking the lock of output_dir"):
            if self.lock is not None:
                self.lock.check()
        state: dict[str, Any] = {"identity": asdict(self.run.identity), "counters": asdict(counters)}
        state["total_steps"] = self.run.total_steps
        files = {**self.files, STATE_FILE: state_bytes(counters.step, state, self.optimizer)}
        saved = self.writer.save(self.run.model, self.optimizer, counters.step, files)
        self.saved_step, self.saved_at = counters.step, time.monotonic()
        self._tell(saved)

    def finish(self) -> None:
        """Wait until the last checkpoint is on the disk. Every rank calls it."""
        self._tell(self.writer.close())

    def _tell(self, saved: SavedCheckpoint | None) -> None:
        if saved is not None and self.run.mesh.rank == 0:
            log.info(
                f"checkpoint {saved.directory.name}: {saved.files} files, {gib(saved.total_bytes)}, "
                f"written in {saved.seconds:.1f} s, training paused {saved.paused_seconds:.2f} s"
            )


def open_checkpoints(run: Prepared, state: RunState, lock: RunLock | None) -> RunCheckpoints:
    """Ready to save; removes what interrupted saves have left. `lock` is rank 0's, of the output directory.

    Every rank calls it; issues two small all-reduces.
    """
    config, is_main, output = run.config, run.mesh.rank == 0, Path(run.config.output_dir)
    directory = output / CHECKPOINTS
    files: dict[str, bytes] = {}
    with raise_on_all_ranks("preparing checkpoints"):
        if is_main:
            own = companions(run.model, run.data.tokenizer, config.save.dtype)
            files = {"config.yaml": dump_config(config).encode(), **own}
            files |= reference_file(run.data.datasets)
    with raise_on_all_ranks("cleaning up after interrupted checkpoints"):
        if is_main and (leftovers := [*clean(directory), *clean(output)]):
            log.info(f"removed what interrupted saves left: {', '.join(leftovers)}")
    writer = CheckpointWriter(
        directory, keep_last=config.checkpoint.keep_last, asynchronous=config.checkpoint.asynchronous
    )
    return RunCheckpoints(run, state.optimizer, writer, files, lock, state.counters.step)
