"""Keep a run's checkpoints in object storage: list, publish, fetch and remove them; copy what tools read.

Storage has no rename. So the manifest is uploaded after all other files of a checkpoint, and removed before them: a
directory without a manifest, or with an incomplete one, is no checkpoint, and is cleaned up. One process at a time
publishes and removes. A download gets its name only after every file has the hash that its manifest says.

Tools of one process take URLs beside local paths: the checkpoint or adapter at a URL is copied into the local cache.
Only `download` communicates.
"""

import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist

from expertmesh.adapters.peft_format import CONFIG_FILE as ADAPTER_CONFIG_FILE
from expertmesh.checkpoint.directory import CHECKPOINTS, locate, step_name
from expertmesh.checkpoint.manifest import CONFIG_FILE, MANIFEST, damaged, parse_manifest, step_of
from expertmesh.checkpoint.small_files import ADAPTER
from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.distributed.all_ranks import from_rank_0, raise_on_all_ranks
from expertmesh.io.directory import io_errors, require_space, temporary_directory, wait_until_seen
from expertmesh.io.hub import cached, local_model
from expertmesh.io.reading import parse_json
from expertmesh.io.safetensors_writer import rename_synced, sync, write_synced
from expertmesh.io.storage import Storage
from expertmesh.io.terminal import gib
from expertmesh.io.urls import is_url

log = logging.getLogger(__name__)
# A function that uploads files of a directory: all of them by this process, or by all ranks together (uploads.py).
Put = Callable[[Storage, Path, list[str]], None]


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

    def complete(self) -> list[int]:
        """Return the steps whose checkpoints are complete, newest first."""
        return [step for step, names in self.steps().items() if _named(step) in names and self.manifest(step)]

    def newest(self) -> int | None:
        """Return the step of the newest complete checkpoint, or None."""
        return next(
            (step for step, names in self.steps().items() if _named(step) in names and self.manifest(step)), None
        )

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
            raise InputError(
                f"{self.storage.url}: holds {step_name(newest or 0)}, which this run has not written; give each run a "
                "checkpoint.remote of its own",
                key="storage.other-run",
            )
        self._remove(manifest.step)
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
        old = self.complete()[keep_last:] if keep_last is not None else []
        removed = [step for step in old if step not in keep]
        for step in removed:
            self._remove(step)
        return removed

    def clean(self) -> list[str]:
        """Remove what interrupted uploads and removals have left, and return the names of the directories."""
        complete, found = self.complete(), self.steps()
        left = [step for step in found if step not in complete]
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
                raise other_object(f"{self.storage.url}/{step_name(step)}/{file.name}")


def other_object(url: str) -> IntegrityError:
    return damaged(
        f"{url}: damaged: its content is not what was written (sha256 differs); remove this checkpoint there to go on "
        "from the one before it"
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
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    target, started = directory / step_name(step), time.monotonic()
    temporary = directory / f"{target.name}.tmp-{from_rank_0(uuid.uuid4().hex)}"
    with temporary_directory(temporary, remove=rank == 0):
        with raise_on_all_ranks("beginning the download of a checkpoint"):
            if rank == 0:
                _begin(remote, step, temporary)
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
                log.info(f"downloaded {target.name} from {remote.storage.url}: {gib(size)} in {seconds:.1f} s")
    return target


def _begin(remote: RemoteCheckpoints, step: int, temporary: Path) -> None:
    """Make the temporary directory with the manifest in it. Raises `InputError` if the disk has too little room."""
    manifest = remote.manifest(step)
    assert manifest is not None
    with io_errors(temporary, len(manifest)):
        temporary.mkdir(parents=True)
        sync(temporary.parent.parent)
        write_synced(temporary / MANIFEST, manifest)
    require_space(temporary, parse_manifest(temporary).total_bytes)


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
            copy = cached(content, "checkpoint", partial(_fill, remote, found), anew=anew)
            return copy / step_name(found)
    raise InputError(
        f"{path}: holds no complete checkpoint, neither a {MANIFEST} nor {CHECKPOINTS}/step-*", key="storage.not-found"
    )


def _fill(remote: RemoteCheckpoints, step: int, directory: Path) -> None:
    log.info(f"downloading {step_name(step)} from {remote.storage.url}")
    download(remote, step, directory)
