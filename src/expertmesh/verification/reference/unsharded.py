"""The unsharded model in plain torch: what `verify` and the tests compare sharded jobs with.

A model of transformers, or of PEFT around one, runs as it is in one process, with torch's own loss and optimizer.
Nothing here communicates; expertmesh's dispatch, expert layers, loss, norm and packing are not in it.

    B samples, S positions, V vocabulary, T real tokens, K top-k
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from expertmesh.data import IGNORE
from expertmesh.state.packed import units_together
from expertmesh.state.packed_format import rounded
from expertmesh.state.sharded_model import sharded

Sample = tuple[Tensor, Tensor]  # token ids and labels, each `[S]`
StepT = TypeVar("StepT")


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples as one right-padded batch, with a mask of the real tokens."""

    ids_BS: Tensor
    labels_BS: Tensor
    real_BS: Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device | str = "cpu") -> "Batch":
        ids = pad_sequence([ids for ids, _ in samples], batch_first=True)
        labels = pad_sequence([labels for _, labels in samples], batch_first=True, padding_value=IGNORE)
        real = pad_sequence([torch.ones_like(ids, dtype=torch.bool) for ids, _ in samples], batch_first=True)
        return cls(ids.to(device), labels.to(device), real.to(device))

    def real_tokens(self, value_BSX: Tensor) -> Tensor:
        """The real tokens `[T, X]`, sample after sample, of a value for each token of the batch."""
        return value_BSX.reshape(*self.ids_BS.shape, -1)[self.real_BS]

    def spread(self, choices_TK: Tensor) -> Tensor:
        """From real tokens to all places of the batch; -1 for padding."""
        choices = choices_TK.new_full((self.real_BS.numel(), choices_TK.shape[-1]), -1)
        choices[self.real_BS.flatten().to(choices.device)] = choices_TK
        return choices


def forward(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The logits `[B, S, V]`, and the cross entropy of each target, in fp32 or wider."""
    mask = None if bool(batch.real_BS.all()) else batch.real_BS.long()
    logits: Tensor = model(input_ids=batch.ids_BS, attention_mask=mask, use_cache=False).logits
    labels, predicting = batch.labels_BS[:, 1:], batch.labels_BS[:, 1:] != IGNORE
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits, F.cross_entropy(logits[:, :-1][predicting].to(wide), labels[predicting], reduction="none")


def preference_loss(token_losses: Tensor, batch: Batch, reference_B: Tensor, beta: float) -> Tensor:
    """The sum over pairs, rows 2p and 2p + 1 of `batch`, of DPO's loss (arXiv 2305.18290), in fp64; `token_losses` as
    `forward` gives them, `reference_B` the log-probability of each row under the reference.
    """
    reward_B = beta * (row_log_probabilities(token_losses, batch) - reference_B)
    return -F.logsigmoid(reward_B[0::2] - reward_B[1::2]).sum()


def row_log_probabilities(token_losses: Tensor, batch: Batch) -> Tensor:
    """`[B]` of the targets of each row, in fp64."""
    counts = (batch.labels_BS[:, 1:] != IGNORE).sum(dim=1).tolist()
    return -torch.stack([losses.double().sum() for losses in token_losses.split(counts)])


def backward(model: Any, samples: Sequence[Sample]) -> float:
    """Add the gradients of one step to the model's, each sample run by itself; the step's mean loss per target."""
    targets = sum(int((labels[1:] != IGNORE).sum()) for _, labels in samples)
    total = 0.0
    for sample in samples:
        loss = forward(model, Batch.of([sample]))[1].sum() / targets
        loss.backward()
        total += float(loss.detach())
    return total


@dataclass(frozen=True, slots=True)
class UnshardedRun:
    """Of each step the loss and the norm before clipping; the first step's gradients, before clipping, if kept; and how
    far all steps have moved the weights.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    moved: dict[str, Tensor]


def train(
    trained: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    steps: Iterable[StepT],
    backward: Callable[[StepT], float],
    *,
    max_norm: float | None = None,
    keep_gradients: bool = True,
) -> UnshardedRun:
    """Clipped optimizer steps on the parameters `trained`; `backward` leaves a step's gradients on them.

    The weights at the end are those of `trained`.
    """
    run, before = UnshardedRun([], [], {}, {}), {name: p.detach().clone() for name, p in trained.items()}
    for step in steps:
        run.losses.append(backward(step))
        if keep_gradients and not run.gradients:
            run.gradients.update((name, p.grad.clone()) for name, p in trained.items() if p.grad is not None)
        run.norms.append(_clip([p.grad for p in trained.values() if p.grad is not None], max_norm))
        optimizer.step()
        optimizer.zero_grad()
    run.moved.update((name, p.detach() - before[name]) for name, p in trained.items())
    return run


def _clip(gradients: list[Tensor], max_norm: float | None) -> float:
    """The norm of all gradients, summed in fp64: torch's own in fp32 can be off by 1e-4 on a CPU."""
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    if max_norm is not None:
        for gradient in gradients:
            gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))
    return norm


@torch.no_grad()
def round_frozen(model: nn.Module, like: nn.Module) -> None:
    """Give the weights of a plain model the values that `like`, which is sharded, keeps of them in codes."""
    for name, kind in (sharded(like).frozen_formats or {}).items():
        if not kind.published:
            parameter = model.get_parameter(name)
            for units in parameter.split(units_together(kind, parameter.device)):
                units.copy_(rounded(units, kind))
