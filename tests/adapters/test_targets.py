"""What `lora.targets` and PEFT's own configs select; nothing is left out in silence, much is refused by name."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import expertmesh as em
from expertmesh.adapters.peft_config import config_content
from expertmesh.adapters.plan import adapt, plan_adapters, plan_lines
from expertmesh.anatomy import describe
from expertmesh.config.errors import InputError
from expertmesh.introspection import proofs
from expertmesh.introspection.stage_probe import without_gradient
from expertmesh.parallel.refusals import refuse_model
from tests.families.tiny import random_model
from tests.support.errors import refused
from tests.support.models import tiny_config, tiny_model

ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def _meta(family: str = "deepseek_v3", **changes: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    return model


def _selected(model: nn.Module, *targets: str) -> list[str]:
    return [target.name for target in plan_adapters(model, em.LoraConfig(targets=targets), None).targets]


def _named(prefix: str, *leaves: str) -> set[str]:
    return {f"model.layers.{prefix}.{leaf}" for leaf in leaves}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("attention",), _named("0.self_attn", *ATTENTION) | _named("1.self_attn", *ATTENTION)),
        (("experts",), _named("1.mlp.experts", "gate_up_proj", "down_proj")),
        (("shared_experts",), _named("1.mlp.shared_experts", *MLP)),
        (("dense_mlp",), _named("0.mlp", *MLP)),
        (("router",), _named("1.mlp.gate", "weight")),
        (("lm_head",), {"lm_head"}),
        (("layers.1.*.kv_b_proj", "lm_head"), _named("1.self_attn", "kv_b_proj") | {"lm_head"}),
        (("layers.0.*.q_a_proj",), _named("0.self_attn", "q_a_proj")),
        (("experts.down_proj",), _named("1.mlp.experts", "down_proj")),
        (("*experts*down_proj",), _named("1.mlp", "experts.down_proj", "shared_experts.down_proj")),
        (
            ("all-linear",),
            _named("0.self_attn", *ATTENTION)
            | _named("1.self_attn", *ATTENTION)
            | _named("0.mlp", *MLP)
            | _named("1.mlp.shared_experts", *MLP),
        ),
    ],
)  # fmt: skip
def test_groups_and_names_select_what_they_say(targets: tuple[str, ...], expected: set[str]) -> None:
    assert set(_selected(_meta(), *targets)) == expected


def test_a_target_that_matches_nothing_lists_what_there_is() -> None:
    with pytest.raises(InputError) as caught:
        _selected(_meta("qwen3_moe"), "attention", "q_projj")
    assert str(caught.value) == (
        "lora.targets: q_projj matches nothing in this model; it has attention (q_proj, k_proj, v_proj, o_proj), "
        "experts (gate_up_proj, down_proj), router (gate.weight), lm_head (lm_head)"
    )
    with refused("lora.targets-nothing", naming="shared_experts"):
        _selected(_meta("qwen3_moe"), "shared_experts")


def test_a_rank_of_experts_without_any_is_refused() -> None:
    for said, why in (
        ({"targets": ("attention",)}, "no routed experts"),
        ({"targets": ("experts",), "rank_pattern": {"experts.*": 8}}, "lora.rank_pattern"),
    ):
        with refused("lora.pattern-nothing", naming=why):
            plan_adapters(_meta(), em.LoraConfig(expert_r=2, **said), None)
    with refused("config.combination", naming="lora.expert_r"):
        em.LoraConfig(expert_r=2, from_adapter="here")


def test_experts_that_get_no_adapters_say_why() -> None:
    with refused("lora.targets-nothing", naming="flat matrices"):
        _selected(random_model("DbrxForCausalLM", "dbrx"), "experts")


@pytest.mark.parametrize(
    ("model_class", "family", "groups", "idle"),
    [
        ("DeepseekV32ForCausalLM", "deepseek_v32", ["attention", "all-linear"], "indexer.wq_b"),
        ("DeepseekV4ForCausalLM", "deepseek_v4", ["attention"], "indexer.q_b_proj"),
        ("Ernie4_5_VLMoeForConditionalGeneration", "ernie4_5_vl_moe", ["router"], "vision_moe.gate.weight"),
    ],
)
def test_what_only_chooses_gets_no_gradient_and_no_adapter(
    model_class: str, family: str, groups: list[str], idle: str
) -> None:
    model = random_model(model_class, family)
    for group in groups:
        names = _selected(model, group)
        assert names
        assert not [name for name in names if "indexer" in name or "vision_moe" in name]
    with refused("lora.targets-untrained", naming=idle):
        _selected(model, f"*.{idle}")
    every = plan_adapters(model, em.LoraConfig(targets=tuple(groups)), None).targets
    left = plan_adapters(model, em.LoraConfig(targets=tuple(groups), exclude=(f"*.{idle}",)), None).targets
    assert left == every  # who leaves them out by will, may
    anatomy = describe(model)
    with mock.patch.object(proofs, "_answers", return_value={}):
        found = without_gradient(model, anatomy)
    assert any(name.endswith((idle, f"{idle}.weight")) for name in found)


def test_what_peft_would_take_for_something_else_gets_the_name_that_leads_there() -> None:
    model = random_model("MistralLarge4ForConditionalGeneration", "mistral_large4")
    plan = plan_adapters(model, em.LoraConfig(targets=("experts", "attention")), None)
    names = {target.module: target.in_files for target in plan.targets if "layers.1." in target.module}
    block = "model.language_model.layers.1"
    assert names[f"{block}.mlp.experts"] == f"{block}.experts"
    assert names[f"{block}.self_attn.o_proj"] == ""


def test_what_no_name_leads_to_when_peft_reads_the_file_is_refused() -> None:
    model = random_model("Inkling2ForCausalLM", "inkling2")
    with refused("lora.unreadable-by-peft", naming="sconv.weight_proj"):
        _selected(model, "*sconv.weight_proj")
    assert _selected(model, "experts")


def test_vision_towers_have_no_attention_to_adapt() -> None:
    names = _selected(random_model("Glm4vMoeForConditionalGeneration", "glm4v_moe"), "all-linear", "attention")
    assert names
    assert not [name for name in names if "visual" in name]


def test_a_frozen_router_with_adapters_is_refused() -> None:
    model = _meta()
    adapt(model, em.LoraConfig(targets=("router",)), torch.float32, None)
    with refused("moe.frozen-router-has-adapter", naming="model.layers.1.mlp.gate"):
        refuse_model(model, describe(model), em.MoeConfig(router="frozen"))


def test_a_tied_head_is_refused_and_dropout_on_a_head_is() -> None:
    with refused("lora.tied-head"):
        _selected(_meta("qwen3_moe", tie_word_embeddings=True), "lm_head")
    with refused("lora.dropout-without-token-order", naming="lm_head"):
        plan_adapters(_meta(), em.LoraConfig(targets=("lm_head",), dropout=0.1), None)


def test_what_is_printed_names_modules_experts_and_trainable_parameters() -> None:
    model = _meta()
    lora = em.LoraConfig(r=4, targets=("attention", "experts", "layers.0.mlp.up_proj"))
    plan = adapt(model, lora, torch.float32, None)
    lines = list(plan_lines(plan, describe(model)))
    assert lines == [
        "attention: 2 q_a_proj, 2 q_b_proj, 2 kv_a_proj_with_mqa, 2 kv_b_proj, 2 o_proj, 2,624 trainable parameters",
        "dense_mlp: 1 up_proj, 320 trainable parameters",
        "experts: 1 gate_up_proj, 1 down_proj, 3,584 trainable parameters",
        "experts covered: all 8 of each of the 1 MoE layers",
        "r 4, scaling 8, dropout 0; 6,528 trainable in all",
    ]
    assert plan.parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    ranked = em.LoraConfig(r=4, expert_r=2, rank_pattern={"kv_b_proj": 8}, targets=("attention", "experts", "router"))
    lines = list(plan_lines(plan_adapters(_meta(), ranked, None), describe(_meta())))
    assert [line.partition(" of r ")[2] for line in lines[:3]] == [
        "4 (scaling 8) and 8 (scaling 4), 3,264 trainable parameters",
        "2 (scaling 16), 1,792 trainable parameters",
        "",
    ]
    some = plan_adapters(_meta("qwen3_moe"), em.LoraConfig(targets=("layers.1.mlp.experts.*",)), None)
    assert "experts covered: 8 of 8 in 1 of 2 MoE layers" in plan_lines(some, describe(_meta("qwen3_moe")))


@pytest.mark.parametrize(
    ("model_class", "family"),
    [
        ("Qwen3MoeForCausalLM", "qwen3_moe"),
        ("DeepseekV3ForCausalLM", "deepseek_v3"),
        ("GptOssForCausalLM", "gpt_oss"),
        ("AfmoeForCausalLM", "afmoe"),  # a gate_proj in its attention
        ("Llama4ForCausalLM", "llama4"),  # transposed experts that do not say so
        ("JetMoeForCausalLM", "jetmoe"),  # each stack of experts in a module of its own, and one like it in attention
    ],
)
def test_stock_peft_adapts_exactly_the_targets_of_our_config(model_class: str, family: str) -> None:
    model: Any = random_model(model_class, family)
    plan = plan_adapters(model, em.LoraConfig(r=2, targets=("all-linear", "experts", "router", "lm_head")), None)
    content = config_content(model, plan.targets, {}, plan.lora, None, None)
    config: Any = peft.LoraConfig(**{key: value for key, value in content.items() if key != "peft_type"})
    config.inference_mode = False
    adapted: Any = peft.get_peft_model(model, config)
    assert plan.parameters == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def _adapter(directory: Path, **said: Any) -> Path:
    content = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["q_a_proj"], **said}
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(content))
    return directory


def test_a_config_of_peft_says_targets_rank_and_scaling(tmp_path: Path) -> None:
    parameters = ["mlp.experts.gate_up_proj", "shared_experts.down_proj.weight", "mlp.gate.weight"]
    directory = _adapter(tmp_path / "adapter", target_parameters=parameters, use_rslora=True)
    plan = plan_adapters(_meta(), em.LoraConfig(from_adapter=str(directory), dropout=0.1), "base")
    assert [target.name for target in plan.targets] == [
        "model.layers.0.self_attn.q_a_proj",
        "model.layers.1.self_attn.q_a_proj",
        "model.layers.1.mlp.experts.gate_up_proj",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.shared_experts.down_proj",
    ]
    assert (plan.lora.r, plan.lora.scaling, plan.lora.dropout, plan.weights) == (4, 8.0, 0.1, None)


@pytest.mark.parametrize(
    ("said", "key", "named"),
    [
        ({"use_dora": True}, "adapter.unsupported-option", "use_dora is True"),
        ({"layers_to_transform": 0}, "adapter.unsupported-option", "layers_to_transform is 0"),
        ({"arrow_config": {"top_k": 2}}, "adapter.unsupported-option", "arrow_config is {'top_k': 2}"),
        ({"use_what_peft_learns_later": True}, "adapter.unsupported-option", "use_what_peft_learns_later is True"),
        ({"target_modules": 3}, "adapter.invalid-config", "target_modules is 3"),
        ({"target_parameters": "mlp.experts.down_proj"}, "adapter.invalid-config", "target_parameters"),
        ({"bias": "all"}, "adapter.unsupported-option", "bias is 'all'"),
        ({"modules_to_save": ["norm"]}, "adapter.unsupported-option", "modules_to_save is"),
        ({"rank_pattern": {"q_a_proj": 0}}, "adapter.invalid-config", "rank_pattern is"),
        ({"rank_pattern": {"q_a_proj": 2.5}}, "adapter.invalid-config", "but 2.5 is no number"),
        ({"alpha_pattern": {"(": 8}}, "adapter.invalid-config", "'(' is not a regular expression"),
        ({"alpha_pattern": ["q_a_proj"]}, "adapter.invalid-config", "alpha_pattern is"),
        ({"exclude_modules": "*"}, "adapter.invalid-config", "is not a regular expression"),
        ({"layers_to_transform": [0]}, "adapter.unsupported-option", "layers_to_transform is"),
        ({"trainable_token_indices": {"lm_head": [1]}}, "adapter.unsupported-option", "trainable_token_indices is"),
        ({"target_modules": ["embed_tokens"]}, "adapter.unsupported-target", "model.embed_tokens (Embedding)"),
        ({"target_modules": ".*q_a_proj"}, "adapter.ambiguous-targets", "'.*q_a_proj'"),
        ({"target_modules": ["mlp.up_proj"]}, "adapter.ambiguous-targets", "up_proj without gate_proj"),
        ({"target_modules": ["nowhere"]}, "adapter.targets-nothing", ""),
        ({"target_parameters": ["norm.weight"]}, "adapter.unsupported-target", "the parameter model.norm.weight"),
        ({"init_lora_weights": "pissa"}, "adapter.changes-base", "'pissa'"),
        ({"init_lora_weights": False}, "adapter.unsupported-option", "init_lora_weights is False"),
        ({"peft_type": "LOHA"}, "adapter.not-lora", ""),
        ({"r": "4"}, "adapter.invalid-config", "r is '4', not a number of 1 to 65,536"),
        ({"r": True}, "adapter.invalid-config", "r is True"),
        ({"r": 10**18}, "adapter.invalid-config", "r is 1000000000000000000"),
        ({"lora_alpha": True}, "adapter.invalid-config", "lora_alpha is True"),
        ({"lora_alpha": float("nan")}, "adapter.invalid-config", "lora_alpha is nan"),
        ({"lora_alpha": 1e308}, "adapter.invalid-config", "lora_alpha is 1e+308"),
        ({"lora_dropout": 5}, "adapter.invalid-config", "lora_dropout is 5"),
        ({"use_rslora": "yes"}, "adapter.invalid-config", "use_rslora is 'yes', not true or false"),
        ({"revision": "../../x"}, "adapter.invalid-config", "revision is '../../x'"),
        ({"revision": 3}, "adapter.invalid-config", "revision is 3"),
        ({"base_model_name_or_path": ["x"]}, "adapter.invalid-config", "base_model_name_or_path is ['x']"),
        ({"init_lora_weights": {"a": 1}}, "adapter.invalid-config", "init_lora_weights is"),
        ({"bias": {}}, "adapter.unsupported-option", "bias is {}"),
        ({"target_modules": ["x"] * 200_000}, "adapter.invalid-config", "has 200,000 names"),
    ],
)
def test_what_could_not_be_trained_exactly_is_refused_by_name(
    said: dict[str, Any], key: str, named: str, tmp_path: Path
) -> None:
    directory = _adapter(tmp_path / "adapter", **said)
    with refused(key, naming=named):
        plan_adapters(_meta(), em.LoraConfig(from_adapter=str(directory)), None)


def test_a_directory_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    with refused("adapter.unreadable-config"):
        plan_adapters(_meta(), em.LoraConfig(from_adapter=str(tmp_path)), None)


def test_a_head_tied_to_the_embedding_is_refused_from_peft_too(tmp_path: Path) -> None:
    directory = _adapter(tmp_path / "adapter", target_modules=["lm_head"])
    with refused("lora.tied-head"):
        plan_adapters(
            tiny_model("qwen3_moe", tie_word_embeddings=True), em.LoraConfig(from_adapter=str(directory)), None
        )
