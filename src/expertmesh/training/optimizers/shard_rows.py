"""View a rank's part of a parameter as rows of its last dim, and divide it into passes for optimizers.

What is not element by element at once is done in passes of bounded size, so that an optimizer's float32 copies never
take more than a few of them. No communication.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.io.boxes import Box, extents
from expertmesh.state.shards import local_box, local_tensor

_ELEMENTS_OF_A_PASS = {"cpu": 1 << 17}
_ELEMENTS_ON_ACCELERATORS = 1 << 22


@dataclass(frozen=True, slots=True)
class ShardRows:
    """R rows of C columns of a tensor. A vector is one row, and so is a scalar."""

    box: Box
    """The part of the tensor that this rank holds."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "ShardRows":
        return cls(local_box(tensor) or ((0, 1),), tuple(tensor.shape) or (1,), tensor.device)

    @property
    def rows(self) -> int:
        return torch.Size(extents(self.box)[:-1]).numel()

    @property
    def columns(self) -> int:
        return extents(self.box)[-1]

    def view(self, tensor: Tensor) -> Tensor:
        """Return this rank's storage of a tensor that is sharded like this one, `[R, C]`, for writing."""
        return local_tensor(tensor).view(self.rows, self.columns)

    def read(self, tensor: Tensor) -> Tensor:
        """Return the same for reading; a copy where the storage has gaps."""
        return local_tensor(tensor).reshape(self.rows, self.columns)

    def passes(self) -> Iterator[slice]:
        """Yield all rows, a few at a time: equally many for all ranks that hold columns of the same rows."""
        most = _ELEMENTS_OF_A_PASS.get(self.device.type, _ELEMENTS_ON_ACCELERATORS)
        count = max(1, most // max(1, self.shape[-1]))
        for start in range(0, self.rows, count):
            yield slice(start, min(start + count, self.rows))
