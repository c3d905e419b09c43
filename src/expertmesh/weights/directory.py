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
from copy import deepcopy
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
                f"{directory.parent}: the disk is full: it has {free:,} bytes free, the model needs {needed:,}; "
                "free space or choose another directory"
            ) from error
        path = error.filename or directory
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error


def create_files(layout: Layout, temporary: Path) -> None:
    """Make the temporary directory with all weights files at their full sizes, if the disk has room."""
    with io_errors(temporary, layout.size):
        temporary.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(temporary.parent).free
        if free < layout.size:
            raise InputError(
                f"{temporary.parent}: the disk has {free:,} bytes free, the model needs {layout.size:,}; "
                "free space or choose another directory"
            )
        temporary.mkdir()
        for file in layout.files:
            create_file(file)
        sync(temporary)


def wait_until_visible(layout: Layout) -> None:
    """Return when this rank sees all files at their full sizes. `InputError` if it does not in time."""
    deadline = time.monotonic() + VISIBLE_WITHIN_SECONDS
    for file in layout.files:
        while not file.path.exists() or file.path.stat().st_size != file.size:
            if time.monotonic() > deadline:
                raise InputError(
                    f"{file.path}: created by rank 0, but not seen on host {socket.gethostname()} within "
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
        for path in directory.iterdir():
            sync(path)
        sync(directory)


def publish(layout: Layout, temporary: Path, directory: Path) -> None:
    """Give the complete directory its name, atomically; an empty directory of that name is replaced."""
    with io_errors(directory, layout.size):
        os.rename(temporary, directory)
        sync(directory.parent)
