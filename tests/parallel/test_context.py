"""Rows split over cp compute what whole rows compute: losses, every gradient, weights, for every kind of attention.

The comparison is that of test_parity.py: the unsharded Hugging Face model, rows of different lengths on every data
rank, uneven targets. The planted bugs at the end show what it sees.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import modeling_flash_attention_utils as flash

import expertmesh as em
from expertmesh.distributed.mesh import Mesh
from expertmesh.parallel import context, sequence
from expertmesh.step import loss
from tests.adapters.reference import (
    TARGETS,
    random_adapter,
    take_steps,
    tiny_peft_run,
    train_adapters,
    trainables,
    worst,
)
from tests.experts.test_balance import expected as balanced
from tests.experts.test_balance import train_balanced as _balance
from tests.parallel.test_router_loss import expected, packed_rows, with_losses
from tests.support.errors import refused_on_ranks
from tests.support.models import tiny_model
from tests.support.one_launch import Launched, one_launch
from tests.support.ranks import shared_ranks
from tests.support.reference import Distance, padded, reference, rows_of_step, train_sharded

TOLERANCE = 1e-5
Axes = dict[str, int]
ALONE: Axes = {"cp": 2, "ep": 1}
WITH_EP: Axes = {"cp": 2, "ep": 2}
# (family, changes to its config, ranks, axes, rows of a micro-batch)
CASES: list[tuple[str, dict[str, Any], int, Axes, int]] = [
    ("qwen3_moe", {}, 2, ALONE, 1),
    ("qwen3_moe", {}, 4, {"cp": 2, "ep": 4}, 2),
    ("qwen3_moe", {}, 4, {"cp": 4, "ep": 2}, 1),  # 4 query heads, 2 for keys and values
    ("qwen3_moe", {"attn_implementation": "eager"}, 4, {"cp": 2, "ep": 2, "replicate": 2}, 1),
    ("mixtral", {"sliding_window": 6}, 2, WITH_EP, 4),
    ("deepseek_v3", {"v_head_dim": 12}, 4, {"cp": 2, "ep": 4}, 1),  # latent attention: sizes of q, k and of v differ
    ("olmoe", {}, 2, WITH_EP, 2),
    ("gpt_oss", {}, 2, WITH_EP, 4),  # sinks, and windows in every other layer
]


def _case(
    family: str,
    world: int,
    axes: Axes,
    micro_batch: int = 1,
    changes: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[int, Callable[[], Distance]]:
    want, parallel = reference(family, dtype, **(changes or {})), em.ParallelConfig(**axes)
    return world, lambda: train_sharded(want, parallel, micro_batch, **options)


def _case_of_matrix(
    family: str, changes: dict[str, Any], world: int, axes: Axes, micro_batch: int
) -> tuple[int, Callable[[], Distance]]:
    return _case(family, world, axes, micro_batch, changes, torch.float64 if family == "gpt_oss" else torch.float32)


@pytest.mark.slow_cases(
    r"(qwen3_moe-changes[23]|olmoe|mixtral)-.*", why="pairwise: cp 2 and cp 4, grouped, latent and biased heads stay"
)
@pytest.mark.slow_cases(r"qwen3_moe-changes1-.*", why="pairwise, as above")
@pytest.mark.parametrize(("family", "changes", "world", "axes", "micro_batch"), CASES)
@one_launch(_case_of_matrix)
def test_every_gradient_and_the_weights_after_two_steps_equal_the_unsharded_model(
    launched: Launched, family: str, changes: dict[str, Any], world: int, axes: Axes, micro_batch: int
) -> None:
    """GPT-OSS in fp64: a bias of its queries starts at zero, and after two steps the unsharded fp32 model is 2e-5 from
    its own fp64 there, on some processors.
    """
    for distance in launched():
        distance.check(1e-10 if family == "gpt_oss" else TOLERANCE)


@one_launch(lambda: _case("qwen3_moe", 2, WITH_EP, 4, dtype=torch.float64))
def test_in_double_precision_nothing_is_left_but_the_last_digits(launched: Launched) -> None:
    for distance in launched():
        distance.check(1e-10)


@pytest.mark.slow_cases(r"deepseek_v3", why="a second family")
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
@one_launch(lambda family: _case(family, 2, WITH_EP, 2, activation_checkpointing=True))
def test_checkpointed_blocks_exchange_again_and_give_the_same(launched: Launched, family: str) -> None:
    for distance in launched():
        distance.check(TOLERANCE)


@pytest.mark.slow_cases(r"eager", why="sdpa with ep stays")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_rows_keep_their_samples_apart_and_router_losses_are_the_global_batchs(attention: str) -> None:
    want = expected("qwen3_moe", attn_implementation=attention)
    axes, micro_batch = ({"cp": 2, "ep": 4}, 4) if attention == "sdpa" else ({"cp": 4, "ep": 1}, 16)
    for each in shared_ranks(lambda: with_losses(want, em.ParallelConfig(**axes), micro_batch, prepare=packed_rows), 4):
        assert max(each.loss, each.aux_loss, each.z_loss, each.gradient[0]) <= TOLERANCE, each
        assert each.load == 2 * 2 * sum(len(ids) for ids, _ in want.rows)  # padding is no load


@pytest.mark.slow(why="router losses of packed rows stay")
def test_padded_rows_do_not_change_router_losses_either() -> None:
    want = expected("mixtral", sliding_window=4)
    for each in shared_ranks(lambda: with_losses(want, em.ParallelConfig(cp=2, ep=2), 4), 4):
        assert max(each.loss, each.aux_loss, each.z_loss, each.gradient[0]) <= TOLERANCE, each


def test_adapters_on_attention_and_experts_equal_stock_peft(tmp_path: Path) -> None:
    want = tiny_peft_run("deepseek_v3", tmp_path)
    for distance in shared_ranks(lambda: train_adapters(want, em.ParallelConfig(cp=2, ep=4), 2), 4):
        distance.check(TOLERANCE)


def _dropping(adapter: Path, axes: Axes, micro_batch: int, **options: Any) -> dict[str, torch.Tensor]:
    model: Any = tiny_model("qwen3_moe")
    mesh = em.init_mesh(em.ParallelConfig(**axes))
    em.parallelize(model, mesh, lora=em.LoraConfig(from_adapter=str(adapter), dropout=0.3), **options)
    take_steps(model, mesh, [rows_of_step(step, ()) for step in range(2)], micro_batch)
    return trainables(model)


@pytest.mark.slow(why="adapters/test_dropout.py compares layouts")
def test_dropout_of_adapters_drops_what_it_drops_on_whole_rows(tmp_path: Path) -> None:
    random_adapter(tiny_model("qwen3_moe"), tmp_path, *TARGETS["qwen3_moe"])
    alone = shared_ranks(_dropping, 1, tmp_path, {"ep": 1}, 1)[0]
    split = shared_ranks(_dropping, 4, tmp_path, WITH_EP, 2)[0]
    again = shared_ranks(lambda: _dropping(tmp_path, {"cp": 2, "ep": 1}, 2, activation_checkpointing=True), 2)[0]
    assert worst(split, alone)[0] <= TOLERANCE
    assert worst(again, alone)[0] <= TOLERANCE


def _short_rows(axes: Axes) -> list[float]:
    """Loss with and without gradients of rows of one to three positions, and the gradient norm."""
    model: Any = tiny_model("mixtral", attn_implementation="eager")
    mesh = em.init_mesh(em.ParallelConfig(**axes))
    em.parallelize(model, mesh)
    ids = torch.arange(12).view(4, 3) * 7 % 96
    rows = [{"input_ids": ids[:2, :length], "labels": ids[:2, :length]} for length in (1, 2, 3)]
    share = torch.zeros((), dtype=torch.float64)
    for batch in rows if mesh.data_rank == 0 else []:
        one = em.causal_lm_loss(model, batch, target_tokens=6)
        one.backward()
        share += one.detach()
    norm = em.clip_grad_norm_(model, None)
    model.eval()
    with torch.no_grad():
        evaluated = em.causal_lm_loss(model, rows[2], target_tokens=6).double()
    values = torch.stack([share, evaluated])
    dist.all_reduce(values)
    return [*values.tolist(), float(norm)]


def test_rows_shorter_than_cp_and_evaluation() -> None:
    alone = shared_ranks(_short_rows, 1, {"ep": 1})[0]
    for values in shared_ranks(_short_rows, 4, {"cp": 4, "ep": 4}):
        assert values == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    ("heads", "key_heads", "cp"), [(8, 8, 4), (8, 4, 4), (8, 2, 4), (8, 1, 4), (12, 4, 6), (12, 6, 4)]
)
def test_each_rank_gets_the_key_heads_of_its_query_heads_and_no_more(heads: int, key_heads: int, cp: int) -> None:
    query, key = torch.empty(1, heads, 1, 1), torch.arange(key_heads).view(1, -1, 1, 1)
    here, repeat, groups = context._head_counts("attention", nn.Module(), query, key, key, cp)
    sent = key.repeat_interleave(repeat, dim=1).flatten()
    for rank, share in enumerate(sent.view(cp, -1)):
        seen = share.repeat_interleave(groups).tolist()
        assert seen == [head * key_heads // heads for head in range(rank * here, (rank + 1) * here)]
        assert groups == 1 or len(set(share.tolist())) == len(share)  # none twice on a rank
    assert repeat == 1 or key_heads % cp


class _PositionsSeen(Exception):
    pass


def _flash(axes: Axes) -> list[Any]:
    """What flash attention is called with in the first layer of a packed row: positions, heads, its configuration."""
    seen: list[Any] = []

    def backend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        heads, positions = (query.shape[1], key.shape[1]), options["position_ids"].tolist()
        seen.extend([positions, heads, query.shape[2], module.config._attn_implementation])
        raise _PositionsSeen

    model: Any = tiny_model("qwen3_moe")
    model.config._attn_implementation = "flash_attention_2"
    with mock.patch.dict(context.ALL_ATTENTION_FUNCTIONS._global_mapping, {"flash_attention_2": backend}):
        em.parallelize(model, em.init_mesh(em.ParallelConfig(**axes)))
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]])
        ids = torch.arange(8)[None]
        with pytest.raises(_PositionsSeen):
            em.causal_lm_loss(model, {"input_ids": ids, "labels": ids, "position_ids": positions}, target_tokens=7)
    return seen


def test_flash_attention_sees_the_samples_of_the_whole_row() -> None:
    for seen in shared_ranks(_flash, 4, {"cp": 4, "ep": 1}):
        assert seen == [[[0, 1, 2, 0, 1, 2, 3, 0]], (1, 1), 8, "flash_attention_2"]


def _kept_alive() -> tuple[int, int]:
    """Bytes behind what the first block gets, and of its own share of the row."""
    model: Any = tiny_model("qwen3_moe")
    em.parallelize(model, em.init_mesh(em.ParallelConfig(**ALONE)))
    seen = []
    model.model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    ids = torch.arange(8)[None]
    em.causal_lm_loss(model, {"input_ids": ids, "labels": ids}, target_tokens=7)
    return seen[0].untyped_storage().nbytes(), seen[0].numel() * 4


def test_no_rank_keeps_whole_rows_until_backward() -> None:
    for behind, own in shared_ranks(_kept_alive, 2):
        assert behind == own == 4 * 32 * 4


@pytest.mark.slow(why="experts/test_balance.py moves them on ep")
def test_correction_biases_move_by_the_load_of_all_parts_of_a_row() -> None:
    want = balanced()
    parallel = em.ParallelConfig(cp=2, ep=4)
    for found in shared_ranks(lambda: _balance(want, parallel, 2, activation_checkpointing=True), 4):
        assert all(torch.equal(got, count) for got, count in zip(found.loads, want.counts, strict=True))
        assert all(torch.equal(got, bias) for got, bias in zip(found.biases, want.biases, strict=True))
        assert found.weight <= TOLERANCE


def _varlen(query: Any, key: Any, value: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, **options: Any) -> torch.Tensor:
    """flash_attn_varlen_func in plain torch: `[T, heads, D]`, samples between the borders."""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert options["causal"]
    borders, samples = cu_seqlens_q.tolist(), []
    for first, last in itertools.pairwise(borders):
        q, k, v = (x[first:last].transpose(0, 1)[None] for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=options["softmax_scale"], enable_gqa=True)
        samples.append(out[0].transpose(0, 1))
    return torch.cat(samples)


def _with_flash(want: Any, axes: Axes, prepare: Callable[[Any], Any]) -> Any:
    functions = (None, _varlen, None, flash._pad_input, flash._unpad_input)
    mock.patch.object(flash, "_lazy_imports", return_value=functions).start()
    model = copy.deepcopy(want.model)
    model.config._attn_implementation = "flash_attention_2"
    return with_losses(dataclasses.replace(want, model=model), em.ParallelConfig(**axes), 4, prepare=prepare)


@pytest.mark.slow_cases(r"padded", why="packed rows stay")
@pytest.mark.parametrize("rows", ["packed", "padded"])
def test_transformers_flash_path_separates_samples_and_padding_of_whole_rows(rows: str) -> None:
    """Its own unpadding and its own reading of position ids; only the kernels are replaced."""
    want = expected("qwen3_moe")
    for each in shared_ranks(_with_flash, 2, want, WITH_EP, packed_rows if rows == "packed" else padded):
        assert max(each.loss, each.aux_loss, each.z_loss, each.gradient[0]) <= TOLERANCE, each


def _flex() -> list[Any]:
    """Which mask a backend gets that has masks of its own kind, and for how many positions."""
    seen: list[Any] = []

    def backend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        seen.extend([mask, query.shape[2]])
        raise _PositionsSeen

    mask = mock.patch.dict(
        context.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping,
        {"flex_attention": lambda **options: ("block mask", options["q_length"], options["kv_length"])},
    )
    model: Any = tiny_model("qwen3_moe")
    model.config._attn_implementation = "flex_attention"
    with mask, mock.patch.dict(context.ALL_ATTENTION_FUNCTIONS._global_mapping, {"flex_attention": backend}):
        em.parallelize(model, em.init_mesh(em.ParallelConfig(**ALONE)))
        ids = torch.arange(8)[None]
        with pytest.raises(_PositionsSeen):
            em.causal_lm_loss(model, {"input_ids": ids, "labels": ids}, target_tokens=7)
    return seen


def test_flex_attention_gets_its_own_mask_of_whole_rows() -> None:
    assert shared_ranks(_flex, 2) == [[("block mask", 8, 8), 8]] * 2


# Planted bugs ------------------------------------------------------------------------------------------------------


def _labels_cut_before_the_shift(model: nn.Module, mesh: Mesh) -> None:
    def next_labels(labels: torch.Tensor, cut: Any) -> torch.Tensor:
        return F.pad(cut(labels, 1)[:, 1:], (0, 1), value=-100)

    mock.patch.object(loss, "_next_labels", next_labels).start()


def _misaligned_key_heads(model: nn.Module, mesh: Mesh) -> None:
    counts = context._head_counts

    def swapped(name: str, module: Any, query: Any, key: Any, value: Any, cp: int) -> Any:
        key.copy_(key.detach().flip(1))
        return counts(name, module, query, key, value, cp)

    mock.patch.object(context, "_head_counts", swapped).start()


def _gradients_times_cp(model: nn.Module, mesh: Mesh) -> None:
    """As if each rank of cp held rows of its own and the loss were a mean over ranks."""
    backward = loss._HeadLoss.backward
    mock.patch.object(loss._HeadLoss, "backward", staticmethod(lambda ctx, grad: backward(ctx, grad * 2))).start()


def _positions_not_cut(model: nn.Module, mesh: Mesh) -> None:
    """Every rank's rotary table starts at position 0."""
    first = lambda cut, dim, length, x: x.narrow(dim, 0, length // mesh.layout.cp)  # noqa: E731
    mock.patch.object(sequence, "_cut_positions", first).start()


def _swapped_exchange(model: nn.Module, mesh: Mesh) -> None:
    """Gradients of the exchange come back from the wrong rank."""
    backward = context._Exchange.backward

    def flipped(ctx: Any, grad: torch.Tensor) -> Any:
        return backward(ctx, grad.flip(0))

    mock.patch.object(context._Exchange, "backward", staticmethod(flipped)).start()


@pytest.mark.parametrize(
    ("bug", "shows_in"),
    [
        (_labels_cut_before_the_shift, "loss"),
        (_misaligned_key_heads, "loss"),
        (_gradients_times_cp, "norm"),
        (_positions_not_cut, "loss"),
        (_swapped_exchange, "gradient"),
    ],
)
def test_a_planted_bug_turns_the_comparison_red(bug: Callable[[nn.Module, Mesh], None], shows_in: str) -> None:
    world, train = _case("qwen3_moe", 2, ALONE, 4, tamper=bug)
    distance, _ = shared_ranks(train, world)
    with pytest.raises(AssertionError):
        distance.check(TOLERANCE)
    found = getattr(distance, shows_in)
    assert (found[0] if isinstance(found, tuple) else found) > 1e-3


def _attends(times: int) -> None:
    """A model whose blocks attend another number of times than once."""
    model: Any = tiny_model("qwen3_moe")
    em.parallelize(model, em.init_mesh(em.ParallelConfig(**ALONE)))
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def several(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        out = (hidden_states, None)
        for _ in range(times):
            out = forward(hidden_states=hidden_states, **kwargs)
        return out

    attention.forward = several
    ids = torch.arange(8)[None]
    em.causal_lm_loss(model, {"input_ids": ids, "labels": ids}, target_tokens=7)


@pytest.mark.parametrize("times", [0, 2])
def test_a_block_that_attends_another_number_of_times_is_an_error(times: int) -> None:
    with refused_on_ranks("layout.cp-attention-calls", naming=f"model.layers.1.self_attn attended {times} times"):
        shared_ranks(_attends, 2, times)


def _generates() -> None:
    model: Any = copy.deepcopy(tiny_model("qwen3_moe"))
    em.parallelize(model, em.init_mesh(em.ParallelConfig(**ALONE)))
    model.generate(torch.arange(6)[None], max_new_tokens=2)


def test_generation_is_refused_by_name() -> None:
    with refused_on_ranks("layout.cannot-generate"):
        shared_ranks(_generates, 2)
