"""Raise the error of one rank on all of them, so that nobody is left waiting in a collective.

`with raise_on_all_ranks("reading weights"):` runs its block on every rank; then the ranks compare their results. If one
failed, every rank raises the same sentence, that of the lowest failing rank. Never use it around code that itself
communicates: a rank that raised would leave its peers inside that collective.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from expertmesh.config.errors import (
    DistributedFailure,
    ExpertmeshError,
    InputError,
    IntegrityError,
    MissingHereError,
    SecurityError,
)

_KINDS = (InputError, MissingHereError, IntegrityError, SecurityError, DistributedFailure)
_CLASSES = {kind.__name__: kind for kind in _KINDS}
T = TypeVar("T")


@contextmanager
def raise_on_all_ranks(doing: str) -> Iterator[None]:
    """Run the block on every rank of the default group; raise on all of them if it raised on one.

    Raises:
        ExpertmeshError: With its own class, sentence and key on every rank.
        DistributedFailure: On the other ranks, naming the rank on which any other exception was raised.

    Collectives: every rank enters it; one all-reduce of an integer on the default group, and two broadcasts after a
    failure. None without a process group.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if error is not None:
            raise error
        return
    rank, world = dist.get_rank(), dist.get_world_size()
    failed = torch.tensor([rank if error is not None else world], device=collective_device())
    dist.all_reduce(failed, op=dist.ReduceOp.MIN)
    first = int(failed.item())
    if first == world:
        return
    text, key = str(error), getattr(error, "key", "")
    # A class derived from one of them, as `CannotCut`, is that one on the other ranks.
    name = next((kind.__name__ for kind in type(error).__mro__ if kind in _KINDS), "")
    if not name:
        text = f"rank {rank} failed while {doing}: {type(error).__name__}: {text}; its own log has the traceback"
        name, key = DistributedFailure.__name__, "rank.unexpected-error"
    sent = [(name, text, key)]
    dist.broadcast_object_list(sent, src=first)
    name, text, key = sent[0]
    raised = error if rank == first else _CLASSES[name](text, key=key)
    assert raised is not None
    if isinstance(raised, ExpertmeshError):
        raised.on_all_ranks = True
    raise raised from (None if raised is error else error)


def rank_and_ranks() -> tuple[int, int]:
    """Return this rank and the number of ranks in the default group; (0, 1) without one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def from_rank_0(own: T) -> T:
    """Return the value of rank 0 on every rank, pickled between the ranks of a job.

    Collectives: every rank calls it; two broadcasts on the default group.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    found = [own]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def gather_objects(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the object of each rank of `group`, by rank.

    Collectives: every rank of `group` (the default group if None) calls it; two all-gathers.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [own]
    found = [own] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


def sum_over_ranks(numbers: torch.Tensor) -> torch.Tensor:
    """Return the sum of `numbers` over all ranks, on the CPU.

    Collectives: every rank calls it; one all-reduce on the default group.
    """
    numbers = numbers.to(collective_device())
    if dist.is_initialized():
        dist.all_reduce(numbers)
    return numbers.cpu()


def collective_device() -> torch.device:
    """Return the device for small tensors of the default group: the CPU if it has a backend, else the accelerator."""
    if not dist.is_initialized() or "cpu" in dist.get_backend_config() or not torch.accelerator.is_available():
        return torch.device("cpu")
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return torch.device(device.type, torch.accelerator.current_device_index())
