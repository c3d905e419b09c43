"""Dropout whose mask depends on the token and nothing else: not on the rank, the order, or how often it is computed.

A counter-based generator (splitmix64, doi 10.1145/2660193.2660195) maps (salt, token number, column) to a uniform
number. Every layout, every micro-batch size and every recomputation then drops the same elements, and no mask is kept.
The salt stands for seed, step and layer.

    P pairs or tokens
"""

import hashlib
from dataclasses import dataclass

import torch

_BLOCK_ELEMENTS = 1 << 20
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class Dropout:
    """`number_P` int64: which token of the optimizer step each row is, the same in every layout."""

    probability: float
    salt: int
    number_P: torch.Tensor


def keep_mask(dropout: Dropout, width: int, dtype: torch.dtype, first_column: int = 0) -> torch.Tensor:
    """`[P, width]`: 0 with the dropout's probability, else 1 / (1 - probability). No host synchronisation.

    The columns are those from `first_column` on.
    """
    number_P = dropout.number_P
    column_W = torch.arange(first_column, first_column + width, device=number_P.device)
    keep_PW = torch.empty(number_P.shape[0], width, dtype=dtype, device=number_P.device)
    # Of the 2**53 values that the upper bits take, as many are dropped as the probability says.
    threshold = int(dropout.probability * 2**53)
    scale = 1.0 / (1.0 - dropout.probability)
    rows = max(1, _BLOCK_ELEMENTS // max(1, width))
    start_P = _mixed(number_P * _signed(_GOLDEN) + _signed(dropout.salt))
    for first in range(0, number_P.shape[0], rows):
        bits = _mixed(start_P[first : first + rows, None] + column_W * _signed(_GOLDEN))
        kept = _shifted(bits, 11) >= threshold
        keep_PW[first : first + rows] = kept.to(dtype).mul_(scale)
    return keep_PW


def salt_of(*parts: object) -> int:
    """A 64-bit number for what a mask depends on beside the token."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def _mixed(z: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer; int64 arithmetic wraps as the unsigned kind does."""
    z = (z ^ _shifted(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shifted(z, 27)) * _signed(_MIX_2)
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
