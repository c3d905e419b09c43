"""Carry out a shard plan: compare the ranks' copies, shard, set up recomputation in backward, compile, install guards.

`shard_model` is the entry point. This file decides nothing; all decisions are in the `ShardPlan`.
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
    """Shard `model` in place as `plan` says, and set up its recomputation and compilation.

    Args:
        model: the unsharded model, on meta or in memory.
        plan: the shard plan, made for the layout of `mesh`.

    Raises:
        IntegrityError: a model in memory differs between ranks.

    Collectives: every rank calls it; a model in memory issues one all-gather of a checksum per tensor of its state.
    """
    # A model on meta has no values to compare.
    if not any(parameter.is_meta for parameter in model.parameters()):
        _check_equal_on_every_rank(model)
    shard(model, plan, mesh)
    recompute_blocks(model, plan.options.activation_checkpointing, plan.anatomy, plan.checkpointed)
    if plan.options.compile:
        # A compiler may be absent on one node only; then all ranks must raise, or the others hang.
        with raise_on_all_ranks("trying torch.compile"):
            compile_parts(model, plan.compiled, mesh.device)
    # Last, because it guards the modules as they are after sharding.
    guard(model)


def _check_equal_on_every_rank(model: nn.Module) -> None:
    """Raise `IntegrityError` unless all ranks hold the same bytes and train the same parameters.

    Collectives: every rank calls it; one all-gather of objects on the default group.
    """
    # Each rank cuts its slices from its local copy, so copies that differ would silently mix two models.
    if dist.get_world_size() == 1:
        return
    tensors = model.state_dict(keep_vars=True)
    digests = [(name, _digest(tensor), tensor.requires_grad) for name, tensor in tensors.items()]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, digests)
    # Every rank checks all ranks against rank 0, so all of them raise together.
    for rank, others in enumerate(gathered):
        for own, other in zip(gathered[0], others, strict=True):
            if own != other:
                raise IntegrityError(
                    f"parallelize: {other[0]} on rank {rank} differs from rank 0's; every rank must hold the same "
                    "weights (same seed or same checkpoint) before sharding",
                    key="model.replicas-differ",
                )


def _digest(tensor: torch.Tensor) -> str:
    # Bytes, not values: NaN and signed zeros are compared too, and numpy has no bfloat16.
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).hexdigest()
