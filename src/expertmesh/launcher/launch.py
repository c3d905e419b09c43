"""Run a job's function on the ranks of the surrounding job, or on N local processes.

If a launcher (torchrun, srun, Ray) has made this process one rank, it runs the job's function itself. Otherwise it
starts N ranks on this machine, passes their output through, starts all of them again after a failure if it may, and
ends as they do: with one error message for all of them, its exit code, and no process or file left. The launcher holds
the store where ranks meet, so that no rank's end disturbs the last messages of the others. Several machines are
torchrun's or srun's.
"""

import itertools
import json
import logging
import os
import signal
import socket
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from expertmesh.config import Config, dump_config
from expertmesh.config.errors import DistributedFailure, InputError
from expertmesh.distributed.environment import LOCALHOST, Rank, find_place, processors
from expertmesh.io.terminal import lasting_output, plural, print_log, tell
from expertmesh.launcher.rank_files import newest_checkpoint, stopped_sentence
from expertmesh.launcher.supervise import Attempt, start_ranks, stop_requests
from expertmesh.launcher.torchrun import TorchrunAgent, refuse_elastic, run_here
from expertmesh.launcher.worker import lazy_imports
from expertmesh.training.control import Control

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


log = logging.getLogger(__name__)

CPU_RANKS = 2


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options beside the configuration: how to run, not what to compute. Not part of a run's identity."""

    nproc: int | None = None
    """Ranks to start on this machine."""
    max_seconds: float | None = None
    """Seconds from the start of the command, over all restarts; None is no limit."""
    max_restarts: int = 0
    """Times that all local ranks are started again after one died or hung."""
    audit: Literal["sampled", "full"] = "sampled"
    """True if samples or all of the loaded weights are compared with their files."""
    profile: tuple[int, int] | None = None
    """The field of `Control`."""
    arguments: str = ""
    """The field of `Control`."""
    elastic: tuple[int, int] | None = None
    """The fewest and most ranks of torchrun that a start of the job may have."""

    def for_control(self) -> dict[str, Any]:
        """Return the options as ranks get them, for `Control`."""
        given = {"audit": self.audit, "profile": self.profile, "arguments": self.arguments}
        return given | {"elastic": self.elastic is not None}


def run(
    config: Config,
    function: str,
    options: RunOptions | None = None,
    preflight: Callable[[Config, int, int], object] | None = None,
) -> int:
    """Call `function` (`module:function`) on each rank of the surrounding job, or on local ranks.

    `preflight` is called with the number of ranks and of those on this machine before they start, to refuse early and
    once what cannot work. Prints what is being done. Returns the exit code; raises `ExpertmeshError` before ranks
    start, or when they have ended by it.
    """
    options = options or RunOptions()
    deadline = None if options.max_seconds is None else time.monotonic() + options.max_seconds
    print_log(config.log.level)
    with lasting_output():
        place = join_job(options)
        if place is not None:
            if place.rank == 0:
                by = "" if place.starter == "RANK" else f" that {place.starter} has started"
                log.info(f"starting   rank 0 of {place.world_size}{by}: importing torch and transformers")
            launch_id = TorchrunAgent.of(os.environ).run_id if options.elastic is not None else None
            return run_here(config, function, Control(deadline=deadline, launch=launch_id, **options.for_control()))
        log.info("starting   importing torch" + (" and transformers, checking the configuration" if preflight else ""))
        try:
            with lazy_imports():
                ranks = local_ranks(options.nproc)
            if preflight is not None:
                preflight(config, ranks, ranks)
            log.info(
                f"           {plural(ranks, 'rank')} on this machine, each of which imports torch and transformers"
            )
            return launch(config, ranks, function, options, deadline)
        except KeyboardInterrupt:  # outside of `launch`, which notes it
            tell(stopped_sentence(signal.SIGINT, None, _run_of(config, options)), error=True)
            raise


def join_job(options: RunOptions) -> Rank | None:
    """Return this process's place in a job that a launcher has started, which is written into its environment, or None.

    Raises `InputError` if the environment contradicts itself or an option.
    """
    place = find_place()
    if options.elastic is not None:
        refuse_elastic(options.elastic, place, os.environ)
    if place is None:
        return None
    here = place.local_world_size or 1
    if options.nproc not in (None, here):
        by = "the launcher that set RANK" if place.starter == "RANK" else place.starter
        raise InputError(
            f"--nproc is {options.nproc}, but {by} has started {plural(here, 'rank')} on this machine; leave "
            "--nproc out, or let torchrun start the ranks of each machine",
            key="launch.nproc-differs",
        )
    if place.starter == "SLURM" and here == 1 and options.nproc is None and (devices := _accelerators()) > 1:
        raise InputError(
            f"srun has started one task on this machine, which has {devices} accelerators; start one for each (srun "
            f"--ntasks-per-node {devices}), or let the task start torchrun --nproc-per-node {devices}",
            key="launch.idle-accelerators",
        )
    if options.max_restarts:
        raise InputError(
            "--max-restarts is for local ranks; under torchrun, give its own --max-restarts to torchrun, and let other "
            "launchers start a job on several machines again",
            key="launch.restarts-in-job",
        )
    place.export()
    return place


def job_size(nproc: int | None = None) -> tuple[int, int | None]:
    """Return how many ranks a job started here has, and how many of them are on this machine; None if it is unknown.

    They are those of the surrounding job, or as many as `run` would start.
    """
    if (place := join_job(RunOptions(nproc=nproc))) is not None:
        return place.world_size, place.local_world_size
    ranks = local_ranks(nproc)
    return ranks, ranks


def local_ranks(nproc: int | None) -> int:
    """Return how many ranks to start here: `nproc`, else one per accelerator, else two on the CPU."""
    devices = _accelerators()
    if devices and nproc is not None and nproc > devices:
        raise InputError(
            f"--nproc is {nproc}, but this machine has {devices} accelerators; use {devices} or fewer",
            key="launch.too-few-accelerators",
        )
    return nproc or devices or CPU_RANKS


def has_room_for(ranks: int) -> bool:
    """Return whether this machine has an accelerator, or without any a processor, for each of that many ranks."""
    return ranks <= (_accelerators() or max(processors(), CPU_RANKS))


def _accelerators() -> int:
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def launch(
    config: Config,
    ranks: int,
    function: str,
    options: RunOptions | None = None,
    deadline: float | None = None,
) -> int:
    """Call `function` (`module:function`) on `ranks` local processes and wait for them.


    Returns 0, or 130 or 143 if the job was stopped. Raises the `ExpertmeshError` that the job failed by,
    `DistributedFailure` for a rank that died or hung; only that one is tried again, as often as `options` allow.
    `deadline` is of `time.monotonic()`.
    """
    options = options or RunOptions()
    control = {"deadline": deadline, "launch": uuid.uuid4().hex, **options.for_control()}
    worker = [function, str(os.getpid()), json.dumps(control)]
    with stop_requests() as requests, tempfile.TemporaryDirectory(prefix="expertmesh-") as temporary:
        config_path = Path(temporary, "config.yaml")
        for restart in itertools.count(1):
            config_path.write_text(dump_config(config if restart == 1 else _continued(config)), encoding="utf-8")
            directory = Path(temporary, f"attempt-{restart}")
            directory.mkdir()
            try:
                # A store for each attempt: in an old one ranks would read addresses of the dead.
                store = open_store()
                places = [Rank("expertmesh", rank, ranks, rank, ranks, LOCALHOST, store.port) for rank in range(ranks)]
                started = start_ranks([str(config_path), str(directory), *worker], places, directory)
                attempt = Attempt(started, directory, requests, config.distributed.timeout_seconds)
                code = attempt.supervise()
                if code and not attempt.has_saved():
                    number = requests.forced or requests.requested
                    at = attempt.ranks[0].progress.status()
                    tell(stopped_sentence(number, at, _run_of(config, options)), error=True)
                return code
            except DistributedFailure as failure:
                late = deadline is not None and time.monotonic() >= deadline
                if restart > options.max_restarts or requests.requested or late:
                    raise _with_next_start(failure, config, options) from failure
                again = f"all ranks are started again (restart {restart} of {options.max_restarts})"
                tell(f"{failure}\n{again}", error=True)
    raise AssertionError("every attempt returns or raises")


def _run_of(config: Config, options: RunOptions) -> str | None:
    """Return the directory of a run; a verb that passes its ranks more than a configuration has none."""
    return None if options.arguments else config.output_dir


def _with_next_start(failure: DistributedFailure, config: Config, options: RunOptions) -> DistributedFailure:
    """Return `failure` with the sentence that the same command continues the run, if it does."""
    run = _run_of(config, options)
    newest = None if run is None or config.checkpoint.resume != "auto" else newest_checkpoint(run)
    if newest is None:
        return failure
    return DistributedFailure(f"{failure}\nthe same command continues from {newest}", key=failure.key)


def _continued(config: Config) -> Config:
    """Return the configuration of a restart: from the newest checkpoint of this run, if it has written one."""
    # `resume_weights_only` prefers the run's own checkpoints anyway.
    if newest_checkpoint(config.output_dir) is None or config.checkpoint.resume_weights_only:
        return config
    checkpoint = config.checkpoint.model_copy(update={"resume": "auto"})
    return config.model_copy(update={"checkpoint": checkpoint})


def open_store() -> "TCPStore":
    """Return the store where the ranks meet, on a port that the system chooses, which no other machine reaches."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with socket.create_server((LOCALHOST, 0), backlog=socket.SOMAXCONN) as listening:
        port, descriptor = listening.getsockname()[1], listening.detach()
    return TCPStore(LOCALHOST, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
