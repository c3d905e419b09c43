"""Describe which box of one tensor is which box of another one, for loading and saving.

A `Leaf` is a tensor with values: one of a file, or one of the model. A tensor assembled from leaves (weights/lazy.py)
is a set of disjoint `Piece`s. To load, a rank crops pieces to its box and reads their sources; to save, it crops them
to its box of the source and writes their destinations. Nothing here holds values.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from expertmesh.io.boxes import Box, extents


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
