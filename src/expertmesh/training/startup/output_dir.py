"""Own the directory of a run: refuse one that holds another run, write the configuration there, and copy what the run
saves to and from object storage (`checkpoint.remote`).

A run in object storage is downloaded first to a machine whose `output_dir` is empty or older. Uploaded are each
checkpoint, the records as they were then, and in the end the result. No weight is read here.
"""

import itertools
import logging
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from expertmesh.checkpoint.directory import CHECKPOINTS, prune, published, step_name
from expertmesh.checkpoint.manifest import CONFIG_FILE, MANIFEST, step_of
from expertmesh.checkpoint.remote import Put, RemoteCheckpoints, Shares, Uploads, download, open_shares, other_run
from expertmesh.config import Config, TrainConfig, dump_config
from expertmesh.config.errors import InputError
from expertmesh.config.files import config_from
from expertmesh.distributed.all_ranks import from_rank_0, raise_on_all_ranks
from expertmesh.experts.placement import LOAD_FILE, PAIRS_FILE
from expertmesh.io.directory import io_errors, nearest, rename_synced, replace_synced
from expertmesh.io.reading import MAX_METRICS_BYTES, MAX_PAIRS_BYTES, MAX_SMALL_BYTES, read_file
from expertmesh.io.storage import Storage
from expertmesh.training.resume import (
    config_differences,
    find_start,
    find_weights,
    flat,
    in_the_way,
    other_configuration,
    resume_is_never,
    ways_on,
)

log = logging.getLogger(__name__)
_PROBE = "expertmesh-probe"
MODEL, ADAPTER = "model", "adapter"
# What a run that was killed before it had written config.yaml may have left behind, none of it worth keeping, and what
# `verify` and `prepare` write before there is a run.
_LEFT_BY_A_START = re.compile(
    r"lock\.json(\..+)?|config\.yaml\.tmp|verification\.json|prepared|stacks\.txt|expert_pairs\.safetensors(\.tmp)?"
)
# What a run that goes on elsewhere needs beside a checkpoint, or its reader wants to see.
RECORDS = {
    **dict.fromkeys(("config.yaml", "run.json", "data.json", "trackers.json", LOAD_FILE), MAX_SMALL_BYTES),
    PAIRS_FILE: MAX_PAIRS_BYTES,
    "metrics.jsonl": MAX_METRICS_BYTES,
}


def refuse_output_dir(config: Config) -> None:
    """Refuse a directory that holds another run, or anything else: it is never written into.

    The same run may go on in it, from its newest checkpoint; resume.py has what may differ.
    """
    directory = Path(config.output_dir)
    there = nearest(directory)
    if not there.is_dir():
        raise InputError(f"output_dir {directory}: {there} is a file; choose another directory", key="output.is-a-file")
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        raise InputError(
            f"output_dir {directory}: {there} cannot be written by this user; choose another directory, or give it "
            "the permission",
            key="output.unwritable",
        )
    if there == directory.absolute():
        _refuse_contents(config, directory)
    if config.checkpoint.remote is None:  # which may have what is not here: `restore` looks there
        find_start(config)
        find_weights(config)


def _refuse_contents(config: Config, directory: Path) -> None:
    if all(_LEFT_BY_A_START.fullmatch(path.name) for path in directory.iterdir()):
        return
    # Somebody may have removed the run's own; each checkpoint holds one.
    known = (directory, *(path for _, path in reversed(published(directory / CHECKPOINTS))))
    written = next((path / CONFIG_FILE for path in known if (path / CONFIG_FILE).is_file()), None)
    if written is None:
        raise InputError(
            f"output_dir {directory} is not empty and holds no run of ours; choose another directory",
            key="output.not-empty",
        )
    if did_no_step(directory):
        return
    before = config_from(read_file(written).decode(errors="backslashreplace"), str(written))
    forbidden, _ = config_differences(*(flat(each.model_dump(mode="json")) for each in (before, config)))
    if forbidden:
        newest = next((path for _, path in reversed(published(directory / CHECKPOINTS))), None)
        raise other_configuration(f"output_dir {directory}", forbidden, newest)
    then, now = before.train, config.train
    longer = then.max_steps is not None and (now.max_steps is None or now.max_steps > then.max_steps)
    goes_on = (now.num_epochs > then.num_epochs or longer) and published(directory / CHECKPOINTS)
    if _is_finished(config) and not goes_on:
        raise _finished(config, then)


def refuse_no_more_steps(config: Config, start: Path, total_steps: int) -> None:
    """Refuse a finished run that the configuration's epochs or steps do not make longer. Call it on one rank."""
    if _is_finished(config) and start.name == step_name(total_steps):
        raise _finished(config, config.train)


def set_result_aside(config: Config, start: Path) -> None:
    """Rename the result of a finished run after its last step, when the run goes on. Call it on one rank."""
    result, _ = result_of(config)
    if result.exists():
        # One of the same step may be there: of a start that had nothing left to do but to upload its result.
        ends = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
        free = (result.with_name(f"{result.name}-{start.name}{end}") for end in ends)
        kept = next(path for path in free if not path.exists())
        with io_errors(kept, 0):
            rename_synced(result, kept)
        log.info(f"finished   before, after {start.name}; its result is now {kept}")


def result_of(config: Config) -> tuple[Path, str]:
    """Return the directory of a run's result, and the file without which nothing takes it for a model or an adapter."""
    name, last = (MODEL, "config.json") if config.lora is None else (ADAPTER, "adapter_config.json")
    return Path(config.output_dir, name), last


def _is_finished(config: Config) -> bool:
    """Return whether the result is everywhere it belongs: a run that was killed while uploading it goes on."""
    return result_of(config)[0].exists() and (config.checkpoint.remote is None or has_result(config))


def _finished(config: Config, train: TrainConfig) -> InputError:
    """Return what one can do with a run that has ended."""
    key = "model.name_or_path" if config.lora is None else "lora.from_adapter"
    limit = f" or train.max_steps ({train.max_steps})" if train.max_steps is not None else ""
    more = f"raise train.num_epochs ({train.num_epochs}){limit} to train on, or "
    if not published(Path(config.output_dir) / CHECKPOINTS):
        more = ""
    return InputError(
        f"output_dir {config.output_dir} holds this run, finished; {more}set {key} to {result_of(config)[0]} and "
        "choose another output_dir to go on with other data or settings",
        key="run.finished",
    )


def did_no_step(directory: Path) -> bool:
    """Return whether a start in this directory left nothing: no result, no checkpoint and no row of metrics."""
    metrics = directory / "metrics.jsonl"
    results = [directory / name for name in (MODEL, ADAPTER, "report.html")]
    return not (
        published(directory / CHECKPOINTS)
        or any(path.exists() for path in results)
        or (metrics.exists() and metrics.stat().st_size > 0)
    )


def write_config(config: Config) -> None:
    """Write the configuration completely or not at all: a run that is killed here must find one that it can read.

    Removes what an earlier start without a step has left of another configuration.
    """
    path, content = Path(config.output_dir) / CONFIG_FILE, dump_config(config).encode()
    if config.checkpoint.remote is not None:
        withdraw_result(config)
    with io_errors(path, len(content)):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and read_file(path) != content and did_no_step(path.parent):
            (path.parent / "run.json").unlink(missing_ok=True)
        replace_synced(path, content)


def open_remote(config: Config) -> RemoteCheckpoints:
    assert config.checkpoint.remote is not None
    return RemoteCheckpoints(Storage(config.checkpoint.remote, "checkpoint.remote"))


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
            for name, limit in RECORDS.items() if step is not None else ():
                # Rows after the checkpoint are removed by whoever continues the records.
                if name != CONFIG_FILE and (content := remote.run.read(name, limit)) is not None:
                    with io_errors(path := Path(config.output_dir, name), len(content)):
                        replace_synced(path, content)
    if (found := from_rank_0(step)) is not None:
        download(remote, found, Path(config.output_dir) / CHECKPOINTS)


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
        raise resume_is_never(where, step_name(newest), "checkpoint.remote")
    _refuse_other_run(config, remote, newest)
    if not config.checkpoint.resume_weights_only and resume != "auto":
        by_name = step_of(Path(resume)) if "/" not in resume else None
        if by_name != newest:
            raise in_the_way(resume, where, step_name(newest), "checkpoint.remote")
    if newest in here:
        if read_file(here[newest] / MANIFEST) != remote.manifest(newest):
            raise other_run(where, f"{step_name(newest)} is not the one in output_dir {config.output_dir}")
        return None
    return newest if newest > max(here, default=-1) else None


def _refuse_other_run(config: Config, remote: RemoteCheckpoints, step: int) -> None:
    """Refuse another run by the configuration beside a checkpoint, before all of it is downloaded."""
    content, where = remote.config(step), f"{remote.storage.url}/{step_name(step)}/{CONFIG_FILE}"
    if content is None:
        raise other_run(remote.storage.url, f"{step_name(step)} was not written by a training run")
    before = config_from(content.decode(errors="backslashreplace"), where)
    forbidden, _ = config_differences(*(flat(each.model_dump(mode="json")) for each in (before, config)))
    if forbidden:
        go_on = f"put it back to continue that run{ways_on(forbidden, None)}, or "
        raise other_run(remote.storage.url, "; ".join(forbidden.values()), go_on)


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
    storage, (result, last) = open_remote(config).run, result_of(config)
    _upload_records(storage, Path(config.output_dir))
    target = storage.below(result.name)
    names = [path.relative_to(result).as_posix() for path in result.rglob("*") if path.is_file()]
    target.remove([last])
    target.remove(target.sizes().keys() - set(names))
    put(target, result, [each for each in names if each != last])
    target.write(last, read_file(result / last))
    log.info(f"uploaded   {result} to {target.url}")


def has_result(config: Config) -> bool:
    """Return whether `checkpoint.remote` has the complete result of `output_dir`."""
    result, last = result_of(config)
    return open_remote(config).run.below(result.name).read(last) == read_file(result / last)


def withdraw_result(config: Config) -> None:
    """Remove what an earlier start has uploaded as the result, while the run goes on. For rank 0."""
    result, last = result_of(config)
    open_remote(config).run.below(result.name).remove([last])


def _upload_records(run: Storage, output: Path) -> None:
    for name, limit in RECORDS.items():
        if (output / name).is_file():
            run.write(name, read_file(output / name, limit))
