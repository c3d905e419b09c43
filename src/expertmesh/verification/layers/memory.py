"""Whether an unsharded model fits into the memory that is free."""

import os
from pathlib import Path

from expertmesh.distributed.all_ranks import from_rank_0
from expertmesh.state.stage_view import full_model
from expertmesh.verification.job import Job

# Of the memory that is free, what unsharded models in memory may use.
_SHARE = 0.5


def whole_model_fits(job: Job) -> bool:
    """Whether rank 0 can hold the whole model twice, as it says on all ranks."""
    elements = sum(parameter.numel() for parameter in full_model(job.model).parameters())
    return refusal(2 * elements * (8 if job.precision.params == "float64" else 4)) is None


def refusal(needed: int) -> str | None:
    """Why so many bytes are too many on rank 0's machine, or None; the same on every rank."""
    free = int(from_rank_0(str(_free_memory())))
    if needed <= _SHARE * free:
        return None
    return f"the unsharded model takes {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free"


def _free_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
