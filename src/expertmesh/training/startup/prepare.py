"""Prepare everything of a run that comes before its weights: data, mesh, the start of the run, the sharded model.

Every rank calls `prepare`. Afterwards all is known, nothing is allocated, and no weight has been read. A run in object
storage (`checkpoint.remote`) is downloaded first to a machine whose `output_dir` is empty or older; uploads.py uploads
what is found.
"""

import datetime
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from expertmesh.checkpoint.directory import CHECKPOINTS, published, step_name
from expertmesh.checkpoint.manifest import CONFIG_FILE, MANIFEST, step_of
from expertmesh.checkpoint.remote import RemoteCheckpoints, download
from expertmesh.config import Config
from expertmesh.config.errors import InputError
from expertmesh.config.files import config_from
from expertmesh.data import BatchLayout, EvaluationBatches, StreamBatches, TokenizedDataset, TrainingBatches
from expertmesh.distributed.all_ranks import from_rank_0, raise_on_all_ranks
from expertmesh.distributed.mesh import Mesh, build_mesh, current_device, set_timeout, start_process_group
from expertmesh.experts.install import close_library
from expertmesh.io.reading import read_file
from expertmesh.io.terminal import print_log
from expertmesh.parallel.apply import shard_model
from expertmesh.training.resume import (
    Identity,
    check_start,
    config_differences,
    date_of,
    find_start,
    find_weights,
    flat,
    ways_on,
)
from expertmesh.training.startup.data import RunData, read_data, stop_where_taught
from expertmesh.training.startup.output_dir import refuse_no_more_steps, set_result_aside, write_config
from expertmesh.training.startup.placement import place_experts
from expertmesh.training.startup.uploads import fetch_records, open_remote
from expertmesh.weights.load import bytes_to_read

if TYPE_CHECKING:
    from expertmesh.training.control import Control
    from expertmesh.training.startup.model_check import Checked


log = logging.getLogger(__name__)
_PROBE = "expertmesh-probe"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that is ready to read weights, as this rank sees it. Its model is sharded and may still be on meta."""

    config: Config
    checked: "Checked"
    mesh: Mesh
    data: RunData
    batch_layout: BatchLayout
    batches: TrainingBatches | StreamBatches
    evaluation: Mapping[str, EvaluationBatches]
    total_steps: int
    bytes_to_load: int
    """Bytes of the model's files that this rank reads."""
    identity: Identity
    start: Path | None
    """The checkpoint that it continues."""
    weights: Path | None
    """Another run's checkpoint that this one begins with."""
    changes: tuple[str, ...]
    """Changes since that start; on rank 0 alone."""

    @property
    def model(self) -> PreTrainedModel:
        return self.checked.model

    def mismatched(self) -> Iterator[TokenizedDataset]:
        """Yield the mismatched rows of training and of each evaluation, for kto; nothing for other objectives."""
        if self.config.objective.judged:
            assert isinstance(self.batches, TrainingBatches)
            yield self.batches.mismatched(self.total_steps)
            yield from (each.mismatched().dataset for each in self.evaluation.values())

    def close(self) -> None:
        """Free buffers that a library holds on the device. Every rank calls it after the last dispatch."""
        close_library(self.model)


def prepare(config: Config, control: "Control", checked: "Checked") -> Prepared:
    """Prepare for reading weights. Every rank calls it."""
    start: Path | None = None
    weights: Path | None = None
    date = ""
    restore(config)
    with raise_on_all_ranks("looking for a checkpoint"):
        if dist.get_rank() == 0:
            start, weights = find_start(config), find_weights(config)
            date = str(date_of(start) or "")
    known = from_rank_0(date)
    data = read_data(config, checked, datetime.date.fromisoformat(known) if known else None, partial(say, control))
    stop_where_taught(checked.model, data.reports[0], data.tokenizer)
    mesh = _open_mesh(config, checked)
    train, layout = config.train, _batch_layout(config, mesh, data)
    batches, total_steps = _batches(config, layout, data)
    evaluation = {name: EvaluationBatches(dataset, layout) for name, dataset in data.evaluation.items()}
    with raise_on_all_ranks("comparing the data"):
        identity = Identity.of(config, checked.directory, data.training, data.date)
    identity.agree()
    changes: Sequence[str] = ()
    with raise_on_all_ranks("comparing with the checkpoint"):
        if start is not None:
            changes = check_start(start, identity, total_steps, config)
            refuse_no_more_steps(config, start, total_steps)
    shared, begun = from_rank_0(str(start or "")), from_rank_0(str(weights or ""))
    checked = place_experts(config, checked, mesh, batches, partial(say, control))
    say(control, "sharding the model")
    torch.manual_seed(train.seed + mesh.rank)
    shard_model(checked.model, checked.plan, mesh)
    if checked.objective.teacher is not None:
        checked.objective.teacher.shard(mesh)
    with raise_on_all_ranks("reading the headers of the weights"):
        to_load = 0 if checked.weights_seed is not None else bytes_to_read(checked.model, checked.directory)
    with raise_on_all_ranks("writing the configuration"):
        if mesh.rank == 0:
            if start is not None:
                set_result_aside(config, start)
            write_config(config)
    return Prepared(
        config,
        checked,
        mesh,
        data,
        layout,
        batches,
        evaluation,
        total_steps,
        to_load,
        identity,
        Path(shared) if shared else None,
        Path(begun) if begun else None,
        tuple(changes),
    )


def _batches(config: Config, layout: BatchLayout, data: RunData) -> tuple[TrainingBatches | StreamBatches, int]:
    """Return the steps of training, and how many there will be."""
    train = config.train
    if data.stream is not None:
        assert train.max_steps is not None
        return StreamBatches(data.stream, layout, global_batch_size=train.global_batch_size), train.max_steps
    batches = TrainingBatches(
        data.training,
        layout,
        global_batch_size=train.global_batch_size,
        shuffle=config.data.shuffle,
        seed=train.seed,
        mixture=data.mixture,
    )
    total_steps = batches.total_steps(train.num_epochs)
    return batches, min(total_steps, train.max_steps or total_steps)


def begin(config: Config, control: "Control") -> None:
    """Join the job, and print the first lines: from here on this rank prints what `log.level` allows."""
    start_process_group(current_device(), config.distributed.first_step_timeout_seconds)
    print_log(config.log.level, dist.get_rank())
    say(control, "building the model on meta and planning its shards")


def say(control: "Control", what: str) -> None:
    """Report what this rank does now to the launcher, and on rank 0 to the terminal."""
    control.progress.at(0, what)
    log.log(logging.INFO if dist.get_rank() == 0 else logging.DEBUG, f"starting   {what}")


def _open_mesh(config: Config, checked: "Checked") -> Mesh:
    """Open the mesh of the layout that every rank has resolved by itself; `build_mesh` compares."""
    mesh = build_mesh(checked.layout, current_device())
    set_timeout(mesh, config.distributed.first_step_timeout_seconds)
    return mesh


def _batch_layout(config: Config, mesh: Mesh, data: RunData) -> BatchLayout:
    """Return what training and evaluation batches have in common."""
    return BatchLayout(
        micro_batch_size=config.train.micro_batch_size,
        data_rank=mesh.data_rank,
        data_ranks=mesh.layout.data_ranks,
        packing=config.data.packing,
        pad_token_id=data.pad_token_id,
        max_length=config.data.max_length,
    )


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
