"""Exchange facts between the ranks after the backward of a step, and decide whether all of them skip its update.

One all-reduce on the device and one wait for it. Only after a loss or gradient that is not finite do the ranks gather
who has it: one bad batch must not destroy the weights, and a run that only skips must not look alive.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from expertmesh.checkpoint.write import STATUSES
from expertmesh.config.errors import IntegrityError
from expertmesh.distributed.collectives import all_gather
from expertmesh.state.shards import to_local
from expertmesh.step.forward_backward import StepLosses
from expertmesh.training.control import StopReason

LIMIT = 3
_STOP_REASONS = tuple(reason for reason in StopReason if reason)


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The facts of one rank beside its losses."""

    stop: StopReason
    """Its request to stop."""
    overdue: bool
    """True if a checkpoint is overdue by its clock."""
    status: int
    """Status of its checkpoint writer."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The facts of a step, the same on every rank."""

    loss: float
    """Loss of the whole step."""
    aux_loss: float
    """Auxiliary loss of the whole step, without its factor."""
    z_loss: float
    """Router z-loss of the whole step, without its factor."""
    grad_norm: float
    """Norm over the full model."""
    not_finite: int
    """Ranks that have a loss or a gradient norm that is not finite."""
    stop: StopReason
    overdue: bool
    """Rank 0's."""
    statuses: tuple[int, ...]
    """Number of ranks with a checkpoint writer of each status."""
    figures: dict[str, float]
    """The objective's, of the whole step."""


def exchange(
    losses: StepLosses, grad_norm: torch.Tensor, facts: RankFacts, figures: Sequence[str], device: torch.device
) -> StepFacts:
    """Exchange the facts of a step; `figures` are the names of the objective's.

    Collectives: every rank calls it once per step; one all-reduce on the default group, and one wait for the device.
    """
    is_main = dist.get_rank() == 0
    counts = [facts.overdue and is_main, *(facts.stop is reason for reason in _STOP_REASONS)]
    counts += [facts.status == status for status in STATUSES]
    # Pinned, so that the copy to an accelerator does not wait for what runs there.
    on_host = torch.tensor([float(count) for count in counts], dtype=torch.float64, pin_memory=device.type != "cpu")
    norm = grad_norm.to(device, torch.float64)  # not summed: it is a norm over all shards already
    shares = torch.stack([share.to(device, torch.float64) for share in (losses.loss, losses.aux_loss, losses.z_loss)])
    not_finite = ~(shares[0].isfinite() & norm.isfinite())
    own = [shares, not_finite.double().view(1), on_host.to(device, non_blocking=True), losses.figures_F.to(device)]
    sums = torch.cat(own)
    dist.all_reduce(sums)
    loss, aux_loss, z_loss, bad, overdue, *rest, own_norm = torch.cat([sums, norm.view(1)]).tolist()
    rest, values = rest[: len(counts) - 1], rest[len(counts) - 1 :]
    requested = [reason for reason, count in zip(_STOP_REASONS, rest, strict=False) if count]
    statuses = tuple(int(count) for count in rest[len(_STOP_REASONS) :])
    stop = max(requested, default=StopReason.NONE)
    named = dict(zip(figures, values, strict=True))
    return StepFacts(loss, aux_loss, z_loss, own_norm, int(bad), stop, bool(overdue), statuses, named)


@dataclass(slots=True)
class NonFiniteGuard:
    """Count skipped steps in a row. All ranks hold the same facts, so all ranks decide the same."""

    in_a_row: int = 0

    def check(self, step: int, facts: StepFacts, losses: StepLosses, model: nn.Module) -> str | None:
        """Return why step `step` must be skipped, or None.

        Raises `IntegrityError` for the third step in a row. Collectives: every rank calls it; one all-gather if it is
        skipped.
        """
        if not facts.not_finite:
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        what = _who_is_not_finite(losses, facts.grad_norm, model)
        if self.in_a_row >= LIMIT:
            raise IntegrityError(
                f"step {step}: {what}; {LIMIT} such steps in a row, so the run ends. Look at the data of these steps, "
                "lower optim.learning_rate, or check the weights it started from",
                key="train.not-finite",
            )
        return what


def _who_is_not_finite(losses: StepLosses, grad_norm: float, model: nn.Module) -> str:
    """Return the same sentence on every rank. Collectives: one all-gather of three numbers on the default group."""
    assert dist.group.WORLD is not None
    loss = losses.loss.double()
    gradients = (to_local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None)
    # Waits for the device: only after a step that failed.
    finite = math.isfinite(float(loss)) and all(bool(gradient.isfinite().all()) for gradient in gradients)
    own = torch.tensor([[float(loss), finite, grad_norm]], dtype=torch.float64, device=loss.device)
    rows = all_gather(own, dist.group.WORLD).tolist()
    loss_ranks = [rank for rank, (loss, _, _) in enumerate(rows) if not math.isfinite(loss)]
    ranks = [rank for rank, (_, finite, _) in enumerate(rows) if not finite]
    if loss_ranks:
        return f"the loss is {rows[loss_ranks[0]][0]} on rank {_listed(loss_ranks)}"
    if ranks:
        return f"the gradient of rank {_listed(ranks)}'s shards is not finite"
    norm = next(norm for _, _, norm in rows if not math.isfinite(norm))
    return f"the gradient norm is {norm}, although every rank's shards are finite"


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
