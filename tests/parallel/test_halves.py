"""`moe.interleave`: a block runs on two halves of its rows in one call, and computes what it does on all of them.

Every proof runs with late all-to-alls: what is received is NaN until it is waited for, and what is sent is taken then.
So values or gradients that are read, or changed, while they travel are seen, which gloo would mostly hide. What is
counted and the order of events are exact.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import expertmesh as em
from expertmesh.compat import TorchDispatchMode, tree_leaves
from expertmesh.distributed import collectives
from expertmesh.experts import dispatch, expert_mlp
from expertmesh.parallel.halves import blocks, travel
from tests.adapters.reference import TARGETS, random_adapter, tiny_peft_run, train_adapters, trainables, worst
from tests.adapters.reference import take_steps as take_adapter_steps
from tests.families.tiny import random_model
from tests.parallel.test_router_loss import AUX, Z, expected, _prove
from tests.support.errors import refused, refused_on_ranks
from tests.support.models import tiny_model
from tests.support.ranks import run_ranks
from tests.support.reference import _rows, padded, reference, train_sharded

pytest.importorskip("greenlet", reason="moe.interleave needs greenlet")

MOE = em.MoeConfig(interleave=True)
MODES = ("none", "selective", "full")
HIDDEN, LAYERS = 32, 2
TOLERANCE = 1e-5


class _Late:
    """An all-to-all that happens when it is waited for."""

    def __init__(self, exchange: Callable[[], None]) -> None:
        self.exchange: Callable[[], None] | None = exchange

    def wait(self) -> None:
        if self.exchange is not None:
            self.exchange()
        self.exchange = None


def _late(rows: torch.Tensor, send: Any, receive: Any, group: Any, *, wait: bool = True) -> Any:
    if wait:
        return collectives.all_to_all(rows, send, receive, group)
    received = rows.new_full((sum(receive), *rows.shape[1:]), float("nan") if rows.is_floating_point() else -1)

    def exchange() -> None:
        received.copy_(collectives.all_to_all(rows, send, receive, group)[0])

    return received, _Late(exchange)


@contextmanager
def _traffic(all_to_all: Callable[..., Any] = _late) -> Iterator[None]:
    with ExitStack() as stack:
        for module in (dispatch, travel):
            stack.enter_context(mock.patch.object(module, "all_to_all", all_to_all))
        yield


def _check(family: str, parallel: dict[str, int], world: int, micro_batch: int, dtype: Any, **options: Any) -> None:
    want = reference(family, dtype)

    def trained() -> Any:
        with _traffic():
            return train_sharded(want, em.ParallelConfig(**parallel), micro_batch, moe=MOE, **options)

    for distance in run_ranks(trained, world):
        distance.check(TOLERANCE if dtype == torch.float32 else 1e-10)


# Of four ranks each has two of a step's rows, or with cp, tp and replicas more; of two ranks four: three and a single.
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("family", "parallel", "world", "micro_batch"),
    [
        ("qwen3_moe", {"ep": 4}, 4, 2),
        ("qwen3_moe", {"ep": 2}, 4, 2),
        ("qwen3_moe", {"ep": 2}, 2, 3),
        ("deepseek_v3", {"ep": 2}, 4, 2),
        ("gpt_oss", {"ep": 4}, 4, 2),
    ],
)
def test_every_gradient_and_the_weights_after_two_steps_equal_the_unsharded_model(
    family: str, parallel: dict[str, int], world: int, micro_batch: int, mode: str
) -> None:
    _check(family, parallel, world, micro_batch, torch.float32, activation_checkpointing=mode)


@pytest.mark.parametrize(
    ("parallel", "mode"),
    [({"ep": 2, "cp": 2}, "full"), ({"ep": 4, "tp": 2}, "none"), ({"ep": 2, "tp": 2}, "full"), ({"ep": 2, "replicate": 2}, "selective")],
    ids=["cp", "tp", "tp-full", "replicate"],
)
def test_so_they_do_on_the_other_axes(parallel: dict[str, int], mode: str) -> None:
    _check("qwen3_moe", parallel, 4, 2, torch.float32, activation_checkpointing=mode)


def test_in_double_precision_nothing_is_left_but_the_last_digits() -> None:
    _check("qwen3_moe", {"ep": 2}, 4, 2, torch.float64)


def _swap(own: Callable[..., Any], calls: Any, rows: Any, shape: Any) -> Any:
    """The planted bug: the halves' tokens in the wrong order."""
    return own(calls, rows, shape).flip(0)


def _forget_to_wait(own: Callable[..., Any], work: Any) -> None:
    return None


def _send_twice(own: Callable[..., Any], ctx: Any, gradient: torch.Tensor) -> Any:
    own(ctx, gradient)
    return own(ctx, gradient * 2)


@pytest.mark.parametrize(
    ("where", "name", "bug"),
    [
        (blocks, "result_of", _swap),
        (travel, "wait", _forget_to_wait),
        (dispatch, "wait", _forget_to_wait),
        (travel._SumArrived, "backward", _send_twice),
    ],
    ids=["halves swapped", "results not awaited", "rows not awaited", "gradients sent twice"],
)
def test_a_planted_bug_turns_the_comparison_red(where: Any, name: str, bug: Callable[..., Any]) -> None:
    own = getattr(where, name)

    def planted(*args: Any) -> Any:
        return bug(own, *args)

    with pytest.raises(AssertionError), mock.patch.object(where, name, staticmethod(planted) if isinstance(where, type) else planted):
        _check("qwen3_moe", {"ep": 2}, 2, 2, torch.float32)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter")
    random_adapter(tiny_model("deepseek_v3"), directory, *TARGETS["deepseek_v3"])
    return directory


@pytest.mark.parametrize("mode", MODES)
def test_adapters_drop_what_they_drop_in_one_process(adapter: Path, mode: str) -> None:
    def trained(ep: int, micro_batch: int, **options: Any) -> dict[str, torch.Tensor]:
        model: Any = tiny_model("deepseek_v3")
        mesh = em.init_mesh(em.ParallelConfig(ep=ep))
        em.parallelize(model, mesh, lora=em.LoraConfig(from_adapter=str(adapter), dropout=0.3), **options)
        with _traffic():
            take_adapter_steps(model, mesh, [_rows(step, ()) for step in range(2)], micro_batch)
        return trainables(model)

    (alone,) = run_ranks(trained, 1, 1, 1)
    # Of four rows three and a single one.
    for own in run_ranks(lambda: trained(2, 3, moe=MOE, activation_checkpointing=mode), 2):
        assert worst(own, alone)[0] <= TOLERANCE


def test_adapters_are_stock_pefts(tmp_path: Path) -> None:
    run = tiny_peft_run("qwen3_moe", tmp_path)
    for distance in run_ranks(lambda: train_adapters(run, em.ParallelConfig(ep=2), 2, moe=MOE), 4):
        distance.check(TOLERANCE)


@pytest.mark.parametrize("layout", [(2, 2, 1, 8), (4, 4, 1, 2)])
def test_router_losses_and_loads_are_those_of_whole_micro_batches(layout: tuple[int, int, int, int]) -> None:
    moe = em.MoeConfig(interleave=True, aux_loss_coef=AUX, z_loss_coef=Z)
    _prove(expected("qwen3_moe"), layout, moe=moe, activation_checkpointing="full")


def _gradients(
    family: str, moe: em.MoeConfig, rows: int, mode: Any = "none", packed: bool = False, **options: Any
) -> dict[str, torch.Tensor]:
    """Of a micro-batch of `rows` rows, other ones on each rank; this rank's shards."""
    initial = random_model(family, family, **({"torch_dtype": torch.float32}))
    mesh = em.init_mesh(em.ParallelConfig(ep=dist.get_world_size()))
    model = em.parallelize(initial.train(), mesh, moe=moe, activation_checkpointing=mode, **options)
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(96, (rows, 12))
    batch = {"input_ids": tokens, "labels": tokens}
    if packed:
        starts = [[0, 5], [0, 8], [0, 3], [0, 9]]
        position = [torch.cat([torch.arange(second), torch.arange(12 - second)]) for _, second in starts]
        batch["position_ids"] = torch.stack([position[row % 4] for row in range(rows)])
    with _traffic():
        em.causal_lm_loss(model, batch, target_tokens=50).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: (g.to_local() if isinstance(g, DTensor) else g).clone() for name, g in found.items()}
