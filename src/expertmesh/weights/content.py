"""A hash of what a model holds, the same for every layout: which base an adapter was trained on.

Every tensor is summed, each element's bits weighted by its place in the whole tensor, so that the ranks' parts add up.
The hash tells one set of weights from another; it is no protection against an adversary.
"""

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from expertmesh.distributed.all_ranks import sum_over_ranks
from expertmesh.io.boxes import Box, blocks, extents, slices
from expertmesh.state.packed import values_at
from expertmesh.state.shards import local_box, local_tensor, owns_copy
from expertmesh.weights.mapping import unique_tensors

_BLOCK_ELEMENTS = 1 << 22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def content_hash(model: nn.Module) -> str:
    """The hash of all parameters and persistent buffers but adapters. Every rank calls it.

    Issues one all-reduce of a number per tensor on the default group.
    """
    tensors = unique_tensors(model)
    sums = [
        element_sum(local_tensor(tensor), local_box(tensor), tensor.shape) if owns_copy(tensor) else 0
        for tensor in tensors.values()
    ]
    joined = sum_over_ranks(torch.tensor(sums, dtype=torch.int64))
    return joined_hash(tensors, dict(zip(tensors, joined.tolist(), strict=True)))


def element_sum(values: Tensor, box: Box, shape: torch.Size | tuple[int, ...]) -> int:
    """The weighted sum of the elements of `box` of a tensor of `shape`, modulo 2**64, signed; parts of it add up."""
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
    """One hash of all tensors' sums; names, dtypes and shapes count too."""
    content = [[name, str(t.dtype), list(t.shape), sums[name] % 2**64] for name, t in sorted(tensors.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
