"""What an optimizer step minimises: a sum over all ranks and micro-batches, of which each rank computes a share.

An objective gets the losses of a micro-batch's target tokens, one way or another, and gives this rank's share. What it
divides by is of the whole step, so shares add up to the step's value, in every layout, and so do their gradients.

    B rows of a micro-batch, S positions, P pairs of rows, F figures
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from expertmesh.config.errors import InputError

IGNORED = -100


class TokenLosses(Protocol):
    """The cross-entropies of one micro-batch's target tokens, computed when they are asked for.

    `ranks` share its rows (cp × tp), each with some of the positions.
    """

    @property
    def ranks(self) -> int: ...

    def total(self, weight_B: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's share of their sum, each times the weight of its row: 0-dim. With gradients where they are
        enabled, which take weights as constants. Every rank of a tp group calls it: two small all-reduces a chunk.
        """

    def by_row(self) -> torch.Tensor:
        """`[B]` float64, without gradients: the sum over each row, of all ranks that share it. They all call it: one
        all-reduce over cp, and what `total` issues.
        """

    def largest_by_row(self) -> torch.Tensor:
        """`[B]` float64, of rows with one target each: the word with the largest logit in its place. Collective
        as `by_row`.
        """

    def total_and_hits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`total` without gradients, and this rank's share of how many targets have the largest logit. Collective as
        `total`, and two more all-reduces a chunk.
        """


@dataclass(frozen=True, slots=True)
class Term:
    """This rank's share of a micro-batch: `loss` 0-dim, and `figures_F` float64 without graph, by the objective's
    `figures`; sums over the whole step, like the loss.
    """

    loss: torch.Tensor
    figures_F: torch.Tensor


class Objective(Protocol):
    """`figures` are the names of what it reports beside the loss, `over` what `count` counts: what it is divided by."""

    @property
    def figures(self) -> tuple[str, ...]: ...

    @property
    def count(self) -> int | torch.Tensor: ...

    @property
    def over(self) -> str: ...

    def term(self, losses: TokenLosses, batch: dict[str, torch.Tensor]) -> Term:
        """This rank's share of a micro-batch; as collective as what it asks of `losses`."""


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Losses of target tokens, summed, over the targets of the whole step."""

    count: int | torch.Tensor
    figures: tuple[str, ...] = ()
    over: str = "target tokens"

    def term(self, losses: TokenLosses, batch: dict[str, torch.Tensor]) -> Term:
        total = losses.total() / self.count
        return Term(total, total.new_zeros(0, dtype=torch.float64))


@dataclass(frozen=True, slots=True)
class EvaluatedCrossEntropy:
    """`CrossEntropy` without gradients, and the share of targets that the model would have chosen."""

    count: int | torch.Tensor
    figures: tuple[str, ...] = ("token_accuracy",)
    over: str = "target tokens"

    def term(self, losses: TokenLosses, batch: dict[str, torch.Tensor]) -> Term:
        total, hits = losses.total_and_hits()
        return Term(total / self.count, hits.double().view(1) / self.count)


@dataclass(frozen=True, slots=True)
class Dpo:
    """Direct preference optimization (arXiv 2305.18290), the mean over the pairs of the whole step of
    -log sigmoid(beta · ((log π − log π_ref) of chosen − that of rejected)).

    Rows 2p and 2p + 1 of a micro-batch are the chosen and the rejected one of a pair; `reference` `[B]` of the batch is
    log π_ref of each row's targets. A pair without targets only keeps a rank busy. The sigmoid is of sums over whole
    rows, which no rank may have: they are computed first, and give each row the weight of its tokens in the gradient.
    """

    beta: float
    count: int
    figures: tuple[str, ...] = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
    over: str = "pairs"

    def term(self, losses: TokenLosses, batch: dict[str, torch.Tensor]) -> Term:
        if "reference" not in batch:
            raise InputError(
                "a batch for objective dpo has no reference; give the log-probability of each row's targets under the "
                "reference model",
                key="data.no-reference",
            )
        reference_B, labels = batch["reference"], batch["labels"]
        real_P = (labels[:, 1:] != IGNORED).any(dim=1).view(-1, 2).all(dim=1)
        rewards_2P = self.beta * (-losses.by_row() - reference_B.double()).view(-1, 2).T * real_P
        margin_P = rewards_2P[0] - rewards_2P[1]
        value = (-F.logsigmoid(margin_P) * real_P).sum()
        accuracy = (margin_P > 0).sum()
        figures = torch.stack([*rewards_2P.sum(dim=1), accuracy.double(), margin_P.sum()])
        shared = losses.ranks * self.count
        loss = value / shared
        if torch.is_grad_enabled():
            pull_P = self.beta * torch.sigmoid(-margin_P) * real_P / self.count
            linear = losses.total(torch.stack([pull_P, -pull_P], dim=1).view(-1))
            # Of this value, with the gradient of the linear one.
            loss = linear + (loss - linear.detach())
        return Term(loss, figures / shared)


@dataclass(frozen=True, slots=True)
class LogProbabilities:
    """Nothing is minimised: `figures_F` is the log-probability of each row's targets, `[B]`, on every rank that shares
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
    """Nothing is minimised: `figures_F` is the word that the model would choose in the place of each row's only target,
    `[B]`, on every rank that shares the row.
    """

    figures: tuple[str, ...] = ()
    count: int = 1
    over: str = "rows"

    def term(self, losses: TokenLosses, batch: dict[str, torch.Tensor]) -> Term:
        word_B = losses.largest_by_row()
        return Term(word_B.new_zeros(()), word_B)
