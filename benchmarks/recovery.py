"""A killed rank: seconds until a job of `--max-restarts 1` makes its next step.

    python -m benchmarks.recovery 5

A tiny model on two ranks of this machine, a checkpoint at every second step. A random rank is killed in a step.
`started` is when the launcher says that it starts all ranks again.
"""

import contextlib
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import astuple, dataclass
from pathlib import Path

from tests.training.tiny_run import run_config, write_inputs


@dataclass(frozen=True, slots=True)
class Recovery:
    started_seconds: float
    step_seconds: float
    lost_steps: int


def main(kills: int) -> None:
    chance, found = random.Random(0), list[Recovery]()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        write_inputs(root)
        for number in range(kills):
            found.append(_kill(root, root / f"run-{number}", chance))
            print(found[-1], flush=True)
    started, step, lost = (list(values) for values in zip(*map(astuple, found), strict=True))
    each = ", ".join(f"{seconds:.1f}" for seconds in sorted(step))
    print("| ranks start again after s | next step after s, median (all) | steps lost |")
    print("|---|---|---|")
    print(
        f"| {statistics.median(started):.2f} | {statistics.median(step):.1f} ({each}) | {statistics.median(lost):.0f} |"
    )


def _kill(root: Path, output: Path, chance: random.Random) -> Recovery:
    run_config(root, output)
    options = ["parallel.ep=2", "train.max_steps=100000", "train.num_epochs=100000", "checkpoint.every_steps=2"]
    command = [sys.executable, "-m", "expertmesh", "train", f"{output}.yaml", *options, "--nproc", "2"]
    with Path(f"{output}.txt").open("w", encoding="utf-8") as said:
        job = subprocess.Popen([*command, "--max-restarts", "1"], stdout=said, stderr=subprocess.STDOUT)
    try:
        _seconds_until(Path(f"{output}.txt"), r" step 3/\d+ ", time.monotonic())
        time.sleep(chance.random())
        os.kill(chance.choice(_children(job.pid)), signal.SIGKILL)
        killed = time.monotonic()
        started = _seconds_until(Path(f"{output}.txt"), r"restart 1 of 1", killed)
        step = _seconds_until(Path(f"{output}.txt"), r"(?s)restart 1 of 1.* step \d+/\d+ ", killed)
        text = Path(f"{output}.txt").read_text(encoding="utf-8")
        lost = int(re.findall(r"at step (\d+), ", text)[0]) - int(re.findall(r"resume +step-(\d+)", text)[0]) - 1
    finally:
        job.send_signal(signal.SIGTERM)
        job.wait()
    return Recovery(started, step, lost)


def _children(launcher: int) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((process / "stat").read_text().rpartition(")")[2].split()[1]) == launcher:
                found.append(int(process.name))
    return found


def _seconds_until(file: Path, pattern: str, since: float) -> float:
    while not re.search(pattern, file.read_text(encoding="utf-8")):
        assert time.monotonic() < since + 120, file.read_text(encoding="utf-8")
        time.sleep(0.005)
    return time.monotonic() - since


if __name__ == "__main__":
    main(int(sys.argv[1]))
