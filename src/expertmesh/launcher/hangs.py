"""Find the rank that the others waited for in vain, with its step, its phase and its Python stack.

A rank that hangs shows only in the others, whose collectives time out. At the first timeout our launcher takes a
snapshot of every rank that still runs: is it stopped by a signal, does its heartbeat go on, is its stack inside a
collective?

Under torchrun or srun no single launcher of ours sees all ranks (`Liveness`). There each rank has a connection of its
own to the store where the job met, and a thread that waits there. The first rank whose collective times out asks all
others: every rank that can answers with its place and its Python stack, whatever its main thread does. That rank names
the one that the others waited for, or those that did not answer; all ranks end by that one sentence. Ranks that would
wait on are ended, so that a lost network is a failure and no hang.
"""

import logging
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from expertmesh.config.errors import DistributedFailure
from expertmesh.distributed.environment import Rank
from expertmesh.distributed.job_store import JobStore
from expertmesh.launcher.rank_files import RankFailure
from expertmesh.training.control import Progress, RankStatus, StopState

log = logging.getLogger(__name__)
# Of a long stack: where it is, and from where in the training loop that was called.
INNERMOST, OUTERMOST = 8, 6
# A heartbeat comes twice a second; a busy machine may delay it.
SILENT_SECONDS = 5.0
# gloo, of a collective or of another one that was under way; NCCL's watchdog; the store, before a group is up.
_TIMEOUT = re.compile(
    r"Timed out waiting \d+ms|Application timeout|collective operation timeout|wait timeout after|waiting for clients"
)
# gloo, of a peer that has ended, or has closed its connections because its own collective timed out.
_PEER_LOST = re.compile(r"Connection (closed|reset) by peer|Broken pipe")
# Where the Python stack ends of a rank that waits for its peers.
_COLLECTIVES = (
    "/torch/distributed/",
    "/expertmesh/distributed/",
    "/expertmesh/experts/",
    "/expertmesh/training/exchange.py",
)
# Where the stack of every rank begins.
_STARTERS = ("<frozen runpy>", f"launcher{os.sep}worker.py")
# And of one that waits for its device, so for the collectives given to it; backward runs on other threads then.
_DEVICE_WAITS = ("/torch/accelerator/", "/torch/cuda/", "/torch/autograd/graph.py")
STACKS_FILE = "stacks.txt"
# How long ranks get to answer, and to connect for it; how long they get to end by themselves afterwards.
ANSWER_SECONDS = 5.0
LEAVE_SECONDS = 5.0
# How soon the rank that timed out asks the others, after those connected to it have seen it close.
_CALLED_SECONDS = 1.0
_CALLED, _VERDICT = "called", "verdict"
_EVER_SECONDS = 365 * 86400.0
_NAMED = 8


@dataclass(frozen=True, slots=True)
class RankSnapshot:
    """One rank at the time when another timed out."""

    rank: int
    """The rank."""
    status: RankStatus
    """The status that it wrote last."""
    taken: float
    """`time.monotonic()` of the snapshot."""
    stopped: bool
    """True if it was stopped (SIGSTOP)."""
    stack: tuple[str, ...]
    """Lines of its Python stack, innermost call first."""
    still_running: bool
    """True if it ran on after the others had had time to fail as well."""

    @property
    def without_heartbeat(self) -> bool:
        return self.taken - self.status.heartbeat > SILENT_SECONDS

    @property
    def outside_collectives(self) -> bool:
        """Return whether the stack shows that the rank does not wait for other ranks."""
        if not self.stack or any(name in self.stack[0] for name in _DEVICE_WAITS):
            return False
        return not any(name in line for line in self.stack[:2] for name in _COLLECTIVES)

    def __str__(self) -> str:
        if self.stopped:
            state = "it was stopped by a signal (SIGSTOP)"
        elif self.without_heartbeat:
            state = f"its process had not run for {self.taken - self.status.heartbeat:.0f} s"
        else:
            state = "its process was running"
        if not self.stack:
            return f"{state}; its Python stack could not be had"
        return "\n".join([f"{state}; where it was, innermost call first:", *self.stack])


def timed_out(failure: RankFailure) -> bool:
    """Return whether this rank failed because it had waited too long for others."""
    return bool(_TIMEOUT.search(failure.message))


def lost_peer(failure: RankFailure) -> bool:
    """Return whether this rank failed because another ended, or had closed its connections after it timed out."""
    return bool(_PEER_LOST.search(failure.message))


def hang_error(
    snapshots: Sequence[RankSnapshot], first: RankFailure | None, first_status: RankStatus | None
) -> DistributedFailure | None:
    """Return the error that names the rank which hung, or None if none did. `first`: the rank that timed out, and
    where.

    A stopped rank goes on when its stack is requested, and a slow one by itself, so both may have failed since.
    Without `first` (a rank aborted, as NCCL's watchdog lets it) only a rank that clearly does not wait is blamed.
    """
    lasting = [each for each in snapshots if each.still_running]
    suspects = [each for each in snapshots if each.stopped] or [each for each in snapshots if each.without_heartbeat]
    suspects = suspects or [each for each in lasting if each.outside_collectives]
    if first_status is not None:
        suspects = suspects or lasting or [each for each in snapshots if _behind(each, first_status)]
    if not suspects:
        return None
    blamed = min(suspects, key=lambda each: (each.status.step, each.status.since))
    also = [str(each.rank) for each in suspects if each is not blamed and (each.stopped or each.without_heartbeat)]
    others = f" (and so did rank {', '.join(also)})" if also else ""
    still = f"it had not moved for {blamed.taken - blamed.status.since:.0f} s"
    waited = f"\nrank {first.rank} gave up waiting {first_status}: {first.message}" if first else ""
    return DistributedFailure(
        f"rank {blamed.rank} hung {blamed.status}{others}: {still}; {blamed}{waited}", key="rank.hung"
    )


def _behind(snapshot: RankSnapshot, other: RankStatus) -> bool:
    """Return whether the rank is where the other has been before, since about the time that the other began to wait.

    That shows a rank which went on, and failed, after the others had timed out.
    """
    here = snapshot.status
    apart = (here.step, here.phase) != (other.step, other.phase) and here.step <= other.step
    waited_long = snapshot.taken - here.since > (snapshot.taken - other.since) / 2
    return snapshot.outside_collectives and apart and waited_long


def is_stopped(process: int, states: str = "Tt") -> bool:
    """Return whether a signal has stopped the process (states T and t; D: it waits for a disk). Only Linux shows it."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in states
    except OSError:
        return False


def read_stack(file: Path, main_thread: int, seconds: float) -> tuple[str, ...]:
    """Return the main thread's part of the stacks that were requested from a rank; wait at most `seconds` for it."""
    deadline = time.monotonic() + seconds
    while True:
        lines = _stack_of(file, main_thread)
        if lines or time.monotonic() > deadline:
            return lines
        time.sleep(0.02)


def _stack_of(file: Path, main_thread: int) -> tuple[str, ...]:
    """Return the stack, empty until it is complete: the rank may be in the middle of writing."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    stack: list[str] = []
    inside = False
    for line in text.splitlines(keepends=True):
        if header := re.match(r"(?:Current thread|Thread) 0x([0-9a-f]+)", line):
            inside = int(header[1], 16) == main_thread
        elif inside and line.startswith("  ") and line.endswith("\n"):
            stack.append(line.rstrip())
    # faulthandler shows a hundred calls at most, then three dots.
    complete = re.search(r"_run_module_as_main\n|^  \.\.\.$", "\n".join(stack) + "\n", re.MULTILINE) is not None
    return shortened(stack) if complete else ()


def shortened(stack: Sequence[str]) -> tuple[str, ...]:
    """Return both ends of a long stack, innermost line first, without the lines that start a rank."""
    kept = [line for line in stack if not any(name in line for name in _STARTERS)]
    if len(kept) > INNERMOST + OUTERMOST + 1:
        kept = [*kept[:INNERMOST], "  ...", *kept[-OUTERMOST:]]
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class Answer:
    """A rank's answer about itself."""

    host: str
    """The name of its machine."""
    step: int
    """The optimizer step that it is in."""
    phase: str
    """The phase that it is in."""
    since: float
    """Seconds in its phase."""
    stack: tuple[str, ...]
    """Lines of its Python stack, innermost call first."""
    failed: bool
    """True if it has failed already."""

    def snapshot(self, rank: int) -> RankSnapshot:
        """Return the answer as a snapshot of one machine's launcher, by this machine's clock."""
        now = time.monotonic()
        status = RankStatus(1, 0, now - self.since, self.step, self.phase, now, StopState.NOT_ACCEPTING)
        return RankSnapshot(rank, status, now, stopped=False, stack=self.stack, still_running=True)


@dataclass
class Liveness:
    """One rank's part in finding the rank that hangs."""

    place: Rank
    progress: Progress
    attempt: str
    """The same for all ranks of one start, and another in the next."""
    stacks: Path
    """The file for all stacks."""
    report: Callable[[DistributedFailure], None]
    """Called with the verdict in a rank that is ended."""
    _main_thread: int = field(default_factory=threading.get_ident)
    _failed: bool = False

    def verdict_on(self, error: BaseException) -> DistributedFailure | None:
        """Return the error that ends all ranks, if `error` shows that this rank timed out or lost a peer that did."""
        failure = RankFailure.of(self.place.rank, error)
        waited = timed_out(failure)
        if not waited and not lost_peer(failure):
            return None
        self._failed = True
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        found: list[DistributedFailure | None] = []
        # A store behind a network that is lost may not even time out.
        ask = threading.Thread(target=lambda: found.append(self._ask(message, waited=waited)), daemon=True)
        ask.start()
        ask.join(3 * ANSWER_SECONDS)
        if found or not waited:
            return found[0] if found else None
        return self._unreachable(message)

    def _ask(self, message: str, *, waited: bool) -> DistributedFailure | None:
        """Return the verdict of the first rank that timed out. That may be this one, if it `waited`."""
        from torch.distributed import DistError

        try:
            store = self._connect(ANSWER_SECONDS)
            if not waited:
                store.wait(_CALLED, _CALLED_SECONDS)
            elif store.count(_CALLED) == 1:
                verdict = judge(self._answers(store), self.place, self.progress.status(), message, self.stacks)
                store.put(_VERDICT, [str(verdict), verdict.key])
                return verdict
            sentence, key = store.wait(_VERDICT, 2 * ANSWER_SECONDS)
        except DistError as error:
            log.debug(f"no rank could be asked where it is: {error}")
            return self._unreachable(message) if waited else None
        return DistributedFailure(sentence, key=key)

    def _answers(self, store: JobStore) -> dict[int, Answer]:
        """Return the answers of all ranks that answer in time."""
        deadline, answers = time.monotonic() + ANSWER_SECONDS, dict[int, Answer]()
        while len(answers) < self.place.world_size and time.monotonic() < deadline:
            for rank in range(self.place.world_size):
                if rank not in answers and (answer := store.get(str(rank))) is not None:
                    answers[rank] = Answer(**answer)
            time.sleep(0.05)
        return answers

    def listen(self, timeout_seconds: float) -> None:
        """Wait for the rank that times out first, answer it, and end by its verdict. In a thread of its own."""
        from torch.distributed import DistError

        try:
            store = self._connect(timeout_seconds)
            store.wait(_CALLED, _EVER_SECONDS)
            status, frame = self.progress.status(), sys._current_frames().get(self._main_thread)
            lines = [f'  File "{f.filename}", line {f.lineno} in {f.name}' for f in traceback.extract_stack(frame)]
            since = time.monotonic() - status.since
            host, stack = socket.gethostname(), shortened(lines[::-1])
            store.put(f"{self.place.rank}", asdict(Answer(host, status.step, status.phase, since, stack, self._failed)))
            sentence, key = store.wait(_VERDICT, 2 * ANSWER_SECONDS)
        except DistError as error:
            # The store has ended with the job or with its machine: then whoever waits for that machine times out.
            log.debug(f"no rank asks any more: {error}")
            return
        time.sleep(LEAVE_SECONDS)
        verdict = DistributedFailure(sentence, key=key)
        self.report(verdict)
        os._exit(verdict.exit_code)

    def _connect(self, seconds: float) -> JobStore:
        address, port = self.place.address, self.place.port
        assert address is not None
        assert port is not None
        return JobStore.connect(address, port, f"expertmesh/liveness/{self.attempt}/", seconds)

    def _unreachable(self, message: str) -> DistributedFailure:
        return DistributedFailure(
            f"rank {self.place.rank} (host {socket.gethostname()}) waited for others in vain "
            f"{self.progress.status()}, and {self.place.address}:{self.place.port}, where the job met, cannot be "
            f"reached from here: that machine or the network to it is lost: {message}",
            key="rank.lost",
        )


def judge(
    answers: Mapping[int, Answer], caller: Rank, status: RankStatus, message: str, stacks: Path
) -> DistributedFailure:
    """Return whom the others waited for, by `answers`; `status` and `message`: of the caller, who gave up first."""
    written = _write(answers, stacks)
    silent = [rank for rank in range(caller.world_size) if rank not in answers]
    if silent:
        named = ", ".join(map(str, silent[:_NAMED])) + " ..." * (len(silent) > _NAMED)
        local = caller.local_world_size
        nodes = sorted({rank // local for rank in silent}) if local and local < caller.world_size else []
        where = f" (node {', '.join(map(str, nodes))} of {caller.world_size // (local or 1)})" if nodes else ""
        return DistributedFailure(
            f"rank {named}{where} did not answer within {ANSWER_SECONDS:.0f} s when the others had waited in vain: "
            "stopped, ended, or their machine or the network to it is lost\n"
            f"rank {caller.rank} gave up waiting {status}: {message}{written}",
            key="rank.lost",
        )
    snapshots = [answer.snapshot(rank) for rank, answer in answers.items() if not answer.failed]
    first = RankFailure(caller.rank, 1, message, "", time.time_ns())
    error = hang_error(snapshots, first, status)
    if error is None:
        sentence = f"all ranks waited in vain; rank {caller.rank} was the first to give up {status}: {message}"
        return DistributedFailure(sentence + written, key="rank.hung")
    return DistributedFailure(str(error) + written, key=error.key)


def _write(answers: Mapping[int, Answer], file: Path) -> str:
    """Write every stack into `file`; return what there is to report about it."""
    lines: list[str] = []
    for rank, answer in sorted(answers.items()):
        where = f"at step {answer.step}, {answer.phase}" if answer.step else f"before the first step, {answer.phase}"
        lines += [f"rank {rank} on {answer.host} {where}, for {answer.since:.0f} s:", *answer.stack, ""]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines), encoding="utf-8")
    except OSError as error:
        return f"\nstacks of all ranks could not be written: {error}"
    return f"\nstacks of all ranks: {file}"


def open_liveness(
    progress: Progress,
    config: Any,
    report: Callable[[DistributedFailure], None],
) -> Liveness | None:
    """Return this rank's part by its environment, listening; None if there is no other rank, or no store."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return None
    local = os.environ.get("LOCAL_WORLD_SIZE")
    place = Rank(
        "", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None, int(local) if local else None,
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
    )  # fmt: skip
    # A store that outlives an attempt keeps its answers; agents that keep none may count attempts differently.
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if kept else "0"
    found = Liveness(place, progress, attempt, Path(config.output_dir, STACKS_FILE), report)
    seconds = config.distributed.first_step_timeout_seconds  # for the store to be there
    threading.Thread(target=found.listen, args=(seconds,), name="liveness", daemon=True).start()
    return found
