"""Decide whether this device runs the Triton kernels: they must give torch's results there. Runs before weights are
read.

    P pairs, I intermediate, N items, R rows, H hidden
"""

from collections.abc import Iterator
from functools import cache

import torch

from expertmesh.experts.kernels import ops
from expertmesh.experts.mlp_spec import Gate

# More than one block of columns, the last of them partly used; an odd number of pairs.
_PAIRS, _WIDTH, _ITEMS, _KEYS = 13, 1096, 100, 11
# Items and keys that are sorted: fewer keys than a warp has threads, and more than a block has items.
_SORTED = ((_ITEMS, 2), (200, 300), (_ITEMS, _KEYS))


@cache
def triton_refusal(device: torch.device, dtype: torch.dtype, gates: frozenset[Gate]) -> str | None:
    """Return why the kernels are not used on `device` in `dtype`, or None. Compiles and runs them, for these
    `gates`.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"they compute in float32, and precision.compute is {str(dtype).removeprefix('torch.')}"
    try:
        most = max(2 * torch.finfo(dtype).eps, 1e-5)
        wrong = [f"{name} is {error:.1e} off" for name, error in _errors(device, dtype, gates) if not error <= most]
    except Exception as error:  # Triton and drivers raise of all kinds; what it was is printed
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return f"here {', '.join(wrong)} what torch gives" if wrong else None


def _errors(device: torch.device, dtype: torch.dtype, gates: frozenset[Gate]) -> Iterator[tuple[str, float]]:
    """Return the relative error of each kernel's results against torch's in fp32."""
    random = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device=device).to(dtype)

    for gate in sorted(gates, key=str):
        # Values on both sides of the limit.
        pre_P2I, grad_PI = normal(_PAIRS, 2 * _WIDTH) * (gate.limit or 1.0), normal(_PAIRS, _WIDTH)
        weight_P = torch.rand(_PAIRS, generator=random, device=device)
        leaves = (pre_P2I.float().requires_grad_(), weight_P.clone().requires_grad_())
        with torch.enable_grad():
            expected_PI = gate(leaves[0]) * leaves[1].unsqueeze(1)
            expected = torch.autograd.grad(expected_PI, leaves, grad_PI.float())
        yield "swiglu", _error(ops.swiglu(pre_P2I, weight_P, *gate.flat()), expected_PI)
        grad_weight_P = ops.swiglu_backward_(pre_P2I, grad_PI, weight_P, *gate.flat())
        for got, want in zip((grad_PI, pre_P2I, grad_weight_P), (expected_PI, *expected), strict=True):
            yield "swiglu_backward", _error(got, want)

    for items, keys in _SORTED:
        key_N = torch.randint(keys, (items,), generator=random, device=device)
        order_N = torch.argsort(key_N, stable=True)
        got_order_N, got_place_N = ops.counting_sort(key_N, keys)
        yield "counting_sort", _error(got_order_N, order_N)
        yield "counting_sort", _error(got_place_N, torch.argsort(order_N))

    values_NH = normal(_ITEMS, _WIDTH)
    start_R1 = torch.searchsorted(key_N[order_N], torch.arange(_KEYS + 1, device=device))
    expected_RH = values_NH.new_zeros(_KEYS, _WIDTH, dtype=torch.float32).index_add_(0, key_N, values_NH.float())
    yield "segment_sum", _error(ops.segment_sum(values_NH, order_N, start_R1), expected_RH)


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.detach().double()
    return float((got.double() - expected).norm() / expected.norm())
