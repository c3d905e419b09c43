"""The whole page, from a run that was read: `render` gives it as text, `write` puts it in its place.

One file without fonts, pictures or scripts from elsewhere: its own content security policy lets the browser load
nothing at all, and run hover.js alone, by its hash. page.html.j2 and together.html.j2 lay it out; every text in it is
escaped unless it is a figure of ours.
"""

import base64
import hashlib
import json
import math
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import ascii_uppercase as LETTERS
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from expertmesh import __version__
from expertmesh.config.errors import InputError
from expertmesh.io.safetensors_writer import replace_synced
from expertmesh.io.terminal import duration
from expertmesh.report.advice import advice
from expertmesh.report.metrics import WORST
from expertmesh.report.plots import draw, draw_together, short
from expertmesh.report.run import CONFIG_FILE, Run
from expertmesh.report.series import MAX_POINTS, ignoring_nan, summarize, thin_grid, thin_line
from expertmesh.training.reporting.record import Start
from expertmesh.training.resume import flat

NOTHING = "–"
# "Lately" is this share of the rows, at the end.
_LATELY = 10


def render(run: Run) -> str:
    """Return the page as HTML text. The same run gives the same page except for the time in its footer."""
    metrics = run.metrics
    return _filled(
        "page.html.j2",
        run=run,
        title=_title(run),
        config_file=shlex.quote(str(run.directory / CONFIG_FILE)),
        start=run.record.starts[-1] if run.record is not None else None,
        loss_line=thin_line(metrics.step, metrics["loss"]),
        max_points=MAX_POINTS,
        figures=draw(run),
        experts=_experts(run),
        advice=list(advice(run)),
    )


def _title(run: Run) -> str:
    """Return the model's name and the day of the first start; the run's directory where these are unknown."""
    if run.config is None:
        return run.directory.resolve().name or str(run.directory)
    model = Path(run.config.model.name_or_path).name or run.config.model.name_or_path
    return model if run.record is None else f"{model}, {run.record.starts[0].started[:10]}"


def render_together(runs: Sequence[Run]) -> str:
    """Return one page that compares several runs, each named by a letter."""
    configs = [flat(run.config.model_dump(mode="json")) if run.config is not None else {} for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config if key != "output_dir")
    values = {key: [_text(config.get(key)) if config else NOTHING for config in configs] for key in keys}
    return _filled(
        "together.html.j2",
        title=plural(len(runs), "run"),
        runs=list(zip(LETTERS, runs, strict=False)),
        figures=draw_together(runs),
        differing={key: shown for key, shown in values.items() if len(set(shown)) > 1},
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@cache
def _environment() -> Environment:
    """Return the environment that fills the templates; it keeps them compiled."""
    environment = Environment(
        loader=PackageLoader("expertmesh", "report"), autoescape=True, undefined=StrictUndefined, finalize=_visible,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    words = {"number": number, "whole": whole, "size": size, "duration": _duration, "plural": plural, "short": short}
    environment.filters |= words
    environment.tests["finite"] = lambda column: bool(np.isfinite(column).any())
    environment.globals |= words | {"summarize": summarize, "ratio": _ratio, "earlier": _earlier, "NOTHING": NOTHING}
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
    """Put the page at `path`, whole or not at all. `InputError` if that cannot be written."""
    try:
        replace_synced(path, page.encode())
    except OSError as error:
        raise InputError(
            f"{path}: the report cannot be written: {error.strerror}; choose another --output",
            key="cli.unwritable-report",
        ) from error


def _visible(value: object) -> object:
    """Escape control characters, bidirectional overrides and what is no Unicode character: no string can hide."""
    if isinstance(value, Markup):
        return value
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in str(value))


def _experts(run: Run) -> dict[str, Any] | None:
    """Return the figures of the experts' load for the template; None if no row has any."""
    metrics = run.metrics
    load_SL = metrics.load_SL
    if not metrics.layers or not np.isfinite(load_SL["max_over_mean"]).any():
        return None
    rows = max(1, len(metrics.step) // _LATELY)
    lately = {key: ignoring_nan(np.nanmedian, values_SL[-rows:], axis=0) for key, values_SL in load_SL.items()}
    layers = run.record.moe_layers if run.record is not None else []
    sizes = [layer.experts for layer in layers]
    return {
        "rows_per_column": thin_grid(metrics.step, load_SL["max_over_mean"], np.nanmax).rows_per_column,
        "rows": rows,
        "lately": lately,
        "dead": int(np.nansum(np.ceil(lately["dead"]))),
        "most_load": max((layer.most_load for layer in layers), default=None),
        "every": sum(sizes),
        "extreme": {key: ignoring_nan(WORST[key], values_SL, axis=0) for key, values_SL in load_SL.items()},
        "worst": {key: _worst(run, key) for key, values_SL in load_SL.items() if np.isfinite(values_SL).any()},
        "sizes": sizes if len(sizes) == metrics.layers else [NOTHING] * metrics.layers,
    }


def _worst(run: Run, key: str) -> tuple[float, int, int]:
    """Return the worst value of all, with its block and step."""
    values_SL = run.metrics.load_SL[key]
    value = WORST[key](values_SL)
    row, layer = np.argwhere(values_SL == value)[0]
    return float(value), run.moe_blocks[layer], int(run.metrics.step[row])


def _earlier(starts: Sequence[Start], name: str) -> list[str]:
    """Return other versions of `name` than the last start's, in the order of their starts."""
    versions = dict.fromkeys(start.versions.get(name, "none") for start in starts)
    return [each for each in versions if each != starts[-1].versions[name]]


def _ratio(measured: float, planned: float | None) -> str:
    return f"{measured / planned:.2f}×" if planned and math.isfinite(measured) else ""


def number(value: float, digits: int = 4) -> str:
    """Format `digits` significant digits, with thousands separated; a dash for an unknown value."""
    if not math.isfinite(value):
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def whole(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else NOTHING


def size(value: float) -> str:
    """Format bytes."""
    if not math.isfinite(value):
        return NOTHING
    for unit, limit, digits in (("GiB", 2**30, 2), ("MiB", 2**20, 1), ("KiB", 2**10, 1)):
        if value >= limit:
            return f"{value / limit:.{digits}f} {unit}"
    return f"{value:.0f} bytes"


def _duration(seconds: float) -> str:
    return duration(seconds) if math.isfinite(seconds) else NOTHING


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count != 1)}"
