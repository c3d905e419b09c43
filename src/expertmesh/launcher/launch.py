"""Run a job's function on the ranks of the surrounding job, or on N local processes.

If a launcher (torchrun, srun, Ray) has made this process one rank, it runs the job's function itself. Otherwise it
starts N ranks on this machine, passes their output through, starts all of them again after a failure if it may, and
ends as they do: with one error message for all of them, its exit code, and no process or file left. In a job on several
machines (Kubeflow's pods) each machine has one such launcher, and the first of them holds the store where ranks meet: a
launcher holds it so that no rank's end disturbs the last messages of the others. On one machine the system chooses its
port. On several it is at the address that all have, and none starts ranks before all are known to start equally many.
"""

import contextlib
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
from expertmesh.distributed.environment import LOCALHOST, Node, Rank, find_place, processors
from expertmesh.distributed.job_store import JobStore
from expertmesh.io.terminal import lasting_output, plural, print_log, tell
from expertmesh.launcher.rank_files import newest_checkpoint, stopped_sentence
from expertmesh.launcher.supervise import Attempt, StopRequests, start_ranks, stop_requests
from expertmesh.launcher.torchrun import TorchrunAgent, refuse_elastic, run_here
from expertmesh.launcher.worker import lazy_imports
from expertmesh.training.control import Control

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


log = logging.getLogger(__name__)

CPU_RANKS = 2
_PREFIX = "expertmesh/"
POLL_SECONDS = 0.1
THIS_MACHINE = Node("expertmesh", 0, 1, None, LOCALHOST, 0)


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
        if isinstance(place, Rank):
            if place.rank == 0:
                by = "" if place.starter == "RANK" else f" that {place.starter} has started"
                log.info(f"starting   rank 0 of {place.world_size}{by}: importing torch and transformers")
            launch_id = TorchrunAgent.of(os.environ).run_id if options.elastic is not None else None
            return run_here(config, function, Control(deadline=deadline, launch=launch_id, **options.for_control()))
        for name in ("RANK", "WORLD_SIZE"):  # where they count machines, and this process is no rank
            os.environ.pop(name, None)
        log.info("starting   importing torch" + (" and transformers, checking the configuration" if preflight else ""))
        node = place or THIS_MACHINE
        try:
            with lazy_imports():
                ranks = local_ranks(options.nproc or node.ranks)
            if preflight is not None:
                preflight(config, ranks * node.count, ranks)
            where = "" if node.count == 1 else f" (node {node.number} of {node.count}, {node.address}:{node.port})"
            each = "each of which imports torch and transformers"
            log.info(f"           {plural(ranks, 'rank')} on this machine{where}, {each}")
            return launch(config, ranks, function, options, deadline, node)
        except KeyboardInterrupt:  # outside of `launch`, which notes it
            tell(stopped_sentence(signal.SIGINT, None, _run_of(config, options)), error=True)
            raise


def join_job(options: RunOptions) -> Rank | Node | None:
    """Return this process's place in a job that a launcher has started; a rank's is written into its environment.

    Raises `InputError` if the environment contradicts itself or an option.
    """
    place = find_place(options.nproc)
    if isinstance(place, Rank):
        _check_rank(options, place)
        place.export()
    elif place is not None and options.nproc not in (None, place.ranks or options.nproc):
        raise InputError(
            f"--nproc is {options.nproc}, but PET_NPROC_PER_NODE is {place.ranks}; leave one of them out",
            key="launch.nproc-differs",
        )
    if options.elastic is not None:
        refuse_elastic(options.elastic, place, os.environ)
    machines = place.count if isinstance(place, Node) else 1
    if options.max_restarts and (isinstance(place, Rank) or machines > 1):
        raise InputError(
            "--max-restarts is for local ranks; under torchrun, give its own --max-restarts to torchrun, and let other "
            "launchers start a job on several machines again",
            key="launch.restarts-in-job",
        )
    return place


def _check_rank(options: RunOptions, place: Rank) -> None:
    here = place.local_world_size or 1
    if options.nproc not in (None, here):
        by = "the launcher that set RANK" if place.starter == "RANK" else place.starter
        raise InputError(
            f"--nproc is {options.nproc}, but {by} has started {plural(here, 'rank')} on this machine; leave "
            "--nproc out, or let one process a machine start the ranks",
            key="launch.nproc-differs",
        )
    if place.starter == "SLURM" and here == 1 and options.nproc is None and (devices := _accelerators()) > 1:
        raise InputError(
            f"srun has started one task on this machine, which has {devices} accelerators; start one for each (srun "
            f"--ntasks-per-node {devices}), or let the task start the ranks here (--nproc {devices})",
            key="launch.idle-accelerators",
        )


def job_size(nproc: int | None = None) -> tuple[int, int | None]:
    """Return how many ranks a job started here has, and how many of them are on this machine; None if it is unknown.

    They are those of the surrounding job, or as many as `run` would start.
    """
    place = join_job(RunOptions(nproc=nproc))
    if isinstance(place, Rank):
        return place.world_size, place.local_world_size
    node = place or THIS_MACHINE
    ranks = local_ranks(nproc or node.ranks)
    return ranks * node.count, ranks


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
    node: Node = THIS_MACHINE,
) -> int:
    """Call `function` (`module:function`) on `ranks` local processes and wait for them.

    With `node` they are the ranks of one of its machines, which all call this with as many `ranks`.

    Returns 0, or 130 or 143 if the job was stopped. Raises the `ExpertmeshError` that the job failed by,
    `DistributedFailure` for a rank that died or hung; only that one is tried again, as often as `options` allow.
    `deadline` is of `time.monotonic()`.
    """
    options = options or RunOptions()
    control = {"deadline": deadline, "launch": uuid.uuid4().hex, **options.for_control()}
    worker = [function, str(os.getpid()), json.dumps(control)]
    rendezvous = Rendezvous(ranks, node, config.distributed.first_step_timeout_seconds)
    with stop_requests() as requests, tempfile.TemporaryDirectory(prefix="expertmesh-") as temporary:
        config_path = Path(temporary, "config.yaml")
        for restart in itertools.count(1):
            config_path.write_text(dump_config(config if restart == 1 else _continued(config)), encoding="utf-8")
            directory = Path(temporary, f"attempt-{restart}")
            directory.mkdir()
            try:
                attempt = Attempt([], directory, requests, config.distributed.timeout_seconds)
                # A store for each attempt: in an old one ranks would read addresses of the dead.
                if (store := rendezvous.open(requests)) is None:
                    code = requests.exit_code
                else:
                    places, arguments = rendezvous.places(store.port), [str(config_path), str(directory), *worker]
                    attempt.ranks = start_ranks(arguments, places, directory)
                    code = attempt.supervise()
                if code and not attempt.has_saved():
                    number = requests.forced or requests.requested
                    at = attempt.ranks[0].progress.status() if attempt.ranks else None
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


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The rendezvous of a job's launchers."""

    ranks: int
    """Ranks on each machine."""
    node: Node
    """This machine."""
    timeout_seconds: float
    """The most that the other launchers are waited for."""

    def places(self, port: int) -> list[Rank]:
        """Return the places of the ranks on this machine, which meet at `port`."""
        node, world = self.node, self.ranks * self.node.count
        ranks = range(self.ranks * node.number, self.ranks * (node.number + 1))
        return [
            Rank(node.starter, rank, world, local, self.ranks, node.address, port) for local, rank in enumerate(ranks)
        ]

    def open(self, requests: StopRequests) -> "TCPStore | None":
        """Return the store, once the launchers of all machines are there; None on a request to stop.

        Raises `InputError` if this machine cannot hold it or another machine starts another number of ranks, and
        `DistributedFailure` for a machine that does not come.
        """
        from torch.distributed import DistError, DistNetworkError

        node, deadline = self.node, time.monotonic() + self.timeout_seconds
        if node.number == 0:
            try:
                store = JobStore(self._hold(node), _PREFIX)
            except (DistNetworkError, OSError) as error:
                raise InputError(
                    f"MASTER_PORT {node.port} cannot be had on this machine ({str(error).splitlines()[0]}); end what "
                    "uses it, or set another one on every machine",
                    key="launch.port-taken",
                ) from error
        elif _reached(node, deadline, requests):
            left = max(1.0, deadline - time.monotonic())
            store = JobStore.connect(node.address, node.port, _PREFIX, left)
        else:
            return None
        if node.count == 1:
            return store.store
        try:
            return store.store if self._all_came(store, deadline, requests) else None
        except DistError as error:
            raise DistributedFailure(
                f"node 0, which this machine met at {node.address}:{node.port}, has ended; its own output says why",
                key="launch.node-missing",
            ) from error

    def _hold(self, node: Node) -> "TCPStore":
        """Open the store; of a job on this machine alone at an address that no other machine reaches."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        if node.count > 1:
            return TCPStore(LOCALHOST, node.port, is_master=True, wait_for_workers=False)
        with socket.create_server((LOCALHOST, node.port), backlog=socket.SOMAXCONN) as listening:
            port, descriptor = listening.getsockname()[1], listening.detach()
        return TCPStore(LOCALHOST, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)

    def _all_came(self, store: JobStore, deadline: float, requests: StopRequests) -> bool:
        """Compare numbers of ranks with the other launchers; return False on a request to stop before all are there."""
        node = self.node
        keys = [f"node-{number}" for number in range(node.count)]
        store.put(keys[node.number], self.ranks)
        while not store.has(*keys):
            if requests.requested or requests.forced:
                return False
            if time.monotonic() > deadline:
                missing = [str(number) for number, key in enumerate(keys) if not store.has(key)]
                raise DistributedFailure(
                    f"node {', '.join(missing)} of {node.count} did not come to {node.address}:{node.port} within "
                    f"{self.timeout_seconds:.0f} s (distributed.first_step_timeout_seconds)",
                    key="launch.node-missing",
                )
            time.sleep(POLL_SECONDS)
        ranks = [store.get(key) for key in keys]
        read = store.count("read")
        # The store ends with this process: the others read it first.
        while node.number == 0 and read < node.count and time.monotonic() < deadline:
            if requests.requested or requests.forced:
                return False
            time.sleep(POLL_SECONDS)
            read = store.count("read", 0)
        if len(set(ranks)) > 1:
            raise InputError(
                f"the machines of this job start {', '.join(map(str, ranks))} ranks; start the same number on each "
                "(--nproc, or PET_NPROC_PER_NODE)",
                key="launch.local-world-sizes-differ",
            )
        return True


def _reached(node: Node, deadline: float, requests: StopRequests) -> bool:
    """Wait until the first machine's launcher listens; return False on a signal, which torch's own wait ignores."""
    while not (requests.requested or requests.forced):
        with contextlib.suppress(OSError), socket.create_connection((node.address, node.port), timeout=1):
            return True
        if time.monotonic() > deadline:
            raise DistributedFailure(
                f"node 0 cannot be reached at {node.address}:{node.port}; start it, or correct MASTER_ADDR and "
                "MASTER_PORT",
                key="launch.node-missing",
            )
        time.sleep(POLL_SECONDS)
    return False
