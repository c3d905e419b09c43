"""Open a checkpoint for reading: its manifest, the headers of its files, and values by box of the global tensor.

Headers and manifest both say where each part belongs, so that a wrong manifest alone cannot exchange two experts: they
are compared before a value is used, and so is each file's hash. Never opens a pickle. Nothing here communicates.
"""

import hashlib
import itertools
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertmesh.checkpoint.manifest import (
    MEND,
    Manifest,
    damaged,
    does_not_fit,
    expecting,
    is_tensor_file,
    read_manifest,
)
from expertmesh.checkpoint.small_files import other_content
from expertmesh.config.errors import InputError
from expertmesh.io.boxes import Box, Piece, extents, full_box, slices, volume
from expertmesh.io.reading import open_file, parse_json, shortened
from expertmesh.io.safetensors_reader import DTYPES, FileTensor, WeightFiles, read_header, read_metadata
from expertmesh.weights.lazy import LazyTensor, read_box
from expertmesh.weights.load import first_not_finite


class Headers:
    """The byte offsets of all parts in their files.

    The header of a file is read and compared when its first part is requested. A part then takes 8 bytes of memory:
    files that hold the same names share one list of them.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory, self._manifest = directory, manifest
        self._orders: dict[tuple[str, ...], dict[str, int]] = {}
        self._offsets: dict[str, tuple[dict[str, int], array[int]]] = {}

    def check(self, files: Iterable[str]) -> None:
        """Read the headers of `files`. Raises `IntegrityError` for one that disagrees with the manifest."""
        for file in files:
            if file in self._offsets:
                continue
            header = read_header(self._directory / file)
            for problem in match_header(self._directory / file, header, self._manifest):
                raise damaged(problem)
            names = tuple(header)
            order = self._orders.setdefault(names, {name: number for number, name in enumerate(names)})
            self._offsets[file] = order, array("Q", (tensor.offset for tensor in header.values()))

    def find(self, file: str, name: str, dtype: str, box: Box) -> FileTensor:
        """Return the part of tensor `name` that `file` holds: its `box`. Raises `IntegrityError` as `check` does."""
        self.check([file])
        order, offsets = self._offsets[file]
        return FileTensor(name, DTYPES[dtype], extents(box), self._directory / file, offsets[order[name]])


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """An opened checkpoint, which reads any box of a global tensor from the parts that hold it."""

    directory: Path
    """The checkpoint."""
    manifest: Manifest
    """Its manifest."""
    headers: Headers
    """The headers of its tensor files."""
    files: WeightFiles
    """The open tensor files."""

    def read(self, name: str, box: Box) -> Tensor:
        """Return the elements of `box`, in the stored dtype, on the CPU."""
        out = torch.empty(extents(box), dtype=DTYPES[self.manifest.entry(name).dtype])
        self.read_into(name, box, out)
        return out

    def check_finite(self, name: str, box: Box, values: Tensor) -> None:
        """Raise `IntegrityError` unless all `values`, those of `box` of a tensor, are finite."""
        if not values.is_floating_point() or first_not_finite(values) is None:
            return
        boxes = (stored for _, stored in self.manifest.tiling_of(name).stored(box))
        parts = (file for stored in boxes for file, _ in self.manifest.parts_within(name, stored))
        files = ", ".join(dict.fromkeys(itertools.islice(parts, 3)))
        raise damaged(f"{self.directory / files}: values of {name} are not finite; {MEND}")

    def read_into(self, name: str, box: Box, out: Tensor) -> None:
        """Fill `out`, on any device and with any strides, with the elements of `box`."""
        if not volume(box):
            return
        entry = self.manifest.entry(name)
        for wanted, place in self.manifest.tiling_of(name).stored(box):
            pieces = []
            for file, part in self.manifest.parts_within(name, place):
                stored = self.headers.find(file, name, entry.dtype, part)
                pieces.append(Piece(part, stored, full_box(stored.shape), tuple(range(len(part)))))
            lazy = LazyTensor(entry.shape, DTYPES[entry.dtype], pieces)
            read_box(lazy, place, out[slices(wanted, box)], self.files.read)


@contextmanager
def open_state(directory: Path, *, rank: int = 0, ranks: int = 1) -> Iterator[OpenCheckpoint]:
    """Read the manifest, and size and header of every `ranks`-th file, starting at number `rank`; no values.

    Other headers are read when a part in their file is requested: with many ranks, one of them and those that need it
    read the header of a file. Issues no collective.

    Raises:
        InputError, SecurityError, IntegrityError: As `read_manifest`; also for a header that disagrees with the
            manifest.
    """
    manifest = read_manifest(directory, rank=rank, ranks=ranks)
    headers = Headers(directory, manifest)
    headers.check([file.name for file in manifest.files[rank::ranks] if is_tensor_file(file.name)])
    with WeightFiles(directory, {}) as files:
        yield OpenCheckpoint(directory, manifest, headers, files)


def check_hashes(state: OpenCheckpoint, *, rank: int = 0, ranks: int = 1, optimizer: bool = True) -> None:
    """Compare every `ranks`-th file, starting at number `rank`, with its hash.

    Args:
        optimizer: False skips the optimizer's files.

    Raises:
        IntegrityError: A hash differs; names the file.
    """
    files = [file for file in state.manifest.files if optimizer or state.manifest.kind_of(file.name) != "optimizer"]
    for file in files[rank::ranks]:
        if file_sha256(state.directory / file.name) != file.sha256:
            raise other_content(state.directory / file.name)


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    with os.fdopen(open_file(path), "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_fits(state: OpenCheckpoint, targets: Mapping[str, Tensor]) -> None:
    """Check that the checkpoint's model has the names, shapes and dtypes of `targets`.

    Raises:
        IntegrityError: It has not.
        InputError: The checkpoint was saved without weights.
    """
    saved = state.manifest.model
    if not saved:
        raise InputError(
            f"{state.directory}: was saved without weights; they are in a directory beside it (em.load_weights), and "
            "em.load_checkpoint(..., weights=False) loads the rest",
            key="checkpoint.no-weights",
        )
    problems = [f"{name} is not in it" for name in targets if name not in saved]
    problems += [f"{name} is not in the model" for name in saved if name not in targets]
    for name in targets.keys() & saved.keys():
        in_model, stored = targets[name], saved[name]
        if (tuple(in_model.shape), in_model.dtype) != (tuple(stored.shape), DTYPES[stored.dtype]):
            problems.append(
                f"{name} is {stored.dtype} {stored.shape} in it, {in_model.dtype} {list(in_model.shape)} in the model"
            )
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise does_not_fit(f"{state.directory}: does not fit the model: {'; '.join(sorted(problems)[:5])}{more}")


def saved_offsets(path: Path) -> dict[str, list[int]]:
    """Return from a file's header where in its global tensor each part starts, by name. Raises `IntegrityError`."""
    with expecting(path, "damaged: its header does not say where its tensors belong"):
        entries = parse_json(read_metadata(path)["DCP_SHARDING_INFO"])
        return {name: [int(start) for start in entry["saved_offsets"]] for name, entry in entries.items()}


def fingerprints_in(path: Path) -> Mapping[str, Any]:
    """Return from a file's header the fingerprints of replicated parts, by tensor. Raises `IntegrityError`."""
    with expecting(path, "damaged: its header does not hold fingerprints"):
        return dict(parse_json(read_metadata(path).get("fingerprints", "{}")))


def match_header(path: Path, header: Mapping[str, FileTensor], manifest: Manifest) -> list[str]:
    """Return sentences about the differences between the `header` of a file and the manifest."""
    belongs, expected = saved_offsets(path), manifest.parts_in(path.name)
    with expecting(path, "damaged: its header does not say which experts it holds"):
        orders = dict(parse_json(read_metadata(path).get("EXPERT_ORDERS", "{}")))  # by the tensors that are placed
    problems: list[str] = []
    for name, mark in fingerprints_in(path).items():
        if type(mark) is not int or not -(2**63) <= mark < 2**63:
            problems.append(f"{path}: has the fingerprint {shortened(repr(mark))} of {name}, which cannot be")
    for name, (box, dtype) in expected.items():
        stored, here, offset = header.get(name), belongs.get(name), [start for start, _ in box]
        if stored is None or (stored.shape, stored.dtype) != (extents(box), DTYPES[dtype]):
            problems.append(f"{path}: does not hold the part of {name} that the manifest says")
        elif here != offset:
            problems.append(f"{path}: holds the part of {name} from {here} on, not from {offset} as the manifest says")
        elif orders.get(name) != manifest.tiling_of(name).experts:
            problems.append(f"{path}: holds other experts of {name} than the manifest says")
    return problems + [f"{path}: holds {n}, which the manifest does not name" for n in header.keys() - expected.keys()]
