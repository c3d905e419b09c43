"""Hold the status of a rank (step, phase, heartbeat) in a few bytes that outlive the process.

Under our launcher the bytes are a small memory-mapped file, so that the launcher can report where every rank was even
after SIGKILL, and can ask a rank to stop without a signal. Elsewhere they are plain memory, for the rank's own
messages. Writing costs no system call and no lock: one process writes each field.
"""

import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

_PHASE_BYTES = 128
_IDENTITY = struct.Struct("<qQ")  # process id, identity of its main thread
_PLACE = struct.Struct(f"<dq{_PHASE_BYTES}s")  # since when, step, phase
_BEAT = struct.Struct("<d")
_NUMBER = struct.Struct("<q")
_IDENTITY_AT = 0
_VERSION_AT = _IDENTITY_AT + _IDENTITY.size
_PLACE_AT = _VERSION_AT + _NUMBER.size
_BEAT_AT = _PLACE_AT + _PLACE.size
_STOP_STATE_AT = _BEAT_AT + _BEAT.size
_STOP_AT = _STOP_STATE_AT + _NUMBER.size
_SIZE = _STOP_AT + _NUMBER.size
_WRITING_SECONDS = 0.5


class StopState(IntEnum):
    """What a rank does with a request to stop."""

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


class Progress:
    """The bytes of one rank: in `path`, created if it does not exist, or in memory."""

    def __init__(self, path: Path | None = None) -> None:
        self._bytes: mmap.mmap | bytearray = bytearray(_SIZE) if path is None else _map(path)
        self._version = 0

    def start(self) -> None:
        """Record that the process is running. The rank's main thread calls it."""
        _IDENTITY.pack_into(self._bytes, _IDENTITY_AT, os.getpid(), threading.get_ident())
        self.at(0, "starting")
        self.beat()

    def at(self, step: int, phase: str) -> None:
        """Record that the rank is now in `phase` of `step` (from 1; 0 before the first step)."""
        place = _PLACE.pack(time.monotonic(), step, phase.encode()[:_PHASE_BYTES])
        # Odd while the place is being written, so that a reader can tell.
        self._version += 1
        _NUMBER.pack_into(self._bytes, _VERSION_AT, self._version)
        self._bytes[_PLACE_AT : _PLACE_AT + _PLACE.size] = place
        self._version += 1
        _NUMBER.pack_into(self._bytes, _VERSION_AT, self._version)

    def beat(self) -> None:
        """Record that this process still runs. A thread of its own calls it about once a second."""
        _BEAT.pack_into(self._bytes, _BEAT_AT, time.monotonic())

    @property
    def stop_state(self) -> StopState:
        return StopState(_NUMBER.unpack_from(self._bytes, _STOP_STATE_AT)[0])

    @stop_state.setter
    def stop_state(self, state: StopState) -> None:
        _NUMBER.pack_into(self._bytes, _STOP_STATE_AT, state)

    @property
    def stop(self) -> int:
        """Return the signal by which the launcher was asked to stop, or 0. Only the launcher writes it."""
        return int(_NUMBER.unpack_from(self._bytes, _STOP_AT)[0])

    @stop.setter
    def stop(self, number: int) -> None:
        _NUMBER.pack_into(self._bytes, _STOP_AT, number)

    def status(self) -> RankStatus:
        """Return all fields at one moment, also for a reader in another process."""
        process, main_thread = _IDENTITY.unpack_from(self._bytes, _IDENTITY_AT)
        since, step, phase = _PLACE.unpack(self._place())
        (heartbeat,) = _BEAT.unpack_from(self._bytes, _BEAT_AT)
        text = phase.rstrip(b"\0").decode(errors="ignore") or "starting"
        return RankStatus(process, main_thread, since, step, text, heartbeat, self.stop_state)

    def _place(self) -> bytes:
        """Return the bytes that `at` wrote, complete: the writer may be in the middle, and may not run for a while.

        A writer that was killed or stopped in the middle never finishes; then the bytes are taken as they are.
        """
        deadline = time.monotonic() + _WRITING_SECONDS
        while True:
            before = _NUMBER.unpack_from(self._bytes, _VERSION_AT)[0]
            place = bytes(self._bytes[_PLACE_AT : _PLACE_AT + _PLACE.size])
            whole = before % 2 == 0 and before == _NUMBER.unpack_from(self._bytes, _VERSION_AT)[0]
            if whole or time.monotonic() > deadline:
                return place
            time.sleep(0)


def _map(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.truncate(descriptor, _SIZE)
        return mmap.mmap(descriptor, _SIZE)
    finally:
        os.close(descriptor)
