"""Exchange files between local ranks and their launcher, in one directory for each attempt.

Each rank leaves there its status, how it failed, and, on request by a signal, the Python stack of its threads. They
outlive the rank: the launcher reads them after SIGKILL as well.

When one rank fails, the others fail after it, with errors about lost connections. So the launcher picks the cause among
the failures, with their times, and the exit codes of ranks that it did not end itself, and makes the one error that a
user sees. hangs.py looks for a rank that hung first.
"""

import faulthandler
import json
import os
import re
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from expertmesh.config import Config
from expertmesh.config.errors import (
    DistributedFailure,
    ExpertmeshError,
    InputError,
    IntegrityError,
    SecurityError,
)
from expertmesh.training.control import RankStatus

SHOW_STACK = signal.SIGUSR2
UNEXPECTED = 1
_BY_EXIT_CODE = {error.exit_code: error for error in (InputError, IntegrityError, SecurityError, DistributedFailure)}
TRACEBACK_LINES = 20
TRACEBACK_FOLLOWS = "; the last lines of its traceback:"


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The end of one rank."""

    rank: int
    """The rank that failed."""
    exit_code: int
    """Its exit code."""
    message: str
    """The sentence for the user."""
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


def root_cause(
    failures: Sequence[RankFailure], exit_codes: Mapping[int, int], statuses: Mapping[int, RankStatus]
) -> ExpertmeshError:
    """Return the error to report. `failures` are sorted by time; `exit_codes` are by rank, negative for a signal.

    `statuses` are the last ones of all ranks of the job. In this order: the first sentence meant for the user; a rank
    that a signal ended silently; the first failure of any other kind (later ones may be lost connections); and last a
    silent end, where SIGABRT (gloo aborts when its peer is lost) is the least telling.
    """
    for failure in failures:
        if not failure.traceback and failure.exit_code != DistributedFailure.exit_code:
            return _reported(failure, failures, statuses)
    reported = {failure.rank for failure in failures}
    silent = {rank: code for rank, code in exit_codes.items() if code != 0 and rank not in reported}
    for rank, code in silent.items():
        if code < 0 and code != -signal.SIGABRT:
            return _silent_end(rank, code, statuses[rank])
    for failure in failures:
        return _reported(failure, failures, statuses)
    blamed = min(silent, key=lambda rank: (silent[rank] == -signal.SIGABRT, rank))
    return _silent_end(blamed, silent[blamed], statuses[blamed])


def stopped_sentence(number: int, at: RankStatus | None, output_dir: str | None) -> str:
    """Return the sentence for a job that signal `number` has ended outside of its loop, in which it would have saved.

    `at`: where it was, None before there were ranks. `output_dir`: of a run, for the sentence about its next start.
    """
    by = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    sentence = f"stopped by {by} {at or 'before ranks were started'}: nothing was saved"
    if output_dir is None:
        return sentence
    newest = newest_checkpoint(output_dir)
    return f"{sentence}; the same command {'starts again' if newest is None else f'continues from {newest}'}"


def continued_run(config: Config, arguments: str) -> str | None:
    """Return the directory of a run that the same command continues, or None.

    A verb that passes its ranks `arguments` has no run, and a named checkpoint is where a run starts.
    """
    return None if arguments or config.checkpoint.resume != "auto" else config.output_dir


def newest_checkpoint(output_dir: str) -> str | None:
    """Return the name of a run's newest checkpoint on this machine, or None if it has none."""
    names = (path.name for path in Path(output_dir, "checkpoints").glob("step-*"))
    # Not what is being written, whose name goes on. checkpoint/directory.py knows the rule too, but imports torch.
    found = {int(matched[1]): matched[0] for name in names if (matched := re.fullmatch(r"step-(\d{8,15})", name))}
    return found[max(found)] if found else None


def _reported(
    failure: RankFailure, failures: Sequence[RankFailure], statuses: Mapping[int, RankStatus]
) -> ExpertmeshError:
    if failure.traceback:
        tail = "\n".join(failure.traceback.rstrip().splitlines()[-TRACEBACK_LINES:])
        where = f"rank {failure.rank} failed {statuses[failure.rank]}"
        return DistributedFailure(f"{where}: {failure.message}{TRACEBACK_FOLLOWS}\n{tail}", key="rank.unexpected-error")
    same = [f for f in failures if (f.exit_code, f.message) == (failure.exit_code, failure.message)]
    return failure.error(prefix="" if len(same) == len(statuses) else f"rank {failure.rank}: ")


def _silent_end(rank: int, code: int, status: RankStatus) -> DistributedFailure:
    if code >= 0:
        return DistributedFailure(
            f"rank {rank} ended with exit code {code} and no Python error {status}; see its last output above",
            key="rank.exited",
        )
    name = signal.Signals(-code).name
    hints = {
        signal.SIGKILL: "if nobody sent it, the machine ran out of memory (the kernel's log says so)",
        signal.SIGTERM: "somebody or some scheduler stopped it",
        signal.SIGINT: "somebody stopped it",
    }
    hint = hints.get(signal.Signals(-code), "native code crashed; see its last output above")
    return DistributedFailure(
        f"rank {rank} was ended by signal {-code} ({name}) {status}: {hint}", key="rank.ended-by-signal"
    )
