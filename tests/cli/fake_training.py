"""Training functions that only end: what the ranks of test_launch.py run instead of the trainer."""

import os
import signal
import time

from expertmesh.config import Config, InputError, IntegrityError


def succeed(config: Config) -> None:
    """A real collective over the environment that the launcher made."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    if dist.get_rank() == 0:
        print(f"{config.output_dir}: {int(ranks)} ranks of {os.environ['OMP_NUM_THREADS']} threads")


def refuse_everywhere(config: Config) -> None:
    time.sleep(0.5 * int(os.environ["RANK"]))  # not all at the same moment
    raise InputError("data.train.0.path: there is no such file")


def corrupt_on_rank_1(config: Config) -> None:
    if os.environ["RANK"] == "1":
        raise IntegrityError("a weight is not what it should be")
    time.sleep(300)


def bug_on_rank_1(config: Config) -> None:
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("a bug")
    time.sleep(300)


def die_on_rank_1(config: Config) -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)  # as a collective would fail on the others, before the launcher ends them
    raise RuntimeError("connection closed by peer")


def hang(config: Config) -> None:
    os.write(1, f"up {os.getpid()}\n".encode())  # in one piece: the other rank writes to the same pipe
    time.sleep(300)
