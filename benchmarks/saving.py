"""What one rank of `checkpoint.py` does: builds a model with optimizer state, saves and loads it in every way.

Collective: every rank calls `measure_saving`. Nothing here is compared by eye alone: what each way has loaded is
summed and has to be what was saved.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from benchmarks import worker
from benchmarks.case import Case, input_ids

STEP = 1


def measure_saving(case: Case, directory: Path, repeats: int) -> dict[str, Any]:
    """Seconds of every repetition of each way, on the slowest rank, and the bytes of a checkpoint."""
    job = _Job(case)
    seconds: dict[str, list[float]] = {"step": []}
    for _ in range(repeats):
        seconds["step"].append(_slowest(job.step))
    sums = job.sums()
    ways: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
        "expertmesh": (job.save, job.load),
        "dcp": (job.save_dcp, job.load_dcp),
    }
    total = 0
    for repeat in range(repeats):
        for name, (save, load) in list(ways.items()) if repeat % 2 == 0 else list(ways.items())[::-1]:
            path = directory / f"{name}-{repeat}"
            seconds.setdefault(f"{name} save", []).append(_slowest(lambda save=save, path=path: save(path)))
            job.forget()
            seconds.setdefault(f"{name} load", []).append(_slowest(lambda load=load, path=path: load(path)))
            assert job.sums() == sums, f"{name} did not load what it had saved"
            if name == "expertmesh":
                total = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                copy = directory / f"copy-{repeat}"
                seconds.setdefault("cp", []).append(_slowest(lambda path=path, copy=copy: _copy(path, copy)))
            dist.barrier()
            if dist.get_rank() == 0:
                for used in directory.iterdir():
                    shutil.rmtree(used)
            dist.barrier()
    pauses, during = job.save_while_training(directory / "asynchronous", repeats)
    seconds |= {"asynchronous pause": pauses, "step during an asynchronous save": during}
    return {"seconds": seconds, "bytes": total}


class _Job:
    """A sharded model whose optimizer has state, as after a step."""

    def __init__(self, case: Case) -> None:
        import expertmesh as em

        self.em = em
        mesh = em.init_mesh(em.ParallelConfig(ep=case.ranks))
        precision = em.PrecisionConfig(params="float32", compute=case.compute)  # type: ignore[arg-type]
        self.model: Any = em.load_model(case.checkpoint, mesh, precision=precision)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        ids_BS = input_ids(case, dist.get_rank())
        self.batch = {"input_ids": ids_BS, "labels": ids_BS}
        self.targets = em.count_targets(ids_BS) * dist.get_world_size()
        self.step()

    def step(self) -> None:
        self.em.causal_lm_loss(self.model, self.batch, target_tokens=self.targets).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        slots = [slot for state in self.optimizer.state.values() for slot in state.values() if slot.dim()]
        return [_local(tensor.detach()) for tensor in (*self.model.parameters(), *slots)]

    @torch.no_grad()
    def sums(self) -> list[float]:
        return [tensor.double().sum().item() for tensor in self.tensors()]

    @torch.no_grad()
    def forget(self) -> None:
        for tensor in self.tensors():
            tensor.zero_()

    def save(self, path: Path) -> None:
        self.em.save_checkpoint(self.model, self.optimizer, path, step=STEP)

    def load(self, path: Path) -> None:
        self.em.load_checkpoint(self.model, self.optimizer, path)

    def save_dcp(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)

    def load_dcp(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def save_while_training(self, directory: Path, repeats: int) -> tuple[list[float], list[float]]:
        """Seconds that training stood still per save, and the steps that ran while files were being written."""
        from expertmesh.checkpoint.small_files import STATE_FILE, sidecar_files, state_bytes
        from expertmesh.checkpoint.write import STATUSES, CheckpointWriter

        writer = CheckpointWriter(directory, keep_last=1, asynchronous=True)
        files = sidecar_files(self.model, None)
        pauses, during = [], []
        for step in range(1, repeats + 1):
            small = {**files, STATE_FILE: state_bytes(step, {}, self.optimizer)}
            paused = _slowest(lambda step=step, small=small: writer.save(self.model, self.optimizer, step, small))
            saved = None
            while saved is None:
                during.append(_slowest(self.step))
                ranks = torch.tensor([int(status == writer.status()) for status in STATUSES])
                dist.all_reduce(ranks)
                start = time.perf_counter()
                saved = writer.settle(ranks.tolist())
                paused += time.perf_counter() - start
            pauses.append(paused)
        writer.close()
        return pauses, during


def _copy(source: Path, target: Path) -> None:
    """Rank 0 copies the whole checkpoint with the system's `cp` and syncs it; the others wait."""
    import subprocess

    if dist.get_rank() == 0:
        subprocess.run(["cp", "-r", str(source), str(target)], check=True)
        subprocess.run(["sync", *map(str, (file for file in target.rglob("*") if file.is_file()))], check=True)


def _slowest(run: Callable[[], object]) -> float:
    """Seconds of a collective call on the slowest rank."""
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    run()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    worker.main({"save": lambda case, names, repeats: measure_saving(case, Path(names[0]), repeats)})
