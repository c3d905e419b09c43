"""Verify one checkpoint by itself: its files against the manifest, and their contents against each other.

For `expertmesh verify`. It finds all problems, not only the first. It needs no GPU and no process group, and has one
block in memory at a time. It reads each byte once, never runs code that comes with a model, reports pickles without
opening them, and changes no file.

Checks return problems as sentences: state, random generators and configuration against each other, kinds and shapes of
the optimizer state, and each expert: its hash, its norm, and whether it is dead or a copy of another expert.
Byte-identical experts in one layer are the sign that one rank's experts have overwritten another's. The layout file is
read with the model.
"""

import hashlib
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertmesh.adapters.peft_format import BASE_FILE
from expertmesh.adapters.peft_format import CONFIG_FILE as ADAPTER_CONFIG_FILE
from expertmesh.adapters.start import read_base
from expertmesh.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    TensorEntry,
    file_problems,
    header_problems,
    is_tensor_file,
    parse_manifest,
    tensor_problems,
    unsafe_content,
)
from expertmesh.checkpoint.read import Headers, OpenCheckpoint, file_sha256, fingerprints_in, match_header
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
from expertmesh.io.boxes import Box, blocks, full_box
from expertmesh.io.reading import MAX_TOKENIZER_BYTES, read_json
from expertmesh.io.safetensors_reader import FileTensor, WeightFiles, as_bytes, read_header
from expertmesh.io.terminal import tracked
from expertmesh.state.model_view import ModelView, is_adapter, sharded
from expertmesh.training.optimizers.adamw import scale_shape
from expertmesh.training.resume import read_counters
from expertmesh.weights.audit import ExpertTensors, HashedSlice, expert_tensors

_BLOCK_BYTES = 1 << 24
_BLOCK_ELEMENTS = 1 << 22  # of an expert
_SCALE, _MUON, _ADAMW = "_scale", "momentum_buffer", {"exp_avg", "exp_avg_sq"}
_ADAPTER_CONFIG, _BASE = f"{ADAPTER}/{ADAPTER_CONFIG_FILE}", f"{ADAPTER}/{BASE_FILE}"
_NEEDED = {STATE_FILE, LAYOUT_FILE, f"{HUGGINGFACE}/config.json"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem."""

    text: str
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
    replicated: int = 0
    """The number of parts that several ranks held and that were compared with their fingerprint."""


def check_files(directory: Path, manifest: Manifest, files: WeightFiles) -> FileCheck:
    """Check names, sizes, headers, hashes and fingerprints, and that all values are finite."""
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
        # `os.path.isfile` returns False for a name that no file can have, such as one with a null byte.
        if not os.path.isfile(path) or path.stat().st_size != file.bytes:
            check.damaged.add(file.name)
            continue
        header = None
        if is_tensor_file(file.name):
            try:
                header = read_header(path)
            except ExpertmeshError as error:
                check.findings.append(Finding(str(error), unsafe=isinstance(error, SecurityError)))
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
    fingerprint: int | None
    """The fingerprint that these ranks computed; None if the file has none."""


def _everything(directory: Path) -> Iterator[Path]:
    """Yield all files and links below `directory`; links are not followed."""
    for root, directories, names in os.walk(directory):
        linked = [name for name in directories if os.path.islink(os.path.join(root, name))]
        yield from (Path(root, name) for name in sorted([*names, *linked]))


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
            if tensor.dtype.is_floating_point:
                values = block.view(tensor.dtype)  # torch has no `isfinite` of 8-bit formats
                odd += int((values.float() if values.dtype.itemsize == 1 else values).isfinite().logical_not().sum())
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
        shapes = {slot: model[name].shape for slot in slots if name in model and not slot.endswith(_SCALE)}
        for slot, entry in slots.items():
            if entry.dtype == "U8" and entry.shape:
                shapes[f"{slot}{_SCALE}"] = scale_shape(entry.shape)
        for slot, wanted in shapes.items():
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


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def small_file_problems(directory: Path, manifest: Manifest, check: FileCheck) -> Iterator[str]:
    """Yield a sentence for each problem with state, random generators and configuration.

    Files that `check` has found damaged are not read again.
    """
    path = directory / MANIFEST
    names = manifest.by_name.keys()
    missing = sorted(needed_files(manifest) - names)
    yield from (f"{path}: damaged: does not name {name}, which every such checkpoint has" for name in missing)
    readers: dict[str, Callable[[], object]] = {
        STATE_FILE: lambda: _read_counters(directory, manifest),
        RNG_FILE: lambda: read_generators(directory, manifest, range(manifest.world_size)),
        _BASE: lambda: read_base(directory / _BASE, read_small(directory, manifest, _BASE)),
    }
    for name in (readers.keys() & names) - check.damaged:
        try:
            readers[name]()
        except IntegrityError as error:
            yield str(error)
    for name in sorted(names - check.damaged):
        if name.startswith(f"{HUGGINGFACE}/") and name.endswith(".json"):
            try:
                read_json(directory / name, MAX_TOKENIZER_BYTES)
            except ValueError:
                yield f"{directory / name}: is not JSON"


def _read_counters(directory: Path, manifest: Manifest) -> None:
    state = read_state_file(directory, manifest).state
    if "counters" in state:  # only a training run has counters
        read_counters(directory, state["counters"], manifest.step)


def needed_files(manifest: Manifest) -> set[str]:
    """Return the names of the files that every checkpoint of this kind has."""
    of_adapters = {_ADAPTER_CONFIG, _BASE} if any(is_adapter(name) for name in manifest.model) else set()
    return _NEEDED | {RNG_FILE} | of_adapters


@dataclass(frozen=True, slots=True)
class VerifiedExperts:
    """The experts of one module; in a LoRA run, their adapters."""

    module: str
    """The name of the experts module."""
    layer: str
    """A short name for reports: the layer's number if that is unique, else the module."""
    slices: tuple[HashedSlice, ...]
    """The tensor slices of an expert, in the order in which they are hashed."""
    sha256: tuple[str, ...]
    """The hash of each expert over its `slices`, each row-major; independent of the layout."""
    norm: tuple[float, ...]
    """The norm of each expert over its `slices`."""
    filled: tuple[float, ...] | None
    """The share of nonzero elements in each expert's B in a LoRA run; else None."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The results of verifying a checkpoint."""

    directory: Path
    manifest: Manifest
    findings: tuple[Finding, ...]
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


@torch.no_grad()
def verify(directory: Path) -> Verification:
    """Check everything in the checkpoint `directory`; raise only if nothing can be checked.

    Raises:
        InputError: If there is no such checkpoint, or its format is newer.
        IntegrityError: If the manifest is missing or is not one.
        SecurityError: If file names lead out of the checkpoint, or the manifest is a pickle.
    """
    started = time.monotonic()
    # Pickles, and links that lead out of the directory.
    texts_of_unsafe = (unsafe_content(path, directory) for path in _everything(directory))
    unsafe = [Finding(text, unsafe=True) for text in texts_of_unsafe if text is not None]
    try:
        manifest = parse_manifest(directory)
    except IntegrityError as error:
        if unsafe:
            raise SecurityError("\n".join(finding.text for finding in unsafe), key="checkpoint.unsafe") from error
        raise
    with WeightFiles(directory, {}) as files:
        check = check_files(directory, manifest, files)
        state = OpenCheckpoint(directory, manifest, Headers(directory, manifest), files)
        experts, left_out, odd = _verified_experts(state, check)
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


def _verified_experts(
    state: OpenCheckpoint, check: FileCheck
) -> tuple[tuple[VerifiedExperts, ...], str | None, list[str]]:
    """Return all experts, why they were left out (or None), and the problems of the model or the experts."""
    missing = needed_files(state.manifest) - state.manifest.by_name.keys()
    kinds = (f"{HUGGINGFACE}/", f"{ADAPTER}/", LAYOUT_FILE)
    if needed := [name for name in check.damaged | missing if name.startswith(kinds)]:
        return (), f"{min(needed)} is damaged", []
    if unreadable := [name for name in check.unreadable if state.manifest.kind_of(name) != "optimizer"]:
        return (), f"not all of {min(unreadable)} can be read", []
    try:
        experts = tuple(look_at_experts(stored_model(state), state))
    except InputError as error:
        return (), str(error), []
    except IntegrityError as error:
        return (), "the checkpoint does not fit its model", [str(error)]
    return experts, None if experts else "none of them has an adapter", list(what_is_odd(experts))


def look_at_experts(model: PreTrainedModel, stored: OpenCheckpoint) -> Iterator[VerifiedExperts]:
    """Read all experts of `model` (on meta) from `stored`, or their adapters if the model has any.

    Raises:
        InputError: If the experts are not recognised.
    """
    plan = sharded(model).lora_plan
    view = ModelView(model)
    state = view.tensors if plan is None else view.adapters
    if plan is None:
        modules = expert_tensors(model)
    else:  # A and B of each experts module
        leaves: dict[tuple[str, int], list[str]] = {}
        for target in plan.targets:
            if target.experts is not None:
                names = target.factors
                leaves.setdefault((target.module, target.experts), []).extend(names)
        modules = [ExpertTensors(module, count, tuple(names)) for (module, count), names in leaves.items()]
    numbers = Counter(_number(tensors.module) for tensors in modules)
    for tensors in modules:
        number = _number(tensors.module)
        boxes = {
            name: [
                (tensors.rows(state[name], expert), *full_box(state[name].shape)[1:]) for expert in range(tensors.count)
            ]
            for name in tensors.names
        }
        looked = (_look_at(tensors, boxes, expert, stored) for expert in range(tensors.count))
        sha256, norm, filled = zip(*looked, strict=True)
        yield VerifiedExperts(
            module=tensors.module,
            layer=f"layer {number}" if number is not None and numbers[number] == 1 else tensors.module,
            slices=tuple(HashedSlice.of(tensors, name, state[name]) for name in tensors.names),
            sha256=sha256,
            norm=norm,
            filled=None if plan is None else filled,
        )


def what_is_odd(modules: Sequence[VerifiedExperts]) -> Iterator[str]:
    """Yield a sentence for each dead expert and for each group of byte-identical experts."""
    for experts in modules:
        same: dict[str, list[int]] = {}
        for expert, (digest, norm) in enumerate(zip(experts.sha256, experts.norm, strict=True)):
            if norm == 0:
                yield f"expert {expert} of {experts.layer} is dead: all its weights are 0 ({experts.module})"
            else:
                same.setdefault(digest, []).append(expert)
        for equal in same.values():
            if len(equal) > 1:
                listed = " and ".join(f"expert {expert}" for expert in equal)
                yield f"{listed} of {experts.layer} are byte-identical ({experts.module})"


def _look_at(
    tensors: ExpertTensors, boxes: dict[str, list[Box]], expert: int, stored: OpenCheckpoint
) -> tuple[str, float, float]:
    """Return the hash and the norm of an expert's tensors, and the share of nonzero elements in its B (0 without)."""
    digest, square, filled, places = hashlib.sha256(), 0.0, 0, 0
    for name in tensors.names:
        for part in blocks(boxes[name][expert], _BLOCK_ELEMENTS):
            values = stored.read(name, part)
            digest.update(as_bytes(values).numpy().data)
            square += float(values.double().square().sum())
            if name.endswith("lora_B"):
                filled, places = filled + int(values.count_nonzero()), places + values.numel()
    return digest.hexdigest(), math.sqrt(square), filled / max(places, 1)


def _number(module: str) -> str | None:
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", module)
    return found[1] if found else None
