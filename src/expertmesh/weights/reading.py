"""Read a box of a lazy tensor into allocated memory, piece by piece.

The caller's `LeafReader` supplies the values, from files or from tensors gathered from other ranks. Beside the target
at most one block of one piece is in memory, except where a conversion computes (lazy.py).

`content_hash` identifies the base that an adapter was trained on: the bits of each element are weighted by its place in
the full tensor and summed, so that the sums of the ranks add up in any layout. It distinguishes two sets of weights and
does not protect against an adversary. Nothing else here communicates.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.compat import pytree
from expertmesh.distributed.all_ranks import sum_over_ranks
from expertmesh.io.boxes import Box, Leaf, Piece, blocks, extents, full_box, intersect, slices, volume
from expertmesh.state.model_view import ModelView
from expertmesh.state.packed import PackedTensor, units_together, values_at
from expertmesh.state.packed_format import cut_columns, quantise, rounded
from expertmesh.state.shards import local_box, local_tensor, owns_copy
from expertmesh.weights.lazy import Call, Computed, LazyTensor, Reshaped, Rounded
from expertmesh.weights.quantised.resident import published_bytes
from expertmesh.weights.quantised.tensor import QuantisedTensor, stored_bytes

# Copies that change dtype, device or order of dims go through host memory in parts of at most this many elements.
_BLOCK_ELEMENTS = 1 << 24

# Fills a contiguous CPU tensor of the leaf's dtype with a box of the leaf, in row-major order. Each reader accepts one
# kind of leaf: `WeightFiles.read` accepts file tensors.
LeafReader = Callable[[Any, Box, Tensor], None]
_HASHED_ELEMENTS = 1 << 22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def read_box(lazy: LazyTensor, box: Box, out: Tensor, fetch: LeafReader) -> None:
    """Fill `out` with the elements of `box` of `lazy`, cast to the dtype of `out`.

    Every element is written exactly once, or an assertion fails.

    Args:
        out: Has the extents of `box`; any device, any strides. A packed `out` is filled expert by expert, with the
            files' own codes or with codes of the values.
    """
    if isinstance(out, PackedTensor):
        _read_packed(lazy, box, out, fetch)
    else:
        _Reader(fetch).read(lazy, box, out)


def bytes_needed(lazy: LazyTensor, box: Box) -> int:
    """Return the bytes that `read_box` fetches for `box`: of leaves, or of the codes and scales behind them."""
    total = 0
    for piece in lazy.pieces:
        common = intersect(piece.dest, box)
        if common is None:
            continue
        if isinstance(piece.leaf, Reshaped):
            inner, _ = _widened(piece.leaf, piece.crop(common).source)
            total += bytes_needed(piece.leaf.lazy, inner)
        elif isinstance(piece.leaf, Rounded):
            total += bytes_needed(piece.leaf.lazy, piece.leaf.inner(piece.crop(common).source))
        elif isinstance(piece.leaf, QuantisedTensor):
            total += stored_bytes(piece.leaf, piece.crop(common).source)
        elif isinstance(piece.leaf, Computed):
            total += sum(bytes_needed(each, full_box(each.shape)) for each in piece.leaf.inputs())
        else:
            total += volume(common) * piece.leaf.dtype.itemsize
    return total


def _read_packed(lazy: LazyTensor, box: Box, out: PackedTensor, fetch: LeafReader) -> None:
    """Fill a packed tensor with the files' own codes, or with codes of values, some units (experts or rows) at a time.

    Where a factor or a block covers the full row, rows are quantised in full and then split for tensor parallelism.
    """
    kind, whole = out.kind, full_box(lazy.shape)
    together = units_together(kind, out.device) if kind.by_rows else 1
    uncut = replace(kind, columns=lazy.shape[1]) if kind.by_rows else kind
    # A factor, or a single block, covers the full row: its value must not depend on where tensor parallelism splits
    # the row.
    cuts = kind.columns < uncut.columns and (kind.factor != "none" or kind.columns % kind.block[1] != 0)
    for packed_XB, first in zip(out.packed_LB.split(together), range(*box[0], together), strict=True):
        units = (first, first + len(packed_XB))
        if kind.published:
            packed_XB.copy_(published_bytes(lazy, (units, *box[1:]), kind, fetch))
            continue
        wanted = (units, *(whole if cuts else box)[1:])
        values = torch.empty(extents(wanted), dtype=lazy.dtype)
        _Reader(fetch).read(lazy, wanted, values)
        packed = quantise(values.to(out.device), uncut if cuts else kind)
        packed_XB.copy_(cut_columns(packed, uncut, *box[1])[0] if cuts else packed)


@dataclass(slots=True)
class _Reader:
    """Fetches boxes of any leaf and caches evaluated calls while one target is being read."""

    fetch: LeafReader
    evaluated: dict[int, list[Tensor]] = field(default_factory=dict)

    def leaf(self, leaf: Leaf, box: Box, out: Tensor) -> None:
        """Fill `out` with `box` of a leaf of any kind; `fetch` supplies the values of files or of the model."""
        if isinstance(leaf, Computed):
            if id(leaf.call) not in self.evaluated:
                self.evaluated[id(leaf.call)] = self._evaluate(leaf.call)
            out.copy_(self.evaluated[id(leaf.call)][leaf.index][slices(box)])
        elif isinstance(leaf, Reshaped):
            self._reshaped(leaf, box, out)
        elif isinstance(leaf, Rounded):
            inner = leaf.inner(box)
            values = torch.empty(extents(inner), dtype=leaf.lazy.dtype)
            self.read(leaf.lazy, inner, values)
            out.copy_(rounded(values, leaf.kind)[slices(box, inner)])
        elif isinstance(leaf, QuantisedTensor):
            out.copy_(leaf.read(box, self.fetch))
        else:
            self.fetch(leaf, box, out)

    def read(self, lazy: LazyTensor, box: Box, out: Tensor) -> None:
        """Fill `out` with `box` of `lazy`; every element must come from exactly one piece."""
        filled = 0
        for piece in lazy.pieces:
            common = intersect(piece.dest, box)
            if common is not None:
                self._piece(piece.crop(common), out[slices(common, box)])
                filled += volume(common)
        assert filled == volume(box), f"{lazy!r} supplies {filled} of the {volume(box)} elements of {box}"

    def _piece(self, piece: Piece, target: Tensor) -> None:
        same = target.dtype == piece.leaf.dtype and target.device.type == "cpu" and target.is_contiguous()
        if same and piece.in_order:
            self.leaf(piece.leaf, piece.source, target.view(extents(piece.source)))
            return
        # Not in parts: a computed or reshaped leaf would be evaluated again for every part.
        whole = isinstance(piece.leaf, (Computed, Reshaped))
        for part in [piece.dest] if whole else blocks(piece.dest, _BLOCK_ELEMENTS):
            cropped = piece.crop(part)
            values = torch.empty(extents(cropped.source), dtype=piece.leaf.dtype)
            self.leaf(piece.leaf, cropped.source, values)
            target[slices(part, piece.dest)].copy_(cropped.arrange(values))

    def _evaluate(self, call: Call) -> list[Tensor]:
        def materialize(value: Any) -> Any:
            if not isinstance(value, LazyTensor):
                return value
            out = torch.empty(tuple(value.shape), dtype=value.dtype)
            self.read(value, full_box(value.shape), out)
            return out

        args, kwargs = pytree.tree_map(materialize, (call.args, call.kwargs))
        return [value for value in pytree.tree_leaves(call.func(*args, **kwargs)) if isinstance(value, Tensor)]

    def _reshaped(self, leaf: Reshaped, box: Box, out: Tensor) -> None:
        inner, outer = _widened(leaf, box)
        values = torch.empty(extents(inner), dtype=leaf.dtype)
        self.read(leaf.lazy, inner, values)
        out.copy_(values.reshape(extents(outer))[slices(box, outer)])


def _widened(leaf: Reshaped, box: Box) -> tuple[Box, Box]:
    """Return the smallest box around `box` that is a box in both shapes: of the inner tensor, and of the leaf."""
    shape = tuple(leaf.lazy.shape)
    inner, outer = list(full_box(shape)), list(full_box(leaf.shape))
    # Without dims of size 1, dims of equal size at either end of both shapes are the same dims.
    left, right = ([dim for dim, size in enumerate(each) if size != 1] for each in (shape, leaf.shape))
    for end in (0, -1):
        while left and right and shape[left[end]] == leaf.shape[right[end]]:
            dim = right.pop(end)
            inner[left.pop(end)] = outer[dim] = box[dim]
    return tuple(inner), tuple(outer)


@torch.no_grad()
def content_hash(model: nn.Module) -> str:
    """Return the hash of all parameters and persistent buffers except adapters.

    Collectives: every rank calls it. One all-reduce of one integer per tensor on the default group.
    """
    tensors = ModelView(model).unique
    sums = [
        element_sum(local_tensor(tensor), local_box(tensor), tensor.shape) if owns_copy(tensor) else 0
        for tensor in tensors.values()
    ]
    joined = sum_over_ranks(torch.tensor(sums, dtype=torch.int64))
    return joined_hash(tensors, dict(zip(tensors, joined.tolist(), strict=True)))


def element_sum(values: Tensor, box: Box, shape: torch.Size | tuple[int, ...]) -> int:
    """Return the weighted sum of the elements of `box` of a tensor of `shape`.

    Args:
        values: The elements of `box`, with its extents.

    Returns:
        The sum modulo 2**64, signed. The sums of disjoint boxes add up to the sum of the tensor.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for part in blocks(box, _HASHED_ELEMENTS):
        if any(size == 0 for size in extents(part)):
            continue
        bits = values_at(values, slices(part, box)).contiguous()
        bits = bits.view(_INTEGERS[bits.itemsize]).to(torch.int64)
        place = torch.zeros((), dtype=torch.int64, device=values.device)
        for (start, stop), size in zip(part, shape, strict=True):
            place = place.unsqueeze(-1) * size + torch.arange(start, stop, device=values.device)
        # Odd factors: a changed element always changes the sum.
        total += (bits * (2 * place + 1)).sum()
    return int(total)


def joined_hash(tensors: Mapping[str, Tensor], sums: Mapping[str, int]) -> str:
    """Return one hash of the sums of all tensors and of their names, dtypes and shapes."""
    content = [[name, str(t.dtype), list(t.shape), sums[name] % 2**64] for name, t in sorted(tensors.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
