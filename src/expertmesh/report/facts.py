"""The sections that are told and not drawn: the plan against what was measured, verification, starts, configuration."""

import math
import shlex
from collections.abc import Iterator

from expertmesh.report.html import Html, join, table, tag
from expertmesh.report.run import AUDIT_FILE, CONFIG_FILE, RESULTS, VERIFICATION_FILE, Run, Verification
from expertmesh.report.words import NOTHING, duration, highest, last, middle, number, plural, size, whole
from expertmesh.training.record import Prediction, RunRecord, Start


def plan(run: Run) -> Html:
    """What was planned beside what happened."""
    if run.record is None:
        return tag("p", "The run has left no run.json, so what was planned is not known.")
    start = run.record.starts[-1]
    head = ("", "planned", "measured", "measured / planned")
    parts = [table(head, list(_planned(run, run.record, start)), label="Plan and measurement", numbers=1)]
    if start.plan is None:
        parts.append(
            tag(
                "p",
                "Speed and memory were not predicted for this run, so they stand without a comparison.",
                class_="soft",
            )
        )
    elif start.device == "cpu" and start.plan.peak_memory_bytes is not None:
        parts.append(
            tag(
                "p",
                "On a CPU, what is measured is the resident memory of the whole process, with Python and libraries.",
                class_="soft",
            )
        )
    parts.append(tag("h3", "The plan as it was printed"))
    parts.append(tag("pre", "\n".join(start.printed), tabindex=0))
    return join(*parts)


def _planned(run: Run, record: RunRecord, start: Start) -> Iterator[tuple[object, ...]]:
    metrics = run.metrics
    since = metrics.step > start.after_step
    yield "optimizer steps", f"{start.total_steps:,}", f"{run.last_step:,}", _ratio(run.last_step, start.total_steps)
    if run.config is not None:
        epoch = last(metrics["epoch"])
        passes = record.train_data.tokens * epoch
        yield "passes over the data", f"up to {run.config.train.num_epochs}", number(epoch, 3), ""
        yield (
            "input tokens",
            f"{record.train_data.tokens:,} a pass",
            f"about {whole(passes)}" if passes else NOTHING,
            "",
        )
    sequences = start.micro_batch_size * start.data_ranks * start.accumulation
    batch = f"{start.micro_batch_size} micro-batch × {start.data_ranks} data ranks × {start.accumulation} accumulation"
    yield "sequences a step", f"{sequences:,} = {batch}", "", ""
    yield "target tokens a step", "", whole(middle(metrics["target_tokens"])), ""
    predicted = start.plan or Prediction()
    compared = (
        ("seconds a step", predicted.step_seconds, middle(metrics.step_seconds()[since]), duration),
        ("tokens per second", predicted.tokens_per_second, middle(metrics["tokens_per_second"][since]), whole),
        ("peak memory of a rank", predicted.peak_memory_bytes, highest(metrics["peak_memory_bytes"][since]), size),
    )
    for label, planned, measured, words in compared:
        yield label, NOTHING if planned is None else words(planned), words(measured), _ratio(measured, planned)


def _ratio(measured: float, planned: float | None) -> str:
    if planned is None or planned <= 0 or not math.isfinite(measured):
        return ""
    return f"{measured / planned:.2f}×"


def verification(run: Run) -> Html:
    """What `expertmesh verify` found, or how to have it look."""
    found = run.verification
    parts: list[Html] = []
    if found is None:
        command = f"expertmesh verify {shlex.quote(str(run.directory / CONFIG_FILE))}"
        parts.append(
            tag("p", tag("strong", "Not verified."), " Whether the job computes what the unsharded model does:")
        )  # fmt: skip
        parts.append(tag("pre", command))
    else:
        word = tag("strong", "Passed" if found.sound else "FAILED", class_="good" if found.sound else "bad")
        failed = [layer.name for layer in found.layers if layer.status == "fail"]
        told = (
            "what was run agrees with the unsharded model."
            if found.sound
            else f"see {', '.join(failed) or 'the report'}."
        )
        if found.status == "pass" and not found.sound:
            told = "the report says passed, but what is in it does not; it counts as failed."
        parts.append(tag("p", word, ": ", told, " From ", tag("code", VERIFICATION_FILE), "."))
        head = ("layer", "check", "result", "worst figure", "allowed", "in", "")
        parts.append(table(head, list(_checks(found)), label="Verification layer by layer"))
        if found.mutations:
            caught = sum(bug.status == "pass" for bug in found.mutations)
            missed = ", ".join(bug.bug for bug in found.mutations if bug.status == "fail")
            told = f"{caught} of {plural(len(found.mutations), 'planted bug')} caught"
            parts.append(tag("p", f"Self-test: {told}{f'; not caught: {missed}' if missed else ''}."))
    if run.audit is not None:
        told = (
            f" compared every byte of {plural(run.audit.tensors, 'tensor')}, {size(run.audit.bytes_compared)}, with "
            "the files in "
        )
        parts.append(
            tag("p", "The audit at the start (", tag("code", AUDIT_FILE), ")", told, tag("code", run.audit.source), ".")
        )
    return join(*parts)


def _checks(found: Verification) -> Iterator[tuple[object, ...]]:
    for layer in found.layers:
        for number_of, check in enumerate(layer.checks):
            classes = {"pass": "good", "fail": "bad", "not run": None}
            worst = check.worst
            yield (
                layer.name if number_of == 0 else "",
                check.name,
                tag("span", check.status, class_=classes[check.status]),
                NOTHING if worst is None else _figure(worst.error),
                NOTHING if worst is None else _figure(worst.limit),
                NOTHING if worst is None else tag("code", worst.tensor),
                check.note,
            )


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else number(value)


def starts(run: Run) -> Html:
    """When and where the run ran, what it has left, and by which versions."""
    parts: list[Html] = []
    if run.record is not None:
        rows: list[tuple[object, ...]] = []
        for start in run.record.starts:
            axes = ", ".join(f"{axis} {size}" for axis, size in start.layout.items() if size > 1) or "one process"
            shown = f"{start.world_size:,} × {start.device_name}"
            choices = (
                f"dispatch {start.dispatch}, compute {start.compute}, checkpointing {start.activation_checkpointing}"
            )
            rows.append((start.started, f"{start.after_step:,}", shown, axes, choices))
        head = ("started", "after step", "ranks", "layout", "chosen")
        parts.append(table(head, rows, label="Starts of the run"))
        parts.append(tag("h3", "What a rank holds"))
        shares: list[tuple[object, ...]] = [
            (
                f"{share.ranks:,} of {run.record.starts[-1].world_size:,}",
                f"{share.dense:,}",
                f"{share.expert:,}",
                f"{share.adapter:,}",
                size(share.bytes_to_load),
            )
            for share in run.record.starts[-1].shares
        ]
        head = ("ranks", "dense parameters", "expert parameters", "of adapters", "to load")
        parts.append(table(head, shares, label="What a rank holds", numbers=1))
        parts.append(tag("h3", "Versions"))
        parts.append(table(("", "version"), _versions(run.record), label="Versions"))
    parts.append(tag("h3", "What it has left"))
    kept = [f"checkpoints of {_steps(run.checkpoints)}"] if run.checkpoints else ["no checkpoint"]
    kept += [f"{name}/" for name in RESULTS if name in run.results]
    parts.append(tag("p", tag("code", str(run.directory)), ": ", ", ".join(kept), "."))
    return join(*parts)


def _versions(record: RunRecord) -> list[tuple[object, ...]]:
    """Of the last start; where an earlier one differed, that too."""
    rows: list[tuple[object, ...]] = []
    for name, value in record.starts[-1].versions.items():
        earlier = [start.versions.get(name, "none") for start in record.starts[:-1]]
        others = dict.fromkeys(each for each in earlier if each != value)
        rows.append((name, value + (f" (earlier: {', '.join(others)})" if others else "")))
    return rows


def _steps(steps: tuple[int, ...]) -> str:
    shown = [f"step {step:,}" for step in steps[-6:]]
    return (f"{len(steps) - 6:,} more and " if len(steps) > 6 else "") + ", ".join(shown)


def configuration(run: Run) -> Html:
    if run.config_text is None:
        return tag("p", "There is no configuration that can be read.")
    return join(
        tag("p", "As it was resolved, defaults included.", class_="soft"), tag("pre", run.config_text, tabindex=0)
    )
