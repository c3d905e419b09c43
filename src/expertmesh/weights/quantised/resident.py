"""Keep the published codes of frozen weights in memory: find their format, and read the bytes of their units.

Files hold gate and up of each expert apart, or experts stacked; in memory their rows lie one after the other, codes and
scales unchanged. Each row of a linear layer has the scales of its blocks. Nothing here communicates.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from expertmesh.anatomy import describe, packable_linears
from expertmesh.config.errors import InputError
from expertmesh.io.boxes import Box, Piece, extents, full_box, intersect
from expertmesh.io.safetensors_reader import FileTensor
from expertmesh.state.codes import Code, Factor, has_exponents
from expertmesh.state.model_view import sharded
from expertmesh.state.packed_format import PackedFormat, joined
from expertmesh.weights.lazy import LazyTensor, rounded_units
from expertmesh.weights.mapping import LoadPlan
from expertmesh.weights.quantised.tensor import QuantisedTensor


def published_formats(model: nn.Module, plan: LoadPlan) -> dict[str, PackedFormat]:
    """Return the format of each weight whose codes can stay as the files of `plan` hold them, by parameter name.

    A linear layer whose codes cannot stay is left out.

    Raises:
        InputError: The codes of experts cannot stay, or no experts of the model are quantised.
    """
    anatomy = describe(model)
    formats = {}
    for spec in anatomy.experts:
        for leaf in (spec.up, spec.down):
            name = f"{spec.name}.{leaf}"
            if (kind := _format_of(name, plan.tensors[name], spec.transposed)) is not None:
                formats[name] = kind
    if not formats:
        raise _refused("the files hold plain weights; choose nf4, mxfp4, nvfp4 or float8")
    for name in packable_linears(model, anatomy):
        if (kind := _format_of_rows(plan.tensors[f"{name}.weight"])) is not None:
            formats[f"{name}.weight"] = kind
    return formats


def kept_plan(model: nn.Module, plan: LoadPlan) -> LoadPlan:
    """Return `plan` with the values that `model` has after loading, where frozen weights may be quantised."""
    formats: Mapping[str, PackedFormat] = sharded(model).frozen_formats or {}
    quantised = {name: kind for name, kind in formats.items() if not kind.published}
    kept = {name: rounded_units(plan.tensors[name], kind) for name, kind in quantised.items()}
    return replace(plan, tensors=plan.tensors | kept)


def published_bytes(
    lazy: LazyTensor, box: Box, kind: PackedFormat, fetch: Callable[[FileTensor, Box, Tensor], None]
) -> Tensor:
    """Return the bytes `[X, B]` of one expert, or of parts of rows, in `kind`, a format of `published_formats`.

    Raises:
        IntegrityError: As reading values does.
    """
    codes, scales, factors = [], [], []
    for piece in _pieces(lazy, box, kind.transposed):
        leaf = piece.leaf
        assert isinstance(leaf, QuantisedTensor)
        raw, _ = leaf.stored(piece.source, fetch)
        rows, columns = piece.source[-2:]
        codes.append(raw[id(leaf.codes)].contiguous().view(torch.uint8).reshape(-1, kind.row_bytes))
        grid = _blocks(rows, leaf.block[0]), _blocks(columns, leaf.block[1])
        scale = raw[id(leaf.scale)].reshape(len(grid[0]), len(grid[1])).contiguous().view(torch.uint8)
        if kind.by_rows:  # each row gets a copy of the scales of its blocks
            scale = scale.index_select(0, torch.arange(*rows) // leaf.block[0] - grid[0].start)
        scales.append(scale)
        if leaf.global_scale is not None:
            factor = raw[id(leaf.global_scale)].reshape(1, 1).to(torch.float32)
            factors.append(factor.expand(len(codes[-1]), 1) if kind.by_rows else factor)
    units = sum(map(len, codes)) if kind.by_rows else 1  # otherwise all rows belong to one expert
    stored = [torch.cat(parts).reshape(units, -1) for parts in (codes, scales, factors) if parts]
    return joined(stored[0], stored[1], stored[2] if factors else None, kind)


def _blocks(extent: tuple[int, int], size: int) -> range:
    """Return the indices of the blocks of `size` that `extent` touches."""
    return range(extent[0] // size, -(-extent[1] // size))


def _format_of_rows(lazy: LazyTensor) -> PackedFormat | None:
    """Return the format of a linear layer.

    Returns:
        None for plain weights, and for codes that do not cover full rows of the model's matrix.
    """
    whole = full_box(lazy.shape)
    kinds = set()
    for piece in lazy.pieces:
        leaf = piece.leaf
        along = piece.dims == (0, 1) and piece.dest[1] == whole[1] and piece.source[1] == whole[1]
        if not isinstance(leaf, QuantisedTensor) or leaf.zero_point is not None or not along:
            return None
        kinds.add(_kind(leaf))
    if len(kinds) != 1:
        return None
    code, block, scale, factor, dtype = kinds.pop()
    return PackedFormat("as_published", code, (1, block[1]), scale, (1,), lazy.shape[1], factor, dtype, by_rows=True)


def _format_of(name: str, lazy: LazyTensor, transposed: bool) -> PackedFormat | None:
    """Return the format of the experts `name`; None for plain weights.

    Raises:
        InputError: The experts differ in their format.
    """
    found = [isinstance(leaf, QuantisedTensor) for leaf in lazy.leaves()]
    if not any(found):
        return None
    kinds = {_format_of_expert(name, lazy, expert, transposed) for expert in range(lazy.shape[0])}
    if not all(found) or len(kinds) != 1:
        raise _refused(f"the experts of {name} are not all quantised alike")
    return kinds.pop()


def _format_of_expert(name: str, lazy: LazyTensor, expert: int, transposed: bool) -> PackedFormat:
    pieces = list(_pieces(lazy, ((expert, expert + 1), *full_box(lazy.shape)[1:]), transposed))
    first = pieces[0].leaf
    if not isinstance(first, QuantisedTensor):
        raise _cannot_stay(name, first.name)
    columns = lazy.shape[1 if transposed else 2]
    for piece in pieces:
        leaf = piece.leaf
        if not isinstance(leaf, QuantisedTensor) or _kind(leaf) != _kind(first) or leaf.zero_point is not None:
            raise _cannot_stay(name, leaf.name)
        if extents(piece.source)[-2:] != leaf.shape[-2:] or leaf.shape[-1] != columns:
            raise _cannot_stay(name, leaf.name)
    code, block, scale, factor, dtype = _kind(first)
    parts = tuple(piece.leaf.shape[-2] for piece in pieces)
    return PackedFormat("as_published", code, block, scale, parts, columns, factor, dtype, transposed)


def _kind(leaf: QuantisedTensor) -> tuple[Code, tuple[int, int], torch.dtype, Factor, torch.dtype]:
    scale = torch.uint8 if has_exponents(leaf.scale.dtype) else leaf.scale.dtype
    return leaf.code, leaf.block, scale, leaf.factor, leaf.dtype


def _pieces(lazy: LazyTensor, box: Box, transposed: bool) -> Iterator[Piece]:
    """Yield the pieces of `box` in the order of its rows.

    Raises:
        InputError: The columns of `box` do not run along the files' columns.
    """
    rows, columns = (-1, -2) if transposed else (-2, -1)
    found = [piece.crop(common) for piece in lazy.pieces if (common := intersect(piece.dest, box)) is not None]
    for piece in sorted(found, key=lambda piece: piece.dest[rows][0]):
        last = len(piece.leaf.shape) - 1
        if (piece.dims[rows], piece.dims[columns]) != (last - 1, last) or piece.dest[columns] != box[columns]:
            raise _refused(f"{piece.leaf.name} does not hold whole rows of an expert; choose another format")
        yield piece


def _cannot_stay(name: str, stored: str) -> InputError:
    return _refused(f"the codes of {name} cannot stay as {stored} holds them; choose another format")


def _refused(why: str) -> InputError:
    return InputError(f"precision.frozen: as_published: {why}", key="precision.frozen-unsupported")
