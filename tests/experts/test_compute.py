"""The grouped MLP against transformers' own eager experts, and what it keeps for backward."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.moe import grouped_mm_experts_forward, use_experts_implementation

from expertmesh.anatomy import experts_spec
from expertmesh.experts.dispatch import LocalDispatcher
from expertmesh.experts.expert_mlp import expert_mlp, grouped_mm_refusal
from expertmesh.experts.install import is_silu_gated
from expertmesh.experts.mlp_spec import ExpertMlpSpec, ExpertWeights


class _Experts(nn.Module):
    """Experts of any form, computed one token at a time in the plainest way; the reference of these tests."""

    gated, transposed, biased = True, False, False

    def __init__(self, config: Any, experts: int = 6, hidden: int = 16, width: int = 8) -> None:
        super().__init__()
        self.num_experts, self.act_fn = experts, nn.SiLU()
        wide = 2 * width if self.gated else width
        name = "gate_up_proj" if self.gated else "up_proj"

        def weight(out: int, inner: int) -> nn.Parameter:
            shape = (experts, inner, out) if self.transposed else (experts, out, inner)
            return nn.Parameter(torch.randn(shape) * 0.3)

        setattr(self, name, weight(wide, hidden))
        self.down_proj = weight(hidden, width)
        if self.biased:
            setattr(self, f"{name}_bias", nn.Parameter(torch.randn(experts, wide)))
            self.down_proj_bias = nn.Parameter(torch.randn(experts, hidden))

    def forward(self, hidden_TH: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
        name = "gate_up_proj" if self.gated else "up_proj"
        rows = []
        for hidden_H, index_K, weight_K in zip(hidden_TH, index_TK.tolist(), weight_TK, strict=True):
            row_H = torch.zeros_like(hidden_H)
            for expert, weight in zip(index_K, weight_K, strict=True):
                up, down = getattr(self, name)[expert], self.down_proj[expert]
                pre = hidden_H @ up if self.transposed else up @ hidden_H
                pre = pre + getattr(self, f"{name}_bias")[expert] if self.biased else pre
                act = self._apply_gate(pre[None])[0] if self.gated else self.act_fn(pre)
                out = act @ down if self.transposed else down @ act
                row_H = row_H + weight * (out + self.down_proj_bias[expert] if self.biased else out)
            rows.append(row_H)
        return torch.stack(rows)


def _variant(**flags: Any) -> type[nn.Module]:
    body = {"gated": flags.get("has_gate", True), "transposed": flags.get("is_transposed", False)}
    body["biased"] = flags.get("has_bias", False)
    gate = flags.pop("gate", None)
    if gate is not None:
        body["_apply_gate"] = gate
    cls: type[nn.Module] = use_experts_implementation(type("Experts", (_Experts,), body), **flags)
    return cls


def _clamped_interleaved_gate(self: nn.Module, pre: torch.Tensor) -> torch.Tensor:
    """GPT-OSS's: gate and up alternate, both are clamped, the gate's sigmoid has a factor."""
    gate, up = pre[..., ::2].clamp(max=0.7), pre[..., 1::2].clamp(-0.7, 0.7)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


VARIANTS = {
    "silu gated": {},
    "transposed": {"is_transposed": True},
    "not gated": {"has_gate": False},
    "biased": {"has_bias": True},
    "gpt-oss": {"is_transposed": True, "has_bias": True, "is_concatenated": False, "gate": _clamped_interleaved_gate},
}


def _run(experts: nn.Module, inputs: list[torch.Tensor], *, lean: bool, loop: bool = False) -> list[torch.Tensor]:
    """Output, then gradients of hidden states, routing weights and parameters, for a fixed weighting of outputs."""
    hidden, index, weight = (t.clone().requires_grad_(t.is_floating_point()) for t in inputs)
    if lean:
        spec = experts_spec("experts", experts)
        rows, weight_P, pairs, _ = LocalDispatcher(spec.num_experts).dispatch(hidden, index, weight)
        form = ExpertMlpSpec(
            activation=experts._apply_gate if spec.gated else experts.act_fn,
            silu_gated=is_silu_gated(experts, spec),
            transposed=spec.transposed,
            per_expert=loop,
        )
        weights = ExpertWeights(*(experts.get_parameter(name) for name in spec.parameters))
        out = expert_mlp(rows, weight_P, pairs, weights, form)
    else:
        out = experts.forward(hidden, index, weight)
    weighting = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    names = [hidden, weight, *experts.parameters()]
    return [out, *torch.autograd.grad((out * weighting).sum(), names)]


def _inputs(dtype: torch.dtype, tokens: int = 20, experts: int = 6, top_k: int = 3) -> list[torch.Tensor]:
    index = torch.stack([torch.randperm(experts - 1)[:top_k] for _ in range(tokens)])  # the last expert gets no token
    return [torch.randn(tokens, 16, dtype=dtype), index, torch.rand(tokens, top_k, dtype=dtype)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("loop", [False, True], ids=["grouped_mm", "loop"])
def test_output_and_every_gradient_equal_the_plain_experts(variant: str, loop: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.float64 if loop else torch.float32
    config = type("Config", (), {"_experts_implementation": "eager"})()
    experts = _variant(**VARIANTS[variant])(config).to(dtype)
    inputs = _inputs(dtype)
    expected = _run(experts, inputs, lean=False)
    got = _run(experts, inputs, lean=True, loop=loop)
    for want, have in zip(expected, got, strict=True):
        error = (want - have).norm() / want.norm()
        assert error <= (1e-12 if loop else 1e-5)


def test_no_token_at_all_gives_zero_gradients_not_none() -> None:
    config = type("Config", (), {"_experts_implementation": "eager"})()
    experts = _variant(has_bias=True)(config)
    inputs = [torch.zeros(0, 16), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2)]
    out, *gradients = _run(experts, inputs, lean=True)
    assert out.shape == (0, 16)
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_saved_bytes_are_at_most_half_of_transformers_grouped_mm() -> None:
    torch.manual_seed(0)
    config = type("Config", (), {"_experts_implementation": "eager"})()
    experts = _variant()(config, experts=16, hidden=128, width=64)
    index = torch.stack([torch.randperm(16)[:8] for _ in range(256)])
    inputs = [torch.randn(256, 128), index, torch.rand(256, 8)]

    def saved(lean: bool) -> int:
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if not any(tensor.untyped_storage().data_ptr() == p.untyped_storage().data_ptr() for p in parameters):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        parameters = list(experts.parameters())
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            if lean:
                _run(experts, inputs, lean=True)
            else:
                hidden, index, weight = (t.clone().requires_grad_(t.is_floating_point()) for t in inputs)
                grouped_mm_experts_forward(experts, hidden, index, weight).sum()
        return sum(storages.values())

    assert saved(lean=True) <= 0.5 * saved(lean=False)


@pytest.mark.parametrize(
    ("dtype", "hidden", "width", "refused"),
    [
        (torch.float32, 32, 16, False),
        (torch.float32, 30, 16, True),
        (torch.bfloat16, 32, 12, True),
        (torch.float64, 32, 16, True),
    ],
)
def test_grouped_kernel_is_refused_where_it_cannot_run(
    dtype: torch.dtype, hidden: int, width: int, refused: bool
) -> None:
    assert (grouped_mm_refusal(dtype, hidden, width) is not None) is refused
