"""Verify one checkpoint by itself: its files against the manifest, and their contents against each other.

For `expertmesh verify`. It finds all problems, not only the first. It needs no GPU and no process group, and has one
block in memory at a time. It never runs code that comes with a model, opens no pickle and changes no file.

Checks return problems as sentences: state, random generators and configuration against each other, kinds and shapes of
the optimizer state; the layout file is read with the model.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from expertmesh.adapters.base import read_base
from expertmesh.adapters.peft_format import BASE_FILE
from expertmesh.adapters.peft_format import CONFIG_FILE as ADAPTER_CONFIG_FILE
from expertmesh.checkpoint.manifest import MANIFEST, parse_manifest
from expertmesh.checkpoint.read import Headers, SavedState
from expertmesh.checkpoint.schema import Manifest, TensorEntry
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
from expertmesh.checkpoint.state import OPTIMIZER
from expertmesh.config.errors import InputError, IntegrityError, SecurityError
from expertmesh.export.stored_model import stored_model
from expertmesh.io.reading import MAX_TOKENIZER_BYTES, read_json
from expertmesh.io.safetensors_reader import WeightFiles
from expertmesh.state.model_view import is_adapter
from expertmesh.training.optimizers.blocks import scale_shape
from expertmesh.training.resume import read_counters
from expertmesh.verification.checkpoint.experts import VerifiedExperts, look_at_experts, what_is_odd
from expertmesh.verification.checkpoint.files import FileCheck, Finding, check_files, unsafe_files

_SCALE, _MUON, _ADAMW = "_scale", "momentum_buffer", {"exp_avg", "exp_avg_sq"}


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


_ADAPTER_CONFIG, _BASE = f"{ADAPTER}/{ADAPTER_CONFIG_FILE}", f"{ADAPTER}/{BASE_FILE}"
_NEEDED = {STATE_FILE, LAYOUT_FILE, f"{HUGGINGFACE}/config.json"}


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
