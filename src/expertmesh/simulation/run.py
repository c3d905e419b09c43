"""Run one rank of a job of any size for two steps: `prepare_model`, `forward_backward`, clipping and AdamW as they are.

The process group is PyTorch's fake one, tensors are fake, so nothing is sent and nothing allocated; the census counts
what would be. Gives what the formulas of planning/ predict, by the code itself, with the time to build the job and its
process groups.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedConfig

from expertmesh.config import LoraConfig, MoeConfig, ParallelConfig, PrecisionConfig
from expertmesh.config.errors import InputError
from expertmesh.distributed.mesh import init_mesh
from expertmesh.model import prepare_model
from expertmesh.parallel.grad_norm import clip_grad_norm_
from expertmesh.planning.axes import sent_by_axis
from expertmesh.planning.memory import Batch
from expertmesh.planning.routing import Choice
from expertmesh.planning.state import CheckpointedLayers, Mode
from expertmesh.planning.trackers import Census, Sent
from expertmesh.simulation.stand_ins import stand_ins
from expertmesh.step.forward_backward import forward_backward
from expertmesh.weights.meta_model import materialize

ONE = Batch(1, 1)


@dataclass(frozen=True, slots=True)
class Simulated:
    """What one rank held and sent in an optimizer step. `sent` is by axis (or axes that share their ranks) and kind."""

    world_size: int
    rank: int
    peak: int
    state: int
    sent: dict[tuple[str, str], Sent]
    mesh_seconds: float
    shard_seconds: float
    step_seconds: float
    process_groups: int


def simulate(
    config: PreTrainedConfig,
    parallel: ParallelConfig,
    world_size: int,
    *,
    length: int,
    batch: Batch = ONE,
    mode: Mode = "full",
    layers: CheckpointedLayers = "all",
    precision: PrecisionConfig | None = None,
    lora: LoraConfig | None = None,
    choice: Choice,
    packed: bool = False,
    stage: int = 0,
) -> Simulated:
    """A step of `batch`, sequences of `length` tokens, on the first rank of pp rank `stage`. Needs a process without a
    process group. `packed`: with the explicit mask of packed samples. Experts have to compute in bfloat16: torch's
    grouped product knows no other dtype on fake tensors.
    """
    precision = precision or PrecisionConfig()
    if dist.is_initialized():
        raise InputError("a simulation needs a process of its own; this one has a process group already")
    if precision.compute != "bfloat16":
        raise InputError(f"precision.compute {precision.compute}: only bfloat16 can be simulated")
    rank = stage * (world_size // parallel.pp)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        started = time.monotonic()
        mesh = init_mesh(parallel, num_experts=choice.experts, device=torch.device("cpu"))
        meshed = time.monotonic()
        # Before fake tensors: each FSDP2 group looks at its mesh, whose ranks are real.
        model, _ = prepare_model(
            config,
            Path(),
            mesh,
            precision=precision,
            moe=MoeConfig(compute="grouped_mm"),
            activation_checkpointing=mode,
            checkpoint_layers=layers,
            lora=lora,
        )
        sharded = time.monotonic()
        with FakeTensorMode(allow_non_fake_inputs=True):
            materialize(model, mesh.device)
            _fake_buffers(model)
            with stand_ins(choice, batch.rows * length, mesh.layout):
                census, state = _steps(model, batch, length, packed)
        return Simulated(
            world_size=world_size,
            rank=rank,
            peak=census.peak,
            state=state,
            sent=sent_by_axis(census.sent, mesh),
            mesh_seconds=meshed - started,
            shard_seconds=sharded - meshed,
            step_seconds=time.monotonic() - sharded,
            process_groups=len(dist.distributed_c10d._world.pg_map),
        )
    finally:
        dist.destroy_process_group()


def _steps(model: nn.Module, batch: Batch, length: int, packed: bool) -> tuple[Census, int]:
    """A first step, in which FSDP2 and the optimizer allocate what stays, and one that is counted."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    tokens = torch.zeros(batch.rows, length, dtype=torch.int64)
    micro = {"input_ids": tokens, "labels": tokens}
    if packed:
        micro["attention_mask"] = torch.zeros(batch.rows, 1, length, length, dtype=torch.bool)
    batches = [micro] * batch.accumulation

    def step() -> None:
        forward_backward(model, batches, target_tokens=batch.rows * (length - 1))
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    census = Census()
    moments = (tensor for state in optimizer.state.values() for tensor in state.values())
    with census:
        census.know(_local(tensor) for tensor in (*model.parameters(), *moments))
        state = census.live
        census.reset_peak()
        step()
    return census, state


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _fake_buffers(model: nn.Module) -> None:
    """Rotary frequencies and the like have values, which a fake step must not meet."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, torch.empty_like(buffer), persistent=name in module.state_dict())
