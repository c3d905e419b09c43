"""Reads `metrics.jsonl` as columns of numbers, whatever state the run is in or ended in.

Nothing in the file is trusted: a line cut short by a kill, values that are null because they were not finite, rows
without keys that are optional, lines that are no rows at all. What could not be used is reported in `notes`.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertmesh.config.errors import InputError
from expertmesh.io.reading import MAX_METRICS_BYTES, opened
from expertmesh.io.reading import rows as lines

Column = npt.NDArray[np.float64]
NUMBERS = (
    "epoch", "loss", "grad_norm", "learning_rate", "target_tokens", "tokens_per_second", "peak_memory_bytes",
    "elapsed_seconds", "step_seconds", "aux_loss", "z_loss", "rewards/chosen", "rewards/rejected", "rewards/margins",
    "rewards/accuracies",
)  # fmt: skip
# Those that an evaluation has, with `eval_` in front, and again with the name of each set of data.
EVALUATED = ("loss", "token_accuracy", "rewards/margins", "rewards/accuracies")
# What a row says of a layer's experts, and which end of it needs attention.
WORST = {"max_over_mean": np.nanmax, "ranks_max_over_mean": np.nanmax, "entropy": np.nanmin, "dead": np.nanmax}
_LINES_NAMED = 5
# Sets of data that are drawn, evaluations whose answers are shown, and answers of each.
MAX_SETS, _SAMPLED, _SAMPLES = 8, 4, 50


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt of an evaluation set, and answers to it."""

    source: str
    prompt: str
    expected: str
    """The answer in the data."""
    answers: dict[int, str] = field(default_factory=dict)
    """The model's, by step."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """Rows in the order of their steps. S reported steps, L MoE layers; what a row lacks is NaN."""

    step: npt.NDArray[np.int64]
    """`[S]`."""
    numbers: dict[str, Column]
    """A column `[S]` for each of `NUMBERS`."""
    load_SL: dict[str, npt.NDArray[np.float32]]
    """A table for each of `WORST`."""
    tokens: tuple[int, npt.NDArray[np.float64]] | None
    """The last step with the tokens of every expert, and these, `[L, E]`."""
    skipped: tuple[tuple[int, str], ...]
    """Steps without an update, and why."""
    eval_step: npt.NDArray[np.int64]
    """Steps after which there was an evaluation."""
    eval_seconds: Column
    """Duration of each evaluation."""
    evaluated: dict[str, Column]
    """A column for each of `EVALUATED`, as long as `eval_step`."""
    sets: dict[str, dict[str, Column]]
    """The same, for each named set."""
    answered: tuple[Answered, ...]
    """The samples of the first evaluation that has any, of the last, and of some between."""
    notes: tuple[str, ...]
    """Sentences about rows that could not be read."""

    def __getitem__(self, name: str) -> Column:
        return self.numbers[name]

    def has(self, name: str) -> bool:
        """Return whether any row has a finite value of it."""
        return bool(np.isfinite(self.numbers[name]).any())

    @property
    def layers(self) -> int:
        return int(self.load_SL["dead"].shape[1])

    def step_seconds(self) -> Column:
        """Return seconds per step since the row before, evaluation and checkpoints included; NaN for the first."""
        if not len(self.step):
            return np.empty(0)
        steps, seconds = np.diff(self.step, prepend=np.nan), np.diff(self["elapsed_seconds"], prepend=np.nan)
        # Where a run was interrupted, the time between is lost; it never runs backwards.
        return np.where(seconds >= 0, seconds / steps, np.nan)


@dataclass(slots=True)
class _Rows:
    """The rows that were read so far; a later row of a step replaces an earlier one."""

    steps: dict[int, list[float]] = field(default_factory=dict)
    loads: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    samples: dict[int, list[dict[str, str]]] = field(default_factory=dict)
    tokens: tuple[int, npt.NDArray[np.float64]] | None = None
    repeated: set[int] = field(default_factory=set)
    strange: list[int] = field(default_factory=list)
    cut_short: bool = False

    def add(self, number: int, line: bytes) -> None:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        step = row.get("step") if isinstance(row, dict) else None
        if type(step) is not int or not 0 < step < 2**53:
            self.strange.append(number)
        elif "eval_loss" in row:
            self.evaluations[step] = {key[5:]: _number(row[key]) for key in row if key.startswith("eval_")}
            self.samples.pop(step, None)
            if samples := _samples(row.get("eval_samples")):
                self.samples[step] = samples
        elif "loss" in row:
            if step in self.steps:
                self.repeated.add(step)
            self.steps[step] = [_number(row.get(key)) for key in NUMBERS]
            self.loads[step] = _load(row.get("expert_load"))
            self.tokens = _tokens(step, row.get("expert_tokens")) or self.tokens
            self.skipped.pop(step, None)
            if row.get("skipped") is not None:
                self.skipped[step] = str(row["skipped"])
        else:
            self.strange.append(number)

    def notes(self) -> Iterator[str]:
        if self.cut_short:
            yield "The last line of metrics.jsonl is cut short, as a run leaves it that is killed while it writes."
        if self.strange:
            named = ", ".join(str(number) for number in self.strange[:_LINES_NAMED])
            more = f" and {len(self.strange) - _LINES_NAMED:,} more" if len(self.strange) > _LINES_NAMED else ""
            yield f"Lines of metrics.jsonl that are no rows of metrics are left out: {named}{more}."
        if self.repeated:
            yield f"Steps that metrics.jsonl reports twice: {len(self.repeated):,}; the later row counts."


def read_metrics(path: Path) -> Metrics:
    """Return the rows of `path`; no rows if there is no such file. Raises `InputError` if it cannot be read."""
    rows = _Rows()
    try:
        with opened(path, MAX_METRICS_BYTES) as file:
            for number, line in enumerate(lines(file, path), start=1):
                if not line.endswith(b"\n"):
                    # Only what ends in a newline was written whole.
                    rows.cut_short = True
                elif line.strip():
                    rows.add(number, line)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}", key="run.unreadable-metrics") from error
    return _columns(rows)


def _columns(rows: _Rows) -> Metrics:
    steps, evaluated = sorted(rows.steps), sorted(rows.evaluations)
    keys = dict.fromkeys(key for evaluation in rows.evaluations.values() for key in evaluation)
    names = dict.fromkeys(key[: -len(end) - 1] for key in keys for end in EVALUATED if key.endswith(f"_{end}"))
    table = np.array([rows.steps[step] for step in steps], dtype=np.float64).reshape(len(steps), len(NUMBERS))
    layers = max((len(load) for load in rows.loads.values()), default=0)
    load_SLK = np.full((len(steps), layers, len(WORST)), np.nan, dtype=np.float32)
    for place, step in enumerate(steps):
        load_LK = rows.loads[step]
        load_SLK[place, : len(load_LK)] = load_LK
    return Metrics(
        step=np.array(steps, dtype=np.int64),
        numbers={key: table[:, place] for place, key in enumerate(NUMBERS)},
        load_SL={key: load_SLK[:, :, place] for place, key in enumerate(WORST)},
        tokens=rows.tokens,
        skipped=tuple(sorted(rows.skipped.items())),
        eval_step=np.array(evaluated, dtype=np.int64),
        eval_seconds=np.array([rows.evaluations[step].get("runtime", math.nan) for step in evaluated], np.float64),
        evaluated=_evaluated(rows, ""),
        sets={name: _evaluated(rows, f"{name}_") for name in list(names)[:MAX_SETS]},
        answered=tuple(_answered(rows.samples)),
        notes=tuple(rows.notes()),
    )


def _evaluated(rows: _Rows, prefix: str) -> dict[str, Column]:
    """Return the columns of one set; NaN where an evaluation lacked it."""
    found = [rows.evaluations[step] for step in sorted(rows.evaluations)]
    return {key: np.array([each.get(f"{prefix}{key}", math.nan) for each in found], np.float64) for key in EVALUATED}


def _samples(value: Any) -> list[dict[str, str]]:
    samples = value if isinstance(value, list) else []
    keys = ("set", "source", "prompt", "answer", "expected")
    return [
        {key: str(each[key]) for key in keys}
        for each in samples[:_SAMPLES]
        if isinstance(each, dict) and each.keys() >= set(keys)
    ]


def _answered(samples: dict[int, list[dict[str, str]]]) -> Iterator[Answered]:
    steps = sorted(samples)
    chosen = sorted({steps[round(place)] for place in np.linspace(0, len(steps) - 1, _SAMPLED)} if steps else ())
    found: dict[tuple[str, str, str], Answered] = {}
    for step in chosen:
        for each in samples[step]:
            source = f"{each['set']}: {each['source']}" if each["set"] else each["source"]
            key = (source, each["prompt"], each["expected"])
            found.setdefault(key, Answered(*key)).answers[step] = each["answer"]
    yield from found.values()


def _number(value: Any) -> float:
    """Return a finite number, or NaN for everything else: null, text, true, and what no float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _load(value: Any) -> npt.NDArray[np.float32]:
    """Return `[L, K]`: a row for each layer, K figures of its load, NaN if missing."""
    layers: Iterable[Any] = value if isinstance(value, list) else ()
    numbers = [[_number(layer.get(key)) if isinstance(layer, dict) else math.nan for key in WORST] for layer in layers]
    with np.errstate(over="ignore"):
        table = np.array(numbers, dtype=np.float32).reshape(len(numbers), len(WORST))
    table[~np.isfinite(table)] = np.nan
    return table


def _tokens(step: int, value: Any) -> tuple[int, npt.NDArray[np.float64]] | None:
    """Return the step and token counts `[L, E]` of a row, or None if `value` is no such table."""
    layers = value if isinstance(value, list) else []
    counts = [[_number(each) for each in layer] for layer in layers if isinstance(layer, list)]
    if not counts or not counts[0] or len({len(layer) for layer in counts}) > 1 or len(counts) != len(layers):
        return None
    table = np.array(counts, dtype=np.float64)
    return (step, table) if np.isfinite(table).all() and (table >= 0).all() else None
