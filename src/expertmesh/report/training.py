"""The section on training: loss, gradient norm, learning rate, speed and memory over steps, and what was skipped."""

import math
from collections.abc import Iterator

import numpy as np

from expertmesh.report.html import Html, join, table, tag
from expertmesh.report.metrics import Column
from expertmesh.report.plots import Marks, Points, draw_lines
from expertmesh.report.run import Run
from expertmesh.report.series import MAX_POINTS, Line, line
from expertmesh.report.words import first, highest, known, last, lowest, middle, number, plural, size

# Beyond this ratio of highest to typical, a line on a linear scale shows nothing but its peak.
_LOG_RATIO = 8.0
_SKIPPED_NAMED = 50


def marks_of(run: Run) -> Marks:
    resumed = [start.after_step for start in run.record.starts if start.after_step] if run.record is not None else []
    return Marks([step for step, _ in run.metrics.skipped], resumed)


def section(run: Run) -> Html:
    """Figures and their explanation; a sentence if there is nothing to draw yet."""
    if not len(run.metrics.step):
        return tag("p", "metrics.jsonl has no step yet, so there is nothing to draw.")
    return join(*_explanation(run), tag("div", *_figures(run, marks_of(run)), class_="figures"), *_skipped(run))


def _explanation(run: Run) -> Iterator[Html]:
    steps = run.metrics.step
    thinned = line(steps, run.metrics["loss"])
    said = [f"{plural(len(steps), 'step')} reported, {steps[0]:,} to {steps[-1]:,}."]
    if thinned.rows_per_point > 1:
        said.append(
            f"A figure shows at most {MAX_POINTS} points, so each of the {len(thinned.step):,} is the median of "
            f"{thinned.rows_per_point:,} rows; the pale band reaches from their lowest to their highest."
        )
    if thinned.smooth is not None:
        said.append("The strong line is the median of a neighbourhood, a twentieth of all points wide.")
    if run.metrics.skipped:
        said.append("Triangles at the upper edge mark skipped steps.")
    if marks_of(run).resumed:
        said.append("Dashed vertical lines mark where the run was resumed.")
    yield tag("p", " ".join(said), class_="soft")


def _figures(run: Run, marks: Marks) -> Iterator[Html]:
    metrics = run.metrics
    evaluated = Points("evaluation", metrics.eval_step.tolist(), metrics.eval_loss.tolist())
    if metrics.has("loss") or len(metrics.eval_step):
        told = _told(metrics["loss"])
        if len(metrics.eval_step):
            told += f"; last evaluation {number(last(metrics.eval_loss))}"
        yield _figure(
            "Loss",
            f"per target token: {told}",
            _line(run, "loss"),
            marks,
            name="loss",
            label="training",
            points=evaluated,
        )
    if metrics.has("grad_norm"):
        clip = run.config.optim.max_grad_norm if run.config is not None else None
        norms, told = known(metrics["grad_norm"]), _told(metrics["grad_norm"])
        if clip is not None:
            told += f"; clipped to {clip:g} in {float(np.mean(norms > clip)):.0%} of the steps"
        log = bool((norms > 0).all()) and float(norms.max()) > _LOG_RATIO * middle(norms)
        limit = (f"clipped to {clip:g}", clip) if clip is not None else None
        yield _figure(
            "Gradient norm", f"of the whole model, before clipping: {told}", _line(run, "grad_norm"), marks,
            name="grad-norm", label="gradient norm", limit=limit, log=log, from_zero=not log,
        )  # fmt: skip
    if metrics.has("learning_rate"):
        yield _figure(
            "Learning rate", f"highest {number(highest(metrics['learning_rate']))}", _line(run, "learning_rate", False),
            marks, name="learning-rate", label="learning rate", from_zero=True,
        )  # fmt: skip
    if metrics.has("tokens_per_second"):
        values = metrics["tokens_per_second"]
        told = f"median {number(middle(values))}, lowest {number(lowest(values))}, highest {number(highest(values))}"
        yield _figure(
            "Tokens per second", f"input tokens of the whole job, without padding: {told}",
            _line(run, "tokens_per_second"), marks, name="speed", label="tokens per second", from_zero=True,
        )  # fmt: skip
    if metrics.has("peak_memory_bytes"):
        values = metrics["peak_memory_bytes"]
        yield _figure(
            "Peak memory, GiB", f"of the fullest rank, since the start: {size(first(values))} to {size(last(values))}",
            _line(run, "peak_memory_bytes", False), marks, name="memory", label="peak memory", unit="GiB",
            from_zero=True,
        )  # fmt: skip
    for key, what in (("aux_loss", "Load-balancing loss"), ("z_loss", "Router z-loss")):
        if metrics.has(key):
            told = f"without its factor, apart from the loss: {_told(metrics[key])}"
            yield _figure(what, told, _line(run, key), marks, name=key.replace("_", "-"), label=what.lower())


def _figure(heading: str, told: str, drawn: Line, marks: Marks, *, name: str, **options: object) -> Html:
    picture = draw_lines(name, f"{heading} over steps; {told}", drawn, marks, **options)  # type: ignore[arg-type]
    return tag("figure", tag("figcaption", heading, tag("span", told)), picture)


def _line(run: Run, key: str, smoothed: bool = True) -> Line:
    """Without the strong line for what is smooth by itself."""
    drawn = line(run.metrics.step, run.metrics[key])
    return drawn if smoothed else Line(drawn.step, drawn.middle, drawn.low, drawn.high, None, drawn.rows_per_point)


def _told(values: Column) -> str:
    missing = int(np.isnan(values).sum())
    told = f"first {number(first(values))}, last {number(last(values))}, lowest {number(lowest(values))}"
    highest_value = highest(values)
    if math.isfinite(highest_value) and highest_value > first(values):
        told += f", highest {number(highest_value)}"
    return told + (f"; {plural(missing, 'row')} without a finite value" if missing else "")


def _skipped(run: Run) -> Iterator[Html]:
    skipped = run.metrics.skipped
    if not skipped:
        return
    yield tag("h3", f"Skipped steps: {len(skipped):,}")
    if len(skipped) > _SKIPPED_NAMED:
        yield tag("p", f"The first {_SKIPPED_NAMED} of them:")
    rows: list[tuple[object, ...]] = [(f"{step:,}", why) for step, why in skipped[:_SKIPPED_NAMED]]
    yield table(("step", "why no update was made"), rows, label="Skipped steps")
