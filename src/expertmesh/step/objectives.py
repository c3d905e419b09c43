"""Objectives of responses (pairs, or judged ones) and of a teacher; `objective_of` makes what a configuration names.

A loss of responses is a function of their log-probabilities, and no rank may hold a full row. These are summed over
all ranks first, without gradients; the derivative by each sum then weights the tokens of its row in the gradient.

    dpo      direct preference optimization, arXiv 2305.18290
    simpo    simple preference optimization, arXiv 2405.14734: a mean log-probability is the score of a response
    orpo     odds ratio preference optimization, arXiv 2403.07691: sft of the chosen response, and its odds over the
             rejected
    kto      Kahneman-Tversky optimization, arXiv 2402.01306: single responses that a label calls desirable or not
    reward   the Bradley-Terry model of preferences, of a reward model; TRL's RewardTrainer
    distill  the probabilities of a teacher: a second model of the same vocabulary, sharded over the same mesh, frozen

    B rows of a micro-batch, P pairs of rows
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from expertmesh.config import ObjectiveConfig
from expertmesh.config.errors import InputError
from expertmesh.config.objective import OBJECTIVES, REWARDS
from expertmesh.parallel.sequence import Batch
from expertmesh.step.forward_backward import evaluate_terms
from expertmesh.step.loss import IGNORED, CrossEntropy, Distilling, EvaluatedCrossEntropy, Objective, Term, TokenLosses

# The largest mean log-probability that fp32 tells from certainty.
_LARGEST = -1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class PairObjective(Objective):
    """The mean of `pair_losses` over the pairs of the whole step.

    Rows 2p and 2p + 1 of a micro-batch are the chosen and the rejected row of a pair. A pair without targets only keeps
    a rank busy. `beta` times the score of a row is its reward, which is reported.
    """

    beta: float
    figures: ClassVar[tuple[str, ...]] = REWARDS
    over: ClassVar[str] = "pairs"

    def scores(
        self, log_probability_B: torch.Tensor, targets_B: torch.Tensor, batch: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return what the loss compares of each row, `[B]`; here the mean log-probability of its targets.

        A row without targets has the log-probability 0 and one of them; its score must be finite.
        """
        return log_probability_B / targets_B

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Simpo(PairObjective):
    """-log sigmoid(beta · (mean log π of chosen − that of rejected) − gamma)."""

    gamma: float

    def pair_losses(self, chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> torch.Tensor:
        return -F.logsigmoid(self.beta * (chosen_P - rejected_P) - self.gamma)


@dataclass(frozen=True, slots=True, kw_only=True)
class Orpo(PairObjective):
    """-log P of chosen − beta · log sigmoid(log(odds of chosen / odds of rejected)), with odds = P / (1 − P) and
    log P the mean log-probability of a response's tokens.
    """

    def pair_losses(self, chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> torch.Tensor:
        return -chosen_P - self.beta * F.logsigmoid(_log_odds(chosen_P) - _log_odds(rejected_P))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward(PairObjective):
    """-log sigmoid(r(chosen) − r(rejected)), r the classifier's output at a row's last token, which `TokenLosses`
    gives in place of a log-probability.
    """

    beta: float = 1.0

    def scores(
        self, log_probability_B: torch.Tensor, targets_B: torch.Tensor, batch: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        return log_probability_B

    def pair_losses(self, chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> torch.Tensor:
        return -F.logsigmoid(chosen_P - rejected_P)


def _log_odds(score_P: torch.Tensor) -> torch.Tensor:
    """Return log(P / (1 - P)) of log P."""
    # A response that fp32 calls certain has infinite odds, and would have a gradient of NaN.
    score_P = score_P.clamp(max=_LARGEST)
    return score_P - torch.log(-torch.expm1(score_P))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kto(Objective):
    """The mean over the rows of the whole step of w · (1 − σ(±beta · (log π − log π_ref − kl))): + and
    `desirable_weight` for desirable rows, − and `undesirable_weight` for the others.

    `kl` is how far the model is from its reference on the prompts of a step in general, estimated by mismatched rows:
    prompts with the completions of other rows. `desirable` `[B]` bool of the batch is the label of each row,
    `reference` `[B]` log π_ref of its targets.
    """

    beta: float
    desirable_weight: float
    undesirable_weight: float
    desirable: int = 0
    """Desirable rows of the whole step."""
    kl: torch.Tensor | None = None
    """The mean of log π − log π_ref over the mismatched rows of the whole step, 0 if it is less: 0-dim float64."""
    figures: ClassVar[tuple[str, ...]] = OBJECTIVES["kto"].evaluated
    over: ClassVar[str] = "rows"

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
        (grad_B,) = torch.autograd.grad(loss, log_probability_B)
        linear = losses.total(-grad_B)
        # The value of the loss with the gradient of the linear function: its derivative by each row is the loss's.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Distill(Objective):
    """T² · KL(teacher || model) at temperature T, plus `sft_weight` times the cross-entropy: each summed over target
    tokens, over the targets of the whole step.

    The teacher runs over all micro-batches of a step first. What stays of it are the hidden states that predict
    targets; both models' logits exist for a chunk of targets at a time.
    """

    options: Distilling
    """The temperature, the direction and the factor of the cross-entropy."""
    teacher: Sequence[TokenLosses] = ()
    """The teacher's for each micro-batch; none on ranks without the last pipeline stage."""

    def beside(self, teacher: nn.Module, batches: Sequence[Batch]) -> tuple["Distill", Sequence[Batch]]:
        """Return the objective for a step or evaluation of `batches`, and these with an entry that numbers them.

        Collectives: every rank calls it; those of the teacher's forward, without gradients.
        """
        terms = evaluate_terms(teacher, batches, _RecordLosses())
        numbered = [
            {**batch, "teacher": torch.full_like(batch["input_ids"][:, 0], number)}
            for number, batch in enumerate(batches)
        ]
        return replace(self, teacher=[term.losses for term in terms if isinstance(term, _RecordedLosses)]), numbered

    def term(self, losses: TokenLosses, batch: dict[str, torch.Tensor]) -> Term:
        # The host has just waited for the targets' places: this wait finds the device idle.
        total = losses.distilled(self.teacher[int(batch["teacher"][0])], self.options)
        return Term(total / self.count, total.new_zeros(0, dtype=torch.float64))


@dataclass(frozen=True, slots=True)
class _RecordedLosses(Term):
    """A term of nothing, with the `TokenLosses` of its micro-batch."""

    losses: TokenLosses
    """The losses of the micro-batch, computed on request."""


class _RecordLosses(Objective):
    """No objective: records the `TokenLosses`, with the hidden states of the targets."""

    def term(self, losses: TokenLosses, batch: dict[str, torch.Tensor]) -> Term:
        nothing = torch.zeros((), dtype=torch.float64, device=batch["labels"].device)
        return _RecordedLosses(nothing, nothing.new_zeros(0), losses)


OF_PAIRS: dict[str, type[PairObjective]] = {"dpo": Dpo, "simpo": Simpo, "orpo": Orpo, "reward": Reward}


def objective_of(config: ObjectiveConfig, *, rows: int, target_tokens: int, evaluated: bool = False) -> Objective:
    """Return the objective of a step with that many rows and targets, or of an evaluation, with its figures."""
    if config.teacher is not None:
        options = Distilling(config.temperature, config.kl == "reverse", config.sft_weight)
        return Distill(count=target_tokens, options=options)
    if config.pairs:
        return OF_PAIRS[config.name](count=rows, **config.options)
    if config.judged:
        return Kto(count=rows, **config.options)
    return EvaluatedCrossEntropy(target_tokens) if evaluated else CrossEntropy(target_tokens)
