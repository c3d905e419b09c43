"""Learn the probabilities of a teacher: a second model of the same vocabulary, sharded over the same mesh, frozen.

The teacher runs over all micro-batches of a step first. What stays of it are the hidden states that predict targets;
both models' logits exist for a chunk of targets at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from expertmesh.parallel.sequence import Batch
from expertmesh.step.forward_backward import evaluate_terms
from expertmesh.step.objective import Distilling, Term, TokenLosses


@dataclass(frozen=True, slots=True, kw_only=True)
class Distill:
    """T² · KL(teacher || model) at temperature T, plus `sft_weight` times the cross-entropy: each summed over target
    tokens, over the targets of the whole step.
    """

    count: int
    """Targets of the whole step."""
    options: Distilling
    teacher: Sequence[TokenLosses] = ()
    """The teacher's for each micro-batch; none on ranks without the last pipeline stage."""
    figures: tuple[str, ...] = ()
    over: str = "target tokens"
    """Name of what `count` counts."""

    def beside(self, teacher: nn.Module, batches: Sequence[Batch]) -> tuple["Distill", Sequence[Batch]]:
        """Return the objective for a step or evaluation of `batches`, and these with an entry that numbers them.

        Collectives: every rank calls it; those of the teacher's forward, without gradients.
        """
        terms = evaluate_terms(teacher, batches, _Keep())
        numbered = [
            {**batch, "teacher": torch.full_like(batch["input_ids"][:, 0], number)}
            for number, batch in enumerate(batches)
        ]
        return replace(self, teacher=[term.losses for term in terms if isinstance(term, _Kept)]), numbered

    def term(self, losses: TokenLosses, batch: dict[str, torch.Tensor]) -> Term:
        # The host has just waited for the targets' places: this wait finds the device idle.
        total = losses.distilled(self.teacher[int(batch["teacher"][0])], self.options)
        return Term(total / self.count, total.new_zeros(0, dtype=torch.float64))


@dataclass(frozen=True, slots=True)
class _Kept(Term):
    """A term of nothing, with the `TokenLosses` of its micro-batch."""

    losses: TokenLosses


@dataclass(frozen=True, slots=True)
class _Keep:
    """No objective: keeps the `TokenLosses`, with the hidden states of the targets."""

    figures: tuple[str, ...] = ()
    count: int = 1
    over: str = "target tokens"

    def term(self, losses: TokenLosses, batch: dict[str, torch.Tensor]) -> Term:
        nothing = torch.zeros((), dtype=torch.float64, device=batch["labels"].device)
        return _Kept(nothing, nothing.new_zeros(0), losses)
