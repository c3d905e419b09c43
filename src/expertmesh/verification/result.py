"""The results of a verification: figures with their limits, checks, layers, and the report of all of them.

A figure is one comparison. A check is the worst of its figures, with their number. A layer passes if no check fails and
at least one passes. Nothing is left out silently: a check that is impossible on these ranks has the status `not run`
and a note with the reason.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from expertmesh.io.directory import report_errors
from expertmesh.io.terminal import plural, tell

FORMAT, VERSION = "expertmesh-proof", 1
Status = Literal["pass", "fail", "not run"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One comparison: `error` must be at most `limit`."""

    tensor: str
    """The name of the tensor, or a description of the number."""
    error: float
    """The measured error, relative if possible."""
    limit: float
    """The largest allowed error."""

    @property
    def share(self) -> float:
        """The error divided by the limit; infinite for NaN, for which every comparison is false."""
        if math.isnan(self.error) or math.isnan(self.limit):
            return math.inf
        if self.limit == 0.0:
            return 0.0 if self.error == 0.0 else math.inf
        return self.error / self.limit


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    """The comparison, in words."""
    status: Status
    """`pass`, `fail` or `not run`."""
    worst: Figure | None = None
    """The figure with the largest share of its limit; None if the check has no number, or was not run."""
    compared: int = 0
    note: str = ""
    """Further details, or the reason why it was not run."""

    @classmethod
    def of(cls, name: str, figures: Iterable[Figure], note: str = "") -> "Check":
        """Return the check that all `figures` are within their limits; `not run` if there is none."""
        found = list(figures)
        if not found:
            return cls(name, "not run", note=note or "nothing to compare")
        worst = max(found, key=lambda figure: figure.share)
        return cls(name, "pass" if worst.share <= 1.0 else "fail", worst, len(found), note)

    @classmethod
    def that(cls, name: str, holds: bool, compared: int, note: str = "") -> "Check":
        """Return the check of a statement that is right or wrong, without a number."""
        return cls(name, "pass" if holds else "fail", None, compared, note)

    @classmethod
    def not_run(cls, name: str, why: str) -> "Check":
        return cls(name, "not run", note=why)


@dataclass(slots=True)
class Layer:
    """One layer of the proof."""

    name: str
    checks: list[Check] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def status(self) -> Status:
        statuses = {check.status for check in self.checks}
        return "fail" if "fail" in statuses else "pass" if "pass" in statuses else "not run"


@dataclass(frozen=True, slots=True)
class Mutation:
    """The result of one planted bug."""

    bug: str
    expected: str
    """The layer that has to catch it."""
    caught: tuple[tuple[str, str], ...] = ()
    """The layer and the name of each check that caught it."""
    why_not: str = ""
    """The reason why it could not be planted in this run; empty if it was."""

    @property
    def status(self) -> Status:
        if self.why_not:
            return "not run"
        return "pass" if any(layer == self.expected for layer, _ in self.caught) else "fail"


@dataclass(slots=True)
class Report:
    """All results of a verification."""

    facts: dict[str, Any]
    """The object of the verification: model, layout, tokens, versions."""
    layers: list[Layer] = field(default_factory=list)
    """The layers of the proof, in the order in which they ran."""
    mutations: list[Mutation] = field(default_factory=list)
    """The planted bugs; empty without the self-test."""
    seconds: float = 0.0

    @property
    def failures(self) -> list[str]:
        """One line for each failed check and for each planted bug that was not caught."""
        failed = ((layer, check) for layer in self.layers for check in layer.checks if check.status == "fail")
        lines = [f"{layer.name}: {check.name}{_figures(check)}" for layer, check in failed]
        return lines + [f"self-test: {m.bug}: not caught by {m.expected}" for m in self.mutations if m.status == "fail"]

    @property
    def status(self) -> Status:
        return "fail" if self.failures else "pass"


def write_proof(report: Report, path: Path) -> None:
    """Write `report` as JSON in the format that docs/verify.md describes. Raises `InputError`."""
    head = {"format": FORMAT, "version": VERSION, "status": report.status}
    found = {"layers": report.layers, "mutations": report.mutations, "seconds": report.seconds}
    write_json({**head, "facts": report.facts, **found, "failures": report.failures}, path)


def write_json(content: dict[str, Any], path: Path) -> None:
    """Write `content` as JSON, infinity and NaN as text. Raises `InputError` for a path that cannot be written."""
    with report_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_jsonable(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def head_lines(facts: dict[str, Any]) -> Iterator[str]:
    """Yield the terminal lines that describe what is verified."""
    kept, every = facts["layers"], facts["layers_of_the_model"]
    layers = f"{every} layers" if kept == every else f"the first {kept} of {every} layers"
    yield f"model       {facts['model']}: {facts['model_type']}, {layers}, {facts['precision']}"
    axes = " × ".join(f"{axis} {size}" for axis, size in facts["layout"].items() if size > 1) or "one process"
    axes += f", {facts['schedule']}" if facts["schedule"] else ""
    yield f"job         {plural(facts['ranks'], 'rank')} ({facts['device']}): {axes}"
    how = "packed" if facts["packing"] else "padded"
    yield (
        f"data        {plural(facts['steps'], 'step')}; the first has "
        f"{plural(facts['samples_of_a_step'], 'sample')}, {how}, of "
        f"{facts['tokens_of_a_step']:,} tokens and {facts['targets_of_a_step']:,} targets"
    )
    yield from (f"note        {note}" for note in facts["notes"])


def layer_lines(layer: Layer) -> Iterator[str]:
    """Yield the terminal lines of one layer, one per check."""
    for number, check in enumerate(layer.checks):
        head = layer.name if number == 0 else ""
        yield f"{head:<12}{check.status:<9}{check.name}{_figures(check)}"


def mutation_lines(mutations: Iterable[Mutation]) -> Iterator[str]:
    """Yield the terminal lines of the self-test, one per bug."""
    for number, mutation in enumerate(mutations):
        head = "self-test" if number == 0 else ""
        if mutation.why_not:
            found = f"not planted: {mutation.why_not}"
        else:
            names = dict.fromkeys(layer for layer, _ in mutation.caught)
            found = f"caught by {', '.join(names) or 'nothing'}"
        yield f"{head:<12}{mutation.status:<9}{mutation.bug}: {found}"


def _figures(check: Check) -> str:
    parts = []
    if check.worst is not None:
        worst = check.worst
        parts.append(f"{worst.error:.1e} of {worst.limit:.1e} allowed ({worst.tensor}; {check.compared:,} compared)")
    elif check.compared:
        parts.append(f"{check.compared:,} compared")
    if check.note:
        parts.append(check.note)
    return f": {'; '.join(parts)}" if parts else ""


def _jsonable(value: Any) -> Any:
    """Return dataclasses as dictionaries with their status, and infinity and NaN as strings, which JSON cannot hold."""
    if is_dataclass(value):
        found = {each.name: _jsonable(getattr(value, each.name)) for each in fields(value)}
        return {**found, "status": value.status} if isinstance(value, Layer | Mutation) else found
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def say(lines: Iterable[str]) -> None:
    """Print on rank 0 alone. Every rank may call it. Collectives: none."""
    if dist.get_rank() == 0:
        tell(*lines)
