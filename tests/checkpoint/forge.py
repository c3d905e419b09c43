"""Checkpoints that are wrong, with hashes that say they are right; beside damage.py, where hashes tell."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from tests.checkpoint.damage import Damage, replace_file


def forge_json(name: str, change: Callable[[Any], Any]) -> Damage:
    """`change` gets what the file holds and returns what it is to hold."""

    def damage(path: Path) -> None:
        content = change(json.loads((path / name).read_bytes()))
        replace_file(name, json.dumps(content).encode())(path)

    return damage


def forge_tensors(name: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    """`change` edits the tensors of a safetensors file in place."""

    def damage(path: Path) -> None:
        with safe_open(path / name, framework="pt") as file:
            metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        change(tensors)
        replace_file(name, save(tensors, metadata=metadata))(path)

    return damage


def forge_metadata(name: str, change: Callable[[dict[str, str]], dict[str, str]]) -> Damage:
    """`change` gets what the header of a safetensors file says beside its tensors and returns what it is to say."""

    def damage(path: Path) -> None:
        with safe_open(path / name, framework="pt") as file:
            metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        replace_file(name, save(tensors, metadata=change(metadata)))(path)

    return damage
