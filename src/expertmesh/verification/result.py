"""What a verification found: figures with their limits, checks, layers, and the report of all of them.

A figure is one comparison; a check is its worst figure with the number of comparisons behind it; a layer passes when
all its checks do. Nothing is left out silently: what could not be done on the ranks at hand is a check with the status
`not run`, and says why.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from expertmesh.io.terminal import tell

FORMAT, VERSION = "expertmesh-proof", 1
Status = Literal["pass", "fail", "not run"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One comparison: `error` of `tensor` (a name, or what was compared) must be at most `limit`."""

    tensor: str
    error: float
    limit: float

    @property
    def share(self) -> float:
        """The error as a share of what is allowed; infinite for NaN, which no comparison would catch."""
        if math.isnan(self.error) or math.isnan(self.limit):
            return math.inf
        if self.limit == 0.0:
            return 0.0 if self.error == 0.0 else math.inf
        return self.error / self.limit


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `worst` is None for what is not a number, or was not run; `note` says more."""

    name: str
    status: Status
    worst: Figure | None = None
    compared: int = 0
    note: str = ""

    @classmethod
    def of(cls, name: str, figures: Iterable[Figure], note: str = "") -> "Check":
        """The check that all `figures` are within their limits."""
        found = list(figures)
        if not found:
            return cls(name, "not run", note=note or "nothing to compare")
        worst = max(found, key=lambda figure: figure.share)
        return cls(name, "pass" if worst.share <= 1.0 else "fail", worst, len(found), note)

    @classmethod
    def that(cls, name: str, holds: bool, compared: int, note: str = "") -> "Check":
        """The check of something that is right or wrong."""
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
    """One planted bug: `expected` is the layer that has to catch it, `caught` those that did, with the check's name.

    `why_not` says why it could not be planted here.
    """

    bug: str
    expected: str
    caught: tuple[tuple[str, str], ...] = ()
    why_not: str = ""

    @property
    def status(self) -> Status:
        if self.why_not:
            return "not run"
        return "pass" if any(layer == self.expected for layer, _ in self.caught) else "fail"


@dataclass(slots=True)
class Report:
    """Everything that was found. `facts` says on what: model, layout, tokens, versions."""

    facts: dict[str, Any]
    layers: list[Layer] = field(default_factory=list)
    mutations: list[Mutation] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failures(self) -> list[str]:
        """One line for each thing that is wrong."""
        lines = [_failure(layer, check) for layer in self.layers for check in layer.checks if check.status == "fail"]
        return lines + [f"self-test: {m.bug}: not caught by {m.expected}" for m in self.mutations if m.status == "fail"]

    @property
    def status(self) -> Status:
        return "fail" if self.failures else "pass"


def write_json(report: Report, path: Path) -> None:
    """Write `report` as JSON; docs/verify.md describes it. Raises `OSError`."""
    head = {"format": FORMAT, "version": VERSION, "status": report.status}
    content = {**head, **_jsonable(report), "failures": report.failures}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def head_lines(facts: dict[str, Any]) -> Iterator[str]:
    """What is verified, for people."""
    kept, every = facts["layers"], facts["layers_of_the_model"]
    layers = f"{every} layers" if kept == every else f"the first {kept} of {every} layers"
    yield f"model       {facts['model']}: {facts['model_type']}, {layers}, {facts['precision']}"
    axes = " × ".join(f"{axis} {size}" for axis, size in facts["layout"].items() if size > 1) or "one process"
    axes += f", {facts['schedule']}" if facts["schedule"] else ""
    yield f"job         {facts['ranks']} rank{'s' if facts['ranks'] > 1 else ''} ({facts['device']}): {axes}"
    how = "packed" if facts["packing"] else "padded"
    yield (
        f"data        {facts['steps']} steps; the first has {facts['samples_of_a_step']:,} samples, {how}, of "
        f"{facts['tokens_of_a_step']:,} tokens and {facts['targets_of_a_step']:,} targets"
    )
    yield from (f"note        {note}" for note in facts["notes"])


def layer_lines(layer: Layer) -> Iterator[str]:
    """One layer for people: a line per check."""
    for number, check in enumerate(layer.checks):
        head = layer.name if number == 0 else ""
        yield f"{head:<12}{check.status:<9}{check.name}{_figures(check)}"


def mutation_lines(mutations: Iterable[Mutation]) -> Iterator[str]:
    """The self-test for people: a line per bug."""
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


def _failure(layer: Layer, check: Check) -> str:
    return f"{layer.name}: {check.name}{_figures(check)}"


def _jsonable(value: Any) -> Any:
    """Dataclasses as dictionaries, with their status; JSON has no infinity and no NaN."""
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
    """Print on rank 0. Every rank may call it."""
    if dist.get_rank() == 0:
        tell(*lines)
