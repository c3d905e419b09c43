"""A tensor of 8- or 4-bit codes as a leaf with values: which bytes a box needs, and which values they represent.

Codes are read for the box alone, widened to full bytes or words; scales for the blocks that it touches. So a rank reads
the packed bytes of its share, whatever the block size. Nothing here communicates.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from expertmesh.config.errors import IntegrityError
from expertmesh.io.boxes import Box, Piece, extents, full_box
from expertmesh.io.safetensors_reader import FileTensor
from expertmesh.state.codes import (
    Code,
    Factor,
    PackedFormat,
    joined,
    not_packed,
    scale_values,
    spread,
    values_of,
    with_factor,
)

# Fills a contiguous CPU tensor with a box of a file tensor.
Fetch = Callable[[FileTensor, Box, Tensor], None]
# The number of codes in one element of the file's tensor.
CODES_PER_ELEMENT: dict[Code, int] = {"e4m3": 1, "e2m1": 2, "int4": 8}


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedTensor:
    """Codes and scales of a matrix or a stack of matrices as one leaf of values.

    The last two dims are divided into blocks, each with a scale; the last blocks may be partial.
    """

    name: str
    """The tensor's name, as if the file held its values."""
    shape: tuple[int, ...]
    """`[..., out, in]`, of the values."""
    dtype: torch.dtype
    """The dtype of the values."""
    code: Code
    """The code of one value."""
    block: tuple[int, int]
    """(rows, columns) of a block."""
    codes: FileTensor
    """Has one dim more than `shape` where the file stores the bytes of a block in a separate dim."""
    scale: FileTensor
    """The scale of each block."""
    global_scale: FileTensor | None = None
    """One more factor of all scales, or a divisor."""
    global_divides: bool = False
    """True if `global_scale` is a divisor."""
    zero_point: FileTensor | None = None
    """Packed along the rows."""
    powers_of_two: bool = False
    """True if scales that could be other numbers are powers of two (`scale_fmt` ue8m0), which readers rely on."""
    stored_shape: FileTensor | None = None
    """The shape of the values as the file itself records it."""

    @property
    def path(self) -> Path:
        """The file with the codes."""
        return self.codes.path

    @property
    def offset(self) -> int:
        """The first byte of the codes, counted from the start of their file."""
        return self.codes.offset

    @property
    def parts(self) -> list[FileTensor]:
        """The file tensors behind it."""
        others = (self.global_scale, self.zero_point, self.stored_shape)
        return [self.codes, self.scale, *(part for part in others if part is not None)]

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape of the scales: one for each block."""
        return (*self.shape[:-2], -(-self.shape[-2] // self.block[0]), -(-self.shape[-1] // self.block[1]))

    @property
    def per_element(self) -> int:
        """The number of codes in one element of `codes`, and of `zero_point`."""
        return CODES_PER_ELEMENT[self.code]

    @property
    def factor(self) -> Factor:
        """The effect of `global_scale`."""
        return "none" if self.global_scale is None else "divides" if self.global_divides else "times"

    def needed(self, box: Box) -> list[tuple[FileTensor, Box]]:
        """Return the boxes of `parts` that `box` needs."""
        rows, columns = self.blocks_of(box)
        boxes = {
            self.codes: (*box[:-1], _outer(box[-1], self._columns), *full_box(self.codes.shape[len(self.shape) :]))
        }
        if math.prod(self.scale.shape) != 1:
            boxes[self.scale] = (*box[:-2], rows, columns)[: len(self.scale.shape)]  # one a row may lack the last dim
        if self.zero_point is not None:
            boxes[self.zero_point] = (*box[:-2], _outer(rows, self.per_element), columns)
        return [(part, boxes.get(part, full_box(part.shape))) for part in self.parts]

    def read(self, box: Box, fetch: Fetch) -> Tensor:
        """Return the values of `box` in `dtype`, with its extents. Raises what `stored` raises."""
        raw, scales = self.stored(box, fetch)
        codes, start = raw[self.codes], box[-1][0] % self._columns
        codes = codes.flatten(len(box) - 1) if codes.dim() > len(box) else codes
        values = values_of(codes, self.code)[..., start : start + box[-1][1] - box[-1][0]]
        if self.zero_point is not None:
            points = values_of(raw[self.zero_point].transpose(-1, -2), self.code).transpose(-1, -2)
            (first, last), _ = self.blocks_of(box)
            start = first % self.per_element
            values = values - spread(points[..., start : start + last - first, :], self.block, box)
        # In fp32 the product is rounded at most once, and then cast once: this is how the formats are defined.
        return (values * spread(scales, self.block, box)).to(self.dtype)

    def raw(self, box: Box, fetch: Fetch) -> dict[FileTensor, Tensor]:
        """Return the stored elements that `box` needs, by each of `parts`."""
        raw = {}
        for part, wanted in self.needed(box):
            raw[part] = torch.empty(extents(wanted), dtype=part.dtype)
            fetch(part, wanted, raw[part])
        return raw

    def stored(self, box: Box, fetch: Fetch) -> tuple[dict[FileTensor, Tensor], Tensor]:
        """Read the stored elements of `box`, and check them.

        Returns:
            The result of `raw`, and the scales in fp32, one for each block.

        Raises:
            IntegrityError: A scale is not finite, or the shape that the file records is another.
        """
        raw = self.raw(box, fetch)
        if self.stored_shape is not None and raw[self.stored_shape].tolist() != list(self.shape):
            stored = raw[self.stored_shape].tolist()
            raise self._damaged(self.stored_shape, f"says {stored}; the codes and scales are of {list(self.shape)}")
        rows, columns = self.blocks_of(box)
        grid = (*extents(box[:-2]), rows[1] - rows[0], columns[1] - columns[0])
        scales = scale_values(raw[self.scale])
        scales = scales.reshape((1,) * len(box) if scales.numel() == 1 else grid)
        if self.global_scale is not None:
            scales = with_factor(scales, raw[self.global_scale].to(torch.float32), self.factor)
        if not bool(scales.isfinite().all()):
            raise self._damaged(self.scale, "holds a scale that is not finite; the checkpoint is damaged")
        return raw, scales

    @property
    def _columns(self) -> int:
        """The number of columns that one index of the codes' column dim covers."""
        trailing = self.codes.shape[len(self.shape) :]
        return self.per_element * (trailing[0] if trailing else 1)

    def blocks_of(self, box: Box) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the rows and columns of the grid that `box` touches."""
        return _outer(box[-2], self.block[0]), _outer(box[-1], self.block[1])

    def _damaged(self, part: FileTensor, problem: str) -> IntegrityError:
        return IntegrityError(f"{part.path}: tensor {part.name} {problem}", key="weights.damaged")


def published_bytes(pieces: Iterable[Piece], box: Box, kind: PackedFormat, fetch: Fetch) -> Tensor:
    """Return the bytes `[X, B]` of one expert, or of parts of rows, in `kind`, a format of `published_formats`.

    Args:
        pieces: Together they fill `box`.

    Raises:
        IntegrityError: As reading values does.
    """
    codes, scales, factors = [], [], []
    for piece in in_order_of_rows(pieces, box, kind.transposed):
        leaf = piece.leaf
        assert isinstance(leaf, QuantisedTensor)
        raw, _ = leaf.stored(piece.source, fetch)
        codes.append(raw[leaf.codes].contiguous().view(torch.uint8).reshape(-1, kind.row_bytes))
        (first, last), (left, right) = leaf.blocks_of(piece.source)
        scale = raw[leaf.scale].reshape(last - first, right - left).contiguous().view(torch.uint8)
        if kind.by_rows:  # each row gets a copy of the scales of its blocks
            scale = scale.index_select(0, torch.arange(*piece.source[-2]) // leaf.block[0] - first)
        scales.append(scale)
        if leaf.global_scale is not None:
            factor = raw[leaf.global_scale].reshape(1, 1).to(torch.float32)
            factors.append(factor.expand(len(codes[-1]), 1) if kind.by_rows else factor)
    units = sum(map(len, codes)) if kind.by_rows else 1  # otherwise all rows belong to one expert
    stored = [torch.cat(parts).reshape(units, -1) for parts in (codes, scales, factors) if parts]
    return joined(stored[0], stored[1], stored[2] if factors else None, kind)


def in_order_of_rows(pieces: Iterable[Piece], box: Box, transposed: bool) -> list[Piece]:
    """Return the pieces of `box` in the order of its rows.

    Raises:
        InputError: The columns of `box` do not run along the files' columns.
    """
    rows, columns = (-1, -2) if transposed else (-2, -1)
    found = sorted(pieces, key=lambda piece: piece.dest[rows][0])
    for piece in found:
        last = len(piece.leaf.shape) - 1
        if (piece.dims[rows], piece.dims[columns]) != (last - 1, last) or piece.dest[columns] != box[columns]:
            why = f"{piece.leaf.name} does not hold whole rows of an expert; choose another format"
            raise not_packed("as_published", why)
    return found


def _outer(extent: tuple[int, int], size: int) -> tuple[int, int]:
    """Return the range of the runs of `size` that `extent` touches."""
    return extent[0] // size, -(-extent[1] // size)
