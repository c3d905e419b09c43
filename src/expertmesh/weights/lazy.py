"""Tensors without values that know where their values come from: what transformers' conversion rules run on.

A `LazyTensor` is a set of disjoint pieces. Stacking, splitting, indexing, transposing and the like only rearrange
pieces, so that transformers' conversion operations run on it unchanged. They ask `isinstance`, so it is a
`torch.Tensor` subclass; it handles the dozen primitives (`__torch_dispatch__`) that `chunk`, `narrow`, `tensor[i]` and
`reshape` become.

The dims that a reshape leaves alone can still be read by range (`Reshaped`). Any other function is kept as a call, and
evaluated on whole inputs when it is read (`Computed`): exact, but it reads more. Functions that write into their
arguments are refused, because a forgotten write would be a wrong weight.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from expertmesh.io.boxes import Box, full_box, intersect, volume
from expertmesh.io.pieces import Leaf, Piece

aten = torch.ops.aten
_HANDLERS: dict[Any, Callable[..., Any]] = {}
_Handler = TypeVar("_Handler", bound=Callable[..., Any])


class LazyTensor(torch.Tensor):
    """A tensor on meta made of pieces; see the top of this file. Values are the same whatever the strides."""

    pieces: tuple[Piece, ...]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[Piece]) -> "LazyTensor":
        lazy: LazyTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=torch.device("meta")
        )
        lazy.pieces = tuple(pieces)
        return lazy

    @classmethod
    def of(cls, leaf: Leaf) -> "LazyTensor":
        """All of one leaf."""
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
        return _compute(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        leaves = ", ".join(dict.fromkeys(piece.leaf.name for piece in self.pieces[:3]))
        return f"LazyTensor({tuple(self.shape)}, {self.dtype}, {len(self.pieces)} pieces of {leaves} ...)"

    def leaves(self) -> list[Leaf]:
        """The leaves with values (files' or the model's tensors), also those behind other leaves."""
        found: dict[int, Leaf] = {}
        for piece in self.pieces:
            inner = piece.leaf.inputs() if isinstance(piece.leaf, (Reshaped, Computed)) else None
            for leaf in [piece.leaf] if inner is None else [leaf for lazy in inner for leaf in lazy.leaves()]:
                found[id(leaf)] = leaf
        return list(found.values())


@dataclass(frozen=True, slots=True, eq=False)
class Reshaped:
    """A lazy tensor seen in another shape. Dims that the reshape leaves alone are still read by range."""

    lazy: LazyTensor
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"reshaped {self.lazy!r}"

    @property
    def dtype(self) -> torch.dtype:
        return self.lazy.dtype

    def inputs(self) -> list[LazyTensor]:
        return [self.lazy]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A function and its arguments, lazy tensors among them."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """Output number `index` of a call that is evaluated when it is read."""

    call: Call
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.call.func} of {', '.join(leaf.name for lazy in self.inputs() for leaf in lazy.leaves())}"

    def inputs(self) -> list[LazyTensor]:
        flat = pytree.tree_leaves((self.call.args, self.call.kwargs))
        return [value for value in flat if isinstance(value, LazyTensor)]


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
    """Register what a primitive does to pieces; `NotImplemented` as its result falls back to `Computed`."""

    def register(handler: _Handler) -> _Handler:
        _HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return register


@_handles(aten.alias.default, aten.detach.default, aten.clone.default, aten.lift_fresh.default)
def _same(lazy: LazyTensor, **_: Any) -> LazyTensor:
    return LazyTensor(lazy.shape, lazy.dtype, lazy.pieces)


@_handles(aten._to_copy.default)
def _to_copy(lazy: LazyTensor, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    # A cast that keeps every value is left to the one cast at the end.
    if dtype is not None and torch.promote_types(lazy.dtype, dtype) != dtype:
        return NotImplemented
    return LazyTensor(lazy.shape, dtype or lazy.dtype, lazy.pieces)


@_handles(aten.stack.default)
def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    if not all(isinstance(tensor, LazyTensor) for tensor in tensors):
        return NotImplemented
    dim = _wrap(dim, tensors[0].dim() + 1)
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim)


@_handles(aten.cat.default)
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    if not all(isinstance(tensor, LazyTensor) and tensor.dim() for tensor in tensors):
        return NotImplemented
    first = tensors[0]
    dim, dtype = _wrap(dim, first.dim()), first.dtype
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


@_handles(aten.split.Tensor)
def _split(lazy: LazyTensor, split_size: int, dim: int = 0) -> list[LazyTensor]:
    size = lazy.shape[_wrap(dim, lazy.dim())]
    sizes = [min(split_size, size - start) for start in range(0, size, split_size)] if split_size else [0]
    return _split_with_sizes(lazy, sizes or [0], dim)


@_handles(aten.split_with_sizes.default)
def _split_with_sizes(lazy: LazyTensor, sizes: Sequence[int], dim: int = 0) -> list[LazyTensor]:
    dim = _wrap(dim, lazy.dim())
    if sum(sizes) != lazy.shape[dim]:
        raise ValueError(f"cannot split dim {dim} of shape {tuple(lazy.shape)} into {list(sizes)}")
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [_narrow(lazy, dim, start, start + size) for start, size in zip(starts, sizes, strict=True)]


@_handles(aten.unbind.int)
def _unbind(lazy: LazyTensor, dim: int = 0) -> list[LazyTensor]:
    return [_select(lazy, dim, index) for index in range(lazy.shape[_wrap(dim, lazy.dim())])]


@_handles(aten.slice.Tensor)
def _slice(lazy: LazyTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    if step != 1:
        return NotImplemented
    dim = _wrap(dim, lazy.dim())
    first, last, _ = slice(start, end).indices(lazy.shape[dim])
    return _narrow(lazy, dim, first, max(first, last))


@_handles(aten.select.int)
def _select(lazy: LazyTensor, dim: int, index: int) -> LazyTensor:
    dim = _wrap(dim, lazy.dim())
    index = _wrap(index, lazy.shape[dim])
    return _without_dim(_narrow(lazy, dim, index, index + 1), dim)


@_handles(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(lazy: LazyTensor, dims: int | Sequence[int] | None = None) -> LazyTensor:
    chosen = range(lazy.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    for dim in sorted({_wrap(dim, lazy.dim()) for dim in chosen}, reverse=True):
        if lazy.shape[dim] == 1:
            lazy = _without_dim(lazy, dim)
    return _same(lazy)


@_handles(aten.unsqueeze.default)
def _unsqueeze(lazy: Tensor, dim: int) -> LazyTensor:
    assert isinstance(lazy, LazyTensor)
    dim = _wrap(dim, lazy.dim() + 1)
    return _rearranged(lazy, [*range(dim), None, *range(dim, lazy.dim())])


@_handles(aten.permute.default)
def _permute(lazy: LazyTensor, dims: Sequence[int]) -> LazyTensor:
    return _rearranged(lazy, [_wrap(dim, lazy.dim()) for dim in dims])


@_handles(aten.transpose.int)
def _transpose(lazy: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    order = list(range(lazy.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(lazy, order)


@_handles(aten.t.default)
def _t(lazy: LazyTensor) -> LazyTensor:
    return _permute(lazy, list(reversed(range(lazy.dim()))))


@_handles(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(lazy: LazyTensor, shape: Sequence[int]) -> Any:
    inner = tuple(lazy.shape)
    known = math.prod(size for size in shape if size != -1)
    outer = tuple(math.prod(inner) // known if size == -1 and known else size for size in shape)
    if math.prod(outer) != math.prod(inner):
        raise ValueError(f"cannot view shape {inner} as {tuple(shape)}")
    mapping: dict[int, int] = {}
    for inner_dims, outer_dims in dim_groups(inner, outer):
        same = matching_dim(inner, outer, inner_dims, outer_dims)
        if same is None and any(inner[dim] != 1 for dim in inner_dims):
            return LazyTensor.of(Reshaped(lazy, outer))
        if same is not None:
            mapping[same[1]] = same[0]
    return _rearranged(lazy, [mapping.get(dim) for dim in range(len(outer))])


def _rearranged(lazy: LazyTensor, order: Sequence[int | None]) -> LazyTensor:
    """The dims `order` of `lazy`; a new dim of size 1 where it says None. Dims that are not in it have size 1."""
    pieces = [
        Piece(
            tuple((0, 1) if dim is None else piece.dest[dim] for dim in order),
            piece.leaf,
            piece.source,
            tuple(None if dim is None else piece.dims[dim] for dim in order),
        )
        for piece in lazy.pieces
    ]
    return LazyTensor([1 if dim is None else lazy.shape[dim] for dim in order], lazy.dtype, pieces)


def _narrow(lazy: LazyTensor, dim: int, start: int, stop: int) -> LazyTensor:
    window: Box = (*full_box(lazy.shape)[:dim], (start, stop), *full_box(lazy.shape)[dim + 1 :])
    pieces = []
    for piece in lazy.pieces:
        common = intersect(piece.dest, window)
        if common is not None:
            pieces.append(_moved(piece.crop(common), dim, -start))
    return LazyTensor([*lazy.shape[:dim], stop - start, *lazy.shape[dim + 1 :]], lazy.dtype, pieces)


def _without_dim(lazy: LazyTensor, dim: int) -> LazyTensor:
    """Drop a dim of size 1; the leaf's dim behind it, if any, keeps its extent of 1."""
    return _rearranged(lazy, [other for other in range(lazy.dim()) if other != dim])


def _moved(piece: Piece, dim: int, by: int) -> Piece:
    start, stop = piece.dest[dim]
    dest = (*piece.dest[:dim], (start + by, stop + by), *piece.dest[dim + 1 :])
    return Piece(dest, piece.leaf, piece.source, piece.dims)


def _wrap(dim: int, count: int) -> int:
    if not -count <= dim < count:
        raise IndexError(f"{dim} is out of range for {count}")
    return dim % count


def dim_groups(inner: tuple[int, ...], outer: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Cut both shapes of a reshape into the shortest runs of dims that hold the same number of elements."""
    if math.prod(inner) == 0:
        return [(list(range(len(inner))), list(range(len(outer))))]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(inner) or j < len(outer):
        start_i, start_j, size_i, size_j = i, j, 1, 1
        while size_i != size_j or (start_i, start_j) == (i, j):
            if j >= len(outer) or (size_i <= size_j and i < len(inner)):
                size_i, i = size_i * inner[i], i + 1
            else:
                size_j, j = size_j * outer[j], j + 1
        groups.append((list(range(start_i, i)), list(range(start_j, j))))
    return groups


def matching_dim(
    inner: tuple[int, ...], outer: tuple[int, ...], inner_dims: list[int], outer_dims: list[int]
) -> tuple[int, int] | None:
    """The (inner, outer) dims of a group that the reshape leaves alone (size-1 dims aside), if it does."""
    long_inner = [dim for dim in inner_dims if inner[dim] != 1]
    long_outer = [dim for dim in outer_dims if outer[dim] != 1]
    return (long_inner[0], long_outer[0]) if len(long_inner) == len(long_outer) == 1 else None
