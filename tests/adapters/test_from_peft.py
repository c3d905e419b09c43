"""A LoraConfig of PEFT becomes ours: it adapts what PEFT adapts, or the field that it cannot honour is named."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
from torch import nn

import expertmesh as em
from expertmesh.adapters.peft_format import PREFIX, file_keys
from expertmesh.adapters.plan import plan_adapters
from tests.adapters.reference import TARGETS
from tests.families.tiny import random_model
from tests.support.errors import refused
from tests.support.models import tiny_model


def _peft_config(**changes: Any) -> peft.LoraConfig:
    return peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"], **changes}
    )


def _shapes_of_peft(model: nn.Module, config: peft.LoraConfig) -> dict[str, tuple[int, ...]]:
    adapted: Any = peft.get_peft_model(model, config)  # type: ignore[arg-type]
    trained = {name.replace(".default", ""): p for name, p in adapted.named_parameters() if p.requires_grad}
    return {name: tuple(p.shape) for name, p in trained.items()}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_it_adapts_what_peft_adapts(family: str) -> None:
    modules, parameters = TARGETS[family]
    config = _peft_config(target_modules=modules, target_parameters=parameters, use_rslora=True)
    model = tiny_model(family)
    lora = em.lora_from_peft(config)
    plan = plan_adapters(model, lora, None)
    keys = {key for target in plan.targets for key in file_keys(target, plan.targets)}
    assert keys == set(_shapes_of_peft(model, config))
    assert (lora.r, lora.alpha, lora.dropout, lora.use_rslora, lora.init) == (4, 8.0, 0.0, True, "default")
    assert all(key.startswith(PREFIX) for key in keys)


def test_it_leaves_out_what_peft_leaves_out() -> None:
    model, exclude = tiny_model("qwen3_moe"), ["k_proj", "layers.1.self_attn.q_proj"]
    config = _peft_config(target_modules=["q_proj", "k_proj", "o_proj"], exclude_modules=exclude)
    plan = plan_adapters(model, em.lora_from_peft(config), None)
    keys = {key for target in plan.targets for key in file_keys(target, plan.targets)}
    assert keys == set(_shapes_of_peft(model, config))
    with refused("lora.exclude-nothing", naming="v_proj"):
        plan_adapters(tiny_model("qwen3_moe"), em.LoraConfig(targets=("q_proj",), exclude=("v_proj",)), None)


@pytest.mark.parametrize("exclude", [["v_proj"], r".*\.0\..*"], ids=["names", "pattern"])
def test_a_directory_leaves_out_what_peft_leaves_out(exclude: Any, tmp_path: Path) -> None:
    config = _peft_config(
        target_modules=["q_proj", "v_proj"], target_parameters=["experts.down_proj"], exclude_modules=exclude
    )
    config.save_pretrained(tmp_path)
    model = tiny_model("mixtral")
    plan = plan_adapters(model, em.LoraConfig(from_adapter=str(tmp_path)), None)
    keys = {key for target in plan.targets for key in file_keys(target, plan.targets)}
    assert keys == set(_shapes_of_peft(model, config))


def test_dropout_and_the_gaussian_start_carry_over() -> None:
    lora = em.lora_from_peft(_peft_config(lora_dropout=0.25, init_lora_weights="gaussian"))
    assert (lora.dropout, lora.init) == (0.25, "gaussian")


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("modules", ["all-linear", ["q_proj", "gate_proj", "up_proj", "down_proj", "w1", "w3", "w2"]])
def test_a_directory_means_what_peft_makes_of_it(family: str, modules: Any, tmp_path: Path) -> None:
    """Names, ranks and scalings: PEFT takes former modules for fused experts in some families, and in others not."""
    named = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if family == "gpt_oss" else []
    said = {"rank_pattern": {r"layers\.1\..*o_proj": 2}, "alpha_pattern": {"down_proj": 3, r".*\.gate_up_proj": 1}}
    config = _peft_config(target_modules=modules, target_parameters=named, exclude_modules=["k_proj"], **said)
    config.save_pretrained(tmp_path)
    model = random_model("GptOssForCausalLM", family) if family == "gpt_oss" else tiny_model(family)
    plan = plan_adapters(model, em.LoraConfig(from_adapter=str(tmp_path)), None)
    keys = {target: file_keys(target, plan.targets)[0].removesuffix(".lora_A.weight") for target in plan.targets}
    wrapped: Any = peft.get_peft_model(model, config)
    layers = {name: each for name, each in wrapped.named_modules() if hasattr(each, "lora_A") and each.lora_A}
    assert set(layers) == set(keys.values())
    for target, key in keys.items():
        theirs = layers[key]
        assert (target.r, target.alpha) == (theirs.r["default"], theirs.lora_alpha["default"]), key
        assert target.scaling == theirs.scaling["default"], key


def test_patterns_of_a_config_in_memory_carry_over_and_idle_ones_are_refused() -> None:
    model, config = tiny_model("qwen3_moe"), _peft_config(rank_pattern={"q_proj": 8}, alpha_pattern={r".*\.1\..*": 2})
    plan = plan_adapters(model, em.lora_from_peft(config), None)
    assert [(target.r, target.alpha) for target in plan.targets] == [(8, 8.0), (8, 2.0)]
    content = json.loads(plan.config(model))
    assert content["rank_pattern"] == {"q_proj": 8}
    assert content["alpha_pattern"] == {r"1\.self_attn\.q_proj": 2}
    for said in ({"rank_pattern": {"v_proj": 8}}, {"alpha_pattern": {"v_proj": 8.0}}):
        with refused("lora.pattern-nothing", naming="v_proj"):
            plan_adapters(model, em.LoraConfig(targets=("q_proj",), **said), None)
    with refused("config.combination", naming="lora.rank_pattern"):
        em.LoraConfig(rank_pattern={"(": 8})


def test_a_module_of_a_groups_name_is_not_the_group() -> None:
    lora = em.lora_from_peft(_peft_config(target_modules=["attention", "q_proj"]))
    with refused("lora.targets-nothing", naming="attention.weight"):
        plan_adapters(tiny_model("qwen3_moe"), lora, None)
    assert em.lora_from_peft(_peft_config(target_modules=[], target_parameters=["experts"])).targets == ("*.experts",)


def test_a_head_is_named_as_a_module_and_left_out_as_one() -> None:
    config = _peft_config(target_modules=["q_proj", "lm_head"])
    plan = plan_adapters(tiny_model("qwen3_moe"), em.lora_from_peft(config), None)
    keys = {key for target in plan.targets for key in file_keys(target, plan.targets)}
    assert keys == set(_shapes_of_peft(tiny_model("qwen3_moe"), config))
    assert "lm_head" in {target.module for target in plan.targets}
    without = plan_adapters(
        tiny_model("qwen3_moe"),
        em.lora_from_peft(_peft_config(target_modules=["q_proj", "lm_head"], exclude_modules=["lm_head"])),
        None,
    )
    assert {target.group for target in without.targets} == {"attention"}


@pytest.mark.parametrize("pattern", [{"rank_pattern": {"q_proj": 2}}, {"alpha_pattern": {r".*\.q_proj": 2}}])
def test_patterns_beside_the_weight_of_a_linear_layer_are_refused(pattern: dict[str, Any]) -> None:
    """PEFT compares them with the weight's name there, which they do not match."""
    config = _peft_config(target_modules=[], target_parameters=["q_proj.weight"], **pattern)
    assert {min(shape) for shape in _shapes_of_peft(tiny_model("qwen3_moe"), config).values()} == {4}
    with refused("adapter.unsupported-option", naming=next(iter(pattern))):
        em.lora_from_peft(config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("layers_to_transform", [0]),
        ("exclude_modules", ".*k_proj"),
        ("layer_replication", [(0, 1)]),
        ("fan_in_fan_out", True),
        ("trainable_token_indices", {"lm_head": [1, 2]}),
        ("use_qalora", True),
        ("init_lora_weights", False),
        ("init_lora_weights", "orthogonal"),
        ("inference_mode", True),
        ("task_type", "TOKEN_CLS"),
        ("target_modules", None),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_field(field: str, value: Any) -> None:
    with refused("adapter.unsupported-option", naming=f"peft_config: {field} is"):
        em.lora_from_peft(_peft_config(**{field: value}))


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_starts_that_change_the_base_are_refused(init: str) -> None:
    with refused("adapter.changes-base", naming="init_lora_weights"):
        em.lora_from_peft(_peft_config(init_lora_weights=init))


@pytest.mark.parametrize("modules", ["all-linear", ".*q_proj", ["gate_proj", "up_proj"]])
def test_targets_that_peft_widens_are_refused(modules: Any) -> None:
    with refused("adapter.ambiguous-targets", naming="target_modules"):
        em.lora_from_peft(_peft_config(target_modules=modules))


def test_other_configs_of_peft_are_refused() -> None:
    with refused("adapter.not-lora"):
        em.lora_from_peft(peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    with refused("adapter.not-lora", naming="int"):
        em.lora_from_peft(3)


def test_names_that_a_vision_tower_has_as_well_are_refused() -> None:
    model = random_model("Glm4vMoeForConditionalGeneration", "glm4v_moe")
    config = _peft_config(target_modules=[], target_parameters=["up_proj.weight"])
    for lora in (em.lora_from_peft(config), em.LoraConfig(targets=("up_proj",))):
        with refused("adapter.unsupported-target", naming="visual"):
            plan_adapters(model, lora, None)
