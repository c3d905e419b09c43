"""The top of the page: what run this is, how it stands, and its figures at a glance."""

import shlex
from collections.abc import Iterator

import numpy as np

from expertmesh.report.experts import lately
from expertmesh.report.html import Html, join, tag
from expertmesh.report.plots import short
from expertmesh.report.run import CONFIG_FILE, Run
from expertmesh.report.words import duration, first, highest, last, lowest, middle, number, plural, size, whole


def title(run: Run) -> str:
    return run.directory.resolve().name or str(run.directory)


def header(run: Run) -> Html:
    return join(tag("h1", title(run)), *(tag("p", line) for line in (_what(run), _standing(run)) if line))


def _what(run: Run) -> Html | None:
    """The model, what is trained of it, and on what."""
    if run.config is None:
        return None
    parts: list[object] = [tag("code", run.config.model.name_or_path)]
    record = run.record
    if record is not None:
        layers = record.moe_layers
        experts = "/".join(str(n) for n in sorted({layer.experts for layer in layers}))
        parts.append(
            f": {record.model_type}, {short(record.parameters)} parameters, {plural(len(layers), 'MoE layer')} of "
            f"{experts} experts. "
        )
    else:
        parts.append(". ")
    lora = run.config.lora
    parts.append("Full fine-tuning" if lora is None else f"LoRA of rank {lora.r} on {', '.join(lora.targets)}")
    if record is not None:
        start = record.starts[-1]
        axes = ", ".join(f"{axis} {size}" for axis, size in start.layout.items() if size > 1) or "one process"
        parts.append(f" on {plural(start.world_size, 'rank')} ({axes}), {start.device_name}")
    return join(*parts, ".")


def _standing(run: Run) -> Html:
    total = f" of {run.total_steps:,}" if run.total_steps is not None else ""
    at = f"step {run.last_step:,}{total}"
    newest = f"step {run.checkpoints[-1]:,}" if run.checkpoints else None
    again = join(tag("code", f"expertmesh train {shlex.quote(str(run.directory / CONFIG_FILE))}"))
    on = f" continues from the checkpoint of {newest}." if newest else " starts it again: there is no checkpoint."
    if run.state == "running":
        return join(tag("strong", "Running"), f": {at} when this page was written.")
    if run.state == "finished":
        results = " and ".join(f"{name}/" for name in run.results)
        return join(tag("strong", "Finished", class_="good"), f" at {at}; the result is in ", tag("code", results), ".")
    if run.state == "ended":
        how = f" after {at}: its process is gone and has left no result. "
        return join(tag("strong", "Ended early", class_="bad"), how, again, on)
    if run.state == "stopped":
        return join(tag("strong", "Stopped"), f" after {at}, without a result yet. ", again, on)
    return join(tag("strong", "Not started"), ": no step has been reported yet.")


def cards(run: Run) -> Html:
    """The figures at a glance."""
    entries = (
        tag("div", tag("dt", name), tag("dd", value, tag("small", detail) if detail else ""))
        for name, value, detail in _figures(run)
    )
    return tag("dl", *entries, class_="cards")


def _figures(run: Run) -> Iterator[tuple[str, object, str]]:
    metrics = run.metrics
    total = f"of {run.total_steps:,}" if run.total_steps is not None else ""
    yield "Steps", f"{run.last_step:,}", total
    if len(metrics.step):
        loss = metrics["loss"]
        yield "Loss", number(last(loss)), f"first {number(first(loss))}, lowest {number(lowest(loss))}"
    if len(metrics.eval_step):
        evaluated = metrics.eval_loss
        detail = f"lowest of {len(evaluated)}: {number(lowest(evaluated))}" if len(evaluated) > 1 else "the only one"
        yield "Evaluation loss", number(last(evaluated)), detail
    if len(metrics.step):
        yield "Tokens per second", whole(middle(metrics["tokens_per_second"])), "median of the whole job"
        yield "Peak memory", size(highest(metrics["peak_memory_bytes"])), _memory_kind(run)
        yield (
            "Time",
            duration(highest(metrics["elapsed_seconds"])),
            f"{duration(middle(metrics.step_seconds()))} a step",
        )
        skipped = len(metrics.skipped)
        yield (
            "Skipped steps",
            tag("span", f"{skipped:,}", class_="bad" if skipped else None),
            "for a value that was not finite",
        )
    if metrics.layers:
        load, dead = (lately(metrics.load_SL[key]) for key in ("max_over_mean", "dead"))
        detail = "busiest expert over the mean, worst layer, lately"
        yield "Expert load", f"{number(highest(load), 2)}×", detail
        yield "Dead experts", whole(float(np.nansum(np.ceil(dead)))), "without a token, all layers, lately"
    verification = run.verification
    if verification is None:
        yield "Verified", "no", "not by expertmesh verify"
    else:
        good = verification.sound
        count = sum(layer.status == "pass" for layer in verification.layers)
        said = tag("span", "passed" if good else "FAILED", class_="good" if good else "bad")
        yield "Verified", said, f"{count} of {plural(len(verification.layers), 'layer')} passed"


def _memory_kind(run: Run) -> str:
    device = run.record.starts[-1].device if run.record is not None else None
    if device is None:
        return "highest rank"
    return "resident, highest rank" if device == "cpu" else "allocated on the device, highest rank"
