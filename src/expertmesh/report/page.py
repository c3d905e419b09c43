"""The whole page, from a run that was read: `render` gives it as text, `write` puts it in its place.

One file without fonts, pictures or scripts from other places: its own content security policy lets the browser load
nothing at all, and run hover.js alone, by its hash. page.html.j2 and together.html.j2 lay it out; every text in it is
escaped unless it is a figure of ours.
"""

import base64
import hashlib
import json
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import ascii_uppercase as LETTERS
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from expertmesh import __version__
from expertmesh.io.directory import replace_synced, report_errors
from expertmesh.io.terminal import bytes_text, duration, plural, visible
from expertmesh.report.plots import (
    MAX_POINTS,
    draw,
    draw_together,
    ignoring_nan,
    short,
    summarize,
    thin_grid,
    thin_line,
)
from expertmesh.report.run import CONFIG_FILE, WORST, Run
from expertmesh.training.reporting.record import Start
from expertmesh.training.resume import flat

Column = npt.NDArray[np.floating[Any]]
# Shorter runs show too little.
_ROWS = 20
# "First" and "last" (or "lately") are one in so many of the rows, at either end.
_END = 10
NOTHING = "–"


def advice(run: Run) -> Iterator[str]:
    """Yield sentences for the page, the gravest first."""
    metrics = run.metrics
    if skipped := len(metrics.skipped):
        yield (
            f"{skipped:,} step{'s were' if skipped > 1 else ' was'} skipped for a value that was not finite: lower "
            "optim.learning_rate or lengthen the warm-up, and look at the data of these steps."
        )
    if len(metrics.step) < _ROWS:
        return
    loss, norm = metrics["loss"], metrics["grad_norm"]
    norm = norm[np.isfinite(norm)]
    first, last = _ends(loss)
    if last > 1.05 * first:
        yield (
            f"The loss has grown from {first:.3g} to {last:.3g}: lower optim.learning_rate, and check that model "
            "and tokenizer belong together (expertmesh check)."
        )
    if len(norm) and norm.max() == 0:
        yield "The gradient norm was 0 in every step: nothing is trained; check lora.targets and data.loss_on."
    clip = run.config.optim.max_grad_norm if run.config is not None else None
    if clip is not None and len(norm) and (share := float(np.mean(norm > clip))) > 0.5:
        yield (
            f"{share:.0%} of the steps were clipped to optim.max_grad_norm {clip:g}, so their size is set by it "
            "rather than by the learning rate: raise it, or lower optim.learning_rate."
        )
    yield from _of_evaluation(run, loss)
    yield from _of_experts(run)
    faster, slower = _ends(metrics["tokens_per_second"])
    if slower < 0.7 * faster:
        yield (
            f"Tokens per second fell from {faster:,.0f} to {slower:,.0f}: look for other jobs on these machines, hot "
            "devices or slow storage; train --profile 3:5 shows where a step's time goes."
        )


def _of_evaluation(run: Run, loss: Column) -> Iterator[str]:
    evaluated = run.metrics.evaluated["loss"]
    best = float(np.nanmin(evaluated)) if np.isfinite(evaluated).any() else None
    if best is not None and evaluated[-1] > 1.02 * best:
        step = int(run.metrics.eval_step[int(np.nanargmin(evaluated))])
        first, last = _ends(loss)
        yield (
            f"The evaluation loss was lowest ({best:.4g}) at step {step:,} and is {evaluated[-1]:.4g} at the end"
            + (" while the training loss falls: the model learns the data by heart" if last < first else "")
            + "; take fewer epochs, or export the checkpoint nearest to that step."
        )


def _of_experts(run: Run) -> Iterator[str]:
    load_SL = run.metrics.load_SL
    if not run.metrics.layers or run.record is None or run.config is None or run.config.lora is not None:
        return  # adapters leave routers as they are
    rows, layers = max(1, len(run.metrics.step) // _END), run.record.moe_layers
    dead_L, load_L = (ignoring_nan(np.nanmedian, load_SL[key][-rows:], axis=0) for key in ("dead", "max_over_mean"))
    found = zip(run.moe_blocks, layers, load_L, dead_L, strict=False)
    if collapsed := [each for each in found if each[1].has_collapsed(*each[2:])]:
        _, layer, load, dead = max(collapsed, key=lambda each: each[3])
        yield (
            f"The router has collapsed in block {', '.join(str(block) for block, *_ in collapsed[:8])}: up to "
            f"{dead:.0f} of {layer.experts} experts are without a token, and the busiest has {load:.2g} times the mean "
            f"of at most {layer.most_load:.3g}; lower optim.learning_rate, raise moe.aux_loss_coef or "
            "moe.bias_update_rate, or set moe.router to frozen."
        )
    first, last = _ends(ignoring_nan(np.nanmax, load_SL["max_over_mean"], axis=1))
    if last > 1.5 * first and last > 3:
        most = max((layer.most_load for layer in layers), default=last)
        yield (
            f"The busiest expert's load grew from {first:.2g} to {last:.2g} of at most {most:.3g} times the mean: a "
            "step waits for its rank; raise moe.aux_loss_coef or moe.bias_update_rate, or set moe.router to frozen."
        )


def _ends(values: Column) -> tuple[float, float]:
    """Return the medians over the first and the last rows."""
    rows = max(1, len(values) // _END)
    return float(ignoring_nan(np.nanmedian, values[:rows])), float(ignoring_nan(np.nanmedian, values[-rows:]))


def render(run: Run) -> str:
    """Return the page as HTML text. The same run gives the same page except for the time in its footer."""
    metrics, title = run.metrics, run.directory.resolve().name or str(run.directory)
    if run.config is not None:
        model = run.config.model.name_or_path
        title = (Path(model).name or model) + (f", {run.record.starts[0].started[:10]}" if run.record else "")
    return _filled(
        "page.html.j2",
        run=run,
        title=title,
        config_file=shlex.quote(str(run.directory / CONFIG_FILE)),
        start=run.record.starts[-1] if run.record is not None else None,
        loss_line=thin_line(metrics.step, metrics["loss"]),
        max_points=MAX_POINTS,
        figures=draw(run),
        experts=_experts(run),
        advice=list(advice(run)),
    )


def render_together(runs: Sequence[Run]) -> str:
    """Return one page that compares several runs, each named by a letter."""
    configs = [flat(run.config.model_dump(mode="json")) if run.config is not None else {} for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config if key != "output_dir")
    values = {key: [config.get(key) if config else NOTHING for config in configs] for key in keys}
    texts = {key: [each if isinstance(each, str) else json.dumps(each) for each in row] for key, row in values.items()}
    return _filled(
        "together.html.j2",
        title=plural(len(runs), "run"),
        runs=list(zip(LETTERS, runs, strict=False)),
        figures=draw_together(runs),
        differing={key: shown for key, shown in texts.items() if len(set(shown)) > 1},
    )


@cache
def _environment() -> Environment:
    """Return the environment that fills the templates; it keeps them compiled."""
    environment = Environment(
        loader=PackageLoader("expertmesh", "report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else visible(str(value)),  # no string can hide
    )  # fmt: skip
    words = {
        "number": number, "whole": _known("{:,.0f}".format), "size": _known(bytes_text), "duration": _known(duration),
        "plural": plural, "short": short,
    }  # fmt: skip
    environment.filters |= words
    environment.tests["finite"] = lambda column: bool(np.isfinite(column).any())

    def ratio(measured: float, planned: float | None) -> str:
        return f"{measured / planned:.2f}×" if planned and math.isfinite(measured) else ""

    def earlier(starts: Sequence[Start], name: str) -> list[str]:
        """Return other versions of `name` than the last start's, in the order of their starts."""
        versions = dict.fromkeys(start.versions.get(name, "none") for start in starts)
        return [each for each in versions if each != starts[-1].versions[name]]

    environment.globals |= words | {"summarize": summarize, "ratio": ratio, "earlier": earlier, "NOTHING": NOTHING}
    return environment


def _filled(template: str, **content: Any) -> str:
    script = files("expertmesh.report").joinpath("hover.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = (
        _environment()
        .get_template(template)
        .render(
            script=Markup(script),
            script_hash=digest,
            written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            version=__version__,
            **content,
        )
    )
    return f"{page}\n"


def write(path: Path, page: str) -> None:
    """Put the page at `path`, completely or not at all. Raises `InputError` if that cannot be written."""
    with report_errors(path):
        replace_synced(path, page.encode())


def _experts(run: Run) -> dict[str, Any] | None:
    """Return the figures of the experts' load for the template; None if no row has any."""
    metrics = run.metrics
    load_SL = metrics.load_SL
    if not metrics.layers or not np.isfinite(load_SL["max_over_mean"]).any():
        return None
    rows = max(1, len(metrics.step) // _END)
    lately = {key: ignoring_nan(np.nanmedian, values_SL[-rows:], axis=0) for key, values_SL in load_SL.items()}
    layers = run.record.moe_layers if run.record is not None else []
    sizes = [layer.experts for layer in layers]
    worst: dict[str, tuple[float, int, int]] = {}  # the worst value of all, with its block and step
    for key, values_SL in load_SL.items():
        if np.isfinite(values_SL).any():
            value = WORST[key](values_SL)
            row, layer = np.argwhere(values_SL == value)[0]
            worst[key] = float(value), run.moe_blocks[layer], int(metrics.step[row])
    return {
        "rows_per_column": thin_grid(metrics.step, load_SL["max_over_mean"], np.nanmax).rows_per_column,
        "rows": rows,
        "lately": lately,
        "dead": int(np.nansum(np.ceil(lately["dead"]))),
        "most_load": max((layer.most_load for layer in layers), default=None),
        "every": sum(sizes),
        "extreme": {key: ignoring_nan(WORST[key], values_SL, axis=0) for key, values_SL in load_SL.items()},
        "worst": worst,
        "sizes": sizes if len(sizes) == metrics.layers else [NOTHING] * metrics.layers,
    }


def number(value: float, digits: int = 4) -> str:
    """Format `digits` significant digits, with thousands separated; a dash for an unknown value."""
    if not math.isfinite(value):
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def _known(form: Callable[[float], str]) -> Callable[[float], str]:
    """Return `form`, with a dash for an unknown value."""
    return lambda value: form(value) if math.isfinite(value) else NOTHING
