"""Act on a run's evaluations: which checkpoint was the best, and whether training still helps.

All ranks decide the same, from figures that all of them have.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from expertmesh.checkpoint.directory import step_name
from expertmesh.config import Config
from expertmesh.training.resume import Best, Counters

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Selection:
    """The rules of `checkpoint.keep_best` and `train.early_stop`; their state is in `counters`."""

    config: Config
    counters: Counters

    def saw(self, step: int, row: Mapping[str, Any]) -> bool:
        """Take the figures of an evaluation; return whether to save a checkpoint because they are the best so far."""
        stop, counters = self.config.train.early_stop, self.counters
        if stop is not None:
            before = counters.least
            counters.least = _better(before, stop.figure, row[stop.figure], step, stop.min_change)
            counters.no_better = 0 if counters.least is not before else counters.no_better + 1
        figure = self.config.checkpoint.keep_best
        if figure is None:
            return False
        best = counters.best
        counters.best = _better(best, figure, row[figure], step)
        return counters.best is not best

    def ends(self) -> bool:
        """Return whether the run is over."""
        stop = self.config.train.early_stop
        return stop is not None and self.counters.no_better >= stop.patience

    def last_lines(self) -> list[str]:
        """Return the lines for the end of the run."""
        lines, counters, stop = [], self.counters, self.config.train.early_stop
        if self.ends() and stop is not None and counters.least is not None:
            lines.append(
                f"stopped early: {stop.figure} was best ({counters.least.value:.4f}) after step {counters.least.step}, "
                f"{counters.no_better} evaluations ago"
            )
        if counters.best is not None:
            best = counters.best
            lines.append(f"best {best.figure} {best.value:.4f}: checkpoint {step_name(best.step)}")
        return lines


def _better(before: Best | None, figure: str, value: float, step: int, min_change: float = 0.0) -> Best | None:
    """Return `before`, or the new value if it is better; a NaN never is."""
    if math.isnan(value):
        return before
    if before is None or before.figure != figure:
        return Best(figure, value, step)
    gain = before.value - value if figure.endswith("loss") else value - before.value
    return Best(figure, value, step) if gain > min_change else before
