"""Which blocks are on which stage, and which models cannot be cut between their blocks."""

from typing import Any

import pytest
import torch
from torch import nn

from expertmesh.anatomy import describe
from expertmesh.config import MoeConfig, PrecisionConfig
from expertmesh.distributed.layout import Layout
from expertmesh.introspection.stage_probe import probe
from expertmesh.model import plan_model
from expertmesh.parallel.sequence import SequenceShare
from expertmesh.parallel.shard_plan import ShardOptions
from expertmesh.parallel.stages import balanced, plan_cut, stages_of
from expertmesh.state.model_view import meta_copy
from expertmesh.step.pipeline_schedule import interleaves, same_shape
from expertmesh.training.reporting.start import bubble_fraction
from expertmesh.weights.meta_model import build_meta_model
from tests.families.tiny import tiny_config
from tests.support.errors import refused
from tests.support.models import tiny_model


@pytest.mark.parametrize(
    ("work", "stages", "expected"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([1, 1, 1, 1, 1], 2, [2, 3]),
        ([1, 1, 1, 1 + 2], 2, [3, 1]),  # a head as heavy as two blocks
        ([9, 1, 1, 1], 3, [1, 1, 2]),
        ([1] * 61, 8, [7, 7, 7, 8, 8, 8, 8, 8]),
        ([0, 0, 5], 3, [1, 1, 1]),
    ],
)
def test_the_heaviest_stage_is_as_light_as_can_be_and_none_is_empty(
    work: list[float], stages: int, expected: list[int]
) -> None:
    found = balanced(work, stages)
    assert sorted(len(each) for each in found) == sorted(expected)
    assert [block for stage in found for block in stage] == list(range(len(work)))
    assert max(sum(work[b] for b in stage) for stage in found) == max(
        sum(work[b] for b in stage) for stage in _cut(expected)
    )


def _cut(sizes: list[int]) -> list[range]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def test_stages_go_round_the_ranks() -> None:
    layout = Layout(pp=2, pp_virtual_stages=3)
    assert [stages_of(layout, rank) for rank in range(2)] == [(0, 2, 4), (1, 3, 5)]
    assert bubble_fraction(Layout(pp=4), 12) == 3 / 15
    assert bubble_fraction(Layout(pp=4, pp_virtual_stages=2), 12) == 3 / 27
    assert [n for n in range(1, 9) if interleaves(n, 2)] == [1, 2, 3, 4, 6, 8]


def test_each_end_of_the_decoder_is_on_its_stage() -> None:
    model = tiny_model("deepseek_v3", num_hidden_layers=3, tie_word_embeddings=True)
    plan = plan_cut(meta_copy(model), describe(model), Layout(pp=2))
    assert {name: set(ranks) for name, ranks in plan.parts.items()} == {
        "model.embed_tokens": {0},
        **{f"model.layers.{n}": {stage} for stage, numbers in enumerate(plan.stages) for n in numbers},
        "model.norm": {1},
        "lm_head": {1},
    }
    assert plan.hidden == (32,)


# What a block reads beside the hidden state, by family.
CARRIED: dict[tuple[str, str], dict[str, Any]] = {
    ("Gemma4ForCausalLM", "gemma4"): {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96},
    ("Inkling2ForCausalLM", "inkling2"): {},  # what earlier blocks gave
    ("ZayaForCausalLM", "zaya"): {},  # the state of the router before
}


@pytest.mark.parametrize("kind", CARRIED, ids=lambda kind: kind[1])
def test_a_family_whose_every_block_reads_more_than_the_hidden_state_is_refused_by_name(kind: tuple[str, str]) -> None:
    model = _meta(kind, **CARRIED[kind])
    with refused("layout.pp-carries-more-than-hidden-state", naming="beside the hidden state"):
        plan_cut(meta_copy(model), describe(model), Layout(pp=2))


def _meta(kind: tuple[str, str], **changes: Any) -> Any:
    return build_meta_model(tiny_config(*kind, **changes), torch.float32)


# By family, of blocks that choose tokens, or compute keys and values, for those behind them as well: what makes six of
# them, and where these may be cut.
TOGETHER: dict[tuple[str, str], tuple[dict[str, Any], list[int]]] = {
    ("GlmMoeDsaForCausalLM", "glm_moe_dsa"): ({}, [2, 5]),
    ("HYV4ForCausalLM", "hy_v4"): ({}, [2, 5]),
}


@pytest.mark.slow_cases(r"hy_v4", why="another family stays")
@pytest.mark.parametrize("kind", TOGETHER, ids=lambda kind: kind[1])
def test_blocks_that_read_what_one_has_chosen_are_on_its_stage(kind: tuple[str, str]) -> None:
    full, shared = "full", "shared"
    types = [full, shared, full, shared, shared, full]
    model = _meta(kind, num_hidden_layers=6, indexer_types=types, mlp_layer_types=None, layer_types=None)
    starts = {numbers.start for numbers in plan_cut(meta_copy(model), describe(model), Layout(pp=3)).stages}
    assert starts == {0, *TOGETHER[kind][1]}
    where = "4 are asked for, and places to cut are only before block 2, 5: model.layers.1 reads"
    with refused("layout.pp-carries-more-than-hidden-state", naming=where):
        plan_cut(meta_copy(model), describe(model), Layout(pp=4))


class _KeepsAside(nn.Module):
    """A norm that looks at what the same norm of the block before has seen."""

    seen: list[torch.Tensor] = []  # noqa: RUF012

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.argmax(-1))
        return self.norm(x) + self.seen[0].unsqueeze(-1)


def test_what_blocks_keep_aside_for_each_other_is_seen_even_in_integers() -> None:
    model: Any = tiny_model("qwen3_moe")
    anatomy = describe(model)
    probe(meta_copy(model), anatomy.blocks, anatomy.experts)
    for layer in model.model.layers:
        layer.input_layernorm = _KeepsAside(layer.input_layernorm)
    with refused("layout.pp-carries-more-than-hidden-state", naming="model.layers.1 reads what model.layers.0"):
        probe(meta_copy(model), anatomy.blocks, anatomy.experts)


def test_a_hidden_state_that_is_changed_between_blocks_is_seen() -> None:
    model: Any = tiny_model("qwen3_moe")
    anatomy = describe(model)
    twin: Any = meta_copy(model)
    twin.model.layers[1].register_forward_pre_hook(lambda block, args: (args[0] * 2, *args[1:]))
    with refused("layout.pp-carries-more-than-hidden-state", naming="does not get the hidden state as model.layers.0"):
        probe(twin, anatomy.blocks, anatomy.experts)


class _AskingRotary(nn.Module):
    """Rotary tables of a family that asks its final norm for what only that norm has."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.rotary, self.held = model.rotary_emb, [model]

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.rotary(x * (self.held[0].norm.variance_epsilon > 0), position_ids)


def test_a_forward_that_needs_a_module_of_another_stage_is_refused_before_it_runs() -> None:
    model: Any = tiny_model("qwen3_moe")
    model.model.rotary_emb = _AskingRotary(model.model)
    with refused("layout.pp-needs-other-stage", naming="AttributeError"):
        plan_cut(meta_copy(model), describe(model), Layout(pp=2))


def test_a_stage_of_which_only_frozen_routers_would_train_is_refused() -> None:
    model: Any = tiny_model("qwen3_moe").requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.gate.requires_grad_(True)
    float32 = PrecisionConfig(params="float32", compute="float32", reduce="float32")
    plan_model(model, Layout(pp=2), ShardOptions(float32))
    with refused("layout.pp-untrained-stage", naming="stage 0"):
        plan_model(model, Layout(pp=2), ShardOptions(float32, MoeConfig(router="frozen")))


def test_micro_batches_get_one_shape_without_a_target_or_a_real_token_more() -> None:
    short = {"input_ids": torch.ones(1, 3, dtype=torch.int64), "labels": torch.ones(1, 3, dtype=torch.int64)}
    ids = torch.ones(2, 5, dtype=torch.int64)
    long = {"input_ids": ids, "labels": ids, "row_numbers": torch.tensor([4, 5]), "attention_mask": ids}
    first, second = same_shape([{**short, "row_numbers": torch.tensor([6])}, long], SequenceShare(tp=2))
    assert first["input_ids"].shape == second["input_ids"].shape == (2, 6)
    assert first["labels"].tolist() == [[1, 1, 1, -100, -100, -100], [-100] * 6]
    assert first["real_tokens"].tolist() == [[True] * 3 + [False] * 3, [False] * 6]
    assert first["row_numbers"].tolist() == [6, 6]
    assert second["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0]] * 2
