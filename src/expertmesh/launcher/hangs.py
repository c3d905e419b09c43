"""Find the rank that the others waited for in vain, with its step, its phase and its Python stack.

A rank that hangs shows only in the others, whose collectives time out. At the first timeout a snapshot is taken of
every rank that still runs: is it stopped by a signal, does its heartbeat go on, is its stack inside a collective?
"""

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from expertmesh.config.errors import DistributedFailure
from expertmesh.launcher.rank_files import RankFailure
from expertmesh.training.progress import RankStatus

# Of a long stack: where it is, and from where in the training loop that was called.
INNERMOST, OUTERMOST = 8, 6
# A heartbeat comes twice a second; a busy machine may delay it.
SILENT_SECONDS = 5.0
# gloo, of a collective or of another one that was under way; NCCL's watchdog; the store, before a group is up.
_TIMEOUT = re.compile(
    r"Timed out waiting \d+ms|Application timeout|collective operation timeout|wait timeout after|waiting for clients"
)
# Where the Python stack ends of a rank that waits for its peers.
_COLLECTIVES = (
    "/torch/distributed/",
    "/expertmesh/distributed/",
    "/expertmesh/experts/",
    "/expertmesh/training/exchange.py",
)
# Where the stack of every rank begins.
_STARTERS = ("<frozen runpy>", f"launcher{os.sep}worker.py")
# And of one that waits for its device, so for the collectives given to it; backward runs on other threads then.
_DEVICE_WAITS = ("/torch/accelerator/", "/torch/cuda/", "/torch/autograd/graph.py")


@dataclass(frozen=True, slots=True)
class RankSnapshot:
    """One rank at the time when another timed out."""

    rank: int
    """The rank."""
    status: RankStatus
    """The status that it wrote last."""
    taken: float
    """`time.monotonic()` of the snapshot."""
    stopped: bool
    """True if it was stopped (SIGSTOP)."""
    stack: tuple[str, ...]
    """Lines of its Python stack, innermost call first."""
    still_running: bool
    """True if it ran on after the others had had time to fail as well."""

    @property
    def without_heartbeat(self) -> bool:
        return self.taken - self.status.heartbeat > SILENT_SECONDS

    @property
    def outside_collectives(self) -> bool:
        """Return whether the stack shows that the rank does not wait for other ranks."""
        if not self.stack or any(name in self.stack[0] for name in _DEVICE_WAITS):
            return False
        return not any(name in line for line in self.stack[:2] for name in _COLLECTIVES)

    def __str__(self) -> str:
        if self.stopped:
            state = "it was stopped by a signal (SIGSTOP)"
        elif self.without_heartbeat:
            state = f"its process had not run for {self.taken - self.status.heartbeat:.0f} s"
        else:
            state = "its process was running"
        if not self.stack:
            return f"{state}; its Python stack could not be had"
        return "\n".join([f"{state}; where it was, innermost call first:", *self.stack])


def timed_out(failure: RankFailure) -> bool:
    """Return whether this rank failed because it had waited too long for others."""
    return bool(_TIMEOUT.search(failure.message))


def hang_error(
    snapshots: Sequence[RankSnapshot], first: RankFailure | None, first_status: RankStatus | None
) -> DistributedFailure | None:
    """Return the error that names the rank which hung, or None if none did. `first`: the rank that timed out, and
    where.

    A stopped rank goes on when it is asked for its stack, and a slow one by itself, so both may have failed since.
    Without `first` (a rank aborted, as NCCL's watchdog lets it) only a rank that clearly does not wait is blamed.
    """
    lasting = [each for each in snapshots if each.still_running]
    suspects = [each for each in snapshots if each.stopped] or [each for each in snapshots if each.without_heartbeat]
    suspects = suspects or [each for each in lasting if each.outside_collectives]
    if first_status is not None:
        suspects = suspects or lasting or [each for each in snapshots if _behind(each, first_status)]
    if not suspects:
        return None
    blamed = min(suspects, key=lambda each: (each.status.step, each.status.since))
    also = [str(each.rank) for each in suspects if each is not blamed and (each.stopped or each.without_heartbeat)]
    others = f" (and so did rank {', '.join(also)})" if also else ""
    still = f"it had not moved for {blamed.taken - blamed.status.since:.0f} s"
    waited = f"\nrank {first.rank} gave up waiting {first_status}: {first.message}" if first else ""
    return DistributedFailure(
        f"rank {blamed.rank} hung {blamed.status}{others}: {still}; {blamed}{waited}", key="rank.hung"
    )


def _behind(snapshot: RankSnapshot, other: RankStatus) -> bool:
    """Return whether the rank is where the other has been before, since about the time that the other began to wait.

    That shows a rank which went on, and failed, after the others had timed out.
    """
    here = snapshot.status
    apart = (here.step, here.phase) != (other.step, other.phase) and here.step <= other.step
    waited_long = snapshot.taken - here.since > (snapshot.taken - other.since) / 2
    return snapshot.outside_collectives and apart and waited_long


def is_stopped(process: int, states: str = "Tt") -> bool:
    """Return whether a signal has stopped the process (states T and t; D: it waits for a disk). Only Linux shows it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in states
    except OSError:
        return False


def read_stack(file: Path, main_thread: int, seconds: float) -> tuple[str, ...]:
    """Return the main thread's part of the stacks that a rank was asked to write; wait at most `seconds` for it."""
    deadline = time.monotonic() + seconds
    while True:
        lines = _stack_of(file, main_thread)
        if lines or time.monotonic() > deadline:
            return lines
        time.sleep(0.02)


def _stack_of(file: Path, main_thread: int) -> tuple[str, ...]:
    """Return the stack, empty until it is complete: the rank may be in the middle of writing."""
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
    return shortened(stack) if complete else ()


def shortened(stack: Sequence[str]) -> tuple[str, ...]:
    """Return both ends of a long stack, innermost line first, without the lines that start a rank."""
    kept = [line for line in stack if not any(name in line for name in _STARTERS)]
    if len(kept) > INNERMOST + OUTERMOST + 1:
        kept = [*kept[:INNERMOST], "  ...", *kept[-OUTERMOST:]]
    return tuple(kept)
