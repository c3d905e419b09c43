"""Odds ratio preference optimization (arXiv 2403.07691): sft of the chosen response, and its odds over the rejected."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from expertmesh.step.objectives.pairs import PairObjective

_LARGEST = -1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Orpo(PairObjective):
    """-log P of chosen − beta · log sigmoid(log(odds of chosen / odds of rejected)), with odds = P / (1 − P) and
    log P the mean log-probability of a response's tokens.
    """

    def scores(
        self, log_probability_B: torch.Tensor, targets_B: torch.Tensor, batch: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        return log_probability_B / targets_B

    def pair_losses(self, chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> torch.Tensor:
        return -chosen_P - self.beta * F.logsigmoid(_log_odds(chosen_P) - _log_odds(rejected_P))


def _log_odds(score_P: torch.Tensor) -> torch.Tensor:
    # A response that fp32 calls certain has infinite odds, and would have a gradient of NaN.
    score_P = score_P.clamp(max=_LARGEST)
    return score_P - torch.log(-torch.expm1(score_P))
