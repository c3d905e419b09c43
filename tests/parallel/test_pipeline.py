"""A model cut into pipeline stages computes what the unsharded model computes, in every schedule.

Real gloo ranks; micro-batches of different lengths and very different numbers of targets.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import expertmesh as em
from expertmesh.config.errors import InputError
from expertmesh.distributed.mesh import Mesh
from expertmesh.step import forward_backward, grad_norm, pipeline_schedule
from tests.adapters.reference import tiny_peft_run, train_adapters
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.one_launch import Launched, one_launch
from tests.support.ranks import RankFailed, shared_ranks
from tests.support.reference import Distance, padded, reference, train_sharded

TOLERANCE = 1e-5


def _case(
    family: str,
    world: int,
    parallel: dict[str, Any],
    micro_batch: int = 1,
    changes: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[int, Callable[[], Distance]]:
    expected = reference(family, dtype, **(changes or {}))
    config = em.ParallelConfig(**{"ep": 1, **parallel})
    return world, lambda: train_sharded(expected, config, micro_batch, **options)


def _run_with_bug(
    bug: Callable[[nn.Module, Mesh], None], world: int, parallel: dict[str, Any], *options: Any
) -> list[Distance]:
    world, train = _case("qwen3_moe", world, parallel, *options, tamper=bug)
    return shared_ranks(train, world)


def _check(distances: list[Distance], tolerance: float = TOLERANCE) -> None:
    for distance in distances:
        distance.check(tolerance)


@pytest.mark.slow_cases(r"gpipe", why="tied embeddings over fsdp 2 stay, which has that schedule")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@one_launch(lambda schedule: _case("qwen3_moe", 2, {"pp": 2, "pp_schedule": schedule}))
def test_two_stages_equal_the_unsharded_model(launched: Launched, schedule: str) -> None:
    _check(launched())


# (world size, axes, rows of a micro-batch, changes of the model)
LAYOUTS: dict[str, tuple[int, dict[str, Any], int, dict[str, Any]]] = {
    "interleaved": (2, {"pp": 2, "pp_virtual_stages": 2}, 1, {"num_hidden_layers": 4}),
    "interleaved on uneven blocks": (2, {"pp": 2, "pp_virtual_stages": 2}, 2, {"num_hidden_layers": 5}),
    "uneven blocks": (2, {"pp": 2}, 2, {"num_hidden_layers": 3}),
    "micro-batches of 3, 3 and 2 rows": (2, {"pp": 2}, 3, {}),
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


@pytest.mark.slow_cases(
    r"interleaved",
    r"three stages",
    r"two interleaved replicas",
    r"tied embeddings",
    r"two replicas",
    r"uneven blocks",
    r"stages of fsdp 2",
    r"stages of ep 2",
    why="their harder neighbours stay, and deepseek_v3 with ep inside stages",
)
@pytest.mark.parametrize("layout", LAYOUTS)
@one_launch(lambda layout: _case("qwen3_moe", *LAYOUTS[layout]))
def test_every_layout_equals_the_unsharded_model(launched: Launched, layout: str) -> None:
    _check(launched())


@pytest.mark.slow_cases(r"(olmoe|mixtral)", why="one other family stays")
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "olmoe"])
@one_launch(lambda family: _case(family, 4, {"pp": 2, "ep": 2}))
def test_other_families_with_ep_inside_stages(launched: Launched, family: str) -> None:
    _check(launched())


@one_launch(lambda: _case("qwen3_moe", 2, {"pp": 2}, dtype=torch.float64))
def test_in_double_precision_nothing_is_left_but_the_last_digits(launched: Launched) -> None:
    _check(launched(), 1e-10)


@pytest.mark.slow_cases(r"(full-one block|selective-all blocks)", why="pairwise")
@pytest.mark.slow_cases(r"full-all blocks", why="selective stays")
@pytest.mark.parametrize("options", [{}, {"checkpoint_layers": (1,)}], ids=["all blocks", "one block"])
@pytest.mark.parametrize("mode", ["full", "selective"])
@one_launch(lambda mode, options: _case("deepseek_v3", 4, {"pp": 2, "ep": 2}, activation_checkpointing=mode, **options))
def test_checkpointed_blocks_give_the_same_result(launched: Launched, mode: str, options: dict[str, Any]) -> None:
    _check(launched())


@pytest.mark.slow(why="training/test_pipeline_run.py has adapters on stages")
def test_adapters_equal_stock_peft(tmp_path_factory: pytest.TempPathFactory) -> None:
    for family, parallel in (("qwen3_moe", {"pp": 2}), ("deepseek_v3", {"pp": 2, "ep": 2})):
        run = tiny_peft_run(family, tmp_path_factory.mktemp(family))
        config = em.ParallelConfig(**{"ep": 1, **parallel})
        for distance in shared_ranks(train_adapters, 2 * config.ep, run, config):
            distance.check(TOLERANCE)


def _adapt_the_last_block() -> None:
    model, lora = tiny_model("qwen3_moe"), em.LoraConfig(targets=("model.layers.1.self_attn.q_proj",))
    with refused("layout.pp-untrained-stage", naming="stage 0 (blocks 0)"):
        em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1, pp=2)), lora=lora)


def test_a_stage_without_anything_to_train_is_refused() -> None:
    shared_ranks(_adapt_the_last_block, 2)


def _scale_the_last_stage(model: nn.Module, mesh: Mesh) -> None:
    """What torch's schedules do unless told otherwise: the mean over micro-batches."""
    kind = torch.distributed.pipelining.Schedule1F1B

    def averaging(*args: Any, scale_grads: bool, **kwargs: Any) -> Any:
        schedule = kind(*args, scale_grads=True, **kwargs)
        for stage in [schedule._stage]:
            stage.scale_grads = lambda factor: [p.grad.div_(factor) for p in model.parameters() if p.grad is not None]
        return schedule

    if mesh.coordinate("pp") == 1:
        mock.patch.object(pipeline_schedule, "schedule_kind", return_value=averaging).start()


def _forget_the_tied_gradient(model: nn.Module, mesh: Mesh) -> None:
    mock.patch.object(forward_backward, "_sum_with_other_stage").start()


def _norm_of_one_stage(model: nn.Module, mesh: Mesh) -> None:
    silent = SimpleNamespace(all_reduce=lambda tensor, op, group: None, ReduceOp=dist.ReduceOp)
    mock.patch.object(grad_norm, "dist", silent).start()


def _count_the_tied_weight_twice(model: nn.Module, mesh: Mesh) -> None:
    mock.patch.object(grad_norm, "is_tied_replica", return_value=False).start()


@pytest.mark.parametrize(
    ("bug", "shows_in"),
    [
        (_scale_the_last_stage, "gradient"),
        (_norm_of_one_stage, "norm"),
        (_count_the_tied_weight_twice, "norm"),
    ],
)
def test_a_planted_bug_turns_the_comparison_red(bug: Callable[[nn.Module, Mesh], None], shows_in: str) -> None:
    tied = {"tie_word_embeddings": bug is _count_the_tied_weight_twice}
    for distance in _run_with_bug(bug, 2, {"pp": 2}, 2, tied):
        error = getattr(distance, shows_in)
        assert (error[0] if isinstance(error, tuple) else error) > 1e-3


def test_a_tied_gradient_of_one_stage_alone_is_seen() -> None:
    with pytest.raises(RankFailed, match=r"model\.embed_tokens\.weight differs between stages"):
        _run_with_bug(_forget_the_tied_gradient, 2, {"pp": 2}, 2, {"tie_word_embeddings": True})


def _refused(family: str, parallel: em.ParallelConfig, **changes: Any) -> str:
    model = tiny_model(family, **changes)
    with pytest.raises(InputError) as caught:
        em.parallelize(model, em.init_mesh(parallel))
    return str(caught.value)


def test_more_stages_than_blocks_are_refused() -> None:
    for message in shared_ranks(_refused, 3, "qwen3_moe", em.ParallelConfig(ep=1, pp=3)):
        assert message == (
            "parallel.pp: 3 stages (pp) need as many blocks, and the model has 2; lower parallel.pp or "
            "parallel.pp_virtual_stages"
        )


def _call_alone() -> None:
    model = tiny_model("qwen3_moe")
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1, pp=2)))
    with refused("layout.pp-needs-forward-backward"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64))


def test_a_stage_is_never_taken_for_the_model() -> None:
    shared_ranks(_call_alone, 2)


def _loss_alone() -> None:
    model = tiny_model("qwen3_moe")
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1, pp=2)))
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.int64), "labels": torch.zeros(1, 4, dtype=torch.int64)}
    with refused("layout.pp-needs-forward-backward"):
        em.causal_lm_loss(model, batch, target_tokens=3)


def test_the_loss_of_one_stage_is_refused_and_points_to_the_step() -> None:
    shared_ranks(_loss_alone, 2)


class _Messages(TorchDispatchMode):
    """Bytes sent by this rank, message by message."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "c10d::send":
            self.sent += [tensor.numel() * tensor.element_size() for tensor in args[0]]
        return func(*args, **(kwargs or {}))


def _count_messages(virtual: int) -> list[int]:
    model = tiny_model("qwen3_moe", num_hidden_layers=4)
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1, pp=2, pp_virtual_stages=virtual)))
    rows = reference("qwen3_moe").rows[0]
    batches = [padded(rows[start : start + 2]) for start in range(0, 8, 2)]
    with _Messages() as messages:
        em.forward_backward(model, batches, target_tokens=60)
    return [size for size in messages.sent if size > 8]  # beside the votes on whether shapes are known


@pytest.mark.slow_cases(r"1", why="virtual stages stay")
@pytest.mark.parametrize("virtual", [1, 2])
def test_a_step_sends_what_the_formula_says(virtual: int) -> None:
    """pp · v - 1 borders, m micro-batches, both ways, B · S · H elements each."""
    batches, size = 4, 2 * 23 * 32 * 4
    sent = shared_ranks(_count_messages, 2, virtual)
    assert sum(len(each) for each in sent) == 2 * batches * (2 * virtual - 1)
    assert {size} == {each for rank in sent for each in rank}


# Others are in test_axes.py.
AXES: dict[str, tuple[int, dict[str, Any], int, dict[str, Any]]] = {
    "tp, tied": (4, {"pp": 2, "tp": 2}, 2, {"tie_word_embeddings": True}),
    "cp, interleaved": (4, {"pp": 2, "cp": 2, "pp_virtual_stages": 2}, 2, {"num_hidden_layers": 4}),
}


@pytest.mark.slow_cases(r"tp, tied", why="test_axes.py has tp inside stages")
@pytest.mark.slow_cases(r"cp, interleaved", why="test_axes.py has cp inside stages")
@pytest.mark.parametrize("axes", AXES)
@one_launch(lambda axes: _case("qwen3_moe", *AXES[axes]))
def test_stages_of_other_axes_equal_the_unsharded_model(launched: Launched, axes: str) -> None:
    _check(launched())
