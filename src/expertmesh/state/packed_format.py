"""How the matrix of one frozen expert is kept in 8 or 4 bits: codes with scales, quantised and dequantised.

Pure functions on one expert's bytes. Quantisation blocks lie inside a matrix in the orientation of published files,
`[out, in]`; the columns are `in`, and a byte holds two 4-bit codes, the even column in its low bits.

Sources: OCP Microscaling Formats (MX) v1.0 for mxfp4, NVIDIA's NVFP4 (blocks of 16, e4m3 scales, one fp32 factor),
DeepSeek-V3's blocks of 128 x 128 for float8, and the table of QLoRA (arXiv 2305.14314) for nf4, which is bitsandbytes'.

    X experts, R rows, C columns, G scales
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Code = Literal["nf4", "e2m1", "int4", "e4m3"]
Factor = Literal["none", "times", "divides"]

_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_LARGEST = {"nf4": 1.0, "e2m1": 6.0, "int4": 7.0, "e4m3": 448.0}
_E2M1_EXPONENT, _E8M0_BIAS, _E8M0_NAN = 2, 127, 255
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """Of one expert's matrix: `rows` x `columns` as published, or `transposed` in the model.

    Blocks of `block` = (rows, columns) have one scale each, in the dtype `scale` (uint8: an exponent, e8m0); the last
    ones may be partial. `parts` are the rows of matrices that a published file holds apart, gate and up: blocks begin
    anew in each, and each has a factor of its own, by which all its scales are multiplied or divided. `rounded`: the
    dtype that a value has in between. `name` is that of `precision.frozen`.
    """

    name: str
    code: Code
    block: tuple[int, int]
    scale: torch.dtype
    parts: tuple[int, ...]
    columns: int
    factor: Factor = "none"
    rounded: torch.dtype = torch.float32
    transposed: bool = False

    @property
    def published(self) -> bool:
        """Whether the codes are those of the files."""
        return self.name == "as_published"

    @property
    def rows(self) -> int:
        return sum(self.parts)

    @property
    def shape(self) -> tuple[int, int]:
        """Of one expert in the model."""
        return (self.columns, self.rows) if self.transposed else (self.rows, self.columns)

    @property
    def grid(self) -> tuple[int, int]:
        """How many scales there are: rows, columns."""
        return sum(-(-part // self.block[0]) for part in self.parts), -(-self.columns // self.block[1])

    @property
    def row_bytes(self) -> int:
        """Of the codes of one row."""
        return self.columns if self.code == "e4m3" else self.columns // 2

    @property
    def sections(self) -> tuple[int, int, int]:
        """Where factors, scales and codes end among an expert's bytes. Scales begin on 4 bytes, codes on 16."""
        factors = 0 if self.factor == "none" else 4 * len(self.parts)
        scales = factors + math.prod(self.grid) * self.scale.itemsize
        scales += -scales % _ALIGNMENT
        return factors, scales, scales + self.rows * self.row_bytes

    @property
    def bytes(self) -> int:
        """Of one expert."""
        end = self.sections[2]
        return end + -end % _ALIGNMENT

    def whole_blocks(self, box: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """A box of one expert in the model, widened to whole blocks."""
        block = self.block[::-1] if self.transposed else self.block
        sides = zip(box, self.shape, block, strict=True)
        return tuple((start // run * run, min(size, -(-stop // run) * run)) for (start, stop), size, run in sides)

    def scale_rows(self) -> Tensor:
        """Which row of scales each row has."""
        found, first = [], 0
        for part in self.parts:
            found.append(torch.arange(part) // self.block[0] + first)
            first += -(-part // self.block[0])
        return torch.cat(found)

    def factor_rows(self) -> Tensor:
        """Which part each row of scales belongs to."""
        return torch.cat([torch.full((-(-part // self.block[0]),), number) for number, part in enumerate(self.parts)])


def quantised_format(name: str, rows: int, columns: int, *, transposed: bool) -> PackedFormat:
    """The format that `precision.frozen: name` means for matrices `[rows, columns]`, quantised from plain ones."""
    codes: dict[str, tuple[Code, tuple[int, int], torch.dtype, Factor]] = {
        "nf4": ("nf4", (1, 64), torch.float32, "none"),
        "mxfp4": ("e2m1", (1, 32), torch.uint8, "none"),
        "nvfp4": ("e2m1", (1, 16), torch.float8_e4m3fn, "times"),
        "float8": ("e4m3", (128, 128), torch.float32, "none"),
    }
    code, block, scale, factor = codes[name]
    return PackedFormat(name, code, block, scale, (rows,), columns, factor, transposed=transposed)


def dequantise(packed_XB: Tensor, kind: PackedFormat, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
    """The matrices `[X, R, C]` (`[X, C, R]` if `transposed`) of experts' bytes `[X, B]`, those of `rows` alone.

    Computed in fp32, with one rounding of the product, and cast once.
    """
    start, stop, _ = rows.indices(kind.rows)
    _, scales_end, end = kind.sections
    codes_XB = packed_XB[:, scales_end:end].unflatten(1, (kind.rows, kind.row_bytes))[:, start:stop]
    scales_XRG = scales_of(packed_XB, kind)
    if kind.block[0] > 1:
        scales_XRG = scales_XRG.index_select(1, _scale_rows(kind, packed_XB.device))
    values_XRC = decode(codes_XB, scales_XRG[:, start:stop], kind.code, kind.block[1])
    values_XRC = values_XRC.to(kind.rounded).to(dtype)
    return values_XRC.transpose(1, 2) if kind.transposed else values_XRC


def quantise(values_RC: Tensor, kind: PackedFormat) -> Tensor:
    """The bytes `[B]` of one expert's matrix, in the model's orientation and any float dtype."""
    values_RC = values_RC.t() if kind.transposed else values_RC
    values_RC = values_RC.to(torch.float32).contiguous()
    factor = None if kind.factor == "none" else factor_of(values_RC)
    codes_RB, scales_G = encode(values_RC, kind, factor)
    return joined(codes_RB, scales_G, factor, kind)


def rounded(values: Tensor, kind: PackedFormat) -> Tensor:
    """Whole blocks of one expert's matrix (all of it, where that has a factor), as quantising leaves them, in fp32."""
    values_RC = (values.t() if kind.transposed else values).to(torch.float32).contiguous()
    factor = None if kind.factor == "none" else factor_of(values_RC)
    codes_RB, scales_G = encode(values_RC, kind, factor)
    row_R = torch.arange(len(values_RC), device=values.device) // kind.block[0]
    kept_RC = decode(codes_RB, wide_scales(scales_G, kind, factor).index_select(0, row_R), kind.code, kind.block[1])
    return kept_RC.t() if kind.transposed else kept_RC


def joined(codes_RB: Tensor, scales_G: Tensor, factors: Tensor | None, kind: PackedFormat) -> Tensor:
    """One expert's codes, scales and factors as its bytes."""
    packed_B = torch.zeros(kind.bytes, dtype=torch.uint8, device=codes_RB.device)
    ends = kind.sections
    if factors is not None:
        packed_B[: ends[0]] = factors.contiguous().view(torch.uint8)
    scales = scales_G.contiguous().view(torch.uint8).flatten()
    packed_B[ends[0] : ends[0] + scales.numel()] = scales
    packed_B[ends[1] : ends[2]] = codes_RB.view(torch.uint8).flatten()
    return packed_B


def scales_of(packed_XB: Tensor, kind: PackedFormat) -> Tensor:
    """The scales `[X, *grid]` in fp32, with their factors."""
    start = kind.sections[0]
    stop = start + math.prod(kind.grid) * kind.scale.itemsize
    stored = packed_XB[:, start:stop].view(kind.scale).unflatten(1, kind.grid)
    if kind.factor == "none":
        return wide_scales(stored, kind, None)
    factors = factors_of(packed_XB, kind)
    if len(kind.parts) > 1:
        factors = factors.index_select(1, _factor_rows(kind, packed_XB.device))
    return wide_scales(stored, kind, factors.unsqueeze(-1))


def wide_scales(stored: Tensor, kind: PackedFormat, factors: Tensor | None) -> Tensor:
    """Scales in fp32, with factors that broadcast."""
    if kind.scale.itemsize == 1:  # of which there are 256, and torch's casts are slow on a CPU
        scales = _bytes(kind.scale, stored.device).index_select(0, stored.view(torch.uint8).flatten().to(torch.int32))
        scales = scales.view(stored.shape)
    else:
        scales = stored.to(torch.float32)
    if factors is None:
        return scales
    return scales * factors if kind.factor == "times" else scales / factors


def factors_of(packed_XB: Tensor, kind: PackedFormat) -> Tensor:
    """The factor of each part, `[X, parts]`."""
    return packed_XB[:, : kind.sections[0]].view(torch.float32)


def decode(codes_XRB: Tensor, scales_XRG: Tensor, code: Code, block: int) -> Tensor:
    """Values `[X, R, C]` in fp32 of codes with a scale for each `block` columns."""
    values = _lookup(codes_XRB, code)
    columns = values.shape[-1]
    if columns % block:
        return values.mul_(scales_XRG.repeat_interleave(block, -1)[..., :columns])
    values.unflatten(-1, (-1, block)).mul_(scales_XRG.unsqueeze(-1))
    return values


def encode(values_RC: Tensor, kind: PackedFormat, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes `[R, bytes]` and scales `[G rows, G columns]` of an fp32 matrix that begins with a block."""
    (rows, columns), block = values_RC.shape, kind.block
    grid = -(-rows // block[0]), -(-columns // block[1])
    padded = F.pad(values_RC, (0, grid[1] * block[1] - columns, 0, grid[0] * block[0] - rows))
    blocks = padded.view(grid[0], block[0], grid[1], block[1])
    most_GG = blocks.abs().amax(dim=(1, 3))
    scales = _scales(most_GG, kind, factor)
    values = wide_scales(scales, kind, factor)
    # A block of zeros, or one that is too small for its scale's dtype, has codes that any divisor gives.
    divisor = torch.where(values == 0, torch.ones_like(values), values)
    scaled = (blocks / divisor[:, None, :, None]).reshape(padded.shape)[:rows, :columns].contiguous()
    return _codes(scaled, kind.code), scales


def factor_of(values_RC: Tensor) -> Tensor:
    """NVFP4's one factor of a matrix, `[1]`: with it the largest scale is the largest of e4m3."""
    factor = values_RC.abs().amax().reshape(1) / (_LARGEST["e2m1"] * _LARGEST["e4m3"])
    return torch.where(factor == 0, torch.ones_like(factor), factor)


def _scales(most_GG: Tensor, kind: PackedFormat, factor: Tensor | None) -> Tensor:
    """The scales, as stored, of blocks whose largest elements are `most_GG`."""
    if kind.scale == torch.uint8:
        # MX: the exponent of the largest element, less that of the largest code. `frexp` counts from 0.5.
        exponent = torch.frexp(most_GG).exponent - 1 - _E2M1_EXPONENT + _E8M0_BIAS
        return exponent.clamp(0, 254).masked_fill(~most_GG.isfinite(), _E8M0_NAN).to(torch.uint8)
    scales = most_GG / _LARGEST[kind.code]
    if factor is not None:
        scales = (scales / factor).clamp(max=_LARGEST["e4m3"])
    return scales.to(kind.scale)


def _codes(scaled_RC: Tensor, code: Code) -> Tensor:
    """The nearest codes, as bytes."""
    if code == "e4m3":
        return scaled_RC.clamp(-_LARGEST[code], _LARGEST[code]).to(torch.float8_e4m3fn).view(torch.uint8)
    if code == "e2m1":
        codes = torch.bucketize(scaled_RC.abs(), _e2m1_bounds(scaled_RC.device)) + 8 * torch.signbit(scaled_RC)
    else:
        table = torch.tensor(_NF4, device=scaled_RC.device)
        codes = torch.bucketize(scaled_RC, (table[1:] + table[:-1]) / 2)
    codes = codes.to(torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4


def _e2m1_bounds(device: torch.device) -> Tensor:
    """What a magnitude has to exceed for each code: halfway between two, and ties go to the even one."""
    table = torch.tensor(_E2M1[:8], device=device)
    halfway = (table[1:] + table[:-1]) / 2
    to_upper = torch.arange(7, device=device) % 2 == 1
    return torch.where(to_upper, torch.nextafter(halfway, torch.zeros_like(halfway)), halfway)


def _lookup(codes: Tensor, code: Code) -> Tensor:
    """What codes stand for, in fp32. A byte is looked up once, two 4-bit codes together."""
    index = codes.flatten().to(torch.int32)
    if code == "e4m3":
        return _bytes(torch.float8_e4m3fn, codes.device).index_select(0, index).view(codes.shape)
    pairs = _pairs(code, codes.device).index_select(0, index)
    return pairs.view(torch.float32).view(*codes.shape[:-1], 2 * codes.shape[-1])


@cache
def _scale_rows(kind: PackedFormat, device: torch.device) -> Tensor:
    return kind.scale_rows().to(device)


@cache
def _factor_rows(kind: PackedFormat, device: torch.device) -> Tensor:
    return kind.factor_rows().to(device)


@cache
def _bytes(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The fp32 value of each byte as an 8-bit float; of uint8 as e8m0, 2 ** (byte - 127)."""
    byte = torch.arange(256, dtype=torch.uint8)
    if dtype != torch.uint8:
        return byte.view(dtype).to(torch.float32).to(device)
    values = torch.ldexp(torch.ones(256), byte.to(torch.int32) - _E8M0_BIAS)
    values[_E8M0_NAN] = torch.nan
    return values.to(device)


@cache
def _pairs(code: Code, device: torch.device) -> Tensor:
    """For each byte the fp32 values of its two codes, as the bits of one int64."""
    values = _NF4 if code == "nf4" else _E2M1 if code == "e2m1" else [number - 8.0 for number in range(16)]
    table = torch.tensor(values, dtype=torch.float32, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([table[byte & 15], table[byte >> 4]], dim=-1).view(torch.int64).flatten()
