"""Instruments: seconds, what a step sends through collectives, and how much memory a process holds.

Counting runs in a step of its own, never in a timed one. `JobTracker` counts bytes where torch hands an operation to
c10d, so they are exact for whatever issues the collective: FSDP2, functional collectives, autograd or plain calls.
"""

import gc
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from expertmesh.compat import tree_leaves
from expertmesh.planning.probe import UsageTracker

# c10d operations by kind. All-to-all counts its input (rows to itself included), the others the larger side.
_KINDS = {
    "all_to_all": ("alltoall_base_", "alltoall_", "all_to_all_single"),
    "all_gather": ("_allgather_base_", "allgather_", "all_gather_into_tensor", "all_gather_into_tensor_out"),
    "reduce_scatter": ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor"),
    "all_reduce": ("allreduce_", "all_reduce", "all_reduce_"),
    "broadcast": ("broadcast_", "broadcast"),
    "send": ("send", "isend"),
    "receive": ("recv_", "irecv"),
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}
_SENDS_NOTHING = ("wait_tensor", "barrier", "_wrap_tensor_autograd")


@dataclass(slots=True)
class CollectiveCount:
    """Calls and bytes of one kind of collective over one group."""

    calls: int = 0
    bytes: int = 0
    """Bytes of all calls together."""


class JobTracker(UsageTracker):
    """The planner's tracker on real or fake ranks: it also counts collectives, and storages that FSDP2 resizes.

    `sent[group][kind]` counts collectives; groups go by their names.
    """

    # Not DTensor and AsyncCollectiveTensor.
    with_storage = (torch.Tensor, torch.nn.Parameter, FakeTensor)

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, dict[str, CollectiveCount]] = defaultdict(lambda: defaultdict(CollectiveCount))

    def __enter__(self) -> Self:
        # FSDP2 frees and regrows parameters by resizing storages, which no dispatch sees.
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            self.count_storage(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        is_collective = namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd")
        is_collective &= name not in _SENDS_NOTHING
        if is_collective and name not in _KIND_OF:
            raise RuntimeError(f"the tracker does not know the c10d operation {name}, so its bytes would be missed")
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if is_collective:
            self._count_collective(name, args, result)
        with torch.no_grad():
            # A DTensor makes its local tensor below the tracker: gradients that FSDP2 accumulates.
            for local in (leaf.to_local() for leaf in tree_leaves(result) if isinstance(leaf, DTensor)):
                if type(local) in self.with_storage:
                    self.count_storage(local.untyped_storage())
        return result

    def _count_collective(self, name: str, args: Any, result: Any) -> None:
        # A functional operation returns what c10d's own is given to write into.
        sizes = [sum(t.nbytes for t in tree_leaves(arg) if isinstance(t, torch.Tensor)) for arg in (*args, result)]
        boxed = next((arg for arg in args if _is_group(arg)), None)
        # A functional operation ends with the group's name; before it may stand that of the reduction.
        group = next((arg for arg in reversed(args) if isinstance(arg, str)), "")
        group = group if boxed is None else str(dist.ProcessGroup.unbox(boxed).group_name)
        entry = self.sent[group][_KIND_OF[name]]
        entry.calls += 1
        if _KIND_OF[name] == "all_to_all":
            entry.bytes += sizes[0 if name == "all_to_all_single" else 1]
        else:
            entry.bytes += max(sizes)


def _is_group(argument: Any) -> bool:
    return isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type())


def count_collectives(step: Callable[[], object]) -> dict[str, CollectiveCount]:
    """Run `step` once and return what this rank handed to c10d, by kind of collective."""
    tracker, found = JobTracker(), dict[str, CollectiveCount]()
    with tracker:
        step()
    for kinds in tracker.sent.values():
        for kind, count in kinds.items():
            total = found.setdefault(kind, CollectiveCount())
            total.calls += count.calls
            total.bytes += count.bytes
    return found


def alternating(names: Sequence[str], repeats: int) -> Iterator[str]:
    """Yield each of `names` so many times, A B C, C B A, ...: what slows the machine down slows all of them alike."""
    for repeat in range(repeats):
        yield from names if repeat % 2 == 0 else reversed(names)


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Wall seconds of `run` between two synchronisations."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait for the accelerator; nothing to wait for on CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def saved_bytes(forward: Callable[[], object], exclude: Iterable[torch.Tensor] = ()) -> int:
    """Bytes that `forward` saves for backward; each storage counts once, those of `exclude` not at all.

    The result of `forward` is kept alive until the count is taken.
    """
    known = {t.untyped_storage().data_ptr() for t in exclude}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    total = sum(seen.values())
    del result
    return total


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Highest sum of tensor memory during `run` above what was allocated before it.

    Exact, from torch's allocator: unlike resident memory it does not depend on what the C library keeps or
    gives back.
    """
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        run()
        return torch.accelerator.max_memory_allocated(device) - before
    live = peak = 0
    for change in _allocations(run):
        live += change
        peak = max(peak, live)
    return peak


def held_bytes(run: Callable[[], object]) -> int:
    """CPU tensor memory that `run` leaves behind, its result included: for a forward, what backward needs. Exact."""
    return sum(_allocations(run))


def _allocations(run: Callable[[], object]) -> list[int]:
    """Return what `run` allocated (positive) and freed (negative) on the CPU, in bytes and in order."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells every start on stderr
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    results = profiler.profiler.kineto_results if profiler.profiler else None
    assert results is not None
    changes = [event for event in results.events() if event.name() == "[memory]"]
    del result
    return [event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())]


# Fields of /proc/self/status, which Linux has: resident memory now, its highest since the start or `reset_peak`, and
# the parts of it that are no pages of files and that are pages of mapped files.
RESIDENT, PEAK_RESIDENT, ANONYMOUS, FILE_PAGES = "VmRSS", "VmHWM", "RssAnon", "RssFile"


def status_bytes(field: str) -> int:
    """Return one of the fields above of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def reset_peak() -> None:
    """Forget the highest resident memory so far (Linux; the number 5 is the kernel's name for that)."""
    Path("/proc/self/clear_refs").write_text("5")


def read_bytes() -> int:
    """Bytes that read calls of this process have returned so far; its own looks at /proc count (Linux)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


class SampledPeaks:
    """Highest resident memory by kind while the `with` block runs, sampled by a thread (Linux).

    The kernel keeps an exact peak of the sum alone. `highest` has what the process holds (ANONYMOUS), and pages of
    mapped files, which the kernel can drop and processes share (FILE_PAGES).
    """

    def __init__(self, seconds: float = 0.002) -> None:
        self.highest = {ANONYMOUS: 0, FILE_PAGES: 0}
        self._seconds = seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._stop.wait(self._seconds):
            self._look()

    def _look(self) -> None:
        for field, highest in self.highest.items():
            self.highest[field] = max(highest, status_bytes(field))

    def __enter__(self) -> "SampledPeaks":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()
