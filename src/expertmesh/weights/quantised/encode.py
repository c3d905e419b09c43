"""Save tensors as the codes and scales of a published format: the inverse of `tensor`.

They get the format of the files that the model was loaded from, or one of `FORMATS`. They are assembled one after the
other, each on one rank, in turns, which encodes and writes it. So a rank holds its shards and one full tensor.

A tensor that was loaded from codes can reuse them: every block whose values equal those of its old codes is written
byte for byte as it was, and only changed blocks are rounded again. Names and settings are those that the public tools
write: transformers' FP8, OpenAI's MXFP4 for GPT-OSS, and compressed-tensors for the others. Encoding goes by bands
of rows, one at a time.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from expertmesh.anatomy import dense_linears, describe
from expertmesh.config.errors import InputError
from expertmesh.distributed.all_ranks import raise_on_all_ranks, rank_and_ranks, sum_over_ranks
from expertmesh.io.boxes import Box, extents, full_box, slices
from expertmesh.io.safetensors_reader import FileTensor, WeightFiles
from expertmesh.io.safetensors_writer import OpenFiles
from expertmesh.state.codes import (
    LARGEST,
    codes_of,
    factor_for,
    largest_of_blocks,
    scale_values,
    scales_for,
    spread,
    with_factor,
)
from expertmesh.state.model_view import ModelView, Source
from expertmesh.weights.lazy import LazyTensor, as_lazy
from expertmesh.weights.quantised.published import published_tensors
from expertmesh.weights.quantised.tensor import Fetch, QuantisedTensor
from expertmesh.weights.write import StateReader, assemble, check_ownership

_FP8_BLOCK = (128, 128)
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
_FP4 = {"num_bits": 4, "type": "float", "symmetric": True}
# Formats of compressed-tensors: the name that it gives the format, and its settings.
_COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("pack-quantized", _INT4),
    "mxfp4": ("mxfp4-pack-quantized", {**_FP4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {**_FP4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
    ),
}
FORMATS = ("fp8", *sorted(_COMPRESSED))
AS_LOADED = "as_loaded"
PACKED = (AS_LOADED, *FORMATS)
_BAND_ELEMENTS = 1 << 22
# Values up to this one are rounded to the largest e4m3 value, 448.
_E4M3_ROUNDED = 464.0

_Total = tuple[Tensor | None, bool]


@dataclass(frozen=True, slots=True)
class RoundingError:
    """The rounding error that a format adds to the tensors whose names differ only in numbers."""

    pattern: str
    """Their name with `*` for each number."""
    tensors: int
    """The number of these tensors."""
    error: float
    """The norm of all differences divided by the norm of all values."""
    kept: float
    """The fraction of blocks that were written with the codes that had been read."""


@dataclass(slots=True)
class Rounding:
    """The rounding error of a format so far, in the dtype of the values."""

    error: float = 0.0
    """The sum of the squares of the differences."""
    size: float = 0.0
    """The sum of the squares of the values."""
    blocks: int = 0
    """The number of blocks."""
    kept: int = 0
    """The number of blocks that reused their old codes."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor of values and the parts that it is written as."""

    lazy: LazyTensor
    """The values, with the dims in the order of the codes."""
    leaf: QuantisedTensor
    """The codes, scales and further parts."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The tensors to be written as codes."""

    packed: Mapping[str, Packed] = field(default_factory=dict)
    """The tensors by the names of their values."""
    settings: Mapping[str, Any] | None = None
    """The `quantization_config` to write."""
    sources: tuple[FileTensor, ...] = ()
    """The codes and scales in the files that the model was loaded from, if those hold the same format."""
    copied: tuple[FileTensor, ...] = ()
    """The tensors of `sources` that are copied without decoding."""

    @property
    def parts(self) -> list[FileTensor]:
        """The file tensors that are written for the packed tensors."""
        return [part for packed in self.packed.values() for part in packed.leaf.parts]


def plan_packing(
    view: ModelView, lazies: Mapping[str, LazyTensor], form: object, beside: Mapping[str, LazyTensor] | None = None
) -> Packing:
    """Plan the tensors of `lazies`, which saving `model` writes, that are written as codes.

    Args:
        form: One of `PACKED`; anything else packs no tensor.
        beside: Tensors that are written as values too; the settings name them among those that are not quantised.

    Raises:
        InputError: A tensor cannot be written in this format.
    """
    if form in FORMATS:
        return _in_format(view.module, lazies, str(form), beside or {})
    return _as_loaded(view.attached.source, lazies) if form == AS_LOADED else Packing()


def not_quantised(why: str) -> InputError:
    return InputError(f"dtype as_loaded: {why}; set it to auto", key="weights.not-quantised")


def unsuited(form: object, why: str) -> InputError:
    return InputError(f"{form}: {why}", key="weights.format-unsuited")


def _as_loaded(source: Source, lazies: Mapping[str, LazyTensor]) -> Packing:
    if source.quantisation is None:
        raise not_quantised("the model was not loaded from quantised files")
    files = WeightFiles(Path(), {tensor.name: tensor for tensor in source.packed})
    published = published_tensors(source.quantisation, files)
    packed: dict[str, Packed] = {}
    used: set[str] = set()
    for name in published.quantised:
        (piece,) = published.tensors[name].pieces
        if name not in lazies:
            raise not_quantised(f"{name} of the files is not among the tensors that are saved")
        assert isinstance(piece.leaf, QuantisedTensor)
        order = [piece.dims.index(dim) for dim in range(len(piece.dims))]
        packed[name] = Packed(as_lazy(lazies[name].permute(order)), piece.leaf)
        used.update(part.name for part in piece.leaf.parts)
    copied = tuple(tensor for tensor in source.packed if tensor.name not in used)
    return Packing(packed, source.quantisation, source.packed, copied)


def _in_format(
    model: PreTrainedModel, lazies: Mapping[str, LazyTensor], form: str, beside: Mapping[str, LazyTensor]
) -> Packing:
    """Plan a format of `FORMATS`.

    4-bit formats are for routed experts, fp8 for all linear layers of the blocks except routers.
    """
    stacks, anatomy = form == "mxfp4" and model.config.model_type == "gpt_oss", describe(model)
    chosen = {f"{spec.name}.{each}" for spec in anatomy.experts for each in spec.parameters}
    chosen = {name for name in chosen if not name.endswith("_bias")}
    if form == "fp8":
        chosen |= {f"{name}.weight" for name in dense_linears(model, anatomy)}
    packed: dict[str, Packed] = {}
    for name, lazy in lazies.items():
        if lazy.dim() < 2 or not all(leaf.name in chosen for leaf in lazy.leaves()):
            continue
        if not stacks and (lazy.dim() > 2 or not name.endswith(".weight")):
            why = "holds all experts in one tensor, which transformers reads quantised of GPT-OSS in mxfp4 alone"
            raise unsuited(form, f"{name} {why}; give a plain dtype")
        oriented = as_lazy(lazy.transpose(-1, -2)) if stacks else lazy
        if oriented.shape[-1] % multiple_of(form):
            why = f"has {oriented.shape[-1]} columns, no multiple of {multiple_of(form)}"
            raise unsuited(form, f"{name} {why}; give fp8")
        packed[name] = Packed(oriented, stored_matrix(form, name, tuple(oriented.shape)))
    plain = [name for name, lazy in {**lazies, **beside}.items() if name not in packed and lazy.dim() == 2]
    skipped = sorted(name.removesuffix(".weight") for name in plain if name.endswith(".weight"))
    return Packing(packed, settings_of(form, skipped, stacks=stacks))


def write_packed(
    packing: Packing, files: OpenFiles, values: StateReader, *, from_source: bool
) -> tuple[RoundingError, ...]:
    """Encode and write the packed tensors, each on one rank, in turns.

    Args:
        from_source: Write unchanged blocks with the codes and scales of the files that the model was loaded from.

    Returns:
        The rounding error of each group of tensors.

    Collectives: every rank calls it, on the default group. For each tensor, a reduction of its bytes to one rank, or
    the all-gathers of its inputs if it is computed; for each round of as many tensors as ranks, one small all-reduce.
    Before them the all-reduce of `check_ownership`, and after them one small all-reduce.
    """
    rank, ranks = rank_and_ranks()
    groups, names = _groups(packing.packed), list(packing.packed)
    found: dict[str, Rounding] = {_pattern(name): Rounding() for name in names}
    sources = WeightFiles(Path(), {})
    check_ownership({name: packed.lazy for name, packed in packing.packed.items()})
    with files.synced(), sources:
        before = sources.read if from_source else None
        for first in range(0, len(groups), ranks):
            own: dict[str, Tensor] = {}
            for writer, group in enumerate(groups[first : first + ranks]):
                for name in group:
                    # Every rank assembles every tensor, also those that another rank writes: it is a collective.
                    whole = assemble(packing.packed[name].lazy, values, writer)
                    if writer == rank:
                        assert whole is not None
                        own[name] = whole
            with raise_on_all_ranks("writing quantised weights"):
                leaves = [packing.packed[name].leaf for name in own]
                totals = _totals(leaves, list(own.values()), before)
                for (name, whole), leaf, total in zip(own.items(), leaves, totals, strict=True):
                    for part, box, stored in encode(leaf, whole, found[_pattern(name)], before, total):
                        files.write(part.name, box, stored)
    return _joined(found, names)


def _groups(packed: Mapping[str, Packed]) -> list[list[str]]:
    """Return the names of tensors by the factor that they share, in order.

    Engines multiply gate and up of an expert, which are one parameter here, by the `global_scale` of the gate.
    """
    groups: dict[Any, list[str]] = {}
    for name, each in packed.items():
        piece = each.lazy.pieces[0]
        is_of_expert = each.leaf.global_scale is not None and len(each.lazy.pieces) == 1 and len(piece.source) == 3
        groups.setdefault((piece.leaf.name, piece.source[0]) if is_of_expert else name, []).append(name)
    return list(groups.values())


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _joined(found: Mapping[str, Rounding], names: list[str]) -> tuple[RoundingError, ...]:
    """Combine the rounding errors of all ranks. One all-reduce."""
    numbers = torch.tensor(
        [[each.error, each.size, each.kept, each.blocks] for each in found.values()], dtype=torch.float64
    ).reshape(-1, 4)
    tensors = [_pattern(name) for name in names]
    return tuple(
        RoundingError(pattern, tensors.count(pattern), (error / size) ** 0.5 if size else 0.0, kept / max(blocks, 1))
        for pattern, (error, size, kept, blocks) in zip(found, sum_over_ranks(numbers).tolist(), strict=True)
    )


def multiple_of(form: str) -> int:
    """Return the number that must divide the number of columns."""
    return 1 if form == "fp8" else int(_COMPRESSED[form][1]["group_size"])


def stored_matrix(form: str, name: str, shape: tuple[int, ...]) -> QuantisedTensor:
    """Return the file tensors in which `form` stores the weight `name`.

    Args:
        shape: `[out, in]`, or for GPT-OSS' mxfp4 `[experts, out, in]`.
    """
    *lead, rows, columns = shape

    def part(name: str, dtype: torch.dtype, *shape: int) -> FileTensor:
        return FileTensor(name, dtype, shape, Path(), 0)

    if form == "fp8":
        grid = (-(-rows // _FP8_BLOCK[0]), -(-columns // _FP8_BLOCK[1]))
        scale = part(f"{name}_scale_inv", torch.float32, *grid)
        codes = part(name, torch.float8_e4m3fn, *shape)
        return QuantisedTensor(name, shape, torch.float32, "e4m3", _FP8_BLOCK, codes, scale)
    size = multiple_of(form)
    if not name.endswith(".weight"):
        codes = part(f"{name}_blocks", torch.uint8, *lead, rows, columns // size, size // 2)
        scale = part(f"{name}_scales", torch.uint8, *lead, rows, columns // size)
        return QuantisedTensor(name, shape, torch.float32, "e2m1", (1, size), codes, scale)
    grid = (rows, columns // size)
    if form == "int4":
        return QuantisedTensor(
            name, shape, torch.bfloat16, "int4", (1, size),
            part(f"{name}_packed", torch.int32, rows, columns // 8), part(f"{name}_scale", torch.bfloat16, *grid),
            stored_shape=part(f"{name}_shape", torch.int64, 2),
        )  # fmt: skip
    scale_dtype = torch.uint8 if form == "mxfp4" else torch.float8_e4m3fn
    return QuantisedTensor(
        name, shape, torch.float32, "e2m1", (1, size),
        part(f"{name}_packed", torch.uint8, rows, columns // 2), part(f"{name}_scale", scale_dtype, *grid),
        global_scale=part(f"{name}_global_scale", torch.float32, 1) if form == "nvfp4" else None, global_divides=True,
    )  # fmt: skip


def settings_of(form: str, skipped: list[str], *, stacks: bool) -> dict[str, Any]:
    """Return the `quantization_config` of a format.

    Args:
        skipped: The modules that are not quantised.
        stacks: Experts are stacked in one tensor, as in GPT-OSS.
    """
    if form == "fp8":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": list(_FP8_BLOCK),
            "modules_to_not_convert": skipped,
        }
    if stacks:
        return {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    name, weights = _COMPRESSED[form]
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": name}},
        "ignore": skipped,
    }


def encode(
    leaf: QuantisedTensor,
    values: Tensor,
    rounding: Rounding,
    before: Fetch | None = None,
    total: _Total | None = None,
) -> Iterator[tuple[FileTensor, Box, Tensor]]:
    """Yield the parts of `leaf`, by boxes, that represent `values`, and add their error to `rounding`.

    Args:
        values: The full tensor, of the shape of `leaf`.
        before: Reads the parts that `values` were loaded from. With it, unchanged blocks reuse their codes, and a
            factor of the full tensor is reused as long as it is large enough.
        total: The factor of the full tensor, where several share one; None: that of `values`.

    Returns:
        (part, box of the part, values to store in that box).
    """
    factor, keeps = total or _total(leaf, [values], before)
    for box in _bands(leaf):
        band = values[slices(box)].cpu()
        new = _encoded(leaf, box, band.to(torch.float32), factor)
        same = torch.zeros(_grid(leaf, box), dtype=torch.bool)
        if before is not None and keeps:
            old = leaf.raw(box, before)
            changed = _decoded(leaf, box, old).to(band.dtype) != band
            same = largest_of_blocks(changed.to(torch.uint8), _block(leaf, box)) == 0
            new = {part: _mixed(leaf, box, part, same, old[part], new[part]) for part in new}
        wanted, got = (each.to(torch.float32) for each in (band, _decoded(leaf, box, new).to(band.dtype)))
        rounding.error += float((got - wanted).square_().sum(dtype=torch.float64))
        rounding.size += float(wanted.square().sum(dtype=torch.float64))
        rounding.blocks += same.numel()
        rounding.kept += int(same.sum())
        for part, place in leaf.needed(box):
            yield part, place, new[part]


def _bands(leaf: QuantisedTensor) -> Iterator[Box]:
    """Yield boxes of full blocks, and of full words of zero points, that cover the tensor."""
    *lead, rows, columns = leaf.shape
    step = min(8 * leaf.block[0], rows)
    step *= max(1, _BAND_ELEMENTS // (step * columns))
    for index in itertools.product(*map(range, lead)):
        for start in range(0, rows, step):
            yield (*((at, at + 1) for at in index), (start, min(start + step, rows)), (0, columns))


def _totals(leaves: Sequence[QuantisedTensor], values: Sequence[Tensor], before: Fetch | None) -> list[_Total]:
    """Return the `_total` of tensors that share one: old ones are kept by all of them or by none."""
    if before is not None:
        found = [_total(leaf, [whole], before) for leaf, whole in zip(leaves, values, strict=True)]
        if len(leaves) == 1 or all(is_old for _, is_old in found):
            return found
    return [_total(leaf, values, None) for leaf in leaves]


def _total(leaf: QuantisedTensor, values: Sequence[Tensor], before: Fetch | None) -> _Total:
    """Return the stored factor of the full tensor, for formats that have one, and whether it is the old one.

    Args:
        values: The tensors, of one shape, that share it.
    """
    part, scalar = leaf.global_scale, math.prod(leaf.scale.shape) == 1
    if leaf.zero_point is not None or (part is None and not scalar):
        return None, True
    largest = torch.stack([each[slices(box)].abs().amax() for each in values for box in _bands(leaf)])
    largest = largest.amax().float().cpu()
    # The largest product of a code and a block's scale. The factor times this product must reach the largest value.
    code_max = LARGEST[leaf.code] * (1.0 if part is None else LARGEST["e4m3"])
    part = part or leaf.scale
    if before is not None:
        old = torch.empty(part.shape, dtype=part.dtype)
        before(part, full_box(part.shape), old)
        value = scale_values(old).reshape(())
        unit = 1 / value if part is leaf.global_scale and leaf.global_divides else value
        limit = code_max / LARGEST["e4m3"] * _E4M3_ROUNDED
        if bool(largest <= unit * limit):
            return old, True
    if part is leaf.scale:
        return scales_for(largest, leaf.code, part.dtype).reshape(part.shape), False
    return factor_for(largest, leaf.code, leaf.factor).to(part.dtype).reshape(part.shape), False


def _encoded(leaf: QuantisedTensor, box: Box, values: Tensor, total: Tensor | None) -> dict[FileTensor, Tensor]:
    """Return the stored parts of a band."""
    stored: dict[FileTensor, Tensor] = {}
    points: Tensor | float = 0.0
    if leaf.zero_point is not None:
        # The 16 codes of a block reach from its smallest to its largest value; the zero point is the code of 0.
        high, low = (largest_of_blocks(part.clamp_min(0), _block(leaf, box)) for part in (values, -values))
        scale = torch.where(high + low == 0, 1.0, (high + low) / 15).to(leaf.scale.dtype)
        points_GG = (low / scale.to(torch.float32) - 8).round().clamp(-8, 7)
        points = spread(points_GG, leaf.block, box)
        packed = F.pad(points_GG, (0, 0, 0, -points_GG.shape[-2] % leaf.per_element))
        words = codes_of(packed.transpose(-1, -2).contiguous(), leaf.code).view(leaf.zero_point.dtype)
        stored[leaf.zero_point] = words.transpose(-1, -2).contiguous()
    elif total is not None and leaf.global_scale is None:
        scale = total
    else:
        largest = largest_of_blocks(values, _block(leaf, box))
        if leaf.powers_of_two:
            scale = scale_values(scales_for(largest, leaf.code, torch.uint8)).to(leaf.scale.dtype)
        else:
            scale = scales_for(largest, leaf.code, leaf.scale.dtype, total, leaf.factor)
    factors = scale_values(scale).reshape((1,) * len(box) if scale.numel() == 1 else _grid(leaf, box))
    if leaf.global_scale is not None:
        assert total is not None
        factors = with_factor(factors, total, leaf.factor)
        stored[leaf.global_scale] = total
    units = values / spread(factors, leaf.block, box) + points
    codes = codes_of(units, leaf.code)
    if leaf.stored_shape is not None:
        stored[leaf.stored_shape] = torch.tensor(leaf.shape, dtype=leaf.stored_shape.dtype)
    boxes = dict(leaf.needed(box))
    stored[leaf.codes] = codes.view(leaf.codes.dtype).reshape(extents(boxes[leaf.codes]))
    stored[leaf.scale] = scale.reshape(extents(boxes[leaf.scale]))
    return stored


def _mixed(leaf: QuantisedTensor, box: Box, part: FileTensor, same: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Return `old` where a block is the `same`, else `new`; both are the stored elements of one part."""
    if part is leaf.codes:
        mask = spread(same, leaf.block, box)[..., :: leaf.per_element].reshape(old.shape)
    elif part is leaf.scale:
        mask = same.reshape(old.shape)
    elif part is leaf.zero_point:
        # A word holds the zero points of eight blocks, so the mask covers four bits for each block.
        nibbles = F.pad(same, (0, 0, 0, -same.shape[-2] % 8)).transpose(-1, -2).unflatten(-1, (-1, 8)).to(torch.int64)
        bits_of_same: Tensor = (nibbles * 15 << torch.arange(0, 32, 4)).sum(-1).to(torch.int32).transpose(-1, -2)
        return (old & bits_of_same | new & ~bits_of_same).contiguous()
    else:
        return old
    bits = torch.uint8 if old.itemsize == 1 else old.dtype  # not every torch operation supports 8-bit floats
    return torch.where(mask, old.view(bits), new.view(bits)).view(old.dtype)


def _decoded(leaf: QuantisedTensor, box: Box, parts: dict[FileTensor, Tensor]) -> Tensor:
    def fetch(part: FileTensor, _: Box, out: Tensor) -> None:
        out.copy_(parts[part])

    return leaf.read(box, fetch)


def _block(leaf: QuantisedTensor, box: Box) -> tuple[int, int]:
    """Return the block size inside `box`; a block of the full tensor becomes the full box."""
    rows, columns = extents(box)[-2:]
    return min(leaf.block[0], rows), min(leaf.block[1], columns)


def _grid(leaf: QuantisedTensor, box: Box) -> tuple[int, ...]:
    """Return the shape of the grid of blocks in `box`."""
    rows, columns = extents(box)[-2:]
    return (*extents(box)[:-2], -(-rows // leaf.block[0]), -(-columns // leaf.block[1]))
