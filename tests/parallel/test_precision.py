"""bf16 compute over fp32 master weights: no further from the fp32 reference than the unsharded bf16 model itself."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import expertmesh as em
from tests.support.models import tiny_model
from tests.support.ranks import run_ranks

FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "ernie4_5_moe"]
IDS = torch.randint(96, (4, 2, 32), generator=torch.Generator().manual_seed(0))  # one micro-batch for each data rank
TARGETS = 4 * 2 * 31
BF16 = em.PrecisionConfig(params="float32", compute="bfloat16", reduce="float32")


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """All gradients of the unsharded model on the whole batch, in fp32."""
    for ids in IDS:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        (F.cross_entropy(logits.float(), ids[:, 1:].flatten(), reduction="sum") / TARGETS).backward()
    return {name: parameter.grad.float() for name, parameter in model.named_parameters() if parameter.requires_grad}


def _sharded(model: nn.Module, ep: int) -> tuple[dict[str, torch.Tensor], set[str], set[str]]:
    model = copy.deepcopy(model)
    mesh = em.init_mesh(em.ParallelConfig(ep=ep), num_experts=8)
    em.parallelize(model, mesh, precision=BF16)
    batch = {"input_ids": IDS[mesh.data_rank], "labels": IDS[mesh.data_rank]}
    em.causal_lm_loss(model, batch, target_tokens=TARGETS).backward()
    dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    grad_dtypes = {str(gradient.dtype) for gradient in gradients.values()}
    return {name: gradient.full_tensor() for name, gradient in gradients.items()}, dtypes, grad_dtypes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ep", [4, 2])
def test_bf16_error_is_at_most_one_and_a_half_times_the_unsharded_models(family: str, ep: int) -> None:
    model = tiny_model(family, initializer_range=0.1)
    exact = _gradients(copy.deepcopy(model))
    in_bf16 = copy.deepcopy(model).to(torch.bfloat16)
    for name, parameter in in_bf16.named_parameters():
        if family == "ernie4_5_moe" and name.endswith("gate.weight"):
            parameter.data = model.get_parameter(name).data.clone()  # as from_pretrained keeps it
    unsharded = _gradients(in_bf16)
    for got, dtypes, grad_dtypes in run_ranks(_sharded, 4, model, ep):
        assert dtypes == grad_dtypes == {"torch.float32"}  # what the optimizer updates, and with what
        errors = {name: float((got[name] - exact[name]).norm() / exact[name].norm()) for name in exact}
        theirs = {name: float((unsharded[name] - exact[name]).norm() / exact[name].norm()) for name in exact}
        assert _joint(got, exact) <= 1.5 * _joint(unsharded, exact)
        assert min(errors.values()) > 0  # it did compute in bf16
        # Tensor by tensor the two errors are different draws of the same rounding; none may be out of line.
        worst = max(errors, key=lambda name: errors[name] / theirs[name])
        assert errors[worst] <= 4 * theirs[worst], (worst, errors[worst], theirs[worst])


def _joint(got: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """The error of all gradients together."""
    return sum(float((got[name] - exact[name]).norm()) ** 2 for name in exact) ** 0.5


def _dtypes_in_forward() -> dict[str, torch.dtype]:
    model = tiny_model("ernie4_5_moe")
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1), num_experts=8), precision=BF16)
    seen: dict[str, torch.dtype] = {}

    def note(name: str, module: nn.Module, args: Any, out: Any) -> None:
        seen[name] = module.weight.dtype

    for name in ("model.layers.0.mlp.gate", "model.layers.0.self_attn.q_proj"):
        model.get_submodule(name).register_forward_hook(functools.partial(note, name))
    em.causal_lm_loss(model, {"input_ids": IDS[0], "labels": IDS[0]}, target_tokens=TARGETS).backward()
    return seen


def test_what_the_family_keeps_in_fp32_is_never_cast() -> None:
    """ERNIE declares its router so; transformers keeps it in fp32 inside bf16 models."""
    for seen in run_ranks(_dtypes_in_forward, 2):
        assert seen == {
            "model.layers.0.mlp.gate": torch.float32,
            "model.layers.0.self_attn.q_proj": torch.bfloat16,
        }


def _all_bf16() -> tuple[dict[str, torch.Tensor], set[str]]:
    model = tiny_model("qwen3_moe", initializer_range=0.1).to(torch.bfloat16)
    mesh = em.init_mesh(em.ParallelConfig(ep=2))
    em.parallelize(model, mesh)  # without a precision everything keeps the model's dtype
    batch = {"input_ids": IDS[mesh.data_rank], "labels": IDS[mesh.data_rank]}
    em.causal_lm_loss(model, batch, target_tokens=TARGETS).backward()
    gradients = {name: parameter.grad.full_tensor().float() for name, parameter in model.named_parameters()}
    return gradients, {str(parameter.grad.dtype) for parameter in model.parameters()}


def test_bf16_parameters_are_no_further_off_than_the_unsharded_bf16_model() -> None:
    model = tiny_model("qwen3_moe", initializer_range=0.1)
    exact = _gradients(copy.deepcopy(model))
    unsharded = _gradients(copy.deepcopy(model).to(torch.bfloat16))
    for got, dtypes in run_ranks(_all_bf16, 4):
        assert dtypes == {"torch.bfloat16"}
        assert 0 < _joint(got, exact) <= 1.5 * _joint(unsharded, exact)


def _parameters_in_memory(ep: int) -> int:
    model = tiny_model("qwen3_moe")
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=ep), num_experts=8), precision=BF16)
    held = torch.tensor(sum(parameter.to_local().numel() for parameter in model.parameters()))
    dist.all_reduce(held)
    return int(held)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_every_parameter_is_held_exactly_once(ep: int) -> None:
    total = sum(parameter.numel() for parameter in tiny_model("qwen3_moe").parameters())
    assert run_ranks(_parameters_in_memory, 4, ep) == [total] * 4
