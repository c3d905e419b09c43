"""What cannot be split over cp exactly is refused by name, from the model's code and configuration, before weights."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn

from expertmesh.anatomy import describe
from expertmesh.distributed.layout import Layout
from expertmesh.introspection import attention, proofs, small_copies
from expertmesh.introspection.attention import packing_refusal
from expertmesh.parallel.context import ContextPlan, context_plan
from expertmesh.training.startup.preflight import preflight
from expertmesh.weights.meta_model import build_meta_model
from tests.families.catalogue import families
from tests.families.tiny import tiny_config as family_config
from tests.support.errors import refused
from tests.support.models import tiny_config
from tests.training.tiny_run import run_config, write_inputs

CLASSES = {family.name: family.model_class for family in families() if family.model_class}
# Modules outside of attention whose code may look along the sequence, and computes each token by itself.
BY_TOKEN = [
    ("zaya", "model.layers.1.mlp.gate", "[:, a:b]"),
    ("inkling", "model.layers.1.mlp.shared_experts", "bmm"),
    pytest.param(
        *("inkling2", "model.layers.1.mlp_input", "scaled_dot_product_attention"),
        marks=pytest.mark.skipif(
            Version(transformers.__version__) >= Version("5.24"), reason="its attention takes distances since then"
        ),
    ),
]
# For each way to see whole rows one family: how its layers are computed, and whether its attention exchanges.
GATHERED = [
    ("qwen3_next", "linear_attn by heads: columns of in_proj_ba, in_proj_qkvz, conv1d, rows of out_proj", True),
    ("kimi_linear", "rows of o_proj", True),
    ("minimax", "columns of qkv_proj, output_gate, rows of out_proj; norm of all heads", True),
    ("lfm2_moe", "conv by heads: columns of conv, in_proj, rows of out_proj", True),
    ("jamba", "mamba whole on each rank of the group, which repeats its work: its layers are not known", True),
    ("deepseek_v32", "self_attn by heads: columns of q_b_proj, kv_b_proj, rows of o_proj", False),
    ("llama4", "self_attn by heads: columns of q_proj, k_proj, v_proj, rows of o_proj", False),
    ("deepseek_v4", "self_attn whole on each rank of the group", False),
]


def _refuse(config: Any, layout: Layout) -> ContextPlan:
    model = build_meta_model(config, torch.float32)
    return context_plan(model, describe(model), layout)


@pytest.mark.slow_cases(r"inkling-.*", why="the other families stay")
@pytest.mark.parametrize(("family", "name", "used"), BY_TOKEN)
def test_what_computes_each_token_by_itself_is_proven_so_and_refused_where_it_does_not(
    family: str, name: str, used: str
) -> None:
    model = build_meta_model(family_config(CLASSES[family], family), torch.float32)
    anatomy, kind = describe(model), type(model.get_submodule(name))
    answers: dict[str, dict[str, Any]] = {}
    with mock.patch.object(proofs, "_answers", return_value=answers):
        context_plan(model, anatomy, Layout(cp=2))
        assert packing_refusal(model) is None
    assert any(key.startswith(f"{kind.__module__} {kind.__qualname__} ") for key in answers["tokens"])
    own = kind.forward

    def shifted(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Each token's, with the hidden states of the token before it in the row."""
        return own(self, *(_before(x) if isinstance(x, torch.Tensor) and x.dim() > 2 else x for x in args), **kwargs)

    with mock.patch.object(kind, "forward", shifted):
        with refused("layout.mixes-positions", naming=f"({used})"):
            context_plan(model, anatomy, Layout(cp=2))
        context_plan(model, anatomy, Layout(cp=1, fsdp=2))
        assert "carries state" in (packing_refusal(model) or "")


def _before(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:, :1], x[:, :-1]], dim=1)


@pytest.mark.parametrize(("family", "said", "exchanges"), GATHERED)
def test_what_is_not_exchanged_gathers_whole_rows_and_the_plan_says_so(family: str, said: str, exchanges: bool) -> None:
    plan = _refuse(family_config(CLASSES[family], family), Layout(cp=2))
    assert any(said in line and line.endswith("of whole rows") for line in plan.lines()), list(plan.lines())
    assert bool(plan.exchanged) is exchanges


def test_heads_that_ranks_cannot_share_are_computed_whole() -> None:
    config = family_config(CLASSES["qwen3_next"], "qwen3_next")
    lines = list(_refuse(config, Layout(cp=4)).lines())
    assert any(
        "linear_attn whole on each rank" in line and "4 ranks cannot share its 2 heads" in line for line in lines
    )


def test_heads_in_other_sections_than_thought_are_not_shared() -> None:
    model: Any = build_meta_model(family_config(CLASSES["qwen3_next"], "qwen3_next"), torch.float32)
    mixer = model.model.layers[0].linear_attn
    assert not isinstance(small_copies.state_heads(mixer, 2), str)
    with mock.patch.object(small_copies.TensorCut, "of", lambda self, x, rank, ranks: x.chunk(ranks, self.dim)[rank]):
        found = small_copies._by_names(mixer)
        assert found is not None
        assert "its heads see each other" in str(small_copies._why_not_shared(mixer, found, 2))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe", "ernie4_5_moe"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_through_the_registry_is_not(family: str, attention: str) -> None:
    _refuse(tiny_config(family, attn_implementation="eager" if family == "gpt_oss" else attention), Layout(cp=4))


def test_query_heads_that_cp_does_not_divide_are_refused_with_the_nearest_choice() -> None:
    config = tiny_config("qwen3_moe", num_attention_heads=6)
    with refused("layout.cp-divides-heads", naming="valid values: 1, 2, 3, 6; the nearest is 3"):
        _refuse(config, Layout(cp=4))
    with refused("layout.cp-divides-heads", naming="3 query heads (of 6, over tp 2)"):
        _refuse(config, Layout(cp=2, tp=2))


class _Attention(nn.Module):
    """Hard-coded attention, as some models with code of their own have it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


class _ByHand(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT).softmax(-1) @ x


class _Shift(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, :1], x[:, :-1]], dim=1)


def test_attention_in_code_of_its_own_is_refused_by_name() -> None:
    model: Any = build_meta_model(tiny_config("qwen3_moe"), torch.float32)
    anatomy, first = describe(model), model.model.layers[0]
    for another, used in ((_Attention, "scaled_dot_product_attention"), (_ByHand, "@"), (_Shift, "[:, a:b]")):
        first.another = another()
        with refused("layout.mixes-positions", naming=f"model.layers.0.another ({used})"):
            context_plan(model, anatomy, Layout(cp=2))
        del first.another
    first.self_attn = _Attention()
    with refused("layout.attention-not-recognised", naming="model.layers.0"):
        context_plan(model, anatomy, Layout(cp=2))


def test_an_attention_outside_the_blocks_is_refused_by_name() -> None:
    model: Any = build_meta_model(tiny_config("qwen3_moe"), torch.float32)
    model.model.pooler = type(model.model.layers[0].self_attn)(model.config, 0)
    with refused("layout.cp-attention-outside-blocks", naming="model.pooler"):
        context_plan(model, describe(model), Layout(cp=2))


def test_eager_functions_are_read_for_what_they_take_from_their_module() -> None:
    model: Any = build_meta_model(tiny_config("gpt_oss"), torch.float32)
    call = attention.registry_call(model.model.layers[0].self_attn)
    assert call is not None
    assert attention.attributes_read(call.global_of(call.default)) == ["num_key_value_groups", "sinks", "training"]
    assert "s_aux" in call.keywords


def test_preflight_refuses_before_ranks_start(tmp_path: Path) -> None:
    config = run_config(write_inputs(tmp_path), tmp_path / "run", "parallel.cp=8", "train.global_batch_size=8")
    with refused("layout.cp-divides-heads", naming="the nearest is 4"):
        preflight(config, 8)
