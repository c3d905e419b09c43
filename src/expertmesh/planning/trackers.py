"""Counts what a piece of training holds and sends: bytes of live tensors, their peak, and bytes of each collective.

Used by the probe (a block of a model on meta), by the simulation (fake tensors) and by the measurements on real ranks,
so that all three count the same. Sizes are those of storages, each counted once while anything refers to it; what a
kernel allocates inside itself is not seen. Collectives are counted where torch hands them to c10d.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from expertmesh.compat import FakeTensor, TorchDispatchMode, group_of, storage_key, tree_leaves

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
# Wrappers like DTensor and AsyncCollectiveTensor have no storage of their own.
_WITH_STORAGE = (torch.Tensor, torch.nn.Parameter, FakeTensor)


@dataclass(slots=True)
class CollectiveCount:
    """Calls and bytes of one kind of collective over one group."""

    calls: int = 0
    bytes: int = 0
    """Bytes of all calls together."""


class UsageTracker(TorchDispatchMode):
    """Under it, `live` is what tensors made since it began hold (and those given to `include`), `peak` the most of it.

    `sent[group][kind]` counts collectives; groups go by their names. `operations` counts what is more than a view:
    `products` are the FLOPs of matrix products among them, and `moved` the bytes that the others read and write. While
    it `is_off`, nothing counts. Not to be nested.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.operations = 0
        self.products = 0
        self.moved = 0
        self.is_off = False
        self.sent: dict[str, dict[str, CollectiveCount]] = defaultdict(lambda: defaultdict(CollectiveCount))
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}

    def __enter__(self) -> Self:
        # FSDP2 frees and regrows parameters by resizing storages, which no dispatch sees.
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            self._note(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exception)

    def include(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these as well, from now on."""
        for tensor in tensors:
            self._note(tensor.untyped_storage())

    def reset_peak(self) -> None:
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_off:
            return func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        is_collective = namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd")
        is_collective &= name not in _SENDS_NOTHING
        if is_collective and name not in _KIND_OF:
            raise RuntimeError(f"the tracker does not know the c10d operation {name}, so its bytes would be missed")
        result = func(*args, **(kwargs or {}))
        if is_collective:
            self._count_collective(name, args, result)
        outputs = [leaf for leaf in map(_local, tree_leaves(result)) if type(leaf) in _WITH_STORAGE]
        for output in outputs:
            self._note(output.untyped_storage())
        if (flops := flop_registry.get(func.overloadpacket)) is not None:
            self.products += flops(*args, **(kwargs or {}), out_val=result)
        self._count_operation(func, args, outputs)
        return result

    def _count_operation(self, func: Any, args: Any, outputs: list[torch.Tensor]) -> None:
        inputs = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        read = {storage_key(tensor.untyped_storage()) for tensor in inputs if type(tensor) in _WITH_STORAGE}
        makes = any(storage_key(tensor.untyped_storage()) not in read for tensor in outputs)
        if makes or func._schema.is_mutable:
            self.operations += 1
            if func.overloadpacket not in flop_registry:
                self.moved += sum(tensor.nbytes for tensor in (*inputs, *outputs))

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage_key(storage), storage.nbytes()
        if key not in self._sizes:
            self._sizes[key] = 0
            self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
        self.live += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)
        self._references.pop(key, None)

    def _count_collective(self, name: str, args: Any, result: Any) -> None:
        # A functional operation returns what c10d's own is given to write into.
        sizes = [sum(t.nbytes for t in tree_leaves(arg) if isinstance(t, torch.Tensor)) for arg in (*args, result)]
        entry = self.sent[_group_of(args)][_KIND_OF[name]]
        entry.calls += 1
        if _KIND_OF[name] == "all_to_all":
            entry.bytes += sizes[0 if name == "all_to_all_single" else 1]
        else:
            entry.bytes += max(sizes)


def _local(leaf: Any) -> Any:
    """Return the local tensor of a DTensor, which makes it below the tracker (gradients that FSDP2 accumulates)."""
    if not isinstance(leaf, DTensor):
        return leaf
    with torch.no_grad():
        return leaf.to_local()


def _group_of(args: Any) -> str:
    """Return the name of the process group among a c10d operation's arguments."""
    for arg in args:
        if group_of(arg):
            return str(dist.ProcessGroup.unbox(arg).group_name)
    # A functional operation ends with the group's name; before it may stand that of the reduction.
    return next((arg for arg in reversed(args) if isinstance(arg, str)), "")
