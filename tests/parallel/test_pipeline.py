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


# (world size, axes, rows of a micro-batch, changes of the model)
LAYOUTS: dict[str, tuple[int, dict[str, Any], int, dict[str, Any]]] = {
    "interleaved": (2, {"pp": 2, "pp_virtual_stages": 2}, 1, {"num_hidden_layers": 4}),
    "interleaved on uneven blocks": (2, {"pp": 2, "pp_virtual_stages": 2}, 2, {"num_hidden_layers": 5}),
    "uneven blocks": (2, {"pp": 2}, 2, {"num_hidden_layers": 3}),
    "stages of ep 2": (4, {"pp": 2, "ep": 2}, 1, {}),
    "stages of fsdp 2": (4, {"pp": 2}, 2, {}),
    "two replicas": (4, {"pp": 2, "replicate": 2}, 1, {}),
    "two interleaved replicas": (
        4,
        {"pp": 2, "replicate": 2, "pp_virtual_stages": 2},
        1,
        {"num_hidden_layers": 4, "tie_word_embeddings": True},
    ),
    "tied embeddings": (2, {"pp": 2}, 1, {"tie_word_embeddings": True}),
    "tied embeddings over fsdp 2": (4, {"pp": 2, "pp_schedule": "gpipe"}, 1, {"tie_word_embeddings": True}),
    "three stages": (3, {"pp": 3}, 1, {"num_hidden_layers": 3, "tie_word_embeddings": True}),
    "fewer micro-batches than stages": (2, {"pp": 2}, 8, {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_the_unsharded_model(layout: str) -> None:
    world, parallel, micro_batch, changes = LAYOUTS[layout]
    _check(_run("qwen3_moe", world, parallel, micro_batch, changes))


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "olmoe"])
def test_other_families_with_ep_inside_stages(family: str) -> None:
    _check(_run(family, 4, {"pp": 2, "ep": 2}))


def test_in_double_precision_nothing_is_left_but_the_last_digits() -> None:
    _check(_run("qwen3_moe", 2, {"pp": 2}, dtype=torch.float64), 1e-10)


def test_checkpointed_blocks_give_the_same_result() -> None:
    _check(_run("deepseek_v3", 4, {"pp": 2, "ep": 2}, activation_checkpointing=True))
