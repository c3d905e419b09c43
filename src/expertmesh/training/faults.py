"""A non-finite loss or gradient: every rank skips the step together; three in a row end the run with a name.

One bad batch must not destroy the weights, and a run that only skips must not look alive.
"""

from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor

from expertmesh.config.errors import IntegrityError

LIMIT = 3


@dataclass(slots=True)
class NonFiniteGuard:
    """Counts skipped steps in a row. All ranks hold the same facts, so all ranks decide the same."""

    in_a_row: int = 0

    def check(self, step: int, losses: list[float], grad_norm: float, finite: list[bool]) -> str | None:
        """Why step `step` must be skipped, or None. `losses` and `finite` hold one entry per rank.

        Raises `IntegrityError` when it is the third in a row.
        """
        if all(finite) and _finite(grad_norm):
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        ranks = [rank for rank, is_finite in enumerate(finite) if not is_finite]
        loss_ranks = [rank for rank in ranks if not _finite(losses[rank])]
        if loss_ranks:
            what = f"the loss is {losses[loss_ranks[0]]} on rank {_listed(loss_ranks)}"
        elif ranks:
            what = f"the gradient of rank {_listed(ranks)}'s shards is not finite"
        else:
            what = f"the gradient norm is {grad_norm}, although every rank's shards are finite"
        if self.in_a_row >= LIMIT:
            raise IntegrityError(
                f"step {step}: {what}; {LIMIT} such steps in a row, so the run ends. Look at the data of these steps, "
                "lower optim.learning_rate, or check the weights it started from"
            )
        return what


def gradients_are_finite(model: nn.Module) -> bool:
    """Whether this rank's gradient shards are finite. Called only when the norm is not; waits for the device."""
    for parameter in model.parameters():
        gradient = parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if local is not None and not bool(local.isfinite().all()):
            return False
    return True


def _finite(value: float) -> bool:
    return value - value == 0.0


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
