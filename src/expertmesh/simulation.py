"""Run one rank of a job of any size for two steps: `prepare_model`, `forward_backward`, clipping and AdamW as they are.

The process group is PyTorch's fake one, tensors are fake, so nothing is sent and nothing allocated; a tracker counts
what would be. Gives what the formulas of planning/ predict, by the code itself, with the time to build the job and its
process groups.

Fake tensors have no values. Where a step needs some, routing counts come from the planner's expectation (balanced
routing), every position but the last is a target, and attention is what a fused kernel reads and saves. Groups of equal
ranks may share one process group (cp and ep, fsdp and efsdp): what goes over it is that of all axes that send with that
kind of collective.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, masking_utils

from expertmesh.compat import FakeTensorMode, forget_shardings, number_of_groups, without_shape_messages
from expertmesh.config import MoeConfig
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout, TopKRouter, explicit, rows_per_token
from expertmesh.distributed.mesh import Mesh, init_mesh
from expertmesh.experts import dispatch
from expertmesh.model import ModelOptions, prepare_model
from expertmesh.parallel.shard_plan import ShardOptions
from expertmesh.planning.probe import CollectiveCount, FusedAttention, UsageTracker
from expertmesh.planning.stages import Batch, Workload
from expertmesh.planning.traffic import Transfer
from expertmesh.state.packed import stored
from expertmesh.state.patching import replaced
from expertmesh.step import loss, pipeline_schedule
from expertmesh.step.forward_backward import run_step
from expertmesh.step.grad_norm import clip_grad_norm_
from expertmesh.step.loss import CrossEntropy
from expertmesh.weights.meta_model import materialize

# What each axis is used for.
_KINDS = {
    "fsdp": ("all_gather", "reduce_scatter", "all_to_all"),
    "efsdp": ("all_gather", "reduce_scatter", "all_to_all", "all_reduce"),
    "replicate": ("all_reduce",),
    "ep": ("all_to_all",),
    "tp": ("all_gather", "reduce_scatter", "all_reduce"),
    "cp": ("all_to_all", "all_gather", "reduce_scatter"),
    "pp": ("send",),
}
AxisKind = tuple[str, str]


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
        run_step(model, batches, CrossEntropy(batch.rows * (length - 1)), order=batch.order)
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    tracker = UsageTracker()
    moments = (tensor for state in optimizer.state.values() for tensor in state.values())
    with tracker:
        held = (t.to_local() if isinstance(t, DTensor) else t for t in (*model.parameters(), *moments))
        tracker.include(map(stored, held))
        state = tracker.live
        tracker.reset_peak()
        step()
    return tracker, state


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


def simulate(
    config: PreTrainedConfig, workload: Workload, options: ModelOptions | None = None, *, stage: int = 0
) -> Simulated:
    """Run a step of `workload` on the first rank of pp rank `stage`, on fake tensors, with balanced routing.

    Experts have to compute in bfloat16: torch's grouped product knows no other dtype on fake tensors.

    Args:
        config: Configuration of the model that `workload.model` has the figures of.
        options: How that model is built; None: its precision, and no adapters.

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
        shards = ShardOptions(figures.precision, MoeConfig(compute="grouped_mm"), workload.mode, workload.layers)
        model, _ = prepare_model(config, Path(), mesh, options or ModelOptions(figures.precision), shards)
        sharded = time.monotonic()
        with FakeTensorMode(allow_non_fake_inputs=True):
            materialize(model, mesh.device)
            with expected_values(figures.experts.router, batch.rows * figures.length, mesh.layout):
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
        forget_shardings()


@contextmanager
def expected_values(router: TopKRouter, tokens: int, layout: Layout) -> Iterator[None]:
    """Replace inside the block what needs values: routing counts, targets, masks and attention.

    Each rank of every exchange gets an equal share, the mean that `router` predicts.

    Args:
        tokens: Tokens of a micro-batch's full rows, which cp and tp ranks share.
    """
    own, ranks = tokens // (layout.cp * layout.tp), layout.ep
    rows, pairs = round(own * rows_per_token(router, ranks) / ranks), own * router.top_k // ranks

    def counts(_: torch.Tensor) -> list[Any]:
        return [[rows] * ranks, [rows] * ranks, [pairs] * ranks, [pairs] * ranks]

    def targets(label_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, length = label_BS.shape
        place_N = torch.zeros(batch * (length - 1), dtype=torch.int64, device=label_BS.device)
        return torch.zeros_like(place_N), place_N

    def counted(stage: Any, received: torch.Tensor, number: torch.Tensor) -> Any:
        """Give a stage the number of its micro-batch, which a fake tensor does not hold; they come in order."""
        stage.seen = getattr(stage, "seen", -1) + 1
        return stage.run_stage.forward(stage.stage, stage.seen, received)

    def fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return FusedAttention.apply(query, key, value, args[0] if args else kwargs.get("attn_mask"))

    owner, methods = without_shape_messages()
    with (
        replaced(dispatch, to_host=counts),
        replaced(loss, _targets=targets),
        replaced(pipeline_schedule._Stage, forward=counted),
        replaced(owner, **methods),
        replaced(masking_utils, is_tracing=lambda *_: False, find_packed_sequence_indices=lambda *_: None),
        replaced(F, scaled_dot_product_attention=fused),
    ):
        yield


def sent_by_axis(sent: Mapping[str, Mapping[str, CollectiveCount]], mesh: Mesh) -> dict[AxisKind, CollectiveCount]:
    """Return calls and bytes by (axis or axes, kind), zero if nothing was sent.

    Left out are receives, which another rank counts as sent, and single numbers (the norm's sum).

    Args:
        sent: Counts by process group's name and kind, as `UsageTracker.sent` has them.
    """
    found: dict[AxisKind, CollectiveCount] = {}
    for group, axes in _axes(mesh).items():
        for kind in dict.fromkeys(kind for axis in _KINDS if axis in axes for kind in _KINDS[axis]):
            name = " + ".join(axis for axis in _KINDS if axis in axes and kind in _KINDS[axis])
            count = sent.get(group, {}).get(kind, CollectiveCount())
            entry = found.setdefault((name, kind), CollectiveCount())
            if count.bytes <= 8 * count.calls:
                continue
            entry.calls += count.calls
            entry.bytes += count.bytes
    return found


def planned_by_axis(transfers: Iterable[Transfer], counted: Iterable[AxisKind]) -> dict[AxisKind, Transfer]:
    """Return the planner's transfers by the keys of `counted`, the result of `sent_by_axis`.

    A transfer over an axis without a key has its own name and kind as key.
    """
    names = list(counted)
    found: dict[AxisKind, Transfer] = {}
    for transfer in transfers:
        joint = (name for name, kind in names if kind == transfer.kind)
        key = (next((name for name in joint if transfer.axis in name.split(" + ")), transfer.axis), transfer.kind)
        found[key] = found[key].plus(transfer) if key in found else transfer
    return found


def _axes(mesh: Mesh) -> dict[str, set[str]]:
    """Return the axes of each process group by its name; groups of one rank are left out."""
    found: dict[str, set[str]] = {}
    for view in (mesh.dense, mesh.expert, mesh.dense_mesh, mesh.dense_tp_mesh):
        for axis in view.mesh_dim_names or ():
            group = view.get_group(axis)
            # Nothing is sent over the dense view's own fsdp.
            unused = axis == "fsdp" and view not in (mesh.dense_mesh, mesh.dense_tp_mesh)
            if group.size() > 1 and not unused:
                found.setdefault(str(group.group_name), set()).add(axis)
    return found
