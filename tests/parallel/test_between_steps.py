"""What users do between training steps must not change them: evaluate, generate, build the optimizer late.

And the ways into the product that could hide something: different copies, a router that cannot be found, a model's own
auxiliary loss.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import expertmesh as em
from expertmesh.config.errors import IntegrityError
from tests.support.errors import refused_on_ranks
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks

IDS = torch.randint(96, (2, 1, 16), generator=torch.Generator().manual_seed(0))
BF16 = em.PrecisionConfig(params="float32", compute="bfloat16", reduce="float32")


def _sharded(**options: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = tiny_model("qwen3_moe", tie_word_embeddings=options.pop("tied", False))
    mesh = em.init_mesh(em.ParallelConfig(ep=2))
    em.parallelize(model, mesh, **options)
    return model, {"input_ids": IDS[mesh.data_rank], "labels": IDS[mesh.data_rank]}


def _generate(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    model.eval()
    model.generate(batch["input_ids"], max_new_tokens=2, do_sample=False)
    model.train()


def _evaluate(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        em.causal_lm_loss(model, batch, target_tokens=30)


def _forward(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        model(input_ids=batch["input_ids"])


def _forget_a_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    em.causal_lm_loss(model, batch, target_tokens=30)  # with gradients, but never backward


BETWEEN = {"nothing": lambda *_: None, "generate": _generate, "evaluate": _evaluate, "forward": _forward}


def _norms_with(between: str, tied: bool) -> list[float]:
    """Norms of two steps with something before the optimizer is built, before clipping and before the next loss."""
    model, batch = _sharded(precision=BF16, tied=tied)
    act = BETWEEN[between]
    act(model, batch)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    norms = []
    for _ in range(3):
        em.causal_lm_loss(model, batch, target_tokens=30).backward()
        act(model, batch)
        norms.append(float(em.clip_grad_norm_(model, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        act(model, batch)
    return norms


@pytest.mark.slow_cases(r"False", why="the same with adapters stays")
@pytest.mark.parametrize("tied", [False, True])
def test_nothing_between_steps_changes_them(tied: bool) -> None:
    for undisturbed, *others in shared_ranks(lambda: [_norms_with(each, tied) for each in ("nothing", *BETWEEN)], 2):
        for between, norms in zip(BETWEEN, others, strict=True):
            assert norms == undisturbed, between


def _norm_after_a_forgotten_loss() -> tuple[float, float]:
    model, batch = _sharded()
    em.causal_lm_loss(model, batch, target_tokens=30).backward()
    norm = float(em.clip_grad_norm_(model, None))
    _forget_a_loss(model, batch)
    return norm, float(em.clip_grad_norm_(model, None))


def test_a_loss_without_backward_does_not_hide_gradients_from_the_norm() -> None:
    for before, after in shared_ranks(_norm_after_a_forgotten_loss, 2):
        assert before == after


def _train_with_frozen_router() -> set[str]:
    model, batch = _sharded(moe=em.MoeConfig(router="frozen"))
    before = {name: parameter.detach().full_tensor().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    em.causal_lm_loss(model, batch, target_tokens=30).backward()
    optimizer.step()
    return {n for n, p in model.named_parameters() if torch.equal(p.detach().full_tensor(), before[n])}


def test_a_frozen_router_is_what_stays_and_everything_else_moves() -> None:
    routers = {f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)}
    assert shared_ranks(_train_with_frozen_router, 2) == [routers, routers]


def test_a_router_that_is_not_recognised_cannot_be_frozen_silently() -> None:
    class Chooser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(9, 32))  # not one row per expert

    model = tiny_model("qwen3_moe")
    model.model.layers[1].mlp.gate = Chooser()
    with refused_on_ranks("moe.router-not-recognised", naming="model.layers.1.mlp"):
        shared_ranks(_parallelize, 1, model, em.MoeConfig(router="frozen"))


def _parallelize(model: nn.Module, moe: em.MoeConfig | None = None, tamper: str = "") -> None:
    model = copy.deepcopy(model)
    mesh = em.init_mesh(em.ParallelConfig(ep=1))
    if mesh.rank == 1:
        experts = model.model.layers[1].mlp.experts.down_proj.data
        if tamper == "swap":
            experts[[0, 4]] = experts[[4, 0]]
        elif tamper == "bias":
            model.model.layers[1].mlp.gate.e_score_correction_bias.zero_()
        elif tamper == "more":
            model.lm_head.register_buffer("extra", torch.zeros(1))
    em.parallelize(model, mesh, moe=moe)


@pytest.mark.parametrize(
    ("tamper", "name"),
    [("swap", "experts.down_proj"), ("bias", "e_score_correction_bias"), ("more", "lm_head.extra")],
)
def test_copies_that_differ_between_ranks_are_refused_by_name(tamper: str, name: str) -> None:
    with refused_on_ranks("model.replicas-differ", IntegrityError, naming=f"{name} on rank 1"):
        shared_ranks(_parallelize, 2, tiny_model("deepseek_v3"), None, tamper)
