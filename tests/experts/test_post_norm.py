"""Experts with a norm behind each of them, against transformers' own grouped experts."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.moe import batched_mm_experts_forward, use_experts_implementation

from expertmesh.anatomy import experts_spec
from expertmesh.experts.dispatch import LocalDispatcher
from expertmesh.experts.expert_mlp import expert_mlp, normed_expert_mlp
from expertmesh.experts.lora_state import Dropout
from expertmesh.experts.mlp_spec import Adapter, Adapters, ExpertMlpSpec, ExpertWeights


@use_experts_implementation(has_post_expert_norm=True)
class _Experts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts, self.act_fn = 6, nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(6, 16, 16) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(6, 16, 8) * 0.3)
        self.post_expert_norm = nn.RMSNorm(16, eps=1e-6)
        nn.init.uniform_(self.post_expert_norm.weight, 0.5, 1.5)


def _run(experts: nn.Module, tokens: int, *, ours: bool, per_expert: bool) -> list[torch.Tensor]:
    """Output, then gradients of hidden states, routing weights and parameters."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 16, generator=generator).requires_grad_()
    weight = torch.rand(tokens, 3, generator=generator).requires_grad_()
    index = torch.stack([torch.randperm(5, generator=generator)[:3] for _ in range(tokens)] or [torch.zeros(3)])
    index = index[:tokens].long()  # the last expert gets no token
    if ours:
        spec = experts_spec("experts", experts)
        rows, weight_P, pairs, _ = LocalDispatcher(spec.num_experts).dispatch(hidden, index, weight)
        form = ExpertMlpSpec(experts._apply_gate, silu_gated=True, transposed=False, per_expert=per_expert)
        up, down = (experts.get_parameter(name) for name in spec.parameters)
        norm = experts.get_submodule("post_expert_norm")
        out = normed_expert_mlp(rows, weight_P, pairs, ExpertWeights(up, down), form, norm)
    else:
        out = batched_mm_experts_forward(experts, hidden, index, weight)
    weighting = torch.linspace(-1, 1, out.numel()).view_as(out)
    return [out, *torch.autograd.grad((out * weighting).sum(), [hidden, weight, *experts.parameters()])]


@pytest.mark.parametrize("per_expert", [False, True], ids=["grouped_mm", "loop"])
def test_output_and_every_gradient_equal_transformers(per_expert: bool) -> None:
    torch.manual_seed(0)
    experts = _Experts(type("Config", (), {"_experts_implementation": "eager"})())
    expected = _run(experts, 20, ours=False, per_expert=per_expert)
    got = _run(experts, 20, ours=True, per_expert=per_expert)
    for want, have in zip(expected, got, strict=True):
        assert (want - have).norm() <= 1e-5 * want.norm()


def test_no_token_at_all_gives_zero_gradients_not_none() -> None:
    experts = _Experts(type("Config", (), {"_experts_implementation": "eager"})())
    out, *gradients = _run(experts, 0, ours=True, per_expert=False)
    assert out.shape == (0, 16)
    assert all(not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("per_expert", [False, True], ids=["grouped_mm", "loop"])
@pytest.mark.parametrize("probability", [0.0, 0.4], ids=["plain", "dropout"])
def test_adapters_behind_a_norm_that_does_nothing_are_those_of_experts_without_one(
    probability: float, per_expert: bool
) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.3).requires_grad_()

    hidden, weight = random(20, 16), torch.rand(20, 3, generator=generator).requires_grad_()
    index = torch.stack([torch.randperm(5, generator=generator)[:3] for _ in range(20)])
    weights = ExpertWeights(random(6, 16, 16).detach(), random(6, 16, 8).detach())
    up, down = Adapter(random(6, 2, 16), random(6, 16, 2), 1.5), Adapter(random(6, 2, 8), random(6, 16, 2), 0.5)
    mlp = ExpertMlpSpec(
        lambda x: x[:, :8].sigmoid() * x[:, 8:], silu_gated=False, transposed=False, per_expert=per_expert
    )

    def run(*norm: nn.Module) -> list[torch.Tensor]:
        rows, weight_P, pairs, _ = LocalDispatcher(6).dispatch(hidden, index, weight)
        dropout = Dropout(probability, 7, torch.arange(20) + 100) if probability else None
        compute: Any = normed_expert_mlp if norm else expert_mlp
        out = compute(rows, weight_P, pairs, weights, mlp, *norm, Adapters(up, down, torch.arange(6)), dropout)
        leaves = [hidden, weight, up.a_LrK, up.b_LNr, down.a_LrK, down.b_LNr]
        return [out, *torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum(), leaves)]

    for want, have in zip(run(), run(nn.Identity()), strict=True):
        assert (want - have).norm() <= 1e-6 * want.norm()
