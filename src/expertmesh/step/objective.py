"""Define what an optimizer step minimises: a sum over all ranks and micro-batches, of which each rank computes a share.

An objective gets the losses of a micro-batch's target tokens and returns this rank's share. It divides by a count of
the whole step, so the shares add up to the step's value in every layout, and so do their gradients. Objectives of
preference pairs are in `objectives`.

    B rows of a micro-batch, S positions, F figures
"""

from dataclasses import dataclass
from typing import Protocol

import torch

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


class TokenLosses(Protocol):
    """The cross-entropies of one micro-batch's target tokens, computed on request.

    `ranks` ranks share its rows (cp × tp); each has some of the positions.
    """

    @property
    def ranks(self) -> int: ...

    def total(self, weight_B: torch.Tensor | None = None) -> torch.Tensor:
        """Return this rank's share of their sum, each times the weight of its row: 0-dim.

        Has gradients where they are enabled; these take the weights as constants.

        Collectives: every rank of a tp group calls it; two small all-reduces per chunk.
        """

    def by_row(self) -> torch.Tensor:
        """Return the sum over each row, of all ranks that share it: `[B]` float64, without gradients.

        Collectives: every rank that shares the row calls it; one all-reduce over cp, and those of `total`.
        """

    def largest_by_row(self) -> torch.Tensor:
        """Return the token with the largest logit at the target of each row, `[B]`; each row has one target.

        Collectives: as `by_row`.
        """

    def total_and_hits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `total` without gradients, and this rank's share of how many targets have the largest logit.

        Collectives: as `total`, and two more all-reduces per chunk.
        """

    def distilled(self, teacher: "TokenLosses", options: Distilling) -> torch.Tensor:
        """Return this rank's share of the sum of temperature² · KL over targets, with the cross-entropies that
        `options` add: 0-dim, with gradients where they are enabled.

        Args:
            teacher: Another model's for the same targets, on the same ranks.

        Collectives: every rank that shares the rows calls it; one all-gather of the teacher's root at most, and
            seven small all-reduces per chunk over the tp group.
        """


@dataclass(frozen=True, slots=True)
class Term:
    """This rank's share of a micro-batch; the shares are summed over the whole step."""

    loss: torch.Tensor
    """0-dim."""
    figures_F: torch.Tensor
    """float64 without graph, in the order of the objective's `figures`."""


class Objective(Protocol):
    """An objective. `figures` names the values that it reports beside the loss; `over` names what `count` counts, by
    which the loss is divided.
    """

    @property
    def figures(self) -> tuple[str, ...]: ...

    @property
    def count(self) -> int | torch.Tensor: ...

    @property
    def over(self) -> str: ...

    def term(self, losses: TokenLosses, batch: dict[str, torch.Tensor]) -> Term:
        """Return this rank's share of a micro-batch. Collectives: those of what it asks of `losses`."""


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The sum of the losses of target tokens, over the targets of the whole step."""

    count: int | torch.Tensor
    """Targets of the whole step."""
    figures: tuple[str, ...] = ()
    over: str = "target tokens"
    """Name of what `count` counts."""

    def term(self, losses: TokenLosses, batch: dict[str, torch.Tensor]) -> Term:
        total = losses.total() / self.count
        return Term(total, total.new_zeros(0, dtype=torch.float64))


@dataclass(frozen=True, slots=True)
class EvaluatedCrossEntropy:
    """`CrossEntropy` without gradients, and the share of targets with the largest logit."""

    count: int | torch.Tensor
    """Targets of the evaluation set."""
    figures: tuple[str, ...] = ("token_accuracy",)
    over: str = "target tokens"
    """Name of what `count` counts."""

    def term(self, losses: TokenLosses, batch: dict[str, torch.Tensor]) -> Term:
        total, hits = losses.total_and_hits()
        return Term(total / self.count, hits.double().view(1) / self.count)


@dataclass(frozen=True, slots=True)
class LogProbabilities:
    """No objective: `figures_F` is the log-probability of each row's targets, `[B]`, on every rank that shares
    the row.
    """

    figures: tuple[str, ...] = ()
    count: int = 1
    over: str = "rows"

    def term(self, losses: TokenLosses, batch: dict[str, torch.Tensor]) -> Term:
        by_row_B = -losses.by_row()
        return Term(by_row_B.new_zeros(()), by_row_B)


@dataclass(frozen=True, slots=True)
class NextWords:
    """No objective: `figures_F` is the token that the model would choose at each row's only target, `[B]`, on every
    rank that shares the row.
    """

    figures: tuple[str, ...] = ()
    count: int = 1
    over: str = "rows"

    def term(self, losses: TokenLosses, batch: dict[str, torch.Tensor]) -> Term:
        word_B = losses.largest_by_row()
        return Term(word_B.new_zeros(()), word_B)
