"""bf16 compute under fp32 adapters: no further from fp32 than stock PEFT on the unsharded bf16 model."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import expertmesh as em
from tests.adapters.reference import TARGETS, in_files, random_adapter
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks
from tests.support.reference import Row, add_gradients, padded, rows_of_step, whole

BF16 = em.PrecisionConfig(params="float32", compute="bfloat16", reduce="float32")
ALL_EXPERTS: dict[str, dict[str, int]] = {"qwen3_moe": {}, "deepseek_v3": {"topk_group": 4}}
Tensors = dict[str, torch.Tensor]


def _unsharded(model: nn.Module, adapter: Path, rows: list[Row]) -> Tensors:
    adapted: Any = peft.PeftModel.from_pretrained(model, str(adapter), is_trainable=True)  # type: ignore[arg-type]
    add_gradients(adapted, rows)
    trained = {name.replace(".default", ""): p for name, p in adapted.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    return {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}


def _sharded(directory: Path, adapter: Path, rows: list[Row], ep: int) -> tuple[Tensors, set[str], set[str]]:
    mesh = em.init_mesh(em.ParallelConfig(ep=ep))
    model: Any = em.load_model(directory, mesh, precision=BF16, lora=em.LoraConfig(from_adapter=str(adapter)))
    total = sum(int((labels[1:] != -100).sum()) for _, labels in rows)
    for row in rows[mesh.data_rank :: mesh.layout.data_ranks]:
        em.causal_lm_loss(model, padded([row]), target_tokens=total).backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    frozen = {str(p.dtype) for p in model.parameters() if not p.requires_grad}
    gradients = in_files(model, whole({name: p.grad for name, p in trained.items()}))
    return gradients, {str(p.dtype) for p in trained.values()}, frozen


@pytest.mark.slow(why="parallel/test_precision.py has the whole model")
@pytest.mark.parametrize("family", ALL_EXPERTS)
def test_bf16_error_is_at_most_one_and_a_half_times_unsharded_pefts(family: str, tmp_path: Path) -> None:
    """Every token goes to all experts: where there is a choice, a few tokens on its border decide who is worse."""
    model: Any = tiny_model(family, initializer_range=0.1, num_experts_per_tok=8, **ALL_EXPERTS[family])
    model.save_pretrained(tmp_path / "model")
    rows, adapter = rows_of_step(0, ()), tmp_path / "adapter"
    random_adapter(copy.deepcopy(model), adapter, *TARGETS[family])
    exact = _unsharded(copy.deepcopy(model), adapter, rows)
    theirs = _unsharded(copy.deepcopy(model).to(torch.bfloat16), adapter, rows)
    for ep in (4, 2):
        got, trained, frozen = shared_ranks(_sharded, 4, tmp_path / "model", adapter, rows, ep)[0]
        assert trained == {"torch.float32"}
        assert frozen == {"torch.bfloat16"}
        assert 0 < _joint(got, exact) <= 1.5 * _joint(theirs, exact)


def _joint(got: Tensors, exact: Tensors) -> float:
    """The error of all gradients together."""
    assert got.keys() == exact.keys()
    return sum(float((got[name] - exact[name]).norm()) ** 2 for name in exact) ** 0.5
