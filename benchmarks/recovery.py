"""A killed rank: seconds until a job of `--max-restarts 1` makes its next step, with and without processes standing by.

    python -m benchmarks.recovery 5

A tiny model on two ranks of this machine, a checkpoint at every second step. A random rank is killed in a step, in turn
with both standbys ready and with both ended just before, as for a rank that fails early. `started` is when the launcher
says that it starts all ranks again; what a standby holds in memory is its share (PSS) at that moment.
"""

import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from tests.cli.jobs import children, standing_by
from tests.training.tiny_run import run_config, write_inputs

READY_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Recovery:
    started_seconds: float
    step_seconds: float
    lost_steps: int
    standby_mib: float


def main(kills: int) -> None:
    chance, found = random.Random(0), {True: list[Recovery](), False: list[Recovery]()}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        write_inputs(root)
        for number in range(2 * kills):
            stand_by = number % 2 == 0
            found[stand_by].append(_kill(root, root / f"run-{number}", chance, stand_by=stand_by))
            print("standbys" if stand_by else "none    ", found[stand_by][-1], flush=True)
    print("| | ranks start again after s | next step after s, median (all) | steps lost | MiB of a standby |")
    print("|---|---|---|---|---|")
    for stand_by, recoveries in found.items():
        started, step, lost, size = (list(values) for values in zip(*map(astuple, recoveries), strict=True))
        each = ", ".join(f"{seconds:.1f}" for seconds in sorted(step))
        print(
            f"| {'standbys' if stand_by else 'none'} | {statistics.median(started):.2f} | "
            f"{statistics.median(step):.1f} ({each}) | {statistics.median(lost):.0f} | {statistics.median(size):.0f} |"
        )


def _kill(root: Path, output: Path, chance: random.Random, *, stand_by: bool) -> Recovery:
    run_config(root, output)
    options = ["parallel.ep=2", "train.max_steps=100000", "train.num_epochs=100000", "checkpoint.every_steps=2"]
    command = [sys.executable, "-m", "expertmesh", "train", f"{output}.yaml", *options, "--nproc", "2"]
    with Path(f"{output}.txt").open("w") as said:
        job = subprocess.Popen([*command, "--max-restarts", "1"], stdout=said, stderr=subprocess.STDOUT)
    try:
        standbys = standing_by(job.pid, [])
        _wait_until_idle(standbys)
        size = statistics.mean(_pss_mib(process) for process in standbys)
        ranks = [process for process, began_so in children(job.pid).items() if not began_so]
        for process in () if stand_by else standbys:
            os.kill(process, signal.SIGKILL)
        time.sleep(chance.random())
        os.kill(chance.choice(ranks), signal.SIGKILL)
        killed = time.monotonic()
        started = _seconds_until(Path(f"{output}.txt"), r"restart 1 of 1", killed)
        step = _seconds_until(Path(f"{output}.txt"), r"(?s)restart 1 of 1.* step \d+/\d+ ", killed)
        text = Path(f"{output}.txt").read_text()
        lost = int(re.findall(r"at step (\d+), ", text)[0]) - int(re.findall(r"resume +step-(\d+)", text)[0]) - 1
    finally:
        job.send_signal(signal.SIGTERM)
        job.wait()
    return Recovery(started, step, lost, size)


def _seconds_until(file: Path, pattern: str, since: float) -> float:
    while not re.search(pattern, file.read_text()):
        assert time.monotonic() < since + 120, file.read_text()
        time.sleep(0.005)
    return time.monotonic() - since


def _wait_until_idle(processes: set[int]) -> None:
    """Until none has used a processor for a while: all have imported what they have to."""
    used: Sequence[str] = ()
    while (now := [_processor_time(process) for process in processes]) != used:
        used = now
        time.sleep(READY_SECONDS)


def _processor_time(process: int) -> str:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return f"{fields[11]} {fields[12]}"


def _pss_mib(process: int) -> float:
    found = re.search(r"(?m)^Pss: +(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text())
    assert found is not None
    return int(found[1]) / 1024


if __name__ == "__main__":
    main(int(sys.argv[1]))
