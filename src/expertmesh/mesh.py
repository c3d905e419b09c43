"""Ranks seen twice: the dense view for all non-expert parameters, the expert view for routed experts.

    dense view    world = pp x replicate x fsdp x cp x tp
    expert view   world = pp x replicate x efsdp x ep        efsdp = fsdp * cp * tp / ep, always derived

The last axis varies fastest, so an EP group is `ep` contiguous ranks and stays inside a node. `Layout` is plain
arithmetic (what `inspect` and the config checks use, no process group); `Mesh` holds the torch `DeviceMesh`es of a
running job. Nothing here knows about models.
"""

import datetime
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from expertmesh.config import ParallelConfig
from expertmesh.config.errors import InputError

DENSE_AXES = ("pp", "replicate", "fsdp", "cp", "tp")
EXPERT_AXES = ("pp", "replicate", "efsdp", "ep")


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of all axes. Build it with `resolve_layout`, which refuses impossible combinations."""

    pp: int = 1
    replicate: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    pp_schedule: str = "1f1b"
    pp_virtual_stages: int = 1

    @property
    def efsdp(self) -> int:
        """Ranks over which one expert slice is sharded further."""
        return self.fsdp * self.cp * self.tp // self.ep

    @property
    def world_size(self) -> int:
        return self.pp * self.replicate * self.fsdp * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """How many ranks read rows of their own: cp and tp ranks share rows."""
        return self.replicate * self.fsdp

    @property
    def ranks_per_stage(self) -> int:
        """Ranks that hold one pipeline stage (or the same several): contiguous ones."""
        return self.world_size // self.pp

    def data_rank(self, rank: int) -> int:
        """Which share of the batch `rank` reads, in `range(data_ranks)`."""
        return rank // (self.cp * self.tp) % self.data_ranks

    def size(self, axis: str) -> int:
        return int(getattr(self, axis))

    def groups(self, axis: str) -> list[list[int]]:
        """The rank lists of every group along `axis`, in the order of their first rank."""
        axes = DENSE_AXES if axis in DENSE_AXES else EXPERT_AXES
        stride = math.prod(self.size(inner) for inner in axes[axes.index(axis) + 1 :])
        size = self.size(axis)
        firsts = (rank for rank in range(self.world_size) if rank // stride % size == 0)
        return [[first + step * stride for step in range(size)] for first in firsts]

    def table(self) -> str:
        """Both views, one axis a line, with the group that rank 0 belongs to."""
        lines = [f"{'view':<8}{'axis':<11}{'size':>5}  ranks of the first group"]
        for view, axes in (("dense", DENSE_AXES), ("expert", EXPERT_AXES)):
            for axis in axes:
                if self.size(axis) > 1 or axis in ("fsdp", "efsdp", "ep"):
                    ranks = _abbreviate(self.groups(axis)[0])
                    lines.append(f"{view:<8}{axis:<11}{self.size(axis):>5}  {ranks}")
        return "\n".join(lines)


def resolve_layout(parallel: ParallelConfig, world_size: int, num_experts: int | None = None) -> Layout:
    """Turn what the user asked for into sizes that multiply to `world_size`; fills in every `auto`.

    `num_experts` is the number of routed experts of a layer; it is needed for `ep: auto` and checked against `ep`.
    Raises `InputError` with the numbers and the valid choices.
    """
    fixed = {axis: getattr(parallel, axis) for axis in ("pp", "replicate", "cp", "tp")}
    product = math.prod(fixed.values())
    named = " * ".join(f"{axis} {size}" for axis, size in fixed.items() if size > 1) or "1"
    if parallel.fsdp == "auto":
        if world_size % product:
            raise InputError(
                f"parallel: {named} = {product} does not divide the world size {world_size}; "
                f"start a multiple of {product} ranks or lower one of these axes"
            )
        fsdp = world_size // product
    else:
        fsdp = parallel.fsdp
        if fsdp * product != world_size:
            raise InputError(
                f"parallel: fsdp {fsdp} * {named} = {fsdp * product}, but the job has {world_size} ranks; "
                "leave parallel.fsdp at auto or make the product equal the world size"
            )
    expert_ranks = fsdp * fixed["cp"] * fixed["tp"]
    choices = [size for size in _divisors(expert_ranks) if num_experts is None or num_experts % size == 0]
    if parallel.ep == "auto":
        if num_experts is None:
            raise InputError("parallel.ep: auto needs the number of experts of a model; set ep or pass num_experts")
        # What `train` has the planner choose (planning/choose.py): as many as fit a node, where all-to-all is cheap.
        node = int(os.environ.get("LOCAL_WORLD_SIZE", 8))
        ep = max((size for size in choices if size <= node), default=1)
    else:
        ep = parallel.ep
        if expert_ranks % ep:
            raise InputError(
                f"parallel.ep {ep} does not divide fsdp * cp * tp = {expert_ranks} ranks; "
                f"valid values: {_listed(choices)}"
            )
        if num_experts is not None and num_experts % ep:
            raise InputError(
                f"parallel.ep {ep} does not divide the model's {num_experts} experts; valid values: {_listed(choices)}"
            )
    schedule = parallel.pp_schedule
    if schedule == "auto":
        schedule = "1f1b" if parallel.pp_virtual_stages == 1 else "interleaved_1f1b"
    return Layout(fsdp=fsdp, ep=ep, pp_schedule=schedule, pp_virtual_stages=parallel.pp_virtual_stages, **fixed)


@dataclass(frozen=True, slots=True, eq=False)
class Mesh:
    """The views of a running job as torch meshes. Axes of size 1 are left out, except fsdp, efsdp and ep.

    `dense` and `expert` are the two views. Ranks along cp and tp hold other tokens of the same rows, so most dense
    parameters are sharded over them as well: `whole` is the dense view with fsdp, cp and tp as one axis, `split` the
    one with fsdp and cp as one, for what tp has split before. Both call that axis fsdp.
    """

    layout: Layout
    dense: DeviceMesh
    expert: DeviceMesh
    whole: DeviceMesh
    split: DeviceMesh
    device: torch.device
    rank: int

    @property
    def data_rank(self) -> int:
        return self.layout.data_rank(self.rank)

    @property
    def dense_shard(self) -> DeviceMesh:
        """Where dense parameters that tp does not split are sharded: 1-D over fsdp·cp·tp, or 2-D (replicate, that) for
        hybrid sharding.
        """
        return self.whole["replicate", "fsdp"] if self.layout.replicate > 1 else self.whole["fsdp"]

    @property
    def split_shard(self) -> DeviceMesh:
        """Where dense parameters that tp splits are sharded further: 1-D over fsdp·cp, or 2-D (replicate, that)."""
        return self.split["replicate", "fsdp"] if self.layout.replicate > 1 else self.split["fsdp"]

    @property
    def expert_shard(self) -> DeviceMesh:
        """Where one expert slice is sharded: 1-D over efsdp, or 2-D (replicate, efsdp) for hybrid sharding."""
        return self.expert["replicate", "efsdp"] if self.layout.replicate > 1 else self.expert["efsdp"]

    @property
    def ep_group(self) -> dist.ProcessGroup:
        """The ranks that together hold every routed expert once."""
        return self.expert.get_group("ep")

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that together hold every parameter of a pipeline stage exactly once: fsdp·cp·tp = efsdp·ep."""
        return self.whole.get_group("fsdp")

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """The ranks that pass one share of the batch on through all stages; only where pp > 1."""
        return self.dense.get_group("pp")

    def coordinate(self, axis: str) -> int:
        """This rank's place along an axis of the dense view; 0 where the axis has one rank."""
        return self.dense.get_local_rank(axis) if self.layout.size(axis) > 1 else 0


def init_mesh(
    parallel: ParallelConfig | None = None, *, num_experts: int | None = None, device: torch.device | None = None
) -> Mesh:
    """Build both views over the default process group. Every rank calls it, with the same arguments.

    Starts the default process group from the launcher's environment (torchrun) if none is up. Issues the
    communication that creating process groups takes; no other collective.
    """
    device = device or current_device()
    start_process_group(device)
    parallel = parallel or ParallelConfig()
    layout = resolve_layout(parallel, dist.get_world_size(), num_experts)
    dense, expert = (_device_mesh(device, layout, axes) for axes in (DENSE_AXES, EXPERT_AXES))
    # Each is a mesh of its own, not a flattened one: FSDP2 wants its axes and tp's to come from one root.
    joined = replace(layout, fsdp=layout.fsdp * layout.cp, cp=1, ep=1)
    split = dense if layout.cp == 1 else _device_mesh(device, joined, DENSE_AXES)
    joined = replace(joined, fsdp=joined.fsdp * layout.tp, tp=1)
    whole = split if layout.tp == 1 else _device_mesh(device, joined, DENSE_AXES)
    return Mesh(layout, dense, expert, whole, split, device, dist.get_rank())


def _device_mesh(device: torch.device, layout: Layout, axes: tuple[str, ...]) -> DeviceMesh:
    axes = _kept_axes(layout, axes)
    ranks = torch.arange(layout.world_size).view([layout.size(axis) for axis in axes])
    return DeviceMesh(device.type, ranks, mesh_dim_names=axes)


def set_timeout(mesh: Mesh, seconds: float) -> None:
    """Let every collective of every group fail after `seconds` instead of torch's default. No communication.

    DeviceMesh gives its groups torch's default (up to 30 minutes) whatever the default group was started with, and
    torch has no public call to change it; `_set_pg_timeout` is what its own trainers use (pytorch/torchtitan).
    """
    world = dist.group.WORLD
    assert world is not None
    views = (mesh.dense, mesh.expert, mesh.whole, mesh.split)
    for group in {world, *(group for view in views for group in view.get_all_groups())}:
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)


def current_device() -> torch.device:
    """This rank's accelerator, chosen by LOCAL_RANK, or the CPU."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    several = torch.accelerator.device_count() > 1 and int(os.environ.get("WORLD_SIZE", 1)) > 1
    if several and "LOCAL_RANK" not in os.environ:
        raise InputError("LOCAL_RANK is not set, so ranks cannot tell which device is theirs; let the launcher set it")
    device = torch.device(kind.type, int(os.environ.get("LOCAL_RANK", 0)))
    torch.accelerator.set_device_index(device.index)
    return device


def start_process_group(device: torch.device, timeout_seconds: float = 600) -> None:
    """Start the default group from the launcher's environment (torchrun), unless one is up. Every rank calls it.

    Accelerators get gloo beside their own backend, for the few small exchanges between hosts.
    """
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        raise InputError("no process group; start with torchrun or expertmesh train, or call init_process_group first")
    own = dist.get_default_backend_for_device(device)
    dist.init_process_group(
        own if device.type == "cpu" else f"cpu:gloo,{device.type}:{own}",
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )


def attach_mesh(model: nn.Module, mesh: Mesh) -> None:
    """Remember on `model` how it is sharded, for everything that takes a model alone (clipping, loss, saving)."""
    model._expertmesh = mesh  # type: ignore[assignment]


def mesh_of(model: nn.Module) -> Mesh:
    """The mesh that `parallelize` attached; `InputError` for a model that was never parallelized."""
    mesh = getattr(model, "_expertmesh", None)
    if not isinstance(mesh, Mesh):
        raise InputError(
            f"{type(model).__name__} is not parallelized; call load_model or parallelize(model, mesh) first"
        )
    return mesh


def _kept_axes(layout: Layout, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if layout.size(axis) > 1 or axis in ("fsdp", "efsdp", "ep"))


def _divisors(number: int) -> Iterator[int]:
    return (size for size in range(1, number + 1) if number % size == 0)


def _listed(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)


def _abbreviate(ranks: list[int]) -> str:
    shown = ranks if len(ranks) <= 8 else [*ranks[:3], "...", ranks[-1]]
    return " ".join(str(rank) for rank in shown)
