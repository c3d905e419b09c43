"""Everything that a run's directory holds, read for the report; nothing in it is changed.

A run may be running, finished, stopped, killed or empty; files that are damaged or absent are reported in `notes`, and
the report is made without them. `metrics.jsonl` becomes columns of numbers, and nothing in it is trusted: a line that a
kill cut short, values that are null because they were not finite, rows without optional keys, lines that are no rows.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from expertmesh.checkpoint.directory import CHECKPOINTS, published
from expertmesh.config import Config
from expertmesh.config.errors import ExpertmeshError, InputError
from expertmesh.config.files import config_from
from expertmesh.io.reading import MAX_METRICS_BYTES, first_problem, opened, read_file, read_json, shortened
from expertmesh.io.reading import rows as lines
from expertmesh.training.lock import Holder, holder
from expertmesh.training.reporting.record import DATA_FILE, RECORD_FILE, DataRecord, RunRecord, Start, read_record

CONFIG_FILE, METRICS_FILE, VERIFICATION_FILE, AUDIT_FILE = (
    "config.yaml", "metrics.jsonl", "verification.json", "audit.json"
)  # fmt: skip
RESULTS = ("model", "adapter")
_BLOCK = re.compile(r"\.(\d{1,5})\.")
Content = TypeVar("Content", bound=BaseModel)
Status = Literal["pass", "fail", "not run"]
State = Literal["running", "finished", "ended", "stopped", "not started"]
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


@dataclass(frozen=True, slots=True)
class Goodput:
    """Seconds on rank 0 from the first start in run.json to the last row of metrics; `wall` is their sum.

    A time before run.json had these figures is in `waiting`.
    """

    training: float
    """Steps that count, data and update included (`step_seconds` of the rows times their steps)."""
    evaluation: float
    """Evaluations between these steps (`eval_runtime`)."""
    saving: float
    """Further pauses of training between them: checkpoint saves, as far as they block."""
    lost: float
    """Steps that were done twice: from a checkpoint to the last row before the run began again there."""
    startup: float
    """Imports, data, weights: from a start's process to its first step."""
    waiting: float
    """The remainder, between starts: until the failure was noticed, and until there was a new process; and what a start
    did after its last row."""

    @property
    def wall(self) -> float:
        return sum(self.parts().values())

    @property
    def share(self) -> float:
        """The share of wall time that was training: the goodput."""
        return self.training / self.wall if self.wall else 0.0

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part by name, in the order above."""
        return asdict(self)


def goodput(starts: Sequence[Start], metrics: Metrics) -> Goodput | None:
    """Return where the time of a run went, or None if the records lack times."""
    try:
        times = [datetime.fromisoformat(each.started).timestamp() for each in starts]
    except (ValueError, OverflowError):  # text that is no time
        return None
    if not (metrics.has("step_seconds") and metrics.has("elapsed_seconds")):
        return None
    steps = np.diff(metrics.step, prepend=0)
    training = float(np.nansum(metrics["step_seconds"] * steps))
    last_step, elapsed = metrics.step[-1], float(np.nanmax(metrics["elapsed_seconds"]))
    # An evaluation after the last row is not in `elapsed`.
    evaluation = float(np.nansum(metrics.eval_seconds[metrics.eval_step < last_step]))
    lost, startup = (sum(getattr(each, name) for each in starts) for name in ("lost_seconds", "startup_seconds"))
    waiting = 0.0
    for (began, before), (now, after) in pairwise(zip(times, starts, strict=True)):
        kept = max(0.0, after.elapsed_seconds - before.elapsed_seconds)
        waiting += max(0.0, now - began - kept - after.lost_seconds - after.startup_seconds)
    return Goodput(training, evaluation, max(0.0, elapsed - training - evaluation), lost, startup, waiting)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class VerifiedFigure(_Frozen):
    """The worst of a check's comparisons; numbers that JSON does not have are words."""

    tensor: str
    error: float | str
    limit: float | str


class VerifiedCheck(_Frozen):
    """One check of a layer. `note` says more, or why it was not run."""

    name: str
    status: Status
    worst: VerifiedFigure | None
    """None if nothing was compared."""
    compared: int
    note: str
    """More about it, or why it was not run."""


class VerifiedLayer(_Frozen):
    """One layer of `expertmesh verify`."""

    name: str
    status: Status
    checks: tuple[VerifiedCheck, ...]


class PlantedBug(_Frozen):
    """One bug that `--self-test` planted; `pass` means caught."""

    bug: str
    status: Status


class ProofReport(_Frozen):
    """The part of verification.json (docs/verify.md) that the report shows."""

    format: Literal["expertmesh-proof"]
    version: Literal[1]
    status: Status
    layers: tuple[VerifiedLayer, ...]
    mutations: tuple[PlantedBug, ...]

    @property
    def sound(self) -> bool:
        """Passed, and nothing in it says otherwise."""
        inside = [layer.status for layer in self.layers]
        inside += [check.status for layer in self.layers for check in layer.checks]
        inside += [bug.status for bug in self.mutations]
        return self.status == "pass" and "pass" in inside and "fail" not in inside


class Audit(_Frozen):
    """The content of audit.json, written by `train --audit full`, without the hashes."""

    source: str
    tensors: int
    bytes_compared: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run, as its files show it; None for a file that is absent or cannot be read."""

    directory: Path
    config_text: str | None
    """config.yaml as it is."""
    config: Config | None
    """None if the text cannot be read as a configuration."""
    metrics: Metrics
    record: RunRecord | None
    verification: ProofReport | None
    audit: Audit | None
    data: DataRecord | None
    checkpoints: tuple[int, ...]
    """Their steps."""
    results: tuple[str, ...]
    """Entries of `RESULTS` that exist."""
    holder: Holder | None
    """The process named by the run's lock."""
    notes: tuple[str, ...]
    """Sentences about files and rows that are absent or could not be read."""

    @property
    def last_step(self) -> int:
        """The last step that is reported, 0 for none."""
        return int(self.metrics.step[-1]) if len(self.metrics.step) else 0

    @property
    def total_steps(self) -> int | None:
        """The number of steps that the run was to have, if it is known."""
        if self.record is not None:
            return self.record.starts[-1].total_steps
        return self.config.train.max_steps if self.config is not None else None

    @property
    def state(self) -> State:
        if self.holder is not None and self.holder.lives:
            return "running"
        if self.results:
            return "finished"
        if self.holder is not None:
            return "ended"
        return "stopped" if self.last_step else "not started"

    @property
    def goodput(self) -> Goodput | None:
        """The parts of its wall time; None where they are unknown."""
        return goodput(self.record.starts, self.metrics) if self.record is not None else None

    @property
    def resumed(self) -> list[int]:
        """The steps after which the run was resumed."""
        return [start.after_step for start in self.record.starts if start.after_step] if self.record is not None else []

    @property
    def moe_blocks(self) -> list[int]:
        """The block of each MoE layer; counted from 0 where the record lacks it."""
        names = [layer.name for layer in self.record.moe_layers] if self.record is not None else []
        found = [int(match[1]) for name in names if (match := _BLOCK.search(name))]
        layers = self.metrics.layers
        return found if len(found) == layers == len(set(found)) else list(range(layers))


def read_run(directory: Path) -> Run:
    """Read the run in `directory`. `InputError` if there is none, or if its metrics cannot be read."""
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory; give the output_dir of a run", key="run.not-found")
    if not any((directory / name).exists() for name in (CONFIG_FILE, METRICS_FILE, RECORD_FILE)):
        raise InputError(
            f"{directory}: holds no run: there is no {CONFIG_FILE}, {METRICS_FILE} or {RECORD_FILE}; give the "
            "output_dir of a run of expertmesh train",
            key="run.not-found",
        )
    notes: list[str] = []
    text, config = _config(directory / CONFIG_FILE, notes)
    metrics = read_metrics(directory / METRICS_FILE)
    return Run(
        directory=directory,
        config_text=text,
        config=config,
        metrics=metrics,
        record=_record(directory, notes),
        verification=_json_file(directory / VERIFICATION_FILE, ProofReport, notes),
        audit=_json_file(directory / AUDIT_FILE, Audit, notes),
        data=_json_file(directory / DATA_FILE, DataRecord, notes),
        checkpoints=tuple(step for step, _ in published(directory / CHECKPOINTS)),
        results=tuple(name for name in RESULTS if (directory / name).is_dir()),
        holder=holder(directory),
        notes=(*metrics.notes, *notes),
    )


def _config(path: Path, notes: list[str]) -> tuple[str | None, Config | None]:
    try:
        text = read_file(path).decode(errors="backslashreplace")
    except (OSError, ExpertmeshError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        notes.append(f"{CONFIG_FILE} cannot be read ({reason}), so the configuration is not shown.")
        return None, None
    try:
        return text, config_from(text, str(path))
    except ExpertmeshError as error:
        notes.append(f"{CONFIG_FILE} is no configuration for this version of expertmesh: {error}")
        return text, None


def _record(directory: Path, notes: list[str]) -> RunRecord | None:
    try:
        record = read_record(directory)
    except ExpertmeshError as error:
        notes.append(f"{RECORD_FILE} is left out: {error}")
        return None
    if record is None:
        notes.append(f"There is no {RECORD_FILE}, so ranks, layout, versions and the plan are not known.")
    return record


def _json_file(path: Path, kind: type[Content], notes: list[str]) -> Content | None:
    """Return the file as `kind`; None if it is absent, and with a note if it is something else."""
    try:
        return kind.model_validate(read_json(path))
    except FileNotFoundError:
        return None
    except (OSError, ExpertmeshError) as error:
        notes.append(f"{path.name} is left out: it cannot be read ({getattr(error, 'strerror', error)}).")
    except ValueError as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else shortened(str(error))
        notes.append(f"{path.name} is left out: it is not what this version of expertmesh reads ({problem}).")
    return None
