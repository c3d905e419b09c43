"""A command as one rank of srun runs it: in a forked rank of a test, which takes seconds less than a launcher's."""

import logging
import os
import sys

import torch.distributed as dist

from expertmesh.cli.main import main


def rank_of_srun(arguments: list[str], output: str, nodes: bool = False) -> int:
    """One rank of srun, on a node of its own or all on one; what it prints goes into a file."""
    rank, world = dist.get_rank(), dist.get_world_size()
    here, local = (1, 0) if nodes else (world, rank)
    log, environment, streams = logging.getLogger("expertmesh"), dict(os.environ), (sys.stdout, sys.stderr)
    handlers, propagate, level, descriptors = log.handlers, log.propagate, log.level, (os.dup(1), os.dup(2))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(here)}
    descriptor = os.open(f"{output}.{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    try:
        return main(arguments)
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = streams
        for stream, before in enumerate(descriptors, 1):
            os.dup2(before, stream)
            os.close(before)
        os.close(descriptor)
        os.environ.clear()
        os.environ |= environment
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)
