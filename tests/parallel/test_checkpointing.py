"""Checkpointed blocks: `selective` changes no gradient, repeats no all-to-all and no product, and keeps what it says.

Counts and bytes are exact: calls are counted where the expert layer issues them, bytes by torch's own allocator.
"""

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import expertmesh as em
from benchmarks.probes import held_bytes
from expertmesh.anatomy import describe
from expertmesh.experts import activation_checkpointing, dispatch, expert_mlp, layer
from expertmesh.experts.dispatch import AllToAllDispatcher
from expertmesh.parallel.checkpointing import checkpointed_blocks, checkpointed_layers, refuse_checkpointing
from expertmesh.parallel.shard_plan import ShardOptions
from tests.families.tiny import random_model
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks
from tests.support.reference import padded, rows_of_step

MODES = ("none", "selective", "full")
# The interface, with and without shared experts; a model that adds to the experts' output in place; experts without
# the interface that get every token; experts with a norm behind them.
FAMILIES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "muse_spark": "MuseSparkForConditionalGeneration",
}
GEMMA4 = {"gemma4": "Gemma4ForCausalLM"}
CASES = [("qwen3_moe", 1), ("llama4", 1), *((family, 2) for family in FAMILIES), ("deepseek_v3", 4), ("muse_spark", 4)]
HIDDEN, WIDTH, TOP_K, LAYERS = 32, 16, 2, 2  # of tests.support.models


def _gradients(model: nn.Module, mesh: Any) -> dict[str, torch.Tensor]:
    """Of two micro-batches, padded, other rows on every data rank; this rank's shards."""
    rows = rows_of_step(0, ())[mesh.data_rank :: mesh.layout.data_ranks]
    for part in (rows[:1], rows[1:]):
        em.causal_lm_loss(model, padded(part), target_tokens=64, chunk_tokens=16).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: (g.to_local() if isinstance(g, DTensor) else g).clone() for name, g in found.items()}


def _differences(family: str, ep: int, trained: str = "") -> list[str]:
    """Which gradients, of parameters with `trained` in their names, are not bit for bit those without checkpointing."""
    mesh, initial = em.init_mesh(em.ParallelConfig(ep=ep)), random_model((FAMILIES | GEMMA4)[family], family)
    for name, parameter in initial.named_parameters():
        parameter.requires_grad_(trained in name)
    found = {}
    for mode in MODES:
        model = em.parallelize(copy.deepcopy(initial).train(), mesh, activation_checkpointing=mode)
        found[mode] = _gradients(model, mesh)
    expected = found["none"]
    assert expected.keys() == found["selective"].keys() == found["full"].keys()
    return [f"{mode} {name}" for mode in MODES[1:] for name in expected if not found[mode][name].equal(expected[name])]


@pytest.mark.slow_cases(
    r"(qwen3_moe-1|qwen3_moe-2|qwen2_moe-2|llama4-2|muse_spark-[24]|deepseek_v3-4|llama4-1)",
    why="one family stays",
)
@pytest.mark.parametrize(("family", "ep"), CASES)
def test_no_gradient_changes_by_a_bit(family: str, ep: int) -> None:
    assert shared_ranks(_differences, 4, family, ep) == [[]] * 4


def test_what_trains_beside_frozen_experts_gets_its_gradients() -> None:
    """Gemma 4 has a norm behind its experts, which saves nothing where what it gets has no gradient."""
    assert shared_ranks(_differences, 2, "gemma4", 2, "layers.1.mlp.") == [[]] * 2


@dataclass(frozen=True, slots=True)
class Calls:
    """Of one forward and backward of one MoE layer. `rows`: all-to-alls of token vectors; `all`: of whatever."""

    rows: int
    all: int
    products: int


@contextmanager
def _counting(found: dict[str, int]) -> Iterator[None]:
    def counted(kind: Callable[..., str], real: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            found[kind(first)] = found.get(kind(first), 0) + 1
            return real(first, *args, **kwargs)

        return call

    def message(rows: torch.Tensor) -> str:
        return "rows" if rows.is_floating_point() and rows.dim() == 2 else "others"

    with (
        mock.patch.object(dispatch, "all_to_all", counted(message, dispatch.all_to_all)),
        mock.patch.object(dispatch, "all_to_all_even", counted(lambda _: "others", dispatch.all_to_all_even)),
        mock.patch.object(expert_mlp, "grouped_mm", counted(lambda _: "products", expert_mlp.grouped_mm)),
    ):
        yield


def _calls(mode: Any, tamper: Callable[[], None] = lambda: None, **options: Any) -> Calls:
    mesh = em.init_mesh(em.ParallelConfig(ep=2))
    model = em.parallelize(tiny_model("qwen3_moe"), mesh, activation_checkpointing=mode, **options)  # type: ignore[arg-type]
    tamper()
    found: dict[str, int] = {}
    with _counting(found):
        em.causal_lm_loss(model, padded(rows_of_step(0, ())[mesh.data_rank :: 2]), target_tokens=64).backward()
    assert not any(count % LAYERS for count in found.values())
    rows, others, products = (found.get(kind, 0) // LAYERS for kind in ("rows", "others", "products"))
    return Calls(rows, rows + others, products)


def _check_selective(calls: Calls) -> None:
    """Rows travel four times, there and back in forward and in backward; the others carry counts and pairs."""
    assert calls == Calls(rows=4, all=7, products=6)


def test_selective_sends_rows_four_times_a_layer_and_full_five_times() -> None:
    def counts() -> list[Calls]:
        return [_calls(mode) for mode in MODES]

    for none, selective, full in shared_ranks(counts, 2):
        _check_selective(none)
        _check_selective(selective)
        # When a block is run again, the counts are known, and nobody reads what the experts give: it ends before their
        # down projection, and no row travels back.
        assert full == Calls(rows=5, all=9, products=7)


def test_dropout_numbers_of_experts_do_not_travel_again() -> None:
    def counts() -> list[Calls]:
        lora = em.LoraConfig(r=8, dropout=0.3)
        mesh = em.init_mesh(em.ParallelConfig(ep=2))
        found = []
        for mode in MODES:
            model = em.parallelize(tiny_model("qwen3_moe"), mesh, activation_checkpointing=mode, lora=lora)  # type: ignore[arg-type]
            seen: dict[str, int] = {}
            with _counting(seen):
                rows = rows_of_step(0, ())[mesh.data_rank :: 2]
                batch = padded(rows) | {"row_numbers": torch.arange(len(rows)) * 2 + mesh.data_rank}
                em.causal_lm_loss(model, batch, target_tokens=64).backward()
            found.append(Calls(seen["rows"] // LAYERS, (seen["rows"] + seen["others"]) // LAYERS, 0))
        return found

    for none, selective, full in shared_ranks(counts, 2):
        assert none == selective == Calls(rows=4, all=8, products=0)
        assert full == Calls(rows=5, all=11, products=0)


def _forget() -> None:
    """The planted bug: what the first run kept is not used, so that the second one computes all again."""
    mock.patch.object(layer, "computed_once", lambda compute: compute()).start()


def test_an_all_to_all_that_is_repeated_is_seen() -> None:
    for calls in shared_ranks(lambda: _calls("selective", _forget), 2):
        with pytest.raises(AssertionError):
            _check_selective(calls)
        assert calls.rows == 5


def _held(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Bytes that one forward leaves behind for backward."""
    gc.collect()
    losses: list[torch.Tensor] = []
    held = held_bytes(lambda: losses.append(em.causal_lm_loss(model, batch, target_tokens=64, chunk_tokens=16)))
    losses.pop().backward()
    model.zero_grad()
    return held


def test_a_forward_leaves_what_selective_keeps_of_experts_and_attention_and_no_byte_more() -> None:
    """On one rank, where no other thread frees anything."""

    def held() -> list[int]:
        mesh, batch = em.init_mesh(em.ParallelConfig(ep=1)), padded(rows_of_step(0, ())[:4])
        found = []
        for mode in MODES:
            model = em.parallelize(tiny_model("qwen3_moe"), mesh, activation_checkpointing=mode)  # type: ignore[arg-type]
            _held(model, batch)  # what is made once
            found.append(_held(model, batch))
        return [*found, batch["input_ids"].numel()]

    ((none, selective, full, tokens),) = shared_ranks(held, 1)
    pairs, fp32, int64, heads, experts = tokens * TOP_K, 4, 8, 4, 8
    layer_bytes = (
        fp32 * (tokens * HIDDEN + pairs * 2 * WIDTH + pairs)  # rows, grouped product, routing weights
        + int64 * (pairs + pairs + tokens + 1 + pairs)  # the row of each pair, the pairs of each row, their order
        + 4 * experts
        + fp32 * tokens * HIDDEN  # the layer's result
        + fp32 * tokens * (HIDDEN + heads)  # attention's result and normaliser
    )
    assert selective - full == LAYERS * layer_bytes
    # Kept without checkpointing, and not by selective: norms, queries, keys, values and what else is cheap.
    assert none - selective > LAYERS * fp32 * tokens * HIDDEN * 4


@contextmanager
def _noting(kept_by_layer: list[int], from_sizes: list[int]) -> Iterator[None]:
    """For each expert layer, the bytes that it keeps past the checkpoint, and how many they should be."""
    real_dispatch, real_pack = AllToAllDispatcher.dispatch, activation_checkpointing._pack
    seen: set[int] = set()

    def noting(self: Any, hidden_TH: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor) -> Any:
        rows_RH, weight_P, pairs, route = real_dispatch(self, hidden_TH, index_TK, weight_TK)
        tokens, rows, sent = len(hidden_TH), len(rows_RH), sum(route.splits.rows_sent)
        here, pairs_sent, experts = len(weight_P), index_TK.numel(), len(pairs.expert_end_L)
        fp32, int64 = 4, 8
        from_sizes.append(
            fp32 * (rows * HIDDEN + here * 2 * WIDTH + here)  # rows received, grouped product, routing weights
            + int64 * (here + here + rows + 1)  # the row of each pair, and the pairs of each row
            + 4 * experts
            + int64 * (here + pairs_sent + sent + tokens + 1)  # how pairs and rows travel back; the tokens of the rows
            # sent are kept as well, but not saved (dispatch.SumRows)
            + fp32 * experts * 3 * HIDDEN * WIDTH  # the weights, which are there anyway
        )
        kept_by_layer.append(0)
        return rows_RH, weight_P, pairs, route

    def pack(tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            kept_by_layer[-1] += storage.nbytes()
        seen.add(storage.data_ptr())
        return real_pack(tensor)

    # What dispatch itself saves is packed inside of it, so before its layer is noted.
    packing = mock.patch.object(activation_checkpointing, "_pack", pack)
    with mock.patch.object(AllToAllDispatcher, "dispatch", noting), packing:
        yield


def test_what_a_dispatched_layer_keeps_follows_from_its_rows_and_pairs() -> None:
    def census() -> tuple[list[int], list[int]]:
        mesh = em.init_mesh(em.ParallelConfig(ep=2))
        model = em.parallelize(tiny_model("qwen3_moe"), mesh, activation_checkpointing="selective")  # type: ignore[arg-type]
        found: list[int] = [0]
        expected: list[int] = []
        with _noting(found, expected):
            loss = em.causal_lm_loss(model, padded(rows_of_step(0, ())[mesh.data_rank :: 2]), target_tokens=64)
            loss.backward()
        return found, expected

    for found, expected in shared_ranks(census, 2):
        assert len(expected) == LAYERS  # nothing is dispatched again
        assert sum(found) == sum(expected)


def test_blocks_that_are_left_out_are_run_once() -> None:
    def runs() -> list[list[int]]:
        mesh, found = em.init_mesh(em.ParallelConfig(ep=1)), []
        for layers in ("all", 2, (1, 2)):
            initial = tiny_model("qwen3_moe", num_hidden_layers=4)
            model: Any = em.parallelize(initial, mesh, activation_checkpointing="full", checkpoint_layers=layers)  # type: ignore[arg-type]
            count = [0] * 4
            for number, block in enumerate(model.model.layers):

                def add(*_: Any, number: int = number, count: list[int] = count) -> None:
                    count[number] += 1

                block.self_attn.register_forward_hook(add)
            em.causal_lm_loss(model, padded(rows_of_step(0, ())[:2]), target_tokens=64).backward()
            found.append(count)
        return found

    assert shared_ranks(runs, 1) == [[[2, 2, 2, 2], [2, 1, 2, 1], [1, 2, 2, 1]]]


def test_frozen_blocks_in_front_of_all_that_trains_have_no_backward() -> None:
    def inputs_with_gradient() -> list[bool]:
        model: Any = tiny_model("qwen3_moe", num_hidden_layers=3)
        for part in (model.model.embed_tokens, model.model.layers[0]):
            part.requires_grad_(False)
        em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1)), activation_checkpointing="full")
        found = list[bool]()
        for block in model.model.layers:
            block.register_forward_pre_hook(lambda _, args: found.append(args[0].requires_grad))
        em.causal_lm_loss(model, padded(rows_of_step(0, ())[:2]), target_tokens=64).backward()
        return found

    assert shared_ranks(inputs_with_gradient, 1) == [[False, False, True]]


def test_which_blocks_a_choice_means() -> None:
    assert checkpointed_layers("all", 3) == [0, 1, 2]
    assert checkpointed_layers(2, 5) == [0, 2, 4]
    assert checkpointed_layers((4, 1), 5) == [1, 4]
    with refused("train.checkpoint-layers-no-such-block"):
        checkpointed_layers((0, 5), 5)


def test_what_cannot_be_checkpointed_is_refused_by_name() -> None:
    model: Any = tiny_model("qwen3_moe")
    anatomy = describe(model)
    for mode, layers, key, named in (
        ("ful", "all", "config.wrong-value", "'ful'"),
        ("full", 1, "config.wrong-value", "not 1"),
        ("none", 2, "config.combination", "checkpoint_layers does nothing"),
    ):
        with refused(key, naming=named):
            ShardOptions.of(em.PrecisionConfig(), None, mode, layers, False)  # type: ignore[arg-type]
    with refused("train.checkpoint-layers-no-such-block", naming="block 7"):
        checkpointed_blocks(model, anatomy, "full", (7,))
    for name, value in (
        ("supports_gradient_checkpointing", False),
        ("_set_gradient_checkpointing", lambda self, module, value=False: None),
    ):
        unsupported = refused("train.activation-checkpointing-unsupported", naming="Qwen3MoeForCausalLM")
        with mock.patch.object(type(model), name, value), unsupported:
            refuse_checkpointing(model, anatomy, "all")
    model.model.layers[1].gradient_checkpointing = None
    refuse_checkpointing(model, anatomy, "all")
    with refused("train.checkpoint-layers-unsupported", naming="Qwen3MoeDecoderLayer"):
        refuse_checkpointing(model, anatomy, 2)
