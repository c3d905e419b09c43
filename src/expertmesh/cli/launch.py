"""Where the ranks of `expertmesh train` come from: the job that started us, or N local processes of our own.

Under a launcher that sets RANK and WORLD_SIZE (torchrun, SLURM wrappers) this process is one rank and trains.
Else it starts N ranks on this machine through PyTorch's elastic launcher, passes their output through, and
ends as they do: one error message for the whole job, its exit code, no process and no file left behind.
"""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from expertmesh.cli.failures import RankFailure, failures_in, root_cause
from expertmesh.cli.worker import TRAIN, run_rank
from expertmesh.config import Config, dump_config
from expertmesh.config.errors import InputError

CPU_RANKS = 2
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def run(config: Config, nproc: int | None) -> int:
    """Train on the ranks of the surrounding job, or on `nproc` local ranks; returns the exit code.

    Raises `ExpertmeshError`: for local ranks before they start, where a light check finds the cause, or after
    they have ended by it.
    """
    if in_job():
        check_job(nproc)
        return run_rank(config, TRAIN, _print_failure)
    from expertmesh.training.preflight import (
        preflight,
    )  # heavy to import, and each rank of a job calls it itself

    ranks = local_ranks(nproc)
    preflight(config, ranks)
    return launch(config, ranks)


def in_job() -> bool:
    """Whether a launcher has made this process one rank of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_job(nproc: int | None) -> None:
    """`InputError` if the launcher's environment makes no sense or `--nproc` contradicts it."""
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        text = os.environ.get(name, os.environ["WORLD_SIZE"])
        if not text.isdigit():
            raise InputError(f"the environment variable {name} is {text!r}, not a number; mend it or unset it")
        numbers[name] = int(text)
    if nproc not in (None, numbers["LOCAL_WORLD_SIZE"]):
        raise InputError(
            f"--nproc is {nproc}, but the launcher that set RANK started {numbers['LOCAL_WORLD_SIZE']} ranks "
            "on this machine; leave --nproc out under a launcher"
        )


def local_ranks(nproc: int | None) -> int:
    """How many ranks to start here: `nproc`, else one per accelerator, else two on the CPU."""
    import torch

    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else None
    if devices is not None and nproc is not None and nproc > devices:
        raise InputError(f"--nproc is {nproc}, but this machine has {devices} accelerators; use {devices} or fewer")
    return nproc or devices or CPU_RANKS


def launch(config: Config, ranks: int, train: str = TRAIN) -> int:
    """Run `train` (`module:function`) on `ranks` local processes and wait for them.

    Returns 0, or 128 + the signal that stopped this process (143 for SIGTERM). Raises the `ExpertmeshError`
    that the job failed by, `DistributedFailure` for a rank that died in any other way.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with _stop_signals() as signals, tempfile.TemporaryDirectory(prefix="expertmesh-") as name:
        directory = Path(name)
        try:
            _run_agent(config, ranks, train, directory, signals)
        except SignalException as stop:
            return 128 + int(stop.sigval)
        except ChildFailedError as failed:
            exit_codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
            raise root_cause(failures_in(directory), exit_codes, ranks) from None
        finally:
            for number in signals:  # the ranks are gone; nothing may cut the removal of the directory short
                signal.signal(number, signal.SIG_IGN)
    return 0


def _run_agent(config: Config, ranks: int, train: str, directory: Path, signals: list[signal.Signals]) -> None:
    """Start the ranks under PyTorch's elastic agent and wait for all; the first failure ends the rest."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config_path = directory / "config.yaml"
    config_path.write_text(dump_config(config), encoding="utf-8")
    agent = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(directory / "agent")),
        signals_to_handle=",".join(number.name for number in signals),
    )
    worker = ("-u", "-m", "expertmesh.cli.worker", config_path, directory)
    with _environment(ranks), _quiet_agent():
        elastic_launch(agent, sys.executable)(*worker, "--parent", os.getpid(), "--train", train)


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[signal.Signals]]:
    """Let the signals that stop a job raise, also before the agent takes them over; old handlers come back.

    A signal that is ignored stays so: a job under `nohup` must outlive its terminal.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SignalException("stopped before the ranks were up", sigval=signal.Signals(number))

    old = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    handled = [number for number in STOP_SIGNALS if old[number] != signal.SIG_IGN]
    try:
        for number in handled:
            signal.signal(number, stop)
        yield handled
    finally:
        for number in handled:
            signal.signal(number, old[number])


@contextlib.contextmanager
def _environment(ranks: int) -> Iterator[None]:
    """What agent and ranks read from the environment; the caller's is put back at the end."""
    old = dict(os.environ)
    # Ranks must not meet through the agent's own store: on gloo they can read stale addresses from it.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(old)


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Keep the agent's account of a failure off the terminal; `root_cause` gives the user a better one."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _print_failure(failure: RankFailure) -> None:
    text = failure.traceback or failure.message
    print(f"error: rank {failure.rank}: {text.rstrip()}", file=sys.stderr)
