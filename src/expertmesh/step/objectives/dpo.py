"""Direct preference optimization (arXiv 2305.18290)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from expertmesh.config.errors import InputError
from expertmesh.step.objectives.pairs import PairObjective


@dataclass(frozen=True, slots=True, kw_only=True)
class Dpo(PairObjective):
    """-log sigmoid(beta · ((log π − log π_ref) of chosen − that of rejected)).

    `reference` `[B]` of the batch is log π_ref of each row's targets.
    """

    def scores(
        self, log_probability_B: torch.Tensor, targets_B: torch.Tensor, batch: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        if "reference" not in batch:
            raise InputError(
                "a batch for objective dpo has no reference; give the log-probability of each row's targets under the "
                "reference model",
                key="data.no-reference",
            )
        return log_probability_B - batch["reference"].double()

    def pair_losses(self, chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> torch.Tensor:
        return -F.logsigmoid(self.beta * (chosen_P - rejected_P))
