"""Define `output_dir/run.json` and `output_dir/data.json`: what a run is, how each of its starts was laid out, and its
first samples, for later readers.

Rank 0 writes them whenever a run starts or is resumed (start.py); `expertmesh report` reads them. One entry of `starts`
for every start whose rows are still in `metrics.jsonl`. Nothing here needs torch, and training never reads them back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from expertmesh.config import ParallelConfig
from expertmesh.config.errors import ExpertmeshError
from expertmesh.io.directory import io_errors, replace_synced
from expertmesh.io.reading import read_versioned
from expertmesh.io.terminal import log

if TYPE_CHECKING:
    from expertmesh.step.forward_backward import Order

RECORD_FILE = "run.json"
DATA_FILE = "data.json"
SCHEMA_VERSION: Literal[1] = 1
_Count = Field(ge=0)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class MoeLayer(_Strict):
    """One layer of routed experts, in the order of `expert_load` in metrics.jsonl."""

    name: str
    """Name of the experts module."""
    experts: int = Field(ge=1)
    top_k: int | None = Field(ge=1)
    """None if the model does not give it."""

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
    """The rows of a data set, by what became of them."""

    rows: int = _Count
    samples: int = _Count
    tokens: int = _Count
    """Tokens of one pass."""
    target_tokens: int = _Count
    """Target tokens of one pass."""


class Share(_Strict):
    """The share of the model that each of several equal ranks holds."""

    ranks: int = Field(ge=1)
    """Number of ranks."""
    dense: int = _Count
    """Elements of dense parameters."""
    expert: int = _Count
    """Elements of routed experts."""
    adapter: int = _Count
    """Elements of adapters."""
    bytes_to_load: int = _Count
    """Bytes that each reads of the model's files."""


class Prediction(_Strict):
    """The prediction for a step of this start, under the names and in the units of metrics.jsonl."""

    step_seconds: float | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: float | None = None
    ranks_max_over_mean: float | None = None
    """The value of the worst layer by the load that experts were placed by; None if they were not."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """An expectation for a start."""

    line: str
    """The line to print."""
    prediction: Prediction | None = None
    warning: str | None = None
    """The part of the line that says that memory may run out."""
    cures: Callable[[], list[str]] = list
    """Returns changes of the configuration with which a step is expected to fit, the best first."""
    peak_tokens_per_second: float | None = None
    """Input tokens of a job that computes at the peak of its devices; None if it is not known."""
    order: "tuple[Order, str] | None" = None
    """The order of micro-batches for which a step is expected to fit, and the reason in words; None for the chosen
    one."""


@dataclass(frozen=True, slots=True)
class ChosenLayout:
    """The layout of a start's ranks, in place of the configured one."""

    parallel: ParallelConfig
    micro_batch_size: int
    activation_checkpointing: str
    reason: str
    """The reason, in words."""


class Start(_Strict):
    """One start of the run."""

    started: str
    """ISO 8601, UTC."""
    after_step: int = _Count
    """The step of the checkpoint that it continues; 0 from the beginning."""
    total_steps: int = Field(ge=1)
    world_size: int = Field(ge=1)
    layout: dict[str, int]
    """The size of every axis of both views."""
    device: str
    device_name: str
    versions: dict[str, str]
    shares: list[Share]
    micro_batch_size: int = Field(ge=1)
    data_ranks: int = Field(ge=1)
    accumulation: int = Field(ge=1)
    dispatch: str
    """The value that `auto` became."""
    compute: str
    """The value that `auto` became."""
    activation_checkpointing: str
    """The value that `auto` became."""
    accumulate: str
    """The value that `auto` became."""
    printed: list[str]
    """The plan as `train` printed it, line by line."""
    plan: Prediction | None = None
    startup_seconds: float = Field(default=0.0, ge=0)
    """Seconds since rank 0's process began; with those of earlier starts that are not listed."""
    elapsed_seconds: float = Field(default=0.0, ge=0)
    """Seconds of training in `metrics.jsonl` at the checkpoint that it continues."""
    lost_seconds: float = Field(default=0.0, ge=0)
    """Seconds of the rows after that checkpoint, which it repeats; with those of earlier starts that are not listed."""


class RunRecord(_Strict):
    """The content of run.json."""

    format: Literal["expertmesh-run"] = "expertmesh-run"
    schema_version: Literal[1] = SCHEMA_VERSION
    model_type: str
    parameters: int = _Count
    """Elements of the model, each once, adapters included."""
    blocks: int = _Count
    moe_layers: list[MoeLayer]
    train_data: DataCounts
    eval_data: DataCounts | None
    """None without evaluation."""
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


class TextPiece(_Strict):
    """Consecutive tokens that are all targets, or all none."""

    text: str
    is_target: bool


class ShownSample(_Strict):
    """One sample of the training data."""

    source: str
    """File and row or line."""
    tokens: int
    """All of the sample."""
    targets: int
    """Target tokens, all of the sample."""
    pieces: list[TextPiece]
    """Text of its first tokens."""


class Bin(_Strict):
    """Samples with lengths in one range, before cutting."""

    above: int
    """Tokens that each sample has more than."""
    up_to: int | None
    """Tokens that each sample has at most; None for any number."""
    samples: int


class DataRecord(_Strict):
    """The content of data.json."""

    format: Literal["expertmesh-data"] = "expertmesh-data"
    schema_version: Literal[1] = 1
    samples: list[ShownSample]
    lengths: list[Bin]
