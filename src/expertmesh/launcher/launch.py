"""Where the ranks of a job come from: the job that started us, or N local processes of our own.

Under a launcher that sets RANK and WORLD_SIZE (torchrun, SLURM wrappers) this process is one rank and runs the job's
function itself. Else it starts N ranks on this machine, passes their output through, starts all of them again after a
failure if it may, and ends as they do: one error message for the whole job, its exit code, no process and no file left.
"""

import itertools
import os
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from expertmesh.config import Config, dump_config
from expertmesh.config.errors import DistributedFailure, ExpertmeshError, InputError
from expertmesh.io.terminal import printable
from expertmesh.launcher.lazy_imports import lazy_imports
from expertmesh.launcher.rank_files import UNEXPECTED
from expertmesh.launcher.supervise import Job, StopRequests, start_ranks, stop_requests
from expertmesh.launcher.worker import run_rank
from expertmesh.training.control import Control

CPU_RANKS = 2


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What is said beside the configuration: how to run, not what to compute. Not part of a run's identity.

    `max_seconds` counts from the start of the command, over all restarts; None is no limit. `audit`: compare samples or
    all of the loaded weights with their files. `arguments`: see `Control`.
    """

    nproc: int | None = None
    max_seconds: float | None = None
    max_restarts: int = 0
    audit: Literal["sampled", "full"] = "sampled"
    arguments: str = ""


def run(
    config: Config,
    function: str,
    options: RunOptions | None = None,
    preflight: Callable[[Config, int], object] | None = None,
) -> int:
    """Call `function` (`module:function`) on each rank of the surrounding job, or on local ranks.

    `preflight` is called with the number of local ranks before they start, to refuse what cannot work once and early.
    Prints what is being done. Returns the exit code; raises `ExpertmeshError` before ranks start, or when they have
    ended by it.
    """
    options = options or RunOptions()
    deadline = None if options.max_seconds is None else time.monotonic() + options.max_seconds
    if in_job():
        check_job(options)
        if os.environ["RANK"] == "0":
            _say(f"starting   rank 0 of {os.environ['WORLD_SIZE']}: importing torch and transformers")
        return _run_here(config, function, Control(deadline=deadline, audit=options.audit, arguments=options.arguments))
    _say("starting   importing torch" + (" and transformers, checking the configuration" if preflight else ""))
    with lazy_imports():
        ranks = local_ranks(options.nproc)
    if preflight is not None:
        preflight(config, ranks)
    _say(f"           {ranks} rank{'s' * (ranks > 1)} on this machine, each of which imports torch and transformers")
    return launch(config, ranks, function, options, deadline)


def _say(line: str) -> None:
    print(line, flush=True)


def _run_here(config: Config, function: str, control: Control) -> int:
    """As one rank of somebody else's job, where no launcher of ours reports a bug."""
    try:
        return run_rank(config, function, control)
    except ExpertmeshError:
        raise
    except (Exception, SystemExit):
        where = f"rank {os.environ['RANK']} failed {control.progress.status()}"
        print(printable(f"error: {where}:\n{traceback.format_exc().rstrip()}"), file=sys.stderr)
        return UNEXPECTED


def in_job() -> bool:
    """Whether a launcher has made this process one rank of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_job(options: RunOptions) -> None:
    """`InputError` if the launcher's environment makes no sense or an option contradicts it."""
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        text = os.environ.get(name, os.environ["WORLD_SIZE"])
        if not text.isdigit():
            raise InputError(
                f"the environment variable {name} is {text!r}, not a number; mend it or unset it",
                key="launch.environment",
            )
        numbers[name] = int(text)
    if options.nproc not in (None, numbers["LOCAL_WORLD_SIZE"]):
        raise InputError(
            f"--nproc is {options.nproc}, but the launcher that set RANK started {numbers['LOCAL_WORLD_SIZE']} ranks "
            "on this machine; leave --nproc out under a launcher",
            key="launch.nproc-differs",
        )
    if options.max_restarts:
        raise InputError(
            "--max-restarts is for local ranks; under torchrun, give its own --max-restarts to torchrun",
            key="launch.restarts-in-job",
        )


def local_ranks(nproc: int | None) -> int:
    """How many ranks to start here: `nproc`, else one per accelerator, else two on the CPU."""
    import torch

    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else None
    if devices is not None and nproc is not None and nproc > devices:
        raise InputError(
            f"--nproc is {nproc}, but this machine has {devices} accelerators; use {devices} or fewer",
            key="launch.too-few-accelerators",
        )
    return nproc or devices or CPU_RANKS


def launch(
    config: Config, ranks: int, function: str, options: RunOptions | None = None, deadline: float | None = None
) -> int:
    """Call `function` (`module:function`) on `ranks` local processes and wait for them.

    Returns 0, or 130 or 143 if the job was stopped. Raises the `ExpertmeshError` that the job failed by,
    `DistributedFailure` for a rank that died or hung; only that one is tried again, as often as `options` allow.
    `deadline` is of `time.monotonic()`.
    """
    options = options or RunOptions()
    worker = ["--function", function, "--parent", str(os.getpid()), "--launch", uuid.uuid4().hex]
    worker += ["--audit", options.audit]
    worker += ["--arguments", options.arguments] if options.arguments else []
    if deadline is not None:
        worker += ["--deadline", repr(deadline)]
    with stop_requests() as requests, tempfile.TemporaryDirectory(prefix="expertmesh-") as temporary:
        config_path = Path(temporary, "config.yaml")
        for restart in itertools.count(1):
            config_path.write_text(dump_config(config if restart == 1 else _continued(config)), encoding="utf-8")
            directory = Path(temporary, f"attempt-{restart}")
            directory.mkdir()
            try:
                return _attempt([str(config_path), str(directory), *worker], ranks, directory, requests)
            except DistributedFailure as failure:
                late = deadline is not None and time.monotonic() >= deadline
                if restart > options.max_restarts or requests.requested or late:
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


def _attempt(arguments: list[str], ranks: int, directory: Path, requests: StopRequests) -> int:
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
    started = start_ranks(["expertmesh.launcher.worker", *arguments], ranks, directory, environment)
    return Job(started, directory, requests).supervise()
