"""Real gloo ranks for tests: `run_ranks(fn, world_size, *args)` forks processes, runs `fn`, returns what each gave.

Forking keeps torch and transformers imported (0.3 s for four ranks instead of 15 s through a launcher). Every run
has a wall-clock limit for the whole job and a shorter one for each collective, and leaves no process behind,
whether it passes, fails or hangs.
"""

import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported lazily by DTensor; here once, instead of two seconds in every forked rank
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import expertmesh as em
from expertmesh.config.errors import ExpertmeshError

# What else a first use would load in every forked rank.
for _name in em.__all__:
    getattr(em, _name)
get_checkpoint_conversion_mapping("qwen3_moe")


# Only what hangs comes near it: on a busy machine a test of seconds may take minutes.
LIMIT_SECONDS = 500
# How long the others get to fail as well when a rank has.
GRACE_SECONDS = 30


class RankFailed(AssertionError):
    """One or more ranks raised, died or hung; the message carries every rank's traceback."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = LIMIT_SECONDS,
    meanwhile: Callable[[Sequence[BaseProcess]], None] | None = None,
) -> list[Any]:
    """Run `fn(*args)` in `world_size` forked gloo ranks; return the ranks' (picklable) results in rank order.

    The first rank to fail ends the others after a short grace, so that the failure that came first is reported
    first. `timeout` is in seconds, for the whole job. `meanwhile` runs here once all ranks are started, and gets them.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        processes = [
            context.Process(target=_rank_main, args=(fn, args, rank, world_size, scratch, timeout), daemon=True)
            for rank in range(world_size)
        ]
        for rank in range(world_size):
            Path(scratch, f"stack-{rank}").touch()
        gc.disable()  # until the ranks have frozen what is here
        try:
            for process in processes:
                process.start()
        finally:
            gc.enable()
        try:
            if meanwhile is not None:
                meanwhile(processes)
            _wait_for_all(processes, timeout)
        finally:
            _end([process for process in processes if process.is_alive()])
            for process in processes:
                process.join()
        return _collect(processes, Path(scratch), timeout)


def _end(processes: Sequence[BaseProcess]) -> None:
    """Kill ranks that hang, when they have written where they are."""
    for process in processes:
        os.kill(process.pid or 0, signal.SIGUSR1)
    if processes:
        time.sleep(0.5)
    for process in processes:
        process.kill()


def _wait_for_all(processes: list[Any], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    pending = {process.sentinel: process for process in processes}
    while pending and time.monotonic() < deadline:
        for sentinel in wait(list(pending), timeout=deadline - time.monotonic()):
            process = pending.pop(sentinel)
            process.join()  # a sentinel is ready a moment before its process can be waited for
            if process.exitcode != 0:
                # Peers notice a dead rank within seconds, and then write their own tracebacks.
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)


def _collect(processes: list[Any], scratch: Path, timeout: float) -> list[Any]:
    results, failures = [], []
    for rank, process in enumerate(processes):
        error, result = scratch / f"error-{rank}", scratch / f"result-{rank}"
        if error.exists():
            failures.append((error.stat().st_mtime, f"rank {rank} raised:\n{error.read_text()}"))
        elif process.exitcode != 0 or not result.exists():
            stack = (scratch / f"stack-{rank}").read_text()  # where it crashed, if a signal ended it
            what = f"rank {rank} hung or died (exit {process.exitcode}, limit {timeout} s)"
            failures.append((time.time(), f"{what}\n{stack}"))
        else:
            results.append(pickle.loads(result.read_bytes()))
    if failures:
        raise RankFailed("\n".join(text for _, text in sorted(failures)))
    return results


def _rank_main(
    fn: Callable[..., Any], args: tuple[Any, ...], rank: int, world: int, scratch: str, timeout: float
) -> None:
    # Garbage of the process that forked must never be collected here: a process group in it would wait for its threads,
    # which a fork does not copy.
    gc.freeze()
    gc.enable()
    torch.set_num_threads(1)
    stack = os.open(f"{scratch}/stack-{rank}", os.O_WRONLY)
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, stack)
    code = 0
    # A Trainer's arguments may have set up one process alone in the process that forked.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    try:
        store = dist.FileStore(f"{scratch}/store", world)
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        result = fn(*args)
        dist.barrier()
        Path(scratch, f"result-{rank}").write_bytes(pickle.dumps(result))
    except BaseException as error:
        key = f"{type(error).__name__} of key {error.key}\n" if isinstance(error, ExpertmeshError) else ""
        Path(scratch, f"error-{rank}").write_text(traceback.format_exc() + key)
        code = 1
    # gloo's teardown aborts at random after correct runs; leaving here skips it.
    os._exit(code)
