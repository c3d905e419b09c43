"""Find the hanging rank of a job that no single launcher of ours sees: under torchrun or srun, or on several machines.

Beside all process groups each rank has a connection to the store where the job met, and a thread that waits there. The
first rank whose collective times out asks all others: every rank that can answers with its place and its Python stack,
whatever its main thread does. That rank names the one that the others waited for, or those that did not answer; all
ranks end by that one sentence. Ranks that would wait on are ended, so that a lost network is a failure and no hang.
"""

import datetime
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertmesh.config.errors import DistributedFailure
from expertmesh.distributed.environment import Rank
from expertmesh.launcher.hangs import RankSnapshot, hang_error, shortened, timed_out
from expertmesh.launcher.rank_files import RankFailure
from expertmesh.training.progress import Progress, RankStatus, StopState

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

log = logging.getLogger(__name__)

STACKS_FILE = "stacks.txt"
# How long ranks get to answer, and to connect for it; how long they get to end by themselves afterwards.
ANSWER_SECONDS = 5.0
LEAVE_SECONDS = 5.0
_CALLED, _VERDICT = "called", "verdict"
_EVER = datetime.timedelta(days=365)
_NAMED = 8


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


class RollCall:
    """One rank's part. `report` is called with the verdict in a rank that is ended; all stacks are written to `stacks`.

    `attempt` is the same for all ranks of one start, and another in the next.
    """

    def __init__(
        self,
        place: Rank,
        progress: Progress,
        attempt: str,
        stacks: Path,
        report: Callable[[DistributedFailure], None],
    ) -> None:
        self.place = place
        self.progress = progress
        self.prefix = f"expertmesh/roll-call/{attempt}/"
        self.stacks = stacks
        self._report = report
        self._main_thread = threading.get_ident()
        self._failed = False

    def start(self, timeout_seconds: float) -> None:
        """Listen in a thread, once the store is there, which is waited for at most `timeout_seconds`."""
        threading.Thread(target=self._listen, args=(timeout_seconds,), name="roll-call", daemon=True).start()

    def verdict_on(self, error: BaseException) -> DistributedFailure | None:
        """Return what all ranks end by, if `error` shows that this one has waited in vain; the rank that failed calls
        it.
        """
        if not timed_out(RankFailure.of(self.place.rank, error)):
            return None
        self._failed = True
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        found: list[DistributedFailure] = []
        # A store behind a network that is lost may not even time out.
        thread = threading.Thread(target=lambda: found.append(self._call(message)), name="calling", daemon=True)
        thread.start()
        thread.join(3 * ANSWER_SECONDS)
        return found[0] if found else self._unreachable(message)

    def _call(self, message: str) -> DistributedFailure:
        from torch.distributed import DistError

        try:
            store = self._connect(ANSWER_SECONDS)
            if store.add(self.prefix + _CALLED, 1) > 1:
                store.wait([self.prefix + _VERDICT], datetime.timedelta(seconds=2 * ANSWER_SECONDS))
                return self._read(store)
            verdict = judge(self._answers(store), self.place, self.progress.status(), message, self.stacks)
            store.set(self.prefix + _VERDICT, json.dumps([str(verdict), verdict.key]))
            return verdict
        except DistError as error:
            log.debug(f"the roll could not be called: {error}")
            return self._unreachable(message)

    def _answers(self, store: "TCPStore") -> dict[int, Answer]:
        """Return the answers of all ranks that answer in time."""
        deadline, answers = time.monotonic() + ANSWER_SECONDS, dict[int, Answer]()
        while len(answers) < self.place.world_size and time.monotonic() < deadline:
            for rank in range(self.place.world_size):
                key = f"{self.prefix}{rank}"
                if rank not in answers and store.check([key]):
                    answers[rank] = Answer(**json.loads(store.get(key)))
            time.sleep(0.05)
        return answers

    def _listen(self, timeout_seconds: float) -> None:
        from torch.distributed import DistError

        try:
            store = self._connect(timeout_seconds)
            store.wait([self.prefix + _CALLED], _EVER)
            store.set(f"{self.prefix}{self.place.rank}", json.dumps(asdict(self._answer())))
            store.wait([self.prefix + _VERDICT], datetime.timedelta(seconds=2 * ANSWER_SECONDS))
            verdict = self._read(store)
        except DistError as error:
            # The store has ended with the job or with its machine: then whoever waits for that machine times out.
            log.debug(f"no roll is called any more: {error}")
            return
        time.sleep(LEAVE_SECONDS)
        self._report(verdict)
        os._exit(verdict.exit_code)

    def _answer(self) -> Answer:
        status, frame = self.progress.status(), sys._current_frames().get(self._main_thread)
        lines = [f'  File "{f.filename}", line {f.lineno} in {f.name}' for f in traceback.extract_stack(frame)]
        since = time.monotonic() - status.since
        return Answer(socket.gethostname(), status.step, status.phase, since, shortened(lines[::-1]), self._failed)

    def _read(self, store: "TCPStore") -> DistributedFailure:
        sentence, key = json.loads(store.get(self.prefix + _VERDICT))
        return DistributedFailure(sentence, key=key)

    def _connect(self, seconds: float) -> "TCPStore":
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        address, port = self.place.address, self.place.port
        assert address is not None
        assert port is not None
        timeout = datetime.timedelta(seconds=seconds)
        return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)

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
    """Return whom the others waited for, by `answers`; `status` and `message` are those of the caller, who gave up
    first.
    """
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


def open_roll_call(
    progress: Progress,
    config: Any,
    report: Callable[[DistributedFailure], None],
    environment: Mapping[str, str] = os.environ,
) -> RollCall | None:
    """Return this rank's part by its environment, listening; None if there is no other rank, or no store."""
    if int(environment.get("WORLD_SIZE", "1")) == 1 or not {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return None
    local = environment.get("LOCAL_WORLD_SIZE")
    place = Rank(
        "", int(environment["RANK"]), int(environment["WORLD_SIZE"]), None, int(local) if local else None,
        environment["MASTER_ADDR"], int(environment["MASTER_PORT"]),
    )  # fmt: skip
    # A store that outlives an attempt remembers its roll; agents that keep none may count attempts differently.
    kept = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0") if kept else "0"
    call = RollCall(place, progress, attempt, Path(config.output_dir, STACKS_FILE), report)
    call.start(config.distributed.first_step_timeout_seconds)
    return call
