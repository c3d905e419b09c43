"""Verify one checkpoint by itself: its files against the manifest, and their contents against each other.

For `expertmesh verify`. It finds all problems, not only the first. It needs no GPU and no process group, and has one
block in memory at a time. It reads each byte once, never runs code that comes with a model, reports pickles without
opening them, and changes no file.

Checks return problems as sentences: state, random generators and configuration against each other, kinds and shapes of
the optimizer state; the layout file is read with the model.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expertmesh.adapters.base import read_base
from expertmesh.adapters.peft_format import BASE_FILE
from expertmesh.adapters.peft_format import CONFIG_FILE as ADAPTER_CONFIG_FILE
from expertmesh.checkpoint.manifest import (
    MANIFEST,
    file_problems,
    header_problems,
    parse_manifest,
    tensor_problems,
    unsafe_content,
)
from expertmesh.checkpoint.read import Headers, SavedState, file_sha256, fingerprints_in, match_header
from expertmesh.checkpoint.schema import FileEntry, Manifest, TensorEntry, is_tensor_file
from expertmesh.checkpoint.small_files import (
    ADAPTER,
    HUGGINGFACE,
    LAYOUT_FILE,
    RNG_FILE,
    STATE_FILE,
    read_generators,
    read_small,
    read_state_file,
)
from expertmesh.checkpoint.state import OPTIMIZER, fingerprint_share
from expertmesh.config.errors import ExpertmeshError, InputError, IntegrityError, SecurityError
from expertmesh.export.checkpoint import stored_model
from expertmesh.io.reading import MAX_TOKENIZER_BYTES, read_json
from expertmesh.io.safetensors_reader import FileTensor, WeightFiles, read_header
from expertmesh.io.terminal import tracked
from expertmesh.state.model_view import is_adapter
from expertmesh.training.optimizers.blocks import scale_shape
from expertmesh.training.resume import read_counters
from expertmesh.verification.checkpoint.experts import VerifiedExperts, look_at_experts, what_is_odd

_BLOCK_BYTES = 1 << 24
_SCALE, _MUON, _ADAMW = "_scale", "momentum_buffer", {"exp_avg", "exp_avg_sq"}
_ADAPTER_CONFIG, _BASE = f"{ADAPTER}/{ADAPTER_CONFIG_FILE}", f"{ADAPTER}/{BASE_FILE}"
_NEEDED = {STATE_FILE, LAYOUT_FILE, f"{HUGGINGFACE}/config.json"}


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
        name: _Part([start for start, _ in box], manifest.tiling_of(name).copies, fingerprints.get(name))
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


def optimizer_problems(manifest: Manifest) -> tuple[list[str], tuple[str, ...], tuple[str, ...]]:
    """Return the problems of the optimizer state, the kinds of state, and the trained parameters without state.

    All trained parameters need the same kinds of state, in the shape of the parameter. 8-bit codes have scales as well,
    and with Muon a parameter has either its momentum or AdamW's moments.

    Returns:
        The sentences; the kinds of state, sorted; and the names, with numbers as `*`, of which no trained parameter has
        any state. These are no problem: no step has updated such parameters.
    """
    texts, model, trained, held = [], manifest.model, set(manifest.trained), dict[str, dict[str, TensorEntry]]()
    for key, entry in manifest.optimizer.items():
        name, _, slot = key.removeprefix(OPTIMIZER).rpartition(".")
        held.setdefault(name, {})[slot] = entry
        if name not in trained:
            texts.append(f"{key}: is optimizer state of a parameter that is not trained")
    for name, slots in held.items():
        for slot, wanted in _wanted_shapes(slots, model[name].shape if name in model else None).items():
            if slot in slots and slots[slot].shape not in ([], wanted):
                texts.append(
                    f"{OPTIMIZER}{name}.{slot}: has the shape {slots[slot].shape}, not {wanted} as its parameter"
                )
    kinds = {slot for slots in held.values() for slot in slots}
    same = {slot for slot in kinds if not slot.endswith(_SCALE)}
    kin = {_pattern(name): name for name in held}
    without = dict[str, None]()
    for name in manifest.trained:
        slots = held.get(name, {})
        scales = {f"{slot}{_SCALE}" for slot, entry in slots.items() if entry.dtype == "U8"}
        needed = same - (_ADAMW if _MUON in slots else {_MUON} if same & _ADAMW else set())
        missing = sorted((needed | scales) - slots.keys())
        if model and name not in model:  # `model` is empty for a checkpoint without weights
            texts.append(f"{name}: is trained, but not in the checkpoint")
        elif name not in held and _pattern(name) not in kin:
            without[_pattern(name)] = None
        elif missing:
            texts.append(
                f"{name}: is trained, but its optimizer state {' and '.join(missing)} is not in the checkpoint"
            )
        texts += [
            f"{OPTIMIZER}{name}.{slot}: is the scale of what is not in 8 bits"
            for slot in sorted(slots.keys() - same - scales)
        ]
    return texts, tuple(sorted(kinds)), tuple(without)


def _wanted_shapes(slots: Mapping[str, TensorEntry], parameter: list[int] | None) -> dict[str, list[int]]:
    """Return the required shapes of one parameter's state: that of the parameter (if known), and those of scales."""
    wanted = {} if parameter is None else {slot: parameter for slot in slots if not slot.endswith(_SCALE)}
    for slot, entry in slots.items():
        if entry.dtype == "U8" and entry.shape:
            wanted[f"{slot}{_SCALE}"] = scale_shape(entry.shape)
    return wanted


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def small_file_problems(directory: Path, manifest: Manifest, check: FileCheck) -> Iterator[str]:
    """Yield a sentence for each problem with state, random generators and configuration.

    Files that `check` has found damaged are not read again.
    """
    path = directory / MANIFEST
    names = manifest.by_name
    missing = sorted(needed_files(manifest) - names.keys())
    yield from (f"{path}: damaged: does not name {name}, which every such checkpoint has" for name in missing)
    readers: dict[str, Callable[[], object]] = {
        STATE_FILE: lambda: _read_state(directory, manifest),
        RNG_FILE: lambda: read_generators(directory, manifest, range(manifest.world_size)),
        _BASE: lambda: read_base(directory / _BASE, read_small(directory, manifest, _BASE)),
    }
    for name in (readers.keys() & names.keys()) - check.damaged:
        try:
            readers[name]()
        except IntegrityError as error:
            yield str(error)
    for name in sorted(name for name in names if name.startswith(f"{HUGGINGFACE}/") and name.endswith(".json")):
        if name not in check.damaged and not _is_json(directory / name):
            yield f"{directory / name}: is not JSON"


def _read_state(directory: Path, manifest: Manifest) -> None:
    state = read_state_file(directory, manifest).state
    if "counters" in state:  # only a training run has counters
        read_counters(directory, state["counters"], manifest.step)


def needed_files(manifest: Manifest) -> set[str]:
    """Return the names of the files that every checkpoint of this kind has."""
    of_adapters = {_ADAPTER_CONFIG, _BASE} if any(is_adapter(name) for name in manifest.model) else set()
    return _NEEDED | {RNG_FILE} | of_adapters


def _is_json(path: Path) -> bool:
    try:
        read_json(path, MAX_TOKENIZER_BYTES)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Verification:
    """The results of verifying a checkpoint."""

    directory: Path
    """The checkpoint."""
    manifest: Manifest
    """Its manifest."""
    findings: tuple[Finding, ...]
    """All problems."""
    slots: tuple[str, ...]
    """The kinds of optimizer state."""
    without_slots: tuple[str, ...]
    """The trained parameters without optimizer state, with numbers as `*`."""
    replicated: int
    """The number of chunks that were compared with their fingerprint."""
    experts: tuple[VerifiedExperts, ...]
    """The experts, or their adapters."""
    experts_left_out: str | None
    """The reason why there are no `experts`, or None."""
    seconds: float
    """The time that it took."""


@torch.no_grad()
def verify(directory: Path) -> Verification:
    """Check everything in the checkpoint `directory`; raise only if nothing can be checked.

    Raises:
        InputError: If there is no such checkpoint, or its format is newer.
        IntegrityError: If the manifest is missing or is not one.
        SecurityError: If file names lead out of the checkpoint, or the manifest is a pickle.
    """
    started = time.monotonic()
    unsafe = unsafe_files(directory)
    try:
        manifest = parse_manifest(directory)
    except IntegrityError as error:
        if unsafe:
            raise SecurityError("\n".join(finding.text for finding in unsafe), key="checkpoint.unsafe") from error
        raise
    with WeightFiles(directory, {}) as files:
        check = check_files(directory, manifest, files)
        state = SavedState(directory, manifest, Headers(directory, manifest), files)
        experts, left_out, odd = _experts(state, check)
    texts, slots, without = optimizer_problems(manifest)
    texts = [*small_file_problems(directory, manifest, check), *texts, *odd]
    return Verification(
        directory=directory,
        manifest=manifest,
        findings=(*unsafe, *check.findings, *map(Finding, texts)),
        slots=slots,
        without_slots=without,
        replicated=check.replicated,
        experts=experts,
        experts_left_out=left_out,
        seconds=time.monotonic() - started,
    )


def _experts(state: SavedState, check: FileCheck) -> tuple[tuple[VerifiedExperts, ...], str | None, list[str]]:
    """Return all experts, why they were left out (or None), and the problems of the model or the experts."""
    if reason := _why_no_model(state, check):
        return (), reason, []
    try:
        experts = tuple(look_at_experts(stored_model(state), state))
    except InputError as error:
        return (), str(error), []
    except IntegrityError as error:
        return (), "the checkpoint does not fit its model", [str(error)]
    return experts, None if experts else "none of them has an adapter", list(what_is_odd(experts))


def _why_no_model(state: SavedState, check: FileCheck) -> str | None:
    missing = needed_files(state.manifest) - state.manifest.by_name.keys()
    kinds = (f"{HUGGINGFACE}/", f"{ADAPTER}/", LAYOUT_FILE)
    needed = [name for name in check.damaged | missing if name.startswith(kinds)]
    if needed:
        return f"{min(needed)} is damaged"
    unreadable = sorted(name for name in check.unreadable if state.manifest.kind_of(name) != "optimizer")
    return f"not all of {unreadable[0]} can be read" if unreadable else None
