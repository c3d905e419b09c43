"""Raise the error of one rank on all of them, so that nobody is left waiting in a collective.

`with raise_on_all_ranks("reading weights"):` runs its block on every rank; then the ranks compare their results. If one
failed, every rank raises the same sentence, that of the lowest failing rank. Never use it around code that itself
communicates: a rank that raised would leave its peers inside that collective.
"""

import json
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
_MESSAGE_BYTES = 16384
T = TypeVar("T")


@contextmanager
def raise_on_all_ranks(doing: str) -> Iterator[None]:
    """Run the block on every rank of the default group; raise on all of them if it raised on one.

    Raises:
        ExpertmeshError: With its own class, sentence and key on every rank.
        DistributedFailure: On the other ranks, naming the rank on which any other exception was raised.

    Collectives: every rank enters it; one all-reduce of an integer on the default group, and one broadcast after a
    failure. None without a process group.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    _compare(error, doing)


def from_rank_0(text: str) -> str:
    """Return the text of rank 0 on every rank. Collectives: every rank calls it; one broadcast on the default group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return text
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device=collective_device())
    if dist.get_rank() == 0:
        encoded = text.encode()
        assert len(encoded) <= _MESSAGE_BYTES
        message.copy_(torch.frombuffer(bytearray(encoded.ljust(_MESSAGE_BYTES, b"\0")), dtype=torch.uint8))
    dist.broadcast(message, src=0)
    return bytes(message.cpu().tolist()).rstrip(b"\0").decode()


def object_from_rank_0(own: T) -> T:
    """Return the object of rank 0, pickled between the ranks of a job.

    Collectives: every rank calls it; two broadcasts on the default group.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    found = [own]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def objects_of_all_ranks(own: T) -> list[T]:
    """Return the object of each rank. Collectives: every rank calls it; two all-gathers on the default group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    found = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
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


def _compare(error: Exception | None, doing: str) -> None:
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
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device=collective_device())
    if rank == first:
        assert error is not None
        message.copy_(_encode(error, f"rank {rank} failed while {doing}"))
    dist.broadcast(message, src=first)
    raised = error if rank == first else _decode(message)
    assert raised is not None
    if isinstance(raised, ExpertmeshError):
        raised.on_all_ranks = True
    raise raised from (None if raised is error else error)


def _encode(error: Exception, prefix: str) -> torch.Tensor:
    name, text, key = type(error).__name__, str(error), getattr(error, "key", "")
    if name not in _CLASSES:
        name, text = DistributedFailure.__name__, f"{prefix}: {name}: {text}; its own log has the traceback"
        key = "rank.unexpected-error"
    # Cut by characters until the encoded form fits, so that it stays valid JSON.
    while len(encoded := json.dumps([name, text, key]).encode()) > _MESSAGE_BYTES:
        text = text[: len(text) // 2]
    padded = bytearray(encoded.ljust(_MESSAGE_BYTES))
    return torch.frombuffer(padded, dtype=torch.uint8)


def _decode(message: torch.Tensor) -> ExpertmeshError:
    name, text, key = json.loads(bytes(message.cpu().tolist()))
    return _CLASSES[name](text, key=key)
