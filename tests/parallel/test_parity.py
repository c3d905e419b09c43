"""The sharded job computes what the unsharded Hugging Face model computes: loss, norm, every gradient, weights.

Real gloo ranks, different rows on every data rank, very uneven target counts, padded micro-batches, accumulation,
clipping, AdamW. The planted bugs at the end show that each of these comparisons can fail.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import expertmesh as em
from expertmesh.distributed.mesh import Mesh
from expertmesh.experts import dispatch
from expertmesh.step import grad_norm
from tests.support.one_launch import Launched, one_launch
from tests.support.ranks import shared_ranks
from tests.support.reference import Distance, reference, train_sharded

FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3"]
# (world size, ep, replicate, rows of a micro-batch); the accumulation count follows from 8 rows a step
LAYOUTS = [(1, 1, 1, 1), (2, 1, 1, 2), (2, 2, 1, 1), (4, 2, 1, 2), (4, 4, 1, 1), (4, 2, 2, 1), (4, 1, 2, 2)]
TOLERANCE = 1e-5


def _case(
    family: str,
    layout: tuple[int, int, int, int],
    dtype: torch.dtype = torch.float32,
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[int, Callable[[], Distance]]:
    world, ep, replicate, micro_batch = layout
    expected = reference(family, dtype, **(changes or {}))
    parallel = em.ParallelConfig(ep=ep, replicate=replicate)
    return world, lambda: train_sharded(expected, parallel, micro_batch, **options)


def _run(family: str, layout: tuple[int, int, int, int], **options: Any) -> list[Distance]:
    world, train = _case(family, layout, **options)
    return shared_ranks(train, world)


def _check(distances: list[Distance], tolerance: float = TOLERANCE) -> None:
    for distance in distances:
        distance.check(tolerance)


@pytest.mark.slow_cases(
    r"world2-(ep1-replicate1-micro2-mixtral|ep2-replicate1-micro1-qwen3_moe)",
    why="two ranks stay in double precision",
)
@pytest.mark.slow_cases(
    r"(world1-ep1-replicate1-micro1|world2-ep2-replicate1-micro1|world4-ep2-replicate2-micro1)-(mixtral|deepseek_v3)",
    why="pairwise over families and layouts",
)
@pytest.mark.slow_cases(
    r"(world2-ep1-replicate1-micro2|world4-ep2-replicate1-micro2|world4-ep1-replicate2-micro2)-(qwen3_moe|deepseek_v3)",
    why="pairwise over families and layouts",
)
@pytest.mark.slow_cases(r"(world4-ep4-replicate1-micro1)-(qwen3_moe|mixtral)", why="pairwise over families and layouts")
@pytest.mark.slow_cases(r"world4-ep1-replicate2-micro2-mixtral", why="pairwise over families and layouts")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda n: "world{}-ep{}-replicate{}-micro{}".format(*n))
@one_launch(lambda family, layout: _case(family, layout))
def test_every_gradient_and_the_weights_after_two_steps_equal_the_unsharded_model(
    launched: Launched, family: str, layout: tuple[int, int, int, int]
) -> None:
    _check(launched())


@pytest.mark.slow(why="test_axes.py has eight ranks")
def test_eight_ranks_in_two_expert_groups_equal_the_unsharded_model() -> None:
    _check(_run("qwen3_moe", (8, 4, 1, 1)))


@pytest.mark.slow_cases(r"layout1", why="two ranks stay")
@pytest.mark.parametrize("layout", [(2, 2, 1, 2), (4, 2, 1, 1)])
@one_launch(lambda layout: _case("qwen3_moe", layout, torch.float64))
def test_in_double_precision_nothing_is_left_but_the_last_digits(
    launched: Launched, layout: tuple[int, int, int, int]
) -> None:
    _check(launched(), 1e-10)


@one_launch(lambda: _case("deepseek_v3", (4, 2, 1, 1), moe=em.MoeConfig(compute="loop")))
def test_one_expert_after_the_other_gives_the_same_result(launched: Launched) -> None:
    _check(launched())


@pytest.mark.slow_cases(r"qwen3_moe-none", why="the checkpointed one stays")
@pytest.mark.parametrize(("family", "mode"), [("qwen3_moe", "none"), ("deepseek_v3", "full")])
def test_rows_that_travel_node_by_node_give_the_same_result(
    family: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    _check(_run(family, (4, 4, 1, 1), moe=em.MoeConfig(dispatch="hierarchical"), activation_checkpointing=mode))


@pytest.mark.slow_cases(r"(layout1-full|layout2-selective)", why="each mode once")
@pytest.mark.parametrize(
    ("layout", "mode"),
    [((2, 1, 1, 1), "full"), ((4, 2, 1, 1), "full"), ((4, 1, 2, 1), "selective"), ((4, 4, 1, 2), "selective")],
)
@one_launch(lambda layout, mode: _case("deepseek_v3", layout, activation_checkpointing=mode))
def test_checkpointed_blocks_give_the_same_result(
    launched: Launched, layout: tuple[int, int, int, int], mode: str
) -> None:
    _check(launched())


@one_launch(lambda: _case("qwen3_moe", (4, 2, 1, 1), changes={"num_experts": 6}))
def test_experts_that_efsdp_does_not_divide_are_sharded_on_a_later_dim(launched: Launched) -> None:
    _check(launched())


@pytest.mark.slow_cases(r"layout1", why="two ranks stay")
@pytest.mark.parametrize("layout", [(2, 2, 1, 1), (4, 2, 2, 1)])
@one_launch(lambda layout: _case("qwen3_moe", layout, changes={"tie_word_embeddings": True}))
def test_tied_embeddings_get_both_gradients(launched: Launched, layout: tuple[int, int, int, int]) -> None:
    _check(launched())


def _double_expert_gradients(model: nn.Module, mesh: Mesh) -> None:
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.register_hook(lambda gradient: gradient * 2)


def _swap_two_experts(model: nn.Module, mesh: Mesh) -> None:
    if mesh.rank == 1:
        local = model.model.layers[1].mlp.experts.down_proj.data.to_local()
        local[[0, 1]] = local[[1, 0]]


def _broadcast_rank_0(model: nn.Module, mesh: Mesh) -> None:
    """huggingface/transformers 45662: every rank ends up with slices of rank 0's experts."""
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            dist.broadcast(parameter.data.to_local(), src=0)


def _drop_router_gradient(model: nn.Module, mesh: Mesh) -> None:
    backward = dispatch._AllToAllDispatch.backward

    def without_weights(ctx: Any, *grads: torch.Tensor) -> Any:
        hidden, weight, *rest = backward(ctx, *grads)
        return hidden, torch.zeros_like(weight), *rest

    mock.patch.object(dispatch._AllToAllDispatch, "backward", staticmethod(without_weights)).start()


def _local_norm(model: nn.Module, mesh: Mesh) -> None:
    silent = SimpleNamespace(all_reduce=lambda *args, **kwargs: None, ReduceOp=dist.ReduceOp)
    mock.patch.object(grad_norm, "dist", silent).start()


@pytest.mark.parametrize(
    ("bug", "shows_in"),
    [
        (_double_expert_gradients, "expert_ratio"),
        (_swap_two_experts, "loss"),
        (_broadcast_rank_0, "loss"),
        (_drop_router_gradient, "gradient"),
        (_local_norm, "norm"),
    ],
)
def test_a_planted_bug_turns_the_comparison_red(bug: Callable[[nn.Module, Mesh], None], shows_in: str) -> None:
    distance, _ = _run("qwen3_moe", (2, 2, 1, 1), tamper=bug)
    with pytest.raises(AssertionError):
        distance.check(TOLERANCE)
    found = getattr(distance, shows_in)
    assert abs(found - 1 if shows_in == "expert_ratio" else found[0] if isinstance(found, tuple) else found) > 1e-3
