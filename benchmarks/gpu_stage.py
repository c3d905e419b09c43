"""One stage of gpu.py in this process: `python -m benchmarks.gpu_stage NAME OUT`, told to go on stdin; rows to stdout.

What stages share is here, too: the device, the process group of one rank, sizes.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu import Row
from expertmesh.distributed.mesh import current_device, start_process_group


@dataclass(frozen=True, slots=True)
class Run:
    """Where a stage runs and where its files go. `pick(large, small)` is the size for a GPU, or for a CPU."""

    device: torch.device
    out: Path

    def pick(self, large: Any, small: Any) -> Any:
        return large if self.device.type == "cuda" else small


Stage = Callable[[Run], Iterator[Row]]


def start_one_rank(run: Run) -> None:
    """A job of one rank, started as the command line starts ranks: NCCL on a GPU."""
    if not dist.is_initialized():
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        start_process_group(run.device, 60)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, of the whole tensor; infinite where a value is not finite."""
    got, expected = got.detach().cpu().double(), expected.detach().cpu().double()
    if not got.isfinite().all():
        return float("inf")
    return float((got - expected).norm() / expected.norm().clamp_min(1e-30))


def checked(case: str, limit: float, /, **errors: float) -> Row:
    """Return the row of a check: right where every error is within `limit`."""
    return {"case": case, **errors, "limit": limit, "ok": all(each <= limit for each in errors.values())}


def stage(name: str) -> Stage:
    from benchmarks import gpu_checks, gpu_figures

    found: Stage = {**gpu_checks.STAGES, **gpu_figures.STAGES}[name]
    return found


def main() -> None:
    from benchmarks.gpu import GO

    name, out = sys.argv[1:]
    chosen = stage(name)
    if sys.stdin.read() != GO:
        sys.exit("was not told to go")
    for row in chosen(Run(current_device(), Path(out))):
        print(json.dumps(row), flush=True)
    # Libraries of communication may abort while they are torn down.
    os._exit(0)


if __name__ == "__main__":
    main()
