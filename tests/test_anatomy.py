"""What is found in a model, from shapes and interfaces alone, and what is refused by name."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from expertmesh.anatomy import describe
from tests.support.errors import refused
from tests.support.models import tiny_config


def _meta(family: str, **changes: object) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    return model


def test_deepseek_v3_has_its_router_shared_expert_and_a_dense_first_layer() -> None:
    anatomy = describe(_meta("deepseek_v3"))
    assert anatomy.blocks == ("model.layers.0", "model.layers.1")
    assert [spec.name for spec in anatomy.experts] == ["model.layers.1.mlp.experts"]
    assert anatomy.routers == ("model.layers.1.mlp.gate",)
    assert anatomy.shared_experts == ("model.layers.1.mlp.shared_experts",)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_sizes_are_read_from_the_parameters(family: str) -> None:
    spec = describe(_meta(family)).experts[0]
    assert (spec.num_experts, spec.hidden_size, spec.intermediate_size, spec.top_k) == (8, 32, 16, 2)
    assert (spec.gated, spec.transposed, spec.biased) == (True, False, False)
    assert spec.parameters == ("gate_up_proj", "down_proj")


def test_a_dense_model_is_refused_by_name() -> None:
    with torch.device("meta"):
        llama = AutoModelForCausalLM.from_config(
            LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=32)
        )
    with refused("model.no-experts", naming="llama"):
        describe(llama)


def test_a_list_of_expert_modules_is_refused_by_name() -> None:
    class Old(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    with refused("model.no-experts", naming="Linear"):
        describe(Old())


def test_experts_with_unknown_parameters_are_refused_by_name() -> None:
    model = _meta("qwen3_moe")
    model.model.layers[0].mlp.experts.scale = nn.Parameter(torch.ones(8))
    with refused("model.unsupported-expert-parameters", naming="['scale']"):
        describe(model)
