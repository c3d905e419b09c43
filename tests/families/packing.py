"""Whether samples packed into one row stay apart in a family: `packing_refusal`, held against a measurement."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import expertmesh as em
from expertmesh.distributed.mesh import Mesh
from expertmesh.introspection.attention import packing_refusal
from tests.families.proof import Gradients, computing_in
from tests.families.tiny import EXPERTS, VOCABULARY, random_model
from tests.support.ranks import shared_ranks
from tests.support.reference import of_all_stages

# In two micro-batches of one and two rows: a sample of one token, of about one length, longer than a window, alone.
_LENGTHS = (((11, 1, 14, 13), (39,)), ((20, 19),))
_TOLERANCE = 1e-5


def packing_of(model_class: str, family: str, ranks: Callable[..., list[Any]] = shared_ranks) -> str | None:
    """The reason why packing is refused, or None; raises when it is not refused and samples see each other.

    A refusal that would not have been necessary is not an error: it reads the model's code, not its numbers. `ranks`
    is `run_ranks` where a bug was planted in this process.
    """
    reason = packing_refusal(random_model(model_class, family))
    if reason is None:
        check_packing(model_class, family, {}, ranks)
    return reason


def check_packing(
    model_class: str, family: str, axes: dict[str, int], ranks: Callable[..., list[Any]] = shared_ranks
) -> None:
    """Raise when the loss or a gradient of packed samples is not that of samples apart, in the model sharded over
    `axes`, with activation checkpointing, and on one rank without it as well.
    """
    for checkpointing in ("full",) if axes else ("none", "full"):
        arguments = (model_class, family, axes, checkpointing)
        world = math.prod(axes.values())
        error, where = ranks(_rank, world, *arguments, torch.float32)[0]
        if error > _TOLERANCE:  # as in proof.py: some families' fp32 cannot tell
            error, where = ranks(_rank, world, *arguments, torch.float64)[0]
        assert error <= _TOLERANCE, f"packed samples see each other ({error:.1e} in {where})"


def _rank(
    model_class: str, family: str, axes: dict[str, int], checkpointing: Any, dtype: torch.dtype
) -> tuple[float, str]:
    # A random table of decays would look ahead.
    model: Any = random_model(model_class, family, dtype, buffers=False)
    mesh = em.init_mesh(em.ParallelConfig(ep=dist.get_world_size() // axes.get("pp", 1), **axes), num_experts=EXPERTS)
    mode = checkpointing if model.supports_gradient_checkpointing else "none"
    em.parallelize(model, mesh, moe=em.MoeConfig(compute="loop", aux_loss_coef=0.0), activation_checkpointing=mode)
    generator = torch.Generator().manual_seed(0)
    samples = [
        [[torch.randint(3, VOCABULARY, (n,), generator=generator) for n in row] for row in rows] for rows in _LENGTHS
    ]
    alone = [{"input_ids": ids[None], "labels": ids[None]} for rows in samples for row in rows for ids in row]
    with computing_in(dtype):
        loss, gradients = _step(model, mesh, alone)
        packed_loss, found = _step(model, mesh, [_packed(rows) for rows in samples])
    floor = max(float(g.norm()) / g.numel() ** 0.5 for g in gradients.values()) * 1e-3
    errors = ((_relative(found[name], gradient, floor), name) for name, gradient in gradients.items())
    return max((_relative(packed_loss, loss, 0.0), "the loss"), *errors)


def _packed(rows: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.stack([torch.cat(row) for row in rows])
    positions = torch.stack([torch.cat([torch.arange(len(sample)) for sample in row]) for row in rows])
    return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}


def _step(model: Any, mesh: Mesh, batches: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, Gradients]:
    targets = sum(length - 1 for rows in _LENGTHS for row in rows for length in row)
    if mesh.layout.pp > 1:
        loss = em.forward_backward(model, batches, target_tokens=targets).loss
    else:
        shares = [em.causal_lm_loss(model, batch, target_tokens=targets) for batch in batches]
        loss = torch.stack(shares).sum()
        loss.backward()
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    found = of_all_stages(model, mesh, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)
    model.zero_grad()
    return loss, found


def _relative(value: torch.Tensor, reference: torch.Tensor, floor: float) -> float:
    return float((value - reference).norm() / max(float(reference.norm()), floor * reference.numel() ** 0.5))
