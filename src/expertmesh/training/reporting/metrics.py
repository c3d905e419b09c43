"""What a step reports: `metrics.jsonl` always, TensorBoard when asked, a progress bar or one line per step.

Only rank 0 writes. Numbers that are not finite are written as null, because JSON has no NaN.
"""

import json
import math
import os
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from expertmesh.anatomy import Anatomy
from expertmesh.config import LogConfig
from expertmesh.config.errors import InputError
from expertmesh.distributed.mesh import Mesh
from expertmesh.experts.layer import ExpertLayer, layer_of
from expertmesh.io.directory import io_errors
from expertmesh.io.reading import MAX_METRICS_BYTES, opened, rows
from expertmesh.io.safetensors_writer import replace_synced
from expertmesh.io.terminal import tell
from expertmesh.state.stage_view import stage_names

# Collapse: how near to ln(vocabulary) a loss is that of a guess, and from how many tokens an expert should have some.
_NEARLY = 0.005
_TOKENS_PER_EXPERT = 32


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One row of `metrics.jsonl`.

    `loss`: summed token loss over target tokens of the whole step, auxiliary losses apart. `grad_norm`: before
    clipping. `tokens_per_second`: input tokens of the whole job, without padding. `peak_memory_bytes`: the largest of
    all ranks since the start (device memory; resident memory on a CPU). `expert_load`: per MoE layer the busiest
    expert's tokens over the mean, the entropy of the experts' shares over that of equal ones, and the experts without
    a token. `aux_loss` and `z_loss`: of the whole step, without their factors; only where they are on. `figures`: what
    the objective reports beside its loss, each a key of the row.
    """

    step: int
    epoch: float
    loss: float
    grad_norm: float
    learning_rate: float
    target_tokens: int
    tokens_per_second: float
    peak_memory_bytes: int
    elapsed_seconds: float
    expert_load: list[dict[str, float | int]]
    aux_loss: float | None = None
    z_loss: float | None = None
    skipped: str | None = None
    figures: dict[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """As `metrics.jsonl` has it: without what is off."""
        return {
            key: value for key, value in asdict(self).items() if value is not None and key != "figures"
        } | self.figures

    def line(self, total_steps: int) -> str:
        """One line for a log."""
        parts = [f"step {self.step}/{total_steps}", f"loss {self.loss:.4f}", *_shown(self.figures)]
        parts.append(f"grad norm {self.grad_norm:.3f}")
        parts += [f"lr {self.learning_rate:.2e}", f"{self.tokens_per_second:,.0f} tokens/s"]
        parts += [f"{self.peak_memory_bytes / 2**30:.2f} GiB", f"load {self.load_summary()}"]
        return "  ".join(parts) + (f"  SKIPPED: {self.skipped}" if self.skipped else "")

    def load_summary(self) -> str:
        """The worst layer's max/mean, and all dead experts."""
        if not self.expert_load:
            return "-"
        worst = max(layer["max_over_mean"] for layer in self.expert_load)
        return f"{worst:.1f}x, {sum(layer['dead'] for layer in self.expert_load)} dead"


@dataclass(frozen=True, slots=True)
class EvalMetrics:
    """Over a whole evaluation set: `loss` and `figures` of the objective, and what they are divided by."""

    loss: float
    target_tokens: int
    figures: dict[str, float]
    over: str

    def row(self) -> dict[str, Any]:
        figures = {f"eval_{name}": value for name, value in self.figures.items()}
        return {"eval_loss": self.loss, "eval_target_tokens": self.target_tokens, **figures}


def _shown(figures: dict[str, float]) -> list[str]:
    return [f"{name} {value:.4f}" for name, value in figures.items()]


class ExpertLoad:
    """Tokens per MoE layer and expert since the last report, and the summaries that are reported of them.

    Counted by the layers on each rank; every rank calls the methods. `L` MoE layers of the whole model, `E` experts.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy, mesh: Mesh) -> None:
        here = set(stage_names(model, [spec.name for spec in anatomy.experts]))
        # None for a layer of another pipeline stage.
        self._layers: list[ExpertLayer | None] = [
            layer_of(model.get_submodule(spec.name)) if spec.name in here else None for spec in anatomy.experts
        ]
        self._num_experts, self._mesh = anatomy.num_experts, mesh

    def take(self) -> tuple[list[dict[str, float | int]], int]:
        """What a report says: summaries per layer over all ranks, and the largest peak memory of a rank. Counting
        begins anew. Issues two all-reduces on the default group, and waits for the device once.
        """
        counts_LE = self._stacked([None if layer is None else layer.tokens_per_expert.pop() for layer in self._layers])
        peak = torch.tensor([peak_memory(self._mesh.device)], device=self._mesh.device)
        dist.all_reduce(counts_LE)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        *counts, most = torch.cat([counts_LE.flatten(), peak]).tolist()
        return expert_load(torch.tensor(counts).view(counts_LE.shape)), most

    def pending(self) -> list[list[int]]:
        """What `take` would summarise now, `[L][E]`, left where it is; the same on every rank (one all-reduce)."""
        counts_LE = self._stacked(
            [None if layer is None else layer.tokens_per_expert.counts_E for layer in self._layers]
        )
        dist.all_reduce(counts_LE)
        pending: list[list[int]] = counts_LE.tolist()
        return pending

    def restore(self, pending: list[list[int]] | None) -> None:
        """Give one rank of each stage the counts of all ranks back; they are summed again before anybody sees them."""
        if pending is not None and self._mesh.rank % self._mesh.layout.ranks_per_stage == 0:
            for layer, count_E in zip(self._layers, pending, strict=True):
                if layer is not None:
                    layer.tokens_per_expert.counts_E = torch.tensor(count_E, device=self._mesh.device)

    def _stacked(self, counts: list[torch.Tensor | None]) -> torch.Tensor:
        """`[L, E]`, with zeros for what was counted on another stage."""
        nothing_E = torch.zeros(self._num_experts, dtype=torch.int64, device=self._mesh.device)
        return torch.stack([nothing_E if count_E is None else count_E for count_E in counts])


def expert_load(counts_LE: torch.Tensor) -> list[dict[str, float | int]]:
    """Summaries of token counts per layer and expert `[L, E]` on the host."""
    return [
        {
            "max_over_mean": float(count_E.max() / max(float(count_E.float().mean()), 1e-9)),
            "entropy": _relative_entropy(count_E),
            "dead": int((count_E == 0).sum()),
        }
        for count_E in counts_LE
    ]


def _relative_entropy(count_E: torch.Tensor) -> float:
    """1 when all experts get the same, 0 when one gets everything."""
    share_E = count_E.double() / max(int(count_E.sum()), 1)
    return float(torch.special.entr(share_E).sum() / math.log(max(len(count_E), 2)))


def peak_memory(device: torch.device) -> int:
    """Bytes: the accelerator's peak of this process's allocations, or the process's peak resident memory."""
    if device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return int(torch.accelerator.max_memory_allocated(device))


class Writer(Protocol):
    def write(self, row: dict[str, Any]) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Collapse:
    """Signs that a run learns nothing any more, each told once. `vocabulary`: of the model; None where the loss is no
    cross-entropy. Experts are counted where a step has at least _TOKENS_PER_EXPERT tokens for each.
    """

    vocabulary: int | None
    experts: int
    top_k: int
    _seen: Counter[str] = field(default_factory=Counter)

    def lines(self, metrics: StepMetrics) -> Iterator[str]:
        """What to print after this report."""
        if metrics.skipped:
            return
        uniform = math.log(self.vocabulary) if self.vocabulary is not None else math.inf
        many = metrics.target_tokens * self.top_k >= _TOKENS_PER_EXPERT * self.experts
        dead = max((layer["dead"] for layer in metrics.expert_load), default=0) if many else 0
        signs = {
            "the gradient norm has been 0: nothing is trained": (metrics.grad_norm == 0, 3),
            f"the loss has been that of a uniform guess, ln {self.vocabulary or 0:,} = {uniform:.2f}: the model has "
            "collapsed, or learns nothing": (abs(metrics.loss - uniform) < _NEARLY * uniform, 20),
            "more than half of a layer's experts have been without a token: the routers have collapsed": (
                dead > self.experts / 2,
                3,
            ),
        }
        for sign, (shows, reports) in signs.items():
            told = self._seen[sign] >= reports
            self._seen[sign] = self._seen[sign] + 1 if shows or told else 0
            if not told and self._seen[sign] == reports:
                yield f"warning: for {reports} reports in a row {sign}"


class Reporter:
    """Where metrics go. Make it with `open_reporter`; on ranks other than 0 it has no writers and prints nothing."""

    def __init__(
        self, writers: list[Writer], show: Callable[[StepMetrics], None] | None, collapse: Collapse | None = None
    ) -> None:
        self.writers = writers
        self.show = show
        self.collapse = collapse

    def step(self, metrics: StepMetrics) -> None:
        self._write(metrics.row())
        if self.show is not None:
            self.show(metrics)
            for line in self.collapse.lines(metrics) if self.collapse is not None else ():
                tell(line)

    def evaluation(self, step: int, metrics: EvalMetrics) -> None:
        self._write({"step": step, **metrics.row()})
        if self.show is not None:
            figures = "".join(f"  {shown}" for shown in _shown(metrics.figures))
            tell(f"step {step}  eval loss {metrics.loss:.4f} over {metrics.over}{figures}")

    def sync(self) -> None:
        """Have the disk hold every row so far: a checkpoint that is resumed must not have lost its steps' rows."""
        for writer in self.writers:
            writer.sync()

    def close(self) -> None:
        for writer in self.writers:
            writer.close()

    def _write(self, row: dict[str, Any]) -> None:
        for writer in self.writers:
            writer.write(row)


def open_reporter(
    config: LogConfig,
    directory: Path,
    total_steps: int,
    *,
    is_main: bool,
    done: int = 0,
    collapse: Collapse | None = None,
) -> Reporter:
    """Open `directory/metrics.jsonl`, TensorBoard if configured, and the display that fits the terminal.

    A run that continues after `done` steps goes on in the same files; what they say of later steps is removed.
    """
    if not is_main:
        return Reporter([], None)
    writers: list[Writer] = [_Jsonl(directory / "metrics.jsonl", done)]
    if "tensorboard" in config.report_to:
        writers.append(_TensorBoard(directory / "tensorboard", done))
    if sys.stdout.isatty():
        bar = _Bar(total_steps, done)
        writers.append(bar)
        return Reporter(writers, bar.show, collapse)
    return Reporter(writers, lambda metrics: tell(metrics.line(total_steps)), collapse)


def keep_rows(path: Path, done: int) -> None:
    """Drop the rows of steps after `done` from a metrics.jsonl, and a last line that was cut short.

    Raises `InputError` for a file that cannot be read or written, or has a line that is no row.
    """
    kept, line = [], b"\n"
    with io_errors(path, path.stat().st_size if path.exists() else 0):
        if done and path.exists():
            with opened(path, MAX_METRICS_BYTES) as file:
                for number, line in enumerate(rows(file, path), start=1):
                    if line.endswith(b"\n") and _step_of(line, path, number) <= done:
                        kept.append(line)
        if not line.endswith(b"\n"):  # blocks of zeros are what a power loss leaves
            what = "zeros" if line.strip(b"\0") == b"" else "a row that was cut short"
            tell(f"{path}: ended in {what}; cut back to its last whole row")
        replace_synced(path, b"".join(kept))


def _step_of(line: bytes, path: Path, number: int) -> int:
    try:
        return int(json.loads(line)["step"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}:{number}: is no row of metrics; remove the line, or move the file away", key="run.damaged-metrics"
        ) from error


class _Jsonl:
    def __init__(self, path: Path, done: int) -> None:
        keep_rows(path, done)
        self.path = path
        self.file = path.open("ab", buffering=0)

    def write(self, row: dict[str, Any]) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        line = json.dumps(finite, allow_nan=False).encode() + b"\n"
        with io_errors(self.path, len(line)):
            while line:
                line = line[self.file.write(line) :]

    def sync(self) -> None:
        with io_errors(self.path, 0):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


class _TensorBoard:
    def __init__(self, directory: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(directory), purge_step=done + 1 if done else None)

    def write(self, row: dict[str, Any]) -> None:
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float):
                self.writer.add_scalar(key, value, row["step"])
        for layer, load in enumerate(row.get("expert_load", ())):
            for key, value in load.items():
                self.writer.add_scalar(f"expert_load/{key}/{layer}", value, row["step"])

    def sync(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class _Bar:
    """A live progress bar; it is a writer only so that it is closed with the others."""

    def __init__(self, total_steps: int, done: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(
            BarColumn(bar_width=16), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
        )
        self.task = self.progress.add_task("", total=total_steps, completed=done)
        self.total = total_steps
        self.progress.start()

    def show(self, metrics: StepMetrics) -> None:
        if metrics.skipped:
            tell(metrics.line(self.total))
        text = f"loss {metrics.loss:.4f}  {metrics.tokens_per_second:,.0f} tokens/s"
        text += f"  {metrics.peak_memory_bytes / 2**30:.2f} GiB"
        self.progress.update(self.task, completed=metrics.step, description=text)

    def write(self, row: dict[str, Any]) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        self.progress.stop()
