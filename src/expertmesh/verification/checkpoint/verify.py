"""Verifies one checkpoint by itself: its files against the manifest, and what they hold against each other.

For `expertmesh verify`. Finds all that is wrong, not only the first thing. Needs no GPU and no process group, holds a
block at a time, runs no code that a model brings, opens no pickle, changes nothing.
"""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from expertmesh.adapters.base import Base, read_base
from expertmesh.adapters.peft_format import BASE_FILE
from expertmesh.adapters.peft_format import CONFIG_FILE as ADAPTER_CONFIG_FILE
from expertmesh.anatomy import is_adapter
from expertmesh.checkpoint.interface import ADAPTER, HUGGINGFACE, LAYOUT_FILE
from expertmesh.checkpoint.manifest import MANIFEST, Manifest, parse_manifest
from expertmesh.checkpoint.publish import CONFIG_FILE, RNG_FILE, Facts
from expertmesh.checkpoint.read import SavedState
from expertmesh.checkpoint.small_files import STATE_FILE, read_generators, read_small, read_state_file
from expertmesh.checkpoint.state import OPTIMIZER
from expertmesh.checkpoint.write import AXES
from expertmesh.config.errors import InputError, IntegrityError, SecurityError
from expertmesh.export.stored_model import StoredTensors, stored_model
from expertmesh.io.safetensors_reader import WeightFiles
from expertmesh.verification.checkpoint.experts import VerifiedExperts, look_at_experts, what_is_odd
from expertmesh.verification.checkpoint.files import FileCheck, Finding, check_files, unsafe_files

_ADAPTER_CONFIG, _BASE = f"{ADAPTER}/{ADAPTER_CONFIG_FILE}", f"{ADAPTER}/{BASE_FILE}"
_NEEDED = {STATE_FILE, RNG_FILE, LAYOUT_FILE, f"{HUGGINGFACE}/config.json"}


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found. `slots`: kinds of the optimizer's state. `without_slots`: trained parameters without any, numbers
    as `*`. `replicated`: chunks compared with their fingerprint. `experts_left_out`: why there are no `experts`.
    """

    directory: Path
    manifest: Manifest
    findings: tuple[Finding, ...]
    slots: tuple[str, ...]
    without_slots: tuple[str, ...]
    replicated: int
    experts: tuple[VerifiedExperts, ...]
    experts_left_out: str | None
    seconds: float


@torch.no_grad()
def verify(directory: Path) -> Verification:
    """Look at everything in the checkpoint `directory`.

    Raises only for what leaves nothing to look at: `InputError` (no such checkpoint, newer format), `IntegrityError`
    (no manifest, or not one), `SecurityError` (file names that lead elsewhere, a manifest that is a pickle).
    """
    started = time.monotonic()
    unsafe = unsafe_files(directory)
    try:
        manifest = parse_manifest(directory)
    except IntegrityError as error:
        if unsafe:
            raise SecurityError("\n".join(finding.text for finding in unsafe)) from error
        raise
    with WeightFiles(directory, {}) as files:
        check = check_files(directory, manifest, files)
        state = SavedState(directory, manifest, check.chunks, files)
        experts, left_out, odd = _experts(state, check)
    texts, slots, without = _optimizer(manifest)
    texts = [*_small_files(directory, manifest, check), *texts, *odd]
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


def _small_files(directory: Path, manifest: Manifest, check: FileCheck) -> Iterator[str]:
    """What is wrong with state, generators and configuration; the layout is read with the model."""
    path = directory / MANIFEST
    names = {file.name: file for file in manifest.files}
    missing = sorted(_needed(manifest) - names.keys())
    yield from (f"{path}: damaged: does not name {name}, which every such checkpoint has" for name in missing)
    readers = {STATE_FILE: read_state_file, RNG_FILE: read_generators, _BASE: _read_base}
    for name in (readers.keys() & names.keys()) - check.damaged:
        try:
            readers[name](directory, manifest)
        except IntegrityError as error:
            yield str(error)
    for name in sorted(name for name in names if name.startswith(f"{HUGGINGFACE}/") and name.endswith(".json")):
        if name not in check.damaged and not _is_json(directory / name):
            yield f"{directory / name}: is not JSON"
    if manifest.config_sha256 != (names[CONFIG_FILE].sha256 if CONFIG_FILE in names else None):
        yield f"{path}: damaged: config_sha256 is not that of {CONFIG_FILE}"
    if manifest.layout.keys() != set(AXES):
        yield f"{path}: damaged: layout names other axes than {', '.join(AXES)}"
    elif Facts(manifest.step, manifest.layout, ()).world_size != manifest.world_size:
        yield f"{path}: damaged: its layout is not one of {manifest.world_size} ranks"


def _needed(manifest: Manifest) -> set[str]:
    """The files that a checkpoint of this kind cannot be without."""
    of_adapters = {_ADAPTER_CONFIG, _BASE} if any(is_adapter(name) for name in manifest.model) else set()
    return _NEEDED | of_adapters


def _read_base(directory: Path, manifest: Manifest) -> Base:
    return read_base(directory / _BASE, read_small(directory, manifest, _BASE))


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return True


def _optimizer(manifest: Manifest) -> tuple[list[str], tuple[str, ...], tuple[str, ...]]:
    """What is wrong: all trained parameters have to have the same kinds of state, in their own shapes.

    With the kinds, and the trained parameters without any state, numbers as `*`: no step has reached their kind.
    """
    texts, model, trained, held = [], manifest.model, set(manifest.trained), dict[str, set[str]]()
    for key, entry in manifest.optimizer.items():
        name, _, slot = key.removeprefix(OPTIMIZER).rpartition(".")
        held.setdefault(name, set()).add(slot)
        if name not in trained:
            texts.append(f"{key}: is optimizer state of a parameter that is not trained")
        elif name in model and entry.shape not in ([], model[name].shape):
            texts.append(f"{key}: has the shape {entry.shape}, its parameter {model[name].shape}")
    kinds = {slot for slots in held.values() for slot in slots}
    kin = {_pattern(name): name for name in held}
    without = dict[str, None]()
    for name in manifest.trained:
        missing = sorted(kinds - held.get(name, set()))
        if name not in model:
            texts.append(f"{name}: is trained, but not in the checkpoint")
        elif name not in held and _pattern(name) not in kin:
            without[_pattern(name)] = None
        elif missing:
            texts.append(
                f"{name}: is trained, but its optimizer state {' and '.join(missing)} is not in the checkpoint"
            )
    return texts, tuple(sorted(kinds)), tuple(without)


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _experts(state: SavedState, check: FileCheck) -> tuple[tuple[VerifiedExperts, ...], str | None, list[str]]:
    """All experts, why they were left out, and what is wrong with model or experts."""
    if reason := _why_no_model(state, check):
        return (), reason, []
    try:
        experts = tuple(look_at_experts(stored_model(state), StoredTensors(state)))
    except InputError as error:
        return (), str(error), []
    except IntegrityError as error:
        return (), "the checkpoint does not fit its model", [str(error)]
    return experts, None if experts else "none of them has an adapter", list(what_is_odd(experts))


def _why_no_model(state: SavedState, check: FileCheck) -> str | None:
    missing = _needed(state.manifest) - {file.name for file in state.manifest.files}
    kinds = (f"{HUGGINGFACE}/", f"{ADAPTER}/", LAYOUT_FILE)
    needed = [name for name in check.damaged | missing if name.startswith(kinds)]
    if needed:
        return f"{min(needed)} is damaged"
    for name, entry in state.manifest.model.items():
        if any((name, tuple(chunk.offset)) not in state.chunks for chunk in entry.chunks):
            return f"not all of {name} can be read"
    return None
