"""Read and check the manifest of a checkpoint.

It is the last file written and the only one that says that a checkpoint is complete. A manifest that differs in
anything from what is expected is damaged. Nothing here reads a tensor.
"""

import datetime
import itertools
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from expertmesh.checkpoint.schema import AXES, KINDS, SCHEMA_VERSION, FileEntry, Manifest, tensor_file, writer_of
from expertmesh.config.errors import InputError, IntegrityError, SecurityError
from expertmesh.io.reading import MAX_MANIFEST_BYTES, read_content, shortened, validated
from expertmesh.io.safetensors_reader import DTYPES

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
        if any(part in ("", ".", "..") or set(part) & set("\\\0") for part in file.name.split("/")):
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
    if path.is_file() and _is_pickle(path):
        return f"{path}: is a pickle, which can run code when it is read; no checkpoint holds one; remove it"
    return None


def _is_pickle(path: Path) -> bool:
    """Return whether a file is a pickle, by its name or its first bytes."""
    if path.name.endswith(_PICKLE_NAMES):
        return True
    # A safetensors file begins with the length of its header, which can look like any of these starts; its reader
    # refuses a file of another format.
    with path.open("rb") as file:
        return file.read(4).startswith(_PICKLE_STARTS) and not path.name.endswith(".safetensors")


def header_problems(directory: Path, manifest: Manifest) -> Iterator[str]:
    """Yield sentences about contradictions in the manifest's description of the job that wrote the checkpoint."""
    said, layout, world = f"{directory / MANIFEST}: damaged:", manifest.layout, manifest.world_size
    named = step_of(directory)
    if named is not None and named != manifest.step:
        yield (
            f"{directory / MANIFEST}: step is {manifest.step}, but its directory is called {directory.name}; rename it "
            f"to step-{manifest.step:08d}"
        )
    if layout.keys() != set(AXES):
        yield f"{said} layout names other axes than {', '.join(AXES)}"
    elif min(layout.values()) < 1 or math.prod(layout[axis] for axis in AXES[:5]) != world:
        yield f"{said} its layout is not one of {world} ranks"
    elif layout["ep"] * layout["efsdp"] != layout["fsdp"] * layout["cp"] * layout["tp"]:
        yield f"{said} ep and efsdp of its layout ({layout['ep']}, {layout['efsdp']}) are not those of fsdp, cp and tp"
    try:
        datetime.datetime.fromisoformat(manifest.created)
    except ValueError:
        yield f"{said} created is {shortened(manifest.created)!r}, which is no time"
    config = manifest.by_name.get(CONFIG_FILE)
    if manifest.config_sha256 != (config.sha256 if config is not None else None):
        yield f"{said} config_sha256 is not that of {CONFIG_FILE}"
    for number, tiling in enumerate(manifest.tilings):
        if tiling.copies * len(tiling.ranks) > world:
            yield f"{said} tiling {number} has {tiling.copies} copies of {len(tiling.ranks)} parts on {world} ranks"


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
    unwritten = {kind: _unwritten(manifest, kind) for kind in KINDS}
    for kind in unwritten:
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
            elif file := unwritten[kind][entry.tiling]:
                reason = f"is not whole: the checkpoint has no {file}"
            if reason:
                yield f"{directory / MANIFEST}: damaged: tensor {name} {reason}"
    used = {entry.tiling for kind in KINDS for entry in manifest.tensors(kind).values()}
    for number, problem in enumerate(wrong):
        if problem and number not in used:
            yield f"{directory / MANIFEST}: damaged: tiling {number}: {problem}"


def _unwritten(manifest: Manifest, kind: str) -> list[str | None]:
    """Return for each tiling a file of that kind that it needs and the manifest does not name, or None."""
    # Go through the files, not the ranks: a manifest may claim any number of ranks.
    writers = (writer_of(name, manifest.world_size) for name in manifest.by_name)
    written = {rank for of_kind, rank in writers if of_kind == kind}
    missing = (next((rank for rank in tiling.ranks if rank not in written), None) for tiling in manifest.tilings)
    return [None if rank is None else tensor_file(kind, rank, manifest.world_size) for rank in missing]
