"""One of the ranks that share a device in stage `ranks` of gpu.py; rank 0 writes rows to a file.

NCCL refuses two ranks on one device. gloo carries CUDA tensors, except between two ranks alone: what pipeline stages
send each other goes through host memory here.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

import expertmesh as em
from benchmarks.gpu_checks import LAYOUTS, RANKS, STEPS_FP32, distances
from benchmarks.gpu_stage import checked
from expertmesh.distributed.mesh import current_device
from tests.support.reference import reference, train_sharded

SEND, RECEIVE = dist.ProcessGroup.send, dist.ProcessGroup.recv


def main() -> None:
    store, rows = sys.argv[1:]
    device, rank = current_device(), int(os.environ["RANK"])
    torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:gloo" if device.type == "cuda" else "gloo"
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group(backend, store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=limit)
    with patch.object(dist.ProcessGroup, "send", _send), patch.object(dist.ProcessGroup, "recv", _receive):
        for name, sizes in LAYOUTS.items():
            found = train_sharded(reference(name.partition(",")[0]), em.ParallelConfig(**sizes), device=device)
            row = checked(f"{name}, {sizes}", STEPS_FP32, **distances(found))
            if rank == 0:
                with Path(rows).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row | {"ok": row["ok"] and found.replicas_equal}) + "\n")
    dist.barrier()
    os._exit(0)  # gloo's teardown aborts at random


class _Received:
    """A message that is copied to the device once it is here."""

    def __init__(self, work: dist.Work, on_host: torch.Tensor, tensor: torch.Tensor) -> None:
        self.work, self.on_host, self.tensor = work, on_host, tensor

    def wait(self) -> bool:
        done: bool = self.work.wait()
        self.tensor.detach().copy_(self.on_host)  # a stage's buffer may be a leaf
        return done


def _send(group: dist.ProcessGroup, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work:
    """In the place of `ProcessGroup.send`, through the host."""
    return SEND(group, [tensors[0].detach().cpu()], rank, tag)


def _receive(group: dist.ProcessGroup, tensors: list[torch.Tensor], rank: int, tag: int) -> _Received:
    """In the place of `ProcessGroup.recv`, through the host."""
    on_host = torch.empty_like(tensors[0], device="cpu")
    return _Received(RECEIVE(group, [on_host], rank, tag), on_host, tensors[0])


if __name__ == "__main__":
    main()
