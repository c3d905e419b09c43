"""Define, read and check manifest.json: a checkpoint's files, how its tensors are cut, and which rank wrote each part.

Every layout of FSDP2, expert, tensor and pipeline parallelism cuts a tensor along full planes. So a tensor is a grid of
parts, which cut points per dim and one rank per part describe fully. Tensors that are cut in the same way share such a
description, a tiling. The manifest grows with the numbers of files and of tensors, not with their product, and a rank
finds the parts that it needs by bisection.

It is the last file written and the only one that says that a checkpoint is complete. A manifest that differs in
anything from what is expected is damaged. Types are strict. Nothing here reads a tensor.
"""

import datetime
import itertools
import math
import os
import re
import stat
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from expertmesh.config.errors import InputError, IntegrityError, SecurityError
from expertmesh.io.boxes import Box, inverse, moved_parts, volume
from expertmesh.io.reading import MAX_MANIFEST_BYTES, read_content, shortened, validated
from expertmesh.io.safetensors_reader import DTYPES
from expertmesh.io.storage import is_plain

SCHEMA_VERSION = 2
KINDS = ("model", "optimizer")
AXES = ("pp", "replicate", "fsdp", "cp", "tp", "ep", "efsdp")
_TENSOR_FILE = re.compile(r"(model|optimizer)-([0-9]{5,9})-of-[0-9]{5,9}\.safetensors")
_Sha256 = Field(pattern=r"^[0-9a-f]{64}$")
_Size = Field(ge=0, lt=2**63)
_Extent = Annotated[int, _Size]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Tiling(Strict):
    """A grid of the parts of a tensor, and the ranks that wrote them."""

    cuts: list[list[_Extent]] = Field(max_length=64)
    """For each dim the ascending cut points, from 0 to its size."""
    ranks: list[_Extent]
    """The rank that wrote each cell, in row-major order."""
    copies: int = Field(default=1, ge=1)
    """The number of ranks that held each cell."""
    experts: list[_Extent] | None = None
    """The expert in each slot, if dim 0 is in the order of slots: equal shares of it. None: in the model's order."""

    @classmethod
    def of(
        cls, shape: Sequence[int], writers: Mapping[Box, int], copies: int, experts: Sequence[int] | None = None
    ) -> "Tiling":
        """Build the tiling of a tensor.

        Args:
            shape: The shape of the global tensor.
            writers: The rank that wrote each part, by its box; no part is empty.
            copies: The number of ranks that held each part.
            experts: The expert in each slot along dim 0.

        Raises:
            ValueError: The parts are no grid that fills the tensor; says why.
        """
        for box in writers:
            if any(start < 0 or stop > size for (start, stop), size in zip(box, shape, strict=True)):
                raise ValueError("a part lies outside of it")
        held, wanted = sum(map(volume, writers)), math.prod(shape)
        if held != wanted:
            raise ValueError(f"its parts hold {held} of {wanted} elements")
        cuts = [sorted({0, size, *(start for box in writers for start in box[dim])}) for dim, size in enumerate(shape)]
        boxes, grid = sorted(writers), itertools.product(*(itertools.pairwise(each) for each in cuts))
        if _cells(cuts) != len(boxes) or any(a != b for a, b in zip(grid, boxes, strict=True)):
            raise ValueError("two of its parts overlap, or they are no grid")
        order = None if experts is None else list(experts)
        return cls(cuts=cuts, ranks=[writers[box] for box in boxes], copies=copies, experts=order)

    def problem(self) -> str | None:
        """Return why this is no valid tiling, as the end of a sentence, or None."""
        for cuts in self.cuts:
            if not cuts or cuts[0] != 0 or any(a >= b for a, b in itertools.pairwise(cuts)):
                return "its cuts do not ascend from 0"
        if self.experts is not None:
            slots = range(len(self.experts))
            if not slots or not self.cuts or self.cuts[0][-1] % len(slots) or sorted(self.experts) != list(slots):
                return "its experts are not each in one slot"
        if _cells(self.cuts) != len(self.ranks):
            return f"it has {_cells(self.cuts)} parts, but names the ranks of {len(self.ranks)}"
        return "a rank wrote two parts of it" if len(set(self.ranks)) != len(self.ranks) else None

    @property
    def shape(self) -> list[int]:
        return [cuts[-1] for cuts in self.cuts]

    @cached_property
    def _places(self) -> dict[int, int]:
        """The cell's row-major number by the rank that wrote it."""
        return {rank: place for place, rank in enumerate(self.ranks)}

    def cell_of(self, rank: int) -> Box | None:
        """Return the box of the part that `rank` wrote; None if it wrote none."""
        if (place := self._places.get(rank)) is None:
            return None
        box: list[tuple[int, int]] = []
        for cuts in reversed(self.cuts):
            place, at = divmod(place, len(cuts) - 1)
            box.insert(0, (cuts[at], cuts[at + 1]))
        return tuple(box)

    def stored(self, box: Box) -> Iterator[tuple[Box, Box]]:
        """Yield the parts of a tensor's `box` that are boxes of the tensor as it is stored: (the part, as stored)."""
        if self.experts is None or volume(box) == 0:
            yield box, box
        else:
            yield from moved_parts(box, self.cuts[0][-1], self._slots)

    @cached_property
    def _slots(self) -> tuple[int, ...]:
        """The slot of each expert."""
        assert self.experts is not None
        return inverse(self.experts)

    def within(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield (rank that wrote it, its box) of the parts that share elements with `box`, which must not be empty."""
        ranges = [
            range(bisect_right(cuts, start) - 1, bisect_left(cuts, stop))
            for cuts, (start, stop) in zip(self.cuts, box, strict=True)
        ]
        for place in itertools.product(*ranges):
            index = 0
            for at, cuts in zip(place, self.cuts, strict=True):
                index = index * (len(cuts) - 1) + at
            yield self.ranks[index], tuple((cuts[at], cuts[at + 1]) for at, cuts in zip(place, self.cuts, strict=True))


class FileEntry(Strict):
    """One file of a checkpoint."""

    name: str
    """Its path relative to the checkpoint, with `/` between directories."""
    bytes: int = _Size
    sha256: str = _Sha256


class TensorEntry(Strict):
    """One tensor of the model or of the optimizer."""

    dtype: str
    """The name that safetensors uses."""
    shape: list[_Extent] = Field(max_length=64)
    """The shape of the global tensor."""
    tiling: int = _Size
    """The index of its tiling in `Manifest.tilings`."""


class Manifest(Strict):
    """The content of manifest.json."""

    format: Literal["expertmesh-checkpoint"] = "expertmesh-checkpoint"
    step: int = Field(ge=0, lt=2**53)
    """The number of optimizer steps done."""
    created: str
    """Date and time in ISO format."""
    world_size: int = Field(ge=1, le=2**24)
    layout: dict[str, int]
    """The size of each axis in `AXES`."""
    versions: dict[str, str]
    """The versions of expertmesh, torch, transformers and Python."""
    config_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """The hash of config.yaml; None if the checkpoint has none."""
    files: list[FileEntry]
    """All files but the manifest."""
    trained: list[str]
    """The names of the parameters that the optimizer updates."""
    schema_version: Literal[2] = 2
    tilings: list[Tiling]
    model: dict[str, TensorEntry]
    """By name; empty if the checkpoint was saved without weights."""
    optimizer: dict[str, TensorEntry]
    """By name."""

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @cached_property
    def by_name(self) -> dict[str, FileEntry]:
        return {file.name: file for file in self.files}

    def tensors(self, kind: str) -> Mapping[str, TensorEntry]:
        """Return the tensors of `kind`, the model or the optimizer, by name."""
        return self.model if kind == "model" else self.optimizer

    def entry(self, name: str) -> TensorEntry:
        return self.model[name] if name in self.model else self.optimizer[name]

    def parts_within(self, name: str, box: Box) -> Iterator[tuple[str, Box]]:
        """Yield (file, box) of the parts that share elements with `box` of a tensor as stored, which is not empty."""
        kind = "model" if name in self.model else "optimizer"
        for rank, cell in self.tiling_of(name).within(box):
            yield tensor_file(kind, rank, self.world_size), cell

    def kind_of(self, file: str) -> str | None:
        """Return `model` or `optimizer` for a file that holds parts of it; None for other files."""
        kind, _ = writer_of(file, self.world_size)
        return kind

    def parts_in(self, file: str) -> dict[str, tuple[Box, str]]:
        """Return (box, dtype) of the parts that `file` holds, by tensor."""
        kind, rank = writer_of(file, self.world_size)
        if kind is None:
            return {}
        cells = [tiling.cell_of(rank) for tiling in self.tilings]
        found = ((name, cells[entry.tiling], entry.dtype) for name, entry in self.tensors(kind).items())
        return {name: (cell, dtype) for name, cell, dtype in found if cell is not None}

    def tiling_of(self, name: str) -> Tiling:
        """Return how a tensor is cut."""
        return self.tilings[self.entry(name).tiling]


def tensor_file(kind: str, rank: int, world_size: int) -> str:
    """Return the name of the file in which `rank` wrote its parts of the model or the optimizer."""
    return f"{kind}-{rank:05d}-of-{world_size:05d}.safetensors"


def writer_of(file: str, world_size: int) -> tuple[str | None, int]:
    """Return (kind, rank) of a file in which a rank of `world_size` wrote tensors; (None, -1) for other files."""
    match = _TENSOR_FILE.fullmatch(file)
    if match is None or int(match[2]) >= world_size or tensor_file(match[1], int(match[2]), world_size) != file:
        return None, -1
    return match[1], int(match[2])


def is_tensor_file(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name


def _cells(cuts: Sequence[Sequence[int]]) -> int:
    return math.prod(len(each) - 1 for each in cuts)


MANIFEST, CONFIG_FILE = "manifest.json", "config.yaml"
_STEP = re.compile(r"step-([0-9]{8,15})")
# How a user repairs damage; ends the sentences that report it.
MEND = "restore it, or remove this checkpoint to go on from the one before it"
_PICKLE_NAMES = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".distcp", ".metadata")
# Pickle protocols 2 to 5, and the zip files that torch.save makes.
_PICKLE_STARTS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")


def read_manifest(directory: Path, *, rank: int = 0, ranks: int = 1) -> Manifest:
    """Read the manifest of one checkpoint, and check it in itself and against the sizes of every `ranks`-th file.

    Reads no other file.

    Raises:
        InputError: There is no such checkpoint, or a newer version wrote it.
        SecurityError: A file name leads out of the checkpoint.
        IntegrityError: For everything else, naming the file or tensor.
    """
    manifest = parse_manifest(directory)
    share = manifest.files[rank::ranks]
    for problem in itertools.chain(
        header_problems(directory, manifest),
        file_problems(directory, manifest, share),
        tensor_problems(directory, manifest),
    ):
        raise damaged(f"{problem}; {MEND}")
    return manifest


def damaged(problem: str) -> IntegrityError:
    return IntegrityError(problem, key="checkpoint.damaged")


def does_not_fit(problem: str) -> IntegrityError:
    return IntegrityError(problem, key="checkpoint.does-not-fit")


@contextmanager
def expecting(path: Path, what: str) -> Iterator[None]:
    """Turn errors of parsing a file that has another form into an `IntegrityError`: `PATH: WHAT (reason)`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:  # also a RecursionError
        raise damaged(f"{path}: {what} ({error})") from error


def parse_manifest(directory: Path) -> Manifest:
    """Read the manifest, check types and that file names are plain paths, and compare nothing else.

    Raises the errors of `read_manifest`.
    """
    path = directory / MANIFEST
    if not directory.is_dir():
        raise InputError(f"{directory}: no such checkpoint", key="checkpoint.not-found")
    missing = IntegrityError(
        f"{directory}: has no {MANIFEST}; it is not a complete checkpoint; {MEND}", key="checkpoint.incomplete"
    )
    if not path.is_file():  # opening a pipe would wait for ever
        raise missing
    try:
        content = read_content(path, SCHEMA_VERSION, MEND, key="checkpoint.damaged", limit=MAX_MANIFEST_BYTES)
    except FileNotFoundError as error:
        raise missing from error
    manifest = validated(path, Manifest, content, MEND, key="checkpoint.damaged")
    for file in manifest.files:
        if not is_plain(file.name):
            raise SecurityError(
                f"{path}: names the file {file.name!r}, which is not a plain path inside the checkpoint",
                key="checkpoint.unsafe",
            )
    return manifest


def unsafe_content(path: Path, directory: Path) -> str | None:
    """Return a sentence that says why a file of the checkpoint `directory` must not be opened, or None."""
    target = Path(os.path.realpath(path))  # `resolve` raises for links in a circle
    if not target.is_relative_to(directory.resolve()):
        return f"{path}: leads out of the checkpoint, to {target}; remove it"
    if not path.is_file():
        return None
    is_pickle = path.name.endswith(_PICKLE_NAMES)
    # A safetensors file begins with the length of its header, which can look like any of these starts; its reader
    # refuses a file of another format.
    if not is_pickle and not path.name.endswith(".safetensors"):
        with path.open("rb") as file:
            is_pickle = file.read(4).startswith(_PICKLE_STARTS)
    if is_pickle:
        return f"{path}: is a pickle, which can run code when it is read; no checkpoint holds one; remove it"
    return None


def header_problems(directory: Path, manifest: Manifest) -> Iterator[str]:
    """Yield sentences about contradictions in the manifest's description of the job that wrote the checkpoint."""
    damage, layout, world = f"{directory / MANIFEST}: damaged:", manifest.layout, manifest.world_size
    named = step_of(directory)
    if named is not None and named != manifest.step:
        yield (
            f"{directory / MANIFEST}: step is {manifest.step}, but its directory is called {directory.name}; rename it "
            f"to step-{manifest.step:08d}"
        )
    if layout.keys() != set(AXES):
        yield f"{damage} layout names other axes than {', '.join(AXES)}"
    elif min(layout.values()) < 1 or math.prod(layout[axis] for axis in AXES[:5]) != world:
        yield f"{damage} its layout is not one of {world} ranks"
    elif layout["ep"] * layout["efsdp"] != layout["fsdp"] * layout["cp"] * layout["tp"]:
        sizes = f"({layout['ep']}, {layout['efsdp']})"
        yield f"{damage} ep and efsdp of its layout {sizes} are not those of fsdp, cp and tp"
    try:
        datetime.datetime.fromisoformat(manifest.created)
    except ValueError:
        yield f"{damage} created is {shortened(manifest.created)!r}, which is no time"
    config = manifest.by_name.get(CONFIG_FILE)
    if manifest.config_sha256 != (config.sha256 if config is not None else None):
        yield f"{damage} config_sha256 is not that of {CONFIG_FILE}"
    for number, tiling in enumerate(manifest.tilings):
        if tiling.copies * len(tiling.ranks) > world:
            yield f"{damage} tiling {number} has {tiling.copies} copies of {len(tiling.ranks)} parts on {world} ranks"


def step_of(directory: Path) -> int | None:
    """Return the step in the name of a checkpoint's directory; None for another name."""
    match = _STEP.fullmatch(directory.name)
    return int(match[1]) if match else None


def file_problems(directory: Path, manifest: Manifest, files: Iterable[FileEntry]) -> Iterator[str]:
    """Yield sentences about problems of the names of all files and of the sizes of `files`."""
    if len(manifest.by_name) < len(manifest.files):
        name, _ = Counter(file.name for file in manifest.files).most_common(1)[0]
        yield f"{directory / MANIFEST}: damaged: names {name} twice"
    for file in files:
        path = directory / file.name
        try:
            found = os.stat(path)
        except OSError as error:
            yield f"{path}: missing, but the checkpoint's manifest names it ({error.strerror})"
            continue
        if not stat.S_ISREG(found.st_mode):
            yield f"{path}: is not a file"  # opening a pipe would wait for ever
        elif found.st_size != file.bytes:
            yield f"{path}: has {found.st_size} bytes, not the {file.bytes} that the manifest says"


def tensor_problems(directory: Path, manifest: Manifest) -> Iterator[str]:
    """Yield sentences about problems of the tensors and tilings that the manifest describes."""
    wrong = [tiling.problem() for tiling in manifest.tilings]
    for kind in KINDS:
        # Go through the files, not the ranks: a manifest may claim any number of ranks.
        writers = (writer_of(name, manifest.world_size) for name in manifest.by_name)
        written = {rank for of_kind, rank in writers if of_kind == kind}
        missing = [next((rank for rank in tiling.ranks if rank not in written), None) for tiling in manifest.tilings]
        for name, entry in manifest.tensors(kind).items():
            reason = None
            if entry.dtype not in DTYPES:
                reason = f"has the unknown dtype {entry.dtype!r}"
            elif kind == "optimizer" and name in manifest.model:
                reason = "is both the model's and the optimizer's"
            elif entry.tiling >= len(manifest.tilings):
                reason = f"has the tiling {entry.tiling}, which is not there"
            elif problem := wrong[entry.tiling]:
                reason = f"is not whole: {problem}"
            elif entry.shape != manifest.tilings[entry.tiling].shape:
                reason = f"is {entry.shape}, its tiling {manifest.tilings[entry.tiling].shape}"
            elif (rank := missing[entry.tiling]) is not None:
                reason = f"is not whole: the checkpoint has no {tensor_file(kind, rank, manifest.world_size)}"
            if reason:
                yield f"{directory / MANIFEST}: damaged: tensor {name} {reason}"
    used = {entry.tiling for kind in KINDS for entry in manifest.tensors(kind).values()}
    for number, problem in enumerate(wrong):
        if problem and number not in used:
            yield f"{directory / MANIFEST}: damaged: tiling {number}: {problem}"
