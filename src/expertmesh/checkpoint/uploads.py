"""Upload the checkpoints of a run while it trains.

A thread of rank 0 takes each checkpoint from the run's directory when it is published there, and has all ranks upload
their shares, so that the network of every node carries a part. A failed upload is reported, and tried again with the
next checkpoint and at the end; training continues. A checkpoint that waits for its upload stays in the run's directory.
If uploads are slower than saves, only the best and the newest of the waiting checkpoints are uploaded.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from expertmesh.checkpoint.directory import step_name
from expertmesh.checkpoint.manifest import step_of
from expertmesh.checkpoint.remote import Put, RemoteCheckpoints
from expertmesh.compat import job_store
from expertmesh.config.errors import DistributedFailure, ExpertmeshError, InputError
from expertmesh.distributed.all_ranks import from_rank_0
from expertmesh.distributed.job_store import JobStore
from expertmesh.io.directory import wait_until_seen
from expertmesh.io.storage import Storage

# The interval at which a rank polls the job's store. In a job of more than `OFTEN_RANKS` ranks it is longer, so that
# all ranks together make no more requests than `OFTEN_RANKS` ranks do.
POLL_SECONDS = 0.5
OFTEN_RANKS = 256
# The time without a heartbeat after which a rank that uploads counts as lost.
SILENT_SECONDS = 60.0
_NUMBER = re.compile(r"-([0-9]+)-of-[0-9]+\.")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Answer:
    """A rank's answer about an upload, written again for each heartbeat."""

    number: int
    """The number of the upload, counted by rank 0."""
    beat: int = 0
    """Grows while the rank uploads."""
    done: bool = False
    """True once its files are uploaded."""
    error: str | None = None
    """The sentence of the error that ended the upload."""


class Shares:
    """The uploads of one start of a run, from directories below `output` to storage below `run`. Every rank has one.

    The constructor starts a thread on the other ranks, which uploads what rank 0 requests. Rank 0 calls `put` from one
    thread at a time, and then `end`; the other ranks call `wait`.
    """

    def __init__(self, store: JobStore, rank: int, ranks: int, run: Storage, output: Path) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._run, self._output, self._number = run, output, 0
        self._pause_seconds = POLL_SECONDS * max(1.0, ranks / OFTEN_RANKS)
        self._thread = threading.Thread(target=self._serve, name="upload", daemon=True)
        if rank:
            self._thread.start()

    def put(self, target: Storage, directory: Path, names: Iterable[str]) -> None:
        """Upload the files `names` of `directory` to `target` by all ranks together. For rank 0. No collective.

        Raises:
            InputError: Ranks failed, which it names; raised after all have answered. Also for rank 0's share.
            DistributedFailure: The job's store is lost.
        """
        shares = divided(names, self._ranks)
        where = [directory.relative_to(self._output).as_posix(), target.url.removeprefix(f"{self._run.url}/")]
        try:
            self._ask([[*where, share] for share in shares])
            try:
                target.put(directory, shares[0])
            finally:  # wait also after an error: a slow rank must not upload while the next upload runs
                problems = self._answers()
        except dist.DistError as error:
            raise DistributedFailure(
                f"the ranks of this job can no longer be told what to upload: {error}", key="rank.lost"
            ) from error
        if problems:
            raise InputError("; ".join(problems), key="storage.failed")

    def end(self) -> None:
        """Let the other ranks return from `wait`, and wait for their answers. For rank 0, after the last upload."""
        with suppress(dist.DistError):
            self._ask([None] * self._ranks)
            self._answers()

    def wait(self) -> None:
        """Return after rank 0 has called `end`, or is lost. For the other ranks."""
        self._thread.join()

    def _ask(self, questions: Sequence[list[Any] | None]) -> None:
        """Send each other rank its request by the job's store: directory, target and file names; None to end."""
        self._number += 1
        for rank in range(1, self._ranks):
            self._store.put(f"ask/{rank}", [self._number, questions[rank]])

    def _answers(self) -> list[str]:
        """Wait for the answers of all other ranks, and return sentences about failures."""
        problems, waiting = [], dict.fromkeys(range(1, self._ranks), (-1, time.monotonic()))
        while waiting:
            for rank, (beat, since) in list(waiting.items()):
                found = self._store.get(f"answer/{rank}")
                answer = None if found is None or found["number"] != self._number else _Answer(**found)
                if answer is not None and answer.done:
                    del waiting[rank]
                    problems += [] if answer.error is None else [f"rank {rank}: {answer.error}"]
                elif answer is not None and answer.beat != beat:
                    waiting[rank] = answer.beat, time.monotonic()
                elif time.monotonic() - since > SILENT_SECONDS:
                    del waiting[rank]
                    problems.append(
                        f"rank {rank} has not answered for {SILENT_SECONDS:.0f} s: it has ended, or its machine or the "
                        "network to it is lost"
                    )
            if waiting:
                time.sleep(self._pause_seconds)
        return problems

    def _serve(self) -> None:
        """Upload what rank 0 requests until it ends. Runs on a thread of every other rank."""
        try:
            while True:
                while (request := self._store.take(f"ask/{self._rank}")) is None:
                    time.sleep(self._pause_seconds)
                self._number, question = request
                if question is None:
                    break
                directory, target, names = question
                self._upload(self._output / directory, self._run.below(target), names)
            self._say(_Answer(self._number, done=True))
        except dist.DistError as error:  # the store ends with rank 0 or its machine
            log.debug(f"no more uploads: {error}")

    def _upload(self, directory: Path, target: Storage, names: list[str]) -> None:
        """Upload files on another thread, and write a heartbeat until it ends, then the answer."""
        errors: list[str | None] = []

        def put() -> None:
            try:
                if names:
                    wait_until_seen(directory)
                    target.put(directory, names)
                errors.append(None)
            except ExpertmeshError as error:
                errors.append(str(error))
            except BaseException as error:  # a bug of ours: rank 0 would wait for an answer
                errors.append(f"{type(error).__name__}: {error}")
                raise

        uploading = threading.Thread(target=put, name="upload-share", daemon=True)
        uploading.start()
        beat = 0
        while uploading.is_alive():
            self._say(_Answer(self._number, beat := beat + 1))
            uploading.join(self._pause_seconds)
        self._say(_Answer(self._number, done=True, error=errors[0]))

    def _say(self, answer: _Answer) -> None:
        self._store.put(f"answer/{self._rank}", asdict(answer))


def open_shares(run: Storage, output: Path) -> Shares | None:
    """Return the shares of this job's uploads; None in a job of one rank.

    Collectives: every rank calls it; one broadcast on the default group.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    start = from_rank_0(f"{time.time_ns():x}")
    store = JobStore(job_store(), f"expertmesh-uploads-{start}/")
    return Shares(store, dist.get_rank(), dist.get_world_size(), run, output)


def divided(names: Iterable[str], ranks: int) -> list[list[str]]:
    """Divide files among ranks by the number in their names, and return the list of each rank.

    A rank gets the files of a checkpoint that it wrote, which its machine may still have in memory, and numbered parts
    of a model in turn. Files without a number are small, and go to rank 0.
    """
    shares: list[list[str]] = [[] for _ in range(ranks)]
    for name in names:
        number = _NUMBER.search(name)
        shares[int(number[1]) % ranks if number else 0].append(name)
    return shares


class Uploads:
    """The uploads of one run.

    Args:
        keep_last: The number of newest checkpoints that are not removed from storage; None for all.
        before: Uploads the other files of the run, before each checkpoint.
        put: Uploads the files of a checkpoint.
    """

    def __init__(
        self, remote: RemoteCheckpoints, keep_last: int | None, before: Callable[[], None], put: Put = Storage.put
    ) -> None:
        self.remote, self.keep_last, self._before, self._put = remote, keep_last, before, put
        self._keep_step: int | None = None
        self._waiting: list[Path] = []
        self._under_way: Path | None = None
        self._error: Exception | None = None
        self._called = self._ending = False
        self._changed = threading.Condition()
        # A daemon: a run that fails does not wait for it, and the next start cleans up what it leaves.
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    def submit(self, checkpoint: Path, keep_step: int | None) -> None:
        """Upload `checkpoint` next; `keep_step` is the step of the best one. Never waits."""
        with self._changed:
            self._keep_step, self._called = keep_step, True
            best = [path for path in self._waiting if keep_step is not None and path.name == step_name(keep_step)]
            self._waiting = [*best, checkpoint]
            self._changed.notify_all()

    def held(self) -> set[int | None]:
        """Return the steps that wait for their upload or are being uploaded, and must stay in the run's directory."""
        with self._changed:
            return {step_of(path) for path in (*self._waiting, self._under_way) if path is not None}

    def kept(self) -> set[int | None]:
        """Return the steps of `held`, and the step of the best checkpoint."""
        return self.held() | {self._keep_step}

    def finish(self, within_seconds: float | None = None) -> None:
        """Wait until all checkpoints are uploaded.

        Raises:
            InputError: An upload failed or took too long; the checkpoint is still in the run's directory.
        """
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join(within_seconds)
        if self._thread.is_alive():
            raise InputError(
                f"checkpoint.remote: not all is uploaded in {within_seconds:.0f} s; the next start uploads the rest",
                key="storage.upload-failed",
            )
        if self._waiting and isinstance(self._error, ExpertmeshError):
            left = self._waiting[-1]
            raise InputError(
                f"checkpoint.remote: {left.name} is not uploaded: {self._error}. It is complete in {left.parent}; copy "
                "it, or start the same command again",
                key="storage.upload-failed",
            ) from self._error
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        """Upload what waits, until `finish`. Runs on the thread.

        After a failure it tries again when the next checkpoint is submitted, and at the end.
        """
        try:
            ending = False
            while not ending:
                with self._changed:
                    self._changed.wait_for(lambda: self._called or self._ending)
                    self._called, ending = False, self._ending
                while self._upload_next():
                    pass
        except Exception as error:  # a bug of ours: `finish` raises it
            self._error = error

    def _upload_next(self) -> bool:
        """Upload the first waiting checkpoint; return False if none waits, or the upload failed."""
        with self._changed:
            if not self._waiting:
                return False
            checkpoint = self._under_way = self._waiting.pop(0)
            keep_step, self._error = self._keep_step, None
        started = time.monotonic()
        try:
            self._before()
            if self.remote.publish(checkpoint, self._put):
                seconds = time.monotonic() - started
                log.info(f"uploaded   {checkpoint.name} to {self.remote.storage.url} in {seconds:.1f} s")
            self.remote.prune(self.keep_last, {keep_step})
        except ExpertmeshError as error:
            self._error = error
            log.warning(f"warning: {checkpoint.name} is not uploaded, which is tried again later: {error}")
        with self._changed:
            self._under_way = None
            if self._error is not None and (not self._waiting or checkpoint.name == step_name(self._keep_step or -1)):
                self._waiting.insert(0, checkpoint)
        return self._error is None
