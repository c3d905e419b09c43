"""One run at a time in an output directory: `output_dir/lock.json` says who holds it, and that it still lives.

Rank 0 holds it for the length of a run; no rank communicates here. It works on any file system that can create a file
exclusively and rename one, so also where there is no flock. A lock whose run is gone is taken over.

The locks of `filelock` do not keep these promises. `FileLock` is flock, which some shared file systems do not have, and
others only between processes of one host. `SoftFileLock` never takes over what a dead host has left. `SoftFileLease`
has heartbeats, but a new run has to watch the old one's for the whole lease before it may start, and the lock of a
process that is stopped on this very host is lost. None says who holds it since when, as refusal and report do.

`lock.json` names a host, a process and a token of its own. Whoever takes a lock over first creates
`lock.json.after-TOKEN`, with the token of the dead lock: of many who try, one succeeds, and nobody who acts on an old
reading can remove a living lock.
"""

import errno
import json
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Annotated, ClassVar, Self

from pydantic import ConfigDict, Field, TypeAdapter

from expertmesh.config.errors import InputError
from expertmesh.io.directory import wait_until_seen
from expertmesh.io.reading import read_file
from expertmesh.io.safetensors_writer import rename_synced, sync

log = logging.getLogger(__name__)

NAME = "lock.json"
BEAT_SECONDS = 15.0
# Without a sign of life for this long, a lock counts as left behind where its process cannot be looked up: on another
# host, or in another container. Much longer than what a stalled file system or a busy host takes.
STALE_SECONDS = 300.0
# The same for a start of the same launcher, which has made it because the one before is lost: three heartbeats. As a
# launcher may be wrong about that (torchrun is, of an agent that it did not hear of), a living one keeps its lock.
LOST_SECONDS = 45.0
_POLL_SECONDS = 0.2
# How long a lock of another host that looks left behind is watched for a sign of life: clocks of two hosts are apart at
# times, and a clock may jump.
WATCH_SECONDS = 2 * BEAT_SECONDS + 5
# How long a lock may be unreadable because its owner is just writing it.
_WRITING_SECONDS = 2.0
_MAX_BYTES = 1 << 16
_MAX_TIME = 1e11  # what `time.localtime` still knows


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a lock. Times are of the wall clock. `space`: where the number of the process has a meaning."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    token: Annotated[str, Field(pattern=r"^[0-9a-f]{1,64}$")]  # part of a file's name
    host: str
    space: str
    process: Annotated[int, Field(ge=0, lt=2**31)]
    process_started: str
    launch: str | None
    started: Annotated[float, Field(ge=0, lt=_MAX_TIME)]
    heartbeat: Annotated[float, Field(ge=0, lt=_MAX_TIME)]

    def is_gone(self, stale_seconds: float = STALE_SECONDS) -> bool:
        """Where the process can be looked up, that decides, also against a heartbeat that has stopped."""
        if self.space == _process_space():
            return _process_started(self.process) != self.process_started
        return time.time() - self.heartbeat > stale_seconds

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"process {self.process} on {self.host}, since {since}"


_OWNER = TypeAdapter(Owner)


class RunLock:
    """`with RunLock(directory):` makes the directory if needed, and holds its lock (of this `name`) inside the block.

    Entering raises `InputError` if another run holds it, which is then `held_by`. `launch` names the launcher: an
    earlier attempt of the same one is waited for a while, and what it has left behind is taken over without a word.
    """

    def __init__(self, directory: Path, launch: str | None = None, name: str = NAME) -> None:
        self.path = directory / name
        process, now = os.getpid(), time.time()
        self.owner = Owner(
            token=uuid.uuid4().hex,
            host=socket.gethostname(),
            space=_process_space(),
            process=process,
            process_started=_process_started(process),
            launch=launch,
            started=now,
            heartbeat=now,
        )
        self.held_by: Owner | None = None
        self._patient_until = 0.0
        self._taken_by: Owner | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._patient_until = time.monotonic() + LOST_SECONDS + BEAT_SECONDS
            while not self._try():
                time.sleep(0.01)
        except OSError as error:
            raise InputError(
                f"output_dir {self.path.parent} cannot be locked: {error}; choose a directory that can be written",
                key="output.unwritable",
            ) from error
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        if self._holds():
            self.path.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise `InputError` if another run took the lock over, because this one gave no sign of life for too long.

        Call it before writing what another run must not find changed. Costs no system call.
        """
        if self._taken_by is not None:
            raise InputError(
                f"output_dir {self.path.parent} was taken over by {self._taken_by}, because this run had given no sign "
                f"of life for {STALE_SECONDS:.0f} s; this run ends here, and the other goes on",
                key="output.taken-over",
            )

    def _try(self) -> bool:
        """One attempt; False if somebody else was faster and the lock must be looked at again."""
        holder = self._holder()
        if holder is None:
            return _create(self.path, self.owner)
        ours = holder.launch is not None and holder.launch == self.owner.launch
        if ours and not holder.is_gone(LOST_SECONDS) and time.monotonic() < self._patient_until:
            time.sleep(_POLL_SECONDS)
            return False
        if not holder.is_gone(LOST_SECONDS if ours else STALE_SECONDS) or (not ours and self._lives(holder)):
            self.held_by, age = holder, max(0.0, time.time() - holder.heartbeat)
            raise InputError(
                f"output_dir {self.path.parent} is in use by another run: {holder} (last sign of life {age:.0f} s "
                "ago); wait for it, end it, or choose another output_dir. If it is dead for certain, remove "
                f"{self.path}",
                key="output.in-use",
            )
        if not self._inherit(holder):
            return False
        if holder.launch is None or holder.launch != self.owner.launch:
            log.info(f"{self.path}: the run that held it has ended without giving it back ({holder}); taken over")
        return True

    def _lives(self, holder: Owner) -> bool:
        """Whether the holder of a lock that looks left behind gives another sign of life."""
        if holder.space in ("", _process_space()):  # nobody has written it, or its process is gone
            return False
        log.info(f"{self.path}: {holder} has given no sign of life; watching for {WATCH_SECONDS:.0f} s whether it does")
        until = time.monotonic() + WATCH_SECONDS
        while (now := self._holder()) == holder and time.monotonic() < until:
            time.sleep(0.1)
        return now is not None and now != holder

    def _inherit(self, dead: Owner) -> bool:
        claim = self._claim_after(dead)
        if not _create(claim, self.owner):
            return False
        if not self._holds():  # the dead lock was gone when the claim was made
            claim.unlink(missing_ok=True)
            return False
        _replace(self.path, self.owner)
        for left_behind in self.path.parent.glob(f"{self.path.name}.*"):
            left_behind.unlink(missing_ok=True)
        return True

    def _holder(self) -> Owner | None:
        """The owner in `lock.json`, or the last of those who are taking it over from each other."""
        owner, seen = _read(self.path), set[str]()
        while owner is not None and (heir := _read(self._claim_after(owner))) is not None:
            seen.add(owner.token)
            if heir.token in seen:  # no run writes such files
                raise InputError(
                    f"{self.path}: is taken over in a circle; remove it and {self.path.name}.after-* beside it",
                    key="output.unwritable",
                )
            owner = heir
        return owner

    def _holds(self) -> bool:
        holder = self._holder()
        return holder is not None and holder.token == self.owner.token

    def _claim_after(self, owner: Owner) -> Path:
        return self.path.with_name(f"{self.path.name}.after-{owner.token}")

    def _beat(self) -> None:
        while not self._done.wait(BEAT_SECONDS):
            try:
                holder = _read(self.path)
                if holder is not None and holder.token != self.owner.token:
                    self._taken_by = holder
                    return
                _replace(self.path, replace(self.owner, heartbeat=time.time()))
            except OSError:
                continue  # a file system that fails now and then costs one heartbeat of many


def holder(directory: Path) -> Owner | None:
    """Who holds the lock of `directory`, or left it behind; None for nobody. Changes nothing.

    For readers: what they are told may be over the moment after.
    """
    try:
        return _read(directory / NAME)
    except OSError as error:
        raise InputError(f"{directory / NAME}: cannot be read: {error.strerror}", key="file.unreadable") from error


def wait_until_held(directory: Path) -> None:
    """Return when this rank sees the lock that rank 0 has taken. `InputError` for a `directory` that is not shared."""
    wait_until_seen(directory / NAME)


def _create(path: Path, owner: Owner) -> bool:
    """Whether this call created the file, whole from the first moment; of many at the same time, one does."""
    unfinished = path.with_name(f"{path.name}.{owner.token}.tmp")
    unfinished.write_text(json.dumps(asdict(owner)), encoding="utf-8")
    try:
        sync(unfinished)
        os.link(unfinished, path)
        sync(path.parent)
    except (FileExistsError, FileNotFoundError):  # somebody was faster, and may have swept up
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return _create_without_links(path, owner)
    finally:
        unfinished.unlink(missing_ok=True)
    for left_behind in path.parent.glob(f"{path.name}.*.tmp"):
        left_behind.unlink(missing_ok=True)
    return True


def _create_without_links(path: Path, owner: Owner) -> bool:
    """Where the file system has no links: a process that dies while it writes leaves a lock that nobody can read."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(owner)))
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def _replace(path: Path, owner: Owner) -> None:
    unfinished = path.with_name(f"{path.name}.{owner.token}.tmp")
    try:
        unfinished.write_text(json.dumps(asdict(owner)), encoding="utf-8")
        rename_synced(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _read(path: Path) -> Owner | None:
    """Who is in the file; None if there is no file."""
    deadline = time.monotonic() + _WRITING_SECONDS
    while True:
        try:
            return _OWNER.validate_json(read_file(path, _MAX_BYTES))
        except FileNotFoundError:
            return None
        except ValueError:
            if time.monotonic() > deadline:
                return _unreadable(path)
            time.sleep(0.01)


def _unreadable(path: Path) -> Owner | None:
    """For a file that its owner never came to write: only its age says whether somebody may still be there."""
    try:
        written = path.stat().st_mtime
    except FileNotFoundError:
        return None
    return Owner("0", "an unknown host", "", 0, "", None, written, written)


def _process_space() -> str:
    """The same for all processes that see each other's numbers: since when this host is up, and which container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _process_started(process: int) -> str:
    """When the process started, so that another one with its number is told from it; empty if there is none."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        # A killed process lies there until its parent asks about it; while other threads of it are left, it may write.
        return "" if fields[0] in "ZX" and int(fields[17]) <= 1 else fields[19]
    except FileNotFoundError:
        return _exists(process) if not Path("/proc/self/stat").exists() else ""


def _exists(process: int) -> str:
    """Without /proc, that a process has this number is all there is to know."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "running"
