"""Compute the cross-entropy under tp without full logits: each rank has those of its rows of the output embedding.

The ranks of a tp group exchange two numbers per target token and the largest logit, never another logit. Their losses
are equal; what one rank reports of them is its share. Gradients are full: the logits' gradient is each rank's own part,
those of hidden states and of unsplit parameters are partial sums (parallel/sequence.py).

    C tokens of a chunk, V vocabulary, W rows of it on this rank
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from expertmesh.compat import parameter_slots
from expertmesh.config.errors import InputError
from expertmesh.state.model_view import sharded
from expertmesh.state.patching import exchanged
from expertmesh.step.base_model import head_of

# Parameters of a head with one row per word; an adapter's A has none.
_ROWS = ("weight", "bias", "lora_B")


@dataclass(frozen=True, slots=True)
class VocabularyShare:
    """The rows of the output embedding that this rank computes with. Ranks may have different numbers of rows."""

    group: dist.ProcessGroup
    start: int
    """The first of this rank's rows."""
    stop: int
    """The row after the last."""

    @property
    def ranks(self) -> int:
        return self.group.size()

    def split(self, head: nn.Module) -> "SplitHead":
        """Return `head` by this rank's rows: views, whose gradients reach the full parameters (gathered by FSDP2
        before).
        """
        whole = {leaf: p for leaf in _ROWS if (p := parameter_slots(head).get(leaf)) is not None}
        return SplitHead(self, head, whole, {leaf: p[self.start : self.stop] for leaf, p in whole.items()})

    def cross_entropy(self, logits_CW: torch.Tensor, target_C: torch.Tensor) -> torch.Tensor:
        """Return `[C]`, equal on every rank of the group.

        Collectives: all ranks of the tp group call it; two small all-reduces.
        """
        if logits_CW.shape[-1] != self.stop - self.start:
            raise InputError(
                f"parallel.tp: the model makes {logits_CW.shape[-1]} logits of {self.stop - self.start} rows of its "
                "output embedding, so the vocabulary cannot be split; set parallel.tp to 1",
                key="layout.tp-output-embedding",
            )
        loss_C: torch.Tensor = _CrossEntropy.apply(logits_CW, target_C - self.start, self.group)
        return loss_C

    def argmax(self, logits_CW: torch.Tensor) -> torch.Tensor:
        """Return the first token with the largest logit, `[C]`, equal on every rank of the group.

        Collectives: all ranks of the tp group call it; two small all-reduces.
        """
        highest_C, place_C = logits_CW.max(-1)
        most_C = highest_C.clone()
        dist.all_reduce(most_C, dist.ReduceOp.MAX, group=self.group)
        word_C = torch.where(highest_C == most_C, place_C + self.start, torch.iinfo(torch.int64).max)
        dist.all_reduce(word_C, dist.ReduceOp.MIN, group=self.group)
        return word_C


@dataclass(frozen=True, slots=True)
class SplitHead:
    """An output embedding and this rank's rows of its parameters."""

    share: VocabularyShare
    head: nn.Module
    whole: dict[str, nn.Parameter]
    """Its parameters, by their names in it."""
    rows: dict[str, torch.Tensor]
    """This rank's rows of each, by the same names."""

    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return this rank's rows of one of the head's parameters, and any other parameter unchanged."""
        leaf = next((leaf for leaf, whole in self.whole.items() if whole is parameter), None)
        return parameter if leaf is None else self.rows[leaf]

    def computing(self) -> AbstractContextManager[None]:
        """Let the head compute with this rank's rows inside the block; its code and name stay."""
        return exchanged(parameter_slots(self.head), self.rows)


def vocabulary_share(model: nn.Module) -> VocabularyShare | None:
    """Return this rank's share, or None where tp is 1."""
    mesh = sharded(model).mesh
    if mesh is None or mesh.layout.tp == 1:
        return None
    rows, tp, rank = head_of(model).out_features, mesh.layout.tp, mesh.coordinate("tp")
    return VocabularyShare(mesh.dense.get_group("tp"), rows * rank // tp, rows * (rank + 1) // tp)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_CW: torch.Tensor, place_C: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Return the loss of each target, `[C]`, and save its gradient.

        Args:
            logits_CW: This rank's part of the vocabulary, W columns.
            place_C: The target's column on this rank, outside of `range(W)` if another rank has it.

        Collectives: every rank of `group` issues two all-reduces.
        """
        rows = logits_CW.shape[-1]
        here_C = (place_C >= 0) & (place_C < rows)
        place_C1 = place_C.clamp(0, rows - 1).unsqueeze(1)
        highest_C = logits_CW.amax(-1)
        dist.all_reduce(highest_C, dist.ReduceOp.MAX, group=group)
        shifted_CW = logits_CW - highest_C.unsqueeze(1)
        # Not a product: another row's logit may be infinite.
        chosen_C = torch.where(here_C, shifted_CW.gather(1, place_C1).squeeze(1), 0.0)
        exp_CW = shifted_CW.exp_()
        sums_2C = torch.stack([exp_CW.sum(-1), chosen_C])
        dist.all_reduce(sums_2C, group=group)
        total_C, chosen_C = sums_2C
        gradient_CW = exp_CW.div_(total_C.unsqueeze(1))
        gradient_CW.scatter_add_(1, place_C1, -here_C.to(gradient_CW.dtype).unsqueeze(1))
        ctx.save_for_backward(gradient_CW)
        loss_C: torch.Tensor = total_C.log() - chosen_C
        return loss_C

    @staticmethod
    def backward(ctx: Any, grad_C: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient_CW,) = ctx.saved_tensors
        return gradient_CW * grad_C.unsqueeze(1), None, None
