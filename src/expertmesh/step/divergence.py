"""Compute the divergence of a model's next-token probabilities from a teacher's, of a chunk's logits.

Under tp each rank has the logits of its part of the vocabulary, of both models; the ranks of the tp group exchange two
numbers per model and token, and one for the divergence. The gradient is computed in forward and kept: it needs the
probabilities of both models, which are freed with the chunk.

    C tokens of a chunk, W words of the vocabulary on this rank
"""

from typing import Any

import torch
import torch.distributed as dist


def divergence(
    logits_CW: torch.Tensor,
    teacher_CW: torch.Tensor,
    *,
    temperature: float,
    reverse: bool,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Return temperature² times KL(teacher || model) of each token, `[C]`; `reverse`: KL(model || teacher).

    Both models' logits are divided by the temperature. Only `logits_CW` gets gradients. Logits of minus infinity are
    words without probability.

    Args:
        logits_CW: The model's, in the dtype to compute in.
        teacher_CW: The teacher's, in any dtype.
        group: The ranks that have the other words; None if this rank has all.

    Collectives: all ranks of `group` call it; five small all-reduces. The result is equal on all of them.
    """
    value_C: torch.Tensor = _Divergence.apply(logits_CW, teacher_CW, temperature, reverse, group)
    return value_C


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_CW: torch.Tensor,
        teacher_CW: torch.Tensor,
        temperature: float,
        reverse: bool,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        own_CW = _log_probabilities(logits_CW / temperature, group)
        other_CW = _log_probabilities(teacher_CW.to(logits_CW.dtype, copy=True).div_(temperature), group)
        p_CW = (own_CW if reverse else other_CW).exp()
        ratio_CW = own_CW.sub_(other_CW) if reverse else other_CW.sub_(own_CW)
        # Not a product: a word without probability in both models has a ratio of NaN.
        ratio_CW.masked_fill_(p_CW == 0, 0.0)
        value_C: torch.Tensor = torch.linalg.vecdot(p_CW, ratio_CW)
        if group is not None:
            dist.all_reduce(value_C, group=group)
        gradient_CW = ratio_CW.sub_(value_C.unsqueeze(1)).mul_(p_CW) if reverse else own_CW.exp_().sub_(p_CW)
        # Of the two factors of the temperature one is that of the logits, which were divided by it.
        ctx.save_for_backward(gradient_CW.mul_(temperature))
        return value_C * temperature**2

    @staticmethod
    def backward(ctx: Any, grad_C: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient_CW,) = ctx.saved_tensors
        return gradient_CW * grad_C.unsqueeze(1), None, None, None, None


def _log_probabilities(logits_CW: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the log-probabilities, in place."""
    highest_C = logits_CW.amax(-1)
    if group is not None:
        dist.all_reduce(highest_C, dist.ReduceOp.MAX, group=group)
    logits_CW.sub_(highest_C.unsqueeze(1))
    total_C = logits_CW.exp().sum(-1)
    if group is not None:
        dist.all_reduce(total_C, group=group)
    log_probability_CW: torch.Tensor = logits_CW.sub_(total_C.log().unsqueeze(1))
    return log_probability_CW
