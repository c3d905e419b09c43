"""Convert between values and the codes and scales that represent them, for files and for memory.

A code is the nearest one, ties to even. A scale maps the largest value of a block to the largest code. Scales that are
powers of two (e8m0) can only come close: for 4 bits they are rounded as compressed-tensors, AMD Quark and torchao's
`even` mode round them, which has the least error of the published rules (docs/quantised.md); for 8 bits upwards.

Sources: OCP Microscaling Formats (MX) v1.0 for e2m1 and e8m0; the packing of compressed-tensors 0.20 for int4; the
table of QLoRA (arXiv 2305.14314) for nf4, which is bitsandbytes'; the published files of DeepSeek-V3/V4, GPT-OSS and
Kimi-K2 for the order of nibbles: a byte holds two 4-bit codes, the even column in its low bits.

A `PackedFormat` says where factors, scales and codes lie in the bytes of one unit of a frozen weight in memory. No
parallel layout splits a unit: it is the matrix of one expert, or one row of a linear layer's weight (`by_rows`). Blocks
lie inside a unit in the orientation of published files, `[out, in]`; the columns are `in`.

    X units, R rows, C columns, G scales
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from expertmesh.config.errors import InputError

Code = Literal["nf4", "e2m1", "int4", "e4m3"]
# The effect of one further number for a full matrix on its scales.
Factor = Literal["none", "times", "divides"]

LARGEST: dict[Code, float] = {"nf4": 1.0, "e2m1": 6.0, "int4": 7.5, "e4m3": 448.0}
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E8M0_BIAS, _E8M0_NAN, _INT4_OFFSET = 127, 255, 8
# Smaller values would have a factor that is not finite.
_LEAST = 2.0**-100


class Scratch:
    """Memory for intermediate results, one tensor of each dtype.

    Code that dequantises one part after the other reuses the same pages, which saves a third of the time on a CPU.
    """

    def __init__(self) -> None:
        self._held: dict[torch.dtype, Tensor] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor, valid until the next tensor of this dtype is taken."""
        size, held = math.prod(shape), self._held.get(dtype)
        if held is None or held.numel() < size:
            held = self._held[dtype] = torch.empty(size, dtype=dtype, device=device)
        return held[:size].view(*shape)


def values_of(codes: Tensor, code: Code, scratch: Scratch | None = None) -> Tensor:
    """Return the fp32 values of codes.

    Each byte is looked up once; a byte with two 4-bit codes yields both values in one look-up.

    Args:
        codes: Bytes or words `[..., n]`.

    Returns:
        `[..., n]` for 8-bit codes, `[..., 2n]` for bytes of 4-bit codes, `[..., 8n]` for words of them. With `scratch`
        the result lies in it.
    """
    *lead, last = codes.shape
    scratch, device = scratch or Scratch(), codes.device
    stored = codes.contiguous().flatten().view(torch.uint8)
    index = scratch.take(stored.shape, torch.int32, device).copy_(stored)
    if code == "e4m3":
        values = scratch.take(index.shape, torch.float32, device)
        return torch.index_select(_bytes(torch.float8_e4m3fn, device), 0, index, out=values).view(codes.shape)
    pairs = scratch.take(index.shape, torch.int64, device)
    torch.index_select(_pairs(code, device), 0, index, out=pairs)
    return pairs.view(torch.float32).view(*lead, 2 * last * codes.itemsize)


def codes_of(units: Tensor, code: Code) -> Tensor:
    """Return the bytes of the nearest codes of `units`.

    Args:
        units: Values `[..., n]` in fp32, already divided by their scales. A value beyond the largest code gets that
            code.

    Returns:
        `[..., n]` uint8 for 8-bit codes, `[..., n / 2]` for 4-bit codes.
    """
    if code == "e4m3":
        return units.clamp(-LARGEST[code], LARGEST[code]).to(torch.float8_e4m3fn).view(torch.uint8)
    if code == "e2m1":
        size = units.abs().clamp_max_(LARGEST["e2m1"])
        # Codes count steps of 0.5 up to 2, of 1 from 2 to 4, and of 2 from 4 to 6. `round` goes to an even number of
        # steps at a tie, and an even number of steps is an even code.
        upper = torch.where(size < 4, size.round().add_(2), (size / 2).round_().add_(4))
        steps = torch.where(size < 2, (2 * size).round_(), upper)
        nibbles = steps.to(torch.uint8) | units.signbit().to(torch.uint8) << 3
    elif code == "int4":
        nibbles = (units.round().clamp_(-_INT4_OFFSET, _INT4_OFFSET - 1) + _INT4_OFFSET).to(torch.uint8)
    else:
        table = torch.tensor(_NF4, device=units.device)
        nibbles = torch.bucketize(units, (table[1:] + table[:-1]) / 2).to(torch.uint8)
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def scale_values(scale: Tensor) -> Tensor:
    """Return scales in fp32. A byte is an e8m0 exponent: 2 ** (byte - 127), and 255 is not a number."""
    if scale.dtype.itemsize > 1:
        return scale.to(torch.float32)
    # A table of all 256 values, because torch's casts of 8-bit floats are slow on a CPU.
    dtype = torch.uint8 if has_exponents(scale.dtype) else scale.dtype
    index = scale.contiguous().view(torch.uint8).flatten().to(torch.int32)
    return _bytes(dtype, scale.device).index_select(0, index).view(scale.shape)


def with_factor(scales: Tensor, factor: Tensor | None, how: Factor) -> Tensor:
    """Return fp32 scales multiplied or divided by a factor that broadcasts, if there is one."""
    if factor is None:
        return scales
    return scales / factor if how == "divides" else scales * factor


def scales_for(
    largest: Tensor, code: Code, dtype: torch.dtype, factor: Tensor | None = None, how: Factor = "none"
) -> Tensor:
    """Return one scale for each block, as it is stored in `dtype`.

    Args:
        largest: The largest magnitude of each block. A block of zeros gets the scale 1; a magnitude that is not finite
            gets a scale that is not finite.
        factor: The further factor of all scales, if the format has one.
        how: The effect of the factor.
    """
    if has_exponents(dtype):
        mantissa, exponent = torch.frexp(largest)
        # The largest e4m3 value, 448, is 0.875 * 2 ** 9. The largest e2m1 value is 0.75 * 2 ** 3, and is the nearest
        # code of values below 0.875 * 2 ** 3.
        next_one = mantissa > 0.875 if code == "e4m3" else mantissa >= 0.875
        power = exponent + next_one.to(torch.int32) - (9 if code == "e4m3" else 3)
        power = power.masked_fill(largest == 0, 0).clamp(-_E8M0_BIAS, _E8M0_BIAS) + _E8M0_BIAS
        return power.masked_fill(~largest.isfinite(), _E8M0_NAN).to(torch.uint8).view(dtype)
    scales = largest / LARGEST[code]
    if factor is not None:
        scales = scales * factor if how == "divides" else scales / factor
    smallest = torch.finfo(dtype).smallest_normal if dtype.itemsize > 1 else 2.0**-9
    if dtype == torch.float8_e4m3fn:
        scales = scales.clamp_max(LARGEST["e4m3"])
    return torch.where(largest == 0, 1.0, scales.to(dtype).to(torch.float32).clamp_min(smallest)).to(dtype)


def factor_for(largest: Tensor, code: Code, how: Factor) -> Tensor:
    """Return the factor of a matrix with e4m3 scales, or 1 if all values are zero.

    With this factor the largest value has the largest scale and the largest code.
    """
    most = LARGEST[code] * LARGEST["e4m3"]
    some = largest.clamp_min(_LEAST)
    return torch.where(largest == 0, 1.0, most / some if how == "divides" else some / most)


def has_exponents(dtype: torch.dtype) -> bool:
    """Return whether scales in `dtype` are powers of two."""
    return dtype in (torch.uint8, torch.float8_e8m0fnu)


def largest_of_blocks(values: Tensor, block: Sequence[int]) -> Tensor:
    """Return the largest magnitude in each block of (rows, columns) of the last two dims.

    The last blocks may be partial.
    """
    rows, columns = values.shape[-2:]
    padded = F.pad(values.abs(), (0, -columns % block[1], 0, -rows % block[0]))
    largest: Tensor = padded.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0])).amax(dim=(-3, -1))
    return largest


def spread(scales: Tensor, block: Sequence[int], box: Sequence[tuple[int, int]]) -> Tensor:
    """Return the scale of each element of `box`.

    The last two dims of the tensor are divided into blocks of `block` = (rows, columns).

    Args:
        scales: One scale for each block that `box` touches. The box may split the first and the last of them, and the
            last block of the tensor may be partial.
    """
    for dim, size in ((-2, block[0]), (-1, block[1])):
        start, stop = box[dim]
        place = torch.arange(start, stop, device=scales.device) // size - start // size
        scales = scales.index_select(dim, place)
    return scales


@cache
def _bytes(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the fp32 value of each byte as an 8-bit float, or as e8m0 if `dtype` is uint8."""
    byte = torch.arange(256, dtype=torch.uint8)
    if dtype != torch.uint8:
        return byte.view(dtype).to(torch.float32).to(device)
    values = torch.ldexp(torch.ones(256), byte.to(torch.int32) - _E8M0_BIAS)
    values[_E8M0_NAN] = torch.nan
    return values.to(device)


@cache
def _pairs(code: Code, device: torch.device) -> Tensor:
    """Return, for each byte, the fp32 values of its two codes as the bits of one int64."""
    values = {"nf4": _NF4, "e2m1": _E2M1, "int4": [float(number - _INT4_OFFSET) for number in range(16)]}[code]
    table = torch.tensor(values, dtype=torch.float32, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([table[byte & 15], table[byte >> 4]], dim=-1).view(torch.int64).flatten()


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """The format of one unit: `rows` x `columns` as published, or `transposed` in the model."""

    name: str
    """The value of `precision.frozen`."""
    code: Code
    """The code of one value."""
    block: tuple[int, int]
    """(rows, columns) of a block, which has one scale; the last blocks may be partial."""
    scale: torch.dtype
    """The stored dtype of scales; uint8 is an exponent (e8m0)."""
    parts: tuple[int, ...]
    """The rows of each matrix that a published file stores separately, gate and up. Blocks start again in each part."""
    columns: int
    """The columns of each matrix."""
    factor: Factor = "none"
    """The effect of each part's factor on all of its scales."""
    rounded: torch.dtype = torch.float32
    """The dtype that a value is rounded to before the cast to the model's dtype."""
    transposed: bool = False
    """The model stores `[columns, rows]`."""
    by_rows: bool = False
    """A unit is one row of a matrix."""

    @property
    def published(self) -> bool:
        """True if the codes are those of the files."""
        return self.name == "as_published"

    @property
    def rows(self) -> int:
        return sum(self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one unit in the model."""
        if self.by_rows:
            return (self.columns,)
        return (self.columns, self.rows) if self.transposed else (self.rows, self.columns)

    @property
    def grid(self) -> tuple[int, int]:
        """The number of scales: rows, columns."""
        return sum(-(-part // self.block[0]) for part in self.parts), -(-self.columns // self.block[1])

    @property
    def row_bytes(self) -> int:
        """The bytes of the codes of one row."""
        return self.columns if self.code == "e4m3" else self.columns // 2

    @property
    def sections(self) -> tuple[int, int, int]:
        """The ends of factors, scales and codes in a unit's bytes.

        Scales start at a multiple of 4 bytes, codes at a multiple of 4 or 16.
        """
        factors = 0 if self.factor == "none" else 4 * len(self.parts)
        scales = factors + math.prod(self.grid) * self.scale.itemsize
        scales += -scales % self._alignment
        return factors, scales, scales + self.rows * self.row_bytes

    @property
    def bytes(self) -> int:
        """The bytes of one unit."""
        end = self.sections[2]
        return end + -end % self._alignment

    @property
    def _alignment(self) -> int:
        return 4 if self.by_rows else 16

    def whole_blocks(self, box: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Widen a box inside units of the model to full blocks, or to full units if these have a factor."""
        if self.factor != "none":
            return tuple((0, size) for size in self.shape)
        block = self.block[::-1] if self.transposed else self.block[-len(self.shape) :]
        sides = zip(box, self.shape, block, strict=True)
        return tuple((start // run * run, min(size, -(-stop // run) * run)) for (start, stop), size, run in sides)


def not_packed(frozen: str, why: str) -> InputError:
    return InputError(f"precision.frozen: {frozen}: {why}", key="precision.frozen-unsupported")


def quantised_format(
    name: str, rows: int, columns: int, *, transposed: bool = False, by_rows: bool = False
) -> PackedFormat:
    """Return the format of `precision.frozen: name` for plain matrices `[rows, columns]` to be quantised."""
    codes: dict[str, tuple[Code, tuple[int, int], torch.dtype, Factor]] = {
        "nf4": ("nf4", (1, 64), torch.float32, "none"),
        "mxfp4": ("e2m1", (1, 32), torch.uint8, "none"),
        "nvfp4": ("e2m1", (1, 16), torch.float8_e4m3fn, "divides"),
        "float8": ("e4m3", (1 if by_rows else 128, 128), torch.float32, "none"),
    }
    code, block, scale, factor = codes[name]
    parts = (1,) if by_rows else (rows,)
    return PackedFormat(name, code, block, scale, parts, columns, factor, transposed=transposed, by_rows=by_rows)


@dataclass(frozen=True, slots=True)
class Sections:
    """The bytes of units, `[X, B]`, as views."""

    codes_XRB: Tensor
    """The codes, uint8."""
    scales_XGG: Tensor
    """The scales, in their own dtype."""
    factors_XP: Tensor | None
    """One for each part; None without."""

    @classmethod
    def of(cls, packed_XB: Tensor, kind: PackedFormat) -> "Sections":
        """Return views of the bytes `[X, B]` of units; nothing is copied."""
        factors_end, scales_end, end = kind.sections
        scales = packed_XB[:, factors_end : factors_end + math.prod(kind.grid) * kind.scale.itemsize]
        return cls(
            packed_XB[:, scales_end:end].unflatten(1, (kind.rows, kind.row_bytes)),
            scales.view(kind.scale).unflatten(1, kind.grid),
            packed_XB[:, :factors_end].view(torch.float32) if factors_end else None,
        )

    def __getitem__(self, units: slice) -> "Sections":
        factors_XP = None if self.factors_XP is None else self.factors_XP[units]
        return Sections(self.codes_XRB[units], self.scales_XGG[units], factors_XP)


def dequantise(
    sections: Sections,
    kind: PackedFormat,
    dtype: torch.dtype,
    rows: slice | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    """Return the matrices of units: `[X, R, C]`, `[X, C, R]` if `transposed`, `[X, C]` if `by_rows`.

    The product is computed in fp32, rounded once, and then cast once.

    Args:
        rows: Only these rows of each matrix.
        scratch: Memory in which the result lies, if given.
    """
    scratch = scratch or Scratch()
    codes_XRB, scales_XRG = sections.codes_XRB, scales_of(sections, kind)
    if kind.block[0] > 1:
        scales_XRG = scales_XRG.index_select(1, scale_rows(kind, codes_XRB.device))
    if rows is not None:
        codes_XRB, scales_XRG = codes_XRB[:, rows], scales_XRG[:, rows]
    values_XRC, block = values_of(codes_XRB, kind.code, scratch), kind.block[1]
    columns = values_XRC.shape[-1]
    # In place: `scratch` holds the values.
    if columns % block:
        values_XRC.mul_(scales_XRG.repeat_interleave(block, -1)[..., :columns])
    else:
        values_XRC.unflatten(-1, (-1, block)).mul_(scales_XRG.unsqueeze(-1))
    values_XRC = values_XRC.to(kind.rounded)
    if values_XRC.dtype != dtype:
        values_XRC = scratch.take(values_XRC.shape, dtype, values_XRC.device).copy_(values_XRC)
    return _in_model(values_XRC, kind)


def quantise(values: Tensor, kind: PackedFormat) -> Tensor:
    """Return the bytes `[X, B]` of units `[X, ...]`, in the model's orientation and any float dtype."""
    codes_XRB, scales_XGG, factors_X1, _ = _encoded(values, kind)
    return joined(codes_XRB, scales_XGG, factors_X1, kind)


def rounded(values: Tensor, kind: PackedFormat) -> Tensor:
    """Return the values after quantisation, in fp32.

    Args:
        values: Full blocks of units, or full units where these have a factor.
    """
    codes_XRB, _, _, scales_XRC = _encoded(values, kind)
    return _in_model(values_of(codes_XRB, kind.code) * scales_XRC, kind)


def _encoded(values: Tensor, kind: PackedFormat) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return codes, scales and factors as they are stored, and the scale of each value in fp32."""
    values = values.unsqueeze(1) if kind.by_rows else values.transpose(1, 2) if kind.transposed else values
    values_XRC = values.to(torch.float32).contiguous()
    factors_X1 = None
    if kind.factor != "none":
        factors_X1 = factor_for(values_XRC.abs().amax(dim=(1, 2)).unsqueeze(1), kind.code, kind.factor)
    wide_X11 = None if factors_X1 is None else factors_X1.unsqueeze(-1)
    scales_XGG = scales_for(largest_of_blocks(values_XRC, kind.block), kind.code, kind.scale, wide_X11, kind.factor)
    wide_XGG = with_factor(scale_values(scales_XGG), wide_X11, kind.factor)
    scales_XRC = spread(wide_XGG, kind.block, [(0, size) for size in values_XRC.shape])
    return codes_of(values_XRC / scales_XRC, kind.code), scales_XGG, factors_X1, scales_XRC


def _in_model(values_XRC: Tensor, kind: PackedFormat) -> Tensor:
    """Return the values in the model's orientation."""
    if kind.by_rows:
        return values_XRC.squeeze(1)
    return values_XRC.transpose(1, 2) if kind.transposed else values_XRC


def joined(codes: Tensor, scales: Tensor, factors: Tensor | None, kind: PackedFormat) -> Tensor:
    """Join codes, scales and factors, each `[X, ...]`, into the bytes of units `[X, B]`."""
    packed_XB = torch.zeros(len(codes), kind.bytes, dtype=torch.uint8, device=codes.device)
    ends = (0, *kind.sections)
    for first, part in zip(ends, (factors, scales, codes), strict=False):
        if part is not None:
            stored = part.contiguous().view(torch.uint8).flatten(1)
            packed_XB[:, first : first + stored.shape[1]] = stored
    return packed_XB


def cut_columns(packed_XB: Tensor, kind: PackedFormat, start: int, stop: int) -> tuple[Tensor, PackedFormat]:
    """Return rows from column `start` to `stop` as units, with their format.

    `start` and `stop` are boundaries of blocks, unless a row has a single block.
    """
    part, block = replace(kind, columns=stop - start), kind.block[1]
    assert kind.by_rows, kind
    assert kind.grid[1] == 1 or start % block == 0, (kind, start)
    uncut, in_byte = Sections.of(packed_XB, kind), kind.columns // kind.row_bytes
    scales = uncut.scales_XGG[..., start // block : -(-stop // block)]
    codes = uncut.codes_XRB[..., start // in_byte : stop // in_byte]
    return joined(codes, scales, uncut.factors_XP, part), part


def scales_of(sections: Sections, kind: PackedFormat) -> Tensor:
    """Return the scales `[X, *grid]` in fp32, with their factors applied."""
    scales, factors = scale_values(sections.scales_XGG), sections.factors_XP
    if factors is None:
        return scales
    if len(kind.parts) > 1:
        factors = factors.index_select(1, factor_rows(kind, scales.device))
    return with_factor(scales, factors.unsqueeze(-1), kind.factor)


@cache
def scale_rows(kind: PackedFormat, device: torch.device) -> Tensor:
    """Return the row of scales that each row uses."""
    rows, first = [], 0
    for part in kind.parts:
        rows.append(torch.arange(part) // kind.block[0] + first)
        first += -(-part // kind.block[0])
    return torch.cat(rows).to(device)


@cache
def factor_rows(kind: PackedFormat, device: torch.device) -> Tensor:
    """Return the part that each row of scales belongs to."""
    rows_of_parts = torch.tensor([-(-part // kind.block[0]) for part in kind.parts])
    return torch.arange(len(kind.parts)).repeat_interleave(rows_of_parts).to(device)
