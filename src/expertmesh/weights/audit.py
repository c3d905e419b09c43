"""Compare the weights in memory with the files they were loaded from, right before training.

Every load compares samples: a run of elements from each file tensor of each expert that a rank holds, and from the
local shard of every other tensor. The `full` mode compares every byte and hashes every expert. The safetensors library
reads the files, so that a mistake in `io/safetensors_reader.py` is found here. The audit finds experts of another rank,
swapped experts, shards that were never filled, and weights that were overwritten after loading. It never changes a
weight.
"""

import hashlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from expertmesh.anatomy import describe
from expertmesh.config.errors import IntegrityError
from expertmesh.distributed.all_ranks import raise_on_all_ranks, rank_and_ranks, sum_over_ranks
from expertmesh.io.boxes import Box, Leaf, Piece, blocks, extents, full_box, intersect, slices, volume
from expertmesh.io.safetensors_reader import FileTensor, as_bytes
from expertmesh.state.model_view import ModelView
from expertmesh.state.shards import held_boxes, is_on_other_stage, local_values, owns_copy
from expertmesh.weights.first_values import FirstValues, open_weights
from expertmesh.weights.lazy import LazyTensor, bytes_needed, read_box, read_values
from expertmesh.weights.load import named_source
from expertmesh.weights.mapping import FILE_LEAVES, LoadPlan, plan_load, rounded_plan

AuditMode = Literal["sampled", "full"]
FORMAT, VERSION = "expertmesh-audit", 1
_SAMPLE_ELEMENTS = 32
# A sample of a computed tensor has to read all of its inputs. Inputs larger than this are left to a full audit.
_SAMPLE_BYTES = 1 << 20
_BLOCK_ELEMENTS = 1 << 22
# The library maps files into memory, and each read may leave a folio of the page cache resident, up to 2 MiB. Mappings
# are dropped after this many bytes, so that host memory does not grow with the files.
_MAPPED_BYTES, _PER_READ = 64 << 20, 2 << 20
_EXPERT_NUMBER = re.compile(r"\bexperts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """Parameters of one experts module that hold equal shares of dim 0 for each expert."""

    module: str
    """Name of the experts module."""
    count: int
    """Number of experts."""
    names: tuple[str, ...]
    """State-dict names of the parameters."""

    def rows(self, tensor: Tensor, number: int) -> tuple[int, int]:
        """Return the range (start, stop) of expert `number` on dim 0 of `tensor`.

        It is one index, or several where experts are flattened.
        """
        share = tensor.shape[0] // self.count
        return number * share, (number + 1) * share

    def experts(self, tensor: Tensor, rows: tuple[int, int]) -> range:
        """Return the experts that have a part in `rows` of dim 0."""
        share = tensor.shape[0] // self.count
        return range(rows[0] // share, -(-rows[1] // share))


@dataclass(frozen=True, slots=True)
class HashedSlice:
    """The slice of one expert in a tensor of its module, in the dtype of the files."""

    name: str
    """The tensor's name inside the experts module."""
    dtype: str
    """The dtype of the files, without `torch.`."""
    shape: tuple[int, ...]
    """The shape of one expert's slice."""

    @classmethod
    def of(cls, experts: ExpertTensors, name: str, tensor: Tensor | LazyTensor) -> "HashedSlice":
        """Describe the slice of one expert in tensor `name`; `tensor` has the shape and dtype of that tensor."""
        rows = tensor.shape[0] // experts.count
        shape = (*([rows] if rows > 1 else []), *tensor.shape[1:])
        return cls(name.removeprefix(f"{experts.module}."), str(tensor.dtype).removeprefix("torch."), shape)


@dataclass(frozen=True, slots=True)
class HashedExperts:
    """The hashes of the experts of one module.

    They cover the values as the files hold them, in the module's shapes (gate and up fused where the module fuses
    them). So they are the same for every parallel layout, every training dtype and every layout of the files. Weights
    that `precision.frozen` quantises are hashed as the quantised values, in float32.
    """

    module: str
    """The name of the experts module."""
    slices: tuple[HashedSlice, ...]
    """The slices of one expert, in the order in which they are hashed."""
    sha256: tuple[str, ...]
    """`sha256[e]` is the hash of expert e: its slices one after the other, each in row-major order."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of a comparison that found no difference."""

    mode: AuditMode
    """The mode that was run."""
    tensors: int
    """The number of tensors in the load plan."""
    reads: int
    """Reads of the files by this rank."""
    bytes: int
    """Bytes compared by this rank, in the model's dtypes."""
    seconds: float
    """Wall-clock time in seconds."""
    total_bytes: int = 0
    """Bytes compared by all ranks; only a full audit fills it."""
    experts: tuple[HashedExperts, ...] = ()
    """The hashes of all experts; only a full audit fills it."""


@torch.no_grad()
def audit_weights(
    model: PreTrainedModel,
    directory: str | Path,
    mode: AuditMode = "sampled",
    seed: int | None = None,
) -> AuditReport:
    """Compare this rank's shards of `model`, filled from `directory`, with the files, bit for bit.

    The values of the files are first cast or quantised to the model's dtypes.

    Args:
        seed: The seed of first values, drawn again here, instead of files.

    Raises:
        IntegrityError: A value differs; raised on all ranks, naming file, tensor and expert.

    Collectives: every rank calls it. One small all-reduce on the default group; `full` issues one more, of 256 bytes
    per expert.
    """
    started = time.monotonic()
    view = ModelView(model)
    with raise_on_all_ranks("comparing the weights with their files"):
        with open_weights(view, directory, seed) as files:
            plan = plan_load(view, files)
        auditor = _Auditor(plan, view.tensors, expert_tensors(model))
        if isinstance(files, FirstValues):
            auditor.files = files
        auditor.check_numbers()
        auditor.plan = rounded_plan(model, plan)
        hashed = auditor.full() if mode == "full" else auditor.sample()
    total_bytes, experts = (0, ()) if hashed is None else _joined(hashed, auditor.bytes)
    seconds = time.monotonic() - started
    return AuditReport(mode, len(plan.tensors), auditor.files.reads, auditor.bytes, seconds, total_bytes, experts)


def expert_tensors(model: PreTrainedModel) -> list[ExpertTensors]:
    """Return the expert tensors of each experts module, in the order of the anatomy, with state-dict names."""
    return [
        ExpertTensors(spec.name, spec.num_experts, tuple(f"{spec.name}.{name}" for name in spec.parameters))
        for spec in describe(model).experts
    ]


def write_audit(path: Path, report: AuditReport, source: Path) -> None:
    """Write a full audit of weights from `source` as JSON. Call it on rank 0.

    docs/how-it-works.md describes the format.
    """
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
    """A `LeafReader` that reads through the safetensors library and counts its reads."""

    reads: int = 0
    """Number of reads."""
    mapped: int = 0
    """Bytes mapped since the open files were last closed."""
    opened: dict[Path, Any] = field(default_factory=dict)  # the class of an open file is private to safetensors

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
    """The comparison of one rank's shards."""

    plan: LoadPlan
    state: dict[str, Tensor]
    experts: list[ExpertTensors]
    files: LibraryFiles | FirstValues = field(default_factory=LibraryFiles)
    bytes: int = 0
    """Compared so far."""

    def check_numbers(self) -> None:
        """Check the plan: file tensors that name their experts must be in the model's order.

        The first expert of a tensor may have any number, because a family may number the experts of two modules
        consecutively.

        Raises:
            IntegrityError: A file tensor is planned for the wrong expert.
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
        """Compare a few elements of each file tensor behind each local expert, and behind each other local shard."""
        for name, lazy in self.plan.tensors.items():
            tensor = self.state[name]
            if is_on_other_stage(tensor):
                continue
            experts, boxes = self._experts_of(name), held_boxes(tensor)
            parts = [part for box in boxes for part in _samples(name, lazy, tensor, box, experts)]
            if parts:
                self._compare(name, parts)
        return None

    def full(self) -> list[HashedExperts]:
        """Compare every element and hash the experts.

        Returns:
            The experts of every module. The hash of an expert is empty if another rank hashes it.
        """
        for name, lazy in self.plan.tensors.items():
            if self._experts_of(name) is None and not is_on_other_stage(self.state[name]):
                for box in held_boxes(self.state[name]):
                    for part in blocks(box, _BLOCK_ELEMENTS) if volume(box) else ():
                        self._compare(name, [(lazy, part)])
        hashed = []
        for experts in self.experts:
            described = tuple(HashedSlice.of(experts, name, self.plan.tensors[name]) for name in experts.names)
            hashes = tuple(self._expert(experts, number) for number in range(experts.count))
            hashed.append(HashedExperts(experts.module, described, hashes))
        return hashed

    def _experts_of(self, name: str) -> ExpertTensors | None:
        return next((tensors for tensors in self.experts if name in tensors.names), None)

    def _compare(self, name: str, parts: Sequence[tuple[LazyTensor, Box]]) -> None:
        """Compare boxes of a shard with their values in the files, with one device synchronisation for all boxes."""
        held = torch.cat([local_values(self.state[name], part).reshape(-1) for _, part in parts]).cpu()
        expected = torch.empty_like(held)
        runs = expected.split([volume(part) for _, part in parts])
        for (lazy, part), run in zip(parts, runs, strict=True):
            read_box(lazy, part, run.view(extents(part)), self.files)
        self._equal(name, held, expected, [part for _, part in parts])

    def _expert(self, experts: ExpertTensors, number: int) -> str:
        """Compare this rank's part of one expert.

        Returns:
            The hash of the full expert if this is the rank that hashes it, else "".
        """
        first = self.state[experts.names[0]]
        # One rank hashes an expert: the one that owns its first element.
        row = experts.rows(first, number)[0]
        corner: Box = ((row, row + 1), *((0, 1),) * (first.dim() - 1))
        hashes = owns_copy(first) and any(intersect(box, corner) for box in held_boxes(first))
        digest = hashlib.sha256() if hashes else None
        for name in experts.names:
            tensor, lazy = self.state[name], self.plan.tensors[name]
            whole: Box = (experts.rows(tensor, number), *full_box(tensor.shape)[1:])
            own = next(filter(None, (intersect(box, whole) for box in held_boxes(tensor))), None)
            read = own if digest is None else whole
            if read is None:
                continue
            values = read_values(lazy, self.files, read)
            if digest is not None:
                digest.update(as_bytes(values).numpy().data)
            if own is not None:
                held = local_values(tensor, own).cpu().reshape(-1)
                self._equal(name, held, values[slices(own, read)].to(held.dtype).reshape(-1), [own])
        return "" if digest is None else digest.hexdigest()

    def _equal(self, name: str, held: Tensor, expected: Tensor, parts: Sequence[Box]) -> None:
        """Raise `IntegrityError` unless `held` equals `expected`, the elements of `parts`, one box after the other."""
        self.bytes += held.nbytes
        different = as_bytes(held) != as_bytes(expected)
        if not bool(different.any()):
            return
        first = place = int(different.nonzero()[0]) // held.dtype.itemsize
        # `place` counts through one box after the other.
        differing = iter(parts)
        while place >= volume(part := next(differing)):
            place -= volume(part)
        offsets = torch.unravel_index(torch.tensor(place), extents(part)) if part else ()
        index = [int(offset) + start for offset, (start, _) in zip(offsets, part, strict=True)]
        rank = rank_and_ranks()[0]
        experts = self._experts_of(name)
        what = f"parameter {name}"
        if experts is not None:
            number = experts.experts(self.state[name], (index[0], index[0] + 1)).start
            what = f"expert {number}, {what}"
        raise IntegrityError(
            f"{named_source(self.plan.tensors[name], index)} holds {float(expected[first]):.6g} where rank {rank} has "
            f"{float(held[first]):.6g} ({what} at {index}): its shard was not filled, or was written to after loading; "
            "do not train on it, and report this as a bug",
            key="weights.loaded-wrongly",
        )


def _samples(
    name: str, lazy: LazyTensor, tensor: Tensor, box: Box, experts: ExpertTensors | None
) -> Iterator[tuple[LazyTensor, Box]]:
    """Yield one short run of elements of each file tensor inside `box`, one per expert where the tensor has experts."""
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
    """Choose a run of elements inside `box`, along the dim that is contiguous in the file.

    The hash of `key` decides the place, so that it is the same in every run.
    """
    place = int.from_bytes(hashlib.sha256(key.encode()).digest(), "big")
    order = [-1 if dim is None else dim for dim in piece.dims]
    along = order.index(max(order)) if order else -1
    run = []
    for dim, (start, stop) in enumerate(box):
        length = min(_SAMPLE_ELEMENTS, stop - start) if dim == along else 1
        place, offset = divmod(place, stop - start - length + 1)
        run.append((start + offset, start + offset + length))
    return tuple(run)


def _joined(hashed: Sequence[HashedExperts], compared: int) -> tuple[int, tuple[HashedExperts, ...]]:
    """Return the bytes compared by all ranks, and every hash on every rank.

    Collectives: every rank calls it. One all-reduce on the default group.
    """
    own = [digest for experts in hashed for digest in experts.sha256]
    rows = torch.zeros(len(own) + 1, 32, dtype=torch.int64)
    rows[0, 0] = compared
    for row, digest in enumerate(own, start=1):
        if digest:
            rows[row] = torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8)
    total, *digests = sum_over_ranks(rows).tolist()
    names = iter(bytes(digest).hex() for digest in digests)
    return total[0], tuple(replace(experts, sha256=tuple(next(names) for _ in experts.sha256)) for experts in hashed)
