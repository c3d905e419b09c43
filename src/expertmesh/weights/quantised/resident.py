"""Find the format in which the published codes of frozen weights can stay in memory.

Files hold gate and up of each expert apart, or experts stacked; in memory their rows lie one after the other, codes and
scales unchanged. Each row of a linear layer has the scales of its blocks. `tensor` reads the bytes.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from expertmesh.anatomy import describe, packable_linears
from expertmesh.config.errors import InputError
from expertmesh.io.boxes import extents, full_box
from expertmesh.state.codes import Code, Factor, PackedFormat, has_exponents
from expertmesh.state.model_view import sharded
from expertmesh.weights.lazy import LazyTensor, rounded_units
from expertmesh.weights.mapping import LoadPlan
from expertmesh.weights.quantised.tensor import QuantisedTensor, cannot_keep, in_order_of_rows


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
        raise cannot_keep("the files hold plain weights; choose nf4, mxfp4, nvfp4 or float8")
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
        raise cannot_keep(f"the experts of {name} are not all quantised alike")
    return kinds.pop()


def _format_of_expert(name: str, lazy: LazyTensor, expert: int, transposed: bool) -> PackedFormat:
    box = ((expert, expert + 1), *full_box(lazy.shape)[1:])
    pieces = in_order_of_rows(lazy.inside(box), box, transposed)
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


def _cannot_stay(name: str, stored: str) -> InputError:
    return cannot_keep(f"the codes of {name} cannot stay as {stored} holds them; choose another format")
