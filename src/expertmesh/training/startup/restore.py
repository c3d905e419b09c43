"""Download a run from object storage (`checkpoint.remote`) to a machine whose `output_dir` is empty or older.

It runs before the run looks for a checkpoint there. uploads.py uploads what is found here.
"""

import logging
from pathlib import Path

import torch.distributed as dist

from expertmesh.checkpoint.directory import CHECKPOINTS, published, step_name
from expertmesh.checkpoint.manifest import CONFIG_FILE, MANIFEST, step_of
from expertmesh.checkpoint.remote import RemoteCheckpoints, download
from expertmesh.config import Config
from expertmesh.config.errors import InputError
from expertmesh.config.files import config_from
from expertmesh.distributed.all_ranks import from_rank_0, raise_on_all_ranks
from expertmesh.io.reading import read_file
from expertmesh.training.resume import config_differences, flat, ways_on
from expertmesh.training.startup.uploads import fetch_records, open_remote

log = logging.getLogger(__name__)
_PROBE = "expertmesh-probe"


def restore(config: Config) -> None:
    """Download the newest checkpoint of `checkpoint.remote`, if `output_dir` has none as new, and the run's records.

    Every rank downloads its share of the files.

    Raises:
        InputError: On all ranks: storage that cannot be read and written, another run's checkpoints.
        SecurityError: On all ranks: a path or a file that must not be followed or read.
        IntegrityError: On all ranks: a file differs from what was written.

    Collectives: every rank calls it; broadcasts and small all-reduces on the default group.
    """
    if config.checkpoint.remote is None:
        return
    step: int | None = None
    with raise_on_all_ranks("looking for checkpoints in checkpoint.remote"):
        remote = open_remote(config)
        remote.run.write(f"{_PROBE}/{dist.get_rank()}", b"")  # every rank uploads
    with raise_on_all_ranks("cleaning up in checkpoint.remote"):
        if dist.get_rank() == 0:
            _clean(remote)
            step = _missing_here(config, remote)
            if step is not None:
                fetch_records(config)
    if found := from_rank_0("" if step is None else str(step)):
        download(remote, int(found), Path(config.output_dir) / CHECKPOINTS)


def _clean(remote: RemoteCheckpoints) -> None:
    """Refuse storage that differs between ranks, or cannot be removed from; remove what interrupted uploads left."""
    found = remote.run.below(_PROBE).sizes()
    missing = [rank for rank in range(dist.get_world_size()) if str(rank) not in found]
    if missing:
        raise InputError(
            f"checkpoint.remote: what rank {missing[0]} has written to {remote.run.url} is not there for rank 0; every "
            "rank uploads and downloads: mount the same directory at the same path on all nodes",
            key="storage.not-shared",
        )
    remote.run.remove([f"{_PROBE}/{name}" for name in found])
    if left := remote.clean():
        log.info(f"removed what interrupted uploads left in {remote.storage.url}: {', '.join(left)}")


def _missing_here(config: Config, remote: RemoteCheckpoints) -> int | None:
    """Return the step of the checkpoint that the run goes on from and that `output_dir` lacks."""
    here, newest = dict(published(Path(config.output_dir) / CHECKPOINTS)), remote.newest()
    if newest is None:
        return None
    resume, where, by_name = config.checkpoint.resume, remote.storage.url, None
    if resume == "never":
        raise InputError(
            f"checkpoint.resume is never, but {where} holds {step_name(newest)}; set checkpoint.resume to auto to "
            "continue, or choose another checkpoint.remote",
            key="checkpoint.resume-is-never",
        )
    _refuse_other_run(config, remote, newest)
    if not config.checkpoint.resume_weights_only and resume != "auto":
        by_name = step_of(Path(resume)) if "/" not in resume else None
        if by_name != newest:
            raise InputError(
                f"checkpoint.resume is {resume}, but {where} holds {step_name(newest)}, which would be in the way; set "
                "checkpoint.resume to auto to continue from that, or choose another checkpoint.remote",
                key="checkpoint.later-exists",
            )
    if newest in here:
        if read_file(here[newest] / MANIFEST) != remote.manifest(newest):
            raise _other_run(where, f"{step_name(newest)} is not the one in output_dir {config.output_dir}")
        return None
    return newest if newest > max(here, default=-1) else None


def _refuse_other_run(config: Config, remote: RemoteCheckpoints, step: int) -> None:
    """Refuse another run by the configuration beside a checkpoint, before all of it is downloaded."""
    content, where = remote.config(step), f"{remote.storage.url}/{step_name(step)}/{CONFIG_FILE}"
    if content is None:
        raise _other_run(remote.storage.url, f"{step_name(step)} was not written by a training run")
    before = config_from(content.decode(errors="backslashreplace"), where)
    forbidden, _ = config_differences(*(flat(each.model_dump(mode="json")) for each in (before, config)))
    if forbidden:
        raise _other_run(remote.storage.url, "; ".join(forbidden.values()), ways_on(forbidden, None))


def _other_run(where: str, why: str, ways: str = "") -> InputError:
    return InputError(
        f"{where} holds another run: {why}; put it back to continue that run{ways}, or choose another "
        "checkpoint.remote",
        key="storage.other-run",
    )
