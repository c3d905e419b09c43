"""Instruments: what a step sends through collectives, and how much memory a process holds.

Counting runs in a step of its own, never in a timed one. Bytes are counted where torch hands an operation to
c10d, so they are exact for whatever issues the collective: FSDP2, functional collectives, autograd or plain
calls.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclasses.dataclass(slots=True)
class Traffic:
    """Calls and bytes of one kind of collective on one rank.

    All-to-all counts the bytes of its input, the rows a rank sends to itself included. Other collectives
    count the larger of input and output, which is the whole gathered or reduced tensor.
    """

    calls: int = 0
    bytes: int = 0


class CollectiveCounter(TorchDispatchMode):
    """Counts every c10d operation issued under it, by kind: all_to_all, all_gather, reduce_scatter, ...

    Raises RuntimeError on a communicating c10d operation that it does not know, rather than miss its bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.traffic: dict[str, Traffic] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self._count(name, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        if name in ("wait_tensor", "_wrap_tensor_autograd", "barrier"):
            return
        kind = next((kind for kind, names in _KINDS.items() if name in names), None)
        if kind is None:
            raise RuntimeError(f"the collective counter does not know the c10d operation {name!r}")
        tensors = [sum(t.nbytes for t in _tensors(arg)) for arg in args]
        entry = self.traffic.setdefault(kind, Traffic())
        entry.calls += 1
        if kind == "all_to_all":
            # c10d passes (output, input); the functional form passes the input alone.
            entry.bytes += tensors[1] if name in ("alltoall_base_", "alltoall_") else tensors[0]
        else:
            entry.bytes += _gathered_bytes(name, tensors, args)


_KINDS: dict[str, tuple[str, ...]] = {
    "all_to_all": ("alltoall_base_", "alltoall_", "all_to_all_single"),
    "all_gather": (
        "_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_", "all_gather_into_tensor",
        "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced",
    ),
    "reduce_scatter": (
        "_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_",
        "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced",
    ),
    "all_reduce": ("allreduce_", "all_reduce", "all_reduce_", "allreduce_coalesced_", "all_reduce_coalesced"),
    "broadcast": ("broadcast_", "broadcast"),
}  # fmt: skip


def _gathered_bytes(name: str, tensors: list[int], args: tuple[Any, ...]) -> int:
    """The whole gathered or reduced tensor; functional gathers carry the group size, not their output."""
    largest = max(tensors)
    if name.startswith("all_gather_into_tensor") and name != "all_gather_into_tensor_out":
        return largest * int(args[1])
    return largest


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def count_collectives(step: Callable[[], object]) -> dict[str, Traffic]:
    """Run `step` once and return what this rank handed to c10d, by kind of collective."""
    counter = CollectiveCounter()
    with counter:
        step()
    return counter.traffic


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


def peak_allocated_bytes(run: Callable[[], object]) -> int:
    """Highest sum of CPU tensor memory during `run` above what was allocated before it.

    Exact, from torch's allocator: unlike resident memory it does not depend on what the C library keeps or
    gives back.
    """
    live = peak = 0
    for change in _allocations(run):
        live += change
        peak = max(peak, live)
    return peak


def held_bytes(run: Callable[[], object]) -> int:
    """CPU tensor memory that `run` leaves behind, its result included: for a forward, what backward needs. Exact."""
    return sum(_allocations(run))


def _allocations(run: Callable[[], object]) -> list[int]:
    """What `run` allocated (positive) and freed (negative), in bytes and in order."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells every start on stderr
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    results = profiler.profiler.kineto_results if profiler.profiler else None
    assert results is not None
    changes = [event for event in results.events() if event.name() == "[memory]"]
    del result
    return [event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())]


def synchronize(device: torch.device) -> None:
    """Wait for the accelerator; nothing to wait for on CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


class SampledPeaks:
    """Highest resident memory by kind while the `with` block runs, sampled by a thread (Linux).

    The kernel keeps an exact peak of the sum alone. `anonymous` is what the process holds; `file` are pages of mapped
    files, which the kernel can drop and processes share.
    """

    def __init__(self, seconds: float = 0.002) -> None:
        self.anonymous = self.file = 0
        self._seconds = seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._stop.wait(self._seconds):
            self._look()

    def _look(self) -> None:
        self.anonymous = max(self.anonymous, anonymous_bytes())
        self.file = max(self.file, file_bytes())

    def __enter__(self) -> SampledPeaks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()


def read_bytes() -> int:
    """Bytes that read calls of this process have returned so far; its own looks at /proc count (Linux)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def anonymous_bytes() -> int:
    """The part of resident memory that is no page of a file (Linux)."""
    return _status_bytes("RssAnon")


def resident_bytes() -> int:
    """Resident memory of this process now (Linux)."""
    return _status_bytes("VmRSS")


def file_bytes() -> int:
    """The part of resident memory that is pages of mapped files (Linux)."""
    return _status_bytes("RssFile")


def peak_resident_bytes() -> int:
    """Highest resident memory since the process started or since `reset_peak` (Linux)."""
    return _status_bytes("VmHWM")


def reset_peak() -> None:
    """Forget the highest resident memory so far (Linux; the number 5 is the kernel's name for that)."""
    Path("/proc/self/clear_refs").write_text("5")
