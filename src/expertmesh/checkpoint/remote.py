"""Keep a run's checkpoints in object storage: list, publish, fetch and remove them; upload them while the run trains.

Storage has no rename. So the manifest is uploaded after all other files of a checkpoint, and removed before them: a
directory without a manifest, or with an incomplete one, is no checkpoint, and is cleaned up. One process at a time
publishes and removes. A download gets its name only after every file has the hash that its manifest says.

A thread of rank 0 takes each checkpoint from the run's directory when it is published there (`Uploads`), and has all
ranks upload their shares (`Shares`), so that the network of every node carries a part. A failed upload is reported, and
tried again with the next checkpoint and at the end; training continues. A checkpoint that waits for its upload stays in
the run's directory. If uploads are slower than saves, only the best and the newest of the waiting ones are uploaded.

Tools of one process take URLs beside local paths: the checkpoint or adapter at a URL is copied into the local cache.
`download` and `open_shares` alone issue collectives.
"""

import hashlib
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from expertmesh.adapters.peft_format import CONFIG_FILE as ADAPTER_CONFIG_FILE
from expertmesh.checkpoint.directory import CHECKPOINTS, locate, step_name
from expertmesh.checkpoint.manifest import CONFIG_FILE, MANIFEST, damaged, parse_manifest, step_of
from expertmesh.checkpoint.small_files import ADAPTER
from expertmesh.compat import job_store
from expertmesh.config.errors import DistributedFailure, ExpertmeshError, InputError
from expertmesh.distributed.all_ranks import from_rank_0, raise_on_all_ranks, rank_and_ranks
from expertmesh.distributed.job_store import JobStore
from expertmesh.io.directory import (
    io_errors,
    make_synced,
    rename_synced,
    require_space,
    sync,
    temporary_directory,
    wait_until_seen,
    write_synced,
)
from expertmesh.io.hub import cached, local_model
from expertmesh.io.reading import parse_json
from expertmesh.io.storage import Storage, is_url
from expertmesh.io.terminal import bytes_text

# The interval at which a rank polls the job's store. In a job of more than `OFTEN_RANKS` ranks it is longer, so that
# all ranks together make no more requests than `OFTEN_RANKS` ranks do.
POLL_SECONDS = 0.5
OFTEN_RANKS = 256
# The time without a heartbeat after which a rank that uploads counts as lost.
SILENT_SECONDS = 60.0
_NUMBER = re.compile(r"-([0-9]+)-of-[0-9]+\.")
log = logging.getLogger(__name__)
# A function that uploads files of a directory: all of them by this process, or by all ranks together (`Shares`).
Put = Callable[[Storage, Path, list[str]], None]


def other_run(where: str, why: str, go_on: str = "") -> InputError:
    """Return the error for storage that another run writes to. `go_on`: how to continue that run."""
    return InputError(
        f"{where} holds another run: {why}; {go_on}choose another checkpoint.remote", key="storage.other-run"
    )


class RemoteCheckpoints:
    """The checkpoints in `directory` below `run`, a run's directory in object storage; in `run` itself for ""."""

    def __init__(self, run: Storage, directory: str = CHECKPOINTS) -> None:
        self.run = run
        self.storage = run.below(directory) if directory else run

    def steps(self) -> dict[int, list[str]]:
        """Return the names of the files of each step, newest step first; `manifest.json` last, if there is one."""
        found: dict[int, list[str]] = {}
        for name in sorted(self.storage.sizes(), key=lambda name: name.endswith(f"/{MANIFEST}")):
            if (step := step_of(Path(name.partition("/")[0]))) is not None:
                found.setdefault(step, []).append(name)
        return dict(sorted(found.items(), reverse=True))

    def complete(self) -> Iterator[int]:
        """Yield the steps whose checkpoints are complete, newest first; reads one manifest for each."""
        return (step for step, names in self.steps().items() if _named(step) in names and self.manifest(step))

    def newest(self) -> int | None:
        """Return the step of the newest complete checkpoint, or None."""
        return next(self.complete(), None)

    def manifest(self, step: int) -> bytes | None:
        """Return the bytes of a step's manifest; None if there is none, or its upload was interrupted."""
        content = self.storage.read(_named(step))
        with suppress(ValueError):
            return content if content is not None and parse_json(content) is not None else None
        return None

    def config(self, step: int) -> bytes | None:
        """Return the configuration of the run that wrote a checkpoint; None if it is not there."""
        return self.storage.read(f"{step_name(step)}/{CONFIG_FILE}")

    def publish(self, directory: Path, put: Put = Storage.put) -> bool:
        """Upload the complete checkpoint `directory` by `put`, its manifest last.

        Returns:
            False if storage has it already.

        Raises:
            InputError: Storage has another checkpoint of this step, or a later one that is not beside `directory`:
                another run writes there. Also if a file does not have its size after the upload.
        """
        manifest, content = parse_manifest(directory), (directory / MANIFEST).read_bytes()
        newest, name = self.newest(), step_name(manifest.step)
        there = self.manifest(manifest.step)
        if there == content:
            return False
        later = newest is not None and newest > manifest.step and not directory.with_name(step_name(newest)).is_dir()
        if there is not None or later:
            raise other_run(self.storage.url, f"{step_name(newest or 0)} is not of this one")
        self._remove(manifest.step)  # what an interrupted upload of this step has left
        target = self.storage.below(name)
        put(target, directory, [file.name for file in manifest.files])
        arrived = target.sizes()
        for file in manifest.files:
            if arrived.get(file.name) != file.bytes:
                raise InputError(
                    f"{target.url}/{file.name}: has {arrived.get(file.name, 0):,} bytes after its upload, not "
                    f"{file.bytes:,}; the checkpoint is not published",
                    key="storage.failed",
                )
        target.write(MANIFEST, content)
        return True

    def prune(self, keep_last: int | None, keep: Collection[int | None] = ()) -> list[int]:
        """Remove all complete checkpoints but the newest `keep_last` and those of the steps `keep`; None keeps all.

        Returns:
            The steps that were removed.
        """
        old = list(self.complete())[keep_last:] if keep_last is not None else []
        removed = [step for step in old if step not in keep]
        for step in removed:
            self._remove(step)
        return removed

    def clean(self) -> list[str]:
        """Remove what interrupted uploads and removals have left, and return the names of the directories."""
        complete = set(self.complete())
        left = [step for step in self.steps() if step not in complete]
        for step in left:
            self._remove(step)
        try:
            self.storage.abort_uploads()
        except InputError as error:  # it may need another permission; incomplete uploads only take room
            log.warning(f"warning: {error}")
        return [step_name(step) for step in left]

    def _remove(self, step: int) -> None:
        # The manifest first: without it the directory is no checkpoint, even if this removal is interrupted.
        self.storage.remove([_named(step)])
        self.storage.remove([f"{step_name(step)}/{name}" for name in self.storage.below(step_name(step)).sizes()])

    def fetch(self, step: int, directory: Path, *, rank: int = 0, ranks: int = 1) -> None:
        """Download every `ranks`-th file of a checkpoint into `directory`, which already has its manifest.

        Raises:
            IntegrityError: A file has other content than what was written; names it.
        """
        files = parse_manifest(directory).files[rank::ranks]
        hashes = self.storage.below(step_name(step)).get(directory, {file.name: file.bytes for file in files})
        for file in files:
            if hashes[file.name] != file.sha256:
                raise damaged(
                    f"{self.storage.url}/{step_name(step)}/{file.name}: damaged: its content is not what was written "
                    "(sha256 differs); remove this checkpoint there to go on from the one before it"
                )


def _named(step: int) -> str:
    return f"{step_name(step)}/{MANIFEST}"


def download(remote: RemoteCheckpoints, step: int, directory: Path) -> Path:
    """Download a complete checkpoint into `directory`, which all ranks share, and return its path there.

    Raises:
        InputError, SecurityError: Storage or disk fails, or a file name is unsafe.
        IntegrityError: A file has other content than what was written.

    Collectives: every rank calls it, and downloads a part of the files; a broadcast and small all-reduces on the
    default group. Errors are raised on all ranks.
    """
    rank, ranks = rank_and_ranks()
    target, started = directory / step_name(step), time.monotonic()
    temporary = directory / f"{target.name}.tmp-{from_rank_0(uuid.uuid4().hex)}"
    with temporary_directory(temporary, remove=rank == 0):
        with raise_on_all_ranks("beginning the download of a checkpoint"):
            if rank == 0:
                manifest = remote.manifest(step)
                assert manifest is not None
                with io_errors(temporary, len(manifest)):
                    make_synced(temporary)
                    write_synced(temporary / MANIFEST, manifest)
                require_space(temporary, parse_manifest(temporary).total_bytes)
        with raise_on_all_ranks("downloading a checkpoint"):
            wait_until_seen(temporary / MANIFEST)
            remote.fetch(step, temporary, rank=rank, ranks=ranks)
        with raise_on_all_ranks("publishing a downloaded checkpoint"):
            if rank == 0:
                size = parse_manifest(temporary).total_bytes
                with io_errors(directory, size):
                    for path in [path for path in temporary.rglob("*") if path.is_dir()]:
                        sync(path)
                    rename_synced(temporary, target)
                seconds = time.monotonic() - started
                log.info(f"downloaded {target.name} from {remote.storage.url}: {bytes_text(size)} in {seconds:.1f} s")
    return target


def locate_local(path: str, *, anew: bool = False) -> tuple[Path, int | None]:
    """Find the checkpoint that a user means, as `locate` does, for a path or a URL."""
    return locate(local_checkpoint(path, anew=anew))


def local_adapter(path: str) -> Path:
    """Return `path`; for a URL, a local copy of what is there: an adapter, a run's adapter, or a checkpoint."""
    if not is_url(path):
        return Path(path)
    there = Storage(path).sizes()
    if MANIFEST not in there and ADAPTER_CONFIG_FILE in there:
        return local_model(path, holds=ADAPTER_CONFIG_FILE)
    if MANIFEST not in there and f"{ADAPTER}/{ADAPTER_CONFIG_FILE}" in there:
        return local_model(f"{path.rstrip('/')}/{ADAPTER}", holds=ADAPTER_CONFIG_FILE)
    return local_checkpoint(path)


def local_checkpoint(path: str, *, anew: bool = False) -> Path:
    """Return `path`; for a URL, a local copy of that checkpoint, or of the newest one of a run. For one process.

    Args:
        path: A local path; or the URL of a checkpoint, of a run, or of the directory of its checkpoints.
        anew: Do not use an older copy in the cache; see `cached`.

    Raises:
        InputError: There is no complete checkpoint.
        SecurityError: A file name is unsafe.
        IntegrityError: A file has other content than what was written.
    """
    if not is_url(path):
        return Path(path)
    above, _, name = path.rstrip("/").rpartition("/")
    if (step := step_of(Path(name))) is not None:
        places = [RemoteCheckpoints(Storage(above), "")]
    else:
        places = [RemoteCheckpoints(Storage(path), directory) for directory in (CHECKPOINTS, "")]
    for remote in places:
        found = remote.newest() if step is None else step
        if found is not None and (manifest := remote.manifest(found)) is not None:
            content = [remote.storage.url, found, hashlib.sha256(manifest).hexdigest()]
            return cached(content, "checkpoint", partial(_fill, remote, found), anew=anew) / step_name(found)
    raise InputError(
        f"{path}: holds no complete checkpoint, neither a {MANIFEST} nor {CHECKPOINTS}/step-*", key="storage.not-found"
    )


def _fill(remote: RemoteCheckpoints, step: int, directory: Path) -> None:
    log.info(f"downloading {step_name(step)} from {remote.storage.url}")
    download(remote, step, directory)


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
            self._request([[*where, share] for share in shares])
            try:
                target.put(directory, shares[0])
            finally:  # wait also after an error: a slow rank must not upload while the next upload runs
                problems = self._wait_for_answers()
        except dist.DistError as error:
            raise DistributedFailure(
                f"the ranks of this job can no longer be told what to upload: {error}", key="rank.lost"
            ) from error
        if problems:
            raise InputError("; ".join(problems), key="storage.failed")

    def end(self) -> None:
        """Let the other ranks return from `wait`, and wait for their answers. For rank 0, after the last upload."""
        with suppress(dist.DistError):
            self._request([None] * self._ranks)
            self._wait_for_answers()

    def wait(self) -> None:
        """Return after rank 0 has called `end`, or is lost. For the other ranks."""
        self._thread.join()

    def _request(self, requests: Sequence[list[Any] | None]) -> None:
        """Send each other rank its request by the job's store: directory, target and file names; None to end."""
        self._number += 1
        for rank in range(1, self._ranks):
            self._store.put(f"ask/{rank}", [self._number, requests[rank]])

    def _wait_for_answers(self) -> list[str]:
        """Wait for the answers of all other ranks, and return sentences about failures."""
        problems, waiting = [], dict.fromkeys(range(1, self._ranks), (-1, time.monotonic()))
        while waiting:
            for rank, (beat, since) in list(waiting.items()):
                found = self._store.get(f"answer/{rank}")
                # An answer to an earlier request counts as none.
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
                self._number, share = request
                if share is None:
                    self._report(_Answer(self._number, done=True))
                    return
                directory, target, names = share
                self._upload(self._output / directory, self._run.below(target), names)
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
            self._report(_Answer(self._number, beat := beat + 1))
            uploading.join(self._pause_seconds)
        self._report(_Answer(self._number, done=True, error=errors[0]))

    def _report(self, answer: _Answer) -> None:
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
