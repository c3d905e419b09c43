"""Compute with boxes: ranges of indices (start, stop) for each dim of a global tensor. Files and shards share them.

A `Leaf` is a tensor with values: one of a file, or one of the model. A tensor assembled from leaves (weights/lazy.py)
is a set of disjoint `Piece`s. To load, a rank crops pieces to its box and reads their sources; to save, it crops them
to its box of the source and writes their destinations. Plain arithmetic: no tensor is read and nothing communicates.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

# (start, stop) for every dim of the global tensor; () is the box of a scalar.
Box = tuple[tuple[int, int], ...]


def full_box(shape: Sequence[int]) -> Box:
    """Return the box of a full tensor of `shape`."""
    return tuple((0, int(size)) for size in shape)


def extents(box: Box) -> tuple[int, ...]:
    """Return the size of `box` in each dim."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Return the number of elements of the box; 1 for a scalar."""
    return math.prod(extents(box))


def intersect(one: Box, other: Box) -> Box | None:
    """Return the common part of two boxes, or None if it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def slices(box: Box, origin: Box | None = None) -> tuple[slice, ...]:
    """Return `box` as an index into a tensor that holds `origin` (default: the full global tensor)."""
    starts = [start for start, _ in origin] if origin is not None else [0] * len(box)
    return tuple(slice(start - at, stop - at) for (start, stop), at in zip(box, starts, strict=True))


def blocks(box: Box, max_elements: int) -> Iterator[Box]:
    """Split `box` into boxes of at most `max_elements`, in row-major order, so that temporaries stay small."""
    if volume(box) <= max_elements:
        yield box
        return
    dim = next(d for d, size in enumerate(extents(box)) if size > 1)
    start, stop = box[dim]
    rows = max(1, max_elements * (stop - start) // volume(box))
    for first in range(start, stop, rows):
        part = (*box[:dim], (first, min(first + rows, stop)), *box[dim + 1 :])
        yield from blocks(part, max_elements)


def moved_parts(box: Box, size: int, places: Sequence[int]) -> Iterator[tuple[Box, Box]]:
    """Yield the parts of `box` that stay ranges when dim 0 is rearranged, in order: (the part, where it goes).

    Args:
        size: The size of dim 0.
        places: The new place of each equal share of dim 0.
    """
    (first, last), rest, share = box[0], box[1:], size // len(places)
    number = first // share
    while number * share < last:
        start, end = number, number + 1
        while end * share < last and places[end] == places[end - 1] + 1:
            end += 1
        rows, by = (max(first, start * share), min(last, end * share)), (places[start] - start) * share
        yield (rows, *rest), ((rows[0] + by, rows[1] + by), *rest)
        number = end


def inverse(places: Sequence[int]) -> tuple[int, ...]:
    """Return the permutation that undoes `places`."""
    return tuple(sorted(range(len(places)), key=places.__getitem__))


@dataclass(frozen=True, slots=True)
class ByteRuns:
    """A box as byte ranges of its tensor, in the box's row-major order.

    Each range starts at `first` plus, for every loop, a multiple of its stride.
    """

    first: int
    """The offset of the first range from the start of the tensor, in bytes."""
    length: int
    """The bytes of one range."""
    loops: tuple[tuple[int, int], ...]
    """(count, stride in bytes), outermost first."""

    @classmethod
    def of(cls, shape: tuple[int, ...], itemsize: int, box: Box) -> "ByteRuns":
        """Return the byte ranges of `box` in a row-major tensor of `shape` with elements of `itemsize` bytes."""
        first, length, stride, contiguous = 0, itemsize, itemsize, True
        loops: list[tuple[int, int]] = []
        for size, (start, stop) in zip(reversed(shape), reversed(box), strict=True):
            first += start * stride
            if contiguous:
                length = (stop - start) * stride
                contiguous = stop - start == size
            elif stop - start > 1:
                loops.insert(0, (stop - start, stride))
            stride *= size
        return cls(first, length, tuple(loops))

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Yield (offset of the first run, number of runs, stride) for each group of equally spaced runs."""
        count, stride = self.loops[-1] if self.loops else (1, self.length)
        for steps in product(*(range(0, size * step, step) for size, step in self.loops[:-1])):
            yield self.first + sum(steps), count, stride


class Leaf(Protocol):
    """A tensor with values, named in error messages: a tensor of a file, or of the model."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Box `dest` of a lazy tensor is box `source` of `leaf`."""

    dest: Box
    """The box in the lazy tensor."""
    leaf: Leaf
    """The tensor with the values."""
    source: Box
    """The box in the leaf."""
    dims: tuple[int | None, ...]
    """`dims[i]` is the leaf's dim that runs along dim i of the lazy tensor, or None if dim i has size 1 and no
    counterpart. Dims of the leaf that are not in `dims` have extent 1 in `source`."""

    def crop(self, dest: Box) -> "Piece":
        """Return the part of this piece that fills `dest`, which must lie inside it."""
        source = list(self.source)
        for (start, stop), (origin, _), dim in zip(dest, self.dest, self.dims, strict=True):
            if dim is not None:
                base = self.source[dim][0] - origin
                source[dim] = (base + start, base + stop)
        return Piece(dest, self.leaf, tuple(source), self.dims)

    def crop_source(self, source: Box) -> "Piece":
        """Return the part of this piece that `source` supplies, which must lie inside its source box."""
        dest = list(self.dest)
        for i, dim in enumerate(self.dims):
            if dim is not None:
                base = self.dest[i][0] - self.source[dim][0]
                dest[i] = (base + source[dim][0], base + source[dim][1])
        return Piece(tuple(dest), self.leaf, source, self.dims)

    def arrange(self, values: Tensor) -> Tensor:
        """View `values`, which hold the source box, in the order and shape of the dest box."""
        used = [dim for dim in self.dims if dim is not None]
        rest = [dim for dim in range(len(self.source)) if dim not in used]
        return values.permute([*used, *rest]).reshape(extents(self.dest))

    @property
    def in_order(self) -> bool:
        """True if source and dest hold their elements in the same row-major order."""
        used = [dim for dim in self.dims if dim is not None and self.source[dim][1] - self.source[dim][0] > 1]
        return used == sorted(used)
