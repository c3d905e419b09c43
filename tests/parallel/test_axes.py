"""All parallel axes together equal the unsharded model."""

from collections.abc import Callable
from typing import Any

import pytest

import expertmesh as em
from tests.support.one_launch import Launched, one_launch
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


def _case(world: int, layout: dict[str, Any], family: str) -> tuple[int, Callable[[], Distance]]:
    expected = reference(family)
    return world, lambda: train_sharded(expected, em.ParallelConfig(**layout), 2)


@pytest.mark.slow_cases(
    r"8-.*",
    r"4-\{tp: 2, cp: 2, ep: 4\}-deepseek_v3",
    r"4-\{tp: 2, cp: 2, ep: 2\}-qwen3_moe",
    r"4-\{tp: 2, cp: 2, ep: 2\}-deepseek_v3",
    r"4-\{pp: 2, tp: 2, ep: 2\}-qwen3_moe",
    r"4-\{pp: 2, tp: 2, ep: 2\}-deepseek_v3",
    r"4-\{pp: 2, cp: 2, ep: 2\}-qwen3_moe",
    r"8-\{replicate: 2, cp: 2, tp: 2, ep: 4\}-qwen3_moe",
    r"8-\{replicate: 2, cp: 2, tp: 2, ep: 4\}-deepseek_v3",
    r"8-\{pp: 2, fsdp: 2, tp: 2, ep: 2\}-deepseek_v3",
    why="tp with cp, pp with cp, and eight ranks in four axes stay",
)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=lambda value: str(value).replace("'", ""))
@one_launch(_case)
def test_axes_together_equal_one_process(launched: Launched, world: int, layout: dict[str, Any], family: str) -> None:
    for distance in launched():
        distance.check(TOLERANCE)
