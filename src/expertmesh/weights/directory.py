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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from expertmesh.config.errors import InputError
from expertmesh.weights.mapping import own_class, own_classes
from expertmesh.weights.writing import Layout, create_file, create_index, sync

# How long files of one rank may take to show up on another: network file systems cache directories.
VISIBLE_WITHIN_SECONDS = 30.0


class Tokenizer(Protocol):
    """A tokenizer or processor of transformers."""

    def save_pretrained(self, save_directory: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class CopiedFiles:
    """Files by their path in the new directory, in place of a tokenizer that saves itself; none replaces another."""

    files: Mapping[str, Path]

    def save_pretrained(self, save_directory: str) -> None:
        for name, source in self.files.items():
            path = Path(save_directory) / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, path)


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


def create_files(layout: Layout, temporary: Path) -> None:
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


def wait_until_visible(layout: Layout) -> None:
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


def write_companions(
    model: PreTrainedModel, directory: Path, layout: Layout, tokenizer: Tokenizer | None, dtype: torch.dtype
) -> None:
    """Write everything but the weights, and sync it. The config will say that the weights are in `dtype`."""
    with io_errors(directory, layout.size):
        if layout.index is not None:
            create_index(directory, layout.index)
        write_config(model, directory, tokenizer, dtype)
        for path in directory.iterdir():
            sync(path)
        sync(directory)


def write_config(model: PreTrainedModel, directory: Path, tokenizer: Tokenizer | None, dtype: torch.dtype) -> None:
    """Write config, generation config, a remote-code model's own code, and the tokenizer's files."""
    config = deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [own_class(model).__name__]
    # Names the weights file to read instead of the usual one; what is written here has the usual name.
    if hasattr(config, "transformers_weights"):
        del config.transformers_weights
    if model.is_remote_code():
        with own_classes(model):
            custom_object_save(model, directory, config=config)  # type: ignore[arg-type]
    # Not `save_pretrained`: it validates, and would refuse after the training what was accepted before.
    config.to_json_file(directory / "config.json", use_diff=True)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.to_json_file(directory / "generation_config.json")
    if tokenizer is not None:
        tokenizer.save_pretrained(str(directory))


def publish(layout: Layout, temporary: Path, directory: Path) -> None:
    """Give the complete directory its name, atomically; an empty directory of that name is replaced."""
    with io_errors(directory, layout.size):
        os.rename(temporary, directory)
        sync(directory.parent)
