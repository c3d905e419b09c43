"""The grouped MLP of routed experts with a lean backward. Maths only: one rank, its rows, its experts.

Pairs are ordered by expert, so each projection is one grouped matrix product. Routing weights are applied before the
down projection, so that expert outputs need not be saved for the router's gradient; gathered inputs and activations
are recomputed in backward. Saved for backward are only the rows received and the pre-activations:
R*H + P*2I elements against about P*(2H + 6I) in the plain form (arXiv 2512.14080 derives the same saving).
`moe.compute: loop` does the same one expert after the other (per_expert.py).

    R rows, P pairs, H hidden, I intermediate, L experts on this rank; up weights are `[L, 2I, H]`, or `[L, H, 2I]`
    in transposed families (2I is I when the experts are not gated), down weights `[L, H, I]` or `[L, I, H]`
"""

from typing import Any

import torch
import torch.nn.functional as F

from expertmesh.experts.dispatch import LocalPairs
from expertmesh.experts.mlp_spec import ExpertMlpSpec, ExpertWeights, activate, activation_backward
from expertmesh.experts.per_expert import PerExpertMlp
from expertmesh.experts.segments import Segments, segment_sum


def grouped_mm(a: torch.Tensor, b: torch.Tensor, end_L: torch.Tensor) -> torch.Tensor:
    """Grouped matrix product by torch's kernel: `[P, k] x [L, k, n] -> [P, n]`, or `[m, P] x [P, n] -> [L, m, n]`.

    On CUDA torch has a kernel of its own for bf16; in fp32 it multiplies expert by expert and waits for the host.
    """
    return F.grouped_mm(a, b, offs=end_L)


def grouped_mm_refusal(dtype: torch.dtype, hidden: int, width: int) -> str | None:
    """Why torch's grouped kernel cannot take these experts, or None. `width` is the intermediate size."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it has no {dtype} kernel"
    odd = [size for size in (hidden, width) if size * dtype.itemsize % 16]
    return f"rows of {odd[0]} {dtype} elements are not a multiple of 16 bytes" if odd else None


def expert_mlp(
    rows_RH: torch.Tensor,
    weight_P: torch.Tensor,
    pairs: LocalPairs,
    weights: ExpertWeights,
    form: ExpertMlpSpec,
) -> torch.Tensor:
    """For each row the weighted sum of its experts' outputs, `[R, H]`; differentiable in rows, weights and parameters.

    Computes in the dtype of `rows_RH`; parameters of another dtype (fp32 masters) are cast for each use, never kept in
    both, and their gradients come back in their own. `weight_P` may be wider. Rows without pairs give zeros. Always
    gives every parameter a gradient (zeros without tokens), so that FSDP2's reduce-scatter is never skipped on a rank.
    """
    function = PerExpertMlp if form.per_expert else _GroupedMlp
    out_RH: torch.Tensor = function.apply(rows_RH, weight_P, *weights.flat(), pairs, form)
    return out_RH


class _GroupedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RH: torch.Tensor,
        weight_P: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        pairs: LocalPairs,
        form: ExpertMlpSpec,
    ) -> torch.Tensor:
        end_L, dtype = pairs.expert_end_L, rows_RH.dtype
        pre_P2I = grouped_mm(rows_RH.index_select(0, pairs.row_P), as_kn(up.to(dtype), form), end_L)
        if up_bias is not None:
            pre_P2I += per_pair(up_bias.to(dtype), pairs)
        act_PI = activate(pre_P2I, form)
        act_PI *= weight_P.unsqueeze(1)
        out_PH = grouped_mm(act_PI, as_kn(down.to(dtype), form), end_L)
        if down_bias is not None:
            out_PH += per_pair(down_bias.to(dtype), pairs) * weight_P.unsqueeze(1)
        # The index tensors too: attributes of ctx would outlive a checkpointed block's first run.
        ctx.save_for_backward(rows_RH, pre_P2I, weight_P, up, down, up_bias, down_bias, *pairs.tensors())
        ctx.form = form
        return segment_sum(out_PH, pairs.by_row)

    @staticmethod
    def backward(ctx: Any, grad_out_RH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows_RH, pre_P2I, weight_P, up, down, up_bias, down_bias, *indices = ctx.saved_tensors
        pairs, form = LocalPairs.of(*indices), ctx.form
        row_P, end_L, dtype = pairs.row_P, pairs.expert_end_L, rows_RH.dtype
        trains_up, trains_down = ctx.needs_input_grad[2:4]
        grad_up = grad_down = grad_up_bias = grad_down_bias = None

        grad_out_PH = grad_out_RH.index_select(0, row_P)
        # The gradient of the weighted activation; the routing weight is still on it.
        grad_act_PI = grouped_mm(grad_out_PH, as_nk(down.to(dtype), form), end_L)
        act_PI, grad_pre_P2I, grad_weight_P = activation_backward(pre_P2I, grad_act_PI, weight_P, form)
        if down_bias is not None:
            bias_PH = per_pair(down_bias.to(dtype), pairs)
            grad_weight_P = grad_weight_P + (grad_out_PH * bias_PH).sum(1, dtype=grad_weight_P.dtype)
            grad_down_bias = _sum_per_expert(grad_out_PH * weight_P.unsqueeze(1), pairs, down_bias.dtype)
        if trains_down:
            grad_down = _weight_gradient(act_PI, grad_out_PH, end_L, form).to(down.dtype)
        del grad_out_PH, grad_act_PI, act_PI
        if up_bias is not None:
            grad_up_bias = _sum_per_expert(grad_pre_P2I, pairs, up_bias.dtype)
        if trains_up:
            grad_up = _weight_gradient(rows_RH.index_select(0, row_P), grad_pre_P2I, end_L, form).to(up.dtype)
        grad_rows_RH = segment_sum(grouped_mm(grad_pre_P2I, as_nk(up.to(dtype), form), end_L), pairs.by_row)
        return grad_rows_RH, grad_weight_P, grad_up, grad_down, grad_up_bias, grad_down_bias, None, None


def as_kn(weight: torch.Tensor, form: ExpertMlpSpec) -> torch.Tensor:
    """`[L, in, out]`, for products from the input side."""
    return weight if form.transposed else weight.transpose(1, 2)


def as_nk(weight: torch.Tensor, form: ExpertMlpSpec) -> torch.Tensor:
    """`[L, out, in]`, for products from the output side (backward)."""
    return weight.transpose(1, 2) if form.transposed else weight


def _weight_gradient(
    input_Pk: torch.Tensor, grad_Pn: torch.Tensor, end_L: torch.Tensor, form: ExpertMlpSpec
) -> torch.Tensor:
    if form.transposed:
        return grouped_mm(input_Pk.t(), grad_Pn, end_L)
    return grouped_mm(grad_Pn.t(), input_Pk, end_L)


def expert_of_pair(pairs: LocalPairs) -> torch.Tensor:
    """Which of this rank's experts each pair goes to, int64 `[P]`."""
    place_P = torch.arange(pairs.row_P.shape[0], device=pairs.row_P.device, dtype=torch.int32)
    return torch.searchsorted(pairs.expert_end_L, place_P, right=True)


def per_pair(bias_Ln: torch.Tensor, pairs: LocalPairs) -> torch.Tensor:
    """`[P, n]`: each pair's own expert's row."""
    return bias_Ln.index_select(0, expert_of_pair(pairs))


def _sum_per_expert(grad_Pn: torch.Tensor, pairs: LocalPairs, dtype: torch.dtype) -> torch.Tensor:
    """Sum the pairs of each expert, which are neighbours already."""
    place_P = torch.arange(grad_Pn.shape[0], device=grad_Pn.device)
    return segment_sum(grad_Pn, Segments(place_P, F.pad(pairs.expert_end_L.long(), (1, 0)))).to(dtype)
