"""Layers that need whole rows, under cp: linear attention, convolutions, indexed attention. Gradients, packing, bytes.

The measure is the family matrix's: a tiny random model of each family against the unsharded one, different rows on
every data rank. Families whose fp32 is too badly conditioned to tell are measured in fp64.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import expertmesh as em
from benchmarks.probes import count_collectives
from expertmesh.distributed import sequence_collectives
from expertmesh.distributed.layout import Layout
from expertmesh.introspection.small_copies import TensorCut
from expertmesh.parallel import sequence, tensor
from expertmesh.planning import traffic
from expertmesh.planning.model_figures import ModelFigures
from expertmesh.planning.probe import UsageTracker
from tests.adapters.reference import trainables, worst
from tests.families.packing import check_packing
from tests.families.proof import Run, Subject, computing_in, measure
from tests.families.test_families import FAMILIES
from tests.families.tiny import EXPERTS, random_model, tiny_config
from tests.support.planned import figures_of
from tests.support.ranks import run_ranks, shared_ranks
from tests.support.reference import of_all_stages

TOLERANCE = 1e-5
# By heads with sections; with tp beside it; whole; by heads with an index, with tp; of 4 ranks. Beside hidden states: a
# router's state, those of earlier blocks, of keys and of values, token ids. cp 2 of 4 ranks has other rows beside it.
CASES: list[tuple[str, int, dict[str, int], torch.dtype]] = [
    ("qwen3_next", 4, {"cp": 2}, torch.float64),
    ("minimax", 4, {"cp": 2, "tp": 2}, torch.float32),
    ("jamba", 4, {"cp": 2}, torch.float32),
    ("deepseek_v32", 4, {"cp": 2, "tp": 2}, torch.float32),
    ("lfm2_moe", 4, {"cp": 4}, torch.float32),
    ("deepseek_v4", 2, {"cp": 2}, torch.float32),
    ("zaya", 4, {"cp": 2, "tp": 2}, torch.float32),
    ("inkling2", 4, {"cp": 2, "tp": 2}, torch.float32),
    ("qwen4_exp", 2, {"cp": 2}, torch.float64),
]


# Three mixers in a block, one of which in all gathers keys' and values' hidden states too.
INKLING2 = ("inkling2", 20, False)


def _class_of(family: str) -> str:
    return str(FAMILIES[family].model_class)


@pytest.mark.slow_cases(r"(minimax|inkling2)-.*", why="`make families` proves all; the delta net of qwen3_next stays")
@pytest.mark.slow_cases(
    r"(jamba|deepseek_v4|lfm2_moe|deepseek_v32|zaya|qwen4_exp)-.*",
    why="`make families` proves all; a delta net stays, and the planted bugs of heads and further hidden states",
)
@pytest.mark.parametrize(("family", "world", "axes", "dtype"), CASES)
def test_every_gradient_and_the_weights_equal_the_unsharded_model(
    family: str, world: int, axes: dict[str, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    runs = {"cp": [Run((world, 2, "loop"), axes)]}
    errors = measure(Subject(_class_of(family), family, tmp_path), runs, dtype)["cp"]
    assert max(errors.gradient, errors.loss, errors.weight) <= TOLERANCE, errors


@pytest.mark.slow_cases(r"(qwen3_next|minimax|deepseek_v32)", why="the cheapest of the layers that carry state stays")
@pytest.mark.parametrize("family", ["lfm2_moe", "minimax", "qwen3_next", "deepseek_v32"])
def test_packed_samples_are_what_they_are_apart(family: str) -> None:
    check_packing(_class_of(family), family, {"cp": 2})


def _left_padded(family: str, axes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Gradients of two rows, of which one has padding before its tokens, as `attention_mask` says."""
    model: Any = random_model(_class_of(family), family, torch.float64, buffers=False)
    mesh = em.init_mesh(em.ParallelConfig(ep=axes["cp"], **axes), num_experts=EXPERTS)
    precision = em.PrecisionConfig(params="float64", compute="float64", reduce="float64")
    em.parallelize(model, mesh, precision=precision, moe=em.MoeConfig(compute="loop"))
    ids = torch.arange(36).view(2, 18) * 7 % 89 + 3
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    batch = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    with computing_in(torch.float64):
        em.causal_lm_loss(model, batch, target_tokens=29).backward()
    return of_all_stages(model, mesh, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)


@pytest.mark.slow(why="rows without padding stay")
@pytest.mark.parametrize("family", ["zaya", "inkling2", "qwen4_exp"])
def test_padding_before_tokens_is_masked_as_on_whole_rows(family: str) -> None:
    own = sequence.masks_of

    def right_and_planted() -> list[dict[str, torch.Tensor]]:
        right = _left_padded(family, {"cp": 2})
        with mock.patch.object(sequence, "masks_of", lambda *args: own(*args[:3], None, args[4])):
            return [right, _left_padded(family, {"cp": 2})]

    alone = run_ranks(_left_padded, 1, family, {"cp": 1})[0]
    right, planted = run_ranks(right_and_planted, 2)[0]
    assert worst(right, alone)[0] <= 1e-10
    assert (worst(planted, alone)[0] > 100 * TOLERANCE) is (family == "inkling2")  # which gets masks; others make them


def _with_adapters(family: str, cp: int, mode: Any) -> dict[str, torch.Tensor]:
    """Adapters with dropout, after three steps on one row a data rank."""
    model: Any = random_model(_class_of(family), family, torch.float64)
    mesh = em.init_mesh(em.ParallelConfig(cp=cp, ep=cp), num_experts=EXPERTS)
    targets = ["in_proj", "out_proj", "experts"] if family == "lfm2_moe" else ["attention", "experts"]
    torch.manual_seed(0)
    lora, moe = em.LoraConfig(r=4, dropout=0.3, targets=targets), em.MoeConfig(compute="loop")
    precision = em.PrecisionConfig(params="float64", compute="float64", reduce="float64")
    em.parallelize(model, mesh, moe=moe, precision=precision, lora=lora, activation_checkpointing=mode)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(3):
        ids = torch.arange(24)[None] * 7 % 89 + step
        batch = {"input_ids": ids, "labels": ids, "row_numbers": torch.tensor([step])}
        em.causal_lm_loss(model, batch, target_tokens=23).backward()
        optimizer.step()
        optimizer.zero_grad()
    return trainables(model)


@pytest.mark.slow_cases(r"lfm2_moe", why="one family stays")
@pytest.mark.parametrize("family", ["lfm2_moe", "deepseek_v32"])
def test_adapters_and_their_dropout_are_what_they_are_on_whole_rows(family: str) -> None:
    alone = shared_ranks(_with_adapters, 1, family, 1, "none")[0]
    split = shared_ranks(_with_adapters, 2, family, 2, "full")[0]
    assert worst(split, alone)[0] <= TOLERANCE


def _bytes(family: str, cp: int, mode: Any) -> dict[str, tuple[int, int]]:
    """Calls and bytes of gathers and reduce-scatters of one forward and backward of two rows of 16 positions."""
    model: Any = random_model(_class_of(family), family)
    em.parallelize(model, em.init_mesh(em.ParallelConfig(cp=cp, ep=1)), activation_checkpointing=mode)
    ids = torch.arange(32).view(2, 16)
    counts: dict[str, tuple[int, int]] = {}

    def counted(name: str) -> Any:
        run = getattr(sequence_collectives, name)

        def collective(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
            results: list[torch.Tensor] = []
            found = count_collectives(lambda: results.append(run(x, dim, group)))
            calls, sent = counts.get(name, (0, 0))
            counts[name] = (calls + 1, sent + sum(count.bytes for count in found.values()))
            return results[0]

        return mock.patch.object(sequence_collectives, name, collective)

    with counted("_gather"), counted("_reduce_scatter"):
        em.causal_lm_loss(model, {"input_ids": ids, "labels": ids}, target_tokens=30).backward()
    return counts


@pytest.mark.slow_cases(r"jamba-4-False", why="the family stays whose attention is split beside")
@pytest.mark.slow_cases(r"inkling2-.*", why="the other families stay")
@pytest.mark.parametrize(("family", "parts", "split"), [("deepseek_v32", 2, True), ("jamba", 4, False), INKLING2])
def test_the_bytes_of_a_step_are_those_of_the_formula(family: str, parts: int, split: bool) -> None:
    """B·S·H·b a gather or reduce-scatter; by heads one of each in forward and in backward, whole a gather in forward
    and its reduce-scatter in backward: the positions that are kept cost nothing.
    """
    whole = 2 * 16 * 32 * 4
    for found in shared_ranks(_bytes, 2, family, 2, "none"):
        if split:
            assert found == dict.fromkeys(("_gather", "_reduce_scatter"), (2 * parts, 2 * parts * whole))
        else:
            assert found == dict.fromkeys(("_gather", "_reduce_scatter"), (parts, parts * whole))
    precision = em.PrecisionConfig(params="float32", compute="float32", reduce="float32")
    model = figures_of(tiny_config(_class_of(family), family), length=16, precision=precision, packed=False)
    assert {kind: _predicted(model)[kind] for kind in ("all_gather", "reduce_scatter")} == {
        "all_gather": found["_gather"],
        "reduce_scatter": found["_reduce_scatter"],
    }


def _products(family: str, cp: int) -> int:
    """FLOPs of a rank's matrix products, attention's among them, in one forward of two rows of 16 positions."""
    model: Any = random_model(_class_of(family), family)
    em.parallelize(model, em.init_mesh(em.ParallelConfig(cp=cp, ep=1)), moe=em.MoeConfig(compute="loop"))
    ids = torch.arange(32).view(2, 16)
    with UsageTracker() as tracker:
        em.causal_lm_loss(model, {"input_ids": ids, "labels": ids}, target_tokens=30)
    return tracker.products


@pytest.mark.slow(why="that gradients and bytes are right stays")
@pytest.mark.parametrize("family", ["deepseek_v32", "jamba"])
def test_what_every_rank_computes_of_whole_rows_is_predicted_to_the_last_product(family: str) -> None:
    (alone,), split = shared_ranks(_products, 1, family, 1), shared_ranks(_products, 2, family, 2)
    precision = em.PrecisionConfig(params="float32", compute="float32", reduce="float32")
    model = figures_of(tiny_config(_class_of(family), family), length=16, precision=precision, packed=False)
    repeated = sum(block.figures.whole[0] for block in model.blocks)
    assert repeated > 0
    assert sum(split) - alone == 2 * repeated


def _predicted(model: ModelFigures) -> dict[str, tuple[int, int]]:
    """Calls and bytes of cp by kind, as the planner has them for two rows on two ranks."""
    sums: dict[str, tuple[int, int]] = {}
    for block in model.blocks:
        for transfer in traffic._of_sequence(block, model, Layout(cp=2), 2, "none"):
            if transfer.axis == "cp":
                calls, sent = sums.get(transfer.kind, (0, 0))
                sums[transfer.kind] = (calls + transfer.calls, sent + int(transfer.bytes))
    return dict(sorted(sums.items()))


# Planted bugs ------------------------------------------------------------------------------------------------------


def _sections_ignored(model: nn.Module) -> None:
    mock.patch.object(TensorCut, "of", lambda self, x, rank, ranks: x.chunk(ranks, self.dim)[rank]).start()


def _positions_of_another_rank(model: nn.Module) -> None:
    own = tensor.own_part
    mock.patch.object(tensor, "own_part", lambda x, dim, group: own(x.flip(dim), dim, group)).start()


def _states_of_another_position(model: nn.Module) -> None:
    own, handed_on = sequence._part, ("prev_router_hidden_states", "block_states")

    def part(entered: Any, key: str, value: Any, length: int) -> Any:
        given = own(entered, key, value, length)
        return given.roll(1, 1) if key in handed_on and given is not None else given

    mock.patch.object(sequence, "_part", part).start()


def _sum_taken_once_more(model: nn.Module) -> None:
    own = tensor.reduce_scatter
    mock.patch.object(tensor, "reduce_scatter", lambda x, dim, group: own(x, dim, group) * 2).start()


@pytest.mark.slow_cases(r"_states_of_another_position-inkling2", why="the same bug in zaya stays")
@pytest.mark.parametrize(
    ("bug", "family"),
    [
        (_sections_ignored, "lfm2_moe"),
        (_positions_of_another_rank, "jamba"),
        (_sum_taken_once_more, "deepseek_v32"),
        (_states_of_another_position, "zaya"),
        (_states_of_another_position, "inkling2"),
    ],
)
def test_a_planted_bug_turns_the_comparison_red(bug: Callable[[nn.Module], None], family: str, tmp_path: Path) -> None:
    runs = {"cp": [Run((2, 2, "loop"), {"cp": 2})]}
    errors = measure(Subject(_class_of(family), family, tmp_path), runs, torch.float32, tamper=bug)["cp"]
    assert errors.gradient > 100 * TOLERANCE
