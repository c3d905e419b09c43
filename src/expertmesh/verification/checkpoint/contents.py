"""What a checkpoint's small files say, and what its manifest says of the optimizer, against each other.

For verify.py. What is wrong comes as sentences.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from expertmesh.adapters.base import read_base
from expertmesh.adapters.peft_format import BASE_FILE
from expertmesh.adapters.peft_format import CONFIG_FILE as ADAPTER_CONFIG_FILE
from expertmesh.anatomy import is_adapter
from expertmesh.checkpoint.companions import ADAPTER, HUGGINGFACE, LAYOUT_FILE
from expertmesh.checkpoint.manifest import MANIFEST
from expertmesh.checkpoint.publish import CONFIG_FILE, SavedJob
from expertmesh.checkpoint.schema import Manifest
from expertmesh.checkpoint.small_files import STATE_FILE, read_generators, read_small, read_state_file, rng_file
from expertmesh.checkpoint.state import OPTIMIZER
from expertmesh.checkpoint.write import AXES
from expertmesh.config.errors import IntegrityError
from expertmesh.verification.checkpoint.files import FileCheck

_ADAPTER_CONFIG, _BASE = f"{ADAPTER}/{ADAPTER_CONFIG_FILE}", f"{ADAPTER}/{BASE_FILE}"
_NEEDED = {STATE_FILE, LAYOUT_FILE, f"{HUGGINGFACE}/config.json"}


def small_file_problems(directory: Path, manifest: Manifest, check: FileCheck) -> Iterator[str]:
    """What is wrong with state, generators and configuration; the layout is read with the model."""
    path = directory / MANIFEST
    names = manifest.by_name
    missing = sorted(needed_files(manifest) - names.keys())
    yield from (f"{path}: damaged: does not name {name}, which every such checkpoint has" for name in missing)
    readers: dict[str, Callable[[], object]] = {
        STATE_FILE: lambda: read_state_file(directory, manifest),
        rng_file(manifest): lambda: read_generators(directory, manifest, range(manifest.world_size)),
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
    if manifest.config_sha256 != (names[CONFIG_FILE].sha256 if CONFIG_FILE in names else None):
        yield f"{path}: damaged: config_sha256 is not that of {CONFIG_FILE}"
    if manifest.layout.keys() != set(AXES):
        yield f"{path}: damaged: layout names other axes than {', '.join(AXES)}"
    elif SavedJob(manifest.step, manifest.layout, ()).world_size != manifest.world_size:
        yield f"{path}: damaged: its layout is not one of {manifest.world_size} ranks"


def needed_files(manifest: Manifest) -> set[str]:
    """The files that a checkpoint of this kind cannot be without."""
    of_adapters = {_ADAPTER_CONFIG, _BASE} if any(is_adapter(name) for name in manifest.model) else set()
    return _NEEDED | {rng_file(manifest)} | of_adapters


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return True


def optimizer_problems(manifest: Manifest) -> tuple[list[str], tuple[str, ...], tuple[str, ...]]:
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
        if model and name not in model:  # else it was saved without weights
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
