"""Compute cross-entropies and divergences of logits, of the whole vocabulary or of this tp rank's rows of it.

Each tp rank has the logits of its rows of the output embedding, for all positions of its group. Ranks exchange two
numbers per token and the largest logit, and get equal losses. loss.py makes the logits and sums the losses.

    C tokens of a chunk, W rows of the output embedding on this rank
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from expertmesh.anatomy import is_classifier
from expertmesh.compat import assert_async, parameter_slots
from expertmesh.parallel.tensor_plan import head_not_split
from expertmesh.state.model_view import OUTPUT_ROWS, sharded


@dataclass(frozen=True, slots=True)
class VocabularyShare:
    """The rows of the output embedding that this rank computes with. Ranks may have different numbers of rows."""

    group: dist.ProcessGroup
    """The tp group."""
    start: int
    """The first of this rank's rows."""
    stop: int
    """The row after the last."""
    tokens: int
    """The rows of all ranks, without those that the model makes no logits of."""

    @property
    def ranks(self) -> int:
        """The number of ranks that share the vocabulary."""
        return self.group.size()

    def split(self, head: nn.Module) -> "SplitHead":
        """Return `head` by this rank's rows: views, whose gradients reach the full parameters (gathered by FSDP2
        before).
        """
        full = {leaf: p for leaf in OUTPUT_ROWS if (p := parameter_slots(head).get(leaf)) is not None}
        return SplitHead(self, head, full, {leaf: p[self.start : self.stop] for leaf, p in full.items()})

    def cross_entropy(self, logits_CW: torch.Tensor, target_C: torch.Tensor) -> torch.Tensor:
        """Return `[C]`, equal on every rank of the group.

        Collectives: all ranks of the tp group call it; two small all-reduces.
        """
        self.refuse_other_rows(logits_CW)
        # Without a rank that has it, a label would get a loss all the same; torch's own cross-entropy refuses it.
        known_C = (target_C >= 0) & (target_C < self.tokens)
        assert_async(known_C.all(), "labels: a target is neither a token of the vocabulary nor -100")
        loss_C: torch.Tensor = _CrossEntropy.apply(logits_CW, target_C - self.start, self.group)
        return loss_C

    def refuse_other_rows(self, logits_CW: torch.Tensor) -> None:
        """Raise `InputError` unless the logits are those of this rank's rows."""
        if logits_CW.shape[-1] != self.stop - self.start:
            rows = self.stop - self.start
            raise head_not_split(f"the model makes {logits_CW.shape[-1]} logits of {rows} rows of it")

    def argmax(self, logits_CW: torch.Tensor) -> torch.Tensor:
        """Return the first token with the largest logit, `[C]`, equal on every rank of the group.

        Collectives: all ranks of the tp group call it; two small all-reduces.
        """
        highest_C, place_C = logits_CW.max(-1)
        most_C = highest_C.clone()
        dist.all_reduce(most_C, dist.ReduceOp.MAX, group=self.group)
        # Ties go to the smallest token, as `argmax` of all logits has it.
        word_C = torch.where(highest_C == most_C, place_C + self.start, torch.iinfo(torch.int64).max)
        dist.all_reduce(word_C, dist.ReduceOp.MIN, group=self.group)
        return word_C


@dataclass(frozen=True, slots=True)
class SplitHead:
    """An output embedding and this rank's rows of its parameters."""

    share: VocabularyShare
    """This rank's part of the vocabulary."""
    head: nn.Module
    """The output embedding."""
    full: dict[str, nn.Parameter]
    """Its parameters, by their names in it."""
    rows: dict[str, torch.Tensor]
    """This rank's rows of each, by the same names."""

    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return this rank's rows of one of the head's parameters, and any other parameter unchanged."""
        leaf = next((leaf for leaf, full in self.full.items() if full is parameter), None)
        return parameter if leaf is None else self.rows[leaf]


def vocabulary_share(model: nn.Module, empty_logits: torch.Tensor) -> VocabularyShare | None:
    """Return this rank's share, or None where tp is 1, and for a classifier, which has no vocabulary.

    Args:
        empty_logits: the root's logits of no token, `[B, 0, V]`. A family may cut off the logits of a head's last rows,
            those of no token; ranks share the rows before them, so that the cut leaves each rank's rows as they are.
    """
    mesh = sharded(model).mesh
    if mesh is None or mesh.layout.tp == 1 or is_classifier(model):
        return None
    rows, tp, rank = empty_logits.shape[-1], mesh.layout.tp, mesh.coordinate("tp")
    return VocabularyShare(mesh.dense.get_group("tp"), rows * rank // tp, rows * (rank + 1) // tp, rows)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_CW: torch.Tensor, place_C: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Return the loss of each target, `[C]`, and save its gradient.

        Args:
            logits_CW: This rank's part of the vocabulary, W columns.
            place_C: The target's column on this rank, outside of `range(W)` if another rank has it.

        Collectives: every rank of `group` issues two all-reduces.
        """
        rows = logits_CW.shape[-1]
        here_C = (place_C >= 0) & (place_C < rows)
        place_C1 = place_C.clamp(0, rows - 1).unsqueeze(1)
        shifted_CW = logits_CW - _highest(logits_CW, group).unsqueeze(1)
        # Not a product: another row's logit may be infinite.
        chosen_C = torch.where(here_C, shifted_CW.gather(1, place_C1).squeeze(1), 0.0)
        exp_CW = shifted_CW.exp_()
        sums_2C = torch.stack([exp_CW.sum(-1), chosen_C])
        dist.all_reduce(sums_2C, group=group)
        total_C, chosen_C = sums_2C
        # softmax minus one-hot, in the memory of the exponentials: no second tensor of the logits' size.
        gradient_CW = exp_CW.div_(total_C.unsqueeze(1))
        gradient_CW.scatter_add_(1, place_C1, -here_C.to(gradient_CW.dtype).unsqueeze(1))
        ctx.save_for_backward(gradient_CW)
        loss_C: torch.Tensor = total_C.log() - chosen_C
        return loss_C

    @staticmethod
    def backward(ctx: Any, grad_C: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient_CW,) = ctx.saved_tensors
        return gradient_CW * grad_C.unsqueeze(1), None, None


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
    """Compute the gradient in forward and keep it: the probabilities of both models are freed with the chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_CW: torch.Tensor,
        teacher_CW: torch.Tensor,
        temperature: float,
        reverse: bool,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        log_model_CW = _log_probabilities(logits_CW / temperature, group)
        log_teacher_CW = _log_probabilities(teacher_CW.to(logits_CW.dtype, copy=True).div_(temperature), group)
        p_CW = (log_model_CW if reverse else log_teacher_CW).exp()
        ratio_CW = log_model_CW.sub_(log_teacher_CW) if reverse else log_teacher_CW.sub_(log_model_CW)
        # Not a product: a word without probability in both models has a ratio of NaN.
        ratio_CW.masked_fill_(p_CW == 0, 0.0)
        value_C: torch.Tensor = torch.linalg.vecdot(p_CW, ratio_CW)
        if group is not None:
            dist.all_reduce(value_C, group=group)
        gradient_CW = ratio_CW.sub_(value_C.unsqueeze(1)).mul_(p_CW) if reverse else log_model_CW.exp_().sub_(p_CW)
        # Of the two factors of the temperature one is that of the logits, which were divided by it.
        ctx.save_for_backward(gradient_CW.mul_(temperature))
        return value_C * temperature**2

    @staticmethod
    def backward(ctx: Any, grad_C: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient_CW,) = ctx.saved_tensors
        return gradient_CW * grad_C.unsqueeze(1), None, None, None, None


def _log_probabilities(logits_CW: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the log-probabilities, in place."""
    logits_CW.sub_(_highest(logits_CW, group).unsqueeze(1))
    total_C = logits_CW.exp().sum(-1)
    if group is not None:
        dist.all_reduce(total_C, group=group)
    log_probability_CW: torch.Tensor = logits_CW.sub_(total_C.log().unsqueeze(1))
    return log_probability_CW


def _highest(logits_CW: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the largest logit of each token, `[C]`. Collectives: one all-reduce, if other ranks have other words."""
    highest_C = logits_CW.amax(-1)
    if group is not None:
        dist.all_reduce(highest_C, dist.ReduceOp.MAX, group=group)
    return highest_C
