"""Carry out a shard plan, all of it: sharding, halves of rows, recomputing in backward, compiling, keeping other code
from harm.

Nothing is decided here.
"""

from torch import nn

from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.distributed.mesh import Mesh
from expertmesh.parallel.checkpointing import recompute_blocks
from expertmesh.parallel.compiling import compile_parts
from expertmesh.parallel.fsdp import shard
from expertmesh.parallel.halves.blocks import interleave_blocks
from expertmesh.parallel.shard_plan import ShardPlan
from expertmesh.state.other_code import guard


def shard_model(model: nn.Module, plan: ShardPlan, mesh: Mesh) -> None:
    """Carry out `plan`: shard `model` in place, recompute and compile what the plan says. Every rank calls it."""
    shard(model, plan, mesh)
    interleave_blocks(model, plan.interleaved)
    recompute_blocks(model, plan.options.activation_checkpointing, plan.anatomy, plan.checkpointed)
    if plan.options.compile:
        with raise_on_all_ranks("trying torch.compile"):
            compile_parts(model, plan.compiled, mesh.device)
    guard(model)
