"""Send figures beside metrics.jsonl to TensorBoard, Weights & Biases, trackio and MLflow, each by its own library.

Each gets the numbers of a row under the row's own names, those of experts as `expert_load/KEY/LAYER` and of all layers
as `expert_load/KEY/worst` (`dead/all`), and at times the heat map `expert_tokens`. Log-in, servers and offline modes
are the libraries' own, by their environment variables. `output_dir/trackers.json` stores the name of the run in each,
so that a resumed run goes on in the same one. Rank 0 opens them, before weights are read. A later failure is reported,
and that tracker is given up: metrics.jsonl has every row.
"""

import importlib
import logging
import math
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from expertmesh.config import Config
from expertmesh.config.errors import InputError
from expertmesh.io.directory import replace_synced
from expertmesh.io.reading import read_versioned
from expertmesh.io.terminal import first_line
from expertmesh.training.reporting.metrics import EVAL_SAMPLES, EvalMetrics, StepMetrics
from expertmesh.training.resume import flat

log = logging.getLogger(__name__)

TRACKERS_FILE = "trackers.json"
PROJECT = "expertmesh"
# How a layer's figures become one for all layers, and its name.
_JOINED: dict[str, tuple[str, Callable[[Iterator[float]], float]]] = {
    "max_over_mean": ("worst", max),
    "ranks_max_over_mean": ("worst", max),
    "entropy": ("worst", min),
    "dead": ("all", sum),
}
# A heat map is white from this multiple of the mean on; a pixel is drawn as a square of so many.
_WHITE, _PIXELS = 4.0, 6
# MLflow takes no more in one call, and no longer values.
_MLFLOW_PARAMETERS, _MLFLOW_TEXT = 100, 6000
# Of a generated sample.
_TEXTS = ("prompt", "answer", "expected")
Picture = npt.NDArray[np.uint8]


class TrackerNames(BaseModel):
    """The content of trackers.json: the name of the run in each tracker."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    format: Literal["expertmesh-trackers"] = "expertmesh-trackers"
    schema_version: Literal[1] = 1
    names: dict[str, str]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The arguments for opening a tracker."""

    directory: Path
    project: str | None
    """None takes the library's own environment variable."""
    name: str
    config: dict[str, Any]
    known_as: str | None
    """The tracker's name for the run at an earlier start; None for a new run."""
    done: int
    """Steps of the run that are done."""


class Tracker(ABC):
    """An open tracker, made of a `TrackedRun`."""

    known_as: str

    @abstractmethod
    def log(self, step: int, figures: dict[str, float], pictures: dict[str, Picture]) -> None: ...
    @abstractmethod
    def samples(self, step: int, rows: list[dict[str, str]]) -> None: ...
    @abstractmethod
    def close(self, failed: bool) -> None: ...
    def sync(self) -> None:  # noqa: B027
        """Write what is held back; nothing where a process, a thread or a request of its own does."""


@dataclass(slots=True)
class Trackers:
    """The open trackers, by name. Used on rank 0; other ranks have none."""

    trackers: dict[str, Tracker] = field(default_factory=dict)

    def take(self, event: StepMetrics | EvalMetrics) -> None:
        self.write(event.row())

    def write(self, row: Mapping[str, Any]) -> None:
        """Report a row of metrics.jsonl, of a step or of an evaluation."""
        figures = dict(figures_of(row))
        pictures = {"expert_tokens": heat_map(row["expert_tokens"])} if row.get("expert_tokens") else {}
        for name in list(self.trackers):
            self._try(name, lambda tracker: tracker.log(row["step"], figures, pictures))
            if row.get(EVAL_SAMPLES):
                self._try(name, lambda tracker: tracker.samples(row["step"], row[EVAL_SAMPLES]))

    def sync(self) -> None:
        for name in list(self.trackers):
            self._try(name, lambda tracker: tracker.sync())

    def close(self, failed: bool = False) -> None:
        for name in list(self.trackers):
            self._try(name, lambda tracker: tracker.close(failed))
        self.trackers.clear()

    def _try(self, name: str, use: Callable[[Tracker], None]) -> None:
        """Run a tracker's call; one that fails must not end a run of days."""
        if name not in self.trackers:  # it has failed a moment ago
            return
        try:
            use(self.trackers[name])
        except Exception as error:
            failed = self.trackers.pop(name)
            with suppress(Exception):  # for whatever reason it has failed, it may fail again
                failed.close(failed=True)
            log.warning(
                f"warning: {name} failed ({first_line(error).rstrip('.')}); this start reports nothing more to it, and "
                "metrics.jsonl has every row"
            )


def open_trackers(config: Config, done: int) -> Trackers:
    """Open what `log.report_to` names, for a run that goes on after `done` steps. For rank 0.

    Raises `InputError` for a tracker that refuses, without a log-in or a server.
    """
    directory, log = Path(config.output_dir), config.log
    wanted = [name for name in log.report_to if name in _TRACKERS]
    known: dict[str, str] = {}
    if done and (directory / TRACKERS_FILE).exists():
        known = read_versioned(directory / TRACKERS_FILE, TrackerNames, 1, key="run.damaged-record").names
    opened = Trackers()
    for name in wanted:
        run = TrackedRun(
            directory=directory,
            project=log.project,
            name=log.run_name or directory.resolve().name,
            config=config.model_dump(mode="json"),
            known_as=known.get(name),
            done=done,
        )
        try:
            opened.trackers[name] = _TRACKERS[name](run)
        except (Exception, SystemExit) as error:
            opened.close(failed=True)
            raise InputError(
                f"log.report_to: {name} cannot be opened: {first_line(error).rstrip('.')}; mend that, or leave {name} "
                "out",
                key="log.tracker-refused",
            ) from error
    if wanted:
        names = known | {name: tracker.known_as for name, tracker in opened.trackers.items()}
        replace_synced(directory / TRACKERS_FILE, TrackerNames(names=names).model_dump_json(indent=1).encode() + b"\n")
    return opened


def figures_of(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Return the finite numbers of a row, by name."""
    layers = row.get("expert_load", ())
    named = [(key, value) for key, value in row.items() if key != "step"]
    for key, (name, join) in _JOINED.items():
        if layers and key in layers[0]:
            named.append((f"expert_load/{key}/{name}", join(layer[key] for layer in layers)))
    named += [(f"expert_load/{key}/{n}", value) for n, layer in enumerate(layers) for key, value in layer.items()]
    for name, value in named:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield name, value


def heat_map(tokens_LE: list[list[int]]) -> Picture:
    """Return each expert's tokens over its layer's mean as `[height, width, 3]`: a row a layer, black no token."""
    count_LE = np.array(tokens_LE, dtype=np.float64)
    load_LE = count_LE / np.maximum(count_LE.mean(axis=1, keepdims=True), 1e-9)
    grey_LE = (255 * np.minimum(load_LE / _WHITE, 1)).astype(np.uint8)
    large = grey_LE.repeat(_PIXELS, axis=0).repeat(_PIXELS, axis=1)
    return np.repeat(large[:, :, None], 3, axis=2)


def _as_text(rows: list[dict[str, str]]) -> str:
    """Return generated answers in Markdown: all texts as code, so that none of them is markup."""
    parts = []
    for row in rows:
        parts.append(f"**{row['source']}**")
        parts += [f"{key}:\n\n" + "\n".join(f"    {line}" for line in (row[key] or " ").splitlines()) for key in _TEXTS]
    return "\n\n".join(parts)


class _TensorBoard(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.known_as = "tensorboard"
        # What it has of later steps is left out.
        self.writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=run.done + 1 if run.done else None)
        text = "\n".join(f"    {key}: {value}" for key, value in flat(run.config).items())
        self.writer.add_text("config", text, run.done)

    def log(self, step: int, figures: dict[str, float], pictures: dict[str, Picture]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)
        for name, picture in pictures.items():
            self.writer.add_image(name, picture, step, dataformats="HWC")

    def samples(self, step: int, rows: list[dict[str, str]]) -> None:
        self.writer.add_text(EVAL_SAMPLES, _as_text(rows), step)

    def sync(self) -> None:
        self.writer.flush()

    def close(self, failed: bool) -> None:
        self.writer.close()


class _WandB(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        self.wandb = importlib.import_module("wandb")
        self.known_as = run.known_as or uuid.uuid4().hex[:8]
        self.run = self.wandb.init(
            project=run.project or os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=self.known_as,
            resume="allow",
            dir=str(run.directory),
            config=run.config,
            allow_val_change=True,
        )
        # Its own steps only grow, and a run that is resumed repeats some of ours.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, figures: dict[str, float], pictures: dict[str, Picture]) -> None:
        images = {name: self.wandb.Image(picture) for name, picture in pictures.items()}
        self.run.log({"step": step, **figures, **images})

    def samples(self, step: int, rows: list[dict[str, str]]) -> None:
        table = self.wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.run.log({"step": step, EVAL_SAMPLES: table})

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class _Trackio(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        self.trackio = importlib.import_module("trackio")
        # Names are what it tells runs of a project apart by.
        self.known_as = run.known_as or f"{run.name}-{uuid.uuid4().hex[:8]}"
        self.run = self.trackio.init(
            project=run.project or os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=self.known_as,
            config=run.config,
            resume="allow",
            embed=False,
        )

    def log(self, step: int, figures: dict[str, float], pictures: dict[str, Picture]) -> None:
        images = {name: self.trackio.Image(picture) for name, picture in pictures.items()}
        self.run.log({**figures, **images}, step=step)

    def samples(self, step: int, rows: list[dict[str, str]]) -> None:
        self.run.log({EVAL_SAMPLES: self.trackio.Markdown(_as_text(rows))}, step=step)

    def close(self, failed: bool) -> None:
        self.run.finish()


class _MLflow(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        self.mlflow = importlib.import_module("mlflow")
        if run.project is not None or not {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"} & os.environ.keys():
            self.mlflow.set_experiment(run.project or PROJECT)
        started = self.mlflow.start_run(run_id=run.known_as, run_name=None if run.known_as else run.name)
        self.known_as = str(started.info.run_id)
        if run.known_as is None:  # it refuses to change one
            texts = {key: str(value)[:_MLFLOW_TEXT] for key, value in flat(run.config).items()}
            for at in range(0, len(texts), _MLFLOW_PARAMETERS):
                self.mlflow.log_params(dict(list(texts.items())[at : at + _MLFLOW_PARAMETERS]))

    def log(self, step: int, figures: dict[str, float], pictures: dict[str, Picture]) -> None:
        self.mlflow.log_metrics(figures, step=step)
        for name, picture in pictures.items():
            self.mlflow.log_image(picture, key=name, step=step)

    def samples(self, step: int, rows: list[dict[str, str]]) -> None:
        self.mlflow.log_text(_as_text(rows), f"{EVAL_SAMPLES}/step-{step:08d}.md")

    def close(self, failed: bool) -> None:
        self.mlflow.end_run("FAILED" if failed else "FINISHED")


_TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "trackio": _Trackio,
    "mlflow": _MLflow,
}
