"""Join the parts that all ranks have written to one checkpoint, and give it its name.

For write.py, on rank 0. Compares the copies that replicas held, checks that nothing is missing or written twice, writes
the manifest, and renames the directory; only then is it a checkpoint. From each rank it reads a summary of a few kB:
work and memory grow with the number of ranks and with that of tensors, not with their product.
"""

import hashlib
import platform
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

from expertmesh import __version__
from expertmesh.checkpoint.manifest import CONFIG_FILE, MANIFEST
from expertmesh.checkpoint.part import ListedTensor, Note, SharedBox, note_path, read_fingerprints, read_note
from expertmesh.checkpoint.schema import KINDS, FileEntry, Manifest, TensorEntry, Tiling
from expertmesh.checkpoint.small_files import write_generators
from expertmesh.config.errors import IntegrityError
from expertmesh.io.boxes import Box, volume
from expertmesh.io.directory import wait_until_seen
from expertmesh.io.safetensors_writer import rename_synced, write_synced


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


@dataclass(slots=True)
class _Copies:
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
    copies: dict[str, dict[Box, _Copies]] = field(default_factory=dict)
    """By sharding."""
    leader: tuple[int, str] = (0, "")
    """The first rank of the current pipeline stage, and the hash of its listing."""

    def add(self, rank: int, note: Note) -> None:
        """Add the summary of the next rank.

        Raises:
            IntegrityError: The rank holds other tensors than its stage, or other values of a copy than another rank.
        """
        self.files += note.files
        self.rng.append(note.rng)
        if note.listing is not None:
            self.leader = rank, note.tensors
            for kind, name, entry in note.listing:
                if self.tensors.setdefault((kind, name), entry) != entry:
                    raise IntegrityError(
                        f"{name}: rank {rank} holds another dtype or layout of it than another stage",
                        key="model.replicas-differ",
                    )
        elif note.tensors != self.leader[1]:
            raise IntegrityError(
                f"rank {rank} holds other tensors than rank {self.leader[0]} of the same stage, so this job does not "
                "train one model; the checkpoint was not written",
                key="model.replicas-differ",
            )
        for sharding, shared in note.boxes.items():
            copies = self.copies.setdefault(sharding, {})
            if not volume(shared.box):
                continue
            first = copies.setdefault(shared.box, _Copies(rank, shared))
            if shared.copies != first.shared.copies:
                self._refuse_copies(sharding, first.first, rank)
            first.count += 1
            first.writers += [rank] * shared.writes

    def _refuse_copies(self, sharding: str, first: int, rank: int) -> None:
        """Raise `IntegrityError` naming a tensor of which the two ranks hold different copies."""
        one, other = (read_fingerprints(self.directory, each) for each in (first, rank))
        names = (name for (_, name), (_, _, cut) in self.tensors.items() if cut == sharding)
        name = next(name for name in names if one.get(name) != other.get(name))
        raise IntegrityError(
            f"{name}: the copies of rank {first} and rank {rank} differ, so this job does not train one "
            "model; the checkpoint was not written. Start again from an earlier one",
            key="model.replicas-differ",
        )


def publish(temporary: Path, target: Path, job: SavedJob) -> Manifest:
    """Complete `temporary` and rename it to `target`. One rank calls it, after all ranks have written their parts.

    Issues no collective.

    Raises:
        IntegrityError: Copies differ or parts are missing; names the tensor, and the ranks whose copies differ.
    """
    joined = _Joined(temporary)
    for rank in range(job.world_size):
        wait_until_seen(note_path(temporary, rank))
        joined.add(rank, read_note(temporary, rank))
    write_generators(temporary, joined.rng)
    manifest = _manifest(temporary, job, joined)
    # The manifest is the last file: it has the hashes of all others.
    write_synced(temporary / MANIFEST, manifest.model_dump_json(exclude_none=True).encode())
    for rank in range(job.world_size):
        note_path(temporary, rank).unlink()
    rename_synced(temporary, target)
    return manifest


def _manifest(directory: Path, job: SavedJob, joined: _Joined) -> Manifest:
    """Make the manifest of all files in `directory` except the summaries; hash those that no rank has hashed."""
    names = {file.name for file in joined.files} | {note_path(directory, rank).name for rank in range(job.world_size)}
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    others = [(path, path.relative_to(directory).as_posix()) for path in paths]
    files = joined.files + [_hashed(path, name) for path, name in others if name not in names]
    tilings: dict[str, tuple[int, Tiling]] = {}
    numbers: dict[str, int] = {}
    entries: dict[str, dict[str, TensorEntry]] = {kind: {} for kind in KINDS}
    for (kind, name), (dtype, shape, sharding) in joined.tensors.items():
        if sharding not in numbers:
            tiling = _tiling(name, shape, joined.copies[sharding])
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


def _tiling(name: str, shape: tuple[int, ...], boxes: dict[Box, _Copies]) -> Tiling:
    """Return the tiling of a tensor. Raises `IntegrityError` if its parts have holes, overlap, or differ in copies."""
    counts = {copies.count for copies in boxes.values()} or {1}
    writers = {box: copies.writers[0] for box, copies in boxes.items() if copies.writers}
    try:
        if len(counts) > 1 or any(len(copies.writers) > 1 for copies in boxes.values()):
            raise ValueError("its parts are not held, or not written, by equally many ranks")
        return Tiling.of(shape, writers, counts.pop())
    except ValueError as error:
        raise IntegrityError(
            f"{name}: cannot be saved: {error}; the model is not sharded as its DTensors say",
            key="model.not-sharded-as-declared",
        ) from error


def _hashed(path: Path, name: str) -> FileEntry:
    content = path.read_bytes()
    return FileEntry(name=name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
