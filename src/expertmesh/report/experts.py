"""The section on experts: how evenly each layer's tokens were spread over its experts, over the whole run."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from expertmesh.report.html import Html, join, table, tag
from expertmesh.report.plots import Marks, draw_heat_map
from expertmesh.report.run import Run
from expertmesh.report.series import grid
from expertmesh.report.words import highest, known, number, plural, whole

_BLOCK = re.compile(r"\.(\d+)\.")
# "Lately" is this share of the rows, at the end.
_LATELY = 10


def section(run: Run, marks: Marks) -> Html:
    """Heat maps and a table; a sentence if no row tells about experts."""
    metrics = run.metrics
    if not metrics.layers or not np.isfinite(metrics.load_SL["max_over_mean"]).any():
        return tag("p", "No step has reported the load of its experts.")
    return join(*_explanation(run), tag("div", *_maps(run, marks), class_="figures"), *_table(run))


def block_numbers(run: Run) -> list[int]:
    """Which block each MoE layer is in; counted from 0 where the run's record does not tell."""
    layers = run.metrics.layers
    names = [layer.name for layer in run.record.moe_layers] if run.record is not None else []
    found = [int(match[1]) for name in names if (match := _BLOCK.search(name)) and len(match[1]) < 6]
    return found if len(found) == layers == len(set(found)) else list(range(layers))


def lately(values_SL: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """Per layer, the median of the last tenth of the rows; NaN where they say nothing."""
    rows_SL = values_SL[-max(1, len(values_SL) // _LATELY) :].astype(np.float64)
    return np.array([np.median(known(rows_SL[:, layer])) if len(known(rows_SL[:, layer])) else np.nan
                     for layer in range(rows_SL.shape[1])])  # fmt: skip


def _explanation(run: Run) -> Iterator[Html]:
    columns = grid(run.metrics.step, run.metrics.load_SL["max_over_mean"], np.nanmax)
    said = (
        "One line of each picture is one MoE layer, from the first at the top to the last; bright is uneven. Evenly "
        "spread tokens give a load of 1 and an entropy of 1; small batches cannot be that even."
    )
    if columns.rows_per_column > 1:
        said += f" A column shows the worst of up to {columns.rows_per_column:,} rows."
    yield tag("p", said, class_="soft")


def _maps(run: Run, marks: Marks) -> Iterator[Html]:
    metrics, layers = run.metrics, block_numbers(run)
    load_SL, entropy_SL, dead_SL = (metrics.load_SL[key] for key in ("max_over_mean", "entropy", "dead"))
    told = f"tokens of the busiest expert over the mean; at most {_worst(run, load_SL, np.nanargmax, '×')}"
    yield _figure(
        "Expert load", told,
        draw_heat_map(
            "load", f"Expert load per layer over steps; {told}", grid(metrics.step, load_SL, np.nanmax), layers, marks,
            bright="high", at_least=1, at_most=max(2.0, float(np.nanmax(load_SL))), log=True,
        ),
    )  # fmt: skip
    if np.isfinite(entropy_SL).any():
        told = "of the experts' shares: 1 all equal, 0 one has all; at least " + _worst(
            run, entropy_SL, np.nanargmin, ""
        )
        low = min(0.9, float(np.nanmin(entropy_SL)))
        yield _figure(
            "Entropy", told,
            draw_heat_map(
                "entropy", f"Entropy of the experts' shares per layer over steps; {told}",
                grid(metrics.step, entropy_SL, np.nanmin), layers, marks, bright="low", at_least=low, at_most=1,
            ),
        )  # fmt: skip
    if not np.isfinite(dead_SL).any():
        return
    if float(np.nanmax(dead_SL)) == 0:
        yield tag(
            "p", tag("strong", "Dead experts: none."), " Every expert of every layer got a token between any two rows."
        )
        return
    told = f"that got no token since the row before; at most {_worst(run, dead_SL, np.nanargmax, '')}"
    yield _figure(
        "Dead experts", told,
        draw_heat_map(
            "dead", f"Dead experts per layer over steps; {told}", grid(metrics.step, dead_SL, np.nanmax), layers, marks,
            bright="high", at_least=0, at_most=float(np.nanmax(dead_SL)),
        ),
    )  # fmt: skip


def _figure(heading: str, told: str, picture: Html) -> Html:
    return tag("figure", tag("figcaption", heading, tag("span", told)), picture)


def _worst(run: Run, values_SL: npt.NDArray[np.float32], worst: object, sign: str) -> str:
    """The worst value of all, with its block and step."""
    assert callable(worst)
    row, layer = np.unravel_index(int(worst(values_SL)), values_SL.shape)
    value = number(float(values_SL[row, layer]), 3)
    return f"{value}{sign} in block {block_numbers(run)[layer]} at step {int(run.metrics.step[row]):,}"


def _table(run: Run) -> Iterator[Html]:
    metrics = run.metrics
    load_SL, entropy_SL, dead_SL = (
        metrics.load_SL[key].astype(np.float64) for key in ("max_over_mean", "entropy", "dead")
    )
    now = [lately(values_SL) for values_SL in (load_SL, entropy_SL, dead_SL)]
    sizes = [layer.experts for layer in run.record.moe_layers] if run.record is not None else []
    rows: list[tuple[object, ...]] = []
    for layer, block in enumerate(block_numbers(run)):
        experts = str(sizes[layer]) if len(sizes) == metrics.layers else "–"
        load, entropy, dead = (values[layer] for values in now)
        low = -highest(-entropy_SL[:, layer])
        cells = (f"{number(load, 3)}×", f"{number(highest(load_SL[:, layer]), 3)}×", number(entropy, 3), number(low, 3))
        rows.append((block, experts, *cells, whole(dead), whole(highest(dead_SL[:, layer]))))
    recent = plural(max(1, len(metrics.step) // _LATELY), "row")
    yield tag("h3", "Layer by layer")
    yield tag("p", f"“Lately” is the median of the last {recent}.", class_="soft")
    head = ("block", "experts", "load lately", "highest", "entropy lately", "lowest", "dead lately", "most")
    yield table(head, rows, label="Experts layer by layer", numbers=1)
