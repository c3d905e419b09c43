"""Published codes of routed experts that stay as they are in memory: in which format, and the bytes of one expert.

Files hold gate and up of each expert apart, or experts stacked; in memory their rows lie one after the other, codes and
scales unchanged. Nothing here communicates.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from expertmesh.anatomy import describe
from expertmesh.config.errors import InputError
from expertmesh.io.boxes import Box, extents, intersect
from expertmesh.io.pieces import Piece
from expertmesh.io.safetensors_reader import FileTensor
from expertmesh.state.packed_format import Code, PackedFormat, joined
from expertmesh.state.sharded_model import sharded
from expertmesh.weights.lazy import LazyTensor, rounded_experts
from expertmesh.weights.mapping import LoadPlan
from expertmesh.weights.quantised.tensor import Encoding, QuantisedTensor

_CODES: dict[Encoding, Code] = {Encoding.E4M3: "e4m3", Encoding.E2M1: "e2m1", Encoding.INT4: "int4"}


def published_formats(model: nn.Module, plan: LoadPlan) -> dict[str, PackedFormat]:
    """The format of each expert matrix whose codes can stay as the files of `plan` hold them, by parameter name.

    Raises `InputError` for codes that cannot stay, and for a model none of whose experts are quantised.
    """
    formats = {}
    for spec in describe(model).experts:
        for leaf in (spec.up, spec.down):
            name = f"{spec.name}.{leaf}"
            if (kind := _format_of(name, plan.tensors[name], spec.transposed)) is not None:
                formats[name] = kind
    if not formats:
        raise _refused("the files hold plain weights; choose nf4, mxfp4, nvfp4 or float8")
    return formats


def kept_plan(model: nn.Module, plan: LoadPlan) -> LoadPlan:
    """`plan` with the values that `model` keeps, whose experts may be quantised when they are loaded."""
    formats: Mapping[str, PackedFormat] = sharded(model).frozen_formats or {}
    quantised = {name: kind for name, kind in formats.items() if not kind.published}
    kept = {name: rounded_experts(plan.tensors[name], kind) for name, kind in quantised.items()}
    return replace(plan, tensors=plan.tensors | kept)


def published_bytes(
    lazy: LazyTensor, expert: int, kind: PackedFormat, fetch: Callable[[FileTensor, Box, Tensor], None]
) -> Tensor:
    """One expert's bytes in `kind`, a format of `published_formats`. Raises `IntegrityError` as reading values does."""
    codes, scales, factors = [], [], []
    for piece in _pieces(lazy, expert, kind.transposed):
        leaf = piece.leaf
        assert isinstance(leaf, QuantisedTensor)
        raw, _ = leaf.stored(piece.source, fetch)
        codes.append(raw[id(leaf.codes)].contiguous().view(torch.uint8).reshape(-1, kind.row_bytes))
        scales.append(raw[id(leaf.scale)].reshape(-1, kind.grid[1]))
        if leaf.global_scale is not None:
            factors.append(raw[id(leaf.global_scale)].reshape(1).to(torch.float32))
    return joined(torch.cat(codes), _cat_bytes(scales), torch.cat(factors) if factors else None, kind)


def _cat_bytes(scales: list[Tensor]) -> Tensor:
    """Joined on the rows; torch has no `cat` of 8-bit floats."""
    return torch.cat([each.contiguous().view(torch.uint8) for each in scales])


def _format_of(name: str, lazy: LazyTensor, transposed: bool) -> PackedFormat | None:
    """None for plain weights. Experts that differ in anything are refused."""
    found = [isinstance(leaf, QuantisedTensor) for leaf in lazy.leaves()]
    if not any(found):
        return None
    kinds = {_format_of_expert(name, lazy, expert, transposed) for expert in range(lazy.shape[0])}
    if not all(found) or len(kinds) != 1:
        raise _refused(f"the experts of {name} are not all quantised alike")
    return kinds.pop()


def _format_of_expert(name: str, lazy: LazyTensor, expert: int, transposed: bool) -> PackedFormat:
    pieces = list(_pieces(lazy, expert, transposed))
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
    return PackedFormat(
        "as_published",
        *_kind(first)[:3],
        tuple(piece.leaf.shape[-2] for piece in pieces),
        columns,
        "none" if first.global_scale is None else "divides" if first.global_divides else "times",
        first.dtype,
        transposed,
    )


def _kind(leaf: QuantisedTensor) -> tuple[Code, tuple[int, int], torch.dtype, bool, bool, torch.dtype]:
    scale = torch.uint8 if leaf.scale.dtype == torch.float8_e8m0fnu else leaf.scale.dtype
    has_factor = leaf.global_scale is not None
    return _CODES[leaf.encoding], leaf.block, scale, has_factor, leaf.global_divides, leaf.dtype


def _pieces(lazy: LazyTensor, expert: int, transposed: bool) -> Iterator[Piece]:
    """What one expert's matrix consists of, in the order of its rows; their columns have to run along the columns."""
    rows, columns = (2, 1) if transposed else (1, 2)
    own: Box = ((expert, expert + 1), *((0, size) for size in lazy.shape[1:]))
    found = [piece.crop(common) for piece in lazy.pieces if (common := intersect(piece.dest, own)) is not None]
    for piece in sorted(found, key=lambda piece: piece.dest[rows][0]):
        last = len(piece.leaf.shape) - 1
        if (piece.dims[rows], piece.dims[columns]) != (last - 1, last) or piece.dest[columns] != own[columns]:
            raise _refused(f"{piece.leaf.name} does not hold whole rows of an expert; choose another format")
        yield piece


def _cannot_stay(name: str, stored: str) -> InputError:
    return _refused(f"the codes of {name} cannot stay as {stored} holds them; choose another format")


def _refused(why: str) -> InputError:
    return InputError(f"precision.frozen: as_published: {why}", key="precision.frozen-unsupported")
