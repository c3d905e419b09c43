"""Describe what a run computes with: versions of libraries, the device, the host."""

import os
import platform
import socket
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from expertmesh import __version__
from expertmesh.distributed.mesh import current_device


def machine_lines(output_dir: str) -> Iterator[str]:
    """Return versions and machine of this job, for its log. Rank 0 calls it."""
    found = versions()
    yield "versions   " + ", ".join(f"{name} {number}" for name, number in found.items())
    ranks, here = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    machines = f", {here} on each of {ranks // here} machines" if ranks > here else ""
    yield f"ranks      {ranks} × {device_name(current_device())}{machines}; rank 0 on {socket.gethostname()}"
    yield f"output     {Path(output_dir).absolute()}"


def versions() -> dict[str, str]:
    """Return the versions of the libraries that decide what a run computes."""
    return {
        "expertmesh": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def device_name(device: torch.device) -> str:
    """Return the name of the device: an accelerator, or the processor with the number of cores that may be used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()}, {cores} cores"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
