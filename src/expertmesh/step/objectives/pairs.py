"""Compute a loss of responses, of preference pairs above all, from whole rows that no rank may hold.

The loss is a function of the log-probabilities of responses, of a pair those of its two. These are summed over all
ranks first, without gradients; the derivative by each sum then weights the tokens of its row in the gradient.

    B rows of a micro-batch, P pairs of rows
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from expertmesh.config.errors import InputError
from expertmesh.config.objective import REWARDS
from expertmesh.step.objective import IGNORED, Term, TokenLosses


@dataclass(frozen=True, slots=True, kw_only=True)
class PairObjective(ABC):
    """The mean of `pair_losses` over the pairs of the whole step.

    Rows 2p and 2p + 1 of a micro-batch are the chosen and the rejected row of a pair. A pair without targets only keeps
    a rank busy. `beta` times the score of a row is its reward, which is reported.
    """

    beta: float
    count: int
    """Pairs of the whole step."""
    figures: ClassVar[tuple[str, ...]] = REWARDS
    over: ClassVar[str] = "pairs"
    """Name of what `count` counts."""

    @abstractmethod
    def scores(
        self, log_probability_B: torch.Tensor, targets_B: torch.Tensor, batch: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return what the loss compares of each row, `[B]`, by the log-probability and the number of its targets.

        A row without targets has 0 and 1; its score must be finite.
        """

    @abstractmethod
    def pair_losses(self, chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> torch.Tensor:
        """Return the loss of each pair, `[P]`, by the scores of its rows; differentiable, and finite at -1 and -1."""

    def term(self, losses: TokenLosses, batch: dict[str, torch.Tensor]) -> Term:
        """Return this rank's share of a micro-batch. Collectives: those of `term_of_rows`."""
        targets_B = (batch["labels"][:, 1:] != IGNORED).sum(dim=1)
        real_P = (targets_B > 0).view(-1, 2).all(dim=1)

        def of_rows(log_probability_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            score_B = self.scores(log_probability_B, targets_B.clamp(min=1), batch)
            score_2P = score_B.view(-1, 2).T.where(real_P, -1.0)
            loss = (self.pair_losses(*score_2P) * real_P).sum() / self.count
            reward_2P = self.beta * score_2P.detach() * real_P
            margin_P = reward_2P[0] - reward_2P[1]
            figures = torch.stack([*reward_2P.sum(dim=1), (margin_P > 0).sum().double(), margin_P.sum()])
            return loss, figures / self.count

        return term_of_rows(losses, of_rows)


def term_of_rows(losses: TokenLosses, of_rows: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Term:
    """Return this rank's share of a micro-batch, by `of_rows`: from the log-probability of each row `[B]`, of all ranks
    that share it, to the loss, differentiable, and the figures.

    Collectives: those of `by_row`, in training also of `total`.
    """
    training = torch.is_grad_enabled()
    log_probability_B = (-losses.by_row()).requires_grad_(training)
    loss, figures_F = of_rows(log_probability_B)
    share = loss.detach() / losses.ranks
    if training:
        (pull_B,) = torch.autograd.grad(loss, log_probability_B)
        linear = losses.total(-pull_B)
        # Of this value, with the gradient of the linear one.
        share = linear + (share - linear.detach())
    return Term(share, figures_F / losses.ranks)


def reference_of(objective: str, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return log π_ref of each row's targets, `[B]` float64. Raises `InputError` for a batch without it."""
    if "reference" not in batch:
        raise InputError(
            f"a batch for objective {objective} has no reference; give the log-probability of each row's targets under "
            "the reference model",
            key="data.no-reference",
        )
    return batch["reference"].double()
