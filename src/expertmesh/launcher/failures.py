"""Choose the cause among many failing ranks, and make the one error that a user sees.

When one rank fails, the others fail after it, with errors about lost connections. Each rank therefore writes down its
own failure with the time; the launcher reads all of them, and the exit codes of ranks that it did not end itself, and
picks the cause. hangs.py looks for a rank that hung first.
"""

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from expertmesh.config.errors import DistributedFailure, ExpertmeshError
from expertmesh.launcher.rank_files import RankFailure
from expertmesh.training.progress import RankStatus

TRACEBACK_LINES = 20
# What the ranks of a job have found out together (roll_call.py).
VERDICTS = ("rank.hung", "rank.lost")
TRACEBACK_FOLLOWS = "; the last lines of its traceback:"


def root_cause(
    failures: Sequence[RankFailure], exit_codes: Mapping[int, int], statuses: Mapping[int, RankStatus]
) -> ExpertmeshError:
    """Return the error to report. `failures` are sorted by time; `exit_codes` are by rank, negative for a signal.

    `statuses` are the last ones of all ranks of the job. In this order: what ranks have found out together; the first
    sentence meant for the user; a rank that a signal ended silently; the first failure of any other kind (later ones
    may be lost connections); and last a silent end, where SIGABRT (gloo aborts when its peer is lost) is the least
    telling.
    """
    for failure in failures:
        if failure.key in VERDICTS:
            return failure.error()
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


def newest_checkpoint(output_dir: str) -> str | None:
    """Return the name of a run's newest checkpoint on this machine, or None if it has none."""
    return max((path.name for path in Path(output_dir, "checkpoints").glob("step-*[0-9]")), default=None)


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
