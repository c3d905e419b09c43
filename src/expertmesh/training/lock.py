"""One run at a time in an output directory: rank 0 holds a `flock` of `output_dir/lock.json`, which names it.

The kernel gives the lock back when the process ends, however it ends; NFS 4 carries it between hosts, and gives back
what a lost host held once its lease is over. No rank communicates here, and no thread beats. A file system without
locks is warned of: nothing keeps a second run out there.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, ClassVar, Self

from pydantic import ConfigDict, Field, TypeAdapter

from expertmesh.config.errors import InputError
from expertmesh.io.reading import read_file

log = logging.getLogger(__name__)

NAME = "lock.json"
# How long a start waits for an earlier attempt of its own launcher to end.
LAUNCH_SECONDS = 60.0
# How long anybody else's lock is tried again: readers hold it for a moment (`holder`).
READER_SECONDS = 0.5
_POLL_SECONDS = 0.05
# What flock fails with where a file system has no locks.
_UNSUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK}
_MAX_BYTES = 1 << 16
_MAX_TIME = 1e11  # what `time.localtime` still knows


@dataclass(frozen=True, slots=True)
class Owner:
    """The holder of a lock, as its file has it. `started` is in seconds since the epoch."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    host: str
    process: Annotated[int, Field(ge=0, lt=2**31)]
    launch: str | None
    """The field of `Control`."""
    started: Annotated[float, Field(ge=0, lt=_MAX_TIME)]
    """Seconds since the epoch."""

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"process {self.process} on {self.host}, since {since}"


_OWNER = TypeAdapter(Owner)


class RunLock:
    """`with RunLock(directory):` makes the directory if needed, and holds its lock (of this `name`) inside the block.

    Entering raises `InputError` if another run holds it, which is then `held_by`. `launch` names the launcher: an
    earlier attempt of the same one is waited for, and what it has left behind is not reported.
    """

    def __init__(self, directory: Path, launch: str | None = None, name: str = NAME) -> None:
        self.path = directory / name
        self.owner = Owner(socket.gethostname(), os.getpid(), launch, time.time())
        self.held_by: Owner | None = None
        self._descriptor = -1

    def __enter__(self) -> Self:
        began = time.monotonic()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while (other := self._try()) is not None:
                ours = other.launch is not None and other.launch == self.owner.launch
                if time.monotonic() - began > (LAUNCH_SECONDS if ours else READER_SECONDS):
                    self.held_by = other
                    raise InputError(
                        f"output_dir {self.path.parent} is in use by another run: {other}; wait for it, end it, or "
                        "choose another output_dir",
                        key="output.in-use",
                    )
                time.sleep(_POLL_SECONDS)
        except OSError as error:
            raise InputError(
                f"{self.path} cannot be locked: {error.strerror or error}; choose a directory that can be written",
                key="output.unwritable",
            ) from error
        _HELD.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _HELD.discard(self)
        # Before the lock is released: a process that waits for it sees that the file is deleted.
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _try(self) -> Owner | None:
        """Take the lock, or return who has it."""
        while True:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._descriptor)
                return _read(self.path) or _UNKNOWN
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    os.close(self._descriptor)
                    raise
                log.warning(
                    f"{self.path}: this file system has no locks ({error.strerror}); nothing keeps a second run out of "
                    "the directory"
                )
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._descriptor), os.stat(self.path)):
                    break
            os.close(self._descriptor)  # its owner removed the file between the two calls
        before = _read(self.path)
        if before is not None and (before.launch is None or before.launch != self.owner.launch):
            log.info(f"{self.path}: the run that held it has ended without giving it back ({before})")
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(asdict(self.owner)).encode(), 0)
        os.fsync(self._descriptor)
        return None


_HELD: set[RunLock] = set()


def _let_go_in_child() -> None:
    """Close the lock in a forked child, which would keep it when the parent is killed."""
    for lock in _HELD:
        os.close(lock._descriptor)
    _HELD.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that a lock's file names."""

    owner: Owner
    lives: bool
    """True if it still holds the lock."""


def holder(directory: Path) -> Holder | None:
    """Return who holds the lock of `directory`, or left its file behind; None without a file. Changes nothing.

    For readers: the answer may be outdated the moment after.
    """
    path = directory / NAME
    try:
        owner = _read(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}", key="file.unreadable") from error
    if owner is None:
        return None
    lives = False
    with suppress(OSError):  # deleted meanwhile, or no locks there
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            lives = True
    return Holder(owner, lives)


_UNKNOWN = Owner("an unknown host", 0, None, 0.0)


def _read(path: Path) -> Owner | None:
    """Return the owner in the file; None if there is no file, or it is not written yet."""
    try:
        content = read_file(path, _MAX_BYTES)
        return _OWNER.validate_json(content) if content else None
    except FileNotFoundError:
        return None
    except ValueError:
        return _UNKNOWN
