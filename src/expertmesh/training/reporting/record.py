"""Define `output_dir/run.json`: what a run is and how each of its starts was laid out, for later readers.

Rank 0 writes it whenever a run starts or is resumed (start.py); `expertmesh report` reads it. One entry of `starts` for
every start whose rows are still in `metrics.jsonl`. Nothing here needs torch, and training never reads it back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from expertmesh.config import ParallelConfig
from expertmesh.config.errors import ExpertmeshError
from expertmesh.io.directory import io_errors
from expertmesh.io.safetensors_writer import replace_synced
from expertmesh.io.terminal import log
from expertmesh.io.versioned_json import read_versioned

RECORD_FILE = "run.json"
SCHEMA_VERSION: Literal[1] = 1
_Count = Field(ge=0)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class MoeLayer(_Strict):
    """One layer of routed experts, in the order of `expert_load` in metrics.jsonl; `name` is the module's. `top_k` is
    None if the model does not give it.
    """

    name: str
    experts: int = Field(ge=1)
    top_k: int | None = Field(ge=1)

    @property
    def most_load(self) -> float:
        """Return the busiest expert's tokens over the mean if every token chooses it."""
        return self.experts / (self.top_k or 1)

    def has_collapsed(self, load: float, dead: float) -> bool:
        """Judge a router by the busiest expert's `load` and the experts without a token.

        One expert alone may take every token, as a shared expert does; others starve where a router has collapsed.
        """
        return dead >= self.experts / 2 or (load >= 0.95 * self.most_load and dead >= self.experts / 4)


class DataCounts(_Strict):
    """What became of the rows of a data set; one pass over it has `tokens` tokens."""

    rows: int = _Count
    samples: int = _Count
    tokens: int = _Count
    target_tokens: int = _Count


class Share(_Strict):
    """`ranks` ranks hold this many elements each, and read this many bytes of the model's files."""

    ranks: int = Field(ge=1)
    dense: int = _Count
    expert: int = _Count
    adapter: int = _Count
    bytes_to_load: int = _Count


class Prediction(_Strict):
    """The prediction for a step of this start, under the names and in the units of metrics.jsonl."""

    step_seconds: float | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """An expectation for a start: a line to print, and the figures if there are any.

    `warning` is the part of the line that says that memory may run out. `cures`: changes of the configuration with
    which a step is expected to fit, the best first. `peak_tokens_per_second`: of a job that computes at the peak of its
    devices, None if it is not known.
    """

    line: str
    prediction: Prediction | None = None
    warning: str | None = None
    cures: Callable[[], list[str]] = list
    peak_tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The layout of a start's ranks, in place of the configured one, and the reason in words."""

    parallel: ParallelConfig
    micro_batch_size: int
    activation_checkpointing: str
    reason: str


class Start(_Strict):
    """One start of the run, after step `after_step` (0: from the beginning).

    `started` is in ISO 8601, UTC. `layout` has the size of every axis of both views. `dispatch`, `compute` and
    `activation_checkpointing` are what `auto` became. `printed` is the plan as `train` printed it, line by line.
    `startup_seconds`: since rank 0's process began. `elapsed_seconds`: those of `metrics.jsonl` at the checkpoint that
    it goes on from. `lost_seconds`: of the rows after that one, which it does again. The starts that are left out
    before it are in the first and the last of these.
    """

    started: str
    after_step: int = _Count
    total_steps: int = Field(ge=1)
    world_size: int = Field(ge=1)
    layout: dict[str, int]
    device: str
    device_name: str
    versions: dict[str, str]
    shares: list[Share]
    micro_batch_size: int = Field(ge=1)
    data_ranks: int = Field(ge=1)
    accumulation: int = Field(ge=1)
    dispatch: str
    compute: str
    activation_checkpointing: str
    printed: list[str]
    plan: Prediction | None = None
    startup_seconds: float = Field(default=0.0, ge=0)
    elapsed_seconds: float = Field(default=0.0, ge=0)
    lost_seconds: float = Field(default=0.0, ge=0)


class RunRecord(_Strict):
    """The content of run.json. `parameters` counts each element of the model once, including adapters."""

    format: Literal["expertmesh-run"] = "expertmesh-run"
    schema_version: Literal[1] = SCHEMA_VERSION
    model_type: str
    parameters: int = _Count
    blocks: int = _Count
    moe_layers: list[MoeLayer]
    train_data: DataCounts
    eval_data: DataCounts | None
    starts: list[Start] = Field(min_length=1)

    def after(self, earlier: "RunRecord | None") -> "RunRecord":
        """Return this record of one start, after the starts of `earlier` that it goes on from.

        What a start did after the step at which the next one began again is no longer in metrics.jsonl; a start of
        which nothing is left there is left out.
        """
        own, before = self.starts[0], earlier.starts if earlier is not None else []
        kept = [start for start in before if start.after_step < own.after_step]
        gone = [start for start in before if start.after_step >= own.after_step]
        spent = {
            name: getattr(own, name) + sum(getattr(start, name) for start in gone)
            for name in ("startup_seconds", "lost_seconds")
        }
        return self.model_copy(update={"starts": [*kept, own.model_copy(update=spent), *self.starts[1:]]})


def read_record(directory: Path) -> RunRecord | None:
    """Return the run.json of the run in `directory`; None if there is none.

    Raises `InputError` for a file that cannot be read or that a newer version wrote, `IntegrityError` for a damaged
    one.
    """
    try:
        return read_versioned(directory / RECORD_FILE, RunRecord, SCHEMA_VERSION, key="run.damaged-record")
    except FileNotFoundError:
        return None


def write_record(record: RunRecord, directory: Path) -> None:
    """Write the run.json of the run in `directory`, after the earlier starts that it goes on from."""
    try:
        earlier = read_record(directory)
    except ExpertmeshError as error:
        # Nothing that training needs is in it; a run must not end over it.
        log.warning(f"{error}; the run's earlier starts are left out of it from here on")
        earlier = None
    content = record.after(earlier).model_dump_json(indent=1).encode() + b"\n"
    with io_errors(directory / RECORD_FILE, len(content)):
        replace_synced(directory / RECORD_FILE, content)
