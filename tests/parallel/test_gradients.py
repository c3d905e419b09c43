"""One norm over both views, for every p, and clipping by it."""

import copy
import math

import pytest
import torch

import expertmesh as em
from expertmesh.step.grad_norm import global_norm
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks

MODEL = tiny_model("qwen3_moe")


def _norm_of_known_gradients(norm_type: float, max_norm: float) -> tuple[float, float]:
    """Give every parameter its own value as gradient; return the norm and the clipped gradients' norm."""
    model = copy.deepcopy(MODEL)
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=2), num_experts=8))
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    before = float(em.clip_grad_norm_(model, max_norm, norm_type))
    return before, float(em.clip_grad_norm_(model, None, norm_type))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
def test_the_norm_equals_the_unsharded_one_and_clipping_reaches_the_limit(norm_type: float) -> None:
    values = [parameter.detach().clone() for parameter in MODEL.parameters()]
    expected = float(torch.nn.utils.get_total_norm(values, norm_type))
    for before, after in shared_ranks(_norm_of_known_gradients, 4, norm_type, expected / 3):
        assert before == pytest.approx(expected, rel=1e-5)
        assert after == pytest.approx(expected / 3, rel=1e-5)


def _clip_half_precision(max_norm: float) -> float:
    """Return the norm after clipping gradients in bfloat16, of which the first factor is a third."""
    model = copy.deepcopy(MODEL).bfloat16()
    precision = em.PrecisionConfig(params="bfloat16", compute="bfloat16")
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=2), num_experts=8), precision=precision)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    norm = float(em.clip_grad_norm_(model, None))
    em.clip_grad_norm_(model, norm * max_norm)
    return float(em.clip_grad_norm_(model, None)) / norm


def test_the_factor_of_clipping_is_not_rounded_to_the_dtype_of_gradients() -> None:
    """In bfloat16 a third is 0.33398."""
    for ratio in shared_ranks(_clip_half_precision, 2, 1 / 3):
        assert ratio == pytest.approx(1 / 3, rel=5e-4)


def _norm_of_a_large_gradient(gradient: torch.Tensor) -> float:
    model = copy.deepcopy(MODEL)
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1), num_experts=8))
    return float(global_norm([gradient], 2.0, model))


def test_the_norm_of_a_large_gradient_is_not_lost_to_rounding() -> None:
    """Added one after the other in fp32, four million squares of such sizes are 1e-5 off and more."""
    gradient = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 1e-3
    gradient[1 << 21 :] *= 100
    (norm,) = shared_ranks(_norm_of_a_large_gradient, 1, gradient)
    assert norm == pytest.approx(float(gradient.double().norm()), rel=1e-6)


def _clip_a_gradient_that_is_not_finite(norm_type: float) -> tuple[bool, bool]:
    model = copy.deepcopy(MODEL)
    mesh = em.init_mesh(em.ParallelConfig(ep=2), num_experts=8)
    em.parallelize(model, mesh)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if mesh.rank == 1:
        next(model.parameters()).grad.to_local()[0, 0] = math.nan
    norm = em.clip_grad_norm_(model, 1.0, norm_type)
    untouched = all(bool((p.grad.to_local().nan_to_num(1.0) == 1).all()) for p in model.parameters())
    return bool(norm.isnan()), untouched


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_norm_that_is_not_finite_is_seen_by_every_rank_and_scales_nothing(norm_type: float) -> None:
    assert shared_ranks(_clip_a_gradient_that_is_not_finite, 2, norm_type) == [(True, True), (True, True)]


def test_a_model_that_was_never_parallelized_is_refused() -> None:
    model = copy.deepcopy(MODEL)
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    with refused("model.not-parallelized"):
        em.clip_grad_norm_(model, 1.0)
