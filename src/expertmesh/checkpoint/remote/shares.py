"""Divides an upload among the ranks of a job, so that the network of every node carries it.

Rank 0 tells each rank through the job's store which files are its, uploads its own, and waits until all have answered.
All of that happens on threads and without a collective; every upload, slow or not, is waited for. A rank that says
nothing for a minute while it should be uploading is named. Which checkpoint is next and when it is published is
rank 0's decision (upload.py).
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
# How often a rank looks into the job's store; in a job of more than `OFTEN_RANKS` ranks less often, so that all of them
# together make no more requests than as many do.
POLL_SECONDS = 0.5
OFTEN_RANKS = 256
# After which time without a sign of life a rank that uploads is taken for lost.
SILENT_SECONDS = 60.0
_NUMBER = re.compile(r"-([0-9]+)-of-[0-9]+\.")


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a rank says about upload `number`: with each `beat` that it is at it, in the end that it is `done`."""

    number: int
    beat: int = 0
    done: bool = False
    error: str | None = None


class Shares:
    """The uploads of one start of a run, of what lies below `output` to below `run`; every rank has one.

    The other ranks upload on a thread from the beginning; rank 0 calls `put` from one thread at a time, and `end`.
    """

    def __init__(self, store: Store, rank: int, ranks: int, run: Storage, output: Path) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._run, self._output, self._number = run, output, 0
        self._pause_seconds = POLL_SECONDS * max(1.0, ranks / OFTEN_RANKS)
        self._thread = threading.Thread(target=self._serve, name="upload", daemon=True)
        if rank:
            self._thread.start()

    def put(self, target: Storage, directory: Path, names: Iterable[str]) -> None:
        """Upload files of `directory` to `target`, all ranks together. For rank 0.

        Raises `InputError` naming a rank that could not, when all have answered.
        """
        shares = divided(names, self._ranks)
        where = [directory.relative_to(self._output).as_posix(), target.url.removeprefix(f"{self._run.url}/")]
        try:
            self._ask([[*where, share] for share in shares])
            try:
                target.put(directory, shares[0])
            finally:  # one that is late must not upload beside what comes next
                problems = self._answers()
        except dist.DistError as error:
            raise DistributedFailure(
                f"the ranks of this job can no longer be told what to upload: {error}", key="rank.lost"
            ) from error
        if problems:
            raise InputError("; ".join(problems), key="storage.failed")

    def end(self) -> None:
        """Let the other ranks go, and wait until they have heard it. For rank 0, when nothing more is uploaded."""
        with suppress(dist.DistError):
            self._ask([None] * self._ranks)
            self._answers()

    def wait(self) -> None:
        """Return when rank 0 needs this rank no more, or is gone. For the other ranks."""
        self._thread.join()

    def _ask(self, questions: Sequence[list[Any] | None]) -> None:
        self._number += 1
        for rank in range(1, self._ranks):
            self._store.set(f"ask/{rank}", json.dumps([self._number, questions[rank]]))

    def _answers(self) -> list[str]:
        """Wait for those of all other ranks; what they could not do, as sentences."""
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
        key = f"answer/{rank}"
        answer = _Answer(**json.loads(self._store.get(key))) if self._store.check([key]) else None
        return answer if answer is not None and answer.number == self._number else None

    def _serve(self) -> None:
        """On the thread of another rank than 0."""
        try:
            while (question := self._next()) is not None:
                directory, target, names = question
                self._upload(self._output / directory, self._run.below(target), names)
            self._say(_Answer(self._number, done=True))
        except dist.DistError as error:  # the store has ended with rank 0 or its machine
            log.debug(f"no more uploads: {error}")

    def _next(self) -> list[Any] | None:
        key = f"ask/{self._rank}"
        while not self._store.check([key]):
            time.sleep(self._pause_seconds)
        self._number, question = json.loads(self._store.get(key))
        self._store.delete_key(key)
        return question  # type: ignore[no-any-return]

    def _upload(self, directory: Path, target: Storage, names: list[str]) -> None:
        errors: list[str | None] = []

        def put() -> None:
            try:
                if names:
                    wait_until_seen(directory)
                    target.put(directory, names)
                errors.append(None)
            except ExpertmeshError as error:
                errors.append(str(error))
            except BaseException as error:  # ours: rank 0 must hear of it as well
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
    """The shares of this job's uploads; None in a job of one rank. Every rank calls it; issues one broadcast."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    start = from_rank_0(f"{time.time_ns():x}")
    store = PrefixStore(f"expertmesh-uploads-{start}", job_store())
    return Shares(store, dist.get_rank(), dist.get_world_size(), run, output)


def divided(names: Iterable[str], ranks: int) -> list[list[str]]:
    """Of each rank the files that it uploads: of a checkpoint those that it wrote, which its machine may still have in
    memory, and numbered parts of a model in turn. What has no number is small, and rank 0's.
    """
    shares: list[list[str]] = [[] for _ in range(ranks)]
    for name in names:
        number = _NUMBER.search(name)
        shares[int(number[1]) % ranks if number else 0].append(name)
    return shares
