"""Choose which rows an epoch has, in which order: a function of the seed and the epoch alone.

Each source is `repeat`ed, or, where sources have weights, drawn by them. A draw is exact, not only on average: an epoch
has of each source the rows that its probability gives, and continues in the source where the epoch before ended, in an
order that is new each time the source is through.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertmesh.config import DataSource
from expertmesh.data.report import DataReport

Order = npt.NDArray[np.int64]
# Keeps the seeds of sources apart from those of epochs: numpy takes missing numbers for zeros.
_OF_A_SOURCE = 1


@dataclass(frozen=True, slots=True)
class Mixture:
    """The way the rows of each source enter an epoch."""

    rows: tuple[int, ...]
    """Rows of each source."""
    repeats: tuple[int, ...]
    """Times that an epoch has each source's rows; without weights."""
    shares: tuple[int, ...] | None = None
    """Rows that an epoch draws from each source; None without weights."""

    @classmethod
    def of(cls, sources: Sequence[DataSource], report: DataReport, samples_per_row: int) -> "Mixture":
        """Return the mixture of `data.train`, whose rows are those of `report`; the shares are noted in it."""
        rows = tuple(each.samples // samples_per_row for each in report.sources)
        repeats = tuple(source.repeat for source in sources)
        for each, repeat in zip(report.sources, repeats, strict=True):
            each.repeat = repeat
        weights = [source.weight for source in sources if source.weight is not None]
        if len(weights) < 2:
            return cls(rows, repeats)
        # A source without a sample has nothing to draw.
        drawn = np.array(weights) * (np.array(rows) > 0)
        exact = sum(rows) * drawn / drawn.sum()
        shares = exact.astype(np.int64).tolist()
        for at in np.argsort(shares - exact, kind="stable")[: sum(rows) - sum(shares)].tolist():
            shares[at] += 1
        for source, share in zip(report.sources, shares, strict=True):
            source.epoch_rows = share
        return cls(rows, repeats, tuple(shares))

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> Order:
        """Return the rows of an epoch; without `shuffle` in the order of the sources."""
        starts = np.cumsum([0, *self.rows])
        if self.shares is None:
            parts = [
                np.tile(np.arange(start, start + count), repeat)
                for start, count, repeat in zip(starts, self.rows, self.repeats, strict=False)
            ]
        else:
            parts = [
                starts[source] + self._drawn(source, seed, epoch * share, (epoch + 1) * share)
                for source, share in enumerate(self.shares)
            ]
        rows = np.concatenate(parts).astype(np.int64, copy=False)
        return rows[np.random.default_rng([seed, epoch]).permutation(len(rows))] if shuffle else rows

    def _drawn(self, source: int, seed: int, start: int, stop: int) -> Order:
        """Return rows `start` … `stop`-1 of the endless sequence of a source: all of its rows, again and again."""
        count = self.rows[source]
        parts = [np.empty(0, np.int64)]
        for cycle in range(start // count, -(-stop // count)) if stop > start else ():
            order = np.random.default_rng([seed, source, cycle, _OF_A_SOURCE]).permutation(count)
            parts.append(order[max(start - cycle * count, 0) : stop - cycle * count])
        return np.concatenate(parts)
