"""One rank of a benchmark run; started by `launch` of step.py, never by hand.

`time` builds every system on the same ranks and alternates them, so that a busy neighbour slows all of them
alike. `memory` and `load` build one system in a fresh process. `profile` prints where one system's CPU time goes on
rank 0. Rank 0 writes the result as JSON; every rank leaves through `os._exit`, because gloo's teardown aborts at
random.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from expertmesh.bench import probes
from expertmesh.bench.case import Case, write_checkpoint
from expertmesh.bench.systems import System, build
from expertmesh.distributed.mesh import current_device

# (case, systems, repeats) to what rank 0 writes; every rank calls it.
Mode = Callable[[Case, Sequence[str], int], dict[str, Any]]


def main(modes: Mapping[str, Mode] | None = None) -> None:
    """Run one of `modes` (default: `MODES`) as the rank that RANK names, on its accelerator or the CPU."""
    modes = modes or MODES
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=tuple(modes))
    parser.add_argument("--case", required=True)
    parser.add_argument("--systems", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    case, names = Case.from_json(arguments.case), arguments.systems.split(",")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = current_device()
    own = dist.get_default_backend_for_device(device)
    dist.init_process_group(
        own if device.type == "cpu" else f"cpu:gloo,{device.type}:{own}",
        init_method=f"file://{arguments.store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=600),
    )
    result = modes[arguments.mode](case, names, arguments.repeats)
    if rank == 0:
        Path(arguments.out).write_text(json.dumps(result))
    meet()
    os._exit(0)


def measure_time(case: Case, names: Sequence[str], repeats: int) -> dict[str, Any]:
    """Wall and CPU seconds, traffic, loss and gradient norm of each system; collective.

    Repetitions alternate A B C, C B A, ... A system's wall time is the slowest rank's, its CPU time the sum
    over ranks.
    """
    systems = {name: build(name, case) for name in names}
    result: dict[str, Any] = {}
    for name, system in systems.items():
        loss, norm = first_step(system)
        traffic = probes.count_collectives(system.step) if system else {}
        forget_gradients(system)
        per_rank = gather({kind: dataclasses.asdict(entry) for kind, entry in traffic.items()})
        note, trains_all = gather((system.note, system.trains_all) if system else ("", True))[0]
        result[name] = {
            "note": note,
            "trains_all": trains_all,
            "loss": loss,
            "grad_norm": norm,
            "traffic": per_rank,
            "wall": [],
            "cpu": [],
        }
    for repeat in range(repeats):
        for name in names if repeat % 2 == 0 else reversed(names):
            wall, cpu = timed_step(systems[name])
            result[name]["wall"].append(wall)
            result[name]["cpu"].append(cpu)
    return result


def first_step(system: System | None) -> tuple[float, float]:
    """Loss and gradient norm over all ranks of a first step, which also warms the system up; collective."""
    share = system.step() if system else torch.zeros(())
    square = torch.zeros((), dtype=torch.float64)
    for parameter in system.module.parameters() if system else ():
        gradient = parameter.grad
        if gradient is not None:
            # Every system shards every parameter over all ranks, so local squares add up to the norm.
            square += _local(gradient).double().square().sum().cpu()
    totals = torch.stack([share.double().cpu(), square])
    dist.all_reduce(totals)
    forget_gradients(system)
    return totals[0].item(), totals[1].sqrt().item()


def timed_step(system: System | None) -> tuple[float, float]:
    """One step from a common start: (slowest rank's wall seconds, CPU seconds of all ranks); collective."""
    gc.collect()
    probes.synchronize(current_device())
    meet()
    cpu, wall = time.process_time(), time.perf_counter()
    if system:
        system.step()
    probes.synchronize(current_device())
    spent = (time.perf_counter() - wall, time.process_time() - cpu)
    forget_gradients(system)
    everyone = gather(spent)
    return max(seconds for seconds, _ in everyone), sum(seconds for _, seconds in everyone)


def measure_memory(case: Case, name: str, repeats: int) -> dict[str, Any]:
    """Peak resident bytes of each rank above imports, in processes that run nothing else; collective.

    A tiny model of the same system runs first, so that lazily imported modules count as imports for every
    system. `load` is the peak while the checkpoint is read, `step` the peak over the steps after it, with
    parameters and gradients. Both count file pages, e.g. of a mapped checkpoint, which the kernel can drop
    and ranks share; `step_anonymous` leaves them out, and is the figure to compare. `tensors` is what
    torch itself had allocated at the peak of one more step: exact, without what communication libraries take. On an
    accelerator all of them are what torch had allocated there.
    """
    if current_device().type != "cpu":
        return _measure_device_memory(case, name, repeats)
    warm_up(case, name)
    imports, imported_files = probes.resident_bytes(), probes.file_bytes()
    probes.reset_peak()
    system = build(name, case)
    load = probes.peak_resident_bytes() - imports
    gc.collect()
    meet()
    probes.reset_peak()
    for _ in range(repeats):
        if system:
            system.step()
            forget_gradients(system)
        meet()
    step = probes.peak_resident_bytes() - imports
    # The kernel keeps no peak of anonymous memory, but steps map no files, so this is the peak's share.
    anonymous = step - (probes.file_bytes() - imported_files)
    tensors = 0
    if system:
        held = sum(_local(parameter).nbytes for parameter in system.module.parameters())
        tensors = held + probes.peak_allocated_bytes(system.step)
    row = {"imports": imports, "load": load, "step": step, "step_anonymous": anonymous, "tensors": tensors}
    return {"ranks": [row for row in gather(row if system else None) if row]}


def _measure_device_memory(case: Case, name: str, repeats: int) -> dict[str, Any]:
    device = current_device()
    torch.accelerator.reset_peak_memory_stats(device)
    system = build(name, case)
    load = torch.accelerator.max_memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    for _ in range(repeats):
        if system:
            system.step()
            forget_gradients(system)
        meet()
    step = torch.accelerator.max_memory_allocated(device)
    row = {"imports": 0, "load": load, "step": step, "step_anonymous": step, "tensors": step}
    return {"ranks": [row for row in gather(row if system else None) if row]}


def measure_load(case: Case, name: str) -> dict[str, Any]:
    """Build one system, which loads its checkpoint, in processes that have loaded nothing but a tiny one; collective.

    `seconds` are those of the slowest rank. Per rank, in bytes: the highest resident memory above the start (`peak`,
    exact, and its sampled parts `anonymous` and `file`), what stays (`kept`), `shard`, the bytes of its parameters,
    and `read`, what read calls gave it (the kernel's count; pages of mapped files are none). `square` is the sum of
    all squares, the same for every system.
    """
    warm_up(case, name)
    probes.reset_peak()
    resident, anonymous, file = probes.resident_bytes(), probes.anonymous_bytes(), probes.file_bytes()
    meet()
    read = probes.read_bytes()
    with probes.SampledPeaks() as peaks:
        start = time.perf_counter()
        system = build(name, case)
        probes.synchronize(current_device())
        seconds = time.perf_counter() - start
    read = probes.read_bytes() - read
    row = {"peak": probes.peak_resident_bytes() - resident, "kept": probes.resident_bytes() - resident}
    row |= {"anonymous": peaks.anonymous - anonymous, "file": peaks.file - file}
    assert system is not None
    parameters = [_local(parameter.detach()) for parameter in system.module.parameters()]
    row |= {"shard": sum(parameter.nbytes for parameter in parameters), "read": read}
    square = torch.stack([parameter.double().square().sum() for parameter in parameters]).sum()
    square = square.cpu()
    dist.all_reduce(square)
    return {"seconds": max(gather(seconds)), "ranks": gather(row), "square": square.item()}


def warm_up(case: Case, name: str) -> None:
    """Build a tiny model of the same system and step once, so that lazy imports are done; collective."""
    with tempfile.TemporaryDirectory() if dist.get_rank() == 0 else _Nothing() as directory:
        tiny = gather(write_checkpoint(case.tiny(), Path(directory)) if directory else None)[0]
        warm = build(name, tiny)
        if warm:
            warm.step()
        meet()
    del warm
    gc.collect()


def profile(case: Case, name: str, repeats: int) -> str:
    """torch's own table of where rank 0's CPU time goes in `repeats` steps of one system; collective."""
    system = build(name, case)
    first_step(system)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(repeats):
            if system:
                system.step()
            forget_gradients(system)
            meet()
    return str(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60))


def forget_gradients(system: System | None) -> None:
    """Drop the gradients, outside every measurement."""
    if system:
        system.module.zero_grad(set_to_none=True)


def meet() -> None:
    """A barrier of all ranks on the host; collective (one all-reduce of a number on the CPU)."""
    dist.all_reduce(torch.zeros(()))


def gather(value: Any) -> list[Any]:
    """`value` of every rank, on every rank; collective (all_gather_object on the default group)."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def median(values: Sequence[float]) -> float:
    """The median, as a float."""
    return float(statistics.median(values))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a possibly sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Nothing:
    """A context that yields an empty string, for ranks that need no temporary directory."""

    def __enter__(self) -> str:
        return ""

    def __exit__(self, *_: object) -> None:
        return None


MODES: dict[str, Mode] = {
    "time": measure_time,
    "memory": lambda case, names, repeats: measure_memory(case, names[0], repeats),
    "load": lambda case, names, repeats: measure_load(case, names[0]),
    "profile": lambda case, names, repeats: {"profile": profile(case, names[0], repeats)},
}


if __name__ == "__main__":
    main()
