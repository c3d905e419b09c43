"""Carry out a shard plan, all of it: comparing copies, sharding, recomputing in backward, compiling,
keeping other code from harm.

Nothing is decided here.
"""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from expertmesh.config.errors import IntegrityError
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.distributed.mesh import Mesh
from expertmesh.parallel.checkpointing import recompute_blocks
from expertmesh.parallel.compiling import compile_parts
from expertmesh.parallel.fsdp import shard
from expertmesh.parallel.shard_plan import ShardPlan
from expertmesh.state.other_code import guard


def shard_model(model: nn.Module, plan: ShardPlan, mesh: Mesh) -> None:
    """Carry out `plan`: shard `model` in place, recompute and compile what the plan says. Every rank calls it.

    A model in memory is first checked to be the same on every rank: one all-gather of a checksum per parameter.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        _check_equal_on_every_rank(model)
    shard(model, plan, mesh)
    recompute_blocks(model, plan.options.activation_checkpointing, plan.anatomy, plan.checkpointed)
    if plan.options.compile:
        with raise_on_all_ranks("trying torch.compile"):
            compile_parts(model, plan.compiled, mesh.device)
    guard(model)


def _check_equal_on_every_rank(model: nn.Module) -> None:
    """Sharding takes each slice from its own rank's copy, so the copies must agree: every byte, and what trains."""
    if dist.get_world_size() == 1:
        return
    tensors = model.state_dict(keep_vars=True)
    digests = [(name, _digest(tensor), tensor.requires_grad) for name, tensor in tensors.items()]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, digests)
    for rank, others in enumerate(gathered):
        for own, other in zip(gathered[0], others, strict=True):
            if own != other:
                raise IntegrityError(
                    f"parallelize: {other[0]} on rank {rank} differs from rank 0's; every rank must hold the same "
                    "weights (same seed or same checkpoint) before sharding",
                    key="model.replicas-differ",
                )


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).hexdigest()
