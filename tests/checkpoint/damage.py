"""Ways to damage a checkpoint, for tests: each is a function of its directory.

What only changes the manifest, or makes it fit, leaves a checkpoint that is wrong in that one respect.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from expertmesh.checkpoint.manifest import MANIFEST

EXPERTS = "model.layers.1.mlp.experts.down_proj"
Damage = Callable[[Path], Any]


def truncate(name: str) -> Damage:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size - 1)


def flip_a_bit(name: str, at: float) -> Damage:
    """One bit, at that share of the file."""

    def damage(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[int(at * (len(content) - 1))] ^= 4
        (path / name).write_bytes(content)

    return damage


def remove(name: str) -> Damage:
    return lambda path: (path / name).unlink()


def change_manifest(change: Callable[[dict[str, Any]], Any]) -> Damage:
    def damage(path: Path) -> None:
        content = json.loads((path / MANIFEST).read_bytes())
        change(content)
        (path / MANIFEST).write_text(json.dumps(content))

    return damage


def change_tiling(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Of the experts alone: other tensors that are cut like them keep theirs."""

    def own(manifest: dict[str, Any]) -> None:
        entry = manifest["model"][EXPERTS]
        tiling = json.loads(json.dumps(manifest["tilings"][entry["tiling"]]))
        change(tiling)
        entry["tiling"] = len(manifest["tilings"])
        manifest["tilings"].append(tiling)

    return change_manifest(own)


def replace_file(name: str, content: bytes) -> Damage:
    """With a manifest that says the same."""

    def damage(path: Path) -> None:
        (path / name).write_bytes(content)

        def describe(manifest: dict[str, Any]) -> None:
            entry = next(file for file in manifest["files"] if file["name"] == name)
            entry.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())

        change_manifest(describe)(path)

    return damage


def leave_out(name: str) -> Damage:
    def change(manifest: dict[str, Any]) -> None:
        # Last, so that the numbers of the others stay.
        manifest["files"] = [file for file in manifest["files"] if file["name"] != name]

    return change_manifest(change)


def replace_by(name: str, make: Callable[[Path], Any]) -> Damage:
    def damage(path: Path) -> None:
        (path / name).unlink()
        make(path / name)

        def describe(manifest: dict[str, Any]) -> None:
            entry = next(file for file in manifest["files"] if file["name"] == name)
            entry["bytes"] = os.stat(path / name).st_size

        change_manifest(describe)(path)

    return damage


class Canary:
    """Unpickled, it makes the directory `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)
