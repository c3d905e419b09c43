"""Start the local ranks of one attempt together, watch them, and end them together.

PyTorch's elastic agent does not serve here: at a rank's end it sends SIGTERM to the others at once and SIGKILL 30
seconds later, which would cut short a checkpoint that is being saved, and end a hung rank before anybody could ask it
where it is. Here a request to stop is waited for as long as the ranks take, and a failure is examined before anything
is ended.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from expertmesh.config.errors import DistributedFailure, ExpertmeshError
from expertmesh.distributed.environment import Rank, processors
from expertmesh.launcher.hangs import RankSnapshot, hang_error, is_stopped, read_stack, timed_out
from expertmesh.launcher.rank_files import SHOW_STACK, failures_in, progress_file, root_cause, stack_file
from expertmesh.training.control import (
    ONE_REQUEST_SECONDS,
    STOP_SIGNALS,
    Progress,
    RankStatus,
    StopReason,
    StopState,
    handling,
)

POLL_SECONDS = 0.05
# How long ranks get to fail by themselves after the first has: an error that all share is then known to be shared.
GRACE_SECONDS = 3.0
STACK_SECONDS = 2.0
# How long a stopped rank, told to go on, gets to save when the job is asked to end.
STOPPED_SECONDS = 5.0
# A process in an uninterruptible wait (a dead disk or driver) does not even end by SIGKILL; the launcher still must.
KILL_SECONDS = 30.0
# Beside those that a run waits to save by.
HANDLED_SIGNALS = (*STOP_SIGNALS, signal.SIGHUP, signal.SIGQUIT)
_ENDED_WELL = (0, 130, 143)


@dataclass(slots=True)
class StopRequests:
    """Requests of signals to the launcher; each is a signal's number, 0 for none."""

    requested: int = 0
    """The request to stop when the ranks can."""
    forced: int = 0
    """The request to stop at once."""
    _requested_at: float = 0.0

    @property
    def exit_code(self) -> int:
        """The exit code of a launcher that ends by the request."""
        number = self.forced or self.requested
        return StopReason(number).exit_code if number in STOP_SIGNALS else 128 + number

    @property
    def seconds_ago(self) -> float:
        """Return the seconds since the first request."""
        return time.monotonic() - self._requested_at

    def receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number in STOP_SIGNALS and not self.requested:
            self.requested, self._requested_at = number, now
        elif number not in STOP_SIGNALS or now - self._requested_at > ONE_REQUEST_SECONDS:
            self.forced = number


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Record the signals that stop a job instead of ending by them. In the main thread only."""
    requests = StopRequests()
    with handling(HANDLED_SIGNALS, requests.receive):
        yield requests


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

    def has_saved(self) -> bool:
        """Return whether all ranks have stopped as requested, with a checkpoint."""
        return all(rank.progress.stop_state is StopState.STOPPED for rank in self.ranks)

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
        late = self.requests.seconds_ago > STOPPED_SECONDS
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
        waited = timed_out(first) if first else stuck or -signal.SIGABRT in self.exit_codes.values()
        snapshots = self._snapshots() if waited else []
        deadline = time.monotonic() + (0 if stuck else GRACE_SECONDS)
        while self._running() and time.monotonic() < deadline and not self._ended_by_request():
            time.sleep(POLL_SECONDS)
        failures, statuses = failures_in(self.directory), self._statuses()
        lasting = {rank.rank for rank in self._running()} - {failure.rank for failure in failures}
        snapshots = [replace(each, still_running=each.rank in lasting) for each in snapshots]
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
