"""Training functions that only end: what the ranks of test_launch.py run instead of the trainer."""

import logging
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from expertmesh.config import Config, InputError, IntegrityError
from expertmesh.io.terminal import tell
from expertmesh.training import control as control_module
from expertmesh.training.control import Control, Stopped

COLLECTIVE_SECONDS = 2


def rank() -> int:
    return int(os.environ["RANK"])


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # in one piece: the other ranks write to the same pipe


def peer_is_lost(start: int = 0) -> None:
    """What a collective does on the other ranks when rank 1, which calls `lose`, is gone."""
    while not Path(os.environ["SCRATCH"], f"lost-{start}").exists():
        time.sleep(0.02)
    time.sleep(0.1)
    raise RuntimeError("Connection closed by peer")


def lose(start: int = 0) -> None:
    Path(os.environ["SCRATCH"], f"lost-{start}").touch()


def meet(ranks: int) -> None:
    """Wait until all ranks are there: on a busy machine some import for long."""
    Path(os.environ["SCRATCH"], f"here-{rank()}").touch()
    while any(not Path(os.environ["SCRATCH"], f"here-{each}").exists() for each in range(ranks)):
        time.sleep(0.02)


def succeed(config: Config, control: Control) -> None:
    """A real collective over the environment that the launcher made."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    if dist.get_rank() == 0:
        print(f"{config.output_dir}: {int(ranks)} ranks of {os.environ['OMP_NUM_THREADS']} threads")


def talk(config: Config, control: Control) -> None:
    """Prints more than a buffer holds, whoever reads it."""
    for step in range(20):
        tell(f"step {step} {'.' * 1000}")
    logging.getLogger().warning("a library")
    Path(os.environ["SCRATCH"], f"saved-{rank()}").write_text("done")


def refuse_everywhere(config: Config, control: Control) -> None:
    meet(2)
    time.sleep(0.5 * rank())  # not all at the same moment
    raise InputError("data.train.0.path: there is no such file", key="data.no-such-file")


def corrupt_on_rank_1(config: Config, control: Control) -> None:
    if rank() == 1:
        raise IntegrityError("a weight is not what it should be")
    time.sleep(300)


def bug_on_rank_1(config: Config, control: Control) -> None:
    control.progress.at(3, "reading data")
    if rank() != 1:
        peer_is_lost()
    lose()
    raise ZeroDivisionError("a bug")


def die_on_rank_1(config: Config, control: Control) -> None:
    control.progress.at(12, "forward and backward")
    if rank() != 1:
        peer_is_lost()
    lose()
    os.kill(os.getpid(), signal.SIGKILL)


def load(config: Config, control: Control) -> None:
    """Never reaches its loop."""
    control.progress.at(0, "loading weights")
    say(f"up {os.getpid()}")
    time.sleep(300)


def interrupted(config: Config, control: Control) -> None:
    """Ctrl-C, as Python's own handler tells of it."""
    control.progress.at(0, "loading weights")
    raise KeyboardInterrupt


def loop(config: Config, control: Control) -> None:
    """Steps until it is asked to stop; then saves, for as long as SAVE_SECONDS says."""
    control_module.ONE_REQUEST_SECONDS = float(os.environ["ONE_REQUEST_SECONDS"])
    with control.accepting_stop():
        for step in range(1, 60_000):
            control.progress.at(step, "forward and backward")
            if step == 2:
                say(f"up {os.getpid()}")
            time.sleep(0.02)
            if reason := control.stop_requested():
                say(f"saving {os.getpid()}")
                time.sleep(float(os.environ.get("SAVE_SECONDS", "0")))
                Path(os.environ["SCRATCH"], f"saved-{rank()}").write_text(str(reason))
                raise Stopped(reason)


def fail_twice(config: Config, control: Control) -> None:
    """Fails in two different ways, then succeeds; counts its starts in a file."""
    starts = Path(os.environ["SCRATCH"], f"starts-{rank()}")
    start = len(starts.read_text()) if starts.exists() else 0
    starts.write_text("x" * (start + 1))
    control.progress.at(start + 1, "update")
    if start == 2:
        return
    if rank() != 1:
        peer_is_lost(start)
    lose(start)
    if start == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("the network is gone")


def leave_a_child_behind(config: Config, control: Control) -> None:
    if rank() == 1:
        child = subprocess.Popen(["sleep", "300"])
        Path(os.environ["SCRATCH"], "child").write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)


def hang_on_rank_1(config: Config, control: Control) -> None:
    """Collectives for ever; in step 3 rank 1 does what HANG says instead of its part."""
    import datetime

    import torch
    import torch.distributed as dist

    from expertmesh.compat import set_group_timeout

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))  # all are there
    assert dist.group.WORLD is not None
    set_group_timeout(dist.group.WORLD, datetime.timedelta(seconds=COLLECTIVE_SECONDS))
    with control.accepting_stop():
        for step in range(1, 6000):
            control.progress.at(step, "reading data")
            if step == 3 and rank() == 1:
                say(f"hanging {os.getpid()}")
                globals()[os.environ["HANG"]]()
            control.progress.at(step, "forward and backward")
            dist.all_reduce(torch.ones(1))


def stopped_by_a_signal() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(300)  # the signal may reach another thread first; this one must not have gone on by then


def endless_loop() -> None:
    while True:
        time.sleep(0.001)  # it takes no core from other tests


def slow_reader() -> None:
    """Comes back when the others have given up."""
    time.sleep(COLLECTIVE_SECONDS + 1)


def sleeping_thread() -> None:
    threading.Event().wait()
