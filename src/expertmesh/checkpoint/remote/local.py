"""Let tools take URLs beside local paths: the checkpoint or adapter at a URL is copied into the local cache.

Used by commands of one process, never by the ranks of a job. A local path is returned unchanged.
"""

import hashlib
import logging
from functools import partial
from pathlib import Path

from expertmesh.adapters.peft_format import CONFIG_FILE
from expertmesh.checkpoint.companions import ADAPTER
from expertmesh.checkpoint.directory import CHECKPOINTS, locate, step_name
from expertmesh.checkpoint.manifest import MANIFEST, step_of
from expertmesh.checkpoint.remote.download import download
from expertmesh.checkpoint.remote.store import RemoteCheckpoints
from expertmesh.config.errors import InputError
from expertmesh.io.local_copy import cached, local_model
from expertmesh.io.storage import Storage
from expertmesh.io.urls import is_url

log = logging.getLogger(__name__)


def locate_local(path: str, *, anew: bool = False) -> tuple[Path, int | None]:
    """Find the checkpoint that a user means, as `locate` does, for a path or a URL."""
    return locate(local_checkpoint(path, anew=anew))


def local_adapter(path: str) -> Path:
    """Return `path`; for a URL, a local copy of what is there: an adapter, a run's adapter, or a checkpoint."""
    if not is_url(path):
        return Path(path)
    there = Storage(path).sizes()
    if MANIFEST not in there and CONFIG_FILE in there:
        return local_model(path, holds=CONFIG_FILE)
    if MANIFEST not in there and f"{ADAPTER}/{CONFIG_FILE}" in there:
        return local_model(f"{path.rstrip('/')}/{ADAPTER}", holds=CONFIG_FILE)
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
