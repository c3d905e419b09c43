"""What one GPU has to tell: is everything right on CUDA, and how fast is it.

    make gpu                                        # all stages on the first GPU; about six minutes on an H100
    python -m benchmarks.gpu --stages layer,parity  # some of them
    python -m benchmarks.gpu --device cpu           # in miniature: that the stages themselves run

Each stage is a process of its own with a limit, since a failing assertion on a device takes its process along; it is
started while the one before runs, so that imports cost nothing. Findings are written to gpu.json in --out after each,
and printed as a table at the end. A stage that fails does not stop the others; the exit code is 1 then, else 0. Stages
are in gpu_checks.py (right or wrong) and gpu_figures.py (how much).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
# Seconds for each stage, imports not counted; in the order of what a GPU's first minutes are best spent on.
CHECKS = {
    "environment": 30, "grouped_mm": 45, "kernels": 60, "layer": 60, "waits": 30, "parity": 120, "ranks": 120,
    "checkpoint": 45, "determinism": 45,
}  # fmt: skip
FIGURES = {
    "ceilings": 45, "layer_bench": 120, "lora_bench": 45, "frozen_bench": 60, "memory": 60, "step": 60,
    "whole": 150, "profile": 45,
}  # fmt: skip
LIMITS = CHECKS | FIGURES
PROCESS, GO = (sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_stage"), "go"


@dataclass(frozen=True, slots=True)
class Found:
    """What a stage gave: its rows, and why it failed, if it did. A row that is a check has `ok`."""

    rows: list[Row]
    error: str | None
    seconds: float

    @property
    def failures(self) -> list[str]:
        wrong = [f"wrong: {json.dumps(row)}" for row in self.rows if row.get("ok") is False]
        return [*wrong, *([self.error] if self.error else [])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default=",".join(LIMITS), help="names with commas between them")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="directory for gpu.json and traces")
    parser.add_argument("--budget", type=float, default=530, help="seconds for all stages; no stage starts after them")
    arguments = parser.parse_args()
    names = arguments.stages.split(",")
    if unknown := [name for name in names if name not in LIMITS]:
        parser.error(f"no stage {unknown[0]}; use {', '.join(LIMITS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Found] = {}
    for name, each in run_stages(names, arguments.device, arguments.out, arguments.budget):
        found[name] = each
        content = {stage: {"rows": f.rows, "error": f.error, "seconds": f.seconds} for stage, f in found.items()}
        (arguments.out / "gpu.json").write_text(json.dumps(content, indent=1) + "\n")
        print(f"{name:12} {'failed' if each.failures else 'ok':6} {each.seconds:6.1f} s", flush=True)
    print("\n".join(["", *table(found)]))
    return int(any(each.failures for each in found.values()))


def run_stages(names: Sequence[str], device: str, out: Path, budget: float) -> Iterator[tuple[str, Found]]:
    """Run one stage after the other, each in a process that has been importing while the one before ran."""
    end = time.monotonic() + budget
    started = [_Stage(names[0], device, out)]
    try:
        for place, name in enumerate(names):
            started += [_Stage(following, device, out) for following in names[place + 1 : place + 2]]
            left = end - time.monotonic()
            if left < 5:
                yield name, Found([], "no time was left for it", 0.0)
            else:
                yield name, started[place].run(min(left, LIMITS[name]))
    finally:
        for stage in started:
            stage.end()


class _Stage:
    """The process of one stage, from its start on."""

    def __init__(self, name: str, device: str, out: Path) -> None:
        command = [*PROCESS, name, str(out)]
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=environment(hidden)
        )

    def run(self, limit: float) -> Found:
        start, error = time.monotonic(), None
        try:
            output, stderr = self._process.communicate(GO, timeout=limit)
        except subprocess.TimeoutExpired:
            error = f"did not end within {limit:.0f} s"
            self.end()
            output, stderr = self._process.communicate()
        if error is None and self._process.returncode:
            error = f"ended with exit code {self._process.returncode}"
        if error:
            error += f": {stderr[-2000:].strip()}"
        rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        return Found(rows, error, round(time.monotonic() - start, 1))

    def end(self) -> None:
        """The stage and the ranks that it has started: they are a session of their own."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Of a process that loads no file from a hub and prints no bars, with the allocator's setting of our ranks."""
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    return {**os.environ, **quiet, "PYTORCH_ALLOC_CONF": "expandable_segments:True", **more}


def table(found: Mapping[str, Found]) -> Iterator[str]:
    """Yield the rows, each on a line of its own, and what failed last, where it is seen."""
    for name, each in found.items():
        for row in each.rows:
            yield f"{name:12} " + "  ".join(f"{key} {_short(value)}" for key, value in row.items())
    for name, each in found.items():
        for failure in each.failures:
            yield f"FAILED {name}: {failure}"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
