"""Connect a running training loop with its surroundings: requests to stop, and the status of a rank.

The command line passes a `Control` to `train(config, control)`; `Control()` serves tests and Python callers. The loop
asks it each step whether to stop, exchanges the answer with the other ranks, so that a signal to one rank suffices, and
reports its status (step, phase, heartbeat) to it: a few bytes that outlive the process. Under our launcher they are a
small memory-mapped file, so that the launcher can report where every rank was even after SIGKILL, and can ask a rank to
stop without a signal. Elsewhere they are plain memory, for the rank's own messages. Writing costs no system call and no
lock: one process writes each field. Imports neither torch nor anything else that is heavy; communicates with no rank.
"""

import ctypes
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Literal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A scheduler and a launcher may both deliver what is one request: signals this close together count as one.
ONE_REQUEST_SECONDS = 0.5


class StopState(IntEnum):
    """The state of a rank that decides how it takes a request to stop."""

    NOT_ACCEPTING = 0
    """Not in the training loop: only ending the process stops it."""
    ACCEPTING = 1
    """In the loop: it will finish its step, save and leave."""
    STOPPED = 2
    """It has stopped and saved, and must be left alone."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank at one moment. Times are of `time.monotonic()`, which all processes of a machine share."""

    process: int
    """Its id; 0 until the rank is running."""
    main_thread: int
    since: float
    """Start of its phase."""
    step: int
    """The step, from 1; 0 before the first."""
    phase: str
    heartbeat: float
    """Its last sign of life."""
    stop_state: StopState

    def __str__(self) -> str:
        place = f"at step {self.step}" if self.step else "before the first step"
        return f"{place}, {self.phase}"


class _Fields(ctypes.Structure):
    """The status of a rank. One process writes each field."""

    _fields_ = (
        ("process", ctypes.c_int64),
        ("main_thread", ctypes.c_uint64),
        ("since", ctypes.c_double),
        ("step", ctypes.c_int64),
        ("phase", ctypes.c_char * 128),
        ("heartbeat", ctypes.c_double),
        ("stop_state", ctypes.c_int64),
        ("stop", ctypes.c_int64),
    )


class Progress:
    """The bytes of one rank: in `path`, created if it does not exist, or in memory."""

    def __init__(self, path: Path | None = None) -> None:
        size = ctypes.sizeof(_Fields)
        held: mmap.mmap | bytearray = bytearray(size)
        if path is not None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.truncate(descriptor, size)
                held = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        self._fields = _Fields.from_buffer(held)

    def start(self) -> None:
        """Record that the process is running. The rank's main thread calls it."""
        self._fields.process, self._fields.main_thread = os.getpid(), threading.get_ident()
        self.at(0, "starting")
        self.beat()

    def at(self, step: int, phase: str) -> None:
        """Record that the rank is now in `phase` of `step` (from 1; 0 before the first step)."""
        # A reader in between sees the step of one place with the phase of another.
        self._fields.since, self._fields.step = time.monotonic(), step
        self._fields.phase = phase.encode()[: _Fields.phase.size]

    def beat(self) -> None:
        """Record that this process still runs. A thread of its own calls it about once a second."""
        self._fields.heartbeat = time.monotonic()

    @property
    def stop_state(self) -> StopState:
        return StopState(self._fields.stop_state)

    @stop_state.setter
    def stop_state(self, state: StopState) -> None:
        self._fields.stop_state = state

    @property
    def stop(self) -> int:
        """Return the signal by which the launcher was requested to stop, or 0. Only the launcher writes it."""
        return int(self._fields.stop)

    @stop.setter
    def stop(self, number: int) -> None:
        self._fields.stop = number

    def status(self) -> RankStatus:
        """Return the fields as they are now. Not atomic: they may be of two places while `at` writes."""
        found = self._fields
        phase = found.phase.decode(errors="ignore") or "starting"
        return RankStatus(
            found.process, found.main_thread, found.since, found.step, phase, found.heartbeat, self.stop_state
        )


class StopReason(IntEnum):
    """The reason why a run has to stop. The largest that any rank has decides: one all-reduce counts each."""

    NONE = 0
    MAX_TIME = 1
    SIGINT = 2
    SIGUSR1 = 10
    SIGTERM = 15

    @property
    def exit_code(self) -> int:
        return 130 if self is StopReason.SIGINT else 143

    def __str__(self) -> str:
        return {1: "--max-time", 2: "Ctrl-C", 10: "SIGUSR1 (a notice of preemption)"}.get(self.value, self.name)


class Stopped(Exception):
    """Raised by the loop on every rank when it has stopped as requested and saved. Not an error."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(f"stopped by {reason}")
        self.reason = reason

    @property
    def exit_code(self) -> int:
        return self.reason.exit_code


@dataclass(slots=True)
class Control:
    """One rank's connection to its surroundings."""

    progress: Progress = field(default_factory=Progress)
    deadline: float | None = None
    """`time.monotonic()` at which the run is to save and stop; None for no limit."""
    launch: str | None = None
    """The launcher that started this rank, the same for all its restarts; None without one."""
    audit: Literal["sampled", "full"] = "sampled"
    """Share of the loaded weights to compare with their files."""
    profile: tuple[int, int] | None = None
    """The first and the last step of this start to profile."""
    arguments: str = ""
    """JSON that a verb other than `train` passes to its ranks."""
    elastic: bool = False
    """True if the next start may have other ranks, so that each start takes a layout that fits."""
    began: float = field(default_factory=time.monotonic)
    """`time.monotonic()` when this process began, or shortly after."""
    stopped_by: StopReason = StopReason.NONE
    """The reason why the job has stopped, saved and ended."""
    _signal: int = 0
    _signal_at: float = 0.0

    def stop_requested(self) -> StopReason:
        """Return why this rank should stop, or `StopReason.NONE` (which is false). Costs no system call."""
        if number := self._signal or self.progress.stop:
            return StopReason(number)
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return StopReason.MAX_TIME
        return StopReason.NONE

    @contextmanager
    def accepting_stop(self) -> Iterator[None]:
        """Record the first of STOP_SIGNALS inside the block, for `stop_requested`; a second one ends the process.

        Outside of the block these signals end the process. Only the main thread of a process can receive signals.
        """
        with _calling_on_signal(self._on_signal):
            self.progress.stop_state = StopState.ACCEPTING
            try:
                yield
            except Stopped:
                self.progress.stop_state = StopState.STOPPED
                raise
            finally:
                if self.progress.stop_state is StopState.ACCEPTING:
                    self.progress.stop_state = StopState.NOT_ACCEPTING

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if not self._signal:
            self._signal, self._signal_at = number, now
        elif now - self._signal_at > ONE_REQUEST_SECONDS:
            os._exit(StopReason(number).exit_code)


@contextmanager
def handling(signals: Sequence[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handler` for signals inside the block, and restore the old handlers behind it. In the main thread only.

    A signal that is ignored stays ignored: a job under `nohup` must outlive its terminal.
    """
    old = {number: signal.getsignal(number) for number in signals}
    old = {number: before for number, before in old.items() if before is not signal.SIG_IGN}
    try:
        for number in old:
            signal.signal(number, handler)
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before or signal.SIG_DFL)


@contextmanager
def _calling_on_signal(received: Callable[[int], None]) -> Iterator[None]:
    """Call `received(number)` for each of STOP_SIGNALS, at once, in a thread of its own.

    Python runs a signal's handler between two lines of the main thread, which may be inside a collective for minutes;
    the interpreter writes a byte to the wake-up descriptor as soon as the signal comes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    thread = threading.Thread(target=_listen, args=(reading, received), name="stop-signals", daemon=True)
    thread.start()
    old_descriptor = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        with handling(STOP_SIGNALS, lambda number, frame: None):
            yield
    finally:
        signal.set_wakeup_fd(old_descriptor)
        os.close(writing)  # the thread reads the end of the pipe
        thread.join()
        os.close(reading)


def _listen(reading: int, received: Callable[[int], None]) -> None:
    while numbers := os.read(reading, 64):
        for number in numbers:
            if number in STOP_SIGNALS:
                received(number)
