"""The directory around the weights files: made under a temporary name, completed, published by one rename.

For save.py. Writes what transformers' `save_pretrained` writes beside the weights: index, config,
generation config, a remote-code model's own code, and whatever the tokenizer saves (its chat template with
it). Never overwrites: a target that holds anything is refused. Nothing here communicates.
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
from expertmesh.io.safetensors_writer import FilesLayout, create_file, sync

# How long files of one rank may take to show up on another: network file systems cache directories.
VISIBLE_WITHIN_SECONDS = 30.0


def check_target(directory: Path) -> None:
    """Raise `InputError` unless `directory` can be published: it does not exist, or is empty."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(f"{directory}: exists and is not empty; choose another directory or remove it")


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
    """Turn what the operating system says about writing to `directory` into an `InputError`.

    `needed` are the bytes that all weights files take.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(directory.parent).free
            raise InputError(
                f"{directory.parent}: the disk is full: it has {free:,} bytes free, {needed:,} are needed; "
                "free space or choose another directory"
            ) from error
        path = error.filename or directory
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error


def create_files(layout: FilesLayout, temporary: Path) -> None:
    """Make the temporary directory with all weights files at their full sizes, if the disk has room."""
    with io_errors(temporary, layout.size):
        temporary.parent.mkdir(parents=True, exist_ok=True)
        require_space(temporary.parent, layout.size)
        temporary.mkdir()
        for file in layout.files:
            create_file(file)
        sync(temporary)


def require_space(directory: Path, needed: int) -> None:
    """Raise `InputError` unless the disk of `directory` has `needed` bytes free."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise InputError(
            f"{directory}: the disk has {free:,} bytes free, {needed:,} are needed; "
            "free space or choose another directory"
        )


def wait_until_visible(layout: FilesLayout) -> None:
    """Return when this rank sees all files at their full sizes. `InputError` if it does not in time."""
    for file in layout.files:
        wait_until_seen(file.path, file.size)


def wait_until_seen(path: Path, size: int | None = None) -> None:
    """Return when this rank sees what another has created, at its full `size`. `InputError` if not in time."""
    deadline = time.monotonic() + VISIBLE_WITHIN_SECONDS
    while not path.exists() or (size is not None and path.stat().st_size != size):
        if time.monotonic() > deadline:
            raise InputError(
                f"{path}: created by another rank, but not seen on host {socket.gethostname()} within "
                f"{VISIBLE_WITHIN_SECONDS:.0f} s; save to a file system that all ranks share"
            )
        time.sleep(0.05)


def publish(layout: FilesLayout, temporary: Path, directory: Path) -> None:
    """Give the complete directory its name, atomically; an empty directory of that name is replaced."""
    with io_errors(directory, layout.size):
        os.rename(temporary, directory)
        sync(directory.parent)
