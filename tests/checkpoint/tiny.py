"""A tiny training job on forked ranks: `steps` optimizer steps on rows that depend on the step alone."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import expertmesh as em
from expertmesh.checkpoint.state import model_state, optimizer_state
from expertmesh.distributed.mesh import Mesh
from expertmesh.state.shards import full_values, is_on_other_stage
from tests.support.models import tiny_model
from tests.support.reference import OPTIM, joined_stages, padded

ROWS = 8


class Job:
    """A sharded model with its optimizer; every rank makes one."""

    def __init__(self, model: nn.Module, parallel: em.ParallelConfig, moe: em.MoeConfig | None = None) -> None:
        self.model: Any = copy.deepcopy(model)
        self.mesh: Mesh = em.init_mesh(parallel)
        em.parallelize(self.model, self.mesh, moe=moe)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **OPTIM, fused=True)

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            rows = [torch.randint(96, (6 + row,), generator=generator) for row in range(ROWS)]
            mine = [(ids, ids.clone()) for ids in rows[self.mesh.data_rank :: self.mesh.layout.data_ranks]]
            total = sum(len(ids) - 1 for ids in rows)
            em.forward_backward(self.model, [padded(mine)], target_tokens=total)
            em.clip_grad_norm_(self.model, 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        """Every tensor of model and optimizer, whole, on every rank."""
        tensors = {**model_state(self.model), **optimizer_state(self.model, self.optimizer)}
        own = {
            name: (full_values(tensor) if isinstance(tensor, DTensor) else tensor).detach().clone()
            for name, tensor in tensors.items()
            if not is_on_other_stage(tensor)
        }
        return own if self.mesh.layout.pp == 1 else joined_stages(own, self.mesh)


def save(
    family: str, parallel: em.ParallelConfig, steps: int, directory: Path, moe: em.MoeConfig | None = None
) -> dict[str, torch.Tensor]:
    """Train `steps` steps, save, and return the whole state."""
    job = Job(tiny_model(family), parallel, moe)
    job.train(range(steps))
    torch.manual_seed(100 + dist.get_rank())
    em.save_checkpoint(job.model, job.optimizer, directory, step=steps, state={"seen": steps})
    return job.state()


def load(
    family: str, parallel: em.ParallelConfig, path: Path, more: Iterable[int] = (), moe: em.MoeConfig | None = None
) -> list[dict[str, torch.Tensor]]:
    """Load into a job whose own weights are others; the whole state then, and after `more` steps."""
    job = Job(tiny_model(family, seed=9), parallel, moe)
    loaded = em.load_checkpoint(job.model, job.optimizer, path)
    assert loaded.state == {"seen": loaded.step}
    before = job.state()
    job.train(more)
    return [before, job.state()]
