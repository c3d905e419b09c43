"""Create directories of files under a temporary name, complete them, and publish them with one rename.

Nothing is overwritten: a target directory that is not empty is refused. Nothing here communicates.
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
from expertmesh.io.safetensors_writer import FilesLayout, create_file, rename_synced, sync

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


def create_files(layout: FilesLayout, temporary: Path) -> None:
    """Create the temporary directory with all weights files at their full sizes.

    Raises:
        InputError: The disk has too little space, or a write failed.
    """
    with io_errors(temporary, layout.size):
        temporary.parent.mkdir(parents=True, exist_ok=True)
        require_space(temporary.parent, layout.size)
        temporary.mkdir()
        for file in layout.files:
            create_file(file)
        sync(temporary)


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


def publish(layout: FilesLayout, temporary: Path, directory: Path) -> None:
    """Rename the complete directory to its final name, atomically; an empty directory of that name is replaced."""
    with io_errors(directory, layout.size):
        rename_synced(temporary, directory)
