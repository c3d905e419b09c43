"""Families whose code is particular about dtypes, in bf16 over fp32 parameters: right, or refused by name."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import expertmesh as em
from expertmesh.adapters.plan import adapt
from expertmesh.anatomy import describe
from expertmesh.config.errors import InputError
from expertmesh.introspection import compute_dtype, proofs
from expertmesh.introspection.compute_dtype import plan_compute, with_wide_routers
from expertmesh.state.model_view import meta_copy
from expertmesh.training.startup.preflight import preflight
from expertmesh.weights.meta_model import build_meta_model, kept_in_fp32
from tests.families.axes import refusal_of, run_of
from tests.families.bf16 import OF_ONE, bf16_ratios
from tests.families.proof import Run
from tests.families.tiny import tiny_config
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.training.tiny_run import run_config, write_inputs

# By model class: those that keep single parameters in fp32, convolutions, a head, or buffers that bf16 cannot meet.
FAMILIES = {
    "bailing_hybrid": "BailingHybridForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "flint": "FlintForCausalLM",
    "glm5_next": "Glm5NextForConditionalGeneration",
    "hy_v4": "HYV4ForCausalLM",
    "inkling": "InklingForCausalLM",
    "inkling2": "Inkling2ForCausalLM",
    "minimax": "MiniMaxForCausalLM",
}
EP = {"ep2": Run((2, 2, "grouped_mm"))}
# Of each kind one family has experts that two ranks share.
OF_FOUR = {"deepseek_v4", "flint", "inkling", "minimax"}


@pytest.mark.slow(why="test_precision.py has a family; buffers stay, where no rank is started.")
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_no_further_off_than_the_unsharded_bf16_model(family: str, lora: bool, tmp_path: Path) -> None:
    axes = {axis: run_of(axis) for axis in ("tp", "pp") if refusal_of(FAMILIES[family], family, axis) is None}
    runs = EP if lora else {"ep2": Run((4 if family in OF_FOUR else 2, 2, "loop")), **axes}
    for ratio in bf16_ratios(FAMILIES[family], family, runs, tmp_path, lora=lora).values():
        ratio.check()


def _reduce_twice(model: Any) -> None:
    """The parameters that DeepSeek-V4 keeps in fp32 in its first block."""
    model.get_submodule("model.layers.0.self_attn").set_gradient_divide_factor(0.5)


@pytest.mark.slow(why="three trainings of DeepSeek-V4; two other families' right ones stay")
def test_a_parameter_that_is_reduced_twice_or_cast_is_seen(tmp_path: Path) -> None:
    arguments = ("DeepseekV4ForCausalLM", "deepseek_v4", EP)
    bf16_ratios(*arguments, tmp_path / "right")["ep2"].check()
    assert bf16_ratios(*arguments, tmp_path / "twice", tamper=_reduce_twice)["ep2"].worst > OF_ONE
    with (
        mock.patch.object(compute_dtype, "uncast_modules", return_value={}),
        pytest.raises(AssertionError, match="when it is used"),
    ):
        bf16_ratios(*arguments, tmp_path / "cast")


def test_buffers_that_a_family_cannot_multiply_with_are_cast_while_their_module_runs() -> None:
    model = build_meta_model(tiny_config("MiniMaxForCausalLM", "minimax"), torch.float32)
    plan = plan_compute(meta_copy(model), describe(model), torch.bfloat16, kept_in_fp32(model, torch.bfloat16))
    assert plan.buffers == ("model.layers.1.self_attn",)
    model = build_meta_model(tiny_config("MiniMaxForCausalLM", "minimax", num_hidden_layers=6), torch.float32)
    plan = plan_compute(meta_copy(model), describe(model), torch.bfloat16, kept_in_fp32(model, torch.bfloat16))
    assert plan.buffers == tuple(f"model.layers.{n}.self_attn" for n in (1, 3, 5))  # one of them was run
    model = build_meta_model(tiny_config("MiniMaxForCausalLM", "minimax"), torch.bfloat16)
    adapt(model, em.LoraConfig(targets=("experts", "attention")), torch.float32, None)
    plan = plan_compute(meta_copy(model), describe(model), torch.bfloat16, kept_in_fp32(model, torch.bfloat16))
    assert plan.buffers == ()  # of a base in bf16 they are bf16


def test_a_product_of_two_dtypes_is_seen_without_values() -> None:
    """JetMoE's attention hands on what its router's dtype makes of it; on meta that may be multiplied all the same."""
    model = build_meta_model(tiny_config("JetMoeForCausalLM", "jetmoe"), torch.float32)
    anatomy, kept = describe(model), kept_in_fp32(model, torch.bfloat16)
    policy = plan_compute(meta_copy(model), anatomy, torch.bfloat16, kept)
    with mock.patch.object(proofs, "_answers", return_value={}):
        wide = with_wide_routers(meta_copy(model), anatomy, torch.bfloat16, policy)
        assert wide == policy
        mixtral = build_meta_model(tiny_config("MixtralForCausalLM", "mixtral"), torch.float32)
        wide = with_wide_routers(meta_copy(mixtral), describe(mixtral), torch.bfloat16, policy)
    assert wide.routers == tuple(f"model.layers.{layer}.mlp.gate" for layer in (0, 1))


def test_a_proof_is_run_once_in_a_process_and_a_refusal_each_time() -> None:
    mixtral = build_meta_model(tiny_config("MixtralForCausalLM", "mixtral"), torch.float32)
    anatomy, kept = describe(mixtral), kept_in_fp32(mixtral, torch.bfloat16)
    no = compute_dtype._Refused("of a family", "")
    run = mock.patch.object(compute_dtype, "_run", side_effect=[no, None])
    with mock.patch.object(proofs, "_answers", return_value={}), run as asked:
        with refused("precision.compute-unsupported"):
            plan_compute(meta_copy(mixtral), anatomy, torch.bfloat16, kept)
        for _ in range(3):
            plan_compute(meta_copy(mixtral), anatomy, torch.bfloat16, kept)
    assert asked.call_count == 2


def test_preflight_refuses_before_ranks_start(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    bf16 = run_config(inputs, tmp_path / "bf16", "precision.compute=bfloat16")
    preflight(bf16, 1)
    refusal = InputError("of a family", key="precision.compute-unsupported")
    with mock.patch.object(compute_dtype, "uncast_modules", side_effect=refusal):
        with refused("precision.compute-unsupported"):
            preflight(bf16, 1)
        preflight(run_config(inputs, tmp_path / "fp32"), 1)


def test_a_parameter_in_fp32_that_is_read_behind_its_modules_back_is_refused() -> None:
    model = tiny_model("ernie4_5_moe")
    kept = kept_in_fp32(model, torch.bfloat16)
    anatomy = describe(model)
    plan_compute(meta_copy(model), anatomy, torch.bfloat16, kept)
    block: Any = model.get_submodule("model.layers.0.mlp")
    block.forward = _scaled_by_the_router.__get__(block)
    with refused("precision.compute-unsupported", naming="model.layers.0.mlp.gate in model.layers.0.mlp"):
        plan_compute(meta_copy(model), anatomy, torch.bfloat16, kept)


def _scaled_by_the_router(block: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return hidden_states * block.gate.weight.sum().to(hidden_states.dtype)


def test_a_model_that_cannot_be_run_without_values_is_not_refused_for_it() -> None:
    model = tiny_model("qwen3_moe")
    block: Any = model.get_submodule("model.layers.0.mlp")
    block.forward = _raise.__get__(block)
    kept, anatomy = kept_in_fp32(model, torch.bfloat16), describe(model)
    policy = plan_compute(meta_copy(model), anatomy, torch.bfloat16, kept)
    # Nor are its routers made wider: nothing says that its code runs with them.
    assert with_wide_routers(meta_copy(model), anatomy, torch.bfloat16, policy) == policy


def _raise(block: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("no meta kernel")
