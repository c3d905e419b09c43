"""Check the small files of a checkpoint against each other: state, random generators and configuration.

For verify.py. It returns problems as sentences and never reads weights or optimizer state. The layout file is read with
the model, not here.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from expertmesh.adapters.base import read_base
from expertmesh.adapters.peft_format import BASE_FILE
from expertmesh.adapters.peft_format import CONFIG_FILE as ADAPTER_CONFIG_FILE
from expertmesh.checkpoint.companions import ADAPTER, HUGGINGFACE, LAYOUT_FILE
from expertmesh.checkpoint.manifest import MANIFEST
from expertmesh.checkpoint.schema import Manifest
from expertmesh.checkpoint.small_files import RNG_FILE, STATE_FILE, read_generators, read_small, read_state_file
from expertmesh.config.errors import IntegrityError
from expertmesh.io.reading import MAX_TOKENIZER_BYTES, read_json
from expertmesh.state.model_view import is_adapter
from expertmesh.training.resume import read_counters
from expertmesh.verification.checkpoint.files import FileCheck

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
