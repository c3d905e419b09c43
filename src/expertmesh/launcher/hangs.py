"""Which rank the others waited for in vain: named with the step, the phase and the Python stack of where it stands.

A rank that stops moving shows only in the others, whose collectives time out. When the first gives up, every rank that
still runs is looked at: is it stopped by a signal, does its heartbeat go on, is its stack inside a collective?
"""

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from expertmesh.config.errors import DistributedFailure
from expertmesh.launcher.records import RankFailure
from expertmesh.training.progress import RankStatus

# Of a long stack: where it is, and from where in the training loop that was called.
INNERMOST, OUTERMOST = 8, 6
# A heartbeat comes twice a second; a busy machine may delay it.
SILENT_SECONDS = 5.0
# gloo; NCCL's watchdog; the store, before a group is up.
_GAVE_UP = re.compile(r"Timed out waiting \d+ms|collective operation timeout|wait timeout after|waiting for clients")
# Where the Python stack of a rank ends that waits for its peers.
_WAITING = ("/torch/distributed/", "/expertmesh/experts/")


@dataclass(frozen=True, slots=True)
class Look:
    """One rank as it was found when another gave up. `stack` is faulthandler's, innermost line first.

    `outlasted`: it was still there when the others had had time to fail as well.
    """

    rank: int
    standing: RankStatus
    taken: float
    stopped: bool
    stack: tuple[str, ...]
    outlasted: bool

    @property
    def silent(self) -> bool:
        return self.taken - self.standing.heartbeat > SILENT_SECONDS

    @property
    def elsewhere(self) -> bool:
        """Its stack shows that it does not wait for other ranks."""
        return bool(self.stack) and not any(name in line for line in self.stack[:2] for name in _WAITING)

    def __str__(self) -> str:
        if self.stopped:
            state = "it was stopped by a signal (SIGSTOP)"
        elif self.silent:
            state = f"its process had not run for {self.taken - self.standing.heartbeat:.0f} s"
        else:
            state = "its process was running"
        if not self.stack:
            return f"{state}; its Python stack could not be had"
        return "\n".join([f"{state}; where it was, innermost call first:", *self.stack])


def gave_up(failure: RankFailure) -> bool:
    """Whether this rank failed because it had waited too long for others."""
    return bool(_GAVE_UP.search(failure.message))


def hang(looks: Sequence[Look], first: RankFailure | None, gave_up_at: RankStatus | None) -> DistributedFailure | None:
    """The error that names the rank which hung, or None if none did. `first` is the rank that gave up, and where.

    A stopped rank goes on when it is asked for its stack, and a slow one by itself, so both may have failed since.
    Without `first` (a rank aborted, as NCCL's watchdog lets it) only a rank that clearly does not wait is blamed.
    """
    lasting = [look for look in looks if look.outlasted]
    suspects = [look for look in looks if look.stopped] or [look for look in looks if look.silent]
    suspects = suspects or [look for look in lasting if look.elsewhere]
    if gave_up_at is not None:
        suspects = suspects or lasting or [look for look in looks if _behind(look, gave_up_at)]
    if not suspects:
        return None
    blamed = min(suspects, key=lambda look: (look.standing.step, look.standing.since))
    also = [str(look.rank) for look in suspects if look is not blamed and (look.stopped or look.silent)]
    others = f" (and so did rank {', '.join(also)})" if also else ""
    still = f"it had not moved for {blamed.taken - blamed.standing.since:.0f} s"
    waited = f"\nrank {first.rank} gave up waiting {gave_up_at}: {first.message}" if first else ""
    return DistributedFailure(f"rank {blamed.rank} hung {blamed.standing}{others}: {still}; {blamed}{waited}")


def _behind(look: Look, other: RankStatus) -> bool:
    """Whether the rank is where the other has been before, since about the time that the other began to wait.

    That shows a rank which went on, and failed, after the others had given up.
    """
    here, there = look.standing, other
    apart = (here.step, here.phase) != (there.step, there.phase) and here.step <= there.step
    return look.elsewhere and apart and look.taken - here.since > (look.taken - there.since) / 2


def is_stopped(process: int) -> bool:
    """Whether a signal has stopped the process (state T). Only Linux tells."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def read_stack(file: Path, main_thread: int, seconds: float) -> tuple[str, ...]:
    """The main thread's part of the stacks that a rank was asked to write, waiting at most `seconds` for it."""
    deadline = time.monotonic() + seconds
    while True:
        lines = _stack_of(file, main_thread)
        if lines or time.monotonic() > deadline:
            return lines
        time.sleep(0.02)


def _stack_of(file: Path, main_thread: int) -> tuple[str, ...]:
    """Empty until all of it is there: the rank may be in the middle of writing."""
    text = file.read_text(errors="replace") if file.exists() else ""
    stack: list[str] = []
    inside = False
    for line in text.splitlines(keepends=True):
        if header := re.match(r"(?:Current thread|Thread) 0x([0-9a-f]+)", line):
            inside = int(header[1], 16) == main_thread
        elif inside and line.startswith("  ") and line.endswith("\n"):
            stack.append(line.rstrip())
    # faulthandler shows a hundred calls at most, then three dots.
    complete = re.search(r"_run_module_as_main\n|^  \.\.\.$", "\n".join(stack) + "\n", re.MULTILINE) is not None
    stack = [line for line in stack if "<frozen runpy>" not in line and f"cli{os.sep}worker.py" not in line]
    if len(stack) > INNERMOST + OUTERMOST + 1:
        stack = [*stack[:INNERMOST], "  ...", *stack[-OUTERMOST:]]
    return tuple(stack) if complete else ()
