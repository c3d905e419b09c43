"""Run one rank of a job of any size for two steps: `prepare_model`, `forward_backward`, clipping and AdamW as they are.

The process group is PyTorch's fake one, tensors are fake, so nothing is sent and nothing allocated; a tracker counts
what would be. Gives what the formulas of planning/ predict, by the code itself, with the time to build the job and its
process groups.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from expertmesh.compat import FakeTensorMode, number_of_groups
from expertmesh.config import LoraConfig, MoeConfig
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import explicit
from expertmesh.distributed.mesh import init_mesh
from expertmesh.model import ModelOptions, prepare_model
from expertmesh.parallel.shard_plan import ShardOptions
from expertmesh.planning.stages import Batch, Workload
from expertmesh.planning.trackers import CollectiveCount, UsageTracker
from expertmesh.simulation.axes import AxisKind, sent_by_axis
from expertmesh.simulation.stand_ins import stand_ins
from expertmesh.state.packed import stored
from expertmesh.step.forward_backward import minimise
from expertmesh.step.grad_norm import clip_grad_norm_
from expertmesh.step.objective import CrossEntropy
from expertmesh.weights.meta_model import materialize


def counted_steps(model: nn.Module, batch: Batch, length: int, packed: bool) -> tuple[UsageTracker, int]:
    """Run a first step, in which FSDP2 and the optimizer allocate what stays, and a second one that is counted.

    Returns:
        The tracker of the second step, and the bytes of parameters and optimizer before it. `model` has fake tensors.
    """
    fake_buffers(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    tokens = torch.zeros(batch.rows, length, dtype=torch.int64)
    micro = {"input_ids": tokens, "labels": tokens}
    if packed:
        micro["attention_mask"] = torch.zeros(batch.rows, 1, length, length, dtype=torch.bool)
    batches = [micro] * batch.accumulation

    def step() -> None:
        minimise(model, batches, CrossEntropy(batch.rows * (length - 1)), order=batch.order)
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    tracker = UsageTracker()
    moments = (tensor for state in optimizer.state.values() for tensor in state.values())
    with tracker:
        tracker.include(_local(tensor) for tensor in (*model.parameters(), *moments))
        state = tracker.live
        tracker.reset_peak()
        step()
    return tracker, state


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return stored(tensor.to_local()) if isinstance(tensor, DTensor) else tensor


def fake_buffers(model: nn.Module) -> None:
    """Replace buffers that have values (rotary frequencies and the like), which a step on fake tensors cannot read."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, torch.empty_like(buffer), persistent=name in module.state_dict())


@dataclass(frozen=True, slots=True)
class Simulated:
    """The memory and traffic of one rank in an optimizer step."""

    world_size: int
    rank: int
    """Global rank."""
    peak: int
    """Bytes of live tensors at their most."""
    state: int
    """Bytes of parameters and optimizer before the step."""
    sent: dict[AxisKind, CollectiveCount]
    """Calls and bytes by axis (or axes that share their ranks) and kind of collective."""
    mesh_seconds: float
    """Time to build the mesh and its process groups."""
    shard_seconds: float
    """Time to build and shard the model."""
    step_seconds: float
    """Time of two steps on fake tensors."""
    process_groups: int
    """Number of groups that the process made."""


def simulate(
    config: PreTrainedConfig, workload: Workload, *, lora: LoraConfig | None = None, stage: int = 0
) -> Simulated:
    """Run a step of `workload` on the first rank of pp rank `stage`, on fake tensors, with balanced routing.

    Experts have to compute in bfloat16: torch's grouped product knows no other dtype on fake tensors.

    Args:
        config: Configuration of the model that `workload.model` has the figures of.
        lora: Adapters of that model.

    Raises:
        InputError: This process has a process group already, or the compute dtype is not bfloat16.

    Collectives: all of a step, on a fake process group that is destroyed at the end; nothing is sent.
    """
    figures, layout, batch = workload.model, workload.layout, workload.batch
    if dist.is_initialized():
        raise InputError(
            "a simulation needs a process of its own; this one has a process group already",
            key="simulation.process-group-exists",
        )
    if figures.precision.compute != "bfloat16":
        raise InputError(
            f"precision.compute {figures.precision.compute}: only bfloat16 can be simulated",
            key="simulation.only-bfloat16",
        )
    rank = stage * layout.ranks_per_stage
    # torch registers its fake backend when this names it; nothing else here imports it.
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size)
    try:
        started = time.monotonic()
        experts = figures.anatomy.num_experts
        mesh = init_mesh(explicit(layout), num_experts=experts, device=torch.device("cpu"))
        meshed = time.monotonic()
        # Before fake tensors: each FSDP2 group looks at its mesh, whose ranks are real.
        options = ModelOptions(figures.precision, lora)
        shards = ShardOptions(figures.precision, MoeConfig(compute="grouped_mm"), workload.mode, workload.layers)
        model, _ = prepare_model(config, Path(), mesh, options, shards)
        sharded = time.monotonic()
        with FakeTensorMode(allow_non_fake_inputs=True):
            materialize(model, mesh.device)
            with stand_ins(figures.experts.router, batch.rows * figures.length, mesh.layout):
                tracker, state = counted_steps(model, batch, figures.length, figures.packed)
        return Simulated(
            world_size=layout.world_size,
            rank=rank,
            peak=tracker.peak,
            state=state,
            sent=sent_by_axis(tracker.sent, mesh),
            mesh_seconds=meshed - started,
            shard_seconds=sharded - meshed,
            step_seconds=time.monotonic() - sharded,
            process_groups=number_of_groups(),
        )
    finally:
        dist.destroy_process_group()
