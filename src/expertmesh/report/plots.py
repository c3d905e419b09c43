"""Draws lines and heat maps with matplotlib, as SVG that lives inside the page and takes its colours and font from it.

Only texts of our own and numbers are drawn: what a user or a file says belongs into the page, where it is escaped.
A figure is as wide as a phone's screen, so that its text stays readable there.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from expertmesh.report.html import Html
from expertmesh.report.series import Grid, Line
from expertmesh.report.svg import BAD, FIRST, GRID, INK, SECOND, to_html

WIDTH, HEIGHT = 6.0, 3.1
Unit = Literal["", "GiB"]
_GIB = 2.0**30
# A point between two gaps has no line; with few points each of them is shown.
_FEW = 60
# Ticks of the scale for loads; one expert of 256 can have them all.
_LOADS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True)
class Marks:
    """What is marked in every figure: steps that were skipped, and steps after which the run was resumed."""

    skipped: Sequence[int] = ()
    resumed: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Points:
    """A second series of few points, each of them shown."""

    label: str
    step: Sequence[float]
    value: Sequence[float]


def draw_lines(
    name: str,
    description: str,
    line: Line,
    marks: Marks,
    *,
    label: str,
    points: Points | None = None,
    limit: tuple[str, float] | None = None,
    unit: Unit = "",
    from_zero: bool = False,
    log: bool = False,
) -> Html:
    """One value over steps: the rows pale, what they tend to strong. `limit` is a named horizontal line.

    `name` is unique in the page and starts all ids of the figure; `description` is read out instead of it.
    """
    scale = _GIB if unit == "GiB" else 1.0
    with _figure() as (figure, axes):
        strong = line.smooth if line.smooth is not None else line.middle
        if line.rows_per_point > 1:
            low, high = line.low / scale, line.high / scale
            axes.fill_between(line.step, low, high, color=FIRST, alpha=0.35, linewidth=0, label="lowest to highest")
        elif line.smooth is not None:
            axes.plot(line.step, line.middle / scale, color=FIRST, alpha=0.5, linewidth=0.9, label="each row")
        shown = "o" if len(line.step) <= _FEW else None
        axes.plot(line.step, strong / scale, color=FIRST, linewidth=1.8, marker=shown, markersize=3.5, label=label)
        alone = np.isfinite(line.middle) & _gap_on_both_sides(line.middle)
        if shown is None and alone.any():
            axes.plot(line.step[alone], line.middle[alone] / scale, ".", color=FIRST, markersize=4)
        if points is not None and len(points.step):
            axes.plot(
                points.step, np.asarray(points.value) / scale, color=SECOND, linewidth=1.5, marker="D", markersize=4.5,
                label=points.label,
            )  # fmt: skip
        if log:
            _log_scale(axes)
        if limit is not None:
            axes.axhline(limit[1] / scale, color=SECOND, linewidth=1.3, linestyle=(0, (5, 3)), label=limit[0])
        if from_zero:
            axes.set_ylim(bottom=0)
        if not log:
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        _mark(axes, marks)
        axes.margins(x=0.02)
        _steps(axes)
        if len(axes.get_legend_handles_labels()[1]) > 1:
            figure.legend(
                *axes.get_legend_handles_labels(), loc="outside upper left", ncols=3, frameon=False, borderpad=0.1,
                handlelength=1.6, columnspacing=1.2,
            )  # fmt: skip
        return to_html(figure, name, description)


def draw_heat_map(
    name: str,
    description: str,
    grid: Grid,
    layers: Sequence[int],
    marks: Marks,
    *,
    bright: Literal["high", "low"],
    at_least: float | None,
    at_most: float | None,
    log: bool = False,
) -> Html:
    """Layers from top to bottom, steps from left to right; `bright` says which end of the scale needs attention.

    The scale reaches from `at_least` to `at_most`, or as far as the values do.
    """
    low = at_least if at_least is not None else float(np.nanmin(grid.values_LC))
    high = at_most if at_most is not None else float(np.nanmax(grid.values_LC))
    high = high if high > low else low + 1
    norm = LogNorm(low, high) if log else Normalize(low, high)
    with _figure() as (figure, axes):
        colours = matplotlib.colormaps["cividis" if bright == "high" else "cividis_r"].with_extremes(bad="#9a9a9a")
        count = len(grid.values_LC)
        extent = (grid.first, grid.last, count - 0.5, -0.5)
        picture = axes.imshow(
            grid.values_LC, cmap=colours, norm=norm, extent=extent, aspect="auto", interpolation="nearest", zorder=3
        )
        axes.grid(False)
        shown = np.unique(np.linspace(0, count - 1, min(count, 9)).round().astype(int))
        axes.set_yticks(shown, [str(layers[place]) for place in shown])
        axes.set_ylabel("block")
        bar = figure.colorbar(picture, ax=axes, pad=0.02, aspect=16)
        bar.outline.set_visible(False)
        bar.ax.yaxis.set_minor_locator(NullLocator())
        if log:
            ticks = [tick for tick in _LOADS if low <= tick <= high]
            bar.set_ticks(ticks)
        else:
            bar.ax.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=high > 1, steps=[1, 2, 5, 10]))
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        # On a picture, a line that is seen on its dark and on its bright parts.
        for step in marks.resumed:
            axes.axvline(step + 0.5, color="#ffffff", linewidth=1.6, zorder=4)
        _mark(axes, marks, line_colour="#000000")
        _steps(axes)
        return to_html(figure, name, description)


def short(value: float) -> str:
    """A number for an axis or a card: three digits, thousands as k and M."""
    size = abs(value)
    for limit, sign in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / {'G': 1e9, 'M': 1e6, 'k': 1e3}[sign]:.3g}{sign}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


@contextmanager
def _figure() -> "Iterator[tuple[Figure, Axes]]":
    """A figure in our style, whatever the user's matplotlibrc says; no window, no global state."""
    style = {
        "figure.figsize": (WIDTH, HEIGHT),
        "figure.constrained_layout.use": True,
        "font.size": 10.5,
        "svg.fonttype": "none",
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "savefig.facecolor": "none",
        "figure.facecolor": "none",
        "axes.facecolor": "none",
    }
    with matplotlib.style.context([style], after_reset=True):
        figure = Figure()
        yield figure, figure.add_subplot()


def _steps(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    thousands = axes.get_xlim()[1] >= 1e4
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value / 1000:,g}k" if thousands and value else f"{value:,.0f}")
    )


def _mark(axes: Axes, marks: Marks, line_colour: str = INK) -> None:
    """Skipped steps as triangles at the upper edge, resumed runs as dashed lines."""
    edge = axes.get_xaxis_transform()
    for step in marks.resumed:
        axes.axvline(step + 0.5, color=line_colour, linewidth=1, linestyle=(0, (2, 2)), zorder=4)
    if marks.skipped:
        axes.plot(
            marks.skipped, np.ones(len(marks.skipped)), linestyle="none", marker="v", markersize=6, color=BAD,
            transform=edge, clip_on=False, zorder=5,
        )  # fmt: skip


def _log_scale(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _gap_on_both_sides(values: np.ndarray) -> np.ndarray:
    missing = np.concatenate([[True], np.isnan(values), [True]])
    alone: np.ndarray = missing[:-2] & missing[2:]
    return alone
