"""Save checkpoints: every rank writes its part, and rank 0 publishes all of them by one rename.

Writing and publishing need no communication, so they can run on a thread while training continues. A rank reports its
progress to the others by one number, which is counted in an exchange that they make anyway (`status`, `settle`). No
collective ever runs on that thread, and no checkpoint is visible under its name before all of it is on the disk.

To publish, rank 0 compares the copies that replicas held, checks that nothing is missing or written twice, writes the
manifest, and renames the directory. From each rank it reads a summary of a few kB: work and memory grow with the number
of ranks and with that of tensors, not with their product.
"""

import hashlib
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from torch import Tensor, nn

from expertmesh import __version__
from expertmesh.checkpoint.directory import later_exists, prune, published, step_name
from expertmesh.checkpoint.manifest import AXES, CONFIG_FILE, KINDS, MANIFEST, FileEntry, Manifest, TensorEntry, Tiling
from expertmesh.checkpoint.small_files import write_generators
from expertmesh.checkpoint.state import (
    ListedTensor,
    RankPart,
    RankSummary,
    SharedBox,
    model_state,
    optimizer_state,
    read_fingerprints,
    read_summary,
    summary_path,
    take_part,
    trained,
    write_part,
)
from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.distributed.all_ranks import from_rank_0, gather_objects, raise_on_all_ranks, rank_and_ranks
from expertmesh.io.boxes import Box, volume
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
from expertmesh.state.model_view import ModelView, mesh_of
from expertmesh.state.shards import on_other_stage
from expertmesh.weights.write import not_as_declared

if TYPE_CHECKING:
    from expertmesh.checkpoint.remote import Uploads


STATUSES = range(5)
IDLE, WRITING, WRITTEN, PUBLISHED, FAILED = STATUSES


@dataclass(frozen=True, slots=True)
class SavedJob:
    """The facts about the job that a manifest holds."""

    step: int
    """The optimizer step after which the state was saved."""
    layout: dict[str, int]
    """The sizes of the mesh's axes."""
    trained: tuple[str, ...]
    """The names of the parameters that the optimizer updates."""

    @property
    def world_size(self) -> int:
        layout = self.layout
        return layout["pp"] * layout["replicate"] * layout["fsdp"] * layout["cp"] * layout["tp"]


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that was saved."""

    directory: Path
    """The checkpoint."""
    step: int
    """The optimizer step after which it was saved."""
    total_bytes: int
    """The size of all tensors."""
    bytes_written: int
    """The size of the tensors that this rank wrote."""
    files: int | None
    """The number of files; None on other ranks than 0."""
    paused_seconds: float
    """The time for which training waited on this rank."""
    seconds: float
    """The time from the start of the save to its end."""


@dataclass(frozen=True, slots=True)
class _Save:
    """A checkpoint that is being written."""

    temporary: Path
    """The directory that is renamed at the end."""
    part: RankPart
    """The part that this rank writes."""
    job: SavedJob
    """Facts about the job for the manifest."""
    total_bytes: int
    """The size of all tensors."""
    started: float
    """`time.monotonic()` at the start of the save."""
    paused: float
    """Seconds for which training waited so far."""
    writing: Future[None]
    """The writing of this rank's part, on a thread."""


class CheckpointWriter:
    """A writer of the checkpoints of one run, one at a time. Every rank has one, and all make the same calls in order.

    Args:
        directory: The directory of the run's checkpoints.
        keep_last: The number of newest checkpoints that are not removed, beside that of step `keep_step`; None for all.
        asynchronous: `save` returns when this rank's part has been copied to host memory, not when the checkpoint is
            published.
        uploads: On rank 0, uploads the published checkpoints, which are not removed before that.
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
        self._rank = rank_and_ranks()[0]
        # One worker, so that writing, publishing and pruning never overlap.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._save: _Save | None = None
        # On rank 0, while `_save` is set: joins the parts that all ranks have written.
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
        """Save the state after optimizer step `step`. An earlier save must be finished.

        Args:
            files: On rank 0, the other files of the checkpoint by path inside it.
            weights: False leaves the model's tensors out.

        Returns:
            The checkpoint, or None while it is still being written; then `settle` or `finish` returns it.

        Raises:
            InputError: This or a later step exists, or the disk is full.
            IntegrityError: Copies differ.

        Collectives: every rank calls it with the same `step`; small ones on the default group, no weights. Errors are
        raised on all ranks.
        """
        assert self._save is None, "finish the checkpoint before this one first"
        started = time.monotonic()
        mesh = mesh_of(model)
        target = self.directory / step_name(step)
        # One name on all ranks, and another one than that of an interrupted save.
        temporary = target.with_name(f"{target.name}.tmp-{from_rank_0(f'{time.time_ns():x}')}")
        with raise_on_all_ranks("collecting the training state"):
            tensors: dict[str, dict[str, Tensor]] = {"model": model_state(model) if weights else {}}
            if optimizer is not None:
                tensors["optimizer"] = optimizer_state(model, optimizer)
            here = trained(model, optimizer) if optimizer is not None else {}
        # The free space has to suffice for all stages, and the manifest names what all of them train.
        tensors, updated = _of_all_stages(model, tensors, here)
        needed = sum(tensor.numel() * tensor.itemsize for state in tensors.values() for tensor in state.values())
        with temporary_directory(temporary, remove=self._rank == 0):
            with raise_on_all_ranks("creating the checkpoint's directory"):
                if self._rank == 0:
                    if self._pruning is not None:
                        wait([self._pruning])  # what it removes counts as free; `_publish` raises its error
                    _create(step, target, temporary, needed, files)
            # A network file system may show the new directory to other nodes only later.
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
        """Return this rank's progress: IDLE, WRITING (or publishing), WRITTEN, PUBLISHED or FAILED.

        Does not communicate, and never waits.
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
        """Start publishing when all ranks have written their parts. Never waits unless a rank failed.

        Args:
            ranks: `ranks[s]` is the number of ranks whose `status()` was s, counted in one exchange.

        Returns:
            The checkpoint, once rank 0 has reported that it is published.

        Collectives: every rank calls it with the same numbers; none unless a rank failed, then those of `finish`,
        which raises the error on all ranks.
        """
        if ranks[FAILED]:
            return self.finish()
        if self._save is not None and ranks[PUBLISHED]:  # counts rank 0, the only one that publishes
            save, self._save = self._save, None
            return self._saved(save, paused=0.0)
        if self._rank == 0 and ranks[WRITTEN] == sum(ranks):
            self._start_publishing()
        return None

    def finish(self) -> SavedCheckpoint | None:
        """Wait until the checkpoint that is being written is published, and return it; None if there is none.

        Collectives: every rank calls it; two small all-reduces on the default group, none if nothing is being written.
        Errors are raised on all ranks.
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
            # Either all ranks have stopped writing, or one is lost: the next start removes the files that it leaves.
            if self._rank == 0:
                if self._publishing is not None:
                    # Wait for the thread: if it renames the directory during the removal, the removal continues
                    # inside the published checkpoint.
                    wait([self._publishing])
                shutil.rmtree(save.temporary, ignore_errors=True)
            raise
        finally:
            self._save = None
        return self._saved(save, time.monotonic() - started)

    def close(self) -> SavedCheckpoint | None:
        """Finish, and wait until old checkpoints are removed. The last call.

        Collectives: every rank calls it; those of `finish`, and one small all-reduce on the default group.
        """
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
        """Publish the save, submit its upload, and start removing old checkpoints.

        Runs on the thread of rank 0: reading the summaries of thousands of ranks takes long.
        """
        with io_errors(save.temporary, save.total_bytes):
            manifest = publish(save.temporary, self.directory / step_name(save.job.step), save.job)
        if self._pruning is not None:
            self._pruning.result()  # done already, as one thread runs both in order; raises its error
        keep: set[int | None] = {self.keep_step}
        if self.uploads is not None:
            self.uploads.submit(self.directory / step_name(save.job.step), self.keep_step)
            keep |= self.uploads.held()
        self._pruning = self._thread.submit(prune, self.directory, self.keep_last, keep)
        return manifest

    def _saved(self, save: _Save, paused: float) -> SavedCheckpoint:
        """Describe the saved checkpoint. `paused`: seconds that training has waited for it after `save` returned."""
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
    """Add the optimizer's tensors of other pipeline stages, without values.

    Returns:
        The tensors by kind and name, and the names of the parameters that all stages train, in the model's order.

    Collectives: every rank calls it; an all-gather of names and shapes on the pp group, none without stages.
    """
    mesh = mesh_of(model)
    if mesh.layout.pp == 1:
        return tensors, list(trained_here)
    own = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.get("optimizer", {}).items()}
    gathered = gather_objects((own, list(trained_here)), mesh.pp_group)
    if "optimizer" in tensors:
        every = {name: on_other_stage(dtype, shape) for slots, _ in gathered for name, (dtype, shape) in slots.items()}
        tensors = {**tensors, "optimizer": {**every, **tensors["optimizer"]}}
    names = {name for _, of_stage in gathered for name in of_stage}
    return tensors, [name for name in ModelView(model).state if name in names]


def _create(step: int, target: Path, temporary: Path, needed: int, files: Mapping[str, bytes]) -> None:
    """Make the temporary directory with the small files in it.

    Args:
        needed: Bytes of all tensors.

    Raises:
        InputError: This or a later step exists, the disk has too little room, or a write failed.
    """
    if target.exists():
        raise InputError(f"{target}: exists already; a checkpoint is never written over", key="checkpoint.exists")
    latest = max(published(target.parent), default=None)
    if latest is not None and latest[0] > step:
        mend = "choose another directory, or remove what is later"
        raise later_exists(f"step {step} is to be saved", target.parent, latest[1].name, mend)
    with io_errors(temporary, needed):
        make_synced(target.parent)
        require_space(target.parent, needed + sum(map(len, files.values())))
        temporary.mkdir()
        for name, content in files.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_synced(path, content)
        for path in {(temporary / name).parent for name in files}:
            sync(path)
        sync(temporary)


@dataclass(slots=True)
class _Holders:
    """The ranks that hold one box of all tensors with one sharding."""

    first: int
    """The lowest of them."""
    shared: SharedBox
    """The box as the first rank reports it."""
    count: int = 0
    """The number of ranks."""
    writers: list[int] = field(default_factory=list)
    """The ranks that write it."""


@dataclass(slots=True)
class _Joined:
    """The joined summaries of the ranks that were read so far."""

    directory: Path
    files: list[FileEntry] = field(default_factory=list)
    rng: list[dict[str, str]] = field(default_factory=list)
    """By rank."""
    tensors: dict[tuple[str, str], ListedTensor] = field(default_factory=dict)
    """By kind and name."""
    holders: dict[str, dict[Box, _Holders]] = field(default_factory=dict)
    """By sharding."""
    leader: tuple[int, str] = (0, "")
    """The first rank of the current pipeline stage, and the hash of its listing."""

    def add(self, rank: int, summary: RankSummary) -> None:
        """Add the summary of the next rank.

        Raises:
            IntegrityError: The rank holds other tensors than its stage, or other values of a copy than another rank.
        """
        self.files += summary.files
        self.rng.append(summary.rng)
        if summary.listing is not None:
            self.leader = rank, summary.tensors
            for kind, name, entry in summary.listing:
                if self.tensors.setdefault((kind, name), entry) != entry:
                    raise _differ(f"{name}: rank {rank} holds another dtype or layout of it than another stage")
        elif summary.tensors != self.leader[1]:
            raise _differ(f"rank {rank} holds other tensors than rank {self.leader[0]} of the same stage")
        for sharding, shared in summary.boxes.items():
            holders = self.holders.setdefault(sharding, {})
            if not volume(shared.box):
                continue
            first = holders.setdefault(shared.box, _Holders(rank, shared))
            if shared.replica_sha256 != first.shared.replica_sha256:
                one, other = (read_fingerprints(self.directory, each) for each in (first.first, rank))
                names = (name for (_, name), (_, _, cut) in self.tensors.items() if cut == sharding)
                name = next(name for name in names if one.get(name) != other.get(name))
                raise _differ(f"{name}: the copies of rank {first.first} and rank {rank} differ")
            first.count += 1
            first.writers += [rank] * shared.writes


def publish(temporary: Path, target: Path, job: SavedJob) -> Manifest:
    """Complete `temporary` and rename it to `target`. One rank calls it, after all ranks have written their parts.

    Issues no collective.

    Raises:
        IntegrityError: Copies differ or parts are missing; names the tensor, and the ranks whose copies differ.
    """
    joined = _Joined(temporary)
    for rank in range(job.world_size):
        wait_until_seen(summary_path(temporary, rank))
        joined.add(rank, read_summary(temporary, rank))
    write_generators(temporary, joined.rng)
    manifest = _manifest(temporary, job, joined)
    # The manifest is the last file: it has the hashes of all others.
    write_synced(temporary / MANIFEST, manifest.model_dump_json(exclude_none=True).encode())
    for rank in range(job.world_size):
        summary_path(temporary, rank).unlink()
    rename_synced(temporary, target)
    return manifest


def _manifest(directory: Path, job: SavedJob, joined: _Joined) -> Manifest:
    """Make the manifest of all files in `directory` except the summaries; hash those that no rank has hashed."""
    names = {file.name for file in joined.files} | {
        summary_path(directory, rank).name for rank in range(job.world_size)
    }
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    files = list(joined.files)
    for path in paths:
        if (name := path.relative_to(directory).as_posix()) not in names:
            content = path.read_bytes()
            files.append(FileEntry(name=name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest()))
    tilings: dict[str, tuple[int, Tiling]] = {}
    numbers: dict[str, int] = {}
    entries: dict[str, dict[str, TensorEntry]] = {kind: {} for kind in KINDS}
    for (kind, name), (dtype, shape, sharding) in joined.tensors.items():
        if sharding not in numbers:
            tiling = _tiling(name, shape, joined.holders[sharding])
            numbers[sharding], _ = tilings.setdefault(tiling.model_dump_json(), (len(tilings), tiling))
        entries[kind][name] = TensorEntry(dtype=dtype, shape=list(shape), tiling=numbers[sharding])
    return Manifest(
        step=job.step,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        world_size=job.world_size,
        layout=job.layout,
        versions={
            "expertmesh": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        config_sha256=next((file.sha256 for file in files if file.name == CONFIG_FILE), None),
        files=files,
        trained=list(job.trained),
        tilings=[tiling for _, tiling in tilings.values()],
        model=entries["model"],
        optimizer=entries["optimizer"],
    )


def _differ(what: str) -> IntegrityError:
    mend = "the checkpoint was not written; start again from an earlier one"
    return IntegrityError(f"{what}, so this job does not train one model; {mend}", key="model.replicas-differ")


def _tiling(name: str, shape: tuple[int, ...], boxes: dict[Box, _Holders]) -> Tiling:
    """Return the tiling of a tensor. Raises `IntegrityError` if its parts have holes, overlap, or differ in copies."""
    counts = {held.count for held in boxes.values()} or {1}
    writers = {box: held.writers[0] for box, held in boxes.items() if held.writers}
    try:
        if len(counts) > 1 or any(len(held.writers) > 1 for held in boxes.values()):
            raise ValueError("its parts are not held, or not written, by equally many ranks")
        orders = {held.shared.order for held in boxes.values()}
        return Tiling.of(shape, writers, counts.pop(), next(iter(orders), None))
    except ValueError as error:
        raise not_as_declared(name, str(error)) from error
