"""Low-rank adapters on routed experts: grouped products beside the frozen weights, with a lean backward.

For each adapted projection W of an expert the layer computes `x W^T + scaling · (x A^T) B^T`. The E x out x in product
B A is never formed, forward or backward, and no gradient of a frozen weight is ever computed. Saved for backward are
the rows received, the pre-activations and the r-wide products. The layout of A and B is PEFT's, one slice per expert
(LoRA: arXiv 2106.09685; the cost of forming the product: huggingface/peft issue 3577).

    Letters as in compute.py; r rank; adapters are `a_LrK` `[L, r, in]` and `b_LNr` `[L, out, r]` in every family
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from expertmesh.experts.compute import as_kn, as_nk, expert_of_pair, grouped_mm, per_pair
from expertmesh.experts.dispatch import LocalPairs
from expertmesh.experts.dropout import Dropout, keep_mask
from expertmesh.experts.mlp_spec import ExpertMlpSpec, ExpertWeights, activate, activation_backward
from expertmesh.experts.per_expert import looped_mm
from expertmesh.experts.segments import segment_sum

# Rows of a grouped product must be multiples of 16 bytes, so a rank is padded with zeros to a multiple of this.
_RANK_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class Adapter:
    """One projection's adapter on this rank: `a_LrK` `[L, r, in]`, `b_LNr` `[L, out, r]`."""

    a_LrK: torch.Tensor
    b_LNr: torch.Tensor


@dataclass(frozen=True, slots=True)
class Adapters:
    """What is adapted, and how. `first_expert` is the global number of this rank's first expert."""

    up: Adapter | None
    down: Adapter | None
    scaling: float
    first_expert: int


def adapted_expert_mlp(
    rows_RH: torch.Tensor,
    weight_P: torch.Tensor,
    pairs: LocalPairs,
    weights: ExpertWeights,
    form: ExpertMlpSpec,
    adapters: Adapters,
    dropout: Dropout | None = None,
) -> torch.Tensor:
    """As `expert_mlp`, with frozen weights and adapters on one or both projections; `[R, H]`.

    Differentiable in rows, weights and adapters. Adapters of another dtype (fp32 masters) are cast for each use and get
    gradients in their own. Every adapter gets a gradient (zeros without tokens). `dropout` numbers the rows.
    """
    up_a, up_b = _padded(adapters.up)
    down_a, down_b = _padded(adapters.down)
    base = (rows_RH, weight_P, *weights.flat())
    settings = (adapters.scaling, adapters.first_expert, dropout)
    out_RH: torch.Tensor = _AdaptedMlp.apply(*base, up_a, up_b, down_a, down_b, pairs, form, *settings)
    return out_RH


class _AdaptedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RH: torch.Tensor,
        weight_P: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        up_a: torch.Tensor | None,
        up_b: torch.Tensor | None,
        down_a: torch.Tensor | None,
        down_b: torch.Tensor | None,
        pairs: LocalPairs,
        form: ExpertMlpSpec,
        scaling: float,
        first_expert: int,
        dropout: Dropout | None,
    ) -> torch.Tensor:
        product, end_L, dtype = _product(form), pairs.expert_end_L, rows_RH.dtype
        x_PH = rows_RH.index_select(0, pairs.row_P)
        pre_P2I = product(x_PH, as_kn(up.to(dtype), form), end_L)
        if up_bias is not None:
            pre_P2I += per_pair(up_bias.to(dtype), pairs)
        low_up_Pr = low_down_Pr = None
        if up_a is not None and up_b is not None:
            x_PH = _dropped(x_PH, dropout, pairs, None)
            low_up_Pr = product(x_PH, up_a.to(dtype).transpose(1, 2), end_L)
            pre_P2I.add_(product(low_up_Pr, up_b.to(dtype).transpose(1, 2), end_L), alpha=scaling)
        del x_PH
        act_PI = activate(pre_P2I, form)
        act_PI *= weight_P.unsqueeze(1)
        out_PH = product(act_PI, as_kn(down.to(dtype), form), end_L)
        if down_a is not None and down_b is not None:
            act_PI = _dropped(act_PI, dropout, pairs, first_expert)
            low_down_Pr = product(act_PI, down_a.to(dtype).transpose(1, 2), end_L)
            out_PH.add_(product(low_down_Pr, down_b.to(dtype).transpose(1, 2), end_L), alpha=scaling)
        if down_bias is not None:
            out_PH += per_pair(down_bias.to(dtype), pairs) * weight_P.unsqueeze(1)
        number_R = None if dropout is None else dropout.number_P
        adapters = (up_a, up_b, down_a, down_b, low_up_Pr, low_down_Pr)
        ctx.save_for_backward(rows_RH, pre_P2I, weight_P, up, down, down_bias, *adapters, number_R, *pairs.tensors())
        ctx.form, ctx.scaling, ctx.first_expert = form, scaling, first_expert
        ctx.dropout = None if dropout is None else (dropout.probability, dropout.salt)
        return segment_sum(out_PH, pairs.by_row)

    @staticmethod
    def backward(ctx: Any, grad_out_RH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows_RH, pre_P2I, weight_P, up, down, down_bias, *rest = ctx.saved_tensors
        up_a, up_b, down_a, down_b, low_up_Pr, low_down_Pr, number_R, *indices = rest
        pairs, form, scaling = LocalPairs.of(*indices), ctx.form, ctx.scaling
        dropout = None if number_R is None else Dropout(ctx.dropout[0], ctx.dropout[1], number_R)
        product, end_L, dtype = _product(form), pairs.expert_end_L, rows_RH.dtype
        grad_up_a = grad_up_b = grad_down_a = grad_down_b = grad_rows_RH = None

        grad_out_PH = grad_out_RH.index_select(0, pairs.row_P)
        # The gradient of the weighted activation; the routing weight is still on it.
        grad_act_PI = product(grad_out_PH, as_nk(down.to(dtype), form), end_L)
        if down_a is not None:
            grad_low_Pr = product(grad_out_PH, down_b.to(dtype), end_L).mul_(scaling)
            through_PI = product(grad_low_Pr, down_a.to(dtype), end_L)
            grad_act_PI += _dropped(through_PI, dropout, pairs, ctx.first_expert)
        act_PI, grad_pre_P2I, grad_weight_P = activation_backward(pre_P2I, grad_act_PI, weight_P, form)
        if down_a is not None:
            act_PI = _dropped(act_PI, dropout, pairs, ctx.first_expert)
            grad_down_a = product(grad_low_Pr.t(), act_PI, end_L).to(down_a.dtype)
            grad_down_b = product(grad_out_PH.t(), low_down_Pr, end_L).mul_(scaling).to(down_b.dtype)
        if down_bias is not None:
            bias_PH = per_pair(down_bias.to(dtype), pairs)
            grad_weight_P = grad_weight_P + (grad_out_PH * bias_PH).sum(1, dtype=grad_weight_P.dtype)
        del act_PI, grad_act_PI, grad_out_PH

        trains_rows = ctx.needs_input_grad[0]
        grad_x_PH = product(grad_pre_P2I, as_nk(up.to(dtype), form), end_L) if trains_rows else None
        if up_a is not None:
            grad_low_Pr = product(grad_pre_P2I, up_b.to(dtype), end_L).mul_(scaling)
            grad_up_b = product(grad_pre_P2I.t(), low_up_Pr, end_L).mul_(scaling).to(up_b.dtype)
            x_PH = _dropped(rows_RH.index_select(0, pairs.row_P), dropout, pairs, None)
            grad_up_a = product(grad_low_Pr.t(), x_PH, end_L).to(up_a.dtype)
            del x_PH
            if grad_x_PH is not None:
                grad_x_PH += _dropped(product(grad_low_Pr, up_a.to(dtype), end_L), dropout, pairs, None)
        if grad_x_PH is not None:
            grad_rows_RH = segment_sum(grad_x_PH, pairs.by_row)
        frozen, settings = (None,) * 4, (None,) * 5
        return grad_rows_RH, grad_weight_P, *frozen, grad_up_a, grad_up_b, grad_down_a, grad_down_b, *settings


def _product(form: ExpertMlpSpec) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    return looped_mm if form.per_expert else grouped_mm


def _padded(adapter: Adapter | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A and B with a rank that the grouped kernel takes; ranks that fit are not copied. Differentiable."""
    if adapter is None:
        return None, None
    missing = -adapter.a_LrK.shape[1] % _RANK_MULTIPLE
    if not missing:
        return adapter.a_LrK, adapter.b_LNr
    return F.pad(adapter.a_LrK, (0, 0, 0, missing)), F.pad(adapter.b_LNr, (0, missing))


def _dropped(
    values: torch.Tensor, dropout: Dropout | None, pairs: LocalPairs, first_expert: int | None
) -> torch.Tensor:
    """`values` of pairs with their dropout; with `first_expert` each of a token's experts has a mask of its own."""
    if dropout is None:
        return values
    number_P = dropout.number_P.index_select(0, pairs.row_P)
    salt = dropout.salt
    if first_expert is not None:
        number_P = (number_P << 16) + first_expert + expert_of_pair(pairs)
        salt += 1
    return values * keep_mask(Dropout(dropout.probability, salt, number_P), values.shape[1], values.dtype)
