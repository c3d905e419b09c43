"""Divide an upload among the ranks of a job, so that the network of every node carries a part of it.

Rank 0 sends each rank the names of its files through the job's store, uploads its share, and waits until all ranks have
answered. All of that happens on threads and without a collective. A slow upload is waited for; a rank that writes no
heartbeat for a minute while it should upload is reported. Rank 0 decides which checkpoint is next and when it is
published (upload.py).
"""

import json
import logging
import re
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from expertmesh.compat import job_store
from expertmesh.config.errors import DistributedFailure, ExpertmeshError, InputError
from expertmesh.distributed.all_ranks import from_rank_0
from expertmesh.io.directory import wait_until_seen
from expertmesh.io.storage import Storage

log = logging.getLogger(__name__)
# The interval at which a rank polls the job's store. In a job of more than `OFTEN_RANKS` ranks it is longer, so that
# all ranks together make no more requests than `OFTEN_RANKS` ranks do.
POLL_SECONDS = 0.5
OFTEN_RANKS = 256
# The time without a heartbeat after which a rank that uploads counts as lost.
SILENT_SECONDS = 60.0
_NUMBER = re.compile(r"-([0-9]+)-of-[0-9]+\.")


@dataclass(frozen=True, slots=True)
class _Answer:
    """A rank's answer about an upload, written again for each heartbeat."""

    number: int
    """The number of the upload, counted by rank 0."""
    beat: int = 0
    """Grows while the rank uploads."""
    done: bool = False
    error: str | None = None
    """The sentence of the error that ended the upload."""


class Shares:
    """The uploads of one start of a run, from directories below `output` to storage below `run`. Every rank has one.

    The constructor starts a thread on the other ranks, which uploads what rank 0 requests. Rank 0 calls `put` from one
    thread at a time, and then `end`; the other ranks call `wait`.
    """

    def __init__(self, store: Store, rank: int, ranks: int, run: Storage, output: Path) -> None:
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
            self._store.set(f"ask/{rank}", json.dumps([self._number, questions[rank]]))

    def _answers(self) -> list[str]:
        """Wait for the answers of all other ranks, and return sentences about failures."""
        problems, waiting = [], dict.fromkeys(range(1, self._ranks), (-1, time.monotonic()))
        while waiting:
            for rank, (beat, since) in list(waiting.items()):
                answer = self._answer_of(rank)
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

    def _answer_of(self, rank: int) -> _Answer | None:
        """Return the last answer of a rank about the current upload; None if there is none."""
        key = f"answer/{rank}"
        answer = _Answer(**json.loads(self._store.get(key))) if self._store.check([key]) else None
        return answer if answer is not None and answer.number == self._number else None

    def _serve(self) -> None:
        """Upload what rank 0 requests until it ends. Runs on a thread of every other rank."""
        try:
            while (question := self._next()) is not None:
                directory, target, names = question
                self._upload(self._output / directory, self._run.below(target), names)
            self._say(_Answer(self._number, done=True))
        except dist.DistError as error:  # the store ends with rank 0 or its machine
            log.debug(f"no more uploads: {error}")

    def _next(self) -> list[Any] | None:
        """Wait for the next request of rank 0, and return it; None at the end."""
        key = f"ask/{self._rank}"
        while not self._store.check([key]):
            time.sleep(self._pause_seconds)
        self._number, question = json.loads(self._store.get(key))
        self._store.delete_key(key)
        return question  # type: ignore[no-any-return]

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
        self._store.set(f"answer/{self._rank}", json.dumps(asdict(answer)))


def open_shares(run: Storage, output: Path) -> Shares | None:
    """Return the shares of this job's uploads; None in a job of one rank.

    Collectives: every rank calls it; one broadcast on the default group.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    start = from_rank_0(f"{time.time_ns():x}")
    store = PrefixStore(f"expertmesh-uploads-{start}", job_store())
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
