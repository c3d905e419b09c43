"""Which of many failing ranks is to blame, and the one error that a user sees for all of them.

When one rank fails, the others fail after it, with errors about lost connections. Each rank therefore writes
down its own failure with the time; the launcher reads all of them, and the exit codes, and picks the cause.
"""

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from expertmesh.config.errors import (
    DistributedFailure,
    ExpertmeshError,
    InputError,
    IntegrityError,
    SecurityError,
)

TRACEBACK_LINES = 20
_BY_EXIT_CODE = {error.exit_code: error for error in (InputError, IntegrityError, SecurityError, DistributedFailure)}


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How one rank ended. `traceback` is empty for an `ExpertmeshError`, whose sentence says everything."""

    rank: int
    exit_code: int
    message: str
    traceback: str
    time_ns: int

    def write(self, directory: Path) -> None:
        """Leave the record in `directory`, whole or not at all: the writer may be killed at any moment."""
        unfinished = directory / f"rank-{self.rank}.tmp"
        unfinished.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(unfinished, directory / f"rank-{self.rank}.json")


def failures_in(directory: Path) -> list[RankFailure]:
    """The records that ranks have left so far, earliest first."""
    records = [RankFailure(**json.loads(path.read_text("utf-8"))) for path in directory.glob("rank-*.json")]
    return sorted(records, key=lambda record: record.time_ns)


def wait_for_peers(directory: Path, world_size: int, seconds: float) -> None:
    """Give the other ranks time to fail too, so that an error that all share is known to be shared."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and len(list(directory.glob("rank-*.json"))) < world_size:
        time.sleep(0.02)


def root_cause(failures: Sequence[RankFailure], exit_codes: Mapping[int, int], world_size: int) -> ExpertmeshError:
    """The error to report. `failures` are sorted by time; `exit_codes` are by rank, negative for a signal.

    In this order: the first sentence meant for the user; a rank that a signal killed without a word; the
    first failure of any other kind (those after it may be lost connections); and last a silent end, where
    SIGABRT (gloo aborts when its peer is gone) and SIGTERM (the launcher's own) are the least telling.
    """
    for failure in failures:
        if not failure.traceback and failure.exit_code != DistributedFailure.exit_code:
            return _sentence(failure, failures, world_size)
    silent = {rank: code for rank, code in exit_codes.items() if rank not in {f.rank for f in failures}}
    consequences = (-signal.SIGABRT, -signal.SIGTERM)
    for rank, code in silent.items():
        if code < 0 and code not in consequences:
            return _silent_end(rank, code)
    for failure in failures:
        return _sentence(failure, failures, world_size)
    blamed = min(silent, key=lambda rank: (silent[rank] in consequences, silent[rank] == -signal.SIGTERM, rank))
    return _silent_end(blamed, silent[blamed])


def _sentence(failure: RankFailure, failures: Sequence[RankFailure], world_size: int) -> ExpertmeshError:
    if failure.traceback:
        tail = "\n".join(failure.traceback.rstrip().splitlines()[-TRACEBACK_LINES:])
        end = f"rank {failure.rank} ended with exit code {failure.exit_code} by an unexpected {failure.message}"
        return DistributedFailure(f"{end}; the last lines of its traceback:\n{tail}")
    same = [f for f in failures if (f.exit_code, f.message) == (failure.exit_code, failure.message)]
    prefix = "" if len(same) == world_size else f"rank {failure.rank}: "
    return _BY_EXIT_CODE.get(failure.exit_code, ExpertmeshError)(prefix + failure.message)


def _silent_end(rank: int, code: int) -> DistributedFailure:
    if code >= 0:
        return DistributedFailure(
            f"rank {rank} ended with exit code {code} and no Python error; see its last output above"
        )
    name = signal.Signals(-code).name
    hints = {
        signal.SIGKILL: "if nobody sent it, the machine ran out of memory (the kernel's log says so)",
        signal.SIGTERM: "somebody or some scheduler stopped it",
    }
    hint = hints.get(signal.Signals(-code), "native code crashed; see its last output above")
    return DistributedFailure(f"rank {rank} was ended by signal {-code} ({name}): {hint}")
