"""Which of many failing ranks is to blame, and the one error that a user sees for all of them.

When one rank fails, the others fail after it, with errors about lost connections. Each rank therefore writes
down its own failure with the time; the launcher reads all of them, and the exit codes of ranks that it did not end
itself, and picks the cause. A rank that hung is looked for first, in hangs.py.
"""

import signal
from collections.abc import Mapping, Sequence

from expertmesh.config.errors import (
    DistributedFailure,
    ExpertmeshError,
    InputError,
    IntegrityError,
    SecurityError,
)
from expertmesh.launcher.records import RankFailure
from expertmesh.training.progress import RankStatus

TRACEBACK_LINES = 20
_BY_EXIT_CODE = {error.exit_code: error for error in (InputError, IntegrityError, SecurityError, DistributedFailure)}


def root_cause(
    failures: Sequence[RankFailure], exit_codes: Mapping[int, int], standings: Mapping[int, RankStatus]
) -> ExpertmeshError:
    """The error to report. `failures` are sorted by time; `exit_codes` are by rank, negative for a signal.

    `standings` says where every rank of the job was last. In this order: the first sentence meant for the user; a rank
    that a signal ended without a word; the first failure of any other kind (those after it may be lost connections);
    and last a silent end, where SIGABRT (gloo aborts when its peer is gone) is the least telling.
    """
    for failure in failures:
        if not failure.traceback and failure.exit_code != DistributedFailure.exit_code:
            return _said(failure, failures, standings)
    spoke = {failure.rank for failure in failures}
    silent = {rank: code for rank, code in exit_codes.items() if code != 0 and rank not in spoke}
    for rank, code in silent.items():
        if code < 0 and code != -signal.SIGABRT:
            return _silent_end(rank, code, standings[rank])
    for failure in failures:
        return _said(failure, failures, standings)
    blamed = min(silent, key=lambda rank: (silent[rank] == -signal.SIGABRT, rank))
    return _silent_end(blamed, silent[blamed], standings[blamed])


def _said(
    failure: RankFailure, failures: Sequence[RankFailure], standings: Mapping[int, RankStatus]
) -> ExpertmeshError:
    if failure.traceback:
        tail = "\n".join(failure.traceback.rstrip().splitlines()[-TRACEBACK_LINES:])
        where = f"rank {failure.rank} failed {standings[failure.rank]}"
        return DistributedFailure(f"{where}: {failure.message}; the last lines of its traceback:\n{tail}")
    same = [f for f in failures if (f.exit_code, f.message) == (failure.exit_code, failure.message)]
    prefix = "" if len(same) == len(standings) else f"rank {failure.rank}: "
    return _BY_EXIT_CODE.get(failure.exit_code, ExpertmeshError)(prefix + failure.message)


def _silent_end(rank: int, code: int, standing: RankStatus) -> DistributedFailure:
    if code >= 0:
        return DistributedFailure(
            f"rank {rank} ended with exit code {code} and no Python error {standing}; see its last output above"
        )
    name = signal.Signals(-code).name
    hints = {
        signal.SIGKILL: "if nobody sent it, the machine ran out of memory (the kernel's log says so)",
        signal.SIGTERM: "somebody or some scheduler stopped it",
        signal.SIGINT: "somebody stopped it",
    }
    hint = hints.get(signal.Signals(-code), "native code crashed; see its last output above")
    return DistributedFailure(f"rank {rank} was ended by signal {-code} ({name}) {standing}: {hint}")
