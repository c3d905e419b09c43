"""Write files and directories that appear complete or not at all, synced to disk; imports no torch.

A directory is filled under a temporary name and published with one rename. Nothing is overwritten: a target directory
that is not empty is refused. Nothing here communicates.
"""

import errno
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expertmesh.config.errors import InputError

# The longest time until files of one rank appear on another: network file systems cache directories.
VISIBLE_WITHIN_SECONDS = 30.0


_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of this user or project is used up; the disk",
    errno.EFBIG: "the file would be larger than is allowed here (ulimit -f says how large); the disk",
}


def check_target(directory: Path) -> None:
    """Raise `InputError` unless `directory` can be published: it does not exist, or is empty."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(
            f"{directory}: exists and is not empty; choose another directory or remove it", key="output.not-empty"
        )


@contextmanager
def temporary_directory(temporary: Path, *, remove: bool) -> Iterator[None]:
    """Remove the directory when the block fails, on the rank with `remove`."""
    try:
        yield
    except BaseException:
        if remove:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def io_errors(directory: Path, needed: int) -> Iterator[None]:
    """Turn an `OSError` of a write to `directory` into an `InputError`.

    Args:
        needed: The bytes of all files, for the message.
    """
    try:
        yield
    except OSError as error:
        if why := _FULL.get(error.errno or 0):
            raise InputError(_too_small(directory.parent, needed, f"{why}: it has"), key="output.no-space") from error
        path, room = error.filename or directory, f" ({needed:,} bytes were to be written)" if needed else ""
        raise InputError(
            f"{path}: cannot be written: {error.strerror or error}{room}", key="output.unwritable"
        ) from error


@contextmanager
def report_errors(path: str | Path) -> Iterator[None]:
    """Turn an `OSError` of a write of the one file that a command writes into an `InputError`."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written: {error.strerror}; choose another file", key="cli.unwritable-report"
        ) from error


def nearest(directory: Path) -> Path:
    """Return the directory, or the innermost of its parents that exists.

    A directory that this user may not search counts as absent.
    """
    directory = directory.absolute()
    return next(path for path in (directory, *directory.parents) if os.path.exists(path))


def require_space(directory: Path, needed: int) -> None:
    """Raise `InputError` unless the disk of `directory` has `needed` bytes free."""
    if shutil.disk_usage(directory).free < needed:
        raise InputError(_too_small(directory, needed, "the disk has"), key="output.no-space")


def _too_small(directory: Path, needed: int, has: str) -> str:
    try:
        free = f"{shutil.disk_usage(directory).free:,}"
    except OSError:
        free = "no"
    return f"{directory}: {has} {free} bytes free, {needed:,} are needed; free space or choose another directory"


def wait_until_seen(path: Path, size: int | None = None) -> None:
    """Wait until this rank sees what another rank has created, at its full `size` in bytes.

    Raises:
        InputError: It is not visible within `VISIBLE_WITHIN_SECONDS`.
    """
    deadline = time.monotonic() + VISIBLE_WITHIN_SECONDS
    while not path.exists() or (size is not None and path.stat().st_size != size):
        if time.monotonic() > deadline:
            raise InputError(
                f"{path}: created by another rank, but not seen on host {socket.gethostname()} within "
                f"{VISIBLE_WITHIN_SECONDS:.0f} s; save to a file system that all ranks share",
                key="output.not-shared",
            )
        time.sleep(0.05)


def make_synced(directory: Path) -> None:
    """Create a directory, and its parents where they are missing, all of whose entries survive a power loss."""
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync(each.parent)


def write_synced(path: Path, content: bytes, size: int | None = None) -> None:
    """Create a new file with `content`, followed by a hole if `size` is larger, and sync it to disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        write_at(descriptor, memoryview(content), 0)
        if size is not None:
            os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_synced(path: Path, content: bytes) -> None:
    """Replace the content of `path` completely or not at all, even if the process or the machine fails.

    A failure can leave a file `NAME.tmp` behind. The next call replaces it, and never writes through a link.
    """
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.unlink(missing_ok=True)
    write_synced(unfinished, content)
    rename_synced(unfinished, path)


def rename_synced(source: Path, target: Path) -> None:
    """Rename a file or a directory so that a power loss leaves it complete under one of the two names.

    Its entries are synced before the rename and the rename itself after it, because a file system may order them in
    another way. The content of files in a directory must be synced by their writers.
    """
    sync(source)
    os.replace(source, target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Sync the content of a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_at(descriptor: int, buffer: memoryview, offset: int) -> None:
    """Write all of `buffer` from `offset` on; a single write may take less than it is given."""
    while buffer:
        done = os.pwrite(descriptor, buffer, offset)
        buffer, offset = buffer[done:], offset + done
