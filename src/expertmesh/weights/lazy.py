"""Run transformers' conversion rules on tensors without values, and read their values by box once they are needed.

A `LazyTensor` is a set of disjoint pieces. Stacking, splitting, indexing, transposing and the like only rearrange
pieces, so that transformers' conversion operations run on it unchanged. It is a `torch.Tensor` subclass with
`__torch_dispatch__`, because these operations check `isinstance`. The result of a view function (`chunk`, `tensor[i]`,
`permute`) is derived from the strides of a view of a meta tensor.

After a reshape, the first and last dims that did not change can still be read by range (`Reshaped`). Any other function
is stored as a call and evaluated on full inputs at read time (`Computed`): exact, but it reads more. Functions that
write into their arguments are refused, because a forgotten write would be a wrong weight.

`read_box` fills memory piece by piece. The caller's `LeafReader` supplies the values, from files or from tensors
gathered from other ranks. Beside the target at most one block of one piece is in memory, except where a conversion
computes. Nothing here communicates.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from expertmesh.compat import VIEWS_BY_SIZE, VIEWS_BY_STRIDES, pytree, wrapper_tensor
from expertmesh.io.boxes import Box, Leaf, Piece, blocks, extents, full_box, intersect, slices, volume
from expertmesh.state.codes import PackedFormat, cut_columns, quantise, rounded
from expertmesh.state.packed import PackedTensor, handles, units_together
from expertmesh.weights.quantised.tensor import QuantisedTensor, published_bytes

# Copies that change dtype, device or order of dims go through host memory in parts of at most this many elements.
_BLOCK_ELEMENTS = 1 << 24
# Fills a contiguous CPU tensor of the leaf's dtype with a box of the leaf, in row-major order. Each reader accepts one
# kind of leaf: `WeightFiles.read` accepts file tensors.
LeafReader = Callable[[Any, Box, Tensor], None]
aten = torch.ops.aten
_HANDLERS: dict[Any, Callable[..., Any]] = {}


class LazyTensor(torch.Tensor):
    """A meta tensor made of pieces; see the module docstring. Its values do not depend on strides."""

    pieces: tuple[Piece, ...]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[Piece]) -> "LazyTensor":
        lazy: LazyTensor = wrapper_tensor(cls, shape, dtype, torch.device("meta"))
        lazy.pieces = tuple(pieces)
        return lazy

    @classmethod
    def of(cls, leaf: Leaf) -> "LazyTensor":
        """Return a lazy tensor of all elements of one leaf."""
        box = full_box(leaf.shape)
        pieces = [Piece(box, leaf, box, tuple(range(len(box))))] if volume(box) else []
        return cls(leaf.shape, leaf.dtype, pieces)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None and (result := handler(*args, **kwargs)) is not NotImplemented:
            return result
        if func._schema.is_mutable:
            raise NotImplementedError(f"a weight conversion writes with {func}, which lazy tensors cannot follow")
        # Not views by strides: a caller cannot know those of the probe.
        if func._schema.arguments[0].alias_info is not None and func not in VIEWS_BY_STRIDES:
            lazy, *others = args
            views = func(_probe(lazy), *others, **kwargs)  # indexing, splitting, permuting, ...
            seen = [_seen(lazy, view) for view in ([views] if isinstance(views, Tensor) else views)]
            if all(each is not None for each in seen):
                return seen[0] if isinstance(views, Tensor) else seen
        return _compute(func, args, kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        leaves = ", ".join(dict.fromkeys(piece.leaf.name for piece in self.pieces[:3]))
        return f"LazyTensor({tuple(self.shape)}, {self.dtype}, {len(self.pieces)} pieces of {leaves} ...)"

    def pieces_in(self, box: Box) -> Iterator[Piece]:
        """Yield the parts of its pieces that fill elements of `box`."""
        for piece in self.pieces:
            if (common := intersect(piece.dest, box)) is not None:
                yield piece.crop(common)

    @property
    def plain_dtype(self) -> torch.dtype:
        """The dtype to write it in: that of its files, bfloat16 where they hold codes."""
        return torch.bfloat16 if self.holds_codes else self.dtype

    @property
    def holds_codes(self) -> bool:
        """True if the files hold codes of some of its values."""
        return any(isinstance(leaf, QuantisedTensor) for leaf in self.leaves())

    def leaves(self) -> list[Leaf]:
        """Return the leaves that have values (file tensors or model tensors), including those behind other leaves."""
        found: dict[int, Leaf] = {}
        for piece in self.pieces:
            inner = piece.leaf.inputs() if isinstance(piece.leaf, _DERIVED) else None
            for leaf in [piece.leaf] if inner is None else [leaf for lazy in inner for leaf in lazy.leaves()]:
                found[id(leaf)] = leaf
        return list(found.values())


def lazy_tensors(leaves: Mapping[str, Leaf]) -> dict[str, LazyTensor]:
    """Return a lazy tensor of all elements of each leaf, by the same names."""
    return {name: LazyTensor.of(leaf) for name, leaf in leaves.items()}


def as_lazy(tensor: Tensor) -> LazyTensor:
    """Return `tensor`, the result of an operation on lazy tensors, with its type."""
    assert isinstance(tensor, LazyTensor)
    return tensor


@dataclass(frozen=True, slots=True, eq=False)
class Reshaped:
    """A lazy tensor in another shape. First and last dims that the reshape does not change are read by range."""

    lazy: LazyTensor
    """The tensor in its own shape."""
    shape: tuple[int, ...]
    """The new shape."""

    @property
    def name(self) -> str:
        return f"reshaped {self.lazy!r}"

    @property
    def dtype(self) -> torch.dtype:
        return self.lazy.dtype

    def inputs(self) -> list[LazyTensor]:
        return [self.lazy]

    def needed(self, box: Box) -> list[tuple[LazyTensor, Box]]:
        return [(self.lazy, self.widened(box)[0])]

    def widened(self, box: Box) -> tuple[Box, Box]:
        """Return the smallest box around `box` that is a box in both shapes: of the inner tensor, and of this."""
        shape = tuple(self.lazy.shape)
        inner, outer = list(full_box(shape)), list(full_box(self.shape))
        # Without dims of size 1, dims of equal size at either end of both shapes are the same dims.
        left, right = ([dim for dim, size in enumerate(each) if size != 1] for each in (shape, self.shape))
        for end in (0, -1):
            while left and right and shape[left[end]] == self.shape[right[end]]:
                dim = right.pop(end)
                inner[left.pop(end)] = outer[dim] = box[dim]
        return tuple(inner), tuple(outer)


@dataclass(frozen=True, slots=True, eq=False)
class Rounded:
    """The values, in fp32, of a lazy tensor after quantisation to `kind`; its units are experts or rows."""

    lazy: LazyTensor
    """The values before quantisation."""
    kind: PackedFormat
    """The format of one unit."""

    @property
    def name(self) -> str:
        return f"{self.lazy!r}, rounded to {self.kind.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.lazy.shape)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def inputs(self) -> list[LazyTensor]:
        return [self.lazy]

    def inner(self, box: Box) -> Box:
        """Return the box of the lazy tensor that is read for `box`: it is widened to full blocks."""
        return (box[0], *self.kind.whole_blocks(box[1:]))

    def needed(self, box: Box) -> list[tuple[LazyTensor, Box]]:
        return [(self.lazy, self.inner(box))]


def rounded_units(lazy: LazyTensor, kind: PackedFormat) -> LazyTensor:
    """Return `lazy` with the values it has after quantisation to `kind`: experts one by one, rows all together."""
    leaf, whole = Rounded(lazy, kind), full_box(lazy.shape)
    units = [whole] if kind.by_rows else [((unit, unit + 1), *whole[1:]) for unit in range(lazy.shape[0])]
    pieces = [Piece(box, leaf, box, tuple(range(len(box)))) for box in units]
    return LazyTensor(lazy.shape, torch.float32, pieces)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A function and its arguments, which contain lazy tensors."""

    func: Any
    """The function."""
    args: tuple[Any, ...]
    """Its positional arguments."""
    kwargs: dict[str, Any]
    """Its keyword arguments."""


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """One output of a call that is evaluated at read time."""

    call: Call
    """The call."""
    index: int
    """Number of the output."""
    shape: tuple[int, ...]
    """The shape of the output."""
    dtype: torch.dtype
    """The dtype of the output."""

    @property
    def name(self) -> str:
        return f"{self.call.func} of {', '.join(leaf.name for lazy in self.inputs() for leaf in lazy.leaves())}"

    def inputs(self) -> list[LazyTensor]:
        flat = pytree.tree_leaves((self.call.args, self.call.kwargs))
        return [value for value in flat if isinstance(value, LazyTensor)]

    def needed(self, box: Box) -> list[tuple[LazyTensor, Box]]:
        return [(lazy, full_box(lazy.shape)) for lazy in self.inputs()]


# The kinds of leaves that are computed from other lazy tensors: their `inputs`, of which `needed` are read for a box.
_DERIVED = (Reshaped, Rounded, Computed)


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Store a call, run it on meta tensors for the shapes, and return its outputs as `Computed` leaves."""

    def on_meta(value: Any) -> Any:
        return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value

    meta = func(*pytree.tree_map(on_meta, args), **pytree.tree_map(on_meta, kwargs))
    flat, structure = pytree.tree_flatten(meta)
    call, outputs, index = Call(func, args, kwargs), [], 0
    for value in flat:
        if isinstance(value, Tensor):
            value = LazyTensor.of(Computed(call, index, tuple(value.shape), value.dtype))
            index += 1
        outputs.append(value)
    return pytree.tree_unflatten(outputs, structure)


# Handlers of primitives, which rearrange pieces; one that returns `NotImplemented` falls back to `Computed`.


@handles(_HANDLERS, aten.clone.default)
def _same(lazy: LazyTensor, **_: Any) -> LazyTensor:
    return LazyTensor(lazy.shape, lazy.dtype, lazy.pieces)


@handles(_HANDLERS, aten._to_copy.default)
def _to_copy(lazy: LazyTensor, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    # A cast that preserves every value is done together with the last cast, when values are read.
    if dtype is not None and torch.promote_types(lazy.dtype, dtype) != dtype:
        return NotImplemented
    return LazyTensor(lazy.shape, dtype or lazy.dtype, lazy.pieces)


@handles(_HANDLERS, aten.stack.default)
def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    if not all(isinstance(tensor, LazyTensor) for tensor in tensors):
        return NotImplemented
    dim = range(tensors[0].dim() + 1)[dim]
    # A dim of size 1 is inserted without `unsqueeze`, whose probe is slow: tens of thousands of experts are stacked.
    with_dim = []
    for lazy in map(as_lazy, tensors):
        pieces = []
        for piece in lazy.pieces:
            dest, dims = (*piece.dest[:dim], (0, 1), *piece.dest[dim:]), (*piece.dims[:dim], None, *piece.dims[dim:])
            pieces.append(Piece(dest, piece.leaf, piece.source, dims))
        with_dim.append(LazyTensor([*lazy.shape[:dim], 1, *lazy.shape[dim:]], lazy.dtype, pieces))
    return _cat(with_dim, dim)


@handles(_HANDLERS, aten.cat.default)
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    if not all(isinstance(tensor, LazyTensor) and tensor.dim() for tensor in tensors):
        return NotImplemented
    first = tensors[0]
    dim, dtype = range(first.dim())[dim], first.dtype
    pieces: list[Piece] = []
    end = 0
    for tensor in tensors:
        pairs = enumerate(zip(tensor.shape, first.shape, strict=False))
        if tensor.dim() != first.dim() or any(size != other for place, (size, other) in pairs if place != dim):
            shapes = f"{tuple(first.shape)} and {tuple(tensor.shape)}"
            raise ValueError(f"cannot join tensors of shapes {shapes} on dim {dim}")
        for piece in as_lazy(tensor).pieces:
            start, stop = piece.dest[dim]
            dest = (*piece.dest[:dim], (start + end, stop + end), *piece.dest[dim + 1 :])
            pieces.append(Piece(dest, piece.leaf, piece.source, piece.dims))
        end += tensor.shape[dim]
        dtype = torch.promote_types(dtype, tensor.dtype)
    return LazyTensor([*first.shape[:dim], end, *first.shape[dim + 1 :]], dtype, pieces)


@handles(_HANDLERS, *VIEWS_BY_SIZE, aten.reshape.default)
def _view(lazy: LazyTensor, shape: Sequence[int]) -> LazyTensor:
    view = _probe(lazy).reshape(shape)
    seen = _seen(lazy, view)
    return LazyTensor.of(Reshaped(lazy, tuple(view.shape))) if seen is None else seen


def _probe(lazy: LazyTensor) -> Tensor:
    """Return a meta tensor with the shape and dtype of `lazy`; the strides of its views identify the dims."""
    return torch.empty_strided(lazy.shape, _strides(lazy), dtype=lazy.dtype, device="meta")


def _strides(lazy: LazyTensor) -> list[int]:
    # The strides are so large that neither a step of 2 in one dim nor two joined dims have the stride of another dim.
    return [math.prod(2 * size + 1 for size in lazy.shape[dim + 1 :]) for dim in range(lazy.dim())]


def _seen(lazy: LazyTensor, view: Tensor) -> LazyTensor | None:
    """Return the lazy tensor that shows of `lazy` what `view` shows of its probe.

    Returns:
        None if the view is anything else than a range of each dim, with the dims in any order.
    """
    if view.dtype != lazy.dtype:
        return None
    if view.numel() == 0:
        return LazyTensor(view.shape, lazy.dtype, [])
    strides, rest = _strides(lazy), int(view.storage_offset())
    shown = list(zip(view.shape, view.stride(), strict=True))
    # The stride of a dim of size 1 identifies no dim, so that it is not matched.
    order = [strides.index(stride) if size != 1 and stride in strides else None for size, stride in shown]
    sizes = {dim: size for dim, size in zip(order, view.shape, strict=True) if dim is not None}
    window = []
    for dim, stride in enumerate(strides):
        start, rest = divmod(rest, stride)
        window.append((start, start + sizes.get(dim, 1)))
    # Not a range of each dim: a dim with a step, shown twice, split, or joined with another. For a joined dim torch has
    # made a copy, whose strides identify no dim.
    outside = any(stop > size for (_, stop), size in zip(window, lazy.shape, strict=True))
    if outside or math.prod(sizes.values()) != view.numel():
        return None
    pieces = []
    for piece in lazy.pieces_in(tuple(window)):
        moved = [(start - first, stop - first) for (start, stop), (first, _) in zip(piece.dest, window, strict=True)]
        dest = tuple((0, 1) if dim is None else moved[dim] for dim in order)
        dims = tuple(None if dim is None else piece.dims[dim] for dim in order)
        pieces.append(Piece(dest, piece.leaf, piece.source, dims))
    return LazyTensor(view.shape, lazy.dtype, pieces)


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


def read_values(
    lazy: LazyTensor, fetch: LeafReader, box: Box | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the elements of `box` of `lazy`, or all of them, in `dtype` or its own, on the CPU."""
    return _Reader(fetch).values(lazy, full_box(lazy.shape) if box is None else box, dtype)


def bytes_needed(lazy: LazyTensor, box: Box) -> int:
    """Return the bytes that `read_box` fetches for `box`: of leaves, or of the codes and scales behind them."""
    return sum(_bytes_of(piece.leaf, piece.source) for piece in lazy.pieces_in(box))


def _bytes_of(leaf: Leaf | LazyTensor, box: Box) -> int:
    if isinstance(leaf, LazyTensor):
        return bytes_needed(leaf, box)
    if isinstance(leaf, (*_DERIVED, QuantisedTensor)):
        return sum(_bytes_of(part, wanted) for part, wanted in leaf.needed(box))
    return volume(box) * leaf.dtype.itemsize


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
            part = (units, *box[1:])
            pieces = lazy.pieces_in(part)
            packed_XB.copy_(published_bytes(pieces, part, kind, fetch))
            continue
        wanted = (units, *(whole if cuts else box)[1:])
        packed = quantise(read_values(lazy, fetch, wanted).to(out.device), uncut if cuts else kind)
        packed_XB.copy_(cut_columns(packed, uncut, *box[1])[0] if cuts else packed)


@dataclass(slots=True)
class _Reader:
    """Fetches boxes of any leaf and caches evaluated calls while one target is being read."""

    fetch: LeafReader
    evaluated: dict[int, list[Tensor]] = field(default_factory=dict)

    def leaf(self, leaf: Leaf, box: Box, out: Tensor) -> None:
        """Fill `out` with `box` of a leaf of any kind; `fetch` supplies the values of files or of the model."""
        if isinstance(leaf, Computed):
            call = leaf.call
            if id(call) not in self.evaluated:
                args, kwargs = pytree.tree_map(
                    lambda value: self.values(value, full_box(value.shape)) if isinstance(value, LazyTensor) else value,
                    (call.args, call.kwargs),
                )
                outputs = pytree.tree_leaves(call.func(*args, **kwargs))
                self.evaluated[id(call)] = [value for value in outputs if isinstance(value, Tensor)]
            out.copy_(self.evaluated[id(call)][leaf.index][slices(box)])
        elif isinstance(leaf, Reshaped):
            inner, outer = leaf.widened(box)
            out.copy_(self.values(leaf.lazy, inner).reshape(extents(outer))[slices(box, outer)])
        elif isinstance(leaf, Rounded):
            inner = leaf.inner(box)
            out.copy_(rounded(self.values(leaf.lazy, inner), leaf.kind)[slices(box, inner)])
        elif isinstance(leaf, QuantisedTensor):
            out.copy_(leaf.read(box, self.fetch))
        else:
            self.fetch(leaf, box, out)

    def read(self, lazy: LazyTensor, box: Box, out: Tensor) -> None:
        """Fill `out` with `box` of `lazy`; every element must come from exactly one piece."""
        filled = 0
        for piece in lazy.pieces_in(box):
            self._piece(piece, out[slices(piece.dest, box)])
            filled += volume(piece.dest)
        assert filled == volume(box), f"{lazy!r} supplies {filled} of the {volume(box)} elements of {box}"

    def values(self, lazy: LazyTensor, box: Box, dtype: torch.dtype | None = None) -> Tensor:
        """Return `box` of `lazy` as a new tensor on the CPU, in `dtype` or its own."""
        values = torch.empty(extents(box), dtype=dtype or lazy.dtype)
        self.read(lazy, box, values)
        return values

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
