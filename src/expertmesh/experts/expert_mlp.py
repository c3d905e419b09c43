"""Compute the grouped MLP of routed experts, with or without LoRA, and its lean backward. Maths only: one rank's rows.

Pairs are ordered by expert, so each projection is one grouped matrix product. Routing weights are applied before the
down projection, so that expert outputs need not be saved for the router's gradient; gathered inputs and activations are
recomputed in backward. Saved are the rows received, the pre-activations and the r-wide products of adapters: R*H + P*2I
elements against about P*(2H + 6I) in the plain form (arXiv 2512.14080 derives the same saving).

An adapted projection W computes `x W^T + scaling · (x A^T) B^T` (LoRA: arXiv 2106.09685). The product B A, E x out x
in, is never formed (huggingface/peft issue 3577 shows its cost), and frozen weights get no gradient. `moe.compute:
loop` multiplies one expert after the other, the plain reference and the only way in fp64: `PerExpertMlp`, which holds
one expert's rows at a time, and with adapters `looped_mm` in place of `grouped_mm`.

    R rows, P pairs, H hidden, I intermediate, L experts on this rank, r rank of the adapters; up weights are
    `[L, 2I, H]`, or `[L, H, 2I]` in transposed families (2I is I when the experts are not gated), down weights
    `[L, H, I]` or `[L, I, H]`; adapters are `a_LrK` `[L, r, in]` and `b_LNr` `[L, out, r]` in every family;
    p pairs of one expert, I2 columns of the up projection
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from expertmesh.experts.lora_state import Dropout, keep_mask, mixed
from expertmesh.experts.mlp_spec import Adapter, Adapters, ExpertMlpSpec, ExpertWeights, activate, activation_backward
from expertmesh.experts.pairs import LocalPairs, Segments, segment_sum, segments_of
from expertmesh.state.codes import Scratch
from expertmesh.state.packed import PackedTensor, units_together

# Rows of a grouped product must be multiples of 16 bytes, so an adapter's rank is padded with zeros to a multiple of
# this.
_RANK_MULTIPLE = 8
# torch's kernel for CUDA refuses as many.
MOST_GROUPS = 1024


# By groups of rows that end at `end_L`.
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def expert_mlp(
    rows_RH: torch.Tensor,
    weight_P: torch.Tensor,
    pairs: LocalPairs,
    weights: ExpertWeights,
    mlp: ExpertMlpSpec,
    adapters: Adapters | None = None,
    dropout: Dropout | None = None,
) -> torch.Tensor:
    """Compute for each row the weighted sum of its experts' outputs. Differentiable in rows, weights and parameters.

    Every trained parameter always gets a gradient (zeros without tokens), so that FSDP2's reduce-scatter is never
    skipped on a rank. Parameters of another dtype (fp32 masters) are cast for each use, never kept in both, and their
    gradients have their own dtype. Packed weights (`PackedTensor`) are dequantised for each use.

    Args:
        rows_RH: the rows received, in the dtype to compute in.
        weight_P: the routing weight of each pair, in that dtype or a wider one.
        pairs: the pairs, ordered by this rank's experts.
        weights: this rank's experts, in any dtype or packed.
        mlp: how the family's experts compute.
        adapters: LoRA's; the weights are frozen then.
        dropout: the adapters', with the number of each row's token.

    Returns:
        `[R, H]` in the dtype of `rows_RH`; zeros for rows without pairs.
    """
    if mlp.per_expert and adapters is None:
        return _in_two_parts(PerExpertMlp, rows_RH, weight_P, *weights.flat(), pairs, mlp)
    up, down = (None, None) if adapters is None else (adapters.up, adapters.down)
    scalings = tuple(1.0 if adapter is None else adapter.scaling for adapter in (up, down))
    expert_L = None if adapters is None else adapters.expert_L
    settings = (pairs, mlp, scalings, expert_L, dropout)
    parameters = (*weights.flat(), *_padded(up), *_padded(down))
    return _in_two_parts(_ExpertMlp, rows_RH, weight_P, *parameters, *settings)


@dataclass(slots=True, eq=False)
class _Deferred:
    """The second part of an expert MLP, which saves nothing for backward."""

    compute: Callable[[], torch.Tensor] | None = None
    """The second part of forward, whose result is that of both parts."""
    gradient: torch.Tensor | None = None
    """The gradient of that result, from the second part's backward to the first's."""

    def take_gradient(self) -> torch.Tensor:
        """Return the gradient, once."""
        gradient, self.gradient = self.gradient, None
        assert gradient is not None
        return gradient


def _in_two_parts(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    """Run `function` with `args` and a `_Deferred`, then what it deferred.

    `function` saves all that backward needs, and returns an empty tensor, which autograd follows from one to the other.
    """
    deferred = _Deferred()
    try:
        result: torch.Tensor = _SecondPart.apply(function.apply(*args, deferred), deferred)
        return result
    finally:  # also where torch ends a second run by an exception
        deferred.compute = None


class _SecondPart(torch.autograd.Function):
    """Run the deferred part. It saves nothing: its backward is that of the first part."""

    @staticmethod
    def forward(ctx: Any, empty: torch.Tensor, deferred: _Deferred) -> torch.Tensor:
        ctx.deferred = deferred
        assert deferred.compute is not None
        return deferred.compute()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.deferred.gradient = gradient
        return gradient.new_empty(0), None


class _ExpertMlp(torch.autograd.Function):
    """Compute the up projection, and defer everything after it."""

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
        mlp: ExpertMlpSpec,
        scalings: tuple[float, float],
        expert_L: torch.Tensor | None,
        dropout: Dropout | None,
        deferred: _Deferred,
    ) -> torch.Tensor:
        end_L, dtype = pairs.expert_end_L, rows_RH.dtype
        product = _product_of(mlp, end_L)
        x_PH = rows_RH.index_select(0, pairs.row_P)
        pre_P2I = _by_weight(product, x_PH, up, end_L, mlp)
        if up_bias is not None:
            pre_P2I += _per_pair(up_bias.to(dtype), pairs)
        low_up_Pr = low_down_Pr = adapted_PI = None
        if up_a is not None and up_b is not None:
            x_PH = _dropped(x_PH, dropout, pairs, None)
            low_up_Pr = product(x_PH, up_a.to(dtype).transpose(1, 2), end_L)
            pre_P2I.add_(product(low_up_Pr, up_b.to(dtype).transpose(1, 2), end_L), alpha=scalings[0])
        # Backward gathers the inputs again; keeping them would save P * H more.
        del x_PH
        if down_a is not None:
            # The adapter's product is saved, r wide, so forward computes it before the boundary.
            adapted_PI = activate(pre_P2I, weight_P, mlp)
            dropped_PI = _dropped(adapted_PI, dropout, pairs, expert_L)
            low_down_Pr = product(dropped_PI, down_a.to(dtype).transpose(1, 2), end_L)
            del dropped_PI

        def compute() -> torch.Tensor:
            act_PI = activate(pre_P2I, weight_P, mlp) if adapted_PI is None else adapted_PI
            out_PH = _by_weight(product, act_PI, down, end_L, mlp)
            if low_down_Pr is not None and down_b is not None:
                out_PH.add_(product(low_down_Pr, down_b.to(dtype).transpose(1, 2), end_L), alpha=scalings[1])
            if down_bias is not None:
                out_PH += _per_pair(down_bias.to(dtype), pairs) * weight_P.unsqueeze(1)
            return segment_sum(out_PH, pairs.by_row, mlp.triton)

        # Behind the boundary, so that a checkpointed block's second run can end before the down projection.
        deferred.compute = compute
        token_number_R = None if dropout is None else dropout.token_numbers
        low_rank = (up_a, up_b, down_a, down_b, low_up_Pr, low_down_Pr, token_number_R)
        # Save index tensors too: attributes of ctx would outlive a checkpointed block's first run.
        ctx.save_for_backward(rows_RH, pre_P2I, weight_P, up, down, up_bias, down_bias, *low_rank, *pairs.tensors())
        ctx.mlp, ctx.scalings, ctx.expert_L, ctx.deferred = mlp, scalings, expert_L, deferred
        ctx.dropout = None if dropout is None else (dropout.probability, dropout.salt)
        return rows_RH.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_out_RH = ctx.deferred.take_gradient()
        rows_RH, pre_P2I, weight_P, up, down, up_bias, down_bias, *others = ctx.saved_tensors
        up_a, up_b, down_a, down_b, low_up_Pr, low_down_Pr, token_number_R, *indices = others
        pairs, mlp, (up_scaling, down_scaling) = LocalPairs.of(*indices), ctx.mlp, ctx.scalings
        dropout = None if token_number_R is None else Dropout(ctx.dropout[0], ctx.dropout[1], token_number_R)
        end_L, dtype = pairs.expert_end_L, rows_RH.dtype
        product = _product_of(mlp, end_L)
        trains_rows, _, trains_up, trains_down, trains_up_bias, trains_down_bias = ctx.needs_input_grad[:6]
        grad_rows_RH = grad_up = grad_down = grad_up_bias = grad_down_bias = None
        grad_up_a = grad_up_b = grad_down_a = grad_down_b = None

        grad_out_PH = grad_out_RH.index_select(0, pairs.row_P)
        # The gradient of the weighted activation, which still includes the routing weight.
        grad_act_PI = _by_weight(product, grad_out_PH, down, end_L, mlp, backward=True)
        if down_a is not None:
            grad_low_Pr = product(grad_out_PH, down_b.to(dtype), end_L).mul_(down_scaling)
            through_PI = product(grad_low_Pr, down_a.to(dtype), end_L)
            grad_act_PI += _dropped(through_PI, dropout, pairs, ctx.expert_L)
        act_PI, grad_pre_P2I, grad_weight_P = activation_backward(pre_P2I, grad_act_PI, weight_P, mlp)
        if down_bias is not None:
            bias_PH = _per_pair(down_bias.to(dtype), pairs)
            grad_weight_P = grad_weight_P + (grad_out_PH * bias_PH).sum(1, dtype=grad_weight_P.dtype)
        if trains_down_bias:
            grad_down_bias = _sum_per_expert(grad_out_PH * weight_P.unsqueeze(1), pairs, down_bias.dtype)
        if trains_down:
            grad_down = _weight_gradient(product, act_PI, grad_out_PH, end_L, mlp).to(down.dtype)
        if down_a is not None:
            act_PI = _dropped(act_PI, dropout, pairs, ctx.expert_L)
            grad_down_a = _by_groups(product, grad_low_Pr, act_PI, end_L).to(down_a.dtype)
            # `low_down_Pr` is without the scaling, which multiplies B A as a whole.
            grad_down_b = _by_groups(product, grad_out_PH, low_down_Pr, end_L).mul_(down_scaling).to(down_b.dtype)
        # The most memory of backward is in use about here: free these before the up projection needs its own.
        del act_PI, grad_act_PI, grad_out_PH

        if trains_up_bias:
            grad_up_bias = _sum_per_expert(grad_pre_P2I, pairs, up_bias.dtype)
        if trains_up:
            x_PH = rows_RH.index_select(0, pairs.row_P)
            grad_up = _weight_gradient(product, x_PH, grad_pre_P2I, end_L, mlp).to(up.dtype)
            del x_PH
        grad_x_PH = _by_weight(product, grad_pre_P2I, up, end_L, mlp, backward=True) if trains_rows else None
        if up_a is not None:
            grad_low_Pr = product(grad_pre_P2I, up_b.to(dtype), end_L).mul_(up_scaling)
            grad_up_b = _by_groups(product, grad_pre_P2I, low_up_Pr, end_L).mul_(up_scaling).to(up_b.dtype)
            x_PH = _dropped(rows_RH.index_select(0, pairs.row_P), dropout, pairs, None)
            grad_up_a = _by_groups(product, grad_low_Pr, x_PH, end_L).to(up_a.dtype)
            del x_PH
            if grad_x_PH is not None:
                grad_x_PH += _dropped(product(grad_low_Pr, up_a.to(dtype), end_L), dropout, pairs, None)
        if grad_x_PH is not None:
            grad_rows_RH = segment_sum(grad_x_PH, pairs.by_row, mlp.triton)
        weights = (grad_up, grad_down, grad_up_bias, grad_down_bias)
        adapters = (grad_up_a, grad_up_b, grad_down_a, grad_down_b)
        return grad_rows_RH, grad_weight_P, *weights, *adapters, *(None,) * 6


def normed_expert_mlp(
    rows_RH: torch.Tensor,
    weight_P: torch.Tensor,
    pairs: LocalPairs,
    weights: ExpertWeights,
    mlp: ExpertMlpSpec,
    norm: nn.Module,
    adapters: Adapters | None = None,
    dropout: Dropout | None = None,
) -> torch.Tensor:
    """Do what `expert_mlp` does, with `norm` behind each expert and before its routing weight; differentiable in `norm`
    too.

    The weight cannot be applied before the down projection here, and pairs cannot be summed before the norm: each pair
    is a row. All of it runs again in backward, so that only the rows received are kept. `norm` is called as a module,
    once in forward and once in backward, with or without pairs: it may be an FSDP2 unit, whose collectives every rank
    has to join.
    """

    def compute(rows_RH: torch.Tensor, weight_P: torch.Tensor) -> torch.Tensor:
        place_P = torch.arange(pairs.row_P.shape[0], device=rows_RH.device)
        one_per_row = LocalPairs(place_P, pairs.expert_end_L, segments_of(place_P, len(place_P)))
        rows_PH: torch.Tensor = _GatherRows.apply(rows_RH, pairs, mlp.triton)
        drop = dropout and replace(dropout, token_numbers=dropout.token_numbers.index_select(0, pairs.row_P))
        out_PH = expert_mlp(rows_PH, torch.ones_like(weight_P), one_per_row, weights, mlp, adapters, drop)
        weighted_PH = norm(out_PH) * weight_P.unsqueeze(1)
        # Compute in the wider dtype of the two, since the weights may be fp32, then cast back.
        out_RH: torch.Tensor = _SumPairs.apply(weighted_PH, pairs, mlp.triton)
        return out_RH.to(rows_RH.dtype)

    out_RH: torch.Tensor = checkpoint(compute, rows_RH, weight_P, use_reentrant=False, preserve_rng_state=False)
    return out_RH


class _GatherRows(torch.autograd.Function):
    """Gather each pair's row, rows_RH -> rows_PH, without the atomic additions of torch's own backward."""

    @staticmethod
    def forward(ctx: Any, rows_RH: torch.Tensor, pairs: LocalPairs, triton: bool) -> torch.Tensor:
        ctx.save_for_backward(*pairs.tensors())
        ctx.triton = triton
        return rows_RH.index_select(0, pairs.row_P)

    @staticmethod
    def backward(ctx: Any, grad_PH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return segment_sum(grad_PH, LocalPairs.of(*ctx.saved_tensors).by_row, ctx.triton), None, None


class _SumPairs(torch.autograd.Function):
    """Sum the pairs of each row, values_PH -> out_RH."""

    @staticmethod
    def forward(ctx: Any, values_PH: torch.Tensor, pairs: LocalPairs, triton: bool) -> torch.Tensor:
        ctx.save_for_backward(*pairs.tensors())
        return segment_sum(values_PH, pairs.by_row, triton)

    @staticmethod
    def backward(ctx: Any, grad_RH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad_RH.index_select(0, LocalPairs.of(*ctx.saved_tensors).row_P), None, None


def _product_of(mlp: ExpertMlpSpec, end_L: torch.Tensor) -> Product:
    """Return the product of experts whose pairs end at `end_L`; one after the other the device is waited for here."""
    if not mlp.per_expert:
        return grouped_mm
    spans = list(itertools.pairwise([0, *end_L.tolist()]))
    return lambda a, b, _: looped_mm(a, b, spans)


def grouped_mm(a: torch.Tensor, b: torch.Tensor, end_L: torch.Tensor) -> torch.Tensor:
    """Multiply by groups, with torch's kernel: `[P, k] x [L, k, n] -> [P, n]`, or `[m, P] x [P, n] -> [L, m, n]`.

    Returns zeros without pairs: kernels need not support empty products.
    """
    by_expert = b.dim() == 3
    if not a.shape[0 if by_expert else 1]:
        return a.new_zeros(0, b.shape[2]) if by_expert else a.new_zeros(len(end_L), a.shape[0], b.shape[1])
    return F.grouped_mm(a, b, offs=end_L)


def grouped_mm_refusal(dtype: torch.dtype, hidden: int, width: int, experts: int) -> str | None:
    """Return why torch's grouped kernel cannot take `experts` experts of a rank, or None. `width` is the intermediate
    size.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it has no {dtype} kernel"
    if experts >= MOST_GROUPS:
        return f"it takes fewer than {MOST_GROUPS} experts, and a rank has {experts}"
    odd = [size for size in (hidden, width) if size * dtype.itemsize % 16]
    return f"rows of {odd[0]} {dtype} elements are not a multiple of 16 bytes" if odd else None


def _by_weight(
    product: Product,
    x_PK: torch.Tensor,
    weight: torch.Tensor,
    end_L: torch.Tensor,
    mlp: ExpertMlpSpec,
    backward: bool = False,
) -> torch.Tensor:
    """Multiply each pair by its expert's weight, from the input side, or from the output side in backward.

    Packed weights are dequantised for a few experts at a time, so that their values never exist all at once. The host
    then needs the spans of these experts and waits for the device, unless one time takes them all.
    """
    transposes = mlp.transposed if backward else not mlp.transposed
    together = units_together(weight.kind, x_PK.device) if isinstance(weight, PackedTensor) else 0
    if not isinstance(weight, PackedTensor) or together >= len(weight):
        values = (weight.values() if isinstance(weight, PackedTensor) else weight).to(x_PK.dtype)
        return product(x_PK, values.transpose(1, 2) if transposes else values, end_L)
    out = x_PK.new_empty(x_PK.shape[0], weight.shape[1 if transposes else 2])
    ends, scratch = [0, *end_L.tolist()], Scratch()
    for first in range(0, len(weight), together):
        last = min(first + together, len(weight))
        start, end = ends[first], ends[last]
        if end == start:
            continue
        # `scratch` is reused: without it each part would allocate its values anew.
        values = weight.experts(first, last, scratch).to(x_PK.dtype)
        values = values.transpose(1, 2) if transposes else values
        if mlp.per_expert or x_PK.device.type == "cpu":  # where the grouped product is these, and a copy
            for expert, span in enumerate(itertools.starmap(slice, itertools.pairwise(ends[first : last + 1]))):
                torch.mm(x_PK[span], values[expert], out=out[span])
        else:
            out[start:end] = product(x_PK[start:end], values, end_L[first:last] - start)
    return out


def _weight_gradient(
    product: Product, input_Pk: torch.Tensor, grad_Pn: torch.Tensor, end_L: torch.Tensor, mlp: ExpertMlpSpec
) -> torch.Tensor:
    """Return the gradient of all experts' weights, in the layout of the weights; zeros for experts without pairs."""
    left, right = (input_Pk, grad_Pn) if mlp.transposed else (grad_Pn, input_Pk)
    return _by_groups(product, left, right, end_L)


def _by_groups(product: Product, left_Pm: torch.Tensor, right_Pn: torch.Tensor, end_L: torch.Tensor) -> torch.Tensor:
    """Return `left^T right` over each expert's pairs, `[L, m, n]`; zeros for experts without pairs."""
    out_Lmn = product(left_Pm.t(), right_Pn, end_L)
    if leaves_empty_groups(out_Lmn.device):
        empty_L = end_L.diff(prepend=end_L.new_zeros(1)) == 0
        out_Lmn.masked_fill_(empty_L[:, None, None], 0)
    return out_Lmn


@cache
def leaves_empty_groups(device: torch.device) -> bool:
    """Return whether the kernel does not write the gradients of experts without pairs: that of Blackwell
    (pytorch#172439).
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10


def _per_pair(bias_Ln: torch.Tensor, pairs: LocalPairs) -> torch.Tensor:
    """Return the row of each pair's expert, `[P, n]`."""
    return bias_Ln.index_select(0, pairs.expert_P())


def _sum_per_expert(grad_Pn: torch.Tensor, pairs: LocalPairs, dtype: torch.dtype) -> torch.Tensor:
    """Sum the pairs of each expert, which are neighbours already."""
    # Sum as rows of pairs: `index_add_` would add in another order each time on an accelerator.
    place_P = torch.arange(grad_Pn.shape[0], device=grad_Pn.device)
    return segment_sum(grad_Pn, Segments(place_P, F.pad(pairs.expert_end_L.long(), (1, 0)))).to(dtype)


def _padded(adapter: Adapter | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return A and B with a rank that the grouped kernel takes; ranks that fit are not copied. Differentiable."""
    if adapter is None:
        return None, None
    missing = -adapter.a_LrK.shape[1] % _RANK_MULTIPLE
    if not missing:
        return adapter.a_LrK, adapter.b_LNr
    return F.pad(adapter.a_LrK, (0, 0, 0, missing)), F.pad(adapter.b_LNr, (0, missing))


def _dropped(
    values: torch.Tensor, dropout: Dropout | None, pairs: LocalPairs, expert_L: torch.Tensor | None
) -> torch.Tensor:
    """Return `values` of pairs with their dropout; with `expert_L` each expert of a token has a mask of its own."""
    if dropout is None:
        return values
    number_P, salt = dropout.token_numbers.index_select(0, pairs.row_P), dropout.salt
    if expert_L is not None:
        # Mixed before the expert is added, which would else make the number of another token.
        number_P, salt = mixed(number_P) + expert_L[pairs.expert_P()], salt + 1
    return values * keep_mask(Dropout(dropout.probability, salt, number_P), values.shape[1], values.dtype)


class PerExpertMlp(torch.autograd.Function):
    """Compute the up projections, and defer everything after them.

    Gathered rows, cast weights and activations exist for one expert at a time. An accelerator waits once per call: the
    host needs the experts' spans.
    """

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
        deferred: _Deferred,
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

        deferred.compute = compute
        # All pairs' pre-activations are kept, one expert's activations at a time exist.
        ctx.save_for_backward(rows_RH, pre_PI2, weight_P, up, down, up_bias, down_bias, *pairs.tensors())
        ctx.mlp, ctx.deferred = mlp, deferred
        return rows_RH.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_out_RH = ctx.deferred.take_gradient()
        rows_RH, pre_PI2, weight_P, up, down, up_bias, down_bias, *indices = ctx.saved_tensors
        pairs, mlp, dtype = LocalPairs.of(*indices), ctx.mlp, rows_RH.dtype
        grad_rows_RH, grad_weight_P = _wide_zeros(rows_RH), torch.empty_like(weight_P)
        # Experts without a token keep the zeros. None where nothing trains.
        grads = [
            torch.zeros_like(parameter) if parameter is not None and needed else None
            for parameter, needed in zip((up, down, up_bias, down_bias), ctx.needs_input_grad[2:6], strict=True)
        ]
        grad_up, grad_down, grad_up_bias, grad_down_bias = grads
        # An expert without pairs is skipped: nobody waits for it, there is no collective in here.
        for expert, span in _spans(pairs):
            row_p, weight_p = pairs.row_P[span], weight_P[span]
            grad_out_pH = grad_out_RH.index_select(0, row_p)
            grad_act_pI = grad_out_pH @ _in_out(down, expert, mlp, dtype).t()
            act_pI, grad_pre_pI2, grad_weight_p = activation_backward(pre_PI2[span], grad_act_pI, weight_p, mlp)
            if down_bias is not None:
                grad_weight_p = grad_weight_p + (grad_out_pH * down_bias[expert]).sum(1, dtype=grad_weight_p.dtype)
            grad_weight_P[span] = grad_weight_p
            if grad_down is not None:
                _write_gradient(act_pI, grad_out_pH, grad_down[expert], mlp)
            if grad_down_bias is not None:
                grad_down_bias[expert] = (grad_out_pH * weight_p.unsqueeze(1)).sum(0)
            if grad_up is not None:
                _write_gradient(rows_RH.index_select(0, row_p), grad_pre_pI2, grad_up[expert], mlp)
            if grad_up_bias is not None:
                grad_up_bias[expert] = grad_pre_pI2.sum(0)
            grad_rows_pH = grad_pre_pI2 @ _in_out(up, expert, mlp, dtype).t()
            grad_rows_RH.index_add_(0, row_p, grad_rows_pH.to(grad_rows_RH.dtype))
        return grad_rows_RH.to(dtype), grad_weight_P, *grads, None, None, None


def looped_mm(a: torch.Tensor, b: torch.Tensor, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return what `grouped_mm` returns for groups of rows with these ends, one after the other, in any dtype."""
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
    values = weight.experts(expert, expert + 1)[0] if isinstance(weight, PackedTensor) else weight[expert]
    return (values if mlp.transposed else values.t()).to(dtype)


def _write_gradient(input_pk: torch.Tensor, grad_pn: torch.Tensor, out: torch.Tensor, mlp: ExpertMlpSpec) -> None:
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
