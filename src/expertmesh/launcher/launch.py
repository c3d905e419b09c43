"""Where the ranks of `expertmesh train` come from: the job that started us, or N local processes of our own.

Under a launcher that sets RANK and WORLD_SIZE (torchrun, SLURM wrappers) this process is one rank and trains.
Else it starts N ranks on this machine, passes their output through, starts all of them again after a failure if it
may, and ends as they do: one error message for the whole job, its exit code, no process and no file left behind.
"""

import itertools
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from expertmesh.config import Config, dump_config
from expertmesh.config.errors import DistributedFailure, InputError
from expertmesh.io.terminal import printable
from expertmesh.launcher.lazy_imports import lazy_imports
from expertmesh.launcher.options import RunOptions
from expertmesh.launcher.records import RankFailure
from expertmesh.launcher.supervise import Job, StopRequests, start_ranks, stop_requests
from expertmesh.launcher.worker import TRAIN, run_rank
from expertmesh.training.control import Control

CPU_RANKS = 2


def run(config: Config, options: RunOptions, function: str | None = None, *, preflights: bool = True) -> int:
    """Train on the ranks of the surrounding job, or on local ranks; returns the exit code.

    `function` (`module:function`) is what the ranks run, by default `training.run.train`. Before local ranks are
    started the configuration is checked, unless `preflights` is off.

    Raises `ExpertmeshError`: for local ranks before they start, where a light check finds the cause, or after
    they have ended by it.
    """
    deadline = None if options.max_seconds is None else time.monotonic() + options.max_seconds
    if in_job():
        check_job(options)
        control = Control(deadline=deadline, audit=options.audit, arguments=options.arguments)
        return run_rank(config, function or TRAIN, control, _printer(control))
    ranks = local_ranks(options.nproc)
    if preflights:
        with lazy_imports():
            from expertmesh.training.preflight import preflight  # each rank of a job calls it itself

        preflight(config, ranks, ranks_per_node=ranks)
    return launch(config, ranks, function or TRAIN, options=options, deadline=deadline)


def in_job() -> bool:
    """Whether a launcher has made this process one rank of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_job(options: RunOptions) -> None:
    """`InputError` if the launcher's environment makes no sense or an option contradicts it."""
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        text = os.environ.get(name, os.environ["WORLD_SIZE"])
        if not text.isdigit():
            raise InputError(f"the environment variable {name} is {text!r}, not a number; mend it or unset it")
        numbers[name] = int(text)
    if options.nproc not in (None, numbers["LOCAL_WORLD_SIZE"]):
        raise InputError(
            f"--nproc is {options.nproc}, but the launcher that set RANK started {numbers['LOCAL_WORLD_SIZE']} ranks "
            "on this machine; leave --nproc out under a launcher"
        )
    if options.max_restarts:
        raise InputError("--max-restarts is for local ranks; under torchrun, give its own --max-restarts to torchrun")


def local_ranks(nproc: int | None) -> int:
    """How many ranks to start here: `nproc`, else one per accelerator, else two on the CPU."""
    import torch

    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else None
    if devices is not None and nproc is not None and nproc > devices:
        raise InputError(f"--nproc is {nproc}, but this machine has {devices} accelerators; use {devices} or fewer")
    return nproc or devices or CPU_RANKS


def launch(
    config: Config,
    ranks: int,
    train: str = TRAIN,
    *,
    options: RunOptions | None = None,
    deadline: float | None = None,
) -> int:
    """Run `train` (`module:function`) on `ranks` local processes and wait for them.

    Returns 0, or 130 or 143 if the job was stopped. Raises the `ExpertmeshError` that the job failed by,
    `DistributedFailure` for a rank that died or hung; only that one is tried again, as often as `options` allow.
    `deadline` is of `time.monotonic()`.
    """
    options = options or RunOptions()
    worker = ["--parent", str(os.getpid()), "--launch", uuid.uuid4().hex, "--train", train, "--audit", options.audit]
    worker += ["--arguments", options.arguments] if options.arguments else []
    if deadline is not None:
        worker += ["--deadline", repr(deadline)]
    with stop_requests() as requests, tempfile.TemporaryDirectory(prefix="expertmesh-") as directory:
        config_path = Path(directory, "config.yaml")
        for restart in itertools.count(1):
            config_path.write_text(dump_config(config if restart == 1 else _continued(config)), encoding="utf-8")
            records = Path(directory, f"attempt-{restart}")
            records.mkdir()
            try:
                return _attempt([str(config_path), str(records), *worker], ranks, records, requests)
            except DistributedFailure as failure:
                late = deadline is not None and time.monotonic() >= deadline
                if restart > options.max_restarts or requests.wish or late:
                    raise
                again = f"all ranks are started again (restart {restart} of {options.max_restarts})"
                print(printable(f"{failure}\n{again}"), file=sys.stderr, flush=True)
    raise AssertionError("every attempt returns or raises")


def _continued(config: Config) -> Config:
    """For a restart: from the newest checkpoint of this run, if it has written one, whatever it started from."""
    if not any(Path(config.output_dir, "checkpoints").glob("step-*[0-9]")):
        return config
    checkpoint = config.checkpoint.model_copy(update={"resume": "auto"})
    return config.model_copy(update={"checkpoint": checkpoint})


def _attempt(arguments: list[str], ranks: int, records: Path, requests: StopRequests) -> int:
    """Start all ranks, with nothing left of an attempt before, and wait for them."""
    import torch.distributed as dist

    # Where the ranks meet. It lives here, on a port that the system chose, so that no port is guessed and no rank's
    # end disturbs the others' last words. Each attempt gets a new one: in an old one ranks read addresses of the dead.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {
        "OMP_NUM_THREADS": str(max(1, cores // ranks)),
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is up already: rank 0 must not start one
    }
    job = Job(start_ranks(["expertmesh.launcher.worker", *arguments], ranks, records, environment), records, requests)
    return job.supervise()


def _printer(control: Control) -> Callable[[RankFailure], None]:
    """For a rank that no launcher of ours speaks for: it says itself how it failed."""

    def show(failure: RankFailure) -> None:
        where = f" failed {control.progress.standing()}:\n" if failure.traceback else ": "
        text = failure.traceback or failure.message
        print(printable(f"error: rank {failure.rank}{where}{text.rstrip()}"), file=sys.stderr)

    return show
