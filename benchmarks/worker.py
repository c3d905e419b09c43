"""The ranks of `step` and `load`: `launch` starts them, each runs `main`, rank 0 writes the result as JSON.

`time` builds every system on the same ranks and alternates them, so that a busy neighbour slows all of them alike.
`memory` and `load` build one system in a fresh process. Every rank leaves through `os._exit`, because gloo's teardown
aborts at random.
"""

import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks import probes
from benchmarks.case import Case, micro_batches, write_checkpoint
from expertmesh.distributed.mesh import current_device

# (case, systems, repeats) to what rank 0 writes; every rank calls it.
Mode = Callable[[Case, Sequence[str], int], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class System:
    """One built system on one rank.

    `step()` runs forward and backward over this rank's micro-batches and returns this rank's share of the global
    mean loss: the sum of it over ranks is the mean over all target tokens of the step. `module` owns the
    parameters. `note` says what it stores and computes in.
    """

    module: nn.Module
    step: Callable[[], torch.Tensor]
    note: str


def transformers_ep(case: Case, ep: int, *, no_sync: bool = False) -> System:
    """transformers' native EP x FSDP2: K rows per token through the all-to-all.

    With `no_sync`, FSDP2 reduces gradients at the last micro-batch alone, and keeps them unsharded until then.
    """
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    world, mixed = dist.get_world_size(), case.compute != case.params
    model = AutoModelForCausalLM.from_pretrained(
        case.checkpoint,
        dtype=getattr(torch, case.params),
        distributed_config=DistributedConfig(fsdp_size=world, ep_size=ep, fsdp_mixed_precision=mixed),
        experts_implementation="grouped_mm",
        attn_implementation="sdpa",
    )
    model.train()
    batches = micro_batches(case, dist.get_rank(), current_device())

    def step() -> torch.Tensor:
        total = torch.zeros((), device=current_device())
        for number, ids_BS in enumerate(batches, start=1):
            if no_sync:
                model.set_requires_gradient_sync(number == len(batches))
            # Its loss is a mean over this rank's targets; all ranks and micro-batches have equally many.
            loss: torch.Tensor = model(input_ids=ids_BS, labels=ids_BS, use_cache=False).loss / len(batches)
            loss.backward()
            total += loss.detach() / world
        return total

    computes = (
        f"fsdp_mixed_precision: {case.compute} compute, float32 reduce" if mixed else "the same compute and reduce"
    )
    return System(model, step, f"{case.params} parameters, {computes}")


def expertmesh_ep(
    case: Case, ep: int, *, accumulate: Literal["by_micro_batch", "by_layer"] = "by_micro_batch", **options: Any
) -> System:
    """Ours: de-duplicated dispatch, lean backward, FSDP2 over all ranks. `options` are those of `load_model`."""
    import expertmesh as em

    mesh = em.init_mesh(em.ParallelConfig(ep=ep))
    precision = em.PrecisionConfig(params=case.params, compute=case.compute, reduce="float32")  # type: ignore[arg-type]
    model = em.load_model(case.checkpoint, mesh, precision=precision, attention="sdpa", **options)
    batches = micro_batches(case, dist.get_rank(), mesh.device)
    targets = sum(em.count_targets(ids_BS) for ids_BS in batches) * dist.get_world_size()
    labelled = [{"input_ids": ids_BS, "labels": ids_BS} for ids_BS in batches]

    def step() -> torch.Tensor:
        return em.forward_backward(model, labelled, target_tokens=targets, accumulate=accumulate).loss

    return System(model, step, f"{case.params} parameters, {case.compute} compute, float32 reduce")


# Built as `builder(case, size)` on every rank; a name is an entry and a size, such as `transformers_ep4`.
BUILDERS: dict[str, Callable[[Case, int], System]] = {
    "transformers_ep": transformers_ep,
    "expertmesh_ep": expertmesh_ep,
}


def build(name: str, case: Case) -> System:
    """Build the system called `name` on this rank; collective."""
    entry = name.rstrip("0123456789")
    if entry not in BUILDERS:
        raise ValueError(f"unknown system {name!r}; known: {', '.join(sorted(BUILDERS))}, each followed by a size")
    return BUILDERS[entry](case, int(name[len(entry) :] or 1))


def launch(
    mode: str, case: Case, names: Sequence[str], repeats: int, worker: str = "benchmarks.worker"
) -> dict[str, Any]:
    """Start `case.ranks` fresh one-thread workers, wait for all of them and return what rank 0 wrote.

    Raises `RuntimeError` when one of them fails; its output tells why.
    """
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "result.json"
        job = {"mode": mode, "case": dataclasses.asdict(case), "names": list(names), "repeats": repeats}
        job |= {"store": str(Path(scratch) / "store"), "out": str(out)}
        command = [sys.executable, "-W", "ignore", "-m", worker, json.dumps(job)]
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(case.ranks),
            "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1",
        }  # fmt: skip
        ranks = [
            subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(case.ranks)
        ]
        try:
            failed = [rank for rank, process in enumerate(ranks) if process.wait() != 0]
        finally:
            for process in ranks:
                process.kill()
        if failed:
            raise RuntimeError(
                f"ranks {failed} of the {mode} run over {', '.join(names)} failed; their output is above"
            )
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def main(modes: Mapping[str, Mode] | None = None) -> None:
    """Run one of `modes` (default: `MODES`) as the rank that RANK names, on its accelerator or the CPU."""
    job = json.loads(sys.argv[1])
    rank, world, device = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), current_device()
    own = dist.get_default_backend_for_device(device)
    dist.init_process_group(
        own if device.type == "cpu" else f"cpu:gloo,{device.type}:{own}",
        init_method=f"file://{job['store']}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=600),
    )
    result = (modes or MODES)[job["mode"]](Case(**job["case"]), job["names"], job["repeats"])
    if rank == 0:
        Path(job["out"]).write_text(json.dumps(result), encoding="utf-8")
    meet()
    os._exit(0)


def measure_time(case: Case, names: Sequence[str], repeats: int) -> dict[str, Any]:
    """Wall and CPU seconds of each system, and the figures of its first step; collective.

    A system's wall time is the slowest rank's, its CPU time the sum over ranks. Without repeats they are those of the
    first step, which counting makes a little longer.
    """
    systems = {name: build(name, case) for name in names}
    result: dict[str, Any] = {name: {"note": system.note} | first_step(system) for name, system in systems.items()}
    for row in result.values() if repeats else ():
        row |= {"wall": [], "cpu": []}
    for name in probes.alternating(names, repeats):
        gc.collect()
        probes.synchronize(current_device())
        meet()
        cpu = time.process_time()
        wall = probes.seconds_of(systems[name].step, current_device())
        for key, seconds in _of_all(wall, time.process_time() - cpu).items():
            result[name][key] += seconds
        systems[name].module.zero_grad()
    return result


def first_step(system: System) -> dict[str, Any]:
    """Loss and gradient norm over all ranks of a step, and what it sends and holds; warms the system up; collective.

    `traffic` is by rank and kind of collective. `tensors` is by rank what torch had allocated at the peak, parameters
    included: exact, without what communication libraries take.
    """
    share, traffic, spent = torch.zeros(()), dict[str, Any](), (0.0, 0.0)

    def run() -> None:
        nonlocal share, spent
        start = time.perf_counter(), time.process_time()
        share = system.step()
        spent = time.perf_counter() - start[0], time.process_time() - start[1]

    def count() -> None:
        traffic.update({kind: dataclasses.asdict(entry) for kind, entry in probes.count_collectives(run).items()})

    tensors = sum(_local(parameter).nbytes for parameter in system.module.parameters())
    tensors += probes.peak_bytes(count, current_device())
    square = torch.zeros((), dtype=torch.float64)
    for parameter in system.module.parameters():
        if parameter.grad is not None:
            # Every system shards every parameter over all ranks, so local squares add up to the norm.
            square += _local(parameter.grad).double().square().sum().cpu()
    totals = torch.stack([share.double().cpu(), square])
    dist.all_reduce(totals)
    system.module.zero_grad()
    row = {"loss": totals[0].item(), "grad_norm": totals[1].sqrt().item(), **_of_all(*spent)}
    return row | {"traffic": gather(traffic), "tensors": gather(tensors)}


def _of_all(wall: float, cpu: float) -> dict[str, list[float]]:
    """Return the seconds of a step: wall of the slowest rank, CPU of all; collective."""
    spent = gather((wall, cpu))
    return {"wall": [max(wall for wall, _ in spent)], "cpu": [sum(cpu for _, cpu in spent)]}


def measure_memory(case: Case, names: Sequence[str], repeats: int) -> dict[str, Any]:
    """Peak bytes of each rank of one system, in processes that run nothing else; collective.

    `load` is the peak while the checkpoint is read, `step` the peak over the steps after it, with parameters and
    gradients. On an accelerator both are what torch had allocated there. On a CPU they are resident memory above
    `imports`: a tiny model of the same system runs first, so that lazily imported modules count as imports for every
    system. Both count file pages, e.g. of a mapped checkpoint, which the kernel can drop and ranks share;
    `step_anonymous` leaves them out, and is the figure to compare.
    """
    device = current_device()
    on_cpu = device.type == "cpu"
    if on_cpu:
        warm_up(case, names[0])
    imports = probes.status_bytes(probes.RESIDENT) if on_cpu else 0
    imported_files = probes.status_bytes(probes.FILE_PAGES) if on_cpu else 0
    _reset_peak(device)
    system = build(names[0], case)
    load = _peak(device) - imports
    gc.collect()
    meet()
    _reset_peak(device)
    for _ in range(repeats):
        system.step()
        system.module.zero_grad()
        meet()
    step = anonymous = _peak(device) - imports
    if on_cpu:
        # The kernel keeps no peak of anonymous memory, but steps map no files, so this is the peak's share.
        anonymous -= probes.status_bytes(probes.FILE_PAGES) - imported_files
    row = {"imports": imports, "load": load, "step": step, "step_anonymous": anonymous}
    return {"ranks": gather(row)}


def _reset_peak(device: torch.device) -> None:
    if device.type == "cpu":
        probes.reset_peak()
    else:
        torch.accelerator.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int:
    if device.type == "cpu":
        return probes.status_bytes(probes.PEAK_RESIDENT)
    return torch.accelerator.max_memory_allocated(device)


def measure_load(case: Case, names: Sequence[str], repeats: int) -> dict[str, Any]:
    """Build one system, which loads its checkpoint, in processes that have loaded nothing but a tiny one; collective.

    `seconds` are those of the slowest rank. Per rank, in bytes: the highest resident memory above the start (`peak`,
    exact, and its sampled parts `anonymous` and `file`), what stays (`kept`), `shard`, the bytes of its parameters,
    and `read`, what read calls gave it (the kernel's count; pages of mapped files are none). `square` is the sum of
    all squares, the same for every system.
    """
    warm_up(case, names[0])
    probes.reset_peak()
    before = {field: probes.status_bytes(field) for field in (probes.RESIDENT, probes.ANONYMOUS, probes.FILE_PAGES)}
    meet()
    read, built = probes.read_bytes(), list[System]()
    with probes.SampledPeaks() as peaks:
        seconds = probes.seconds_of(lambda: built.append(build(names[0], case)), current_device())
    row = {"read": probes.read_bytes() - read}
    row["peak"] = probes.status_bytes(probes.PEAK_RESIDENT) - before[probes.RESIDENT]
    row["kept"] = probes.status_bytes(probes.RESIDENT) - before[probes.RESIDENT]
    for name, field in (("anonymous", probes.ANONYMOUS), ("file", probes.FILE_PAGES)):
        row[name] = peaks.highest[field] - before[field]
    parameters = [_local(parameter.detach()) for parameter in built[0].module.parameters()]
    row["shard"] = sum(parameter.nbytes for parameter in parameters)
    square = torch.stack([parameter.double().square().sum() for parameter in parameters]).sum().cpu()
    dist.all_reduce(square)
    return {"seconds": max(gather(seconds)), "ranks": gather(row), "square": square.item()}


def warm_up(case: Case, name: str) -> None:
    """Build a tiny model of the same system and step once, so that lazy imports are done; collective."""
    with tempfile.TemporaryDirectory() if dist.get_rank() == 0 else nullcontext("") as directory:
        tiny = gather(write_checkpoint(case.tiny(), Path(directory)) if directory else None)[0]
        build(name, tiny).step()
        meet()
    gc.collect()


def meet() -> None:
    """A barrier of all ranks on the host; collective (one all-reduce of a number on the CPU)."""
    dist.all_reduce(torch.zeros(()))


def gather(value: Any) -> list[Any]:
    """`value` of every rank, on every rank; collective (all_gather_object on the default group)."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a possibly sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


MODES: dict[str, Mode] = {"time": measure_time, "memory": measure_memory, "load": measure_load}


if __name__ == "__main__":
    main()
