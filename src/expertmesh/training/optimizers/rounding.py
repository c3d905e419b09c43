"""Round stochastically to bfloat16: up or down with the probability that keeps the expectation.

Rounded to nearest, an update smaller than half a unit in the last place (1/512 of a weight) is lost, every time. The
direction of an element follows from the run's seed, the step, the tensor's name and the element's place in the whole
tensor alone. So every layout rounds equally, and a resumed run as one that was not interrupted; no generator's state is
needed. No communication.

Shapes: R rows (all dims but the last) and C columns (the last dim) of a rank's part.
"""

import hashlib

import torch
from torch import Tensor

from expertmesh.io.boxes import Box

_GOLDEN = -0x61C8864680B583EB  # splitmix64's constants as signed integers
_FIRST, _SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
# Of the words that an element's parameter and moments are rounded by: one mixed word, times odd numbers.
FACTORS = (0x7FEB352D, 0x2C1B3C6D, 0x297A2D39)


class Noise:
    """Random bits of one parameter in one step: for each element those of its row and its column, mixed."""

    def __init__(self, key: str, box: Box, shape: tuple[int, ...], device: torch.device) -> None:
        """Prepare the part `box` of a tensor of `shape`; `key` has to differ for each tensor and step."""
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little", signed=True)
        rows = torch.zeros(1, dtype=torch.int64, device=device)
        for (start, stop), size in zip(box[:-1], shape[:-1], strict=True):
            rows = (rows[:, None] * size + torch.arange(start, stop, device=device)).flatten()
        columns = torch.arange(*box[-1], device=device)
        self.rows_R, self.columns_C = _hash(rows * _GOLDEN + seed), _hash(columns * _GOLDEN ^ ~seed)
        self._mixed: tuple[slice | None, Tensor] = (None, self.rows_R)

    def round(self, value_RC: Tensor, rows: slice, factor: int = FACTORS[0]) -> Tensor:
        """Round `rows` of the part, float32, to bfloat16. Values that are not finite become NaN."""
        bits_RC = self._of(rows) * factor
        # Magnitudes grow with their bits: what is added to those that go carries over as often as they are large.
        bits_RC = bits_RC.bitwise_right_shift_(16).bitwise_and_(0xFFFF).add_(value_RC.view(torch.int32))
        rounded_RC = bits_RC.bitwise_and_(-0x10000).view(torch.float32)
        return rounded_RC.add_(value_RC - value_RC).to(torch.bfloat16)  # 0, or NaN: its bits may have overflown

    def _of(self, rows: slice) -> Tensor:
        """Return a word for each element, cached until other rows are requested."""
        if self._mixed[0] != rows:
            word_RC = self.rows_R[rows, None] ^ self.columns_C
            self._mixed = rows, word_RC.bitwise_xor_((word_RC >> 16).bitwise_and_(0xFFFF))  # shifts are arithmetic
        return self._mixed[1]


def _hash(number: Tensor) -> Tensor:
    """Return the upper half of splitmix64 of 64-bit integers."""
    number = (number ^ _shifted(number, 30)) * _FIRST
    number = (number ^ _shifted(number, 27)) * _SECOND
    return ((number ^ _shifted(number, 31)) >> 32).to(torch.int32)


def _shifted(number: Tensor, by: int) -> Tensor:
    return (number >> by) & ((1 << (64 - by)) - 1)
