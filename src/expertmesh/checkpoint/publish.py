"""Joins the parts that all ranks have written to one checkpoint, and gives it its name.

For write.py, on rank 0. Compares the copies that replicas held, checks that nothing is missing or held twice, writes
the manifest, and renames the directory; only then is it a checkpoint.
"""

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from expertmesh.checkpoint.manifest import MANIFEST, Chunk, FileEntry, Manifest, TensorEntry, untiled
from expertmesh.checkpoint.part import Held, note_path, read_note
from expertmesh.config.errors import IntegrityError
from expertmesh.io.boxes import Box
from expertmesh.io.directory import wait_until_seen
from expertmesh.io.safetensors_writer import sync, write_synced

RNG_FILE = "rng.json"
CONFIG_FILE = "config.yaml"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a manifest says about the job: the step it stopped after, the sizes of its axes, and what it trains."""

    step: int
    layout: dict[str, int]
    trained: tuple[str, ...]

    @property
    def world_size(self) -> int:
        layout = self.layout
        return layout["pp"] * layout["replicate"] * layout["fsdp"] * layout["cp"] * layout["tp"]


def publish(temporary: Path, target: Path, facts: Facts) -> Manifest:
    """Complete `temporary` and rename it to `target`. One rank calls it, after all ranks have written their parts.

    Raises `IntegrityError` naming tensor and ranks if copies differ or parts are missing. No communication.
    """
    notes = []
    for rank in range(facts.world_size):
        wait_until_seen(note_path(temporary, rank))
        notes.append(read_note(temporary, rank))
    write_synced(temporary / RNG_FILE, json.dumps([note["rng"] for note in notes]).encode())
    manifest = _manifest(temporary, facts, notes)
    write_synced(temporary / MANIFEST, manifest.model_dump_json(exclude_none=True).encode())
    for rank in range(facts.world_size):
        note_path(temporary, rank).unlink()
    sync(temporary)
    os.rename(temporary, target)
    sync(target.parent)
    return manifest


def _manifest(directory: Path, facts: Facts, notes: list[dict[str, Any]]) -> Manifest:
    written = [FileEntry(**file) for note in notes for file in note["files"]]
    names = {file.name for file in written} | {note_path(directory, rank).name for rank in range(len(notes))}
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    others = [(path, path.relative_to(directory).as_posix()) for path in paths]
    files = written + [_hashed(path, name) for path, name in others if name not in names]
    number = {file.name: index for index, file in enumerate(files)}
    kinds: dict[str, dict[str, list[tuple[int, Held]]]] = {"model": {}, "optimizer": {}}
    for rank, note in enumerate(notes):
        for held in note["held"]:
            kinds[held.kind].setdefault(held.name, []).append((rank, held))
    of_rank = {
        (kind, rank): number[f"{kind}-{rank:05d}-of-{len(notes):05d}.safetensors"]
        for kind in kinds
        for rank in range(len(notes))
        if f"{kind}-{rank:05d}-of-{len(notes):05d}.safetensors" in number
    }
    config = next((file.sha256 for file in files if file.name == CONFIG_FILE), None)
    return Manifest(
        step=facts.step,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        world_size=len(notes),
        layout=facts.layout,
        versions={
            "expertmesh": version("expertmesh"),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        config_sha256=config,
        files=files,
        trained=list(facts.trained),
        model={name: _entry(name, held, of_rank) for name, held in kinds["model"].items()},
        optimizer={name: _entry(name, held, of_rank) for name, held in kinds["optimizer"].items()},
    )


def _entry(name: str, held: Iterable[tuple[int, Held]], file_of: Mapping[tuple[str, int], int]) -> TensorEntry:
    by_box: dict[Box, list[tuple[int, Held]]] = {}
    for rank, each in held:
        by_box.setdefault(each.box, []).append((rank, each))
    chunks = []
    for box, copies in by_box.items():
        first_rank, first = copies[0]
        for rank, other in copies[1:]:
            if (other.fingerprint, other.dtype) != (first.fingerprint, first.dtype):
                raise IntegrityError(
                    f"{name}: the copies of rank {first_rank} and rank {rank} differ, so this job does not train one "
                    "model; the checkpoint was not written. Start again from an earlier one"
                )
        for rank, each in copies:
            if each.writes:
                chunks.append(
                    Chunk(
                        file=file_of[each.kind, rank],
                        offset=[start for start, _ in box],
                        shape=[stop - start for start, stop in box],
                        copies=len(copies),
                        fingerprint=each.fingerprint,
                    )
                )
    entry = TensorEntry(dtype=first.dtype, shape=list(first.shape), chunks=chunks)
    if reason := untiled(entry):
        raise IntegrityError(f"{name}: cannot be saved: {reason}; the model is not sharded as its DTensors say")
    return entry


def _hashed(path: Path, name: str) -> FileEntry:
    content = path.read_bytes()
    return FileEntry(name=name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
