"""Compute the MLP of expert_mlp.py one expert after the other: the plain reference, and the only way in fp64.

Gathered rows, cast weights and activations exist for one expert at a time: only the saved pre-activations are as long
as all pairs. Needs the experts' spans on the host, so on an accelerator it waits for the device once per call.

    Letters as in expert_mlp.py; p pairs of one expert, I2 columns of the up projection
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from expertmesh.experts.activation_checkpointing import Rest
from expertmesh.experts.mlp_spec import ExpertMlpSpec, activate, activation_backward
from expertmesh.experts.pairs import LocalPairs
from expertmesh.state.packed import PackedTensor


class PerExpertMlp(torch.autograd.Function):
    """Compute the up projections, and a `Rest` with everything behind them. `expert_mlp.expert_mlp` calls it."""

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
        mlp: ExpertMlpSpec,
        rest: Rest,
    ) -> torch.Tensor:
        dtype, spans = rows_RH.dtype, list(_spans(pairs))
        pre_PI2 = rows_RH.new_empty(weight_P.shape[0], up.shape[2 if mlp.transposed else 1])
        for expert, span in spans:
            pre_pI2 = pre_PI2[span]
            torch.mm(rows_RH.index_select(0, pairs.row_P[span]), _in_out(up, expert, mlp, dtype), out=pre_pI2)
            if up_bias is not None:
                pre_pI2 += up_bias[expert]

        def compute() -> torch.Tensor:
            out_RH = _wide_zeros(rows_RH)
            for expert, span in spans:
                out_pH = activate(pre_PI2[span], weight_P[span], mlp) @ _in_out(down, expert, mlp, dtype)
                if down_bias is not None:
                    out_pH += down_bias[expert] * weight_P[span].unsqueeze(1)
                out_RH.index_add_(0, pairs.row_P[span], out_pH.to(out_RH.dtype))
            return out_RH.to(dtype)

        rest.compute = compute
        ctx.save_for_backward(rows_RH, pre_PI2, weight_P, up, down, up_bias, down_bias, *pairs.tensors())
        ctx.mlp, ctx.rest = mlp, rest
        return rest.edge(rows_RH)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_out_RH = ctx.rest.gradient()
        rows_RH, pre_PI2, weight_P, up, down, up_bias, down_bias, *indices = ctx.saved_tensors
        pairs, mlp, dtype = LocalPairs.of(*indices), ctx.mlp, rows_RH.dtype
        grad_rows_RH, grad_weight_P = _wide_zeros(rows_RH), torch.empty_like(weight_P)
        # Experts without a token keep the zeros. None where nothing trains.
        grads = [
            torch.zeros_like(parameter) if parameter is not None and needed else None
            for parameter, needed in zip((up, down, up_bias, down_bias), ctx.needs_input_grad[2:6], strict=True)
        ]
        grad_up, grad_down, grad_up_bias, grad_down_bias = grads
        for expert, span in _spans(pairs):
            row_p, weight_p = pairs.row_P[span], weight_P[span]
            grad_out_pH = grad_out_RH.index_select(0, row_p)
            grad_act_pI = grad_out_pH @ _in_out(down, expert, mlp, dtype).t()
            act_pI, grad_pre_pI2, grad_weight_p = activation_backward(pre_PI2[span], grad_act_pI, weight_p, mlp)
            if down_bias is not None:
                grad_weight_p = grad_weight_p + (grad_out_pH * down_bias[expert]).sum(1, dtype=grad_weight_p.dtype)
            grad_weight_P[span] = grad_weight_p
            if grad_down is not None:
                _weight_gradient(act_pI, grad_out_pH, grad_down[expert], mlp)
            if grad_down_bias is not None:
                grad_down_bias[expert] = (grad_out_pH * weight_p.unsqueeze(1)).sum(0)
            if grad_up is not None:
                _weight_gradient(rows_RH.index_select(0, row_p), grad_pre_pI2, grad_up[expert], mlp)
            if grad_up_bias is not None:
                grad_up_bias[expert] = grad_pre_pI2.sum(0)
            grad_rows_pH = grad_pre_pI2 @ _in_out(up, expert, mlp, dtype).t()
            grad_rows_RH.index_add_(0, row_p, grad_rows_pH.to(grad_rows_RH.dtype))
        return grad_rows_RH.to(dtype), grad_weight_P, *grads, None, None, None


def looped_mm(a: torch.Tensor, b: torch.Tensor, end_L: torch.Tensor) -> torch.Tensor:
    """Return what `expert_mlp.grouped_mm` returns, one expert after the other, in any dtype. Waits for the device."""
    spans = list(itertools.pairwise([0, *end_L.tolist()]))
    if b.dim() == 3:
        return torch.cat([a[start:end] @ b[expert] for expert, (start, end) in enumerate(spans)])
    return torch.stack([a[:, start:end] @ b[start:end] for start, end in spans])


def _spans(pairs: LocalPairs) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has pairs, and their range."""
    start = 0
    for expert, end in enumerate(pairs.expert_end_L.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def _in_out(weight: torch.Tensor, expert: int, mlp: ExpertMlpSpec, dtype: torch.dtype) -> torch.Tensor:
    """Return one expert's weight as `[in, out]` for any layout; dequantised, if it is packed."""
    own = weight.experts(expert, expert + 1)[0] if isinstance(weight, PackedTensor) else weight[expert]
    return (own if mlp.transposed else own.t()).to(dtype)


def _weight_gradient(input_pk: torch.Tensor, grad_pn: torch.Tensor, out: torch.Tensor, mlp: ExpertMlpSpec) -> None:
    """Write one expert's weight gradient into its place; masters may be wider than what is multiplied."""
    left, right = (input_pk, grad_pn) if mlp.transposed else (grad_pn, input_pk)
    if out.dtype == left.dtype:
        torch.mm(left.t(), right, out=out)
    else:
        out.copy_(left.t() @ right)


def _wide_zeros(rows_RH: torch.Tensor) -> torch.Tensor:
    """Return zeros in at least fp32 for sums over a row's experts, as the grouped path has them."""
    wide = torch.float64 if rows_RH.dtype == torch.float64 else torch.float32
    return torch.zeros_like(rows_RH, dtype=wide)
