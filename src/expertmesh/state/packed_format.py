"""Define how frozen weights are stored in 8 or 4 bits: where factors, scales and codes lie in the bytes of one unit.

No parallel layout splits a unit: it is the matrix of one expert, or one row of a linear layer's weight (`by_rows`).
These are pure functions on the bytes of units; the meaning of codes and scales is in codes.py. Quantisation blocks lie
inside a unit in the orientation of published files, `[out, in]`; the columns are `in`.

    X units, R rows, C columns, G scales
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from expertmesh.state.codes import (
    Code,
    Factor,
    Scratch,
    codes_of,
    factor_for,
    largest_of_blocks,
    scale_values,
    scales_for,
    spread,
    values_of,
    with_factor,
)


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

    def scale_rows(self) -> Tensor:
        """Return the row of scales that each row uses."""
        found, first = [], 0
        for part in self.parts:
            found.append(torch.arange(part) // self.block[0] + first)
            first += -(-part // self.block[0])
        return torch.cat(found)

    def factor_rows(self) -> Tensor:
        """Return the part that each row of scales belongs to."""
        return torch.cat([torch.full((-(-part // self.block[0]),), number) for number, part in enumerate(self.parts)])


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
        scales_XRG = scales_XRG.index_select(1, _scale_rows(kind, codes_XRB.device))
    if rows is not None:
        codes_XRB, scales_XRG = codes_XRB[:, rows], scales_XRG[:, rows]
    values_XRC = _scaled(values_of(codes_XRB, kind.code, scratch), scales_XRG, kind.block[1]).to(kind.rounded)
    if values_XRC.dtype != dtype:
        values_XRC = scratch.take(values_XRC.shape, dtype, values_XRC.device).copy_(values_XRC)
    return _in_model(values_XRC, kind)


def _scaled(values: Tensor, scales_XRG: Tensor, block: int) -> Tensor:
    """Multiply each `block` columns by their scale, in place."""
    columns = values.shape[-1]
    if columns % block:
        return values.mul_(scales_XRG.repeat_interleave(block, -1)[..., :columns])
    values.unflatten(-1, (-1, block)).mul_(scales_XRG.unsqueeze(-1))
    return values


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
        factors = factors.index_select(1, _factor_rows(kind, scales.device))
    return with_factor(scales, factors.unsqueeze(-1), kind.factor)


@cache
def _scale_rows(kind: PackedFormat, device: torch.device) -> Tensor:
    return kind.scale_rows().to(device)


@cache
def _factor_rows(kind: PackedFormat, device: torch.device) -> Tensor:
    return kind.factor_rows().to(device)
