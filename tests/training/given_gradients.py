"""Optimizers by themselves: a sharded tiny model whose gradients are given, parts of the same in every layout.

What an optimizer does with its parts must then be, bit for bit, what the same optimizer does with whole tensors.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import expertmesh as em
from expertmesh.checkpoint.state import model_state, optimizer_state
from expertmesh.config import LoraConfig, OptimConfig
from expertmesh.state.model_view import ModelView
from expertmesh.state.shards import cut_local, is_on_other_stage
from expertmesh.training.optimizers.build import build_optimizer
from tests.support.models import tiny_model
from tests.support.reference import joined_stages, whole

State = dict[str, torch.Tensor]
SEED = 7


@dataclass(frozen=True)
class Case:
    """What is trained, in which dtype and by what. `changes` go into the model's config."""

    optim: OptimConfig
    params: str = "bfloat16"
    family: str = "qwen3_moe"
    changes: dict[str, Any] = field(default_factory=dict)
    lora: LoraConfig | None = None
    moe: em.MoeConfig | None = None

    def model(self) -> Any:
        return tiny_model(self.family, dtype=getattr(torch, self.params), **self.changes)


def whole_steps(case: Case, steps: int, compute: torch.dtype = torch.float32) -> State:
    """On whole tensors in one process. `compute`: of Muon's products."""
    model = case.model()
    optimizer = build_optimizer(model, case.optim, SEED, compute)
    for step in range(steps):
        for name, parameter in model.named_parameters():
            parameter.grad = given_gradient(name, step, parameter)
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in _tensors(model, optimizer).items()}


def sharded_steps(
    case: Case,
    parallel: em.ParallelConfig,
    steps: Iterable[int],
    save: Path | None = None,
    load: Path | None = None,
    tamper: Callable[[], None] | None = None,
) -> State:
    """The whole state after `steps`, on every rank that calls it; saved to, and continued from, where that is asked."""
    if tamper is not None:
        tamper()
    mesh = em.init_mesh(parallel)
    reduce = "float64" if case.params == "float64" else "float32"
    precision = em.PrecisionConfig(params=case.params, compute=case.params, reduce=reduce)  # type: ignore[arg-type]
    model = em.parallelize(case.model(), mesh, precision=precision, lora=case.lora, moe=case.moe)
    compute = torch.float32 if case.params == "bfloat16" else getattr(torch, case.params)
    optimizer = build_optimizer(model, case.optim, SEED, compute)
    if load is not None:
        em.load_checkpoint(model, optimizer, load)
    last = 0
    for last in steps:
        for name, parameter in ModelView(model).parameters.items():
            if parameter.requires_grad:
                gradient = given_gradient(name, last, parameter)
                local = cut_local(parameter, gradient).clone()
                parameter.grad = _like(parameter, local)
        optimizer.step()
    if save is not None:
        em.save_checkpoint(model, optimizer, save, step=last + 1)
    tensors = _tensors(model, optimizer)
    own = whole({name: tensor for name, tensor in tensors.items() if not is_on_other_stage(tensor)})
    return own if mesh.layout.pp == 1 else joined_stages(own, mesh)


def given_gradient(name: str, step: int, like: torch.Tensor) -> torch.Tensor:
    """Of different sizes in different steps and rows."""
    seed = int.from_bytes(hashlib.sha256(f"{step} {name}".encode()).digest()[:6], "little")
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(like.shape, generator=generator) * torch.rand(like.shape[:1] or (1,), generator=generator).view(
        -1, *[1] * (like.dim() - 1)
    )
    return value.to(like.dtype)


def _like(parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def _tensors(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {**model_state(model), **optimizer_state(model, optimizer)}
