"""Upload to object storage (`checkpoint.remote`) what a run saves: each checkpoint, the records as they were then, and
in the end the result. prepare.py downloads them.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from expertmesh.checkpoint.directory import CHECKPOINTS, prune, published
from expertmesh.checkpoint.remote import Put, RemoteCheckpoints
from expertmesh.checkpoint.uploads import Shares, Uploads, open_shares
from expertmesh.config import Config
from expertmesh.experts.placement import LOAD_FILE
from expertmesh.io.directory import io_errors
from expertmesh.io.reading import MAX_METRICS_BYTES, MAX_SMALL_BYTES, read_file
from expertmesh.io.safetensors_writer import replace_synced
from expertmesh.io.storage import Storage

log = logging.getLogger(__name__)
# What a run that goes on elsewhere needs beside a checkpoint, or its reader wants to see.
RECORDS = {
    **dict.fromkeys(("config.yaml", "run.json", "data.json", "trackers.json", LOAD_FILE), MAX_SMALL_BYTES),
    "metrics.jsonl": MAX_METRICS_BYTES,
}


def open_remote(config: Config) -> RemoteCheckpoints:
    assert config.checkpoint.remote is not None
    return RemoteCheckpoints(Storage(config.checkpoint.remote, "checkpoint.remote"))


@dataclass(frozen=True, slots=True)
class RunUploads:
    """A rank's part of the uploads of a run."""

    config: Config
    queue: Uploads | None
    """The queue of uploads, on rank 0 alone."""
    shares: Shares | None
    """This rank's shares of uploads; None on ranks without."""

    def finish(self, within_seconds: float | None = None) -> None:
        """Wait until all checkpoints are uploaded, and remove those that were kept for that. For rank 0.

        Raises `InputError` if it fails.
        """
        assert self.queue is not None
        log.info(f"uploading  what is not yet in {self.config.checkpoint.remote}")
        self.queue.finish(within_seconds)
        kept = self.queue.kept()
        prune(Path(self.config.output_dir) / CHECKPOINTS, self.config.checkpoint.keep_last, kept)

    def finish_with_result(self) -> None:
        """Wait until storage has all checkpoints, and upload the result of the finished run.

        Every rank calls it, after everything else, without a collective: an upload may take long. Raises `InputError`
        on rank 0 if it fails.
        """
        if self.queue is None:
            assert self.shares is not None
            self.shares.wait()
            return
        try:
            self.finish()
            upload_result(self.config, self.put)
        finally:
            if self.shares is not None:
                self.shares.end()

    @property
    def put(self) -> Put:
        return Storage.put if self.shares is None else self.shares.put


def start_uploads(config: Config, keep_step: int | None) -> RunUploads | None:
    """Start the uploads of a run that has a `checkpoint.remote`.

    They begin with what an earlier start has saved and not uploaded: the newest checkpoint, and that of `keep_step`,
    the best one. Collectives: every rank calls it; one broadcast.
    """
    if config.checkpoint.remote is None:
        return None
    remote, output = open_remote(config), Path(config.output_dir)
    started = RunUploads(config, None, open_shares(remote.run, output))
    if dist.get_rank():
        return started
    uploads = Uploads(remote, config.checkpoint.keep_last, lambda: _upload_records(remote.run, output), started.put)
    checkpoints = published(output / CHECKPOINTS)
    for step, path in checkpoints:
        if step in (keep_step, checkpoints[-1][0]):
            uploads.submit(path, keep_step)
    return replace(started, queue=uploads)


def upload_result(config: Config, put: Put = Storage.put) -> None:
    """Upload the model or adapter of a finished run by `put`. The file that makes the directory one comes last.

    Raises `InputError` if it fails: the same command tries it again.
    """
    storage, output, (name, last) = open_remote(config).run, Path(config.output_dir), _result(config)
    _upload_records(storage, output)
    target, files = storage.below(name), [path for path in (output / name).rglob("*") if path.is_file()]
    names = [path.relative_to(output / name).as_posix() for path in files]
    target.remove([last])
    target.remove(target.sizes().keys() - set(names))
    put(target, output / name, [each for each in names if each != last])
    target.write(last, read_file(output / name / last))
    log.info(f"uploaded   {output / name} to {target.url}")


def fetch_records(config: Config) -> None:
    """Download the run's records over older ones; whoever continues them removes rows after the checkpoint."""
    run, output = open_remote(config).run, Path(config.output_dir)
    for name, limit in RECORDS.items():
        if name != "config.yaml" and (content := run.read(name, limit)) is not None:
            with io_errors(output / name, len(content)):
                replace_synced(output / name, content)


def has_result(config: Config) -> bool:
    """Return whether `checkpoint.remote` has the complete result of `output_dir`."""
    name, last = _result(config)
    return open_remote(config).run.below(name).read(last) == read_file(Path(config.output_dir, name, last))


def withdraw_result(config: Config) -> None:
    """Remove what an earlier start has uploaded as the result, while the run goes on. For rank 0."""
    name, last = _result(config)
    open_remote(config).run.below(name).remove([last])


def _result(config: Config) -> tuple[str, str]:
    """Return the directory, and the file without which nothing takes it for a model or an adapter."""
    return ("model", "config.json") if config.lora is None else ("adapter", "adapter_config.json")


def _upload_records(run: Storage, output: Path) -> None:
    for name, limit in RECORDS.items():
        if (output / name).is_file():
            run.write(name, read_file(output / name, limit))
