"""The reference of every proof: the unsharded Hugging Face model in one process, row by row, plain torch.

`Reference` is computed once in the test process and inherited by the forked ranks; `train_sharded` runs the same
steps on a sharded copy, each data rank on rows of its own, and returns how far everything is from the reference.
"""

import copy
import functools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import expertmesh as em
from expertmesh.distributed.mesh import Mesh
from expertmesh.state.stage_view import stage_parameters
from tests.support.models import tiny_model

STEPS, ROWS, VOCABULARY, MAX_NORM = 4, 8, 96, 0.5
OPTIM: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-6}
Row = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Reference:
    """What the unsharded model gave: per step loss and norm, the first step's gradients, the final weights."""

    model: nn.Module
    rows: list[list[Row]]
    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


@functools.cache
def reference(
    family: str,
    dtype: torch.dtype = torch.float32,
    prepare: Callable[[nn.Module], None] | None = None,
    confined: Collection[int] = (),
    **changes: Any,
) -> Reference:
    """Train `family` for `STEPS` clipped AdamW steps on one process.

    `changes` go into the config, `prepare` changes the model. Rows whose number modulo 4 is in `confined` use the lower
    half of the vocabulary.
    """
    initial = tiny_model(family, dtype=dtype, **changes)
    if prepare is not None:
        prepare(initial)
    model = copy.deepcopy(initial)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIM)
    rows = [_rows(step, confined) for step in range(STEPS)]
    losses, norms, gradients = [], [], {}
    for step_rows in rows:
        total = sum(int((labels[1:] != -100).sum()) for _, labels in step_rows)
        loss = torch.zeros((), dtype=dtype)
        for ids, labels in step_rows:
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            share = F.cross_entropy(logits[:-1].to(dtype), labels[1:], reduction="sum", ignore_index=-100) / total
            share.backward()
            loss += share.detach()
        losses.append(float(loss))
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Reference(initial, rows, losses, norms, gradients, weights)


def _rows(step: int, confined: Collection[int]) -> list[Row]:
    """Rows of different lengths, with very different numbers of targets; one has a single target."""
    generator = torch.Generator().manual_seed(step)
    rows = []
    for row in range(ROWS):
        highest = VOCABULARY // 2 if row % 4 in confined else VOCABULARY
        ids = torch.randint(highest, (9 + 2 * row,), generator=generator)
        labels = ids.clone()
        labels[: 2 + row] = -100
        if row == 3:
            labels[:-1] = -100
        rows.append((ids, labels))
    return rows


def padded(rows: list[Row]) -> dict[str, torch.Tensor]:
    """A right-padded micro-batch."""
    length = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.stack([F.pad(ids, (0, length - len(ids))) for ids, _ in rows]),
        "labels": torch.stack([F.pad(labels, (0, length - len(labels)), value=-100) for _, labels in rows]),
        "attention_mask": torch.stack([F.pad(torch.ones_like(ids), (0, length - len(ids))) for ids, _ in rows]),
    }


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a sharded run was from the reference; relative errors, the worst tensor named."""

    loss: float
    norm: float
    gradient: tuple[float, str]
    weight: tuple[float, str]
    expert_ratio: float
    replicas_equal: bool

    def check(self, tolerance: float) -> None:
        assert self.loss <= tolerance, self
        assert self.norm <= tolerance, self
        assert self.gradient[0] <= tolerance, self
        assert self.weight[0] <= tolerance, self
        assert abs(self.expert_ratio - 1) <= 1e-3, self
        assert self.replicas_equal, self


def train_sharded(
    expected: Reference,
    parallel: em.ParallelConfig,
    micro_batch: int = 1,
    moe: em.MoeConfig | None = None,
    tamper: Callable[[nn.Module, Mesh], None] | None = None,
    **options: Any,
) -> Distance:
    """Run the reference's steps sharded; every rank calls it. `tamper` plants a bug after sharding."""
    model = copy.deepcopy(expected.model)
    mesh = em.init_mesh(parallel)
    em.parallelize(model, mesh, moe=moe, **options)
    if tamper is not None:
        tamper(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIM, fused=True)
    losses, norms, gradients = [], [], {}
    for step_rows in expected.rows:
        total = sum(int((labels[1:] != -100).sum()) for _, labels in step_rows)
        mine = step_rows[mesh.data_rank :: mesh.layout.data_ranks]
        batches = [padded(mine[start : start + micro_batch]) for start in range(0, len(mine), micro_batch)]
        if mesh.layout.pp > 1:
            loss = em.forward_backward(model, batches, target_tokens=total, chunk_tokens=16).loss
        else:
            loss = torch.zeros((), dtype=torch.float64)
            for batch in batches:
                share = em.causal_lm_loss(model, batch, target_tokens=total, chunk_tokens=16)
                share.backward()
                loss += share.detach()
        dist.all_reduce(loss)
        losses.append(float(loss))
        gradients = gradients or of_all_stages(model, mesh, lambda parameter: parameter.grad)
        norms.append(float(em.clip_grad_norm_(model, MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    weights = of_all_stages(model, mesh, lambda parameter: parameter.detach())
    experts = [name for name in gradients if ".experts." in name]
    joint = [torch.cat([part[name].flatten() for name in experts]).norm() for part in (gradients, expected.gradients)]
    return Distance(
        loss=max(abs(a / b - 1) for a, b in zip(losses, expected.losses, strict=True)),
        norm=max(abs(a / b - 1) for a, b in zip(norms, expected.norms, strict=True)),
        gradient=_worst(gradients, expected.gradients),
        weight=_worst(weights, expected.weights),
        expert_ratio=float(joint[0] / joint[1]),
        replicas_equal=_equal_on_every_rank(weights),
    )


def of_all_stages(model: nn.Module, mesh: Mesh, value: Callable[[nn.Parameter], Any]) -> dict[str, torch.Tensor]:
    """`value` of each parameter that trains, whole, by name; with pipeline stages, those of all of them. Collective."""
    trained = {name: parameter for name, parameter in stage_parameters(model).items() if parameter.requires_grad}
    own = {name: _full(value(parameter)).detach() for name, parameter in trained.items()}
    if mesh.layout.pp == 1:
        return own
    return joined_stages(own, mesh)


def joined_stages(own: dict[str, torch.Tensor], mesh: Mesh) -> dict[str, torch.Tensor]:
    """What each stage has, of all of them; what several have must be equal. Collective along pp."""
    gathered: list[Any] = [None] * mesh.layout.pp
    dist.all_gather_object(gathered, own, group=mesh.pp_group)
    joined: dict[str, torch.Tensor] = {}
    for stage in gathered:
        for name, tensor in stage.items():
            assert name not in joined or torch.equal(joined[name], tensor), f"{name} differs between stages"
            joined[name] = tensor
    return joined


def _full(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.clone()


def _worst(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    assert got.keys() == expected.keys()
    errors = [(float((got[n] - expected[n]).norm() / expected[n].norm().clamp_min(1e-12)), n) for n in got]
    assert all(math.isfinite(error) for error, _ in errors), errors  # max would pass over a NaN
    return max(errors)


def _equal_on_every_rank(weights: dict[str, torch.Tensor]) -> bool:
    sums = torch.stack([weight.double().sum() for weight in weights.values()])
    low, high = sums.clone(), sums.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return bool((low == high).all())
