"""Record some steps of every rank (`train --profile 3:5`) as traces of torch.profiler in `output_dir/profile`.

One trace a rank, for ui.perfetto.dev or chrome://tracing. Expert layers have spans `expertmesh::dispatch`, `experts`
and `combine`; their backward goes by the names of autograd functions. On CUDA also the history of memory, for torch's
own viewer. Outside of these steps nothing is recorded, and nothing costs.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from expertmesh.compat import memory_page, record_memory
from expertmesh.io.terminal import plural

log = logging.getLogger(__name__)
_MEMORY_EVENTS = 200_000


@contextmanager
def profiling(steps: tuple[int, int] | None, directory: Path, rank: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call at the end of each step inside the block.

    `steps`: the first and the last, counted from the start of the block; the step before the first warms the profiler
    up. No communication.
    """
    if steps is None:
        yield lambda: None
        return
    # Kineto prints marks for tracing tools (USDT) above its errors; it reads the level when it first profiles.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    first, last = steps
    prefix, done, written = directory / f"steps-{first}-{last}-rank-{rank}", 0, False

    def write(profiler: profile) -> None:
        nonlocal written
        try:
            directory.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(f"{prefix}.json.gz")
            if torch.cuda.is_available():
                _write_memory(Path(f"{prefix}-memory.html"))
        except (OSError, RuntimeError) as error:
            log.warning(f"warning: the profile cannot be written: {error}")
            return
        written = True
        if rank == 0:
            log.info(f"profile    steps {first} to {last} of this start: {prefix}.json.gz, and one for each other rank")

    def end_step() -> None:
        nonlocal done
        done += 1
        if done == first - 1 and torch.cuda.is_available():
            record_memory(_MEMORY_EVENTS)
        profiler.step()

    warm_up = min(1, first - 1)
    with warnings.catch_warnings():  # of a first step, before which there is none to warm up in
        warnings.filterwarnings("ignore", "Profiler won't be using warmup")
        when = schedule(wait=first - 1 - warm_up, warmup=warm_up, active=last - first + 1, repeat=1)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=kinds, schedule=when, on_trace_ready=write) as profiler:
        yield end_step
    if rank == 0 and not written:
        log.warning(
            f"warning: nothing was profiled: this start had {plural(done, 'step')}, and --profile begins at {first}"
        )


def _write_memory(path: Path) -> None:
    path.write_text(memory_page(), encoding="utf-8")
    record_memory(None)
