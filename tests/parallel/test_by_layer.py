"""Accumulation by layer computes what the unsharded model computes, with one reduction of each layer a round.

Real gloo ranks; micro-batches of different lengths and very different numbers of targets.
"""

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import expertmesh as em
from expertmesh.distributed.mesh import Mesh
from expertmesh.parallel.pipeline import layers_of
from expertmesh.step import by_layer
from tests.adapters.reference import AdapterDistance, tiny_peft_run, train_adapters
from tests.support.collectives import Collectives
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.one_launch import Launched, one_launch
from tests.support.ranks import shared_ranks
from tests.support.reference import Distance, padded, reference, train_sharded, whole, worst

TOLERANCE = 1e-5


def _case(
    family: str,
    world: int,
    parallel: dict[str, Any],
    micro_batch: int = 1,
    changes: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    round: int | None = None,
    keep_inputs: str = "device",
    **options: Any,
) -> tuple[int, Callable[[], Distance]]:
    expected = reference(family, dtype, **(changes or {}))
    config = em.ParallelConfig(**{"ep": 1, **parallel})
    order = {"accumulate": "by_layer", "round": round, "keep_inputs": keep_inputs}
    return world, lambda: train_sharded(expected, config, micro_batch, order=order, **options)


def _check(distances: list[Distance], tolerance: float = TOLERANCE) -> None:
    for distance in distances:
        distance.check(tolerance)


# Blocks between the first and the last are called alone, without the model around them.
BLOCKS = {"num_hidden_layers": 4}
ON_HOST = {"keep_inputs": "host"}
# (family, world size, axes, options)
LAYOUTS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "fsdp": ("qwen3_moe", 2, {}, {}),
    "tied embeddings": ("qwen3_moe", 2, {}, {"changes": {"tie_word_embeddings": True, **BLOCKS}}),
    "rounds": ("qwen3_moe", 2, {"ep": 2}, {"round": 3}),
    "one rank": ("qwen3_moe", 1, {}, {}),
    "ep and recomputation": ("deepseek_v3", 4, {"ep": 2}, {"activation_checkpointing": "full"}),
    "ep and half of it recomputed": ("qwen3_moe", 4, {"ep": 2}, {"activation_checkpointing": "selective"}),
    "replicas": ("mixtral", 4, {"ep": 2, "replicate": 2}, {"round": 1}),
    "tp": ("qwen3_moe", 2, {"tp": 2}, {}),
    "cp": ("qwen3_moe", 2, {"cp": 2, "ep": 2}, {}),
    "inputs on the host": ("qwen3_moe", 2, {"ep": 2}, {"activation_checkpointing": "full", **ON_HOST}),
    "inputs on the host, tp, cp": ("deepseek_v3", 4, {"tp": 2, "cp": 2, "ep": 2}, {"round": 3, **ON_HOST}),
}


@pytest.mark.slow_cases(
    r"(fsdp|inputs on the host, tp, cp|tied embeddings|replicas|ep and half of it recomputed|one rank)",
    why="tp, cp, rounds, recomputation and inputs on the host stay",
)
@pytest.mark.parametrize("layout", LAYOUTS)
@one_launch(lambda layout: _case(*LAYOUTS[layout][:3], **{"changes": BLOCKS, **LAYOUTS[layout][3]}))
def test_every_layout_equals_the_unsharded_model(launched: Launched, layout: str) -> None:
    _check(launched())


IN_FP64: dict[str, tuple[str, dict[str, Any]]] = {
    "ep": ("qwen3_moe", {"ep": 2}),
    "tp, cp and ep of windows": ("gpt_oss", {"tp": 2, "cp": 2, "ep": 4}),
}


@pytest.mark.slow_cases(r"tp, cp and ep of windows", why="ep alone stays")
@pytest.mark.parametrize("case", IN_FP64)
@one_launch(lambda case: _case(IN_FP64[case][0], 4, IN_FP64[case][1], 2, BLOCKS, torch.float64))
def test_in_double_precision_nothing_is_left_but_the_last_digits(launched: Launched, case: str) -> None:
    _check(launched(), 1e-10)


BY_LAYER: dict[str, Any] = {"accumulate": "by_layer"}
# (family, axes, options)
ADAPTERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "recomputed": ("qwen3_moe", {"ep": 2}, {"activation_checkpointing": "full"}),
    "tp": ("deepseek_v3", {"ep": 1, "tp": 2}, {}),
}


@pytest.mark.slow_cases(r"tp", why="with recomputation it stays")
@pytest.mark.parametrize("case", ADAPTERS)
def test_adapters_train_as_stock_pefts_do(case: str, tmp_path: Path) -> None:
    family, axes, options = ADAPTERS[case]
    run = tiny_peft_run(family, tmp_path, **BLOCKS)

    def train() -> AdapterDistance:
        return train_adapters(run, em.ParallelConfig(**axes), order=BY_LAYER, **options)

    for distance in shared_ranks(train, 2):
        distance.check(TOLERANCE)


def _count_collectives(micro_batches: int, order: dict[str, Any]) -> tuple[Counter[str], bool]:
    """Return the collectives of a step, and whether every parameter is sharded behind it."""
    model: Any = tiny_model("qwen3_moe", num_hidden_layers=3)
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1)), activation_checkpointing="full")
    batches = [padded(reference("qwen3_moe").rows[0][:1])] * micro_batches
    em.forward_backward(model, batches, target_tokens=60, **order)  # FSDP2 begins
    with Collectives() as collectives:
        em.forward_backward(model, batches, target_tokens=60, **order)
    return collectives.counts, all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.slow_cases(r"8-3-3", why="one round of two and of eight micro-batches stay")
@pytest.mark.parametrize(("micro_batches", "round", "rounds"), [(2, None, 1), (8, None, 1), (8, 3, 3)])
def test_each_layer_is_gathered_twice_and_reduced_once_a_round(
    micro_batches: int, round: int | None, rounds: int
) -> None:
    """Units: embedding, three blocks and their experts, and the root; the last block and the root are gathered once."""
    for counts, is_sharded in shared_ranks(_count_collectives, 2, micro_batches, {**BY_LAYER, "round": round}):
        gathers, reductions = rounds * (2 + 2 * 4 + 2 + 1), rounds * (1 + 6 + 1)
        # transformers looks at each micro-batch's mask, and again at its positions behind the blocks.
        assert counts == {"_allgather": gathers, "_reduce_scatter": reductions, "waits": 2 * micro_batches}
        assert is_sharded


def _inputs_left_on_the_device() -> list[list[int]]:
    """Return, for each layer after the first, the bytes of each micro-batch's input between forward and backward."""
    model: Any = tiny_model("qwen3_moe", num_hidden_layers=4)
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1)), activation_checkpointing="full")
    found, backward = list[list[int]](), by_layer.Round.backward

    def seen(self: by_layer.Round, *args: Any, **options: Any) -> None:
        for forwards in self._forwards[1:]:
            received = [forward.received for forward in forwards if forward is not None]
            found.append([0 if each is None else each.untyped_storage().nbytes() for each in received])
        backward(self, *args, **options)

    batches = [padded(reference("qwen3_moe").rows[0][:1])] * 3
    with mock.patch.object(by_layer.Round, "backward", seen):
        em.forward_backward(model, batches, target_tokens=60, **BY_LAYER, **ON_HOST)
    return found


def test_inputs_on_the_host_leave_the_device_but_for_the_last_layers() -> None:
    for second, third, last in shared_ranks(_inputs_left_on_the_device, 2):
        assert second == third == [0, 0, 0]
        assert all(last)


def _exchange_kept_inputs(model: nn.Module, mesh: Mesh) -> None:
    """Give the last layer, for each micro-batch but the first, the input of the one before, or of the token before."""
    before, call = list[torch.Tensor](), by_layer.Round._call

    def exchanged(self: by_layer.Round, block: int, number: int, received: torch.Tensor) -> torch.Tensor:
        before.append(received)
        other = before[-2] if len(before) > 1 else received
        return call(self, block, number, other if other.shape == received.shape else received.roll(1, 1))

    mock.patch.object(by_layer.Round, "_call", exchanged).start()


def _reduce_before_the_last(model: nn.Module, mesh: Mesh) -> None:
    """Leave the last micro-batch of the last layer out of its reduction."""
    layers, backwards = layers_of(model), itertools.count(1)

    def begin_backward(gradient: torch.Tensor) -> None:
        number = next(backwards)
        for unit in layers.units[-1]:
            unit.set_requires_gradient_sync(number % 4 == 3, recurse=False)

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(begin_backward)

    model.get_submodule(layers.pipeline.blocks[-1]).register_forward_hook(hook)


def _exchange_inputs_on_the_host(model: nn.Module, mesh: Mesh) -> None:
    """Bring back the input of one micro-batch as it was for the micro-batch before."""
    put, copies = by_layer.HostInput.__init__, list[torch.Tensor]()

    def exchanged(self: by_layer.HostInput, received: torch.Tensor) -> None:
        put(self, received)
        copies.append(self._copy)
        same = [copy for copy in copies if copy.numel() == self._copy.numel()]
        self._copy = same[-2] if len(same) > 1 else self._copy.roll(64)

    mock.patch.object(by_layer.HostInput, "__init__", exchanged).start()


@pytest.mark.parametrize("bug", [_exchange_kept_inputs, _reduce_before_the_last, _exchange_inputs_on_the_host])
def test_a_planted_bug_turns_the_comparison_red(bug: Callable[[nn.Module, Mesh], None]) -> None:
    on_host = {"changes": BLOCKS, **ON_HOST} if bug is _exchange_inputs_on_the_host else {}
    world, train = _case("qwen3_moe", 2, {}, tamper=bug, **on_host)
    for distance in shared_ranks(train, world):
        assert distance.gradient[0] > 1e-3, distance


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ({"accumulate": "by layer"}, "set it to by_micro_batch or by_layer"),
        ({"accumulate": "by_layer", "round": 0}, "at least 1"),
        ({"round": 2}, "with accumulate by_micro_batch"),
        ({"keep_inputs": "host"}, "host with by_layer"),
        ({"accumulate": "by_layer", "keep_inputs": "disk"}, "keep_inputs is 'disk'"),
    ],
)
def test_an_order_that_does_not_exist_is_refused(order: dict[str, Any], said: str) -> None:
    batch = padded(reference("qwen3_moe").rows[0][:1])
    with refused("config.wrong-value", naming=said):
        em.forward_backward(nn.Module(), [batch] * 2, target_tokens=60, **order)


def _refuse_images() -> None:
    model: Any = tiny_model("qwen3_moe")
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1)))
    batch = padded(reference("qwen3_moe").rows[0][:1])
    with refused("train.accumulate-unsupported", naming="pixel_values"):
        em.forward_backward(model, [batch | {"pixel_values": torch.zeros(1)}] * 2, target_tokens=60, **BY_LAYER)


def test_images_are_refused_by_name() -> None:
    shared_ranks(_refuse_images, 1)


class _Stop(Exception):
    pass


def _stop_in_second(block: nn.Module) -> Any:
    """Raise in the second backward of `block`; returns the handle of the hook."""
    calls = itertools.count(1)

    def raise_in_second(gradient: torch.Tensor) -> None:
        if next(calls) == 2:
            raise _Stop

    def hook(block: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(raise_in_second)

    return block.register_forward_hook(hook)


def _stopped(order: dict[str, Any], loop: bool) -> None:
    """Stop in the second micro-batch, and compare the next step with that of a model that was never stopped."""
    batches = [padded(reference("qwen3_moe").rows[0][first : first + 1]) for first in (0, 1)]
    found, whole_model = [], tiny_model("qwen3_moe", num_hidden_layers=3)
    for stops in (True, False):
        model: Any = copy.deepcopy(whole_model)
        em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1, replicate=2)))
        if stops:
            handle = _stop_in_second(model.model.layers[1])
            with pytest.raises(_Stop):
                em.forward_backward(model, batches, target_tokens=60, **order)
            handle.remove()
            model.zero_grad()
        if loop:
            for batch in batches:
                em.causal_lm_loss(model, batch, target_tokens=60).backward()
        else:
            em.forward_backward(model, batches, target_tokens=60, **order)
        found.append(whole({name: parameter.grad for name, parameter in model.named_parameters()}))
    assert worst(found[0], found[1])[0] <= 1e-6


@pytest.mark.slow_cases(r"(True-rounds|False-one round)", why="pairwise over orders and loops")
@pytest.mark.parametrize("order", [{}, BY_LAYER, BY_LAYER | {"round": 1}], ids=["batches", "one round", "rounds"])
@pytest.mark.parametrize("loop", [False, True])
def test_a_step_that_raised_leaves_nothing_to_the_next(order: dict[str, Any], loop: bool) -> None:
    shared_ranks(_stopped, 2, order, loop)


def _refuse_stages() -> None:
    model: Any = tiny_model("qwen3_moe")
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1, pp=2)))
    batch = padded(reference("qwen3_moe").rows[0][:1])
    with refused("train.accumulate-unsupported", naming="parallel.pp is 2"):
        em.forward_backward(model, [batch] * 2, target_tokens=60, **BY_LAYER)


def test_pipeline_stages_are_refused_by_name() -> None:
    shared_ranks(_refuse_stages, 2)
