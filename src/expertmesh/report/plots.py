"""Draws a run's figures with matplotlib, as SVG that stands inside the page and takes its colours and font from it.

Only texts of our own and numbers are drawn: what a user or a file says belongs into the page, where it is escaped.
A figure is as wide as a phone's screen, so that its text stays readable there.

What has more points than a picture can show is thinned out without hiding an outlier: a line keeps, of every group of
rows, the median, the lowest and the highest value; a heat map keeps the worst of every column.
"""

import io
import json
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import ascii_uppercase as LETTERS
from typing import Any, NamedTuple

import matplotlib.style
import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullFormatter, NullLocator

from expertmesh.report.run import WORST, Run
from expertmesh.training.reporting.record import Bin

MAX_POINTS = 600
MAX_COLUMNS = 320
Numbers = npt.NDArray[np.float64]
# Drawn in place of the style sheet's colours, so that one picture suits a light page, a dark one and paper.
INK, GRID, FIRST, SECOND, BAD = "#010203", "#020304", "#030405", "#040506", "#050607"
COLOURS = {INK: "currentColor", GRID: "var(--grid)", FIRST: "var(--first)", SECOND: "var(--second)", BAD: "var(--bad)"}
_STYLE = Path(__file__).with_name("plots.mplstyle")
# With few points each of them is shown.
_FEW = 60
# Beyond this ratio of highest to typical, a line on a linear scale shows nothing but its peak.
_LOG_RATIO = 8.0
# At most so many cells of a heat map have a text under the pointer.
_MOST_CELLS = 16_000
# Of several runs in one figure; they can be distinguished on a light and on a dark page.
_RUNS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")


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


@dataclass(frozen=True, slots=True)
class Curve:
    """One value over steps."""

    label: str | None
    """None if evaluations alone have it."""
    noisy: bool = True
    """True if it gets a smoothed line."""
    from_zero: bool = False
    """True if its axis begins at zero."""
    unit: float = 1.0
    beside: tuple[str, str] | None = None
    """Key and label of another value that is drawn with it."""


CURVES = {
    "loss": Curve("training"),
    "token_accuracy": Curve(None, from_zero=True),
    "grad_norm": Curve("gradient norm", from_zero=True),
    "learning_rate": Curve("learning rate", noisy=False, from_zero=True),
    "tokens_per_second": Curve("tokens per second", from_zero=True),
    "peak_memory_bytes": Curve("peak memory", noisy=False, from_zero=True, unit=2.0**30),
    "aux_loss": Curve("load-balancing loss"),
    "z_loss": Curve("router z-loss"),
    "rewards/chosen": Curve("chosen", beside=("rewards/rejected", "rejected")),
    "rewards/margins": Curve("training"),
    "rewards/accuracies": Curve("training", from_zero=True),
}


Hover = Callable[[Axes], dict[str, Any]]
"""Returns what hover.js shows under the pointer in axes that have been drawn."""
Lines = dict[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]]
"""Steps and values by name, in the units of the axis."""


def _under_lines(lines: Lines, axes: Axes) -> dict[str, Any]:
    shown = []
    for name, (step, value) in lines.items():
        x = _to_svg(axes, step, np.nan_to_num(value, nan=1.0))[0]
        texts = [_rounded(each) for each in value]
        shown.append({"name": name, "x": x, "step": [round(each) for each in step.tolist()], "value": texts})
    return {"lines": shown}


def _under_grid(
    rows: list[str], columns: list[str], extent: tuple[float, float, float, float], values: npt.NDArray[Any], axes: Axes
) -> dict[str, Any]:
    """Return the cells of a heat map. `extent`: left, right, bottom and top on the axes."""
    left, right, bottom, top = extent
    (x0, x1), (y0, y1) = _to_svg(axes, np.array([left, right]), np.array([top, bottom]))
    texts = [[_rounded(each) for each in row] for row in values.tolist()]
    return {"box": [x0, y0, x1, y1], "rows": rows, "columns": columns, "values": texts}


def _rounded(value: float) -> float | None:
    return float(f"{value:.4g}") if np.isfinite(value) else None


def _to_svg(axes: Axes, x: npt.NDArray[Any], y: npt.NDArray[Any]) -> tuple[list[float], list[float]]:
    """Return places in the drawn picture, in points; y counts from the top."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    places = axes.transData.transform(np.column_stack([x, y])) * 72 / figure.dpi
    height = figure.get_figheight() * 72
    return [round(float(each), 1) for each in places[:, 0]], [round(height - float(each), 1) for each in places[:, 1]]


def draw(run: Run) -> dict[str, Markup]:
    """Return figures by the key of what they show in metrics.jsonl; fewer than two finite values have none."""
    metrics, figures = run.metrics, {}
    for key in CURVES:
        columns = [source[key] for source in (metrics.numbers, metrics.evaluated) if key in source]
        # A single value stands in the page's text.
        if len(metrics.step) and sum(np.isfinite(column).sum() for column in columns) > 1:
            figures[key] = _svg(key, partial(_draw_curve, run, key))
    for key, values_SL in metrics.load_SL.items():
        if np.isfinite(values_SL).any() and not (key == "dead" and np.nanmax(values_SL) == 0):
            figures[key] = _svg(key, partial(_draw_heat_map, run, key))
    if metrics.tokens is not None:
        figures["expert_tokens"] = _svg("expert_tokens", partial(_draw_tokens, run, metrics.tokens[1]))
    if run.data is not None and any(each.samples for each in run.data.lengths):
        figures["lengths"] = _svg("lengths", partial(_draw_lengths, run.data.lengths))
    return figures


def draw_together(runs: Sequence[Run]) -> dict[str, Markup]:
    """Return the figures of several runs, each in one picture, in which letters name the runs."""
    figures = {}
    for key in ("loss", "eval_loss", "grad_norm", "learning_rate", "tokens_per_second"):
        lines = {}
        for letter, run in zip(LETTERS, runs, strict=False):
            step: npt.NDArray[Any] = run.metrics.eval_step
            value = run.metrics.evaluated["loss"]
            if key != "eval_loss":
                thin = thin_line(run.metrics.step, run.metrics[key])
                step, value = thin.step, thin.middle if thin.smooth is None else thin.smooth
            if np.isfinite(value).any():
                lines[letter] = step, value
        if lines:
            figures[key] = _svg(key, partial(_draw_lines, lines))
    return figures


def _draw_lines(lines: Lines, figure: Figure, axes: Axes) -> Hover:
    for letter, (step, value) in lines.items():
        few = "o" if len(step) <= _FEW else None
        colour = _RUNS[LETTERS.index(letter) % len(_RUNS)]
        axes.plot(step, value, color=colour, linewidth=1.6, marker=few, markersize=3, label=letter)
    _step_axis(axes)
    axes.yaxis.set_major_formatter(short)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=10)
    return partial(_under_lines, lines)


def _draw_tokens(run: Run, tokens_LE: npt.NDArray[np.float64], figure: Figure, axes: Axes) -> Hover:
    """Draw the tokens of each expert over the mean of its layer."""
    load_LE = tokens_LE / np.maximum(tokens_LE.mean(axis=1, keepdims=True), 1e-9)
    layers, experts = load_LE.shape
    extent = (-0.5, experts - 0.5, layers - 0.5, -0.5)
    blocks = run.moe_blocks if len(run.moe_blocks) == layers else list(range(layers))
    norm = Normalize(0, max(2.0, float(np.quantile(load_LE, 0.99))))
    _draw_blocks(figure, axes, blocks, load_LE, extent, norm=norm, cmap="cividis")
    axes.set_xlabel("expert")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    names = [f"expert {number}" for number in range(experts)]
    return partial(_under_grid, [f"block {block}" for block in blocks], names, extent, load_LE)


def _draw_lengths(lengths: Sequence[Bin], figure: Figure, axes: Axes) -> None:
    """Draw how many samples have how many tokens; the last bar holds all longer ones."""
    edges = [each.above for each in lengths]
    width = edges[1] - edges[0] if len(edges) > 1 else 1
    axes.bar(edges, [each.samples for each in lengths], width=0.92 * width, align="edge", color=FIRST)
    axes.set_xlabel("tokens of a sample")
    axes.yaxis.set_major_formatter(short)
    axes.xaxis.set_major_formatter(short)


def _draw_curve(run: Run, key: str, figure: Figure, axes: Axes) -> Hover:
    metrics, curve = run.metrics, CURVES[key]
    lines: Lines = {}
    if curve.label is not None:
        line = thin_line(metrics.step, metrics[key] / curve.unit)
        _draw_line(axes, line, curve.noisy, curve.label, FIRST)
        lines[curve.label] = line.step, line.middle
    if curve.beside is not None:
        other, label = curve.beside
        line = thin_line(metrics.step, metrics[other])
        _draw_line(axes, line, curve.noisy, label, SECOND)
        lines[label] = line.step, line.middle
    evaluated = metrics.evaluated.get(key)
    if evaluated is not None and np.isfinite(evaluated).any():
        lines["evaluation"] = metrics.eval_step, evaluated
        axes.plot(metrics.eval_step, evaluated, "D-", color=SECOND, linewidth=1.5, ms=4.5, label="evaluation")
        for number, (name, of_set) in enumerate(metrics.sets.items()):
            value = of_set[key]
            lines[f"evaluation of {name}"] = metrics.eval_step, value
            colour = _RUNS[number % len(_RUNS)]
            axes.plot(metrics.eval_step, value, "o--", color=colour, linewidth=1.2, ms=3, label=f"evaluation of {name}")
    log = False
    if key == "grad_norm":
        norms = summarize(metrics[key])
        log = norms.lowest > 0 and norms.highest > _LOG_RATIO * norms.median
        clip = run.config.optim.max_grad_norm if run.config is not None else None
        if clip is not None:
            axes.axhline(clip, color=SECOND, linewidth=1.3, linestyle=(0, (5, 3)), label=f"clipped to {clip:g}")
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif curve.from_zero:
        axes.set_ylim(0, 1.04 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter(short)
    _draw_steps(run, axes, INK)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=3)
    return partial(_under_lines, lines)


def _draw_line(axes: Axes, line: Line, noisy: bool, label: str, colour: str) -> None:
    """Draw the values pale and their trend strong."""
    smooth = line.smooth if noisy else None
    pale: dict[str, Any] = {"color": colour, "label": None}
    if colour == FIRST:  # the legend says it once
        pale["label"] = "lowest to highest" if line.rows_per_point > 1 else "each row"
    if line.rows_per_point > 1:
        axes.fill_between(line.step, line.low, line.high, alpha=0.35, linewidth=0, **pale)
    elif smooth is not None:
        axes.plot(line.step, line.middle, alpha=0.5, linewidth=0.9, **pale)
    strong, marker = line.middle if smooth is None else smooth, "o" if len(line.step) <= _FEW else None
    axes.plot(line.step, strong, color=colour, linewidth=1.8, marker=marker, markersize=3.5, label=label)
    # A point between two gaps has no line.
    missing = np.pad(np.isnan(line.middle), 1, constant_values=True)
    alone = ~missing[1:-1] & missing[:-2] & missing[2:]
    if marker is None and alone.any():
        axes.plot(line.step[alone], line.middle[alone], ".", color=colour, markersize=4)


def _draw_heat_map(run: Run, key: str, figure: Figure, axes: Axes) -> Hover | None:
    """Draw layers from top to bottom, steps from left to right; bright is what needs attention."""
    grid = thin_grid(run.metrics.step, run.metrics.load_SL[key], WORST[key])
    low, high = float(np.nanmin(grid.values_LC)), float(np.nanmax(grid.values_LC))
    norm = {
        "max_over_mean": LogNorm(1, max(2.0, high)),
        "ranks_max_over_mean": LogNorm(1, max(2.0, high)),
        "entropy": Normalize(min(0.9, low), 1),
        "dead": Normalize(0, high),
    }[key]
    bright = matplotlib.colormaps["cividis_r" if WORST[key] is np.nanmin else "cividis"]
    extent = (grid.first, grid.last, len(grid.values_LC) - 0.5, -0.5)
    ticks: Locator = MaxNLocator(nbins=6, integer=key == "dead", steps=[1, 2, 5, 10])
    if isinstance(norm, LogNorm):
        ticks = LogLocator(base=2, subs=(1, 1.5))
    cmap = bright.with_extremes(bad="#9a9a9a")
    bar = _draw_blocks(
        figure, axes, run.moe_blocks, grid.values_LC, extent, norm=norm, cmap=cmap, ticks=ticks, zorder=3
    )
    bar.ax.yaxis.set_minor_locator(NullLocator())
    # On a picture, a line that is seen on its dark and on its bright parts.
    for step in run.resumed:
        axes.axvline(step + 0.5, color="#ffffff", linewidth=1.6, zorder=4)
    _draw_steps(run, axes, "#000000")
    if grid.values_LC.size > _MOST_CELLS:
        return None
    columns = grid.values_LC.shape[1]
    steps = np.linspace(grid.first, grid.last, columns + 1)
    names = [f"to step {int(step):,}" for step in steps[1:]]
    return partial(_under_grid, [f"block {block}" for block in run.moe_blocks], names, extent, grid.values_LC)


def _draw_blocks(
    figure: Figure,
    axes: Axes,
    blocks: Sequence[int],
    values: npt.NDArray[Any],
    extent: tuple[float, float, float, float],
    *,
    ticks: Locator | None = None,
    **image: Any,
) -> Colorbar:
    """Draw a row of `values` for each block, and return its colour bar; `image` are options of `imshow`."""
    picture = axes.imshow(values, aspect="auto", interpolation="nearest", extent=extent, **image)
    axes.grid(False)
    shown = np.unique(np.linspace(0, len(blocks) - 1, min(len(blocks), 9)).round().astype(int))
    axes.set_yticks(shown, [str(blocks[place]) for place in shown])
    axes.set_ylabel("block")
    bar = figure.colorbar(picture, ax=axes, pad=0.02, aspect=16, format=short, ticks=ticks)
    bar.outline.set_visible(False)
    return bar


def _draw_steps(run: Run, axes: Axes, line_colour: str) -> None:
    """Draw the axis of steps; skipped steps as triangles at the upper edge, resumed runs as dashed lines."""
    for step in run.resumed:
        axes.axvline(step + 0.5, color=line_colour, linewidth=1, linestyle=(0, (2, 2)), zorder=4)
    skipped = [step for step, _ in run.metrics.skipped]
    if skipped:
        edge = axes.get_xaxis_transform()
        axes.plot(skipped, np.ones(len(skipped)), "v", markersize=6, color=BAD, transform=edge, clip_on=False, zorder=5)
    _step_axis(axes)


def _step_axis(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter("{x:,.0f}")


def short(value: float, place: float = 0) -> str:
    """Format a number for an axis or a card: three digits, thousands as k and M. matplotlib passes `place`."""
    for limit, unit, sign in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / unit:.3g}{sign}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _svg(name: str, draw_on: Callable[[Figure, Axes], Hover | None]) -> Markup:
    """Return a figure in our style, whatever the user's matplotlibrc, as an `<svg>` whose ids begin with `name`."""
    written = io.StringIO()
    with matplotlib.style.context(_STYLE, after_reset=True):
        figure = Figure()
        axes = figure.add_subplot()
        hover = draw_on(figure, axes)
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = written.getvalue()
    prefix = name.replace("/", "-")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg[svg.index("<svg") :])
    if hover is not None:
        data = escape(json.dumps(hover(axes), separators=(",", ":")))
        svg = svg.replace("<svg ", f'<svg data-hover="{data}" ', 1)
    for drawn, meant in COLOURS.items():
        svg = svg.replace(drawn, meant)
    return Markup(svg)
