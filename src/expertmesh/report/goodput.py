"""Account for the wall time of a run over all its starts, from run.json and metrics.jsonl alone."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise

import numpy as np

from expertmesh.report.metrics import Metrics
from expertmesh.training.reporting.record import Start


@dataclass(frozen=True, slots=True)
class Goodput:
    """Seconds from the process of the first start in run.json to the last row of metrics, on rank 0; `wall` is all.

    - `training`: steps that count, data and update included (`step_seconds` of the rows times their steps).
    - `evaluation`: evaluations between these steps (`eval_runtime`).
    - `saving`: what else held training up between them: checkpoint saves, as far as they block.
    - `lost`: from a checkpoint to the last row before the run began again there, so steps that were done twice.
    - `startup`: from a start's process to its first step: imports, data, weights.
    - `waiting`: the rest, between starts: until the failure was noticed, and until there was a new process. What a
      start did after its last row counts here, too.

    Nothing is known of a time before run.json had these figures; it is in `waiting`.
    """

    training: float
    evaluation: float
    saving: float
    lost: float
    startup: float
    waiting: float

    @property
    def wall(self) -> float:
        return sum(self.parts().values())

    @property
    def share(self) -> float:
        """The share of wall time that was training: the goodput."""
        return self.training / self.wall if self.wall else 0.0

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part by name, in the order above."""
        return asdict(self)


def goodput(starts: Sequence[Start], metrics: Metrics) -> Goodput | None:
    """None where the records do not tell."""
    times = [_time(each.started) for each in starts]
    if None in times or not (metrics.has("step_seconds") and metrics.has("elapsed_seconds")):
        return None
    steps = np.diff(metrics.step, prepend=0)
    training = float(np.nansum(metrics["step_seconds"] * steps))
    last_step, elapsed = metrics.step[-1], float(np.nanmax(metrics["elapsed_seconds"]))
    # An evaluation after the last row is not in `elapsed`.
    evaluation = float(np.nansum(metrics.eval_seconds[metrics.eval_step < last_step]))
    lost, startup = (sum(getattr(each, name) for each in starts) for name in ("lost_seconds", "startup_seconds"))
    waiting = 0.0
    for (began, before), (now, after) in pairwise(zip(times, starts, strict=True)):
        assert began is not None
        assert now is not None
        apart = now - began
        kept = max(0.0, after.elapsed_seconds - before.elapsed_seconds)
        waiting += max(0.0, apart - kept - after.lost_seconds - after.startup_seconds)
    return Goodput(training, evaluation, max(0.0, elapsed - training - evaluation), lost, startup, waiting)


def _time(text: str) -> float | None:
    """Return seconds since the epoch; None for text that is no time."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None
