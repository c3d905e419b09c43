"""Kahneman-Tversky optimization (arXiv 2402.01306): single responses that a label calls desirable or not.

Each response is compared with how far the model is from its reference on the prompts of a step in general, which is
estimated by mismatched rows: prompts with the completions of other rows.

    B rows of a micro-batch
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from expertmesh.config.objective import OBJECTIVES
from expertmesh.step.objective import IGNORED, Term, TokenLosses
from expertmesh.step.objectives.pairs import reference_of, term_of_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Kto:
    """The mean over the rows of the whole step of w · (1 − σ(±beta · (log π − log π_ref − kl))): + and
    `desirable_weight` for desirable rows, − and `undesirable_weight` for the others.

    `desirable` `[B]` bool of the batch is the label of each row, `reference` `[B]` log π_ref of its targets.
    """

    beta: float
    desirable_weight: float
    undesirable_weight: float
    count: int
    """Rows of the whole step."""
    desirable: int = 0
    """Desirable rows of the whole step."""
    kl: torch.Tensor | None = None
    """The mean of log π − log π_ref over the mismatched rows of the whole step, 0 if it is less: 0-dim float64."""
    figures: ClassVar[tuple[str, ...]] = OBJECTIVES["kto"].evaluated
    over: ClassVar[str] = "rows"
    """Name of what `count` counts."""

    def measured(self, ratios: Iterable[torch.Tensor], desirable: int, device: torch.device) -> "Kto":
        """Return the objective with its `kl`, by this rank's log π − log π_ref of mismatched rows.

        Collectives: every rank calls it; one all-reduce of a number.
        """
        total = sum((each.sum() for each in ratios), start=torch.zeros((), dtype=torch.float64, device=device))
        torch.distributed.all_reduce(total)
        return replace(self, kl=(total / self.count).clamp(min=0), desirable=desirable)

    def term(self, losses: TokenLosses, batch: Mapping[str, torch.Tensor]) -> Term:
        """Return this rank's share of a micro-batch. Collectives: those of `term_of_rows`."""
        assert self.kl is not None, "no mismatched rows were measured"
        kl, reference_B, desirable_B = self.kl, reference_of("kto", batch), batch["desirable"]
        real_B = (batch["labels"][:, 1:] != IGNORED).any(dim=1)
        good_B = desirable_B.double()  # a factor in fp32 would be rounded
        weight_B = (self.desirable_weight * good_B + self.undesirable_weight * (1 - good_B)) * real_B

        def of_rows(log_probability_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ratio_B = (log_probability_B - reference_B).where(real_B, 0.0)
            # 1 − σ(x) is σ(−x), without cancellation where x is large.
            loss = (weight_B * torch.sigmoid(self.beta * (1 - 2 * good_B) * (ratio_B - kl))).sum() / self.count
            reward_B, counts = self.beta * ratio_B.detach(), (self.desirable, self.count - self.desirable)
            chosen, rejected = (
                (reward_B * (real_B & (desirable_B == wanted))).sum() / max(1, count)
                for wanted, count in zip((True, False), counts, strict=True)
            )
            return loss, torch.stack([chosen, rejected, chosen - rejected, kl * real_B.sum() / self.count])

        return term_of_rows(losses, of_rows)
