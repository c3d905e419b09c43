"""The grouped MLP against transformers' own eager experts, and what it keeps for backward."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.moe import grouped_mm_experts_forward, use_experts_implementation

from expertmesh.anatomy import describe, experts_spec
from expertmesh.experts import expert_mlp as expert_mlp_module
from expertmesh.experts.dispatch import LocalDispatcher
from expertmesh.experts.expert_mlp import expert_mlp, grouped_mm_refusal
from expertmesh.experts.install import choose_backend, gate_of, is_silu_gated
from expertmesh.experts.mlp_spec import ExpertMlpSpec, ExpertWeights
from tests.support.models import tiny_model


class _Experts(nn.Module):
    """Experts of any form, computed one token at a time in the plainest way; the reference of these tests."""

    gated, transposed, biased = True, False, False
    limit, alpha = 0.7, 1.702

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


def variant_of(**flags: Any) -> type[nn.Module]:
    body = {"gated": flags.get("has_gate", True), "transposed": flags.get("is_transposed", False)}
    body["biased"] = flags.get("has_bias", False)
    gate = flags.pop("gate", None)
    if gate is not None:
        body["_apply_gate"] = gate
    cls: type[nn.Module] = use_experts_implementation(type("Experts", (_Experts,), body), **flags)
    return cls


def _clamped_interleaved_gate(self: nn.Module, pre: torch.Tensor) -> torch.Tensor:
    """GPT-OSS's: gate and up alternate, both are clamped, the gate's sigmoid has a factor."""
    gate, up = pre[..., ::2].clamp(max=self.limit), pre[..., 1::2].clamp(-self.limit, self.limit)
    return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


VARIANTS = {
    "silu gated": {},
    "transposed": {"is_transposed": True},
    "not gated": {"has_gate": False},
    "biased": {"has_bias": True},
    "gpt-oss": {"is_transposed": True, "has_bias": True, "is_concatenated": False, "gate": _clamped_interleaved_gate},
}


def run_experts(
    experts: nn.Module, inputs: list[torch.Tensor], *, lean: bool, loop: bool = False, triton: bool = False
) -> list[torch.Tensor]:
    """Output, then gradients of hidden states, routing weights and parameters, for a fixed weighting of outputs."""
    hidden, index, weight = (t.clone().requires_grad_(t.is_floating_point()) for t in inputs)
    if lean:
        spec = experts_spec("experts", experts)
        rows, weight_P, pairs, _ = LocalDispatcher(spec.num_experts, triton).dispatch(hidden, index, weight)
        form = ExpertMlpSpec(
            activation=experts._apply_gate if spec.gated else experts.act_fn,
            silu_gated=is_silu_gated(experts, spec),
            transposed=spec.transposed,
            per_expert=loop,
            triton=triton,
            gate=gate_of(experts, spec) if triton else None,
        )
        weights = ExpertWeights(*(experts.get_parameter(name) for name in spec.parameters))
        out = expert_mlp(rows, weight_P, pairs, weights, form)
    else:
        out = experts.forward(hidden, index, weight)
    weighting = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    names = [hidden, weight, *experts.parameters()]
    return [out, *torch.autograd.grad((out * weighting).sum(), names)]


def inputs_of(dtype: torch.dtype, tokens: int = 20, experts: int = 6, top_k: int = 3) -> list[torch.Tensor]:
    index = torch.stack([torch.randperm(experts - 1)[:top_k] for _ in range(tokens)])  # the last expert gets no token
    return [torch.randn(tokens, 16, dtype=dtype), index, torch.rand(tokens, top_k, dtype=dtype)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("loop", [False, True], ids=["grouped_mm", "loop"])
def test_output_and_every_gradient_equal_the_plain_experts(variant: str, loop: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.float64 if loop else torch.float32
    config = type("Config", (), {"_experts_implementation": "eager"})()
    experts = variant_of(**VARIANTS[variant])(config).to(dtype)
    inputs = inputs_of(dtype)
    expected = run_experts(experts, inputs, lean=False)
    got = run_experts(experts, inputs, lean=True, loop=loop)
    for want, have in zip(expected, got, strict=True):
        error = (want - have).norm() / want.norm()
        assert error <= (1e-12 if loop else 1e-5)


def test_no_token_at_all_gives_zero_gradients_not_none() -> None:
    config = type("Config", (), {"_experts_implementation": "eager"})()
    experts = variant_of(has_bias=True)(config)
    inputs = [torch.zeros(0, 16), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2)]
    out, *gradients = run_experts(experts, inputs, lean=True)
    assert out.shape == (0, 16)
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_saved_bytes_are_at_most_half_of_transformers_grouped_mm() -> None:
    torch.manual_seed(0)
    config = type("Config", (), {"_experts_implementation": "eager"})()
    experts = variant_of()(config, experts=16, hidden=128, width=64)
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
                run_experts(experts, inputs, lean=True)
            else:
                hidden, index, weight = (t.clone().requires_grad_(t.is_floating_point()) for t in inputs)
                grouped_mm_experts_forward(experts, hidden, index, weight).sum()
        return sum(storages.values())

    assert saved(lean=True) <= 0.5 * saved(lean=False)


@pytest.mark.parametrize(
    ("dtype", "hidden", "width", "experts", "refused"),
    [
        (torch.float32, 32, 16, 1023, False),
        (torch.float32, 30, 16, 8, True),
        (torch.bfloat16, 32, 12, 8, True),
        (torch.float64, 32, 16, 8, True),
        (torch.bfloat16, 32, 16, 1024, True),
    ],
)
def test_grouped_kernel_is_refused_where_it_cannot_run(
    dtype: torch.dtype, hidden: int, width: int, experts: int, refused: bool
) -> None:
    assert (grouped_mm_refusal(dtype, hidden, width, experts) is not None) is refused


def test_experts_without_pairs_get_zero_gradients_from_a_kernel_that_leaves_them() -> None:
    """Blackwell's kernel does not write them; here one that writes NaN stands in for it."""
    end_L = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    left_Pk, right_Pn = torch.randn(3, 8), torch.randn(3, 12)

    def kernel(a: torch.Tensor, b: torch.Tensor, end_L: torch.Tensor) -> torch.Tensor:
        product = expert_mlp_module.grouped_mm(a, b, end_L)
        product[[0, 2]] = torch.nan
        return product

    mlp = ExpertMlpSpec(F.silu, silu_gated=False, transposed=False, per_expert=False)
    with mock.patch.object(expert_mlp_module, "leaves_empty_groups", return_value=True):
        gradient = expert_mlp_module._weight_gradient(kernel, left_Pk, right_Pn, end_L, mlp)
    assert torch.equal(gradient, expert_mlp_module.grouped_mm(right_Pn.t(), left_Pk, end_L))
    assert not expert_mlp_module.leaves_empty_groups(torch.device("cpu"))


@pytest.mark.parametrize("experts", [1, 4])
def test_products_of_no_pairs_are_zeros(experts: int) -> None:
    end_L, weight = torch.zeros(experts, dtype=torch.int32), torch.randn(experts, 8, 12)
    assert expert_mlp_module.grouped_mm(torch.randn(0, 8), weight, end_L).shape == (0, 12)
    assert not expert_mlp_module.grouped_mm(torch.randn(8, 0), torch.randn(0, 12), end_L).any()


@pytest.mark.parametrize(
    ("capability", "dtype", "chosen"),
    [
        ((9, 0), torch.bfloat16, "grouped_mm"),
        ((10, 0), torch.bfloat16, "grouped_mm"),
        ((9, 0), torch.float32, "loop"),
        ((8, 0), torch.bfloat16, "loop"),
        ((12, 0), torch.bfloat16, "loop"),
    ],
)
def test_a_gpu_without_a_grouped_kernel_goes_expert_by_expert(
    capability: tuple[int, int], dtype: torch.dtype, chosen: str
) -> None:
    spec = next(iter(describe(tiny_model("qwen3_moe")).experts))
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.get_device_capability", return_value=capability),
    ):
        assert choose_backend(spec, "auto", dtype, 8) == chosen
        assert choose_backend(spec, "grouped_mm", dtype, 8) == "grouped_mm"
