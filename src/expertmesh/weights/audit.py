"""Compares the weights in memory with the files they came from, right before training.

Every load takes samples: from each file tensor of each expert that a rank holds, and from its shard of every other
tensor. `full` compares every byte and hashes every expert. The safetensors library reads the files, so that a mistake
of io/safetensors_reader.py shows here. The audit finds experts of another rank, swapped experts, shards never filled,
and weights overwritten after loading. It writes to no weight.
"""

import hashlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from expertmesh.config.errors import IntegrityError
from expertmesh.distributed.all_ranks import raise_on_all_ranks, sum_over_ranks
from expertmesh.io.boxes import Box, blocks, extents, full_box, intersect, slices, volume
from expertmesh.io.pieces import Leaf, Piece
from expertmesh.io.safetensors_reader import FileTensor, as_bytes, open_weight_files
from expertmesh.state.shards import local_box, local_values, owns_copy
from expertmesh.state.stage_view import is_on_other_stage
from expertmesh.weights.lazy import LazyTensor
from expertmesh.weights.load import ExpertTensors, expert_tensors, named_source, weights_file
from expertmesh.weights.mapping import FILE_LEAVES, LoadPlan, model_tensors, plan_load
from expertmesh.weights.quantised.resident import kept_plan
from expertmesh.weights.reading import bytes_needed, read_box

AuditMode = Literal["sampled", "full"]
FORMAT, VERSION = "expertmesh-audit", 1
_SAMPLE_ELEMENTS = 32
# A sample of a tensor that is computed from others reads all of them; beyond this, only `full` looks at it.
_SAMPLE_BYTES = 1 << 20
_BLOCK_ELEMENTS = 1 << 22
# The library maps files into memory, where each read may leave a whole folio of the page cache resident, up to 2 MiB;
# mappings are dropped in time.
_MAPPED_BYTES, _PER_READ = 64 << 20, 2 << 20
_EXPERT_NUMBER = re.compile(r"\bexperts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class HashedSlice:
    """One expert's slice of a tensor of its module, in the dtype of the files."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, experts: ExpertTensors, name: str, tensor: Tensor | LazyTensor) -> "HashedSlice":
        """That of tensor `name`, of which `tensor` has the shape and dtype."""
        rows = tensor.shape[0] // experts.count
        shape = (*([rows] if rows > 1 else []), *tensor.shape[1:])
        return cls(name.removeprefix(f"{experts.module}."), str(tensor.dtype).removeprefix("torch."), shape)


@dataclass(frozen=True, slots=True)
class HashedExperts:
    """The experts of one module: `sha256[e]` is over expert e's `slices`, one after the other, each row-major.

    As the files hold them, in the module's shapes (gate and up fused where the module fuses them): the same for every
    layout, every dtype trained in, and every layout of the files.
    """

    module: str
    slices: tuple[HashedSlice, ...]
    sha256: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What was compared and found equal. `reads` and `bytes` (of the model's dtypes) are this rank's.

    `experts` and `total_bytes`, those of all ranks, are of a full audit.
    """

    mode: AuditMode
    tensors: int
    reads: int
    bytes: int
    seconds: float
    total_bytes: int = 0
    experts: tuple[HashedExperts, ...] = ()


@torch.no_grad()
def audit_weights(
    model: PreTrainedModel, directory: str | Path, mode: AuditMode = "sampled", new: Sequence[str] = ()
) -> AuditReport:
    """Compare this rank's shards of `model`, filled from `directory`, with the files, bit for bit.

    In the model's dtypes: what the files hold is cast or quantised first; of `new` tensors some may be missing there.
    Every rank calls it. Raises `IntegrityError` on all of them alike, naming file, tensor and expert, when a value
    differs. Issues one small all-reduce on the default group; `full` another one, of 256 bytes per expert.
    """
    started = time.monotonic()
    with raise_on_all_ranks("comparing the weights with their files"):
        with open_weight_files(directory, weights_file(model)) as files:
            plan = plan_load(model, files, new)
        auditor = _Auditor(plan, model_tensors(model), expert_tensors(model))
        auditor.check_numbers()
        auditor.plan = kept_plan(model, plan)
        hashed = auditor.full() if mode == "full" else auditor.sample()
    total_bytes, experts = (0, ()) if hashed is None else _joined(hashed, auditor.bytes)
    seconds = time.monotonic() - started
    return AuditReport(mode, len(plan.tensors), auditor.files.reads, auditor.bytes, seconds, total_bytes, experts)


def write_audit(path: Path, report: AuditReport, source: Path) -> None:
    """Write a full audit of weights from `source` as JSON; docs/weights.md describes it. Call it on rank 0."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "source": str(source),
        "tensors": report.tensors,
        "bytes_compared": report.total_bytes,
        "experts": [asdict(experts) for experts in report.experts],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@dataclass(slots=True)
class LibraryFiles:
    """A `LeafReader` that reads through the safetensors library; counts its reads."""

    reads: int = 0
    mapped: int = 0
    opened: dict[Path, Any] = field(default_factory=dict)

    def __call__(self, leaf: Leaf, box: Box, out: Tensor) -> None:
        assert isinstance(leaf, FileTensor)
        if self.mapped > _MAPPED_BYTES:
            self.opened.clear()
            self.mapped = 0
        if leaf.path not in self.opened:
            self.opened[leaf.path] = safe_open(leaf.path, framework="pt")
        out.copy_(self.opened[leaf.path].get_slice(leaf.name)[slices(box)])
        self.reads += 1
        self.mapped += out.nbytes + _PER_READ


@dataclass(slots=True)
class _Auditor:
    """Compares one rank's shards."""

    plan: LoadPlan
    state: dict[str, Tensor]
    experts: list[ExpertTensors]
    files: LibraryFiles = field(default_factory=LibraryFiles)
    bytes: int = 0

    def check_numbers(self) -> None:
        """The plan itself: file tensors that name their experts stand in the model's order.

        The first may have any number, because a family may number the experts of two modules through.
        """
        for experts, name in ((each, name) for each in self.experts for name in each.names):
            first = None
            for piece in self.plan.tensors[name].pieces:
                leaf, taken = piece.leaf, experts.experts(self.state[name], piece.dest[0]).start
                if isinstance(leaf, FILE_LEAVES) and (named := _EXPERT_NUMBER.search(leaf.name)):
                    offset = int(named[1]) - taken
                    first = offset if first is None else first
                    if offset != first:
                        raise IntegrityError(
                            f"{leaf.path}: tensor {leaf.name} was taken for expert {taken} of {name}; do not train on "
                            "it, and report this as a bug",
                            key="weights.loaded-wrongly",
                        )

    def sample(self) -> list[HashedExperts] | None:
        """A few elements of each file tensor behind each expert held here, and behind each other shard."""
        for name, lazy in self.plan.tensors.items():
            tensor = self.state[name]
            if is_on_other_stage(tensor):
                continue
            parts = list(_samples(name, lazy, tensor, local_box(tensor), self._experts_of(name)))
            if parts:
                self._compare(name, parts)
        return None

    def full(self) -> list[HashedExperts]:
        """Everything; of experts that another rank hashes, the hash is empty."""
        for name, lazy in self.plan.tensors.items():
            box = local_box(self.state[name])
            if self._experts_of(name) is None and volume(box) and not is_on_other_stage(self.state[name]):
                for part in blocks(box, _BLOCK_ELEMENTS):
                    self._compare(name, [(lazy, part)])
        return [self._module(tensors) for tensors in self.experts]

    def _experts_of(self, name: str) -> ExpertTensors | None:
        return next((tensors for tensors in self.experts if name in tensors.names), None)

    def _compare(self, name: str, parts: Sequence[tuple[LazyTensor, Box]]) -> None:
        """Compare boxes of a shard with their values in the files; one wait for the device for all of them."""
        held = torch.cat([local_values(self.state[name], part).reshape(-1) for _, part in parts]).cpu()
        expected = torch.empty_like(held)
        runs = expected.split([volume(part) for _, part in parts])
        for (lazy, part), run in zip(parts, runs, strict=True):
            read_box(lazy, part, run.view(extents(part)), self.files)
        self._equal(name, held, expected, [part for _, part in parts])

    def _module(self, experts: ExpertTensors) -> HashedExperts:
        described = tuple(HashedSlice.of(experts, name, self.plan.tensors[name]) for name in experts.names)
        hashes = tuple(self._expert(experts, number) for number in range(experts.count))
        return HashedExperts(experts.module, described, hashes)

    def _expert(self, experts: ExpertTensors, number: int) -> str:
        """Compare what this rank holds of one expert; its hash if this is the rank that hashes it, else ""."""
        first = self.state[experts.names[0]]
        digest = hashlib.sha256() if _holds_start(first, experts.rows(first, number)[0]) else None
        for name in experts.names:
            tensor, lazy = self.state[name], self.plan.tensors[name]
            box = local_box(tensor)
            whole: Box = (experts.rows(tensor, number), *full_box(tensor.shape)[1:])
            own = intersect(box, whole)
            read = own if digest is None else whole
            if read is None:
                continue
            values = torch.empty(extents(read), dtype=lazy.dtype)
            read_box(lazy, read, values, self.files)
            if digest is not None:
                digest.update(as_bytes(values).numpy().data)
            if own is not None:
                held = local_values(tensor, own).cpu().reshape(-1)
                self._equal(name, held, values[slices(own, read)].to(held.dtype).reshape(-1), [own])
        return "" if digest is None else digest.hexdigest()

    def _equal(self, name: str, held: Tensor, expected: Tensor, parts: Sequence[Box]) -> None:
        """`held` and `expected` are the elements of `parts`, one box after the other."""
        different = as_bytes(held) != as_bytes(expected)
        if bool(different.any()):
            first = int(different.nonzero()[0]) // held.dtype.itemsize
            self._refuse(name, float(held[first]), float(expected[first]), _element(parts, first))
        self.bytes += held.nbytes

    def _refuse(self, name: str, held: float, expected: float, index: list[int]) -> NoReturn:
        rank = dist.get_rank() if dist.is_initialized() else 0
        experts = self._experts_of(name)
        what = f"parameter {name}"
        if experts is not None:
            number = experts.experts(self.state[name], (index[0], index[0] + 1)).start
            what = f"expert {number}, {what}"
        raise IntegrityError(
            f"{named_source(self.plan.tensors[name], index)} holds {expected:.6g} where rank {rank} has {held:.6g} "
            f"({what} at {index}): its shard was not filled, or was written to after loading; do not train on it, "
            "and report this as a bug",
            key="weights.loaded-wrongly",
        )


def _samples(
    name: str, lazy: LazyTensor, tensor: Tensor, box: Box, experts: ExpertTensors | None
) -> Iterator[tuple[LazyTensor, Box]]:
    """One short run of elements of each file tensor inside `box`; of each expert in it, where there are experts."""
    for piece in lazy.pieces:
        common = intersect(piece.dest, box)
        if common is None:
            continue
        alone = LazyTensor(lazy.shape, lazy.dtype, [piece])
        for number in experts.experts(tensor, common[0]) if experts is not None else (None,):
            inside: Box | None = common
            if number is not None and experts is not None:
                inside = intersect(common, (experts.rows(tensor, number), *common[1:]))
            assert inside is not None
            part = _run(f"{name}:{number}:{piece.leaf.name}", piece, inside)
            if isinstance(piece.leaf, FILE_LEAVES) or bytes_needed(alone, part) <= _SAMPLE_BYTES:
                yield alone, part


def _run(key: str, piece: Piece, box: Box) -> Box:
    """A run of elements inside `box`, along the dim that is contiguous in the file, at a place that `key` decides."""
    place = int.from_bytes(hashlib.sha256(key.encode()).digest(), "big")
    order = [-1 if dim is None else dim for dim in piece.dims]
    along = order.index(max(order)) if order else -1
    run = []
    for dim, (start, stop) in enumerate(box):
        length = min(_SAMPLE_ELEMENTS, stop - start) if dim == along else 1
        place, offset = divmod(place, stop - start - length + 1)
        run.append((start + offset, start + offset + length))
    return tuple(run)


def _holds_start(tensor: Tensor, row: int) -> bool:
    """Whether this rank is the one that answers for an expert: it holds the first element, at `row` of dim 0."""
    box = local_box(tensor)
    holds = volume(box) > 0 and box[0][0] <= row < box[0][1]
    return holds and owns_copy(tensor) and all(start == 0 for start, _ in box[1:])


def _element(parts: Sequence[Box], position: int) -> list[int]:
    """The index of element `position` of `parts`, counted through one box after the other."""
    for part in parts:
        if position < volume(part):
            offsets = torch.unravel_index(torch.tensor(position), extents(part)) if part else ()
            return [int(offset) + start for offset, (start, _) in zip(offsets, part, strict=True)]
        position -= volume(part)
    raise AssertionError("a position outside of all parts")


def _joined(hashed: Sequence[HashedExperts], compared: int) -> tuple[int, tuple[HashedExperts, ...]]:
    """Bytes compared by all ranks, and every hash on every rank. Issues one all-reduce on the default group."""
    own = [digest for experts in hashed for digest in experts.sha256]
    rows = torch.zeros(len(own) + 1, 32, dtype=torch.int64)
    rows[0, 0] = compared
    for row, digest in enumerate(own, start=1):
        if digest:
            rows[row] = torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8)
    total, *digests = sum_over_ranks(rows).tolist()
    names = iter(bytes(digest).hex() for digest in digests)
    return total[0], tuple(replace(experts, sha256=tuple(next(names) for _ in experts.sha256)) for experts in hashed)
