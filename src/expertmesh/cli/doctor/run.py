"""`expertmesh doctor`: whether this machine can train, and what a bug report has to say about it.

Looks at versions, devices, limits, disk, hub and clock, and lets ranks exchange a little data within a time limit.
Prints one block to copy, without secrets. Downloads nothing and leaves nothing behind.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from expertmesh.cli.doctor import machine, storage
from expertmesh.cli.doctor.finding import Finding, environment
from expertmesh.cli.doctor.ranks import between_ranks
from expertmesh.config.errors import InputError
from expertmesh.distributed.environment import Node, Rank
from expertmesh.io.terminal import printable
from expertmesh.launcher.launch import RunOptions, join_job

_INDENT = " " * 11


def run(output: str, nproc: int | None = None, as_json: bool = False) -> int:
    """Print what is found; returns 0. `InputError` with a sentence for each fault.

    In a job that somebody else has started, its first process looks at its own machine and prints.
    """
    place = join_job(RunOptions(nproc=nproc))
    if (isinstance(place, Rank) and place.rank) or (isinstance(place, Node) and place.number):
        return min(2, len(between_ranks(place, nproc).faults) * 2)  # the first process says why
    findings: list[Finding] = []
    for look in _looks(Path(output).absolute(), partial(between_ranks, place, nproc)):
        findings.append(found := look())
        if not as_json:
            text = printable(found.says).replace("\n", f"\n{_INDENT}")
            print(f"{found.what:<{len(_INDENT)}}{text}", flush=True)
    faults = [fault for finding in findings for fault in finding.faults]
    if as_json:
        print(json.dumps({"found": {each.what: each.says for each in findings}, "faults": faults}, indent=2))
    if faults:
        raise InputError("\n".join(faults), key="doctor.faults")
    if not as_json:
        print("no fault found")
    return 0


def _looks(output: Path, ranks: Callable[[], Finding]) -> Iterator[Callable[[], Finding]]:
    yield machine.packages
    yield machine.devices
    yield ranks
    yield partial(storage.disk, output)
    yield storage.hub
    yield machine.limits
    yield environment
