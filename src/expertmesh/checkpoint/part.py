"""Write one rank's part of a checkpoint: its files with their hashes, and a summary of what it held and wrote.

Each rank writes its part without communication, on a background thread when saving is asynchronous; rank 0 joins the
summaries to the manifest. Only `take_part` reads live tensors; `write_part` may get a copy.
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
from expertmesh.checkpoint.state import fingerprint, is_replicated, sharding_of
from expertmesh.distributed.mesh import Mesh
from expertmesh.io.boxes import Box, blocks, full_box, slices
from expertmesh.io.directory import io_errors
from expertmesh.io.safetensors_reader import as_bytes
from expertmesh.io.safetensors_writer import CODES, FileLayout, lay_out_file, sync, write_synced
from expertmesh.state.shards import expert_order, is_on_other_stage, local_tensor, owns_copy, stored_box

_BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class HeldPart:
    """The part of one tensor that one rank holds."""

    kind: str
    """`model` or `optimizer`."""
    name: str
    """The tensor's name in the full model or optimizer."""
    dtype: str
    """The name that safetensors uses."""
    shape: tuple[int, ...]
    """The shape of the global tensor."""
    sharding: str
    """The result of `sharding_of`, equal for tensors that every rank cuts in the same way."""
    box: Box
    """The part's box in the global tensor, as it is stored."""
    writes: bool
    """This rank writes the part."""
    fingerprint: int | None
    """A sum over the part, to compare copies, if other ranks hold it too; else None."""
    order: tuple[int, ...] | None = None
    """The expert in each slot along dim 0: `expert_order`."""


@dataclass(frozen=True, slots=True)
class RankPart:
    """The part of a checkpoint that one rank holds."""

    rank: int
    """The rank that holds it."""
    leads: bool
    """This rank is the first of its pipeline stage, and lists the stage's tensors for all of its ranks."""
    held: tuple[HeldPart, ...]
    """Every part that the rank holds."""
    values: Mapping[str, dict[str, Tensor]]
    """The local tensors that this rank writes, by kind and name."""
    rng: dict[str, str]
    """The result of `rng_state`."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensors in self.values.values() for tensor in tensors.values())


class SharedBox(NamedTuple):
    """The box that a rank holds of all tensors with one sharding."""

    box: Box
    writes: bool
    copies: str | None
    """A hash of the names and fingerprints of the parts that other ranks hold too."""
    order: tuple[int, ...] | None = None
    """The field of `HeldPart`."""


class ListedTensor(NamedTuple):
    dtype: str
    """The name that safetensors uses."""
    shape: tuple[int, ...]
    """Shape of the global tensor."""
    sharding: str
    """The field of `HeldPart`."""


@dataclass(frozen=True, slots=True)
class Note:
    """A rank's summary of its part for rank 0. It grows with the number of shardings, not of tensors."""

    files: list[FileEntry]
    """The files that the rank has written."""
    rng: dict[str, str]
    """The result of `rng_state`."""
    tensors: str
    """A hash of the listing, from every rank."""
    listing: list[tuple[str, str, ListedTensor]] | None
    """(kind, name, entry) of every tensor, from the first rank of a stage; None from the others."""
    boxes: dict[str, SharedBox]
    """By sharding."""


_NOTE = TypeAdapter(Note)


def take_part(tensors: Mapping[str, Mapping[str, Tensor]], mesh: Mesh, *, copy: bool) -> RankPart:
    """Collect this rank's part of the state. No communication.

    Args:
        tensors: {kind: {name: DTensor or plain tensor}}.
        copy: Copy the values that this rank writes to host memory, so that the caller may overwrite the tensors.
    """
    stage, in_stage = divmod(mesh.rank, mesh.layout.ranks_per_stage)
    held: list[HeldPart] = []
    values: dict[str, dict[str, Tensor]] = {}
    for kind, state in tensors.items():
        values[kind] = {}
        for name, tensor in state.items():
            if is_on_other_stage(tensor):
                continue
            box, local = stored_box(tensor), local_tensor(tensor)
            mark = fingerprint(local) if is_replicated(tensor) and local.numel() else None
            writes = owns_copy(tensor) and local.numel() > 0
            cut = sharding_of(tensor, stage)
            order, code = expert_order(tensor), CODES[tensor.dtype]
            held.append(HeldPart(kind, name, code, tuple(tensor.shape), cut, box, writes, mark, order))
            if writes:
                # In pageable memory: torch keeps pinned buffers, each as large as the next power of two, for good.
                values[kind][name] = torch.empty_like(local, device="cpu").copy_(local) if copy else local
    return RankPart(mesh.rank, in_stage == 0, tuple(held), values, rng_state(mesh.device))


def write_part(part: RankPart, directory: Path, world_size: int) -> None:
    """Write and sync this rank's files, then its summary `part-RANK.json`. Raises `InputError` (disk full, ...)."""
    files = []
    with io_errors(directory, part.nbytes):
        for kind, values in part.values.items():
            if values:
                name = tensor_file(kind, part.rank, world_size)
                written = [each for each in part.held if each.kind == kind and each.writes]
                marks = {each.name: each.fingerprint for each in written if each.fingerprint is not None}
                orders = {each.name: list(each.order) for each in written if each.order is not None}
                metadata = _metadata({each.name: each.box for each in written}, orders, marks)
                file = lay_out_file(directory / name, values, metadata)
                files.append(FileEntry(name=name, bytes=file.size, sha256=_write(file, values)))
        # Rank 0 reads the first line. The second, each tensor's fingerprint, is read only if copies differ: it grows
        # with the number of tensors.
        fingerprints = {each.name: each.fingerprint for each in part.held if each.fingerprint is not None}
        lines = _NOTE.dump_json(_note(part, files)), json.dumps(fingerprints).encode(), b""
        write_synced(note_path(directory, part.rank), b"\n".join(lines))
        sync(directory)


def _metadata(
    boxes: Mapping[str, Box], orders: Mapping[str, list[int]], fingerprints: Mapping[str, int]
) -> dict[str, str]:
    """Return the header metadata of a file: where each of its tensors belongs, and fingerprints of replicated ones.

    The offsets have the form that PyTorch's safetensors storage for DCP writes, so that its `HuggingFaceStorageReader`
    reads the files. Of placed experts these are the offsets of their slots, and `EXPERT_ORDERS` names their experts.
    """
    offsets = {name: {"saved_offsets": [start for start, _ in box]} for name, box in boxes.items()}
    metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0"}
    if orders:
        metadata |= {"EXPERT_ORDERS": json.dumps(orders)}
    return {**metadata, "fingerprints": json.dumps(fingerprints)} if fingerprints else metadata


def _note(part: RankPart, files: list[FileEntry]) -> Note:
    """Summarise the part. All tensors with one sharding have the same box on a rank."""
    listing = [(each.kind, each.name, ListedTensor(each.dtype, each.shape, each.sharding)) for each in part.held]
    boxes: dict[str, SharedBox] = {}
    alike: dict[str, list[HeldPart]] = {}
    for each in part.held:
        alike.setdefault(each.sharding, []).append(each)
    for sharding, parts in alike.items():
        ((box, order, writes),) = {(each.box, each.order, each.writes) for each in parts}
        marks = sorted((each.name, each.fingerprint) for each in parts if each.fingerprint is not None)
        boxes[sharding] = SharedBox(box, writes, _sha256(marks) if marks else None, order)
    return Note(files, part.rng, _sha256(listing), listing if part.leads else None, boxes)


def read_note(directory: Path, rank: int) -> Note:
    """Read the summary of a rank that `write_part` wrote, without the fingerprints."""
    with note_path(directory, rank).open("rb") as file:
        return _NOTE.validate_json(file.readline())


def read_fingerprints(directory: Path, rank: int) -> dict[str, int]:
    """Read the fingerprints, by tensor, of the parts that other ranks hold too: the second line of a summary."""
    with note_path(directory, rank).open("rb") as file:
        file.readline()
        fingerprints: dict[str, int] = json.loads(file.readline())
    return fingerprints


def note_path(directory: Path, rank: int) -> Path:
    return directory / f"part-{rank:05d}.json"


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _write(file: FileLayout, values: Mapping[str, Tensor]) -> str:
    """Write the file in order, and return its sha256. Takes memory for one block beside the values.

    A thread hashes each block while it is written; both release the GIL.
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
