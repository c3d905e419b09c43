"""Exchange files between local ranks and their launcher, in one directory for each attempt.

Each rank leaves there its status, how it failed, and, when asked by a signal, the Python stack of its threads. They
outlive the rank: the launcher reads them after SIGKILL as well.
"""

import faulthandler
import json
import os
import signal
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from expertmesh.config.errors import (
    DistributedFailure,
    ExpertmeshError,
    InputError,
    IntegrityError,
    SecurityError,
)

SHOW_STACK = signal.SIGUSR2
UNEXPECTED = 1
_BY_EXIT_CODE = {error.exit_code: error for error in (InputError, IntegrityError, SecurityError, DistributedFailure)}


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How one rank ended."""

    rank: int
    exit_code: int
    message: str
    traceback: str
    """Empty for an `ExpertmeshError`, whose message says everything."""
    time_ns: int
    """Time of the failure, in nanoseconds since the epoch."""
    key: str = ""
    """Key of the error in docs/errors.md; empty for others."""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> "RankFailure":
        """Describe `error`, which is being handled, on `rank`."""
        if isinstance(error, ExpertmeshError):
            return cls(rank, error.exit_code, str(error), "", time.time_ns(), error.key)
        named = f"{type(error).__name__}: {error}".rstrip(": ").splitlines()[0]
        return cls(rank, UNEXPECTED, named, traceback.format_exc(), time.time_ns())

    def error(self, prefix: str = "") -> ExpertmeshError:
        """Return the `ExpertmeshError` that the rank ended by, with its class and key."""
        kind = _BY_EXIT_CODE.get(self.exit_code, ExpertmeshError)
        return kind(prefix + self.message, key=self.key or None)

    def write(self, directory: Path) -> None:
        """Write the failure into `directory`, completely or not at all: the writer may be killed at any moment."""
        unfinished = directory / f"rank-{self.rank}.tmp"
        unfinished.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(unfinished, directory / f"rank-{self.rank}.json")


def failures_in(directory: Path) -> list[RankFailure]:
    """Return the failures that ranks have left so far, earliest first."""
    failures = [RankFailure(**json.loads(path.read_text("utf-8"))) for path in directory.glob("rank-*.json")]
    return sorted(failures, key=lambda failure: failure.time_ns)


def progress_file(directory: Path, rank: int) -> Path:
    return directory / f"progress-{rank}"


def stack_file(directory: Path, rank: int) -> Path:
    return directory / f"stack-{rank}"


def show_stack_when_asked(directory: Path, rank: int) -> None:
    """Let `SHOW_STACK` make this process write its Python stacks from now on.

    The handler is C code that needs neither the interpreter nor its lock, so it answers from any loop or wait.
    """
    file = stack_file(directory, rank).open("w", encoding="utf-8")  # stays open: faulthandler holds on to it
    faulthandler.register(SHOW_STACK, file=file, all_threads=True, chain=False)
