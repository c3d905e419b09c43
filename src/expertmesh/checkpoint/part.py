"""One rank's part of a checkpoint: its files with their hashes, and a note of what it held and wrote.

Written by each rank without talking to the others, on a thread of its own when saving is asynchronous; rank 0
joins the notes to the manifest. Reads live tensors only in `take_part`; what `write_part` gets may be a copy.
"""

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertmesh.checkpoint.state import fingerprint, held_part, is_replicated
from expertmesh.io.boxes import Box, blocks, full_box, slices
from expertmesh.io.directory import io_errors
from expertmesh.io.safetensors_reader import as_bytes
from expertmesh.io.safetensors_writer import CODES, FileLayout, lay_out_file, sync, write_synced
from expertmesh.state.shards import owns_copy
from expertmesh.state.stage_view import is_on_other_stage

_BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor of `kind` (model or optimizer) on one rank: its part, and whether this rank writes it.

    `fingerprint` is set where other ranks hold the same part, so that the copies can be compared.
    """

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    writes: bool
    fingerprint: int | None


@dataclass(frozen=True, slots=True)
class Part:
    """All that one rank puts into a checkpoint. `values` are those it writes, by kind and name."""

    rank: int
    held: tuple[Held, ...]
    values: Mapping[str, dict[str, Tensor]]
    rng: dict[str, str]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensors in self.values.values() for tensor in tensors.values())


def take_part(rank: int, tensors: Mapping[str, Mapping[str, Tensor]], device: torch.device, *, copy: bool) -> Part:
    """Look at this rank's state: {kind: {name: tensor}}. With `copy` the values are the caller's to overwrite.

    The copy lies in host memory (pinned for an accelerator) and takes as much as this rank writes. No communication.
    """
    held: list[Held] = []
    values: dict[str, dict[str, Tensor]] = {}
    for kind, state in tensors.items():
        values[kind] = {}
        for name, tensor in state.items():
            if is_on_other_stage(tensor):
                continue
            box, local = held_part(tensor)
            mark = fingerprint(local) if is_replicated(tensor) and local.numel() else None
            writes = owns_copy(tensor) and local.numel() > 0
            held.append(Held(kind, name, CODES[tensor.dtype], tuple(tensor.shape), box, writes, mark))
            if writes:
                values[kind][name] = _on_host(local) if copy else local
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return Part(rank, tuple(held), values, rng_state(device))


def write_part(part: Part, directory: Path, world_size: int) -> None:
    """Write and sync this rank's files, then its note `part-RANK.json`. Raises `InputError` (disk full, ...)."""
    files = []
    with io_errors(directory, part.nbytes):
        for kind, values in part.values.items():
            if values:
                name = f"{kind}-{part.rank:05d}-of-{world_size:05d}.safetensors"
                boxes = {each.name: each.box for each in part.held if each.kind == kind and each.writes}
                file = lay_out_file(directory / name, values, dcp_metadata(boxes))
                files.append({"name": name, "bytes": file.size, "sha256": _write(file, values)})
        note = {"files": files, "held": [asdict(each) for each in part.held], "rng": part.rng}
        write_synced(note_path(directory, part.rank), json.dumps(note).encode())
        sync(directory)


def read_note(directory: Path, rank: int) -> dict[str, Any]:
    """What `write_part` left: `files`, `held` (as `Held`) and `rng`."""
    note: dict[str, Any] = json.loads(note_path(directory, rank).read_bytes())
    for each in note["held"]:
        each["shape"], each["box"] = tuple(each["shape"]), tuple((a, b) for a, b in each["box"])
    note["held"] = [Held(**each) for each in note["held"]]
    return note


def note_path(directory: Path, rank: int) -> Path:
    return directory / f"part-{rank:05d}.json"


def dcp_metadata(boxes: Mapping[str, Box]) -> dict[str, str]:
    """Where each tensor of a file belongs, as PyTorch's own safetensors storage for DCP writes it into the header.

    With it `torch.distributed.checkpoint.HuggingFaceStorageReader` can read our files.
    """
    offsets = {name: {"saved_offsets": [start for start, _ in box]} for name, box in boxes.items()}
    return {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0"}


def saved_offsets_in(metadata: Mapping[str, str]) -> dict[str, list[int]]:
    """What `dcp_metadata` wrote; any exception for what it did not."""
    entries = json.loads(metadata["DCP_SHARDING_INFO"])
    return {name: [int(start) for start in entry["saved_offsets"]] for name, entry in entries.items()}


def rng_state(device: torch.device) -> dict[str, str]:
    """torch's generators of this rank, base64: `cpu`, and the accelerator's under its name."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def set_rng_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Put torch's generators of this rank back; those of another kind of device are left as they are."""
    for name, state in states.items():
        if name == "cpu":
            torch.set_rng_state(state)
        elif name == device.type:
            torch.get_device_module(device).set_rng_state(state, device)


def decode_generator(text: str) -> Tensor:
    """One generator's state, of bytes; `ValueError` for text that is not base64."""
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def _on_host(local: Tensor) -> Tensor:
    pinned = local.device.type != "cpu"
    copy = torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned)
    return copy.copy_(local, non_blocking=pinned)


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
