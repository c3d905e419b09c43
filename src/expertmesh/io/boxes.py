"""Boxes: ranges of indices (start, stop) per dim of a global tensor. Plain arithmetic, shared by files and shards."""

import math
from collections.abc import Iterator, Sequence

# (start, stop) for every dim of the global tensor; () is the box of a scalar.
Box = tuple[tuple[int, int], ...]


def full_box(shape: Sequence[int]) -> Box:
    return tuple((0, int(size)) for size in shape)


def extents(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """How many elements the box has; 1 for a scalar's."""
    return math.prod(extents(box))


def intersect(one: Box, other: Box) -> Box | None:
    """The common part, or None if it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def slices(box: Box, origin: Box | None = None) -> tuple[slice, ...]:
    """`box` as an index into a tensor that holds `origin` (default: the whole global tensor)."""
    starts = [start for start, _ in origin] if origin is not None else [0] * len(box)
    return tuple(slice(start - at, stop - at) for (start, stop), at in zip(box, starts, strict=True))


def blocks(box: Box, max_elements: int) -> Iterator[Box]:
    """Cut `box` into boxes of at most `max_elements`, in row-major order, so that temporaries stay small."""
    if volume(box) <= max_elements:
        yield box
        return
    dim = next(d for d, size in enumerate(extents(box)) if size > 1)
    start, stop = box[dim]
    rows = max(1, max_elements * (stop - start) // volume(box))
    for first in range(start, stop, rows):
        part = (*box[:dim], (first, min(first + rows, stop)), *box[dim + 1 :])
        yield from blocks(part, max_elements)
