"""Check the files of a checkpoint against its manifest: missing files, extra files and the bytes of each.

For verify.py. It reads each byte once, a block at a time, and does not depend on the model. It never opens a pickle,
but reports each one.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expertmesh.checkpoint.manifest import MANIFEST, file_problems, header_problems, tensor_problems, unsafe_content
from expertmesh.checkpoint.read import file_sha256, fingerprints_in, match_header
from expertmesh.checkpoint.schema import FileEntry, Manifest, is_tensor_file
from expertmesh.checkpoint.state import fingerprint_share
from expertmesh.config.errors import ExpertmeshError, SecurityError
from expertmesh.io.safetensors_reader import FileTensor, WeightFiles, read_header
from expertmesh.io.terminal import tracked

_BLOCK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem."""

    text: str
    """The sentence for the user."""
    unsafe: bool = False
    """True for a file that could run code, or that leads out of the checkpoint."""


@dataclass(slots=True)
class FileCheck:
    """The results of checking the files."""

    unreadable: set[str] = field(default_factory=set)
    """The names of tensor files whose parts cannot be read."""
    damaged: set[str] = field(default_factory=set)
    """The names of files whose content is not what was written."""
    findings: list[Finding] = field(default_factory=list)
    """All problems."""
    replicated: int = 0
    """The number of parts that several ranks held and that were compared with their fingerprint."""


def unsafe_files(directory: Path) -> list[Finding]:
    """Return a finding for each pickle, and for each link that leads out of the directory."""
    texts = (unsafe_content(path, directory) for path in _everything(directory))
    return [Finding(text, unsafe=True) for text in texts if text is not None]


def check_files(directory: Path, manifest: Manifest, files: WeightFiles) -> FileCheck:
    """Check names, sizes, headers, hashes and fingerprints, and that all values are finite.

    Args:
        directory: The checkpoint.
        manifest: Its manifest.
        files: Reads the bytes.
    """
    check = FileCheck()
    named = {MANIFEST, *(file.name for file in manifest.files)}
    extra = sorted(path.relative_to(directory).as_posix() for path in _everything(directory))
    texts = [f"{directory / name}: is not part of the checkpoint; remove it" for name in extra if name not in named]
    texts += header_problems(directory, manifest)
    texts += file_problems(directory, manifest, manifest.files)
    contradictions = list(tensor_problems(directory, manifest))
    check.findings += [Finding(text) for text in texts + contradictions]
    check.unreadable.update(file.name for file in manifest.files if is_tensor_file(file.name))
    for file in tracked(manifest.files, len(manifest.files), "reading", "files"):
        path = directory / file.name
        if not _has_size(directory, file):
            check.damaged.add(file.name)
            continue
        header = _header(path, check) if is_tensor_file(file.name) else None
        if header is None:
            digest = file_sha256(path)
        else:
            # Parts cannot be located with a manifest that contradicts itself; the hash can still be checked.
            parts = {} if contradictions else _parts(path, header, manifest, check)
            digest = _read_tensors(path, header, parts, files, check)
        if digest != file.sha256:
            check.damaged.add(file.name)
            check.findings.append(Finding(f"{path}: damaged: its content is not what was written (sha256 differs)"))
    return check


class _Part(NamedTuple):
    """The manifest's entry for the part of a tensor that a file contains."""

    offset: list[int]
    """The first index of the part in its tensor, by dim."""
    copies: int
    """The number of ranks that held the part."""
    fingerprint: Any
    """The fingerprint that these ranks computed; None if the file has none."""


def _everything(directory: Path) -> Iterator[Path]:
    """Yield all files and links below `directory`; links are not followed."""
    for root, directories, names in os.walk(directory):
        linked = [name for name in directories if os.path.islink(os.path.join(root, name))]
        yield from (Path(root, name) for name in sorted([*names, *linked]))


def _has_size(directory: Path, file: FileEntry) -> bool:
    path = directory / file.name
    # `os.path.isfile` returns False for a name that no file can have, such as one with a null byte.
    return os.path.isfile(path) and path.stat().st_size == file.bytes


def _header(path: Path, check: FileCheck) -> dict[str, FileTensor] | None:
    try:
        return read_header(path)
    except ExpertmeshError as error:
        check.findings.append(Finding(str(error), unsafe=isinstance(error, SecurityError)))
        return None


def _parts(path: Path, header: Mapping[str, FileTensor], manifest: Manifest, check: FileCheck) -> dict[str, _Part]:
    """Return the manifest's entries for the tensors of a file, by name; add findings if the file's header differs."""
    try:
        problems, fingerprints = match_header(path, header, manifest), fingerprints_in(path)
    except ExpertmeshError as error:
        problems, fingerprints = [str(error)], {}
    check.findings += map(Finding, problems)
    if not problems:
        check.unreadable.discard(path.name)
    return {
        name: _Part([start for start, _ in box], manifest.copies_of(name), fingerprints.get(name))
        for name, (box, _) in manifest.parts_in(path.name).items()
    }


def _read_tensors(
    path: Path, header: Mapping[str, FileTensor], parts: Mapping[str, _Part], files: WeightFiles, check: FileCheck
) -> str:
    """Return the file's sha256, and add findings for values that are not finite and for fingerprints that differ.

    Each byte is read once for all of these.
    """
    digest = hashlib.sha256()
    start = min((tensor.offset for tensor in header.values()), default=path.stat().st_size)
    for block, _ in _blocks(files, FileTensor("the header", torch.uint8, (start,), path, 0)):
        digest.update(block.numpy().data)
    for name, tensor in header.items():  # in the order of the file
        part = parts.get(name)
        mark, odd = torch.zeros((), dtype=torch.int64), 0
        for block, at in _blocks(files, tensor):
            digest.update(block.numpy().data)
            odd += _not_finite(block.view(tensor.dtype))
            if part is not None and part.copies > 1:
                mark += fingerprint_share(block, at)
        if odd:
            where = f", its part from {part.offset} on" if part is not None and any(part.offset) else ""
            check.findings.append(Finding(f"{path}: {odd:,} values of {name}{where} are not finite"))
        if part is not None and part.copies > 1:
            check.replicated += 1
            if part.fingerprint != int(mark):
                text = f"{path}: {name} is not what {part.copies} ranks held alike (its fingerprint differs)"
                check.findings.append(Finding(text))
    return digest.hexdigest()


def _blocks(files: WeightFiles, tensor: FileTensor) -> Iterator[tuple[Tensor, int]]:
    """Yield the bytes of a tensor in blocks, each with its offset in bytes, which is a multiple of 8."""
    raw = FileTensor(tensor.name, torch.uint8, (tensor.nbytes,), tensor.path, tensor.offset)
    for at in range(0, tensor.nbytes, _BLOCK_BYTES):
        block = torch.empty(min(_BLOCK_BYTES, tensor.nbytes - at), dtype=torch.uint8)
        files.read(raw, ((at, at + block.numel()),), block)
        yield block, at


def _not_finite(values: Tensor) -> int:
    if not values.is_floating_point():
        return 0
    wide = values.float() if values.dtype.itemsize == 1 else values
    return int(wide.isfinite().logical_not().sum())
