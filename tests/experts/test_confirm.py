"""Experts of the same maths without transformers' interface: recognised, proven on a small copy, or refused by name."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from expertmesh.anatomy import Anatomy, describe, experts_spec
from expertmesh.experts.dispatch import LocalDispatcher
from expertmesh.experts.install import mlp_spec_of
from expertmesh.experts.layer import ExpertLayer
from expertmesh.introspection.experts_proof import confirm_experts
from tests.families.tiny import random_model
from tests.support.errors import refused


class _Pairs(nn.Module):
    """Fused 3-D parameters, called as through the interface, in a plain loop."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.act_fn = 4, nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 24, 16))
        self.down_proj = nn.Parameter(torch.randn(4, 16, 12))

    def weigh(self, out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return out * weight

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        final = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = (top_k_index == expert).nonzero(as_tuple=True)
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            out = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
            final.index_add_(0, token, self.weigh(out, top_k_weights[token, place, None]))
        return final


class _Squared(_Pairs):
    def weigh(self, out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return out * weight**2


class _Detached(_Pairs):
    """The right output, and no gradient for the router."""

    def weigh(self, out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return out * weight.detach()


class _Dense(nn.Module):
    """One row per (expert, token), transposed parameters."""

    def __init__(self, act_fn: nn.Module) -> None:
        super().__init__()
        self.hidden_size, self.act_fn = 16, act_fn
        self.gate_up_proj = nn.Parameter(torch.randn(4, 16, 24))
        self.down_proj = nn.Parameter(torch.randn(4, 12, 16))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.view(self.gate_up_proj.shape[0], -1, self.hidden_size)
        gate, up = torch.bmm(rows, self.gate_up_proj).chunk(2, dim=-1)
        return torch.bmm(self.act_fn(gate) * up, self.down_proj).view(-1, self.hidden_size)


class _UpAfter(_Dense):
    """Not nothing for nothing."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) + 1.0


class _Flat(_Pairs):
    """Three matrices of all experts, in an order that is not gate, up, down."""

    def __init__(self, order: tuple[str, str, str]) -> None:
        super().__init__()
        del self.gate_up_proj, self.down_proj
        for name in order:
            self.register_parameter(name, nn.Parameter(torch.randn(4 * 12, 16)))
        self.width = 12

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        final = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = (top_k_index == expert).nonzero(as_tuple=True)
            gate, up, down = (
                self.get_parameter(name).view(-1, self.width, hidden_states.shape[-1])[expert]
                for name in ("gate", "up", "down")
            )
            out = (self.act_fn(hidden_states[token] @ gate.t()) * (hidden_states[token] @ up.t())) @ down
            final.index_add_(0, token, out * top_k_weights[token, place, None])
        return final


class _Model(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts


def _confirm(experts: nn.Module) -> None:
    confirm_experts(_Model(experts), Anatomy((), (experts_spec("experts", experts),), (), ()))


@pytest.mark.parametrize(
    "experts",
    [_Pairs(), _Dense(nn.SiLU()), _Dense(nn.GELU()), _Flat(("gate", "up", "down"))],
    ids=["pairs", "dense", "dense-gelu", "flat"],
)
def test_the_same_maths_is_confirmed(experts: nn.Module) -> None:
    _confirm(experts)


@pytest.mark.parametrize(
    "experts",
    [_Squared(), _Detached(), _UpAfter(nn.SiLU()), _Flat(("up", "down", "gate"))],
    ids=["weights-squared", "no-router-gradient", "dense-with-bias", "flat-in-another-order"],
)
def test_other_maths_under_the_same_names_is_refused(experts: nn.Module) -> None:
    with refused("model.experts-not-weighted-sum", naming=type(experts).__name__):
        _confirm(experts)


def test_experts_that_cannot_be_run_small_are_refused() -> None:
    experts = _Pairs()
    experts.num_experts = "four"  # type: ignore[assignment]
    with refused("model.experts-not-weighted-sum", naming="_Pairs cannot be run"):
        _confirm(experts)


@pytest.mark.parametrize(
    ("family", "kind", "call", "parameters"),
    [
        ("llama4", "Llama4ForCausalLM", "dense", ("gate_up_proj", "down_proj")),
        ("step3p7", "Step3p7ForConditionalGeneration", "pairs", ("gate_up_proj", "down_proj")),
        ("dbrx", "DbrxForCausalLM", "pairs", ("mlp.w1", "mlp.v1", "mlp.w2")),
    ],
)
def test_families_without_the_interface_are_recognised(
    family: str, kind: str, call: str, parameters: tuple[str, ...]
) -> None:
    model = random_model(kind, family)
    anatomy = describe(model)
    spec = anatomy.experts[0]
    assert (spec.call, spec.parameters, spec.num_experts, spec.hidden_size) == (call, parameters, 8, 32)
    assert anatomy.routers
    assert all(anatomy.is_expert_parameter(f"{spec.name}.{name}") for name in parameters)
    confirm_experts(model, anatomy)


@pytest.mark.parametrize(
    ("family", "kind", "key", "named"),
    [
        (
            "jetmoe",
            "JetMoeForCausalLM",
            "model.no-experts",
            "input_linear (JetMoeParallelExperts)",
        ),
        ("longcat_flash", "LongcatFlashForCausalLM", "model.unsupported-expert-parameters", "identity experts"),
    ],
)
def test_families_in_another_form_are_refused_by_name(family: str, kind: str, key: str, named: str) -> None:
    with refused(key, naming=named):
        describe(random_model(kind, family))


def test_dense_rows_compute_only_what_is_not_zero() -> None:
    """As many pairs as the router chose, not experts times tokens; rows that are zero stay exactly zero."""
    experts: Any = _Dense(nn.SiLU()).double()
    spec = experts_spec("experts", experts)
    seen: list[int] = []

    class Counted(LocalDispatcher):
        def dispatch(self, hidden_TH: torch.Tensor, *args: Any) -> Any:
            seen.append(len(hidden_TH))
            return super().dispatch(hidden_TH, *args)

    layer = ExpertLayer(spec, Counted(4), mlp_spec_of(experts, spec, per_expert=True), torch.float64)
    rows = torch.zeros(4 * 6, 16, dtype=torch.float64)
    rows[[1, 8, 9, 23]] = torch.randn(4, 16, dtype=torch.float64)
    out = layer.forward_dense(experts, rows)
    assert seen == [4]
    assert out.any(1).nonzero().squeeze(1).tolist() == [1, 8, 9, 23]
    assert torch.allclose(out, experts(rows), rtol=1e-12)
