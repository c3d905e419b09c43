"""One rank's part of a checkpoint: its files with their hashes, and a note of what it held and wrote.

Written by each rank without talking to the others, on a thread of its own when saving is asynchronous; rank 0
joins the notes to the manifest. Reads live tensors only in `take_part`; what `write_part` gets may be a copy.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter
from torch import Tensor

from expertmesh.checkpoint.schema import FileEntry, tensor_file
from expertmesh.checkpoint.small_files import rng_state
from expertmesh.checkpoint.state import fingerprint, held_part, is_replicated, sharding_of
from expertmesh.distributed.mesh import Mesh
from expertmesh.io.boxes import Box, blocks, full_box, slices
from expertmesh.io.directory import io_errors
from expertmesh.io.safetensors_reader import as_bytes
from expertmesh.io.safetensors_writer import CODES, FileLayout, lay_out_file, sync, write_synced
from expertmesh.state.shards import is_on_other_stage, owns_copy

_BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class HeldPart:
    """One tensor of `kind` (model or optimizer) on one rank: its box, and whether this rank writes it.

    `sharding` is the same for tensors that are cut alike on every rank. `fingerprint` is set where other ranks hold the
    same part, so that the copies can be compared.
    """

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    sharding: str
    box: Box
    writes: bool
    fingerprint: int | None


@dataclass(frozen=True, slots=True)
class RankPart:
    """All that one rank puts into a checkpoint. `values` are those it writes, by kind and name. `leads`: this rank is
    the first of its pipeline stage, and names the stage's tensors for all of its ranks.
    """

    rank: int
    leads: bool
    held: tuple[HeldPart, ...]
    values: Mapping[str, dict[str, Tensor]]
    rng: dict[str, str]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensors in self.values.values() for tensor in tensors.values())


class SharedBox(NamedTuple):
    """The box that a rank holds of all tensors with one sharding; `copies` is a hash of what it holds of those of which
    other ranks hold copies, by name.
    """

    box: Box
    writes: bool
    copies: str | None


class ListedTensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    sharding: str


@dataclass(frozen=True, slots=True)
class Note:
    """What a rank tells rank 0 about its part. It grows with the number of shardings, which is small, not of tensors.

    `tensors` is a hash of `listing`: (kind, name, what it is) of every tensor, from ranks that lead.
    """

    files: list[FileEntry]
    rng: dict[str, str]
    tensors: str
    listing: list[tuple[str, str, ListedTensor]] | None
    boxes: dict[str, SharedBox]


_NOTE = TypeAdapter(Note)


def take_part(tensors: Mapping[str, Mapping[str, Tensor]], mesh: Mesh, *, copy: bool) -> RankPart:
    """Look at this rank's state: {kind: {name: tensor}}. With `copy` the values are the caller's to overwrite.

    The copy lies in host memory and takes as much as this rank writes. No communication.
    """
    stage, in_stage = divmod(mesh.rank, mesh.layout.ranks_per_stage)
    held: list[HeldPart] = []
    values: dict[str, dict[str, Tensor]] = {}
    for kind, state in tensors.items():
        values[kind] = {}
        for name, tensor in state.items():
            if is_on_other_stage(tensor):
                continue
            box, local = held_part(tensor)
            mark = fingerprint(local) if is_replicated(tensor) and local.numel() else None
            writes = owns_copy(tensor) and local.numel() > 0
            cut = sharding_of(tensor, stage)
            held.append(HeldPart(kind, name, CODES[tensor.dtype], tuple(tensor.shape), cut, box, writes, mark))
            if writes:
                # In pageable memory: torch keeps pinned buffers, each as large as the next power of two, for good.
                values[kind][name] = torch.empty_like(local, device="cpu").copy_(local) if copy else local
    return RankPart(mesh.rank, in_stage == 0, tuple(held), values, rng_state(mesh.device))


def write_part(part: RankPart, directory: Path, world_size: int) -> None:
    """Write and sync this rank's files, then its note `part-RANK.json`. Raises `InputError` (disk full, ...)."""
    files = []
    with io_errors(directory, part.nbytes):
        for kind, values in part.values.items():
            if values:
                name = tensor_file(kind, part.rank, world_size)
                written = [each for each in part.held if each.kind == kind and each.writes]
                marks = {each.name: each.fingerprint for each in written if each.fingerprint is not None}
                metadata = _metadata({each.name: each.box for each in written}, marks)
                file = lay_out_file(directory / name, values, metadata)
                files.append(FileEntry(name=name, bytes=file.size, sha256=_write(file, values)))
        # A line that rank 0 reads, and a second one for when copies differ: the fingerprint of each by name.
        fingerprints = {each.name: each.fingerprint for each in part.held if each.fingerprint is not None}
        lines = _NOTE.dump_json(_note(part, files)), json.dumps(fingerprints).encode(), b""
        write_synced(note_path(directory, part.rank), b"\n".join(lines))
        sync(directory)


def _metadata(boxes: Mapping[str, Box], fingerprints: Mapping[str, int]) -> dict[str, str]:
    """Where each tensor of a file belongs, as PyTorch's own safetensors storage for DCP writes it into the header, so
    that its `HuggingFaceStorageReader` reads the files; and the fingerprints of those that several ranks held.
    """
    offsets = {name: {"saved_offsets": [start for start, _ in box]} for name, box in boxes.items()}
    metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0"}
    return {**metadata, "fingerprints": json.dumps(fingerprints)} if fingerprints else metadata


def _note(part: RankPart, files: list[FileEntry]) -> Note:
    listing = [(each.kind, each.name, ListedTensor(each.dtype, each.shape, each.sharding)) for each in part.held]
    boxes: dict[str, SharedBox] = {}
    alike: dict[str, list[HeldPart]] = {}
    for each in part.held:
        alike.setdefault(each.sharding, []).append(each)
    for sharding, parts in alike.items():
        ((box, writes),) = {(each.box, each.writes) for each in parts}
        marks = sorted((each.name, each.fingerprint) for each in parts if each.fingerprint is not None)
        boxes[sharding] = SharedBox(box, writes, _sha256(marks) if marks else None)
    return Note(files, part.rng, _sha256(listing), listing if part.leads else None, boxes)


def read_note(directory: Path, rank: int) -> Note:
    """What `write_part` left, without the fingerprints."""
    with note_path(directory, rank).open("rb") as file:
        return _NOTE.validate_json(file.readline())


def read_fingerprints(directory: Path, rank: int) -> dict[str, int]:
    """Of the parts that other ranks hold too, by tensor: the second line of a note."""
    with note_path(directory, rank).open("rb") as file:
        file.readline()
        fingerprints: dict[str, int] = json.loads(file.readline())
    return fingerprints


def note_path(directory: Path, rank: int) -> Path:
    return directory / f"part-{rank:05d}.json"


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _write(file: FileLayout, values: Mapping[str, Tensor]) -> str:
    """Write the file from its first byte to its last, at most a block beside the values; its sha256.

    A block is hashed while it is written; both leave the interpreter to others.
    """
    digest = hashlib.sha256(file.header)
    descriptor = os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="hash") as hashing:
            _write_all(descriptor, memoryview(file.header))
            for target in file.tensors:
                for box in blocks(full_box(target.shape), _BLOCK_ELEMENTS):
                    data = as_bytes(values[target.name][slices(box)].cpu().contiguous()).numpy().data
                    hashed = hashing.submit(digest.update, data)
                    _write_all(descriptor, data)
                    hashed.result()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def _write_all(descriptor: int, buffer: memoryview) -> None:
    while buffer:
        buffer = buffer[os.write(descriptor, buffer) :]
