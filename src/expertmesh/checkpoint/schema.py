"""Define the content of manifest.json: a checkpoint's files, how its tensors are cut, and which rank wrote each part.

Every layout of FSDP2, expert, tensor and pipeline parallelism cuts a tensor along full planes. So a tensor is a grid of
parts, which cut points per dim and one rank per part describe fully. Tensors that are cut in the same way share such a
description, a tiling. The manifest grows with the numbers of files and of tensors, not with their product, and a rank
finds the parts that it needs by bisection. Types are strict. Nothing here reads a file.
"""

import itertools
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from expertmesh.io.boxes import Box, inverse, moved_parts, volume

SCHEMA_VERSION = 2
KINDS = ("model", "optimizer")
AXES = ("pp", "replicate", "fsdp", "cp", "tp", "ep", "efsdp")
_TENSOR_FILE = re.compile(r"(model|optimizer)-([0-9]{5,9})-of-[0-9]{5,9}\.safetensors")
_Sha256 = Field(pattern=r"^[0-9a-f]{64}$")
_Size = Field(ge=0, lt=2**63)
_Extent = Annotated[int, _Size]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Tiling(Strict):
    """A grid of the parts of a tensor, and the ranks that wrote them."""

    cuts: list[list[_Extent]] = Field(max_length=64)
    """For each dim the ascending cut points, from 0 to its size."""
    ranks: list[_Extent]
    """The rank that wrote each cell, in row-major order."""
    copies: int = Field(default=1, ge=1)
    """The number of ranks that held each cell."""
    experts: list[_Extent] | None = None
    """The expert in each slot, if dim 0 is in the order of slots: equal shares of it. None: in the model's order."""

    @classmethod
    def of(
        cls, shape: Sequence[int], writers: Mapping[Box, int], copies: int, experts: Sequence[int] | None = None
    ) -> "Tiling":
        """Build the tiling of a tensor.

        Args:
            shape: The shape of the global tensor.
            writers: The rank that wrote each part, by its box; no part is empty.
            copies: The number of ranks that held each part.
            experts: The expert in each slot along dim 0.

        Raises:
            ValueError: The parts are no grid that fills the tensor; says why.
        """
        for box in writers:
            if any(start < 0 or stop > size for (start, stop), size in zip(box, shape, strict=True)):
                raise ValueError("a part lies outside of it")
        held, wanted = sum(map(volume, writers)), math.prod(shape)
        if held != wanted:
            raise ValueError(f"its parts hold {held} of {wanted} elements")
        cuts = [sorted({0, size, *(start for box in writers for start in box[dim])}) for dim, size in enumerate(shape)]
        boxes = sorted(writers)
        if _cells(cuts) != len(boxes) or any(a != b for a, b in zip(_boxes(cuts), boxes, strict=True)):
            raise ValueError("two of its parts overlap, or they are no grid")
        order = None if experts is None else list(experts)
        return cls(cuts=cuts, ranks=[writers[box] for box in boxes], copies=copies, experts=order)

    def problem(self) -> str | None:
        """Return why this is no valid tiling, as the end of a sentence, or None."""
        for cuts in self.cuts:
            if not cuts or cuts[0] != 0 or any(a >= b for a, b in itertools.pairwise(cuts)):
                return "its cuts do not ascend from 0"
        if self.experts is not None:
            slots = range(len(self.experts))
            if not slots or not self.cuts or self.cuts[0][-1] % len(slots) or sorted(self.experts) != list(slots):
                return "its experts are not each in one slot"
        if _cells(self.cuts) != len(self.ranks):
            return f"it has {_cells(self.cuts)} parts, but names the ranks of {len(self.ranks)}"
        return "a rank wrote two parts of it" if len(set(self.ranks)) != len(self.ranks) else None

    @property
    def shape(self) -> list[int]:
        return [cuts[-1] for cuts in self.cuts]

    @cached_property
    def _places(self) -> dict[int, int]:
        """The cell's row-major number by the rank that wrote it."""
        return {rank: place for place, rank in enumerate(self.ranks)}

    def cell_of(self, rank: int) -> Box | None:
        """Return the box of the part that `rank` wrote; None if it wrote none."""
        if (place := self._places.get(rank)) is None:
            return None
        box: list[tuple[int, int]] = []
        for cuts in reversed(self.cuts):
            place, at = divmod(place, len(cuts) - 1)
            box.insert(0, (cuts[at], cuts[at + 1]))
        return tuple(box)

    def stored(self, box: Box) -> Iterator[tuple[Box, Box]]:
        """Yield the parts of a tensor's `box` that are boxes of the tensor as it is stored: (the part, as stored)."""
        if self.experts is None or volume(box) == 0:
            yield box, box
        else:
            yield from moved_parts(box, self.cuts[0][-1], self._slots)

    @cached_property
    def _slots(self) -> tuple[int, ...]:
        """The slot of each expert."""
        assert self.experts is not None
        return inverse(self.experts)

    def within(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield (rank that wrote it, its box) of the parts that share elements with `box`, which must not be empty."""
        ranges = [
            range(bisect_right(cuts, start) - 1, bisect_left(cuts, stop))
            for cuts, (start, stop) in zip(self.cuts, box, strict=True)
        ]
        for place in itertools.product(*ranges):
            index = 0
            for at, cuts in zip(place, self.cuts, strict=True):
                index = index * (len(cuts) - 1) + at
            yield self.ranks[index], tuple((cuts[at], cuts[at + 1]) for at, cuts in zip(place, self.cuts, strict=True))


class FileEntry(Strict):
    """One file of a checkpoint."""

    name: str
    """Its path relative to the checkpoint, with `/` between directories."""
    bytes: int = _Size
    sha256: str = _Sha256


class TensorEntry(Strict):
    """One tensor of the model or of the optimizer."""

    dtype: str
    """The name that safetensors uses."""
    shape: list[_Extent] = Field(max_length=64)
    """The shape of the global tensor."""
    tiling: int = _Size
    """The index of its tiling in `Manifest.tilings`."""


class Manifest(Strict):
    """The content of manifest.json."""

    format: Literal["expertmesh-checkpoint"] = "expertmesh-checkpoint"
    step: int = Field(ge=0, lt=2**53)
    """The number of optimizer steps done."""
    created: str
    """Date and time in ISO format."""
    world_size: int = Field(ge=1, le=2**24)
    layout: dict[str, int]
    """The size of each axis in `AXES`."""
    versions: dict[str, str]
    """The versions of expertmesh, torch, transformers and Python."""
    config_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """The hash of config.yaml; None if the checkpoint has none."""
    files: list[FileEntry]
    """All files but the manifest."""
    trained: list[str]
    """The names of the parameters that the optimizer updates."""
    schema_version: Literal[2] = 2
    tilings: list[Tiling]
    model: dict[str, TensorEntry]
    """By name; empty if the checkpoint was saved without weights."""
    optimizer: dict[str, TensorEntry]
    """By name."""

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @cached_property
    def by_name(self) -> dict[str, FileEntry]:
        return {file.name: file for file in self.files}

    def tensors(self, kind: str) -> Mapping[str, TensorEntry]:
        """Return the tensors of `kind`, the model or the optimizer, by name."""
        return self.model if kind == "model" else self.optimizer

    def entry(self, name: str) -> TensorEntry:
        return self.model[name] if name in self.model else self.optimizer[name]

    def parts_within(self, name: str, box: Box) -> Iterator[tuple[str, Box]]:
        """Yield (file, box) of the parts that share elements with `box` of a tensor as stored, which is not empty."""
        kind = "model" if name in self.model else "optimizer"
        for rank, cell in self.tiling_of(name).within(box):
            yield tensor_file(kind, rank, self.world_size), cell

    def kind_of(self, file: str) -> str | None:
        """Return `model` or `optimizer` for a file that holds parts of it; None for other files."""
        kind, _ = writer_of(file, self.world_size)
        return kind

    def parts_in(self, file: str) -> dict[str, tuple[Box, str]]:
        """Return (box, dtype) of the parts that `file` holds, by tensor."""
        kind, rank = writer_of(file, self.world_size)
        if kind is None:
            return {}
        cells = [tiling.cell_of(rank) for tiling in self.tilings]
        found = ((name, cells[entry.tiling], entry.dtype) for name, entry in self.tensors(kind).items())
        return {name: (cell, dtype) for name, cell, dtype in found if cell is not None}

    def tiling_of(self, name: str) -> Tiling:
        """Return how a tensor is cut."""
        return self.tilings[self.entry(name).tiling]


def tensor_file(kind: str, rank: int, world_size: int) -> str:
    """Return the name of the file in which `rank` wrote its parts of the model or the optimizer."""
    return f"{kind}-{rank:05d}-of-{world_size:05d}.safetensors"


def writer_of(file: str, world_size: int) -> tuple[str | None, int]:
    """Return (kind, rank) of a file in which a rank of `world_size` wrote tensors; (None, -1) for other files."""
    match = _TENSOR_FILE.fullmatch(file)
    if match is None or int(match[2]) >= world_size or tensor_file(match[1], int(match[2]), world_size) != file:
        return None, -1
    return match[1], int(match[2])


def is_tensor_file(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name


def _cells(cuts: Sequence[Sequence[int]]) -> int:
    return math.prod(len(each) - 1 for each in cuts)


def _boxes(cuts: Sequence[Sequence[int]]) -> Iterator[Box]:
    return itertools.product(*(itertools.pairwise(each) for each in cuts))
