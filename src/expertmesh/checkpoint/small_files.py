"""The small files of a checkpoint that loading needs: the run's state and the random generators of its ranks.

Read whole, compared with the manifest's hash, and parsed before anything is changed. All of it is JSON, and nothing
of it is trusted: what does not have the expected form is damage, named by file. Nothing here communicates.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertmesh.checkpoint.manifest import MANIFEST, MEND, Manifest
from expertmesh.checkpoint.part import decode_generator
from expertmesh.checkpoint.publish import RNG_FILE
from expertmesh.config.errors import InputError, IntegrityError

STATE_FILE = "state.json"


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
        raise InputError(f"the state to save with step {step} is not JSON: {error}") from error


def read_state_file(directory: Path, manifest: Manifest) -> StateFile:
    """A checkpoint's `state.json`. Raises `IntegrityError`."""
    try:
        content = json.loads(read_small(directory, manifest, STATE_FILE))
        step, state, optimizer = int(content["step"]), dict(content["state"]), content.get("optimizer")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"{directory / STATE_FILE}: is not the state of a checkpoint ({error})") from error
    if step != manifest.step:
        raise IntegrityError(f"{directory / STATE_FILE}: is of step {step}, the manifest of step {manifest.step}")
    return StateFile(step, state, optimizer)


def read_generators(directory: Path, manifest: Manifest) -> list[dict[str, Tensor]]:
    """States of torch's generators by kind of device, one entry per rank that saved. Raises `IntegrityError`."""
    path = directory / RNG_FILE
    try:
        ranks = json.loads(read_small(directory, manifest, RNG_FILE))
        generators = [{name: decode_generator(text) for name, text in states.items()} for states in ranks]
        for states in generators:
            torch.Generator().set_state(states["cpu"])  # refuses what is none
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise IntegrityError(f"{path}: does not hold the states of torch's generators ({error})") from error
    if len(generators) != manifest.world_size:
        raise IntegrityError(f"{path}: holds generators of {len(generators)} ranks, not of {manifest.world_size}")
    return generators


def read_small(directory: Path, manifest: Manifest, name: str) -> bytes:
    """A whole file. `IntegrityError` if the manifest does not name it, or another content of it."""
    entry = next((file for file in manifest.files if file.name == name), None)
    if entry is None:
        raise IntegrityError(f"{directory / MANIFEST}: damaged: does not name {name}, which every checkpoint has")
    content = (directory / name).read_bytes()
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise damaged(directory / name)
    return content


def damaged(path: Path) -> IntegrityError:
    return IntegrityError(f"{path}: damaged: its content is not what was written (sha256 differs); {MEND}")
