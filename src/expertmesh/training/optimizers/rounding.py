"""Stochastic rounding to bfloat16: up or down with the probability that keeps the expectation.

Rounded to nearest, an update smaller than half a unit in the last place (1/512 of a weight) is lost, every time. Which
way an element goes follows from the run's seed, the step, the tensor's name and the element's place in the whole
tensor alone. So every layout rounds alike, and a resumed run as one that was not interrupted; no generator's state is
needed. Nothing here communicates.

Shapes: R rows (all dims but the last) and C columns (the last dim) of a rank's part.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.io.boxes import Box

_GOLDEN = -0x61C8864680B583EB  # splitmix64's constants as signed integers
_FIRST, _SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_ODD = 0x7FEB352D


@dataclass(frozen=True, slots=True)
class Noise:
    """Random bits of one tensor in one step, for each element those of its row and its column mixed."""

    rows_R: Tensor
    columns_C: Tensor

    @classmethod
    def of(cls, key: str, box: Box, shape: tuple[int, ...], device: torch.device) -> "Noise":
        """For the part `box` of a tensor of `shape`; `key` has to be another one for each tensor and step."""
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little", signed=True)
        rows = torch.zeros(1, dtype=torch.int64, device=device)
        for (start, stop), size in zip(box[:-1], shape[:-1], strict=True):
            rows = (rows[:, None] * size + torch.arange(start, stop, device=device)).flatten()
        columns = torch.arange(*box[-1], device=device)
        return cls(_hash(rows * _GOLDEN + seed), _hash(columns * _GOLDEN ^ ~seed))

    def round(self, value_RC: Tensor, rows: slice) -> Tensor:
        """`rows` of the part, float32, in bfloat16. What is not finite stays as it is."""
        noise_RC = self.rows_R[rows, None] ^ self.columns_C
        noise_RC ^= (noise_RC >> 16) & 0xFFFF  # shifts of integers are arithmetic
        noise_RC *= _ODD
        # Magnitudes grow with their bits: what is added to those that go carries over as often as they are large.
        bits_RC = ((noise_RC >> 16) & 0xFFFF).add_(value_RC.view(torch.int32)).bitwise_and_(-0x10000)
        return torch.where(value_RC.isfinite(), bits_RC.view(torch.float32), value_RC).to(torch.bfloat16)


def _hash(number: Tensor) -> Tensor:
    """The upper half of splitmix64 of 64-bit integers."""
    number = (number ^ _shifted(number, 30)) * _FIRST
    number = (number ^ _shifted(number, 27)) * _SECOND
    return ((number ^ _shifted(number, 31)) >> 32).to(torch.int32)


def _shifted(number: Tensor, by: int) -> Tensor:
    return (number >> by) & ((1 << (64 - by)) - 1)
