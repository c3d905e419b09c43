"""What codes and scales stand for: pure functions, one for each way to store numbers. Nothing here reads a file.

Sources: OCP Microscaling Formats (MX) v1.0 for E2M1 and E8M0; the packing of compressed-tensors 0.20 for int4; the
published files of DeepSeek-V3/V4, GPT-OSS and Kimi-K2 for the order of nibbles.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E8M0_BIAS = 127
_INT4_OFFSET = 8


def e2m1(packed: Tensor) -> Tensor:
    """Bytes `[..., n]` of two 4-bit floats each, low nibble first -> fp32 `[..., 2n]`."""
    stored = packed.view(torch.uint8)
    return torch.tensor(_E2M1)[torch.stack([stored & 15, stored >> 4], dim=-1).flatten(-2).long()]


def int4(packed: Tensor) -> Tensor:
    """int32 `[..., n]` of eight offset 4-bit integers each, lowest bits first -> int8 `[..., 8n]` from -8 to 7."""
    nibbles = packed.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32) & 15
    return nibbles.flatten(-2).to(torch.int8) - _INT4_OFFSET


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
