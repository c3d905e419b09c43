"""A few numbers that tell two sharded tensors apart, whatever their layouts: random projections.

Each element is multiplied by a sign that its place in the global tensor decides, and all are summed. For two tensors
with the difference d, the difference of such sums is zero on average and |d| in the root mean square: eight of them
tell within a factor of two how far apart the tensors are. No rank needs to hold the same part twice.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from expertmesh.io.boxes import Box, blocks, extents, slices
from expertmesh.state.shards import local_box, owns_copy
from expertmesh.verification.compare import Distance, summed_over_ranks

PROJECTIONS = 8
_BLOCK_ELEMENTS = 1 << 20


def sketch(parameters: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Of tensors sharded as `parameters` are, given this rank's `parts`: projections, squared norm, elements.

    Collective: one gathering.
    """
    owned = ((name, parameters[name], part) for name, part in parts.items() if owns_copy(parameters[name]))
    return summed_over_ranks({name: _projections(part, local_box(like), like.shape) for name, like, part in owned})


def sketch_distances(one: Mapping[str, list[float]], other: Mapping[str, list[float]]) -> dict[str, Distance]:
    """How far two sketched runs are from each other; what only one has is compared with zeros."""
    zeros = [0.0] * (PROJECTIONS + 2)
    found = {}
    for name in sorted(one.keys() | other.keys()):
        a, b = one.get(name, zeros), other.get(name, zeros)
        squared = sum((x - y) ** 2 for x, y in zip(a[:PROJECTIONS], b[:PROJECTIONS], strict=True)) / PROJECTIONS
        found[name] = Distance(squared, b[-2], int(max(a[-1], b[-1])))
    return found


def _projections(value: Tensor, box: Box, shape: tuple[int, ...]) -> list[float]:
    sums = torch.zeros(PROJECTIONS + 1, dtype=torch.float64, device=value.device)
    for part in blocks(box, _BLOCK_ELEMENTS) if value.numel() else ():
        held = value[slices(part, box)].double().reshape(-1)
        bits = _hash(_flat_places(part, shape, value.device))
        for number in range(PROJECTIONS):
            sums[number] += (held * (((bits >> number) & 1) * 2 - 1)).sum()
        sums[PROJECTIONS] += held.square().sum()
    return [*sums.tolist(), float(value.numel())]


def _flat_places(part: Box, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Of each element of `part`, where it is in the global tensor, row-major."""
    places = torch.zeros(extents(part), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(shape))):
        start, stop = part[dim]
        along = torch.arange(start, stop, device=device) * stride
        places += along.view([-1 if d == dim else 1 for d in range(len(shape))])
        stride *= shape[dim]
    return places.reshape(-1)


def _hash(places: Tensor) -> Tensor:
    """The finishing steps of splitmix64, whose low bits look independent; int64 arithmetic wraps around."""
    mixed = places + 0x1E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
    return mixed ^ (mixed >> 31)
