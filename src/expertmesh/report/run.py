"""Everything that a run's directory holds, read for the report; nothing in it is changed.

A run may be running, finished, stopped, killed or empty; files that are damaged or absent are reported in `notes`, and
the report is made without them.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from expertmesh.checkpoint.directory import CHECKPOINTS, published
from expertmesh.config import Config
from expertmesh.config.errors import ExpertmeshError, InputError
from expertmesh.config.files import config_from
from expertmesh.io.reading import first_problem, read_file, read_json, shortened
from expertmesh.report.metrics import Metrics, read_metrics
from expertmesh.training.lock import Holder, holder
from expertmesh.training.reporting.record import DATA_FILE, RECORD_FILE, DataRecord, RunRecord, Start, read_record


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


CONFIG_FILE, METRICS_FILE, VERIFICATION_FILE, AUDIT_FILE = (
    "config.yaml", "metrics.jsonl", "verification.json", "audit.json"
)  # fmt: skip
RESULTS = ("model", "adapter")
_BLOCK = re.compile(r"\.(\d{1,5})\.")
Content = TypeVar("Content", bound=BaseModel)
Status = Literal["pass", "fail", "not run"]
State = Literal["running", "finished", "ended", "stopped", "not started"]


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
