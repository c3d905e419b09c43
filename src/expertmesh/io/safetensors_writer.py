"""Lay out safetensors files before any byte of them is written, and write boxes of tensors into their place.

Every rank computes the same layout, one rank creates the files at full size with their headers, and then each rank
writes its own byte ranges. The result is the same as that of the safetensors library, which writes whole files from one
process. Nothing here communicates or decides who writes what.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertmesh.config.errors import IntegrityError
from expertmesh.io.boxes import Box, ByteRuns, volume
from expertmesh.io.directory import io_errors, require_space, sync, write_at, write_synced
from expertmesh.io.safetensors_reader import DTYPES, INDEX_FILE, MAX_OPEN_FILES, SINGLE_FILE, FileTensor, as_bytes

CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One file to be written."""

    path: Path
    """The file."""
    header: bytes
    """The header's bytes, its length included."""
    size: int
    """The size of the file in bytes."""
    tensors: tuple[FileTensor, ...]
    """The tensors with their offsets."""


@dataclass(frozen=True, slots=True)
class FilesLayout:
    """All weights files of a directory."""

    files: tuple[FileLayout, ...]
    """The layout of each file."""
    index: dict[str, Any] | None
    """The content of the index file, or None for a single file."""

    @property
    def tensors(self) -> dict[str, FileTensor]:
        return {tensor.name: tensor for file in self.files for tensor in file.tensors}

    @property
    def size(self) -> int:
        """The bytes of all files, headers included."""
        return sum(file.size for file in self.files)

    def moved_to(self, directory: Path) -> "FilesLayout":
        """Return the layout of the same files in another directory."""
        files = []
        for file in self.files:
            path = directory / file.path.name
            tensors = tuple(replace(tensor, path=path) for tensor in file.tensors)
            files.append(replace(file, path=path, tensors=tensors))
        return replace(self, files=tuple(files))


def lay_out(
    directory: Path,
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    max_shard_bytes: int,
    parameters: int,
) -> FilesLayout:
    """Distribute tensors over files of at most `max_shard_bytes`, in the order given.

    A larger tensor gets its own file. A single file is named `model.safetensors`; several files are numbered and get an
    index.

    Args:
        tensors: Dtype and shape by name.
        parameters: The number of parameters, which the index records as transformers does.
    """
    groups: list[list[FileTensor]] = [[]]
    filled = 0

    for name, (dtype, shape) in tensors.items():
        tensor = FileTensor(name, dtype, tuple(shape), directory, 0)
        if groups[-1] and filled + tensor.nbytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    if len(groups) == 1:
        return FilesLayout((_file(directory / SINGLE_FILE, groups[0]),), None)
    count = len(groups)
    files = tuple(
        _file(directory / f"model-{number:05d}-of-{count:05d}.safetensors", group)
        for number, group in enumerate(groups, start=1)
    )
    weight_map = {tensor.name: file.path.name for file in files for tensor in file.tensors}
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    metadata = {"total_parameters": parameters, "total_size": total}
    return FilesLayout(files, {"metadata": metadata, "weight_map": weight_map})


def create_file(file: FileLayout) -> None:
    """Create the file at its full size with its header; the tensors' bytes are holes until they are written."""
    write_synced(file.path, file.header, file.size)


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


def create_index(directory: Path, index: dict[str, Any]) -> None:
    """Write the index file of `directory`, synced to disk."""
    write_synced(directory / INDEX_FILE, json.dumps(index, indent=2, sort_keys=True).encode() + b"\n")


def too_narrow(name: str, dtype: torch.dtype) -> IntegrityError:
    """Return the error for finite values of a tensor that the dtype they are to be written in cannot hold."""
    return IntegrityError(
        f"{name}: has values that {dtype} cannot hold; take bfloat16 or float32", key="weights.dtype-too-narrow"
    )


class OpenFiles:
    """The files of a layout, each opened at its first write. Counts the bytes `written`."""

    def __init__(self, layout: FilesLayout) -> None:
        self.written = 0
        self._layout, self._tensors = layout, layout.tensors
        self._descriptors: dict[Path, int] = {}

    def write(self, name: str, box: Box, values: Tensor) -> None:
        """Write `values`, on any device and of any dtype, as `box` of the tensor `name`.

        Raises:
            IntegrityError: The dtype of the file cannot hold the values.
        """
        target = self._tensors[name]
        # Cast on the device, before the copy to the host: a narrower dtype moves fewer bytes.
        cast = values.to(target.dtype)
        if cast.dtype != values.dtype and not torch.equal(cast.isfinite(), values.isfinite()):
            raise too_narrow(name, target.dtype)
        if target.path not in self._descriptors:
            if len(self._descriptors) == MAX_OPEN_FILES:  # files are written in order, so the oldest is done first
                self._close(next(iter(self._descriptors)))
            self._descriptors[target.path] = os.open(target.path, os.O_WRONLY | os.O_CLOEXEC)
        self.written += write_box(self._descriptors[target.path], target, box, cast.cpu().contiguous())

    @contextmanager
    def synced(self) -> Iterator[None]:
        """Sync to disk at the end of the block what was written in it, and close the files."""
        with io_errors(self._layout.files[0].path.parent, self._layout.size):
            try:
                yield
                for path in [*self._descriptors]:
                    self._close(path)
            finally:
                while self._descriptors:
                    os.close(self._descriptors.popitem()[1])

    def _close(self, path: Path) -> None:
        os.fsync(self._descriptors[path])
        os.close(self._descriptors.pop(path))


def write_box(descriptor: int, tensor: FileTensor, box: Box, values: Tensor) -> int:
    """Write `values` as `box` of `tensor`, one write for each contiguous run of the box.

    Args:
        values: Contiguous, on the CPU, of the tensor's dtype.

    Returns:
        The bytes written.
    """
    assert values.is_contiguous()
    assert values.dtype == tensor.dtype
    assert values.numel() == volume(box)
    if values.numel() == 0:
        return 0
    source = as_bytes(values).numpy().data
    runs = ByteRuns.of(tensor.shape, tensor.dtype.itemsize, box)
    at = 0
    for first, count, stride in runs.rows():
        for row in range(count):
            write_at(descriptor, source[at : at + runs.length], tensor.offset + first + row * stride)
            at += runs.length
    return at


def lay_out_file(path: Path, values: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileLayout:
    """Return the layout of one file that holds all `values` under their names, with `metadata` in its header."""
    tensors = [FileTensor(name, value.dtype, tuple(value.shape), path, 0) for name, value in values.items()]
    return _file(path, tensors, metadata)


def _file(path: Path, tensors: list[FileTensor], metadata: Mapping[str, str] | None = None) -> FileLayout:
    # The widest dtypes come first, as in the library, so that every tensor is aligned.
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    entries: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    at = 0
    for tensor in ordered:
        offsets = [at, at + tensor.nbytes]
        entries[tensor.name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        at += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(math.ceil(len(text) / 8) * 8)
    start = 8 + len(text)
    placed = tuple(
        replace(tensor, path=path, offset=start + entries[tensor.name]["data_offsets"][0]) for tensor in ordered
    )
    return FileLayout(path, len(text).to_bytes(8, "little") + text, start + at, placed)
