"""Thins out what has more points than a picture can show, without hiding an outlier.

A line keeps, of every group of rows, the median, the lowest and the highest value; a heat map keeps the worst of every
column. `Line.rows_per_point` and `Grid.rows_per_column` say what was done.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MAX_POINTS = 600
MAX_COLUMNS = 320
Numbers = npt.NDArray[np.float64]


class Summary(NamedTuple):
    """A summary of a column's finite values; all NaN if there are none."""

    first: float
    last: float
    lowest: float
    median: float
    highest: float
    gaps: int
    """Number of values that are not finite."""


def summarize(values: npt.NDArray[np.floating[Any]]) -> Summary:
    finite = values[np.isfinite(values)]
    gaps = len(values) - len(finite)
    if not len(finite):
        return Summary(math.nan, math.nan, math.nan, math.nan, math.nan, gaps)
    first, last, median = float(finite[0]), float(finite[-1]), float(np.median(finite))
    return Summary(first, last, float(finite.min()), median, float(finite.max()), gaps)


@dataclass(frozen=True, slots=True)
class Line:
    """Points of a line; each array has one value a point."""

    step: Numbers
    middle: Numbers
    """Median of the point's rows."""
    low: Numbers
    """The least of them; equals `middle` if the point is one row."""
    high: Numbers
    """The greatest of them."""
    smooth: Numbers | None
    """Median over the neighbourhood of each point; None for so few points that it would say nothing."""
    rows_per_point: int


@dataclass(frozen=True, slots=True)
class Grid:
    """A heat map of columns of equal width in steps."""

    values_LC: npt.NDArray[np.float32]
    """NaN where no row was reported."""
    first: float
    """Step at which the first column begins."""
    last: float
    """Step at which the last column ends."""
    rows_per_column: int
    """Rows of the column that has most."""


def thin_line(step: npt.NDArray[np.int64], values: Numbers) -> Line:
    """Thin `values [S]` out to at most `MAX_POINTS`, each of equally many rows."""
    group = max(1, -(-len(step) // MAX_POINTS))
    groups = -(-len(step) // group)
    # The last group is filled up with what counts for nothing.
    padded = np.full((2, groups * group), np.nan)
    padded[:, : len(step)] = step, values
    steps, table = padded.reshape(2, groups, group)
    middle = ignoring_nan(np.nanmedian, table)
    return Line(
        step=ignoring_nan(np.nanmean, steps),
        middle=middle,
        low=ignoring_nan(np.nanmin, table),
        high=ignoring_nan(np.nanmax, table),
        smooth=_smoothed(middle),
        rows_per_point=group,
    )


def _smoothed(values: Numbers) -> Numbers | None:
    """Return the median of each point's neighbourhood, a twentieth of all points wide; a gap stays one."""
    half = len(values) // 40
    if half < 1:
        return None
    padded = np.pad(values, half, constant_values=np.nan)
    smooth: Numbers = ignoring_nan(np.nanmedian, np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1))
    smooth[np.isnan(values)] = np.nan
    return smooth


def thin_grid(step: npt.NDArray[np.int64], values_SL: npt.NDArray[np.float32], worst: Callable[..., Any]) -> Grid:
    """Return at most `MAX_COLUMNS` columns of equal width in steps; `worst` (`np.nanmax` or `np.nanmin`) joins rows."""
    gap = float(np.median(np.diff(step))) if len(step) > 1 else 1.0
    first, last = float(step[0]) - gap / 2, float(step[-1]) + gap / 2
    columns = int(min(MAX_COLUMNS, max(1, round((last - first) / gap))))
    place_S = np.minimum(((step - first) / (last - first) * columns).astype(np.int64), columns - 1)
    values_LC = np.full((values_SL.shape[1], columns), np.nan, dtype=np.float32)
    occupied, counts = np.unique(place_S, return_counts=True)
    for column in occupied:
        values_LC[:, column] = ignoring_nan(worst, values_SL[place_S == column], axis=0)
    return Grid(values_LC, first, last, int(counts.max()))


def ignoring_nan(function: Callable[..., Any], table: npt.NDArray[Any], axis: int = -1) -> Any:
    """Call `function` without numpy's warnings about groups that have no value; here they are gaps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return function(table, axis=axis)
