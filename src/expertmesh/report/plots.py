"""Draws a run's figures with matplotlib, as SVG that stands inside the page and takes its colours and font from it.

Only texts of our own and numbers are drawn: what a user or a file says belongs into the page, where it is escaped.
A figure is as wide as a phone's screen, so that its text stays readable there.
"""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullFormatter, NullLocator

from expertmesh.report.metrics import WORST
from expertmesh.report.run import Run
from expertmesh.report.series import Line, summarize, thin_grid, thin_line

# Drawn in place of the style sheet's colours, so that one picture suits a light page, a dark one and paper.
INK, GRID, FIRST, SECOND, BAD = "#010203", "#020304", "#030405", "#040506", "#050607"
COLOURS = {INK: "currentColor", GRID: "var(--grid)", FIRST: "var(--first)", SECOND: "var(--second)", BAD: "var(--bad)"}
_STYLE = Path(__file__).with_name("plots.mplstyle")
# With few points each of them is shown.
_FEW = 60
# Beyond this ratio of highest to typical, a line on a linear scale shows nothing but its peak.
_LOG_RATIO = 8.0


@dataclass(frozen=True, slots=True)
class Curve:
    """One value over steps. A `noisy` one gets a smoothed line; `unit` is what its axis counts in; `beside` are key and
    label of another that is drawn with it.
    """

    label: str
    noisy: bool = True
    from_zero: bool = False
    unit: float = 1.0
    beside: tuple[str, str] | None = None


CURVES = {
    "loss": Curve("training"),
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


def draw(run: Run) -> dict[str, Markup]:
    """Figures by the key of what they show in metrics.jsonl; what has no finite value has none."""
    metrics, figures = run.metrics, {}
    for key in CURVES:
        if metrics.has(key) or (key == "loss" and len(metrics.step) and len(metrics.eval_step)):
            figures[key] = _svg(key, partial(_draw_curve, run, key))
    for key, values_SL in metrics.load_SL.items():
        if np.isfinite(values_SL).any() and not (key == "dead" and np.nanmax(values_SL) == 0):
            figures[key] = _svg(key, partial(_draw_heat_map, run, key))
    return figures


def _draw_curve(run: Run, key: str, figure: Figure, axes: Axes) -> None:
    metrics, curve = run.metrics, CURVES[key]
    _draw_line(axes, thin_line(metrics.step, metrics[key] / curve.unit), curve.noisy, curve.label, FIRST)
    if curve.beside is not None:
        other, label = curve.beside
        _draw_line(axes, thin_line(metrics.step, metrics[other]), curve.noisy, label, SECOND)
    evaluated = metrics.evaluated.get(key)
    if evaluated is not None and np.isfinite(evaluated).any():
        axes.plot(metrics.eval_step, evaluated, "D-", color=SECOND, linewidth=1.5, ms=4.5, label="evaluation")
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


def _draw_line(axes: Axes, line: Line, noisy: bool, label: str, colour: str) -> None:
    """The rows pale, what they tend to strong."""
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


def _draw_heat_map(run: Run, key: str, figure: Figure, axes: Axes) -> None:
    """Layers from top to bottom, steps from left to right; bright is what needs attention."""
    grid = thin_grid(run.metrics.step, run.metrics.load_SL[key], WORST[key])
    low, high = float(np.nanmin(grid.values_LC)), float(np.nanmax(grid.values_LC))
    norm = {
        "max_over_mean": LogNorm(1, max(2.0, high)),
        "entropy": Normalize(min(0.9, low), 1),
        "dead": Normalize(0, high),
    }[key]
    bright = matplotlib.colormaps["cividis_r" if WORST[key] is np.nanmin else "cividis"]
    count = len(grid.values_LC)
    picture = axes.imshow(
        grid.values_LC, cmap=bright.with_extremes(bad="#9a9a9a"), norm=norm, aspect="auto", interpolation="nearest",
        extent=(grid.first, grid.last, count - 0.5, -0.5), zorder=3,
    )  # fmt: skip
    axes.grid(False)
    shown = np.unique(np.linspace(0, count - 1, min(count, 9)).round().astype(int))
    axes.set_yticks(shown, [str(run.moe_blocks[place]) for place in shown])
    axes.set_ylabel("block")
    ticks: Locator = MaxNLocator(nbins=6, integer=key == "dead", steps=[1, 2, 5, 10])
    if key == "max_over_mean":
        ticks = LogLocator(base=2, subs=(1, 1.5))
    bar = figure.colorbar(picture, ax=axes, pad=0.02, aspect=16, format=short, ticks=ticks)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_minor_locator(NullLocator())
    # On a picture, a line that is seen on its dark and on its bright parts.
    for step in run.resumed:
        axes.axvline(step + 0.5, color="#ffffff", linewidth=1.6, zorder=4)
    _draw_steps(run, axes, "#000000")


def _draw_steps(run: Run, axes: Axes, line_colour: str) -> None:
    """The axis of steps; skipped steps as triangles at the upper edge, resumed runs as dashed lines."""
    for step in run.resumed:
        axes.axvline(step + 0.5, color=line_colour, linewidth=1, linestyle=(0, (2, 2)), zorder=4)
    skipped = [step for step, _ in run.metrics.skipped]
    if skipped:
        edge = axes.get_xaxis_transform()
        axes.plot(skipped, np.ones(len(skipped)), "v", markersize=6, color=BAD, transform=edge, clip_on=False, zorder=5)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter("{x:,.0f}")


def short(value: float, place: float = 0) -> str:
    """A number for an axis or a card: three digits, thousands as k and M. `place` is what matplotlib passes."""
    for limit, unit, sign in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / unit:.3g}{sign}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _svg(name: str, draw_on: Callable[[Figure, Axes], None]) -> Markup:
    """A figure in our style, whatever the user's matplotlibrc says, as an `<svg>` whose ids begin with `name`."""
    written = io.StringIO()
    with matplotlib.style.context(_STYLE, after_reset=True):
        figure = Figure()
        draw_on(figure, figure.add_subplot())
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = written.getvalue()
    prefix = name.replace("/", "-")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg[svg.index("<svg") :])
    for drawn, meant in COLOURS.items():
        svg = svg.replace(drawn, meant)
    return Markup(svg)
