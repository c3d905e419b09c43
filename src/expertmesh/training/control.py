"""Connect a running training loop with its surroundings: requests to stop, and its status.

The command line passes a `Control` to `train(config, control)`; `Control()` serves tests and Python callers. The loop
asks it each step whether to stop, exchanges the answer with the other ranks, so that a signal to one rank suffices, and
reports its status to it. Imports neither torch nor anything else that is heavy; communicates with no rank.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from expertmesh.training.progress import Progress, StopState

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A scheduler and a launcher may both deliver what is one request: signals this close together count as one.
ONE_REQUEST_SECONDS = 0.5


class StopReason(IntEnum):
    """Why a run has to stop. An integer, so that an all-gather can carry it; the largest of all ranks decides."""

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
def _calling_on_signal(received: Callable[[int], None]) -> Iterator[None]:
    """Call `received(number)` for each of STOP_SIGNALS, at once, in a thread of its own.

    Python runs a signal's handler between two lines of the main thread, which may be inside a collective for minutes;
    the interpreter writes a byte to the wake-up descriptor as soon as the signal comes. A signal that is ignored stays
    ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    thread = threading.Thread(target=_listen, args=(reading, received), name="stop-signals", daemon=True)
    thread.start()
    old_descriptor = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    handlers = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
    try:
        for number in handlers:
            signal.signal(number, lambda number, frame: None)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        signal.set_wakeup_fd(old_descriptor)
        os.close(writing)  # the thread reads the end of the pipe
        thread.join()
        os.close(reading)


def _listen(reading: int, received: Callable[[int], None]) -> None:
    while numbers := os.read(reading, 64):
        for number in numbers:
            if number in STOP_SIGNALS:
                received(number)
