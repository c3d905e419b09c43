"""What tensor parallelism will do with a model is known, said and refused before any rank starts or weight is read."""

import re
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from expertmesh.anatomy import describe
from expertmesh.distributed.layout import Layout
from expertmesh.parallel import sequence
from expertmesh.parallel.sequence import refuse_blocks
from expertmesh.parallel.tensor_plan import TensorPlan, tensor_plan
from expertmesh.weights.meta_model import build_meta_model
from tests.families.tiny import random_model, tiny_config
from tests.support.errors import refused
from tests.support.models import tiny_model


def _plan(model: Any, tp: int = 2, kept: str | None = None) -> TensorPlan:
    return tensor_plan(model, describe(model), tp, lambda name: kept is not None and name.endswith(kept))


def _lines(model: Any, **options: Any) -> list[str]:
    return list(_plan(model, **options).lines())


VOCABULARY = "vocabulary: each rank computes 1/2 of the logits of all the group's positions"


def test_without_tp_there_is_nothing_to_say() -> None:
    assert _lines(tiny_model("qwen3_moe"), tp=1) == []


def test_the_familys_own_plan_is_followed() -> None:
    assert _lines(tiny_model("qwen3_moe", mlp_only_layers=[0])) == [
        "2 × self_attn by heads: columns of q_proj, k_proj, v_proj, rows of o_proj",
        "1 × mlp by features: columns of gate_proj, up_proj, rows of down_proj",
        VOCABULARY,
    ]


def test_latent_attention_that_the_plan_leaves_out_is_split_by_its_structure() -> None:
    assert _lines(tiny_model("deepseek_v3")) == [
        "2 × self_attn by heads: columns of q_b_proj, kv_b_proj, rows of o_proj",
        "1 × mlp by features: columns of gate_proj, up_proj, rows of down_proj",
        "1 × mlp.shared_experts by features: columns of gate_proj, up_proj, rows of down_proj",
        VOCABULARY,
    ]


def test_a_plan_for_another_configuration_is_not_followed() -> None:
    """transformers' names q_b_proj, which a model without latent queries has not."""
    config = tiny_config("Glm4MoeLiteForCausalLM", "glm4_moe_lite", q_lora_rank=None)
    (first, *_) = _lines(build_meta_model(config, torch.float32))
    assert first == "2 × self_attn by heads: columns of q_proj, kv_b_proj, rows of o_proj"


def test_norms_over_all_heads_do_not_keep_heads_together() -> None:
    heads = "2 × self_attn by heads: columns of q_proj, k_proj, v_proj, rows of o_proj; q_norm, k_norm of all heads"
    assert _lines(tiny_model("olmoe")) == [heads, VOCABULARY]


def test_work_that_every_rank_repeats_is_said() -> None:
    lines = _lines(random_model("MiniMaxM3VLForCausalLM", "minimax_m3_vl"))
    assert (
        "2 × self_attn by columns (q_proj, k_proj, v_proj) and rows (o_proj); what is between is whole on each "
        in lines[0]
    )
    lines = _lines(random_model("Lfm2MoeForCausalLM", "lfm2_moe"))
    assert any(re.search(r"conv whole on each rank of the group, which repeats its work: .*", line) for line in lines)


def test_an_mlp_that_does_not_come_out_even_stays_whole_on_own_positions() -> None:
    lines = _lines(tiny_model("deepseek_v3", intermediate_size=49))
    why = "2 ranks cannot share the 49 of gate_proj.weight evenly"
    assert f"1 × mlp unsplit, on own positions: {why}" in lines


def test_what_is_kept_in_fp32_is_not_split_with_what_is_not() -> None:
    lines = _lines(tiny_model("deepseek_v3"), kept="down_proj.weight")
    assert any("mlp unsplit, on own positions: down_proj.weight is kept in float32" in line for line in lines)


@pytest.mark.parametrize(
    ("family", "tp", "changes", "what"),
    [
        ("qwen3_moe", 4, {}, "k_proj of qwen3_moe has 2 heads"),
        ("mixtral", 3, {}, "q_proj of mixtral has 4 heads"),
        ("deepseek_v3", 8, {}, "q_b_proj of deepseek_v3 has 4 heads"),
        ("olmoe", 4, {}, "k_proj of olmoe has 2 heads"),
    ],
)
def test_heads_that_ranks_cannot_share_are_refused_by_name(
    family: str, tp: int, changes: dict[str, Any], what: str
) -> None:
    with refused("layout.tp-divides-heads", naming=f"parallel.tp {tp}: model.layers.0.self_attn.{what}"):
        _plan(tiny_model(family, **changes), tp)


def test_a_head_that_is_no_linear_layer_is_refused() -> None:
    model: Any = tiny_model("mixtral")
    model.lm_head = nn.Sequential(model.lm_head)
    with refused("layout.tp-output-embedding", naming="mixtral (Sequential)"):
        _plan(model)


def test_a_decoder_that_keeps_states_of_blocks_is_refused_if_it_takes_no_masks() -> None:
    model = random_model("Inkling2ForCausalLM", "inkling2")
    refuse_blocks(model, describe(model), Layout(tp=2))
    with mock.patch.object(sequence, "takes_masks", return_value=False):
        refuse_blocks(model, describe(model), Layout(fsdp=2))
        with refused("layout.input-per-position", naming="block_states"):
            refuse_blocks(model, describe(model), Layout(tp=2))


def test_a_convolution_outside_of_attention_is_refused() -> None:
    model: Any = tiny_model("mixtral")
    model.model.layers[1].post_attention_layernorm.shift = nn.Conv1d(32, 32, 2)
    with refused("layout.mixes-positions", naming="layers.1.post_attention_layernorm.shift"):
        _plan(model)


class _Attention(nn.Module):
    """Multi-head attention without a plan. `together`: every head looks where all of them want to."""

    head_dim, config = 4, None

    def __init__(self, together: bool) -> None:
        super().__init__()
        self.together = together
        self.q_proj, self.o_proj = nn.Linear(16, 16), nn.Linear(16, 16)
        self.k_proj, self.v_proj = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        layers = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (layer(hidden_states).view(shape).transpose(1, 2) for layer in layers)
        scores = query @ key.repeat_interleave(2, dim=1).mT
        scores = scores.mean(dim=1, keepdim=True).expand_as(scores) if self.together else scores
        out = (scores + attention_mask).softmax(-1) @ value.repeat_interleave(2, dim=1)
        return self.o_proj(out.transpose(1, 2).reshape(*hidden_states.shape[:2], -1))


@pytest.mark.parametrize(
    ("together", "why"),
    [(False, None), (True, r"transformers' plan leaves it out, and its heads see each other \(off by .*\)")],
)
def test_attention_without_a_plan_is_split_only_if_its_heads_add_up(together: bool, why: str | None) -> None:
    model: Any = tiny_model("deepseek_v3")
    model.model.layers[1].self_attn = _Attention(together)
    part = next(part for part in _plan(model).parts if part.name == "model.layers.1.self_attn")
    assert part.is_split == (not together)
    assert why is None or re.fullmatch(why, part.why_unsplit)


def test_code_that_counts_heads_is_not_split_by_structure() -> None:
    model: Any = tiny_model("deepseek_v3")
    attention = model.model.layers[0].self_attn

    class Counting(type(attention)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
            return hidden_states.view(-1, self.num_heads, 8)

    attention.__class__ = Counting
    part = _plan(model).parts[0]
    assert not part.is_split
    assert part.why_unsplit == "transformers' plan leaves it out, and its code uses self.num_heads"
