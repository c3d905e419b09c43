"""Run an unsharded model in plain torch. `verify` and the tests compare sharded jobs with it.

A model of transformers, or of PEFT around one, runs unchanged in one process, with torch's loss and optimizer. Nothing
here communicates, or uses expertmesh's dispatch, expert layers, loss, norm or packing.

    B samples, S positions, V vocabulary, T real tokens, K top-k
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from expertmesh.config import ObjectiveConfig
from expertmesh.data import IGNORE
from expertmesh.state.codes import rounded
from expertmesh.state.model_view import sharded
from expertmesh.state.packed import units_together

if TYPE_CHECKING:
    from expertmesh.verification.setup import PlacedSample, StepData

Sample = tuple[Tensor, Tensor]  # token ids and labels, each `[S]`
StepT = TypeVar("StepT")


@dataclass(frozen=True, slots=True)
class PaddedSamples:
    """Samples as one right-padded batch."""

    ids_BS: Tensor
    """The token ids; 0 for padding."""
    labels_BS: Tensor
    """The labels; `IGNORE` for padding."""
    real_BS: Tensor
    """True for real tokens, False for padding."""
    of_images: Mapping[str, Tensor] = field(default_factory=dict)
    """Inputs of the model beside the tokens of images."""

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device | str = "cpu") -> "PaddedSamples":
        """Return the batch of `samples`, one row each, on `device`."""
        ids = pad_sequence([ids for ids, _ in samples], batch_first=True)
        labels = pad_sequence([labels for _, labels in samples], batch_first=True, padding_value=IGNORE)
        real = pad_sequence([torch.ones_like(ids, dtype=torch.bool) for ids, _ in samples], batch_first=True)
        return cls(ids.to(device), labels.to(device), real.to(device))

    def with_images(self, data: "StepData", samples: "Sequence[PlacedSample]") -> "PaddedSamples":
        """Return the batch with the images of these samples of `data`.

        If other ranks' samples have some and these have none, it gets a blank one: gradients are summed over ranks.
        """
        if data.form.images is None:
            return self
        batch = {"input_ids": self.ids_BS, "labels": self.labels_BS, "real_tokens": self.real_BS}
        batch = {key: value.cpu() for key, value in batch.items()} | {"attention_mask": self.real_BS.long().cpu()}
        rows = [np.array([sample.index]) for sample in samples]
        data.form.images.add_to(batch, data.dataset, rows, 0, needed=data.dataset.has_images)
        ids, labels, real = (batch.pop(key).to(self.ids_BS.device) for key in ("input_ids", "labels", "real_tokens"))
        return PaddedSamples(ids, labels, real, {key: value.to(ids.device) for key, value in batch.items()})

    def real_tokens(self, value_BSX: Tensor) -> Tensor:
        """Return the values of real tokens, `[T, X]`, sample after sample."""
        return value_BSX.reshape(*self.ids_BS.shape, -1)[self.real_BS]

    def spread(self, choices_TK: Tensor) -> Tensor:
        """Return the values of real tokens at all positions of the batch, `[B * S, K]`, with -1 for padding."""
        choices = choices_TK.new_full((self.real_BS.numel(), choices_TK.shape[-1]), -1)
        choices[self.real_BS.flatten().to(choices.device)] = choices_TK
        return choices


def forward(model: Any, batch: PaddedSamples) -> tuple[Tensor, Tensor]:
    """Return the logits `[B, S, V]`, and the cross entropy of each target, `[targets]` in fp32 or wider.

    Of a reward model both are of rows: the reward at all positions, `[B, S, 1]`, and minus the reward, `[B]`.
    """
    mask = None if bool(batch.real_BS.all()) else batch.real_BS.long()
    if "ForSequenceClassification" in type(model).__name__:
        pad = model.config.get_text_config().pad_token_id  # by which the class finds the last token
        ids_BS = batch.ids_BS.masked_fill(~batch.real_BS, pad)
        reward_B1: Tensor = model(input_ids=ids_BS, attention_mask=mask, use_cache=False).logits
        wide_B = reward_B1.squeeze(1).to(torch.promote_types(reward_B1.dtype, torch.float32))
        return reward_B1.unsqueeze(1).expand(-1, ids_BS.shape[1], -1), -wide_B
    inputs = {"input_ids": batch.ids_BS, "attention_mask": mask, **batch.of_images}
    logits: Tensor = model(**inputs, use_cache=False).logits
    labels, predicting = batch.labels_BS[:, 1:], batch.labels_BS[:, 1:] != IGNORE
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits, F.cross_entropy(logits[:, :-1][predicting].to(wide), labels[predicting], reduction="none")


def preference_loss(
    token_losses: Tensor, batch: PaddedSamples, objective: ObjectiveConfig, reference_B: Tensor | None
) -> Tensor:
    """Return the loss of an objective of pairs, summed over pairs, in fp64, as its paper has it.

    Args:
        token_losses: What `forward` returns.
        batch: Rows 2p (chosen) and 2p + 1 (rejected) are pair p.
        reference_B: The log-probability of each row under the reference, for dpo.
    """
    if objective.name == "reward":
        return -F.logsigmoid(-token_losses[0::2].double() + token_losses[1::2].double()).sum()
    beta, total_B = objective.beta, row_log_probabilities(token_losses, batch)
    mean_B = total_B / (batch.labels_BS[:, 1:] != IGNORE).sum(dim=1)
    chosen, rejected = mean_B[0::2], mean_B[1::2]
    match objective.name:
        case "dpo":
            assert reference_B is not None
            reward_B = beta * (total_B - reference_B)
            return -F.logsigmoid(reward_B[0::2] - reward_B[1::2]).sum()
        case "simpo":
            return -F.logsigmoid(beta * (chosen - rejected) - objective.gamma).sum()
        case "orpo":
            odds_B = mean_B.exp() / (1 - mean_B.exp())
            return -chosen.sum() - beta * (odds_B[0::2] / odds_B[1::2]).log().sigmoid().log().sum()
    raise AssertionError(f"objective {objective.name} is not of pairs, or has no plain loss here")


def judged_loss(
    token_losses: Tensor,
    batch: PaddedSamples,
    objective: ObjectiveConfig,
    reference_B: Tensor,
    desirable_B: Tensor,
    kl: Tensor,
) -> Tensor:
    """Return the loss of kto, summed over rows, in fp64, as its paper has it.

    Args:
        token_losses: The cross entropies, as `forward` returns them.
        reference_B: The log-probability of each row under the reference.
        desirable_B: The label of each row.
        kl: The mean log-ratio of mismatched rows, 0 if it is less.
    """
    from_kl_B = objective.beta * (row_log_probabilities(token_losses, batch) - reference_B - kl)
    good, bad = from_kl_B[desirable_B], from_kl_B[~desirable_B]
    weights = objective.desirable_weight, objective.undesirable_weight
    return weights[0] * (1 - good.sigmoid()).sum() + weights[1] * (1 - (-bad).sigmoid()).sum()


def distillation_losses(
    logits: Tensor, token_losses: Tensor, teacher_logits: Tensor, batch: PaddedSamples, objective: ObjectiveConfig
) -> Tensor:
    """Return the loss of each target under a distillation, `[targets]` in fp32 or wider.

    Args:
        logits: The model's, and `token_losses` its cross entropies, as `forward` returns them.
        teacher_logits: The teacher's, `[B, S, V]`.
    """
    predicting = batch.labels_BS[:, 1:] != IGNORE
    wide = torch.promote_types(logits.dtype, torch.float32)
    both = (each[:, :-1][predicting].to(wide) / objective.temperature for each in (logits, teacher_logits))
    own, other = (each.log_softmax(-1) for each in both)
    of, under = (own, other) if objective.kl == "reverse" else (other, own)
    losses = objective.temperature**2 * F.kl_div(under, of, reduction="none", log_target=True).sum(-1)
    return losses + objective.sft_weight * token_losses


def row_log_probabilities(token_losses: Tensor, batch: PaddedSamples) -> Tensor:
    """Return the log-probability of the targets of each row, `[B]` in fp64."""
    counts = (batch.labels_BS[:, 1:] != IGNORE).sum(dim=1).tolist()
    return -torch.stack([losses.double().sum() for losses in token_losses.split(counts)])


@dataclass(frozen=True, slots=True)
class UnshardedRun:
    """The results of a few optimizer steps."""

    losses: list[float]
    norms: list[float]
    """The gradient norm of each step, before clipping."""
    gradients: dict[str, Tensor]
    """The gradients of the first step before clipping, by name; empty if they were not requested."""
    moved: dict[str, Tensor]
    """The weights after all steps minus the weights before them, by name."""


def train(
    trained: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    steps: Iterable[StepT],
    backward: Callable[[StepT], float],
    *,
    max_norm: float | None = None,
    keep_gradients: bool = True,
) -> UnshardedRun:
    """Take optimizer steps with clipped gradients on the parameters `trained`, in place.

    Args:
        backward: Sets the gradients of one step on the parameters and returns its loss.
        max_norm: The maximum norm of the gradients; None: no clipping.
    """
    run, before = UnshardedRun([], [], {}, {}), {name: p.detach().clone() for name, p in trained.items()}
    for step in steps:
        run.losses.append(backward(step))
        if keep_gradients and not run.gradients:
            run.gradients.update((name, p.grad.clone()) for name, p in trained.items() if p.grad is not None)
        gradients = [p.grad for p in trained.values() if p.grad is not None]
        # Sum in fp64: torch's norm in fp32 can have an error of 1e-4 on a CPU.
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        run.norms.append(norm)
        if max_norm is not None:
            for gradient in gradients:
                gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
    run.moved.update((name, p.detach() - before[name]) for name, p in trained.items())
    return run


@torch.no_grad()
def round_frozen(model: nn.Module, like: nn.Module) -> None:
    """Round the weights of a plain model as the sharded model `like` rounds its frozen weights when it packs them."""
    for name, kind in (sharded(like).frozen_formats or {}).items():
        if not kind.published:
            parameter = model.get_parameter(name)
            for units in parameter.split(units_together(kind, parameter.device)):
                units.copy_(rounded(units, kind))
