"""The disk that runs are written to, the hub that models come from, and the clock."""

import os
import shutil
import tempfile
import threading
import time
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime
from pathlib import Path

from huggingface_hub import constants, get_token

from expertmesh.cli.doctor.finding import Finding, without_secrets
from expertmesh.cli.printing import bytes_text
from expertmesh.config.errors import InputError
from expertmesh.io.safetensors_writer import sync
from expertmesh.training.lock import RunLock

FREE_BYTES = 2**30
HUB_SECONDS = 5.0
# Locks of runs compare the clocks of two machines; a lock counts as left behind after 300 s.
CLOCK_SECONDS = 60.0


def disk(directory: Path) -> Finding:
    """Whether checkpoints can be published and a run be locked in `directory`. Leaves nothing there."""
    while not directory.exists():
        directory = directory.parent
    free, faults, works = shutil.disk_usage(directory).free, [], []
    if free < FREE_BYTES:
        faults.append(f"{directory} has {bytes_text(free)} free, less than any checkpoint; free space")
    try:
        with tempfile.TemporaryDirectory(prefix=".expertmesh-doctor-", dir=directory) as scratch:
            for name, attempt in (("rename", _publish), ("locks", _lock), ("clock", _written_now)):
                if problem := attempt(Path(scratch)):
                    faults.append(f"{directory}: {problem}")
                else:
                    works.append(name)
    except OSError as error:
        faults.append(f"{directory}: cannot be written ({error.strerror}); choose another output_dir")
    says = f"{directory.resolve()} ({_file_system(directory)}): {bytes_text(free)} free"
    return Finding("disk", says + (f"; {', '.join(works)} right" if works else ""), tuple(faults))


def hub() -> Finding:
    """Whether models can be downloaded. Who works offline needs no hub."""
    cache, token = Path(constants.HF_HUB_CACHE), "a token is set" if get_token() else "no token"
    faults: tuple[str, ...] = ()
    existing = next(parent for parent in (cache, *cache.parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        faults = (f"the hub's cache {cache} cannot be written; set HF_HOME to a directory that can",)
    where = f"{token}; cache {cache}"
    endpoint = without_secrets(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE:
        return Finding("hub", f"not asked, as HF_HUB_OFFLINE is set; {where}", faults)
    answer = _ask_hub()
    if answer is None:
        return Finding("hub", f"{endpoint} not reached: local models and the cache alone work; {where}", faults)
    apart, seconds = answer
    if apart is not None and abs(apart) > CLOCK_SECONDS:
        ahead = "ahead of" if apart > 0 else "behind"
        faults = (*faults, f"the clock is {abs(apart):.0f} s {ahead} that of {endpoint}; let a time service set it")
    return Finding("hub", f"{endpoint} reached in {seconds:.1f} s; {where}", faults)


def _publish(scratch: Path) -> str | None:
    """What a checkpoint needs: files synced, a directory renamed over an empty one."""
    try:
        (scratch / "new").mkdir()
        (scratch / "new" / "file").write_bytes(b"content")
        sync(scratch / "new" / "file")
        (scratch / "old").mkdir()
        os.rename(scratch / "new", scratch / "old")
        sync(scratch)
    except OSError as error:
        return f"a directory cannot be renamed or synced there ({error.strerror}); choose a POSIX file system"
    return None if (scratch / "old" / "file").exists() else "a renamed directory has lost its file"


def _lock(scratch: Path) -> str | None:
    """What keeps two runs out of one output_dir."""
    try:
        with RunLock(scratch):
            try:
                with RunLock(scratch):
                    return "two runs can hold one lock there; choose another file system"
            except InputError:
                return None
    except InputError as error:
        return str(error)


def _written_now(scratch: Path) -> str | None:
    (scratch / "now").touch()
    apart = time.time() - (scratch / "now").stat().st_mtime
    if abs(apart) < CLOCK_SECONDS:
        return None
    return f"its clock and this machine's are {abs(apart):.0f} s apart; let a time service set both"


def _file_system(directory: Path) -> str:
    """Its kind, as Linux tells it: the mount point that is the longest beginning of the path."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown file system"
    path = directory.resolve()
    kinds = {Path(point): kind for _, point, kind, *_ in mounts if path.is_relative_to(point)}
    return kinds[max(kinds, key=lambda point: len(point.parts))] if kinds else "unknown file system"


def _ask_hub() -> tuple[float | None, float] | None:
    """(seconds that our clock is ahead, seconds that it took), or None. A name service may hang: it gets no longer."""
    answers: list[tuple[float | None, float]] = []

    def ask() -> None:
        started = time.monotonic()
        try:
            request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
            with urllib.request.urlopen(request, timeout=HUB_SECONDS) as response:
                date = response.headers.get("Date")
        except urllib.error.HTTPError as error:
            date = error.headers.get("Date")  # it has answered
        except (OSError, ValueError):
            return
        apart = None if date is None else time.time() - parsedate_to_datetime(date).timestamp()
        answers.append((apart, time.monotonic() - started))

    thread = threading.Thread(target=ask, name="doctor-hub", daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    return answers[0] if answers else None
