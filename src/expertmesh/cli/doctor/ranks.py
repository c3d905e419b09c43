"""Whether ranks reach each other: a small all-reduce and all-to-all in the backend that training would use.

`exchange` is what each rank runs, started by our launcher on this machine or by whoever has started this process
(torchrun, srun), so that the network between machines is looked at where it is used.
"""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from expertmesh.cli.doctor.finding import Finding, without_secrets
from expertmesh.cli.doctor.storage import CLOCK_SECONDS
from expertmesh.config import Config
from expertmesh.config.errors import ExpertmeshError, IntegrityError
from expertmesh.distributed.collectives import all_gather, all_to_all_even
from expertmesh.distributed.environment import Node, Rank
from expertmesh.distributed.mesh import current_device, start_process_group
from expertmesh.launcher.failures import TRACEBACK_FOLLOWS
from expertmesh.launcher.launch import RunOptions, launch, local_ranks
from expertmesh.launcher.meeting import THIS_MACHINE
from expertmesh.training.control import Control
from expertmesh.training.reporting.machine import versions

SECONDS = 120
ELEMENTS = 2**18
FUNCTION = "expertmesh.cli.doctor.ranks:exchange"
_TEXT_BYTES = 512


def between_ranks(place: Rank | Node | None, nproc: int | None) -> Finding:
    """What the ranks of the job that `place` is in, or of one that is started here, say of each other.

    Every process of a surrounding job calls it; what it returns means something on the first.
    """
    limit = {"timeout_seconds": SECONDS, "first_step_timeout_seconds": SECONDS}
    # The launcher is for training: of the configuration it reads the time limits alone.
    config = Config.model_validate(
        {"model": {"name_or_path": "-"}, "data": {"train": [{"path": "-"}]}, "distributed": limit, "output_dir": "-"}
    )
    with tempfile.TemporaryDirectory(prefix="expertmesh-doctor-") as directory:
        result = Path(directory, "ranks.json")
        try:
            if isinstance(place, Rank):
                exchange(config, Control(arguments=str(result)))
            else:
                node, options = place or THIS_MACHINE, RunOptions(arguments=str(result))
                launch(config, local_ranks(nproc or node.ranks), FUNCTION, options, node=node)
        except ExpertmeshError as error:
            why = without_secrets(str(error)).splitlines()[0].removesuffix(TRACEBACK_FOLLOWS)
            return Finding(
                "ranks",
                "do not reach each other",
                (f"ranks cannot exchange data: {why}; see the interface, firewall and drivers (docs/launching.md)",),
            )
        if not result.exists():
            return Finding("ranks", "rank 0 says what they found")
        found = json.loads(result.read_text())
    return Finding("ranks", found["says"], tuple(found["faults"]))


def exchange(config: Config, control: Control) -> None:
    """Every rank calls it. Issues an all-reduce, an all-to-all and an all-gather; rank 0 writes what was found.

    Raises `IntegrityError` on a rank that received other values than were sent.
    """
    device = current_device()
    start_process_group(device, config.distributed.first_step_timeout_seconds)
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    seconds = {}
    for attempt in range(2):  # the first makes the connections
        started = time.monotonic()
        summed = torch.full((ELEMENTS,), float(rank + 1), device=device)
        dist.all_reduce(summed)
        right = bool((summed == world * (world + 1) / 2).all())
        seconds[f"all-reduce {attempt}"] = time.monotonic() - started
        started = time.monotonic()
        rows = torch.arange(world, device=device).repeat_interleave(ELEMENTS // world).view(world, -1) + rank * world
        received = all_to_all_even(rows, group)
        wanted = torch.arange(world, device=device).view(world, 1) * world + rank
        right = right and bool((received == wanted).all())
        seconds[f"all-to-all {attempt}"] = time.monotonic() - started
        if not right:
            raise IntegrityError(
                f"rank {rank} received other values than the {world} ranks have sent over {dist.get_backend()}; do not "
                "train here before the network or the driver is mended",
                key="doctor.wrong-values",
            )
    everybody = _gathered({"versions": versions(), "time": time.time()}, device, group)
    if rank == 0:
        Path(control.arguments).write_text(json.dumps(_compared(everybody, seconds)))


def _gathered(mine: dict[str, Any], device: torch.device, group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """What each rank has said, in a tensor: nothing is unpickled."""
    text = json.dumps(mine).encode().ljust(_TEXT_BYTES)
    assert len(text) == _TEXT_BYTES, text
    rows = all_gather(torch.tensor([list(text)], dtype=torch.uint8, device=device), group)
    return [json.loads(bytes(row)) for row in rows.tolist()]


def _compared(everybody: list[dict[str, Any]], seconds: dict[str, float]) -> dict[str, Any]:
    world, backend = len(everybody), dist.get_backend()
    name = os.environ.get("NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME")
    over = f" over {name}" if name else ""
    size = f"{ELEMENTS * 4 / 2**20:.0f} MiB"
    says = (
        f"{world} by {backend}{over}: all-reduce of {size} in {seconds['all-reduce 1'] * 1000:.1f} ms, all-to-all in "
        f"{seconds['all-to-all 1'] * 1000:.1f} ms, connected in {seconds['all-reduce 0']:.2f} s"
    )
    faults = []
    for rank, other in enumerate(everybody):
        if other["versions"] != everybody[0]["versions"]:
            faults.append(
                f"rank {rank} has {other['versions']}, rank 0 {everybody[0]['versions']}; install the same on every "
                "machine"
            )
    apart = max(each["time"] for each in everybody) - min(each["time"] for each in everybody)
    if apart > CLOCK_SECONDS:
        faults.append(f"the clocks of the ranks are {apart:.0f} s apart; let a time service set them")
    return {"says": says, "faults": faults[:3]}
