"""Simple preference optimization (arXiv 2405.14734): the mean log-probability of a response's tokens is its score."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from expertmesh.step.objectives.pairs import PairObjective


@dataclass(frozen=True, slots=True, kw_only=True)
class Simpo(PairObjective):
    """-log sigmoid(beta · (mean log π of chosen − that of rejected) − gamma)."""

    gamma: float

    def scores(
        self, log_probability_B: torch.Tensor, targets_B: torch.Tensor, batch: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        return log_probability_B / targets_B

    def pair_losses(self, chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> torch.Tensor:
        return -F.logsigmoid(self.beta * (chosen_P - rejected_P) - self.gamma)
