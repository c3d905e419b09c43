"""Routers that starve ranks: no hang, and gradients as exact as ever (pains: twinkle, Automodel 935, DeepSpeed 5066).

The first embedding dimension marks the half of the vocabulary that a token belongs to, and the router looks at it
alone: the lower half goes to experts 0 and 1, the upper half to experts 4 and 5.
"""

import functools

import pytest
import torch
from torch import nn

import expertmesh as em
from tests.support.one_launch import Launched, one_launch
from tests.support.reference import Reference, reference, train_sharded


@torch.no_grad()
def route_by_half(model: nn.Module) -> None:
    marker = model.model.embed_tokens.weight[:, 0]
    marker.fill_(-50.0)
    marker[:48] = 50.0
    for layer in model.model.layers:
        layer.mlp.gate.weight.mul_(0.05)
        layer.mlp.gate.weight[0:2, 0] += 1.0
        layer.mlp.gate.weight[4:6, 0] -= 1.0


EVERY_ROW, FIRST_EP_GROUP = (0, 1, 2, 3), (0, 1)


def _expected(confined: tuple[int, ...]) -> Reference:
    # In fp64: the marker dwarfs everything else, so that in fp32 some gradients are mostly cancellation.
    return reference("qwen3_moe", torch.float64, prepare=route_by_half, confined=confined)


@pytest.mark.slow_cases(r"(2-confined1|2-confined2|1-confined3)", why="ranks that never compute a token stay")
@pytest.mark.parametrize(
    ("ep", "confined"),
    [
        (4, EVERY_ROW),  # efsdp 1: ranks 1, 2 and 3 never compute a token
        (2, EVERY_ROW),  # efsdp 2: both shards of experts 4..7 are idle
        (2, FIRST_EP_GROUP),  # efsdp 2: of the two ranks that share experts 4..7, one is idle and one is not
        (1, FIRST_EP_GROUP),  # efsdp 4
    ],
)
@one_launch(lambda ep, confined: (4, functools.partial(train_sharded, _expected(confined), em.ParallelConfig(ep=ep))))
def test_ranks_without_a_token_take_part_and_every_gradient_is_right(
    launched: Launched, ep: int, confined: tuple[int, ...]
) -> None:
    expected = _expected(confined)
    idle = expected.gradients["model.layers.0.mlp.experts.down_proj"][4:].abs().sum()
    assert bool(idle == 0) is (confined == EVERY_ROW)
    assert expected.gradients["model.layers.0.mlp.experts.down_proj"][2:4].abs().sum() == 0
    for distance in launched():
        distance.check(1e-10)
