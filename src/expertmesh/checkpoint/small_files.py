"""The small files of a checkpoint that loading needs: the run's state and the random generators of its ranks.

JSON is read whole, compared with the manifest's hash, and parsed before anything is changed; of the generators a rank
reads its own row. Nothing is trusted: what does not have the expected form is damage, named by file. Nothing here
communicates.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from expertmesh.checkpoint.manifest import MANIFEST, MEND, damaged, expecting
from expertmesh.checkpoint.schema import FileEntry, Manifest
from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.io.reading import MAX_MANIFEST_BYTES, parse_json, read_file
from expertmesh.io.safetensors_reader import WeightFiles, read_header
from expertmesh.io.safetensors_writer import sync, write_synced

STATE_FILE = "state.json"
RNG_FILE = "rng/generators.safetensors"


@dataclass(frozen=True, slots=True)
class StateFile:
    """What `state.json` holds: `state` is what the caller of saving wants to get back, `optimizer` the name of the
    optimizer's class, None if there was none.
    """

    step: int
    state: dict[str, Any]
    optimizer: str | None


def state_bytes(step: int, state: Mapping[str, Any], optimizer: torch.optim.Optimizer | None) -> bytes:
    """The content of `state.json`. `InputError` for a `state` that is not JSON."""
    name = type(optimizer).__name__ if optimizer is not None else None
    try:
        return json.dumps({"step": step, "state": dict(state), "optimizer": name}, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the state to save with step {step} is not JSON: {error}", key="checkpoint.state-not-json"
        ) from error


def read_state_file(directory: Path, manifest: Manifest) -> StateFile:
    """A checkpoint's `state.json`. Raises `IntegrityError`."""
    path = directory / STATE_FILE
    with expecting(path, "is not the state of a checkpoint"):
        content = read_small_json(directory, manifest, STATE_FILE)
        found = StateFile(content["step"], dict(content["state"]), content.get("optimizer"))
        if type(found.step) is not int or not isinstance(found.optimizer, str | None):
            raise TypeError("step is no whole number, or optimizer no name")
    if found.step != manifest.step:
        raise damaged(f"{path}: is of step {found.step}, the manifest of step {manifest.step}")
    return found


def rng_state(device: torch.device) -> dict[str, str]:
    """torch's generators of this rank, base64: `cpu`, and the accelerator's under its name."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def set_rng_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Put torch's generators of this rank back; those of another kind of device are left as they are."""
    for name, state in states.items():
        if name == "cpu":
            torch.set_rng_state(state)
        elif name == device.type:
            torch.get_device_module(device).set_rng_state(state, device)


def write_generators(directory: Path, ranks: Sequence[Mapping[str, str]]) -> None:
    """Write and sync `RNG_FILE`: by kind of device one tensor, with a row for what `rng_state` gave on each rank."""
    values = {kind: torch.stack([_decoded(states[kind]) for states in ranks]) for kind in ranks[0]}
    path = directory / RNG_FILE
    path.parent.mkdir(exist_ok=True)
    write_synced(path, save(values, {"format": "pt"}))
    sync(path.parent)


def read_generators(directory: Path, manifest: Manifest, ranks: Iterable[int]) -> list[dict[str, Tensor]]:
    """States of torch's generators by kind of device, of those of `ranks` that saved. Raises `IntegrityError`."""
    path = directory / RNG_FILE
    entry_of(directory, manifest, RNG_FILE)
    header = read_header(path)
    shapes = [(tensor.dtype, len(tensor.shape), tensor.shape[:1]) for tensor in header.values()]
    if "cpu" not in header or set(shapes) != {(torch.uint8, 2, (manifest.world_size,))}:
        raise damaged(f"{path}: does not hold generators of {manifest.world_size} ranks")
    found = []
    with WeightFiles(directory, header) as files:
        for rank in ranks:
            if rank < manifest.world_size:
                states = {kind: torch.empty(tensor.shape[1], dtype=torch.uint8) for kind, tensor in header.items()}
                for kind, state in states.items():
                    files.read(header[kind], ((rank, rank + 1), (0, len(state))), state)
                found.append(_checked(path, states))
    return found


def _checked(path: Path, states: dict[str, Tensor]) -> dict[str, Tensor]:
    with expecting(path, "does not hold the states of torch's generators"):
        torch.Generator().set_state(states["cpu"])  # refuses what is none
    return states


def _decoded(text: str) -> Tensor:
    """One generator's state, of bytes; `ValueError` for text that is not base64."""
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def read_small(directory: Path, manifest: Manifest, name: str) -> bytes:
    """A whole file. `IntegrityError` if the manifest does not name it, or another content of it."""
    entry = entry_of(directory, manifest, name)
    content = read_file(directory / name, MAX_MANIFEST_BYTES)
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise other_content(directory / name)
    return content


def read_small_json(directory: Path, manifest: Manifest, name: str) -> Any:
    """The value of a whole JSON file. `ValueError` for what is none, else as `read_small`."""
    return parse_json(read_small(directory, manifest, name))


def entry_of(directory: Path, manifest: Manifest, name: str) -> FileEntry:
    """What the manifest says of a file. `IntegrityError` if it does not name it."""
    entry = manifest.by_name.get(name)
    if entry is None:
        raise damaged(f"{directory / MANIFEST}: damaged: does not name {name}, which every checkpoint has")
    return entry


def other_content(path: Path) -> IntegrityError:
    return damaged(f"{path}: damaged: its content is not what was written (sha256 differs); {MEND}")
