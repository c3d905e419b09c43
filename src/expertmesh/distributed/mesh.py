"""View the ranks of a job twice: the dense view for non-expert parameters, the expert view for routed experts.

`Mesh` holds the torch `DeviceMesh`es of both views; layout.py has their sizes. Also start and end the process groups.
Nothing here knows about models.
"""

import atexit
import datetime
import functools
import os
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from expertmesh.compat import set_group_timeout
from expertmesh.config import ParallelConfig
from expertmesh.config.errors import InputError
from expertmesh.distributed.all_ranks import collective_device, raise_on_all_ranks
from expertmesh.distributed.environment import (
    choose_interface,
    join_job,
    local_world_sizes_differ,
    too_few_accelerators,
)
from expertmesh.distributed.layout import (
    CONFIGURED_AXES,
    DENSE_AXES,
    EXPERT_AXES,
    Layout,
    nodes_of_ep,
    resolve_layout,
)

# At the end of a process. Dropping a tensor takes microseconds, getting a busy processor some milliseconds.
THREADS_REST_SECONDS = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Mesh:
    """The views of a running job as torch meshes. Axes of size 1 are left out, except fsdp, efsdp and ep.

    Ranks along cp and tp hold other tokens of the same rows, so most dense parameters are sharded over them as well.
    """

    layout: Layout
    """The sizes of the axes."""
    dense: DeviceMesh
    """The dense view."""
    expert: DeviceMesh
    """The expert view."""
    dense_mesh: DeviceMesh
    """The dense view with fsdp, cp and tp joined to one axis, which is called fsdp."""
    dense_tp_mesh: DeviceMesh
    """The dense view with fsdp and cp joined to one axis, which is called fsdp: for parameters that tp splits."""
    device: torch.device
    """The device of this rank."""
    rank: int
    """Global rank."""
    ep_nodes: DeviceMesh | None = None
    """The nodes of an EP group (`across`) and the ranks of each (`inside`), if the group has several full nodes."""

    @property
    def data_rank(self) -> int:
        return self.layout.data_rank(self.rank)

    def sharding(self, view: str) -> DeviceMesh:
        """Return the mesh that shards parameters: dense, dense_tp (those that tp splits) or expert (one slice).

        It is 1-D over fsdp·cp·tp, fsdp·cp or efsdp, or 2-D (replicate, that) for hybrid sharding.
        """
        meshes = {"dense": self.dense_mesh, "dense_tp": self.dense_tp_mesh, "expert": self.expert}
        axis = "efsdp" if view == "expert" else "fsdp"
        return meshes[view]["replicate", axis] if self.layout.replicate > 1 else meshes[view][axis]

    @property
    def ep_group(self) -> dist.ProcessGroup:
        """The ranks that together hold every routed expert once."""
        return self.expert.get_group("ep")

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that together hold every parameter of a pipeline stage exactly once: fsdp·cp·tp = efsdp·ep."""
        return self.dense_mesh.get_group("fsdp")

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """The ranks that pass one share of the batch on through all stages; only where pp > 1."""
        return self.dense.get_group("pp")

    def coordinate(self, axis: str) -> int:
        """Return this rank's place along an axis of the dense view; 0 where the axis has one rank."""
        return self.dense.get_local_rank(axis) if self.layout.size(axis) > 1 else 0


def init_mesh(
    parallel: ParallelConfig | None = None, *, num_experts: int | None = None, device: torch.device | None = None
) -> Mesh:
    """Build both views over the default process group.

    Starts that group from the launcher's environment (torchrun, srun) if none is up. On CPUs the groups are destroyed
    when the process ends, unless they were destroyed before.

    Args:
        parallel: `ep` has to be a number where more than one rank can share experts: `auto` weighs a model and its
            micro-batches, which are not known yet.
        num_experts: The routed experts of a layer, against which `ep` is checked.

    Collectives: every rank calls it with equal arguments; two small all-reduces, and what creating process groups
    issues.
    """
    if not dist.is_initialized():
        join_job()
    device = device or current_device()
    start_process_group(device)
    if device.type == "cpu":
        _end_groups_at_exit()
    with raise_on_all_ranks("choosing the layout"):
        layout = resolve_layout(parallel or ParallelConfig(), dist.get_world_size(), num_experts)
    return build_mesh(layout, device)


@functools.cache  # once in a process
def _end_groups_at_exit() -> None:
    """Destroy the groups when the process ends, unless they were destroyed before, and let gloo's threads come to rest.

    A thread that waits for the interpreter while that ends aborts the process ("terminate called without an active
    exception"). Threads of gloo do when they hold the last reference to a tensor of a collective, which they drop after
    `wait` has returned; groups that the model's shards still name keep their threads.
    """

    def end_groups() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        time.sleep(THREADS_REST_SECONDS)

    atexit.register(end_groups)


def build_mesh(layout: Layout, device: torch.device) -> Mesh:
    """Build both views of `layout` over the default process group.

    Raises:
        InputError: On all ranks, if ranks have resolved to different layouts.

    Collectives: every rank calls it; one small all-reduce, and what creating process groups issues.
    """
    count = _agreed_nodes(layout)
    dense, expert = (_device_mesh(device, layout, axes) for axes in (DENSE_AXES, EXPERT_AXES))
    # Each is a mesh of its own, not a flattened one: FSDP2 wants its axes and tp's to come from one root.
    joined = replace(layout, fsdp=layout.fsdp * layout.cp, cp=1, ep=1)
    split = dense if layout.cp == 1 else _device_mesh(device, joined, DENSE_AXES)
    joined = replace(joined, fsdp=joined.fsdp * layout.tp, tp=1)
    whole = split if layout.tp == 1 else _device_mesh(device, joined, DENSE_AXES)
    nodes = None
    if count > 1:
        ranks = torch.arange(layout.world_size).view(-1, count, layout.ep // count)
        nodes = DeviceMesh(device.type, ranks, mesh_dim_names=("groups", "across", "inside"))
    return Mesh(layout, dense, expert, whole, split, device, dist.get_rank(), nodes)


def _agreed_nodes(layout: Layout) -> int:
    """Return `nodes_of_ep`, or 1 where nodes have different numbers of ranks: a rank only knows its own
    LOCAL_WORLD_SIZE.

    Collectives: every rank calls it; one all-reduce.
    """
    own = torch.tensor([*(layout.size(axis) for axis in CONFIGURED_AXES), nodes_of_ep(layout)])
    ends = torch.cat((own, -own)).to(collective_device())
    dist.all_reduce(ends, op=dist.ReduceOp.MIN)
    least, most = ends[: len(own)].tolist(), (-ends[len(own) :]).tolist()
    for axis, low, high in zip(CONFIGURED_AXES, least, most, strict=False):
        if low != high:
            what = f"parallel.{axis} is {low} on some ranks and {high} on others"
            raise local_world_sizes_differ(what, f"set parallel.{axis} to a number")
    return int(most[-1]) if least[-1] == most[-1] else 1


def _device_mesh(device: torch.device, layout: Layout, axes: tuple[str, ...]) -> DeviceMesh:
    axes = tuple(axis for axis in axes if layout.size(axis) > 1 or axis in ("fsdp", "efsdp", "ep"))
    ranks = torch.arange(layout.world_size).view([layout.size(axis) for axis in axes])
    return DeviceMesh(device.type, ranks, mesh_dim_names=axes)


def set_timeout(mesh: Mesh, seconds: float) -> None:
    """Let every collective of every group fail after `seconds` instead of torch's default. No communication.

    DeviceMesh gives its groups torch's default (up to 30 minutes) whatever the default group was started with.
    """
    world = dist.group.WORLD
    assert world is not None
    views = (mesh.dense, mesh.expert, mesh.dense_mesh, mesh.dense_tp_mesh, mesh.ep_nodes)
    for group in {world, *(group for view in views if view is not None for group in view.get_all_groups())}:
        set_group_timeout(group, datetime.timedelta(seconds=seconds))


def current_device() -> torch.device:
    """Return this rank's accelerator, chosen by LOCAL_RANK, or the CPU.

    A launcher may instead let each process see its own accelerator alone, as SLURM does with --gpus-per-task.
    """
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind, count = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    assert kind is not None
    if count > 1 and int(os.environ.get("WORLD_SIZE", 1)) > 1 and "LOCAL_RANK" not in os.environ:
        raise InputError(
            "LOCAL_RANK is not set, so ranks cannot tell which device is theirs; let the launcher set it, or let "
            "torchrun start the ranks of each machine",
            key="launch.no-local-rank",
        )
    local = int(os.environ.get("LOCAL_RANK", 0))
    if local >= count > 1:
        raise too_few_accelerators(f"LOCAL_RANK is {local}", count, ", or let each rank see one")
    device = torch.device(kind.type, local if count > 1 else 0)
    torch.accelerator.set_device_index(device.index)
    return device


def start_process_group(device: torch.device, timeout_seconds: float = 600) -> None:
    """Start the default group from the launcher's environment (torchrun, srun), unless one is up.

    Accelerators get gloo beside their own backend, for the few small exchanges between hosts. It connects two ranks at
    their first exchange, because otherwise every group would open a socket to each of its ranks. The accelerators'
    backend gets the device, so that it connects now, and groups are split off instead of connecting again. On several
    machines rank 0 prints the network interface.

    Collectives: every rank calls it.
    """
    if dist.is_initialized():
        return
    join_job()
    if (network := choose_interface(timeout_seconds)) and os.environ["RANK"] == "0":
        print(f"starting   {network}", flush=True)
    own, timeout = dist.get_default_backend_for_device(device), datetime.timedelta(seconds=timeout_seconds)
    if device.type == "cpu":
        dist.init_process_group(own, timeout=timeout)
    else:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        dist.init_process_group(f"cpu:gloo,{device.type}:{own}", timeout=timeout, device_id=device)
