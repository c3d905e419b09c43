"""Experts on any rank: what `moe.placement` gives equals the unsharded model, and nothing outside sees the order."""

from pathlib import Path

import pytest
import torch

import expertmesh as em
from expertmesh.anatomy import describe
from expertmesh.experts.placement import Placement, write_placement
from tests.support.ranks import shared_ranks
from tests.support.reference import reference, train_sharded


def drawn(path: Path, layers: dict[str, int], ep: int, seed: int = 0) -> em.MoeConfig:
    """Write a placement of random experts, as many on each rank, and return the section that names it."""
    random = torch.Generator().manual_seed(seed)
    orders = {}
    for name, experts in layers.items():
        shares = torch.randperm(experts, generator=random).chunk(ep)
        orders[name] = tuple(int(expert) for share in shares for expert in share.sort().values)
    write_placement(Placement(ep, orders), path)
    return em.MoeConfig(placement=str(path))


@pytest.mark.parametrize(
    ("family", "layout", "dtype"),
    [
        ("qwen3_moe", (2, 2, 1), torch.float32),
        ("qwen3_moe", (4, 2, 1), torch.float64),
        ("deepseek_v3", (4, 4, 1), torch.float32),
        ("gpt_oss", (4, 2, 2), torch.float32),
    ],
)
def test_experts_on_any_rank_equal_the_unsharded_model(
    family: str, layout: tuple[int, int, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    (world, ep, replicate), expected = layout, reference(family, dtype)
    moe = drawn(
        tmp_path / "placement.json", {spec.name: spec.num_experts for spec in describe(expected.model).experts}, ep
    )
    parallel = em.ParallelConfig(ep=ep, replicate=replicate)
    for distance in shared_ranks(lambda: train_sharded(expected, parallel, 1, moe=moe), world):
        distance.check(1e-5 if dtype == torch.float32 else 1e-10)
