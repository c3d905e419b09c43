"""The manifest of a checkpoint: its files with sizes and hashes, and which part of which tensor is where.

It is the last file written and the only one that says that a checkpoint is complete. Typed and strict: a
manifest that does not say exactly what this module expects is damaged. Nothing here reads a tensor.
"""

import itertools
import math
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from expertmesh.config.errors import InputError, IntegrityError, SecurityError
from expertmesh.io.boxes import Box, full_box, intersect, volume
from expertmesh.io.safetensors_reader import DTYPES
from expertmesh.io.versioned_json import read_versioned

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
# What a user can do about damage; ends the sentences that name it.
MEND = "restore it, or remove this checkpoint to go on from the one before it"
_Sha256 = Field(pattern=r"^[0-9a-f]{64}$")
_Size = Field(ge=0)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class FileEntry(_Strict):
    """One file; `name` is relative to the checkpoint, with `/` between directories."""

    name: str
    bytes: int = _Size
    sha256: str = _Sha256


class Chunk(_Strict):
    """A box of a tensor, stored in file number `file` under the tensor's name.

    `copies` ranks held it; with several, `fingerprint` is what each of them computed of its own copy.
    """

    file: int = _Size
    offset: list[int]
    shape: list[int]
    copies: int = Field(default=1, ge=1)
    fingerprint: int | None = None

    @property
    def box(self) -> Box:
        return tuple((start, start + size) for start, size in zip(self.offset, self.shape, strict=True))


class TensorEntry(_Strict):
    """One tensor: `dtype` as safetensors spells it, its global shape, and the chunks that tile it."""

    dtype: str
    shape: list[int]
    chunks: list[Chunk]


class Manifest(_Strict):
    """What manifest.json holds. `model` and `optimizer` map tensor names to where their chunks are; `trained` are the
    parameters that the optimizer updates.
    """

    format: Literal["expertmesh-checkpoint"] = "expertmesh-checkpoint"
    schema_version: Literal[1] = 1
    step: int = _Size
    created: str
    world_size: int = Field(ge=1)
    layout: dict[str, int]
    versions: dict[str, str]
    config_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    files: list[FileEntry]
    trained: list[str]
    model: dict[str, TensorEntry]
    optimizer: dict[str, TensorEntry]

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def tensors(self) -> dict[str, TensorEntry]:
        """Model and optimizer tensors together; their names never clash."""
        return {**self.model, **self.optimizer}


def read_manifest(directory: Path) -> Manifest:
    """The manifest of one checkpoint, checked in itself and against the sizes of the files.

    Raises `InputError` if there is no such checkpoint or a newer version wrote it, `SecurityError` for file names
    that lead elsewhere, `IntegrityError` naming the file or tensor for everything else. Reads no other file.
    """
    manifest = parse_manifest(directory)
    for problem in itertools.chain(file_problems(directory, manifest), tensor_problems(directory, manifest)):
        raise IntegrityError(f"{problem}; {MEND}")
    return manifest


def parse_manifest(directory: Path) -> Manifest:
    """The manifest as it is written: typed, and its file names plain paths; nothing is compared. Raises as above."""
    path = directory / MANIFEST
    if not directory.is_dir():
        raise InputError(f"{directory}: no such checkpoint")
    missing = IntegrityError(f"{directory}: has no {MANIFEST}; it is not a complete checkpoint; {MEND}")
    if not path.is_file():  # reading a pipe would never end
        raise missing
    try:
        manifest = read_versioned(path, Manifest, SCHEMA_VERSION, MEND)
    except FileNotFoundError as error:
        raise missing from error
    for file in manifest.files:
        check_plain_path(file.name, path)
    return manifest


def check_plain_path(name: str, where: Path) -> None:
    """Refuse everything that is not a relative path of plain names with `/` between them."""
    parts = name.split("/")
    if any(part in ("", ".", "..") or set(part) & set("\\\0") for part in parts):
        raise SecurityError(f"{where}: names the file {name!r}, which is not a plain path inside the checkpoint")


def untiled(entry: TensorEntry) -> str | None:
    """Why the chunks do not hold each element of the tensor exactly once, or None if they do."""
    whole = full_box(entry.shape)
    boxes = [chunk.box for chunk in entry.chunks]
    if any(start < 0 or stop > size for box in boxes for (start, stop), (_, size) in zip(box, whole, strict=True)):
        return "a chunk lies outside of it"
    if _overlapping(boxes, whole):
        return "two of its chunks overlap"
    held, wanted = sum(volume(box) for box in boxes), math.prod(entry.shape)
    return None if held == wanted else f"its chunks hold {held} of {wanted} elements"


def _overlapping(boxes: Sequence[Box], whole: Box) -> bool:
    boxes = sorted(box for box in boxes if volume(box))
    cut = [dim for dim in range(len(whole)) if any(box[dim] != whole[dim] for box in boxes)]
    if len(cut) == 1:  # the usual case, and there may be thousands of them
        return any(one[cut[0]][1] > other[cut[0]][0] for one, other in itertools.pairwise(boxes))
    return any(intersect(one, other) is not None for one, other in itertools.combinations(boxes, 2))


def file_problems(directory: Path, manifest: Manifest) -> Iterator[str]:
    """What is wrong with names and sizes of the files, as sentences."""
    seen = set()
    for file in manifest.files:
        path = directory / file.name
        if file.name in seen:
            yield f"{directory / MANIFEST}: damaged: names {file.name} twice"
        seen.add(file.name)
        try:
            found = os.stat(path)
        except OSError as error:
            yield f"{path}: missing, but the checkpoint's manifest names it ({error.strerror})"
            continue
        if not stat.S_ISREG(found.st_mode):
            yield f"{path}: is not a file"  # to open a pipe would be to wait for ever
        elif found.st_size != file.bytes:
            yield f"{path}: has {found.st_size} bytes, not the {file.bytes} that the manifest says"


def tensor_problems(directory: Path, manifest: Manifest) -> Iterator[str]:
    """What is wrong with tensors and their chunks, as the manifest describes them; sentences."""
    for name, entry in manifest.tensors().items():
        if reason := _why_impossible(entry, len(manifest.files)):
            yield f"{directory / MANIFEST}: damaged: tensor {name} {reason}"


def _why_impossible(entry: TensorEntry, files: int) -> str | None:
    ranks = {len(entry.shape), *(len(chunk.shape) for chunk in entry.chunks), *(len(c.offset) for c in entry.chunks)}
    if entry.dtype not in DTYPES:
        return f"has the unknown dtype {entry.dtype!r}"
    if len(ranks) > 1 or any(size < 0 for size in entry.shape) or any(chunk.file >= files for chunk in entry.chunks):
        return "has chunks that cannot be part of it"
    reason = untiled(entry)
    return reason and f"is not whole: {reason}"
