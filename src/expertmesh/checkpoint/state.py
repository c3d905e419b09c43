"""Collect the training state of one rank by names that no layout changes, and write this rank's part of it.

Model tensors keep their state-dict names; an optimizer's are `optimizer.PARAMETER.SLOT` (`exp_avg`, `step`, ...).
Tensors are DTensors or plain ones that every rank holds. A part is written without communication, on a background
thread when saving is asynchronous: its files with their hashes, and a summary, which rank 0 joins to the manifest. Only
`take_part` reads live tensors; `write_part` may get a copy.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from expertmesh.checkpoint.manifest import FileEntry, does_not_fit, tensor_file
from expertmesh.checkpoint.small_files import rng_state
from expertmesh.config.errors import InputError
from expertmesh.distributed.mesh import Mesh
from expertmesh.io.boxes import Box, blocks, full_box, slices
from expertmesh.io.directory import io_errors, sync, write_at, write_synced
from expertmesh.io.safetensors_reader import as_bytes
from expertmesh.io.safetensors_writer import CODES, FileLayout, lay_out_file
from expertmesh.state.model_view import ModelView
from expertmesh.state.packed import stored
from expertmesh.state.shards import (
    expert_order,
    is_on_other_stage,
    local_tensor,
    owns_copy,
    placed_like,
    placement_of,
    stored_box,
)
from expertmesh.weights.load import first_not_finite, not_finite

OPTIMIZER = "optimizer."
# A fingerprint is summed, and a part is written, in blocks of this many words or elements.
_BLOCK_ELEMENTS = 1 << 22


@runtime_checkable
class HasEmptyState(Protocol):
    """An optimizer that makes the initial state of a parameter itself, with tensors of any dtype and shape.

    For a DTensor they are DTensors.
    """

    def empty_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state before the first step, by slot."""


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; tied ones once, under the first of their names.

    For a model with adapters return the adapters alone: the base is frozen, and has other files.
    """
    view = ModelView(model)
    return view.adapters or view.unique


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return every slot of every parameter that has state, by saved name.

    Raises:
        InputError: A slot is no tensor, or (unless the optimizer has `empty_state`) its shape is not the parameter's.
    """
    slots, any_shape = {}, isinstance(optimizer, HasEmptyState)
    for name, parameter in trained(model, optimizer).items():
        for slot, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor) or (value.dim() and value.shape != parameter.shape and not any_shape):
                raise InputError(
                    f"{type(optimizer).__name__}: state {slot} of {name} is neither a scalar tensor nor shaped like "
                    "the parameter; checkpoints cannot hold it",
                    key="optimizer.unsupported-state",
                )
            slots[f"{OPTIMIZER}{name}.{slot}"] = placed_like(value, parameter)
    return slots


def allocate_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> dict[str, Tensor]:
    """Replace the state of `optimizer` by empty slots for all saved ones, and return them by saved name.

    Skips parameters that only other pipeline stages hold.

    Args:
        saved: dtype and global shape by saved name.

    Raises:
        IntegrityError: A slot belongs to no trained parameter or does not fit it; nothing is changed.
    """
    updated = trained(model, optimizer)
    on_other_stages = {
        name for name, tensor in ModelView(model).state.items() if is_on_other_stage(tensor) and tensor.requires_grad
    }
    slots, places = dict[str, Tensor](), list[tuple[nn.Parameter, str, str]]()
    for key, (dtype, shape) in saved.items():
        name, _, slot = key.removeprefix(OPTIMIZER).rpartition(".")
        if name in on_other_stages:
            continue
        if name not in updated:
            raise does_not_fit(f"the checkpoint has optimizer state {slot} of {name}, which this job does not train")
        parameter = updated[name]
        value: Tensor | None = None
        if isinstance(optimizer, HasEmptyState):
            empty = optimizer.empty_state(parameter).get(slot)
            value = empty if empty is not None and (empty.dtype, empty.shape) == (dtype, shape) else None
        elif not shape:
            # A step count is where torch's optimizers keep it: on the CPU unless they are fused or capturable.
            group = next(g for g in optimizer.param_groups if any(parameter is other for other in g["params"]))
            on_device = group.get("fused") or group.get("capturable")
            value = torch.empty((), dtype=dtype, device=parameter.device if on_device else "cpu")
        elif shape == parameter.shape:
            value = torch.empty_like(parameter, dtype=dtype).detach()
        if value is None:
            raise does_not_fit(
                f"optimizer state {slot} of {name} is {dtype} {list(shape)}, which {type(optimizer).__name__} does not "
                f"keep of a parameter of {list(parameter.shape)}"
            )
        slots[key] = placed_like(value, parameter)
        places.append((parameter, slot, key))
    optimizer.state.clear()
    for parameter, slot, key in places:
        optimizer.state[parameter][slot] = slots[key]
    return slots


def fingerprint(tensor: Tensor) -> int:
    """Return a 64-bit sum over the bytes of a tensor, to compare copies; it is not safe against an adversary.

    Any one changed bit changes it, and most changes of order do. Computed in blocks on the tensor's device; waits for
    the device once.
    """
    return int(fingerprint_share(as_bytes(stored(tensor).detach().contiguous()), 0))


def fingerprint_share(data: Tensor, at: int) -> Tensor:
    """Return the part of a tensor's fingerprint that some of its bytes make; the parts add up modulo 2**64.

    Args:
        data: uint8; its size is a multiple of 4 unless it holds the last bytes of the tensor.
        at: The offset of `data` in the tensor in bytes, a multiple of 4.

    Returns:
        An int64 scalar on the device of `data`.
    """
    even = data.numel() // 4 * 4
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for words, first in ((data[:even].view(torch.int32), at // 4), (data[even:], at + even)):
        for start in range(0, words.numel(), _BLOCK_ELEMENTS):
            block = words[start : start + _BLOCK_ELEMENTS].to(torch.int64)
            # Odd factors: a changed word always changes the sum modulo 2**64.
            place = torch.arange(first + start, first + start + block.numel(), device=data.device)
            total += (block * (2 * place + 1)).sum()
    return total


def is_replicated(tensor: Tensor) -> bool:
    """Return whether several ranks hold the same part of `tensor`."""
    if (place := placement_of(tensor)) is not None and place.has_tied_replica:
        return True
    if not isinstance(tensor, DTensor):
        return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    mesh = tensor.device_mesh
    return any(kind.is_replicate() and mesh.size(axis) > 1 for axis, kind in enumerate(tensor.placements))


def sharding_of(tensor: Tensor, stage: int) -> str:
    """Describe as text how a tensor of pipeline stage `stage` is cut: equal on all ranks that hold parts of it."""
    place = placement_of(tensor)
    where = "tied stages" if place is not None and place.has_tied_replica else f"stage {stage}"
    if not isinstance(tensor, DTensor):
        return f"{list(tensor.shape)} whole, {where}"
    mesh, order = tensor.device_mesh, expert_order(tensor)
    slots = "" if order is None else f", experts {list(order)}"
    return f"{list(tensor.shape)} {tensor.placements} on {mesh.mesh_dim_names} {list(mesh.shape)}, {where}{slots}"


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the parameters that `optimizer` updates on this rank, by their names in the full model.

    Raises:
        InputError: The optimizer has parameters that the model does not have.
    """
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = {name: parameter for name, parameter in ModelView(model).parameters.items() if id(parameter) in owned}
    if len(found) != len(owned):
        raise InputError(
            "the optimizer updates parameters that the model does not have; build it after sharding",
            key="optimizer.other-parameters",
        )
    return found


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
    replica_sha256: str | None
    """A hash of the names and fingerprints of the parts that other ranks hold too."""
    order: tuple[int, ...] | None = None
    """The field of `HeldPart`."""


class ListedTensor(NamedTuple):
    """A tensor as the first rank of a stage lists it."""

    dtype: str
    """The name that safetensors uses."""
    shape: tuple[int, ...]
    """Shape of the global tensor."""
    sharding: str
    """The field of `HeldPart`."""


@dataclass(frozen=True, slots=True)
class RankSummary:
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


_SUMMARY = TypeAdapter(RankSummary)


def take_part(tensors: Mapping[str, Mapping[str, Tensor]], mesh: Mesh, *, copy: bool) -> RankPart:
    """Collect this rank's part of the state. Raises `IntegrityError` for values that are not finite. No communication.

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
            writes = owns_copy(tensor) and local.numel() > 0
            if writes and stored(local).is_floating_point() and first_not_finite(local) is not None:
                cure = "; nothing was saved or removed: start from the last checkpoint, with a lower learning rate"
                raise not_finite(name, cure)
            held.append(
                HeldPart(
                    kind=kind,
                    name=name,
                    dtype=CODES[tensor.dtype],
                    shape=tuple(tensor.shape),
                    sharding=sharding_of(tensor, stage),
                    box=box,
                    writes=writes,
                    fingerprint=fingerprint(local) if is_replicated(tensor) and local.numel() else None,
                    order=expert_order(tensor),
                )
            )
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
                # Where each tensor belongs, in the form that PyTorch's safetensors storage for DCP writes, so that its
                # `HuggingFaceStorageReader` reads the files. Placed experts lie at the offsets of their slots.
                offsets = {each.name: {"saved_offsets": [start for start, _ in each.box]} for each in written}
                metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0"}
                if orders := {each.name: list(each.order) for each in written if each.order is not None}:
                    metadata["EXPERT_ORDERS"] = json.dumps(orders)
                if copied := {each.name: each.fingerprint for each in written if each.fingerprint is not None}:
                    metadata["fingerprints"] = json.dumps(copied)
                file = lay_out_file(directory / name, values, metadata)
                files.append(FileEntry(name=name, bytes=file.size, sha256=_write(file, values)))
        # Rank 0 reads the first line. The second, each tensor's fingerprint, is read only if copies differ: it grows
        # with the number of tensors.
        fingerprints = {each.name: each.fingerprint for each in part.held if each.fingerprint is not None}
        lines = _SUMMARY.dump_json(_summary(part, files)), json.dumps(fingerprints).encode(), b""
        write_synced(summary_path(directory, part.rank), b"\n".join(lines))
        sync(directory)


def _summary(part: RankPart, files: list[FileEntry]) -> RankSummary:
    """Summarise the part. All tensors with one sharding have the same box on a rank."""
    listing = [(each.kind, each.name, ListedTensor(each.dtype, each.shape, each.sharding)) for each in part.held]
    boxes: dict[str, SharedBox] = {}
    by_sharding: dict[str, list[HeldPart]] = {}
    for each in part.held:
        by_sharding.setdefault(each.sharding, []).append(each)
    for sharding, parts in by_sharding.items():
        ((box, order, writes),) = {(each.box, each.order, each.writes) for each in parts}
        fingerprints = sorted((each.name, each.fingerprint) for each in parts if each.fingerprint is not None)
        boxes[sharding] = SharedBox(box, writes, _sha256(fingerprints) if fingerprints else None, order)
    return RankSummary(files, part.rng, _sha256(listing), listing if part.leads else None, boxes)


def read_summary(directory: Path, rank: int) -> RankSummary:
    """Read the summary of a rank that `write_part` wrote, without the fingerprints."""
    with summary_path(directory, rank).open("rb") as file:
        return _SUMMARY.validate_json(file.readline())


def read_fingerprints(directory: Path, rank: int) -> dict[str, int]:
    """Read the fingerprints, by tensor, of the parts that other ranks hold too: the second line of a summary."""
    with summary_path(directory, rank).open("rb") as file:
        file.readline()
        fingerprints: dict[str, int] = json.loads(file.readline())
    return fingerprints


def summary_path(directory: Path, rank: int) -> Path:
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
            write_at(descriptor, memoryview(file.header), 0)
            at = len(file.header)
            for target in file.tensors:
                for box in blocks(full_box(target.shape), _BLOCK_ELEMENTS):
                    data = as_bytes(values[target.name][slices(box)].cpu().contiguous()).numpy().data
                    hashed = hashing.submit(digest.update, data)
                    write_at(descriptor, data, at)
                    at += len(data)
                    hashed.result()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return digest.hexdigest()
