"""`em.adapters_off`: the frozen base alone, bit for bit, in every layout; the adapters afterwards as before."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import expertmesh as em
from expertmesh.experts import layer
from expertmesh.state.model_view import module_state
from expertmesh.step.forward_backward import evaluate_terms
from expertmesh.step.loss import CrossEntropy
from tests.adapters.reference import PeftRun, tiny_peft_run
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.ranks import run_ranks, shared_ranks
from tests.support.reference import padded

LAYOUTS: list[dict[str, Any]] = [{"ep": 2}, {"ep": 1, "replicate": 2}, {"ep": 2, "tp": 2}, {"ep": 1, "pp": 2}]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> PeftRun:
    return tiny_peft_run("qwen3_moe", tmp_path_factory.mktemp("adapter"))


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> float:
    """This rank's share, 0 on ranks without the last pipeline stage."""
    with torch.no_grad():
        return sum(float(term.loss) for term in evaluate_terms(model, [batch], CrossEntropy(50)))


def _losses(run: PeftRun, layout: dict[str, Any]) -> list[float]:
    """This rank's share of the loss: of the base, with adapters off, on, off again."""
    mesh = em.init_mesh(em.ParallelConfig(**layout))
    base, adapted = copy.deepcopy(run.initial), copy.deepcopy(run.initial)
    em.parallelize(base, mesh)  # type: ignore[arg-type]
    em.parallelize(adapted, mesh, lora=em.LoraConfig(from_adapter=str(run.start), dropout=0.5))  # type: ignore[arg-type]
    batch = padded(run.rows[0][mesh.data_rank :: mesh.layout.data_ranks])
    found = [_loss(base, batch)]
    with em.adapters_off(adapted):
        found.append(_loss(adapted, batch))  # in training mode, without numbers for dropout
    adapted.eval()
    found.append(_loss(adapted, batch))
    with em.adapters_off(adapted):
        found.append(_loss(adapted, batch))
    return found


def _every_layout(run: PeftRun) -> list[list[float]]:
    return [_losses(run, layout) for layout in LAYOUTS]


def test_the_base_computes_alone_in_every_layout(run: PeftRun) -> None:
    ranks = shared_ranks(_every_layout, 2, run)
    for number, layout in enumerate(LAYOUTS):
        for base, off, _, again in (found[number] for found in ranks):
            assert base == off == again, layout
        assert any(found[number][0] != found[number][2] for found in ranks), layout


def test_experts_that_stay_on_are_caught(run: PeftRun) -> None:
    with mock.patch.object(layer, "running_adapters_of", lambda holder: module_state(holder).lora_state):
        ranks = run_ranks(_without_dropout, 2, run)
    assert all(base != off for base, off in ranks)


def _without_dropout(run: PeftRun) -> tuple[float, float]:
    mesh = em.init_mesh(em.ParallelConfig(ep=2))
    base, adapted = copy.deepcopy(run.initial), copy.deepcopy(run.initial)
    em.parallelize(base, mesh)  # type: ignore[arg-type]
    em.parallelize(adapted, mesh, lora=em.LoraConfig(from_adapter=str(run.start)))  # type: ignore[arg-type]
    batch = padded(run.rows[0][mesh.data_rank :: 2])
    with em.adapters_off(adapted):
        return _loss(base, batch), _loss(adapted, batch)


def test_a_model_without_adapters_is_refused() -> None:
    with refused("model.no-adapters"), em.adapters_off(tiny_model("qwen3_moe")):
        pass
