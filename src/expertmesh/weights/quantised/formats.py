"""What codes and scales stand for, and which ones stand for given values: pure functions, two for each way to store
numbers. Nothing here reads or writes a file.

Codes are the nearest ones, ties to even; scales are those that put the largest value of a block on the largest code.

Sources: OCP Microscaling Formats (MX) v1.0 for E2M1 and E8M0; the packing of compressed-tensors 0.20 for int4; the
published files of DeepSeek-V3/V4, GPT-OSS and Kimi-K2 for the order of nibbles.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

E4M3_MAX, E2M1_MAX, INT4_MAX = 448.0, 6.0, 7.5
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E8M0_BIAS = 127
_INT4_OFFSET = 8


def e2m1(packed: Tensor) -> Tensor:
    """Bytes `[..., n]` of two 4-bit floats each, low nibble first -> fp32 `[..., 2n]`."""
    stored = packed.view(torch.uint8)
    return torch.tensor(_E2M1)[torch.stack([stored & 15, stored >> 4], dim=-1).flatten(-2).long()]


def to_e2m1(values: Tensor) -> Tensor:
    """fp32 `[..., 2n]` -> bytes `[..., n]` of two 4-bit floats each; beyond the largest one it is that."""
    size = values.abs().clamp_max_(E2M1_MAX)
    # Codes count steps of 0.5 up to 2, of 1 from there to 4, and of 2 to 6; even numbers of steps have even codes.
    upper = torch.where(size < 4, size.round().add_(2), (size / 2).round_().add_(4))
    steps = torch.where(size < 2, (2 * size).round_(), upper)
    codes = steps.to(torch.uint8) | values.signbit().to(torch.uint8) << 3
    return codes[..., ::2] | codes[..., 1::2] << 4


def int4(packed: Tensor) -> Tensor:
    """int32 `[..., n]` of eight offset 4-bit integers each, lowest bits first -> int8 `[..., 8n]` from -8 to 7."""
    nibbles = packed.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32) & 15
    return nibbles.flatten(-2).to(torch.int8) - _INT4_OFFSET


def to_int4(values: Tensor) -> Tensor:
    """Numbers `[..., 8n]`, rounded and cut to -8 ... 7 -> int32 `[..., n]`."""
    nibbles: Tensor = values.round().clamp(-_INT4_OFFSET, _INT4_OFFSET - 1).to(torch.int64) + _INT4_OFFSET
    words: Tensor = (nibbles.unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1)
    return words.to(torch.int32)


def to_e4m3(values: Tensor) -> Tensor:
    """8-bit floats; beyond the largest one it is that."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def to_e8m0(largest: Tensor, code_max: float) -> Tensor:
    """Bytes of the power of two that scales each block, whose largest magnitude is in `largest`, to codes up to
    `code_max`: as compressed-tensors rounds it for E2M1, upwards for E4M3, so that no code is cut. 1 for zeros.
    """
    mantissa, exponent = torch.frexp(largest)
    # 448 is 0.875 * 2 ** 9. The largest E2M1 is 0.75 * 2 ** 3, and what is below 0.875 * 2 ** 3 is nearest to it.
    next_one = mantissa > 0.875 if code_max == E4M3_MAX else mantissa >= 0.875
    power = exponent + next_one.to(torch.int32) - (9 if code_max == E4M3_MAX else 3)
    power = power.masked_fill(largest == 0, 0).clamp(-_E8M0_BIAS, _E8M0_BIAS)
    return (power + _E8M0_BIAS).to(torch.uint8)


def largest_of_blocks(values: Tensor, block: Sequence[int]) -> Tensor:
    """The largest magnitude in each block of (rows, columns) of the last two dims; the last blocks may be partial."""
    rows, columns = values.shape[-2:]
    padded = F.pad(values.abs(), (0, -columns % block[1], 0, -rows % block[0]))
    largest: Tensor = padded.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0])).amax(dim=(-3, -1))
    return largest


def scale_values(scale: Tensor) -> Tensor:
    """Scales in fp32. A byte is an E8M0 exponent: 2 ** (byte - 127), and 255 is not a number."""
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        return scale.to(torch.float32)
    exponents = scale.view(torch.uint8).to(torch.int32)
    values = torch.ldexp(torch.ones(scale.shape), exponents - _E8M0_BIAS)
    return values.masked_fill(exponents == 255, torch.nan)


def spread(scales: Tensor, block: Sequence[int], box: Sequence[tuple[int, int]]) -> Tensor:
    """The scale of each element of `box`, whose last two dims are cut into blocks of `block` = (rows, columns).

    `scales` holds one scale for each block that `box` touches; the first and the last may be cut by the box, and the
    last one of the tensor may be partial.
    """
    for dim, size in ((-2, block[0]), (-1, block[1])):
        start, stop = box[dim]
        scales = scales.index_select(dim, torch.arange(start, stop) // size - start // size)
    return scales
