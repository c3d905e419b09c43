"""Instruments: seconds, what a step sends through collectives, and how much memory a process holds.

Counting runs in a step of its own, never in a timed one. The planner's tracker counts bytes where torch hands an
operation to c10d, so they are exact for whatever issues the collective: FSDP2, functional collectives, autograd or
plain calls.
"""

import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from expertmesh.planning.probe import CollectiveCount, UsageTracker


def count_collectives(step: Callable[[], object]) -> dict[str, CollectiveCount]:
    """Run `step` once and return what this rank handed to c10d, by kind of collective."""
    tracker, found = UsageTracker(), dict[str, CollectiveCount]()
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
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def reset_peak() -> None:
    """Forget the highest resident memory so far (Linux; the number 5 is the kernel's name for that)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def read_bytes() -> int:
    """Bytes that read calls of this process have returned so far; its own looks at /proc count (Linux)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="utf-8").splitlines())
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
