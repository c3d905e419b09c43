"""Compute with boxes: ranges of indices (start, stop) for each dim of a global tensor. Files and shards share them.

Plain arithmetic: no tensor is read and nothing communicates.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

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
