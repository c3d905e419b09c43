"""All parallel axes together equal the unsharded model."""

from typing import Any

import pytest

import expertmesh as em
from tests.support.ranks import run_ranks
from tests.support.reference import Distance, reference, train_sharded

TOLERANCE = 1e-5
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (4, {"tp": 2, "cp": 2, "ep": 4}),
    (4, {"tp": 2, "cp": 2, "ep": 2}),
    (4, {"pp": 2, "tp": 2, "ep": 2}),
    (4, {"pp": 2, "cp": 2, "ep": 2}),
    (8, {"replicate": 2, "cp": 2, "tp": 2, "ep": 4}),
    (8, {"pp": 2, "fsdp": 2, "tp": 2, "ep": 2}),
]


def _all(family: str, layouts: list[dict[str, Any]]) -> list[Distance]:
    expected = reference(family)
    return [train_sharded(expected, em.ParallelConfig(**layout), micro_batch=2) for layout in layouts]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_axes_together_equal_one_process(family: str) -> None:
    reference(family)
    for ranks in (4, 8):
        layouts = [layout for size, layout in LAYOUTS if size == ranks]
        for distance in run_ranks(_all, ranks, family, layouts, timeout=100)[0]:
            distance.check(TOLERANCE)
