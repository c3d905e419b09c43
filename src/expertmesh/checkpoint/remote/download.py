"""Download a checkpoint from object storage to the disk, by all ranks together.

It gets its name only after every file has the hash that its manifest says.
"""

import logging
import time
import uuid
from pathlib import Path

import torch.distributed as dist

from expertmesh.checkpoint.directory import step_name
from expertmesh.checkpoint.manifest import MANIFEST, parse_manifest
from expertmesh.checkpoint.remote.store import RemoteCheckpoints
from expertmesh.distributed.all_ranks import from_rank_0, raise_on_all_ranks
from expertmesh.io.directory import io_errors, require_space, temporary_directory, wait_until_seen
from expertmesh.io.safetensors_writer import rename_synced, sync, write_synced
from expertmesh.io.terminal import gib

log = logging.getLogger(__name__)


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
