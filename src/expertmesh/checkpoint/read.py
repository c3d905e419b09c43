"""Loads checkpoints into any layout: PyTorch's distributed checkpoint (DCP) decides who needs which part of what.

`open_state` reads manifest and headers; `ChunkReader` is DCP's storage interface over our files, by byte range; and
`restore` puts model, optimizer and generators back. Each file's hash is compared before a value is used.
Never opens a pickle: DCP's own metadata file is one, so its place is taken by the manifest.
"""

import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from transformers import PreTrainedModel

from expertmesh.checkpoint.manifest import MANIFEST, Manifest, TensorEntry, read_manifest
from expertmesh.checkpoint.part import saved_offsets_in, set_rng_state
from expertmesh.checkpoint.small_files import damaged, read_generators
from expertmesh.checkpoint.state import allocate_optimizer_state, model_state
from expertmesh.config.errors import IntegrityError
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.io.safetensors_reader import DTYPES, FileTensor, WeightFiles, read_header, read_metadata
from expertmesh.state.sharded_model import mesh_of
from expertmesh.state.stage_view import is_on_other_stage
from expertmesh.weights.lazy import LazyTensor
from expertmesh.weights.reading import read_box

_HASHED_BYTES = 1 << 24


ChunkKey = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class SavedState:
    """An opened checkpoint: its manifest, and by (tensor, offset) the chunks as tensors of their files."""

    directory: Path
    manifest: Manifest
    chunks: Mapping[ChunkKey, FileTensor]
    files: WeightFiles


@contextmanager
def open_state(directory: Path, *, rank: int = 0, ranks: int = 1) -> Iterator[SavedState]:
    """Read the manifest and the headers of every `ranks`-th file; no values. Other headers are read when a chunk of
    theirs is asked for: with many ranks, each file is looked at by one of them and by those that need it.

    Raises what `read_manifest` raises, `IntegrityError` for a header that disagrees with the manifest. Issues no
    collective.
    """
    manifest = read_manifest(directory)
    chunks = _ChunksOnDemand(directory, manifest)
    numbers = [number for number, file in enumerate(manifest.files) if is_tensor_file(file.name)]
    for number in numbers[rank::ranks]:
        chunks.match(number)
    with WeightFiles(directory, {}) as files:
        yield SavedState(directory, manifest, chunks, files)


def is_tensor_file(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name


class _ChunksOnDemand(Mapping[ChunkKey, FileTensor]):
    """All chunks of a manifest; the header of a file is read and compared before the first of its chunks is given."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory, self._manifest = directory, manifest
        self._expected, problems = expected_chunks(directory, manifest)
        if problems:
            raise IntegrityError(problems[0])
        self._file_of = {key: number for number, chunks in self._expected.items() for key in chunks}
        self._matched: dict[int, dict[ChunkKey, FileTensor]] = {}

    def match(self, number: int) -> dict[ChunkKey, FileTensor]:
        if number not in self._matched:
            path = self._directory / self._manifest.files[number].name
            chunks, problems = match_header(path, read_header(path), self._expected.get(number, {}))
            if problems:
                raise IntegrityError(problems[0])
            self._matched[number] = chunks
        return self._matched[number]

    def __getitem__(self, key: ChunkKey) -> FileTensor:
        return self.match(self._file_of[key])[key]

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def expected_chunks(
    directory: Path, manifest: Manifest
) -> tuple[dict[int, dict[ChunkKey, tuple[tuple[int, ...], torch.dtype]]], list[str]]:
    """What a manifest expects of each file, by its number: chunks with shape and dtype; and what cannot be."""
    expected: dict[int, dict[ChunkKey, tuple[tuple[int, ...], torch.dtype]]] = {}
    problems = []
    for name, entry in manifest.tensors().items():
        for chunk in entry.chunks:
            file = manifest.files[chunk.file].name
            if not is_tensor_file(file):
                problems.append(f"{directory / MANIFEST}: damaged: looks for {name} in {file}")
            shape = (tuple(chunk.shape), DTYPES[entry.dtype])
            expected.setdefault(chunk.file, {})[name, tuple(chunk.offset)] = shape
    return expected, problems


def match_header(
    path: Path, header: Mapping[str, FileTensor], expected: Mapping[ChunkKey, tuple[tuple[int, ...], torch.dtype]]
) -> tuple[dict[ChunkKey, FileTensor], list[str]]:
    """Find the `expected` chunks of one file in its `header`: chunks by (tensor, offset), and what does not match.

    The header says too where each chunk belongs, so that a manifest alone cannot exchange two experts.
    """
    belongs = saved_offsets(path)
    chunks: dict[ChunkKey, FileTensor] = {}
    problems: list[str] = []
    for (name, offset), (shape, dtype) in expected.items():
        stored, here = header.get(name), belongs.get(name)
        if stored is None or (stored.shape, stored.dtype) != (shape, dtype):
            problems.append(f"{path}: does not hold the part of {name} that the manifest says")
        elif here != list(offset):
            problems.append(
                f"{path}: holds the part of {name} from {here} on, not from {list(offset)} as the manifest says"
            )
        else:
            chunks[name, offset] = stored
    named = {name for name, _ in expected}
    problems += [f"{path}: holds {name}, which the manifest does not name" for name in header.keys() - named]
    return chunks, problems


def saved_offsets(path: Path) -> dict[str, list[int]]:
    """Where in their tensors the parts of a file start, by name, as its header says. Raises `IntegrityError`."""
    try:
        return saved_offsets_in(read_metadata(path))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"{path}: damaged: its header does not say where its tensors belong ({error})") from error


def check_hashes(state: SavedState, *, rank: int = 0, ranks: int = 1, optimizer: bool = True) -> None:
    """Compare every `ranks`-th file, from number `rank` on, with its hash; without `optimizer`, not its files.

    `IntegrityError` names the file.
    """
    moments = {chunk.file for entry in state.manifest.optimizer.values() for chunk in entry.chunks}
    files = [file for number, file in enumerate(state.manifest.files) if optimizer or number not in moments]
    for file in files[rank::ranks]:
        if file_sha256(state.directory / file.name) != file.sha256:
            raise damaged(state.directory / file.name)


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASHED_BYTES):
            digest.update(block)
    return digest.hexdigest()


@torch.no_grad()
def restore(model: PreTrainedModel, optimizer: torch.optim.Optimizer | None, state: SavedState) -> None:
    """Fill a sharded model, its optimizer and torch's generators from an opened checkpoint that fits.

    Every rank calls it, with the same checkpoint; the model's shards have to be allocated. `optimizer` None leaves the
    saved moments alone. Generators come back on the ranks that the saved job had too. Raises `IntegrityError` for a
    damaged one on all ranks alike, before anything is changed. Issues a few small all-reduces on the default group; no
    weights travel between ranks.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with raise_on_all_ranks("comparing the checkpoint with its hashes"):
        generators = read_generators(state.directory, state.manifest)
        check_hashes(state, rank=rank, ranks=ranks)
    with raise_on_all_ranks("loading the checkpoint"):
        targets = model_state(model)
        if optimizer is not None:
            saved = state.manifest.optimizer.items()
            shapes = {name: (DTYPES[entry.dtype], tuple(entry.shape)) for name, entry in saved}
            targets |= allocate_optimizer_state(model, optimizer, shapes)
        read_state(state, {name: tensor for name, tensor in targets.items() if not is_on_other_stage(tensor)})
        if rank < len(generators):
            set_rng_state(generators[rank], mesh_of(model).device)


def read_state(state: SavedState, targets: dict[str, Tensor]) -> None:
    """Fill `targets` (DTensors or plain, by saved name) through DCP's planner. No collective."""
    with warnings.catch_warnings():
        # Each rank plans for itself: the manifest tells it all that a coordinator would.
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")
        dcp_load(targets, storage_reader=ChunkReader(state), no_dist=True)


class ChunkReader(StorageReader):
    """DCP's storage interface over the chunks of a checkpoint of ours."""

    def __init__(self, state: SavedState) -> None:
        self.state = state

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors = self.state.manifest.tensors()
        return Metadata(state_dict_metadata={name: _storage_metadata(entry) for name, entry in tensors.items()})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        def fetch(leaf: Any, box: Any, out: Tensor) -> None:
            self.state.files.read(leaf, box, out)

        for item in plan.items:
            chunk = self.state.chunks[_key(item.storage_index)]
            box = tuple((start, start + size) for start, size in zip(item.storage_offsets, item.lengths, strict=True))
            target = planner.resolve_tensor(item).detach()
            read_box(LazyTensor.of(chunk), box, target, fetch)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: a reader is made for one checkpoint."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: the headers are read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _storage_metadata(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape)) for chunk in entry.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[entry.dtype]), torch.Size(entry.shape), chunks)


def _key(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())


def check_fits(state: SavedState, targets: Mapping[str, Tensor]) -> None:
    """Raise `IntegrityError` unless the checkpoint's model has the names, shapes and dtypes of `targets`."""
    saved = state.manifest.model
    problems = [f"{name} is not in it" for name in targets if name not in saved]
    problems += [f"{name} is not in the model" for name in saved if name not in targets]
    for name in targets.keys() & saved.keys():
        here, there = targets[name], saved[name]
        if (tuple(here.shape), here.dtype) != (tuple(there.shape), DTYPES[there.dtype]):
            problems.append(
                f"{name} is {there.dtype} {there.shape} in it, {here.dtype} {list(here.shape)} in the model"
            )
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise IntegrityError(f"{state.directory}: does not fit the model: {'; '.join(sorted(problems)[:5])}{more}")
