"""Adapters on experts against experts whose weights have the adapters' product added, and what is formed on the way."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from expertmesh.anatomy import experts_spec
from expertmesh.experts import expert_mlp as expert_mlp_module
from expertmesh.experts.dispatch import LocalDispatcher
from expertmesh.experts.expert_mlp import _dropped, expert_mlp
from expertmesh.experts.install import gate_of, is_silu_gated
from expertmesh.experts.lora_state import Dropout, keep_mask
from expertmesh.experts.mlp_spec import Adapter, Adapters, ExpertMlpSpec, ExpertWeights
from expertmesh.experts.pairs import LocalPairs, segments_of
from tests.experts.test_compute import VARIANTS, inputs_of, variant_of

SCALING = 0.7


def _adapters(spec: Any, r: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    width = spec.intermediate_size * (2 if spec.gated else 1)
    sizes = {spec.up: (spec.hidden_size, width), spec.down: (spec.intermediate_size, spec.hidden_size)}
    tensors = {}
    for name, (inner, out) in sizes.items():
        tensors[f"{name}_A"] = torch.randn(spec.num_experts, r, inner, dtype=dtype) * 0.3
        tensors[f"{name}_B"] = torch.randn(spec.num_experts, out, r, dtype=dtype) * 0.3
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def _plain(experts: Any, spec: Any, leaves: list[torch.Tensor], adapters: dict[str, torch.Tensor]) -> torch.Tensor:
    weights = {}
    for name in (spec.up, spec.down):
        delta = adapters[f"{name}_B"] @ adapters[f"{name}_A"] * SCALING
        base = experts.get_parameter(name).detach()
        weights[name] = base + (delta.transpose(1, 2) if spec.transposed else delta)
    out: torch.Tensor = torch.func.functional_call(experts, weights, tuple(leaves))
    return out


def lean_experts(
    experts: Any,
    spec: Any,
    leaves: list[torch.Tensor],
    adapters: dict[str, torch.Tensor],
    loop: bool,
    triton: bool = False,
    **options: Any,
) -> torch.Tensor:
    rows, weight_P, pairs, _ = LocalDispatcher(spec.num_experts, triton).dispatch(*leaves)
    activation = experts._apply_gate if spec.gated else experts.act_fn
    gate = gate_of(experts, spec) if triton else None
    form = ExpertMlpSpec(activation, is_silu_gated(experts, spec), spec.transposed, loop, triton, gate)
    weights = ExpertWeights(*(experts.get_parameter(name).detach() for name in spec.parameters))
    both = [Adapter(adapters[f"{name}_A"], adapters[f"{name}_B"], SCALING) for name in (spec.up, spec.down)]
    return expert_mlp(rows, weight_P, pairs, weights, form, Adapters(*both, torch.arange(spec.num_experts)), **options)


def adapter_gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    weighting = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weighting).sum(), inputs)]


def adapted_case(variant: str, dtype: torch.dtype, r: int, **sizes: int) -> tuple[Any, Any, list[torch.Tensor], Any]:
    torch.manual_seed(0)
    config = type("Config", (), {"_experts_implementation": "eager"})()
    experts = variant_of(**VARIANTS[variant])(config, **sizes).to(dtype)
    spec = experts_spec("experts", experts)
    leaves = [tensor.requires_grad_(tensor.is_floating_point()) for tensor in inputs_of(dtype)]
    return experts, spec, leaves, _adapters(spec, r, dtype)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("loop", "r"), [(False, 8), (False, 3), (True, 4)], ids=["grouped_mm", "odd rank", "loop"])
def test_output_and_every_gradient_equal_experts_with_the_product_added(variant: str, loop: bool, r: int) -> None:
    dtype = torch.float64 if loop else torch.float32
    experts, spec, leaves, adapters = adapted_case(variant, dtype, r)
    inputs = [leaves[0], leaves[2], *adapters.values()]
    expected = adapter_gradients(_plain(experts, spec, leaves, adapters), inputs)
    got = adapter_gradients(lean_experts(experts, spec, leaves, adapters, loop), inputs)
    for want, have in zip(expected, got, strict=True):
        assert (want - have).norm() <= (1e-12 if loop else 1e-5) * want.norm()


def test_experts_one_after_the_other_wait_once_in_each_direction() -> None:
    experts, spec, leaves, adapters = adapted_case("biased", torch.float64, 4)
    tolist, waits = torch.Tensor.tolist, list[torch.Tensor]()
    with mock.patch.object(torch.Tensor, "tolist", lambda tensor: waits.append(tensor) or tolist(tensor)):  # type: ignore[func-returns-value]
        out = lean_experts(experts, spec, leaves, adapters, True)
        assert len(waits) == 1
        out.sum().backward()
    assert len(waits) == 2


def test_adapters_of_experts_without_pairs_get_zero_gradients_from_a_kernel_that_leaves_them() -> None:
    """As `test_compute.py` has it for weights."""
    experts, spec, leaves, adapters = adapted_case("silu gated", torch.float32, 8)
    inputs = [leaves[0], leaves[2], *adapters.values()]
    expected = adapter_gradients(lean_experts(experts, spec, leaves, adapters, False), inputs)
    plain = expert_mlp_module.grouped_mm

    def kernel(a: torch.Tensor, b: torch.Tensor, end_L: torch.Tensor) -> torch.Tensor:
        out = plain(a, b, end_L)
        if b.dim() == 2:
            out[end_L.diff(prepend=end_L.new_zeros(1)) == 0] = torch.nan
        return out

    with (
        mock.patch.object(expert_mlp_module, "leaves_empty_groups", return_value=True),
        mock.patch.object(expert_mlp_module, "grouped_mm", kernel),
    ):
        got = adapter_gradients(lean_experts(experts, spec, leaves, adapters, False), inputs)
    for want, have in zip(expected, got, strict=True):
        assert torch.equal(want, have)


class _Largest(TorchDispatchMode):
    """The most elements that any tensor made inside has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in made if leaf.untyped_storage().data_ptr() not in given]
        self.elements = max([self.elements, *(tensor.numel() for tensor in made)])
        return out


@pytest.mark.parametrize(("lean", "formed"), [(True, False), (False, True)])
def test_the_product_of_the_adapters_is_never_formed(lean: bool, formed: bool) -> None:
    experts, spec, leaves, adapters = adapted_case("silu gated", torch.float32, 8, experts=32, hidden=64, width=32)
    leaves[0] = torch.randn(20, 64, requires_grad=True)
    with _Largest() as watched:
        out = lean_experts(experts, spec, leaves, adapters, False) if lean else _plain(experts, spec, leaves, adapters)
        adapter_gradients(out, [leaves[0], *adapters.values()])
    smallest_weight = spec.num_experts * spec.hidden_size * spec.intermediate_size
    assert (watched.elements >= smallest_weight) is formed


def test_saved_are_rows_pre_activations_and_the_r_wide_products() -> None:
    experts, spec, leaves, adapters = adapted_case("silu gated", torch.float32, 8)
    tokens, pairs, r = 20, 60, 8
    kept: dict[int, int] = {}
    owned = {tensor.untyped_storage().data_ptr() for tensor in (*experts.parameters(), *adapters.values())}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if tensor.is_floating_point() and pointer not in owned:
            kept[pointer] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        lean_experts(experts, spec, leaves, adapters, False)
    rows, pre, low, weights = tokens * 16, pairs * 2 * 8, 2 * pairs * r, pairs
    assert sum(kept.values()) == rows + pre + low + weights


def test_dropout_depends_on_the_token_alone_and_keeps_the_mean() -> None:
    numbers = torch.arange(4000)
    keep = keep_mask(Dropout(0.25, 7, numbers), 16, torch.float32)
    assert keep.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert abs(float((keep == 0).float().mean()) - 0.25) < 0.01
    shuffled = torch.randperm(4000)
    assert torch.equal(keep_mask(Dropout(0.25, 7, numbers[shuffled]), 16, torch.float32), keep[shuffled])
    other = keep_mask(Dropout(0.25, 8, numbers), 16, torch.float32)
    assert abs(float((keep == other).float().mean()) - (0.75**2 + 0.25**2)) < 0.01
    columns = (keep == 0).float()
    assert torch.corrcoef(columns.t()).fill_diagonal_(0).abs().max() < 0.08


def test_each_expert_of_a_token_drops_for_itself_wherever_it_is() -> None:
    row_P, dropout = torch.tensor([0, 0]), Dropout(0.5, 3, torch.arange(1))
    pairs = LocalPairs(row_P, torch.tensor([1, 2]), segments_of(row_P, 1))
    first, second = (_dropped(torch.ones(2, 4096), dropout, pairs, torch.tensor(e)) for e in ([4, 7], [7, 4]))
    assert torch.equal(first, second.flip(0))
    assert abs(float((first[0] == first[1]).float().mean()) - 0.5) < 0.05
    # A Trainer's rows of the 16th step: 20 bits of rows and 24 of positions are below those of steps.
    later = replace(dropout, token_numbers=torch.tensor([16 << 44]))
    other = _dropped(torch.ones(2, 4096), later, pairs, torch.tensor([4, 7]))
    assert abs(float((first == other).float().mean()) - 0.5) < 0.05


def test_gradients_under_dropout_are_those_of_the_dropped_function() -> None:
    experts, spec, leaves, adapters = adapted_case("silu gated", torch.float64, 4)
    dropout = Dropout(0.4, 3, torch.arange(20))
    inputs = [leaves[0], leaves[2], *adapters.values()]

    def value(moved: list[torch.Tensor]) -> torch.Tensor:
        named = dict(zip(adapters, moved[2:], strict=True))
        out = lean_experts(experts, spec, [moved[0], leaves[1], moved[1]], named, True, dropout=dropout)
        return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()

    gradients = torch.autograd.grad(value(inputs), inputs)
    step = 1e-6
    for place, gradient in enumerate(gradients):
        direction = torch.randn_like(gradient)
        ends = []
        for sign in (1, -1):
            moved = [tensor.detach().clone() for tensor in inputs]
            moved[place] += sign * step * direction
            ends.append(value(moved))
        slope = float(ends[0] - ends[1]) / (2 * step)
        assert abs(slope - float((gradient * direction).sum())) <= 1e-6 * max(1.0, abs(slope))
    dropped, whole = (lean_experts(experts, spec, leaves, adapters, True, dropout=d) for d in (dropout, None))
    assert (dropped - whole).norm() > 0.01 * whole.norm()


def test_backward_runs_once_and_says_so() -> None:
    experts, spec, leaves, adapters = adapted_case("silu gated", torch.float32, 8)
    out = lean_experts(experts, spec, leaves, adapters, False)
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
