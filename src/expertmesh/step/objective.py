"""Define what an optimizer step minimises: a sum over all ranks and micro-batches, of which each rank computes a share.

An objective gets the losses of a micro-batch's target tokens and returns this rank's share. It divides by a count of
the whole step, so the shares add up to the step's value in every layout, and so do their gradients. Objectives of
responses and of a teacher are in objectives.py.

    B rows of a micro-batch, S positions, F figures
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from expertmesh.step.loss import TokenLosses

IGNORED = -100


@dataclass(frozen=True, slots=True)
class Distilling:
    """The comparison of a model's next-token probabilities with a teacher's."""

    temperature: float = 1.0
    """Divisor of both models' logits."""
    reverse: bool = False
    """Take KL(model || teacher), not KL(teacher || model)."""
    sft_weight: float = 0.0
    """Factor of the cross-entropy that is added."""


@dataclass(frozen=True, slots=True)
class Term:
    """This rank's share of a micro-batch; the shares are summed over the whole step."""

    loss: torch.Tensor
    """0-dim."""
    figures_F: torch.Tensor
    """float64 without graph, in the order of the objective's `figures`."""


@dataclass(frozen=True, slots=True)
class Objective(ABC):
    """A sum over all ranks and micro-batches of a step."""

    count: int | torch.Tensor = 1
    """Number of what `over` names in the whole step, by which the loss is divided."""
    figures: ClassVar[tuple[str, ...]] = ()
    """Names of the values that it reports beside the loss."""
    over: ClassVar[str] = "target tokens"
    """Name of what `count` counts."""

    @abstractmethod
    def term(self, losses: "TokenLosses", batch: dict[str, torch.Tensor]) -> Term:
        """Return this rank's share of a micro-batch. Collectives: those of what it asks of `losses`."""


class CrossEntropy(Objective):
    """The sum of the losses of target tokens, over the targets of the whole step."""

    def term(self, losses: "TokenLosses", batch: dict[str, torch.Tensor]) -> Term:
        total = losses.total() / self.count
        return Term(total, total.new_zeros(0, dtype=torch.float64))


class EvaluatedCrossEntropy(Objective):
    """`CrossEntropy` without gradients, and the share of targets with the largest logit."""

    figures = ("token_accuracy",)

    def term(self, losses: "TokenLosses", batch: dict[str, torch.Tensor]) -> Term:
        total, hits = losses.total_and_hits()
        return Term(total / self.count, hits.double().view(1) / self.count)


class LogProbabilities(Objective):
    """No objective: `figures_F` is the log-probability of each row's targets, `[B]`, on every rank that shares
    the row.
    """

    def term(self, losses: "TokenLosses", batch: dict[str, torch.Tensor]) -> Term:
        by_row_B = -losses.by_row()
        return Term(by_row_B.new_zeros(()), by_row_B)


class NextWords(Objective):
    """No objective: `figures_F` is the token that the model would choose at each row's only target, `[B]`, on every
    rank that shares the row.
    """

    def term(self, losses: "TokenLosses", batch: dict[str, torch.Tensor]) -> Term:
        word_B = losses.largest_by_row()
        return Term(word_B.new_zeros(()), word_B)
