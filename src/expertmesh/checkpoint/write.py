"""Saves checkpoints: every rank writes its own part, rank 0 publishes the whole by one rename.

Writing and publishing need no communication, so they can run on a thread while training goes on. A rank tells the
others where it stands by one number that is counted in an exchange they make anyway (`status`, `settle`). No collective
ever runs on that thread, and nothing of a checkpoint is visible under its name before all of it is on the disk.
"""

import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from expertmesh.checkpoint.directory import prune, published, step_name
from expertmesh.checkpoint.part import RankPart, take_part, write_part
from expertmesh.checkpoint.publish import SavedJob, publish
from expertmesh.checkpoint.schema import AXES, Manifest
from expertmesh.checkpoint.state import model_state, optimizer_state, trained
from expertmesh.config.errors import InputError
from expertmesh.distributed.all_ranks import from_rank_0, raise_on_all_ranks
from expertmesh.io.directory import io_errors, require_space, temporary_directory, wait_until_seen
from expertmesh.io.safetensors_writer import sync, write_synced
from expertmesh.state.model_view import ModelView
from expertmesh.state.sharded_model import mesh_of
from expertmesh.state.shards import on_other_stage

if TYPE_CHECKING:
    from expertmesh.checkpoint.remote.upload import Uploads

STATUSES = range(5)
IDLE, WRITING, WRITTEN, PUBLISHED, FAILED = STATUSES


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """`total_bytes` are those of all tensors, `bytes_written` those that this rank wrote; `files` is known on rank 0.

    `paused_seconds` is how long training stood still for it on this rank, `seconds` how long it took in all.
    """

    directory: Path
    step: int
    total_bytes: int
    bytes_written: int
    files: int | None
    paused_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _Save:
    """A checkpoint that is being written."""

    temporary: Path
    part: RankPart
    job: SavedJob
    total_bytes: int
    started: float
    paused: float
    writing: Future[None]


class CheckpointWriter:
    """Writes the checkpoints of one run into `directory`, one at a time. Every rank has one, used in step.

    `keep_last` bounds how many stay (None: all), beside that of `keep_step`; what is published goes to `uploads`, which
    rank 0 may have, and stays until it is uploaded. With `asynchronous`, `save` returns when
    this rank's share has been copied to host memory; without, when the checkpoint is published.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep_last: int | None = None,
        asynchronous: bool = False,
        uploads: "Uploads | None" = None,
    ) -> None:
        self.directory = directory
        self.uploads = uploads
        self.keep_last = keep_last
        self.keep_step: int | None = None
        self.asynchronous = asynchronous
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._save: _Save | None = None
        # On rank 0, as long as `_save` is set: it joins what all ranks have written.
        self._publishing: Future[Manifest] | None = None
        self._pruning: Future[list[str]] | None = None

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        step: int,
        files: Mapping[str, bytes],
        *,
        weights: bool = True,
    ) -> SavedCheckpoint | None:
        """Save the state after optimizer step `step`. Every rank calls it, with the same `step`.

        `files` (used on rank 0) are what else belongs to the checkpoint, by path inside it; without `weights` the
        model's tensors do not. Returns the checkpoint, or None when it is still being written: then `settle`
        or `finish` returns it; an earlier one must be finished.
        Raises on all ranks alike `InputError` (this or a later step exists, disk full) and `IntegrityError` (copies
        that differ). Issues small collectives on the default group, none of them weights.
        """
        assert self._save is None, "finish the checkpoint before this one first"
        started = time.monotonic()
        mesh = mesh_of(model)
        target = self.directory / step_name(step)
        temporary = target.with_name(f"{target.name}.tmp-{from_rank_0(f'{time.time_ns():x}')}")
        tensors: dict[str, dict[str, Tensor]] = {"model": model_state(model) if weights else {}}
        if optimizer is not None:
            tensors["optimizer"] = optimizer_state(model, optimizer)
        tensors, updated = _of_all_stages(model, tensors, trained(model, optimizer) if optimizer is not None else {})
        needed = sum(tensor.numel() * tensor.itemsize for state in tensors.values() for tensor in state.values())
        with temporary_directory(temporary, remove=self._rank == 0):
            with raise_on_all_ranks("creating the checkpoint's directory"):
                if self._rank == 0:
                    _create(step, target, temporary, needed, files)
            with raise_on_all_ranks("looking for the checkpoint's directory"):
                wait_until_seen(temporary)
            with raise_on_all_ranks("copying the training state"):
                part = take_part(tensors, mesh, copy=self.asynchronous)
        job = SavedJob(step, {axis: mesh.layout.size(axis) for axis in AXES}, tuple(updated))
        writing = self._thread.submit(write_part, part, temporary, mesh.layout.world_size)
        self._publishing = None
        self._save = _Save(temporary, part, job, needed, started, time.monotonic() - started, writing)
        return None if self.asynchronous else self.finish()

    def status(self) -> int:
        """Where this rank stands: IDLE, WRITING (or publishing), WRITTEN, PUBLISHED or FAILED. No communication; never
        waits.
        """
        if self._save is None:
            return IDLE
        under_way = self._publishing or self._save.writing
        if not under_way.done():
            return WRITING
        if under_way.exception() is not None:
            return FAILED
        return WRITTEN if self._publishing is None else PUBLISHED

    def settle(self, ranks: Sequence[int]) -> SavedCheckpoint | None:
        """Start publishing what all ranks have written. `ranks[s]` have the `status()` s, in one exchange.

        Every rank calls it with the same numbers. Returns the checkpoint once rank 0 has said that it is complete;
        never waits. Communicates only after a failure, which it raises on all ranks alike.
        """
        if ranks[FAILED]:
            return self.finish()
        if self._save is not None and ranks[PUBLISHED]:  # rank 0: no other one publishes
            save, self._save = self._save, None
            return self._saved(save, paused=0.0)
        if self._rank == 0 and ranks[WRITTEN] == sum(ranks):
            self._start_publishing()
        return None

    def finish(self) -> SavedCheckpoint | None:
        """Wait until what is being written is published. Every rank calls it; raises on all ranks alike.

        Issues two small all-reduces on the default group, none if there is nothing to wait for.
        """
        save, started = self._save, time.monotonic()
        if save is None:
            return None
        try:
            with raise_on_all_ranks("writing the checkpoint"):
                save.writing.result()
            with raise_on_all_ranks("publishing the checkpoint"):
                if self._rank == 0:
                    (self._publishing or self._start_publishing()).result()
        except BaseException:
            # All ranks have stopped writing, or one is lost, and what it leaves is removed at the next start.
            if self._rank == 0:
                if self._publishing is not None:
                    # A removal that has begun goes on inside the directory after the thread has renamed it.
                    wait([self._publishing])
                shutil.rmtree(save.temporary, ignore_errors=True)
            raise
        finally:
            self._save = None
        return self._saved(save, time.monotonic() - started)

    def close(self) -> SavedCheckpoint | None:
        """`finish`, and wait until old checkpoints are gone. Every rank calls it, as its last call."""
        last = self.finish()
        self._thread.shutdown()
        with raise_on_all_ranks("removing old checkpoints"):
            if self._pruning is not None:
                self._pruning.result()
        return last

    def _start_publishing(self) -> Future[Manifest]:
        assert self._save is not None
        self._publishing = self._thread.submit(self._publish, self._save)
        return self._publishing

    def _publish(self, save: _Save) -> Manifest:
        """On the thread of rank 0: reading what thousands of ranks have written takes its time."""
        with io_errors(save.temporary, save.total_bytes):
            manifest = publish(save.temporary, self.directory / step_name(save.job.step), save.job)
        if self._pruning is not None:
            self._pruning.result()  # done: the thread does one thing after the other
        keep: set[int | None] = {self.keep_step}
        if self.uploads is not None:
            self.uploads.submit(self.directory / step_name(save.job.step), self.keep_step)
            keep |= self.uploads.held()
        self._pruning = self._thread.submit(prune, self.directory, self.keep_last, keep)
        return manifest

    def _saved(self, save: _Save, paused: float) -> SavedCheckpoint:
        return SavedCheckpoint(
            directory=self.directory / step_name(save.job.step),
            step=save.job.step,
            total_bytes=save.total_bytes,
            bytes_written=save.part.nbytes,
            files=len(self._publishing.result().files) if self._publishing is not None else None,
            paused_seconds=save.paused + paused,
            seconds=time.monotonic() - save.started,
        )


def _of_all_stages(
    model: nn.Module, tensors: dict[str, dict[str, Tensor]], trained_here: Mapping[str, Tensor]
) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """`tensors` with the optimizer's of other pipeline stages, without values, and what all stages train, in order.

    Issues an all-gather of names and shapes along pp; nothing without stages.
    """
    mesh = mesh_of(model)
    if mesh.layout.pp == 1:
        return tensors, list(trained_here)
    own = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.get("optimizer", {}).items()}
    gathered: list[tuple[dict[str, tuple[torch.dtype, tuple[int, ...]]], list[str]]] = [({}, [])] * mesh.layout.pp
    dist.all_gather_object(gathered, (own, list(trained_here)), group=mesh.pp_group)
    if "optimizer" in tensors:
        every = {name: on_other_stage(dtype, shape) for slots, _ in gathered for name, (dtype, shape) in slots.items()}
        tensors = {**tensors, "optimizer": {**every, **tensors["optimizer"]}}
    names = {name for _, of_stage in gathered for name in of_stage}
    return tensors, [name for name in ModelView(model).state if name in names]


def _create(step: int, target: Path, temporary: Path, needed: int, files: Mapping[str, bytes]) -> None:
    """Make the temporary directory with the small files in it, if the disk has room for the rest."""
    if target.exists():
        raise InputError(f"{target}: exists already; a checkpoint is never written over", key="checkpoint.exists")
    # Else `keep_last` would remove the new one as the oldest, and who looks for the newest would find another run's.
    latest = max(published(target.parent), default=None)
    if latest is not None and latest[0] > step:
        raise InputError(
            f"{target.parent}: holds {latest[1].name}, which is later than step {step}; choose another directory, or "
            "remove what is later",
            key="checkpoint.later-exists",
        )
    with io_errors(temporary, needed):
        target.parent.mkdir(parents=True, exist_ok=True)
        sync(target.parent.parent)
        require_space(target.parent, needed + sum(map(len, files.values())))
        temporary.mkdir()
        for name, content in files.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_synced(path, content)
        for path in {(temporary / name).parent for name in files}:
            sync(path)
        sync(temporary)
