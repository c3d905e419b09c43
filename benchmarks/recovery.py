"""A killed rank: seconds until the launcher has ended the job, until the next start is beyond the step; steps lost.

    python -m benchmarks.recovery 5

A tiny model on two ranks of this machine, a checkpoint every second step. A rank is killed in a step; the same command
is started again until it is beyond that step. Nearly all of that time is the start of Python and the import of torch.
"""

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from expertmesh.checkpoint.directory import published
from tests.training.tiny_run import run_config, write_inputs


def main(kills: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        write_inputs(root)
        run_config(root, root / "run")
        options = ["parallel.ep=2", "train.max_steps=100000", "train.num_epochs=100000", "checkpoint.every_steps=2"]
        command = [sys.executable, "-m", "expertmesh", "train", str(root / "run.yaml"), *options, "--nproc", "2"]
        chance, found = random.Random(0), []
        for _ in range(kills):
            found.append(_kill(command, root / "run", chance))
            print(
                "detected after {:.2f} s, beyond it {:.1f} s after the next start, {} steps lost".format(*found[-1]),
                flush=True,
            )
        names = ("seconds to detect", "seconds to be beyond it", "steps lost")
        for name, values in zip(names, zip(*found, strict=True), strict=True):
            print(f"{name:<24} median {statistics.median(values):.2f}, most {max(values):.2f}")


def _kill(command: list[str], output: Path, chance: random.Random) -> tuple[float, float, int]:
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    before = _steps(output)
    while _steps(output) < before + 3 + chance.randrange(6):
        time.sleep(0.01)
    os.kill(chance.choice(_ranks(job.pid)), signal.SIGKILL)
    killed = time.monotonic()
    assert job.wait() == 5
    detected, reached = time.monotonic() - killed, _steps(output)
    newest = published(output / "checkpoints")[-1][0]
    started = time.monotonic()
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while _steps(output) <= reached:
        time.sleep(0.005)
    again = time.monotonic() - started
    job.send_signal(signal.SIGTERM)
    job.wait()
    return detected, again, reached - newest


def _steps(output: Path) -> int:
    metrics = output / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def _ranks(launcher: int) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (
                f"PPid:\t{launcher}\n" in (process / "status").read_text()
                and b"RANK=" in (process / "environ").read_bytes()
            ):
                found.append(int(process.name))
        except OSError:
            continue
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]))
