"""Hash the values of a model, independent of its layout, to identify the base that an adapter was trained on.

The bits of each element are weighted by the element's place in the full tensor and summed, so that the sums of the
ranks add up. The hash distinguishes two sets of weights; it does not protect against an adversary.
"""

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from expertmesh.distributed.all_ranks import sum_over_ranks
from expertmesh.io.boxes import Box, blocks, extents, slices
from expertmesh.state.model_view import ModelView
from expertmesh.state.packed import values_at
from expertmesh.state.shards import local_box, local_tensor, owns_copy

_BLOCK_ELEMENTS = 1 << 22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def content_hash(model: nn.Module) -> str:
    """Return the hash of all parameters and persistent buffers except adapters.

    Collectives: every rank calls it. One all-reduce of one integer per tensor on the default group.
    """
    tensors = ModelView(model).unique
    sums = [
        element_sum(local_tensor(tensor), local_box(tensor), tensor.shape) if owns_copy(tensor) else 0
        for tensor in tensors.values()
    ]
    joined = sum_over_ranks(torch.tensor(sums, dtype=torch.int64))
    return joined_hash(tensors, dict(zip(tensors, joined.tolist(), strict=True)))


def element_sum(values: Tensor, box: Box, shape: torch.Size | tuple[int, ...]) -> int:
    """Return the weighted sum of the elements of `box` of a tensor of `shape`.

    Args:
        values: The elements of `box`, with its extents.

    Returns:
        The sum modulo 2**64, signed. The sums of disjoint boxes add up to the sum of the tensor.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for part in blocks(box, _BLOCK_ELEMENTS):
        if any(size == 0 for size in extents(part)):
            continue
        bits = values_at(values, slices(part, box)).contiguous()
        bits = bits.view(_INTEGERS[bits.itemsize]).to(torch.int64)
        place = torch.zeros((), dtype=torch.int64, device=values.device)
        for (start, stop), size in zip(part, shape, strict=True):
            place = place.unsqueeze(-1) * size + torch.arange(start, stop, device=values.device)
        # Odd factors: a changed element always changes the sum.
        total += (bits * (2 * place + 1)).sum()
    return int(total)


def joined_hash(tensors: Mapping[str, Tensor], sums: Mapping[str, int]) -> str:
    """Return one hash of the sums of all tensors and of their names, dtypes and shapes."""
    content = [[name, str(t.dtype), list(t.shape), sums[name] % 2**64] for name, t in sorted(tensors.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
