"""Direct preference optimization (arXiv 2305.18290)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from expertmesh.step.objectives.pairs import PairObjective, reference_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Dpo(PairObjective):
    """-log sigmoid(beta · ((log π − log π_ref) of chosen − that of rejected)).

    `reference` `[B]` of the batch is log π_ref of each row's targets.
    """

    def scores(
        self, log_probability_B: torch.Tensor, targets_B: torch.Tensor, batch: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        return log_probability_B - reference_of("dpo", batch)

    def pair_losses(self, chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> torch.Tensor:
        return -F.logsigmoid(self.beta * (chosen_P - rejected_P))
