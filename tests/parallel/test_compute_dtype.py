"""Families whose code is particular about dtypes, in bf16 over fp32 parameters: right, or refused by name."""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import expertmesh as em
from expertmesh.adapters.plan import adapt
from expertmesh.anatomy import describe
from expertmesh.introspection.compute_dtype import refuse_compute, uncast_modules
from expertmesh.training.startup.preflight import preflight
from expertmesh.weights.meta_model import build_meta_model, kept_in_fp32
from tests.families.tiny import VOCABULARY, random_model, tiny_config
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.ranks import run_ranks
from tests.training.tiny_run import run_config, write_inputs

IDS = torch.randint(3, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(0))  # a row for each data rank
TARGETS = 2 * 23
BF16 = em.PrecisionConfig(params="float32", compute="bfloat16", reduce="float32")


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of the unsharded model, row by row, in fp32."""
    for row in IDS:
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
        (F.cross_entropy(logits.float(), row[1:], reduction="sum") / TARGETS).backward()
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def _sharded(model: Any) -> dict[str, torch.Tensor]:
    mesh = em.init_mesh(em.ParallelConfig(ep=2))
    em.parallelize(model, mesh, precision=BF16)
    row = IDS[mesh.data_rank][None]
    em.causal_lm_loss(model, {"input_ids": row, "labels": row}, target_tokens=TARGETS).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}


def _error(got: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    assert got.keys() == exact.keys()
    return sum(float((got[name] - exact[name]).norm()) ** 2 for name in exact) ** 0.5


def test_a_convolution_in_fp32_whose_weight_is_read_without_calling_it() -> None:
    """Inkling 2 keeps its short convolutions in fp32, and the module around each computes with the weight itself."""
    model = random_model("Inkling2ForCausalLM", "inkling2")
    kept = kept_in_fp32(model, torch.bfloat16)
    assert "model.layers.0.self_attn.k_sconv" in uncast_modules(model, describe(model), kept)
    in_bf16 = copy.deepcopy(model)
    for name, parameter in in_bf16.named_parameters():
        if not kept(name):
            parameter.data = parameter.data.bfloat16()
    for each in (model, in_bf16):
        each.set_experts_implementation("eager")
    exact, unsharded = _gradients(copy.deepcopy(model)), _gradients(in_bf16)
    for got in run_ranks(_sharded, 2, model):
        assert 0 < _error(got, exact) <= 1.5 * _error(unsharded, exact)


def test_buffers_that_a_family_cannot_multiply_with_are_refused() -> None:
    config = tiny_config("MiniMaxForCausalLM", "minimax")
    model = build_meta_model(config, torch.float32)
    kept = kept_in_fp32(model, torch.bfloat16)
    with refused("precision.compute-unsupported", naming="minimax does not run"):
        refuse_compute(model, describe(model), torch.bfloat16, kept)


def test_preflight_refuses_before_ranks_start_and_lets_adapters_pass(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    tiny_config("MiniMaxForCausalLM", "minimax").save_pretrained(inputs / "model")
    bf16 = "precision.compute=bfloat16"
    with refused("precision.compute-unsupported", naming="minimax does not run"):
        preflight(run_config(inputs, tmp_path / "full", bf16), 1)
    preflight(run_config(inputs, tmp_path / "lora", bf16, "lora.targets=[attention]"), 1)
    preflight(run_config(inputs, tmp_path / "fp32"), 1)


def test_adapters_have_a_base_with_buffers_in_the_compute_dtype() -> None:
    model = build_meta_model(tiny_config("MiniMaxForCausalLM", "minimax"), torch.bfloat16)
    adapt(model, em.LoraConfig(targets=("experts", "attention")), torch.float32, None)
    refuse_compute(model, describe(model), torch.bfloat16, kept_in_fp32(model, torch.bfloat16))


def test_a_parameter_in_fp32_that_is_read_behind_its_modules_back_is_refused() -> None:
    model = tiny_model("ernie4_5_moe")
    kept = kept_in_fp32(model, torch.bfloat16)
    anatomy = describe(model)
    refuse_compute(model, anatomy, torch.bfloat16, kept)
    block: Any = model.get_submodule("model.layers.0.mlp")
    block.forward = _scaled_by_the_router.__get__(block)
    with refused("precision.compute-unsupported", naming="model.layers.0.mlp.gate in model.layers.0.mlp"):
        refuse_compute(model, anatomy, torch.bfloat16, kept)


def _scaled_by_the_router(block: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return hidden_states * block.gate.weight.sum().to(hidden_states.dtype)


def test_a_model_that_cannot_be_run_without_values_is_not_refused_for_it() -> None:
    model = tiny_model("qwen3_moe")
    block: Any = model.get_submodule("model.layers.0.mlp")
    block.forward = _raise.__get__(block)
    refuse_compute(model, describe(model), torch.bfloat16, kept_in_fp32(model, torch.bfloat16))


def _raise(block: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("no meta kernel")
