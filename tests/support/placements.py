"""Placements of random experts, for jobs that must not notice."""

from pathlib import Path

import torch
from torch import nn

import expertmesh as em
from expertmesh.anatomy import describe
from expertmesh.experts.placement import Placement, write_placement


def drawn(path: Path, model: nn.Module, ep: int, seed: int = 0) -> em.MoeConfig:
    """Write a placement of random experts, equally many on each rank, and return the section that names it."""
    random, orders = torch.Generator().manual_seed(seed), {}
    for spec in describe(model).experts:
        shares = torch.randperm(spec.num_experts, generator=random).chunk(ep)
        orders[spec.name] = tuple(int(expert) for share in shares for expert in share.sort().values)
    write_placement(Placement(ep, orders), path)
    return em.MoeConfig(placement=str(path))
