"""Accumulation by layer computes what the unsharded model computes, with one reduction of each layer a round.

Real gloo ranks; micro-batches of different lengths and very different numbers of targets.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import expertmesh as em
from tests.support.one_launch import Launched, one_launch
from tests.support.reference import Distance, reference, train_sharded

TOLERANCE = 1e-5


def _case(
    family: str,
    world: int,
    parallel: dict[str, Any],
    micro_batch: int = 1,
    changes: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    round: int | None = None,
    **options: Any,
) -> tuple[int, Callable[[], Distance]]:
    expected = reference(family, dtype, **(changes or {}))
    config = em.ParallelConfig(**{"ep": 1, **parallel})
    order = {"accumulate": "by_layer", "round": round}
    return world, lambda: train_sharded(expected, config, micro_batch, order=order, **options)


def _check(distances: list[Distance], tolerance: float = TOLERANCE) -> None:
    for distance in distances:
        distance.check(tolerance)


# (family, world size, axes, options)
LAYOUTS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "fsdp": ("qwen3_moe", 2, {}, {"changes": {"num_hidden_layers": 3}}),
    "tied embeddings": ("qwen3_moe", 2, {}, {"changes": {"tie_word_embeddings": True}}),
    "rounds": ("qwen3_moe", 2, {"ep": 2}, {"round": 3}),
    "one rank": ("qwen3_moe", 1, {}, {}),
    "ep and recomputation": ("deepseek_v3", 4, {"ep": 2}, {"activation_checkpointing": "full"}),
    "ep inside nodes": ("qwen3_moe", 4, {"ep": 2}, {"activation_checkpointing": "selective"}),
    "replicas": ("mixtral", 4, {"ep": 2, "replicate": 2}, {"round": 1}),
    "tp": ("qwen3_moe", 2, {"tp": 2}, {}),
    "cp": ("qwen3_moe", 2, {"cp": 2, "ep": 2}, {}),
    "tp, cp and ep": ("gpt_oss", 4, {"tp": 2, "cp": 2, "ep": 4}, {"micro_batch": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@one_launch(lambda layout: _case(*LAYOUTS[layout][:3], **LAYOUTS[layout][3]))
def test_every_layout_equals_the_unsharded_model(launched: Launched, layout: str) -> None:
    _check(launched())


@one_launch(lambda: _case("qwen3_moe", 4, {"ep": 2}, dtype=torch.float64))
def test_in_double_precision_nothing_is_left_but_the_last_digits(launched: Launched) -> None:
    _check(launched(), 1e-10)
