"""Rotary tables that depend on the largest position of a micro-batch stay those of its real tokens when it is padded.

Longrope chooses between two tables by that length. Pipelines pad micro-batches to one length, cp and tp to equal parts.
"""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import expertmesh as em
from tests.families.tiny import random_model
from tests.support.ranks import shared_ranks

# Rows of up to 15 positions have the short table.
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 15}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LONGROPE |= {"short_mscale": 1.0, "long_mscale": 1.3, "factor": 8.0}


def _batch(length: int, numbered: bool) -> dict[str, torch.Tensor]:
    ids = torch.arange(length)[None] * 7 % 89 + 1
    numbers = {"position_ids": torch.arange(length)[None]} if numbered else {}
    return {"input_ids": ids, "labels": ids, **numbers}


def _step(lengths: tuple[int, ...], numbered: bool, axes: dict[str, int]) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of the step and the gradients of what this rank has."""
    model: Any = random_model("PhimoeForCausalLM", "phimoe", rope_parameters=LONGROPE, max_position_embeddings=120)
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1, **axes)))  # type: ignore[arg-type]
    result = em.forward_backward(model, [_batch(length, numbered) for length in lengths], target_tokens=40)
    loss = torch.as_tensor(float(result.loss))
    torch.distributed.all_reduce(loss)
    return float(loss), {n: p.grad.full_tensor() for n, p in model.named_parameters() if isinstance(p.grad, DTensor)}


@pytest.mark.parametrize("numbered", [False, True], ids=["without position ids", "with position ids"])
@pytest.mark.parametrize(
    ("lengths", "axes"), [((9, 30), {"pp": 2}), ((15,), {"cp": 2}), ((15,), {"tp": 2})], ids=["pp", "cp", "tp"]
)
def test_padding_does_not_change_the_table_of_real_tokens(
    lengths: tuple[int, ...], axes: dict[str, int], numbered: bool
) -> None:
    ((expected, gradients),) = shared_ranks(_step, 1, lengths, numbered, {})
    for loss, found in shared_ranks(_step, 2, lengths, numbered, axes):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert found
        for name, gradient in found.items():
            assert (gradient - gradients[name]).norm() <= 1e-5 * max(float(gradients[name].norm()), 1e-3), name
