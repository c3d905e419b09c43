"""Run transformers' conversion rules on tensors without values, which know where their values come from.

A `LazyTensor` is a set of disjoint pieces. Stacking, splitting, indexing, transposing and the like only rearrange
pieces, so that transformers' conversion operations run on it unchanged. It is a `torch.Tensor` subclass with
`__torch_dispatch__`, because these operations check `isinstance`. The result of a view function (`chunk`, `tensor[i]`,
`permute`) is derived from the strides of a view of a meta tensor.

After a reshape, the first and last dims that did not change can still be read by range (`Reshaped`). Any other function
is stored as a call and evaluated on full inputs at read time (`Computed`): exact, but it reads more. Functions that
write into their arguments are refused, because a forgotten write would be a wrong weight.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from expertmesh.compat import VIEWS_BY_SIZE, VIEWS_BY_STRIDES, pytree, wrapper_tensor
from expertmesh.io.boxes import Box, Leaf, Piece, full_box, intersect, volume
from expertmesh.state.packed_format import PackedFormat

aten = torch.ops.aten
_HANDLERS: dict[Any, Callable[..., Any]] = {}
_Handler = TypeVar("_Handler", bound=Callable[..., Any])


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
        handler = _HANDLERS.get(func)
        if handler is not None:
            result = handler(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        if func._schema.is_mutable:
            raise NotImplementedError(f"a weight conversion writes with {func}, which lazy tensors cannot follow")
        # Not views by strides: a caller cannot know those of the probe.
        makes_views = func._schema.arguments[0].alias_info is not None and func not in VIEWS_BY_STRIDES
        views = _views(func, *args, **(kwargs or {})) if makes_views else None
        return _compute(func, args, kwargs or {}) if views is None else views

    def __repr__(self) -> str:  # type: ignore[override]
        leaves = ", ".join(dict.fromkeys(piece.leaf.name for piece in self.pieces[:3]))
        return f"LazyTensor({tuple(self.shape)}, {self.dtype}, {len(self.pieces)} pieces of {leaves} ...)"

    def leaves(self) -> list[Leaf]:
        """Return the leaves that have values (file tensors or model tensors), including those behind other leaves."""
        found: dict[int, Leaf] = {}
        for piece in self.pieces:
            inner = piece.leaf.inputs() if isinstance(piece.leaf, (Reshaped, Computed, Rounded)) else None
            for leaf in [piece.leaf] if inner is None else [leaf for lazy in inner for leaf in lazy.leaves()]:
                found[id(leaf)] = leaf
        return list(found.values())


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


def _handles(*functions: Any) -> Callable[[_Handler], _Handler]:
    """Register the handler of a primitive, which rearranges pieces; `NotImplemented` falls back to `Computed`."""

    def register(handler: _Handler) -> _Handler:
        _HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return register


@_handles(aten.clone.default)
def _same(lazy: LazyTensor, **_: Any) -> LazyTensor:
    return LazyTensor(lazy.shape, lazy.dtype, lazy.pieces)


@_handles(aten._to_copy.default)
def _to_copy(lazy: LazyTensor, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    # A cast that preserves every value is done together with the last cast, when values are read.
    if dtype is not None and torch.promote_types(lazy.dtype, dtype) != dtype:
        return NotImplemented
    return LazyTensor(lazy.shape, dtype or lazy.dtype, lazy.pieces)


@_handles(aten.stack.default)
def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    if not all(isinstance(tensor, LazyTensor) for tensor in tensors):
        return NotImplemented
    dim = range(tensors[0].dim() + 1)[dim]
    return _cat([_with_dim(tensor, dim) for tensor in tensors], dim)


def _with_dim(lazy: Tensor, dim: int) -> LazyTensor:
    """Insert a dim of size 1 at `dim`, faster than `unsqueeze`: tens of thousands of experts are stacked."""
    assert isinstance(lazy, LazyTensor)
    pieces = []
    for piece in lazy.pieces:
        dest, dims = (*piece.dest[:dim], (0, 1), *piece.dest[dim:]), (*piece.dims[:dim], None, *piece.dims[dim:])
        pieces.append(Piece(dest, piece.leaf, piece.source, dims))
    return LazyTensor([*lazy.shape[:dim], 1, *lazy.shape[dim:]], lazy.dtype, pieces)


@_handles(aten.cat.default)
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
        assert isinstance(tensor, LazyTensor)
        pieces += [_moved(piece, dim, end) for piece in tensor.pieces]
        end += tensor.shape[dim]
        dtype = torch.promote_types(dtype, tensor.dtype)
    return LazyTensor([*first.shape[:dim], end, *first.shape[dim + 1 :]], dtype, pieces)


@_handles(*VIEWS_BY_SIZE, aten.reshape.default)
def _view(lazy: LazyTensor, shape: Sequence[int]) -> LazyTensor:
    view = _probe(lazy).reshape(shape)
    seen = _seen(lazy, view)
    return LazyTensor.of(Reshaped(lazy, tuple(view.shape))) if seen is None else seen


def _views(func: Any, lazy: LazyTensor, *args: Any, **kwargs: Any) -> Any:
    """Apply a function that makes views (indexing, splitting, permuting, ...) to `lazy`.

    Returns:
        One lazy tensor, or one for each view. None if `_seen` cannot describe one of them.
    """
    views = func(_probe(lazy), *args, **kwargs)
    if isinstance(views, Tensor):
        return _seen(lazy, views)
    seen = [_seen(lazy, view) for view in views]
    return None if any(each is None for each in seen) else seen


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
    for piece in lazy.pieces:
        common = intersect(piece.dest, tuple(window))
        if common is not None:
            moved = [(start - first, stop - first) for (start, stop), (first, _) in zip(common, window, strict=True)]
            dest = tuple((0, 1) if dim is None else moved[dim] for dim in order)
            dims = tuple(None if dim is None else piece.dims[dim] for dim in order)
            pieces.append(Piece(dest, piece.leaf, piece.crop(common).source, dims))
    return LazyTensor(view.shape, lazy.dtype, pieces)


def _moved(piece: Piece, dim: int, by: int) -> Piece:
    start, stop = piece.dest[dim]
    dest = (*piece.dest[:dim], (start + by, stop + by), *piece.dest[dim + 1 :])
    return Piece(dest, piece.leaf, piece.source, piece.dims)
