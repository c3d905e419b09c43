"""What cannot be split over cp exactly is refused by name, from the model's code and configuration, before weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from expertmesh.anatomy import describe
from expertmesh.distributed.layout import Layout
from expertmesh.introspection import source_code
from expertmesh.parallel.context import refuse_context
from expertmesh.training.startup.preflight import preflight
from expertmesh.weights.meta_model import build_meta_model
from tests.families.catalogue import families
from tests.families.tiny import tiny_config as family_config
from tests.support.errors import refused
from tests.support.models import tiny_config
from tests.training.tiny_run import run_config, write_inputs

CLASSES = {family.name: family.model_class for family in families() if family.model_class}
# For each reason one family whose code has it.
REFUSED = [
    ("qwen3_next", "layout.cp-carried-state", "linear_attention layers"),
    ("jamba", "layout.cp-carried-state", ""),
    ("lfm2_moe", "layout.cp-carried-state", "conv layers"),
    ("deepseek_v4", "layout.cp-carried-state", "compressed_sparse_attention layers"),
    ("zaya", "layout.cp-carried-state", "conv_qk_depthwise"),
    ("deepseek_v32", "layout.cp-attention-arguments", "indices to its attention (model.layers.0.self_attn)"),
    ("minimax_m3_vl", "layout.cp-attention-arguments", "block_indices"),
    ("llama4", "layout.mixes-positions", "model.layers.0.self_attn (arange)"),
]


def _refuse(config: Any, layout: Layout) -> None:
    model = build_meta_model(config, torch.float32)
    refuse_context(model, describe(model), layout)


@pytest.mark.parametrize(("family", "key", "named"), REFUSED)
def test_what_mixes_positions_by_itself_is_refused_by_name(family: str, key: str, named: str) -> None:
    config = family_config(CLASSES[family], family)
    with refused(key, naming=named):
        _refuse(config, Layout(cp=2))
    _refuse(config, Layout(cp=1, fsdp=2))


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
            refuse_context(model, anatomy, Layout(cp=2))
        del first.another
    first.self_attn = _Attention()
    with refused("layout.attention-not-recognised", naming="model.layers.0"):
        refuse_context(model, anatomy, Layout(cp=2))


def test_an_attention_outside_the_blocks_is_refused_by_name() -> None:
    model: Any = build_meta_model(tiny_config("qwen3_moe"), torch.float32)
    model.model.pooler = type(model.model.layers[0].self_attn)(model.config, 0)
    with refused("layout.cp-attention-outside-blocks", naming="model.pooler"):
        refuse_context(model, describe(model), Layout(cp=2))


def test_eager_functions_are_read_for_what_they_take_from_their_module() -> None:
    model: Any = build_meta_model(tiny_config("gpt_oss"), torch.float32)
    call = source_code.registry_call(model.model.layers[0].self_attn)
    assert call is not None
    assert source_code.attributes_read(call.global_of(call.default)) == ["num_key_value_groups", "sinks", "training"]
    assert "s_aux" in call.keywords


def test_preflight_refuses_before_ranks_start(tmp_path: Path) -> None:
    config = run_config(write_inputs(tmp_path), tmp_path / "run", "parallel.cp=8", "train.global_batch_size=8")
    with refused("layout.cp-divides-heads", naming="the nearest is 4"):
        preflight(config, 8)
