"""Run a job's function on the ranks of the surrounding job, or on N local processes.

If a launcher (torchrun, srun, Ray) has made this process one rank, it runs the job's function itself. Otherwise it
starts N ranks on this machine, passes their output through, starts all of them again after a failure if it may, and
ends as they do: with one error message for all of them, its exit code, and no process or file left. The launcher holds
the store where ranks meet, so that no rank's end disturbs the last messages of the others. Several machines are
torchrun's or srun's.

PyTorch's elastic agent does not serve here: at a rank's end it sends SIGTERM to the others at once and SIGKILL 30
seconds later, which would cut short a checkpoint that is being saved, and end a hung rank before anybody could ask it
where it is. Here a request to stop is waited for as long as the ranks take, and a failure is examined before anything
is ended.
"""

import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from expertmesh.config import Config, dump_config
from expertmesh.config.errors import DistributedFailure, ExpertmeshError, InputError
from expertmesh.distributed.environment import LOCALHOST, Rank, find_place, processors, too_few_accelerators
from expertmesh.io.terminal import lasting_output, plural, print_log, tell
from expertmesh.launcher.hangs import RankSnapshot, hang_error, is_stopped, lost_peer, read_stack, timed_out
from expertmesh.launcher.rank_files import (
    SHOW_STACK,
    continued_run,
    failures_in,
    newest_checkpoint,
    progress_file,
    root_cause,
    stack_file,
    stopped_sentence,
)
from expertmesh.launcher.torchrun import TorchrunAgent, refuse_elastic, run_here
from expertmesh.launcher.worker import lazy_imports
from expertmesh.training.control import (
    ONE_REQUEST_SECONDS,
    STOP_SIGNALS,
    Control,
    Progress,
    RankStatus,
    StopReason,
    StopState,
    handling,
)

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


log = logging.getLogger(__name__)

CPU_RANKS = 2
POLL_SECONDS = 0.05
# How long ranks get to fail by themselves after the first has: an error that all share is then known to be shared.
GRACE_SECONDS = 3.0
STACK_SECONDS = 2.0
# How long a stopped rank, once continued, gets to save when the job is requested to end.
STOPPED_SECONDS = 5.0
# A process in an uninterruptible wait (a dead disk or driver) does not even end by SIGKILL; the launcher still must.
KILL_SECONDS = 30.0
# Beside those that a run waits to save by.
HANDLED_SIGNALS = (*STOP_SIGNALS, signal.SIGHUP, signal.SIGQUIT)
_ENDED_WELL = (0, 130, 143)


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
            tell(stopped_sentence(signal.SIGINT, None, continued_run(config, options.arguments)), error=True)
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
            f"--ntasks-per-node {devices}), or let the task start torchrun --nproc-per-node {devices}, with "
            "--nnodes, --rdzv-backend c10d and --rdzv-endpoint on several machines",
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
        raise too_few_accelerators(f"--nproc is {nproc}", devices)
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
    requests = StopRequests()
    with handling(HANDLED_SIGNALS, requests.receive), tempfile.TemporaryDirectory(prefix="expertmesh-") as temporary:
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
                if code and not all(rank.progress.stop_state is StopState.STOPPED for rank in started):
                    number = requests.forced or requests.requested
                    at = started[0].progress.status()
                    tell(stopped_sentence(number, at, continued_run(config, options.arguments)), error=True)
                return code
            except DistributedFailure as failure:
                late = deadline is not None and time.monotonic() >= deadline
                if restart > options.max_restarts or requests.requested or late:
                    raise _with_next_start(failure, config, options) from failure
                again = f"all ranks are started again (restart {restart} of {options.max_restarts})"
                tell(f"{failure}\n{again}", error=True)
    raise AssertionError("every attempt returns or raises")


def _with_next_start(failure: DistributedFailure, config: Config, options: RunOptions) -> DistributedFailure:
    """Return `failure` with the sentence that the same command continues the run, if it does."""
    run = continued_run(config, options.arguments)
    newest = None if run is None else newest_checkpoint(run)
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


@dataclass(slots=True)
class StopRequests:
    """Requests of signals to the launcher; each is a signal's number, 0 for none."""

    requested: int = 0
    """The request to stop when the ranks can."""
    forced: int = 0
    """The request to stop at once."""
    requested_at: float = 0.0
    """`time.monotonic()` of the first one."""

    @property
    def exit_code(self) -> int:
        """The exit code of a launcher that ends by the request."""
        number = self.forced or self.requested
        return StopReason(number).exit_code if number in STOP_SIGNALS else 128 + number

    def receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number in STOP_SIGNALS and not self.requested:
            self.requested, self.requested_at = number, now
        elif number not in STOP_SIGNALS or now - self.requested_at > ONE_REQUEST_SECONDS:
            self.forced = number


@dataclass(slots=True)
class LocalRank:
    """One started rank. It leads a session of its own, so that a terminal's Ctrl-C reaches the launcher alone."""

    rank: int
    process: "subprocess.Popen[bytes]"
    progress: Progress

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """End the rank now, with everything that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def ask_for_stack(self) -> bool:
        """Let it write its Python stacks, once it runs, even if it is stopped; return whether it was."""
        stopped = is_stopped(self.process.pid)
        if self.runs and self.progress.status().process:
            self.process.send_signal(SHOW_STACK)
            self.process.send_signal(signal.SIGCONT)  # harmless to a process that is not stopped
        return stopped


@dataclass(slots=True)
class Attempt:
    """All ranks of one attempt. `supervise` returns when none of them runs any more."""

    ranks: Sequence[LocalRank]
    directory: Path
    requests: StopRequests
    timeout_seconds: float
    """Seconds that a rank may be stopped before the job ends."""
    exit_codes: dict[int, int] = field(default_factory=dict)
    """Exit codes of the ranks that ended by themselves."""
    _moved: dict[int, float] = field(default_factory=dict)
    _looked_at: float = 0.0

    def supervise(self) -> int:
        """Wait for the ranks; return 0, or 130 or 143 if they were stopped. Raises what the job failed by."""
        try:
            while self._running() and not self._failed() and not self._stuck():
                if self._must_end():
                    return self.requests.exit_code
                time.sleep(POLL_SECONDS)
            if not self._failed() and not self._running():
                return max(self.exit_codes.values())
            error = self._find_cause()
            if self._ended_by_request():
                return self.requests.exit_code
            raise error
        finally:  # end all ranks and everything that they have started
            for rank in self._running():
                rank.kill()
            deadline = time.monotonic() + KILL_SECONDS
            for rank in self.ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.process.wait(max(0.0, deadline - time.monotonic()))

    def _running(self) -> list[LocalRank]:
        for rank in self.ranks:
            if not rank.runs and rank.rank not in self.exit_codes:
                code = rank.process.wait()
                if code > 0 and code in _ENDED_WELL and rank.progress.stop_state is not StopState.STOPPED:
                    code = 128 - code  # a second signal has ended it in its loop
                self.exit_codes[rank.rank] = code
                if code not in _ENDED_WELL:
                    rank.kill()  # what it had started
        return [rank for rank in self.ranks if rank.runs]

    def _failed(self) -> bool:
        return any(code not in _ENDED_WELL for code in self.exit_codes.values()) or bool(failures_in(self.directory))

    def _must_end(self) -> bool:
        """Pass a request to stop on to the ranks; return whether it cannot wait, because one is not in its loop."""
        if self.requests.forced:
            return True
        if not self.requests.requested:
            return False
        for rank in self._running():
            if rank.progress.stop != self.requests.requested:
                rank.progress.stop = self.requests.requested
                rank.process.send_signal(signal.SIGCONT)  # one that is stopped could not save
        late = time.monotonic() - self.requests.requested_at > STOPPED_SECONDS
        return any(
            rank.progress.stop_state is StopState.NOT_ACCEPTING or (late and is_stopped(rank.process.pid))
            for rank in self._running()
        )

    def _stuck(self) -> bool:
        """Return whether a rank has been stopped, or waited for a device or disk, for as long as a collective may take.

        Its peers may not wait for it: there are none, or they are stuck as well.
        """
        now = time.monotonic()
        if now < self._looked_at + 1:
            return False
        self._looked_at = now
        for rank in self._running():
            if not is_stopped(rank.process.pid, "TtD"):
                self._moved[rank.rank] = now
        return any(now - self._moved.setdefault(rank.rank, now) > self.timeout_seconds for rank in self._running())

    def _ended_by_request(self) -> bool:
        """Return whether a request has ended ranks: a signal to all processes of a job may end those that are not in
        their loop before the launcher does.
        """
        requested = self.requests.requested
        return self.requests.forced > 0 or (requested > 0 and -requested in self.exit_codes.values())

    def _find_cause(self) -> ExpertmeshError:
        """Examine the ranks that still run, give them time to fail as well, and return the cause."""
        first = next(iter(failures_in(self.directory)), None)
        stuck = first is None and not self._failed()
        # A rank that lost its peer may say so before the peer says that it timed out.
        lost = first is not None and lost_peer(first)
        waited = lost or (timed_out(first) if first else stuck or -signal.SIGABRT in self.exit_codes.values())
        snapshots = self._snapshots() if waited else []
        deadline = time.monotonic() + (0 if stuck else GRACE_SECONDS)
        while self._running() and time.monotonic() < deadline and not self._ended_by_request():
            time.sleep(POLL_SECONDS)
        failures, statuses = failures_in(self.directory), self._statuses()
        lasting = {rank.rank for rank in self._running()} - {failure.rank for failure in failures}
        snapshots = [replace(each, still_running=each.rank in lasting) for each in snapshots]
        if lost:
            first = next(filter(timed_out, failures), None)
            waited = first is not None
        if waited and (error := hang_error(snapshots, first, statuses[first.rank] if first else None)):
            return error
        if not failures and not self.exit_codes:
            return DistributedFailure(f"a rank did not move for {self.timeout_seconds:.0f} s", key="rank.hung")
        return root_cause(failures, self.exit_codes, statuses)

    def _snapshots(self) -> list[RankSnapshot]:
        """Return snapshots of the ranks that run and have not failed."""
        failed = {failure.rank for failure in failures_in(self.directory)}
        running = [rank for rank in self._running() if rank.rank not in failed]
        taken, statuses = time.monotonic(), self._statuses()
        stopped = {rank.rank: rank.ask_for_stack() for rank in running}
        deadline = taken + STACK_SECONDS
        snapshots = []
        for rank in running:
            status = statuses[rank.rank]
            stack = read_stack(stack_file(self.directory, rank.rank), status.main_thread, deadline - time.monotonic())
            snapshots.append(RankSnapshot(rank.rank, status, taken, stopped[rank.rank], stack, still_running=True))
        return snapshots

    def _statuses(self) -> dict[int, RankStatus]:
        return {rank.rank: rank.progress.status() for rank in self.ranks}


def start_ranks(arguments: Sequence[str], places: Sequence[Rank], directory: Path) -> list[LocalRank]:
    """Start a process of launcher/worker.py with `arguments` for each rank."""
    environment = {
        "OMP_NUM_THREADS": str(max(1, processors() // len(places))),
        **os.environ,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is up already: rank 0 must not start one
    }
    started: list[LocalRank] = []
    try:
        for place in places:
            own: dict[str, str] = {}
            place.export(own)
            progress = Progress(progress_file(directory, place.rank))
            process = subprocess.Popen(
                [sys.executable, "-u", "-m", "expertmesh.launcher.worker", *arguments],
                env={**environment, **own},
                start_new_session=True,
            )
            started.append(LocalRank(place.rank, process, progress))
    except BaseException:
        for rank_started in started:
            rank_started.kill()
            rank_started.process.wait()
        raise
    return started
