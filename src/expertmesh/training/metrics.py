"""What a step reports: `metrics.jsonl` always, TensorBoard when asked, a progress bar or one line per step.

Only rank 0 writes. Numbers that are not finite are written as null, because JSON has no NaN.
"""

import json
import math
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from expertmesh.config import LogConfig


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One row of `metrics.jsonl`.

    `loss`: summed token loss over target tokens of the whole step, auxiliary losses apart. `grad_norm`: before
    clipping. `tokens_per_second`: input tokens of the whole job, without padding. `peak_memory_bytes`: the largest of
    all ranks since the start (device memory; resident memory on a CPU). `expert_load`: per MoE layer the busiest
    expert's tokens over the mean, and the experts without a token.
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
    skipped: str | None = None

    def line(self, total_steps: int) -> str:
        """One line for a log."""
        parts = [f"step {self.step}/{total_steps}", f"loss {self.loss:.4f}", f"grad norm {self.grad_norm:.3f}"]
        parts += [f"lr {self.learning_rate:.2e}", f"{self.tokens_per_second:,.0f} tokens/s"]
        parts += [f"{self.peak_memory_bytes / 2**30:.2f} GiB", f"load {self.load_summary()}"]
        return "  ".join(parts) + (f"  SKIPPED: {self.skipped}" if self.skipped else "")

    def load_summary(self) -> str:
        """The worst layer's max/mean, and all dead experts."""
        if not self.expert_load:
            return "-"
        worst = max(layer["max_over_mean"] for layer in self.expert_load)
        return f"{worst:.1f}x, {sum(layer['dead'] for layer in self.expert_load)} dead"


def expert_load(counts_LE: torch.Tensor) -> list[dict[str, float | int]]:
    """Summaries of token counts per layer and expert `[L, E]` on the host."""
    return [
        {
            "max_over_mean": float(count_E.max() / max(float(count_E.float().mean()), 1e-9)),
            "dead": int((count_E == 0).sum()),
        }
        for count_E in counts_LE
    ]


def peak_memory(device: torch.device) -> int:
    """Bytes: the accelerator's peak of this process's allocations, or the process's peak resident memory."""
    if device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return int(torch.accelerator.max_memory_allocated(device))


class Writer(Protocol):
    def write(self, row: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class Reporter:
    """Where metrics go. Make it with `open_reporter`; on ranks other than 0 it has no writers and prints nothing."""

    def __init__(self, writers: list[Writer], show: Callable[[StepMetrics], None] | None) -> None:
        self.writers = writers
        self.show = show

    def step(self, metrics: StepMetrics) -> None:
        row = asdict(metrics)
        if metrics.skipped is None:
            del row["skipped"]
        self._write(row)
        if self.show is not None:
            self.show(metrics)

    def evaluation(self, step: int, loss: float, target_tokens: int) -> None:
        self._write({"step": step, "eval_loss": loss, "eval_target_tokens": target_tokens})
        if self.show is not None:
            print(f"step {step}  eval loss {loss:.4f} over {target_tokens:,} target tokens", flush=True)

    def close(self) -> None:
        for writer in self.writers:
            writer.close()

    def _write(self, row: dict[str, Any]) -> None:
        for writer in self.writers:
            writer.write(row)


def open_reporter(config: LogConfig, directory: Path, total_steps: int, *, is_main: bool) -> Reporter:
    """Open `directory/metrics.jsonl`, TensorBoard if configured, and the display that fits the terminal."""
    if not is_main:
        return Reporter([], None)
    writers: list[Writer] = [_Jsonl(directory / "metrics.jsonl")]
    if "tensorboard" in config.report_to:
        writers.append(_TensorBoard(directory / "tensorboard"))
    if sys.stdout.isatty():
        bar = _Bar(total_steps)
        writers.append(bar)
        return Reporter(writers, bar.show)
    return Reporter(writers, lambda metrics: print(metrics.line(total_steps), flush=True))


class _Jsonl:
    def __init__(self, path: Path) -> None:
        self.file = path.open("w", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self.file.write(json.dumps(finite, allow_nan=False) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class _TensorBoard:
    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(directory))

    def write(self, row: dict[str, Any]) -> None:
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float):
                self.writer.add_scalar(key, value, row["step"])
        for layer, load in enumerate(row.get("expert_load", ())):
            for key, value in load.items():
                self.writer.add_scalar(f"expert_load/{key}/{layer}", value, row["step"])

    def close(self) -> None:
        self.writer.close()


class _Bar:
    """A live progress bar; it is a writer only so that it is closed with the others."""

    def __init__(self, total_steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(
            BarColumn(bar_width=16), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
        )
        self.task = self.progress.add_task("", total=total_steps)
        self.total = total_steps
        self.progress.start()

    def show(self, metrics: StepMetrics) -> None:
        if metrics.skipped:
            print(metrics.line(self.total))
        text = f"loss {metrics.loss:.4f}  {metrics.tokens_per_second:,.0f} tokens/s"
        text += f"  {metrics.peak_memory_bytes / 2**30:.2f} GiB"
        self.progress.update(self.task, completed=metrics.step, description=text)

    def write(self, row: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        self.progress.stop()
