"""A model cut into pipeline stages computes what the unsharded model computes, in every schedule.

Real gloo ranks; micro-batches of different lengths and very different numbers of targets.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import expertmesh as em
from expertmesh.mesh import Mesh
from tests.support.ranks import run_ranks
from tests.support.reference import Distance, reference, train_sharded

TOLERANCE = 1e-5


def _run(
    family: str, world: int, parallel: dict[str, Any], micro_batch: int = 1, changes: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32, **options: Any,
) -> list[Distance]:
    expected = reference(family, dtype, **(changes or {}))
    config = em.ParallelConfig(**{"ep": 1, **parallel})
    return run_ranks(lambda: train_sharded(expected, config, micro_batch, **options), world)


def _check(distances: list[Distance], tolerance: float = TOLERANCE) -> None:
    for distance in distances:
        distance.check(tolerance)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_two_stages_equal_the_unsharded_model(schedule: str) -> None:
    _check(_run("qwen3_moe", 2, {"pp": 2, "pp_schedule": schedule}))
