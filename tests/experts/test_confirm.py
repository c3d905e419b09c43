"""Experts of the same maths without transformers' interface: recognised, proven on a small copy, or refused by name."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from expertmesh.anatomy import Anatomy, describe, experts_spec
from expertmesh.experts.dispatch import LocalDispatcher
from expertmesh.experts.install import mlp_spec_of
from expertmesh.experts.layer import ExpertLayer
from expertmesh.experts.pairs import sorted_choice
from expertmesh.introspection import proofs
from expertmesh.introspection.small_copies import confirm_experts
from expertmesh.weights.meta_model import build_meta_model
from tests.families.tiny import random_model
from tests.support.errors import refused
from tests.support.models import tiny_config


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


class _Stack(nn.Module):
    """One matrix for each expert, for rows in the order of experts."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        parts = zip(rows.split(counts), self.weight, strict=True)
        return torch.cat([F.linear(part, weight) for part, weight in parts])


class _Sorter(nn.Module):
    """A router that sorts pairs by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.top_k = nn.Linear(16, 4, bias=False), 2

    def forward(self, hidden_TH: torch.Tensor) -> tuple[Any, ...]:
        chosen = self.layer(hidden_TH).topk(self.top_k, dim=1)
        order_P = chosen.indices.flatten().argsort()
        counts = torch.bincount(chosen.indices.flatten(), minlength=self.layer.weight.shape[0])
        return order_P, order_P // self.top_k, chosen.values.softmax(1).flatten()[order_P], counts.tolist()


class _Sorted(nn.Module):
    """A mixture that is called with hidden states, with its router and a bias in it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(16))
        self.down, self.gate_and_up = _Stack(4, 16, 12), _Stack(4, 24, 16)
        self.choose, self.act_fn = _Sorter(), nn.SiLU()

    def weigh(self, out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return out * weight

    def forward(self, hidden_BSH: torch.Tensor) -> torch.Tensor:
        hidden_TH = hidden_BSH.flatten(0, 1)
        _, token_P, weight_P, counts = self.choose(hidden_TH)
        gate, up = self.gate_and_up(hidden_TH[token_P], counts).chunk(2, dim=-1)
        out_PH = self.weigh(self.down(self.act_fn(gate) * up, counts), weight_P[:, None])
        return torch.zeros_like(hidden_TH).index_add(0, token_P, out_PH).view_as(hidden_BSH) + self.bias


class _SortedSquared(_Sorted):
    def weigh(self, out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return out * weight**2


class _SortedDetached(_Sorted):
    def weigh(self, out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return out * weight.detach()


class _SortedBiasTwice(_Sorted):
    def forward(self, hidden_BSH: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_BSH) + self.bias


class _Model(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts


def _confirm(experts: nn.Module) -> None:
    confirm_experts(_Model(experts), Anatomy((), (experts_spec("experts", experts),), (), ()))


@pytest.mark.parametrize(
    "experts",
    [_Pairs(), _Dense(nn.SiLU()), _Dense(nn.GELU()), _Flat(("gate", "up", "down")), _Sorted()],
    ids=["pairs", "dense", "dense-gelu", "flat", "sorted"],
)
def test_the_same_maths_is_confirmed(experts: nn.Module) -> None:
    _confirm(experts)


@pytest.mark.parametrize(
    "experts",
    [
        _Squared(),
        _Detached(),
        _UpAfter(nn.SiLU()),
        _Flat(("up", "down", "gate")),
        _SortedSquared(),
        _SortedDetached(),
        _SortedBiasTwice(),
    ],
    ids=lambda experts: type(experts).__name__,
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
        ("jetmoe", "JetMoeForCausalLM", "sorted", ("input_linear.weight", "output_linear.weight")),
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


def test_a_mixture_whose_router_chooses_more_experts_than_a_small_copy_has_is_proven() -> None:
    config = tiny_config("jetmoe", num_experts_per_tok=5)
    model = build_meta_model(config, torch.float32)
    with mock.patch.object(proofs, "_answers", return_value={}):
        confirm_experts(model, describe(model))


def test_a_mixture_of_attention_is_routed_and_not_sharded_by_expert() -> None:
    anatomy = describe(random_model("JetMoeForCausalLM", "jetmoe"))
    assert [spec.name for spec in anatomy.experts] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    routers = [f"{part}.router" for part in ("mlp", "self_attention.experts")]
    assert set(anatomy.routers) == {f"model.layers.{layer}.{router}" for layer in (0, 1) for router in routers}


def test_the_choice_of_a_router_that_sorts_is_what_it_chose() -> None:
    torch.manual_seed(0)
    router, hidden_TH = _Sorter(), torch.randn(9, 16)
    order_P, _, weight_P, counts = router(hidden_TH)
    index_TK, weight_TK = sorted_choice(order_P, weight_P, counts, 9)
    chosen = router.layer(hidden_TH).topk(2, dim=1)
    assert torch.equal(index_TK, chosen.indices)
    assert torch.equal(weight_TK, chosen.values.softmax(1))


def test_experts_called_with_rows_alone_are_refused_by_name() -> None:
    model = random_model("JetMoeForCausalLM", "jetmoe")
    for layer in model.model.layers:  # type: ignore[attr-defined]
        layer.mlp.bias = None
        layer.mlp.offset = nn.Parameter(torch.zeros(32))
    with refused(
        "model.no-experts", naming="input_linear (JetMoeParallelExperts) is called with (inputs, expert_size)"
    ):
        describe(model)


def test_a_family_that_transformers_cannot_read_is_refused_by_name() -> None:
    with refused("model.unsupported-expert-parameters", naming="identity experts"):
        describe(random_model("LongcatFlashForCausalLM", "longcat_flash"))


def test_dense_rows_compute_only_what_is_not_zero() -> None:
    """As many pairs as the router chose, not experts times tokens; rows that are zero stay exactly zero."""
    experts: Any = _Dense(nn.SiLU()).double()
    spec = experts_spec("experts", experts)
    seen: list[int] = []

    class Counted(LocalDispatcher):
        def dispatch(self, hidden_TH: torch.Tensor, *args: Any) -> Any:
            seen.append(len(hidden_TH))
            return super().dispatch(hidden_TH, *args)

    layer = ExpertLayer(spec, Counted(4), mlp_spec_of(experts, spec, per_expert=True), torch.float64, torch.arange(4))
    rows = torch.zeros(4 * 6, 16, dtype=torch.float64)
    rows[[1, 8, 9, 23]] = torch.randn(4, 16, dtype=torch.float64)
    out = layer.forward_dense(experts, rows)
    assert seen == [4]
    assert out.any(1).nonzero().squeeze(1).tolist() == [1, 8, 9, 23]
    assert torch.allclose(out, experts(rows), rtol=1e-12)
