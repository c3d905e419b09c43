"""Every error that a user can cause has a stable key, named by the rule in errors.py and documented."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertmesh.config.errors import (
    DistributedFailure,
    ExpertmeshError,
    InputError,
    IntegrityError,
    SecurityError,
)

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "expertmesh"
CLASSES = (InputError, IntegrityError, SecurityError, DistributedFailure)
# Grows until it is all of them.
PACKAGES = ("config", "demo", "launcher", "cli")
KEY = re.compile(r"[a-z]+\.[a-z0-9]+(-[a-z0-9]+)*")


def raised(file: Path) -> Iterator[tuple[str, ast.expr | None]]:
    """Where an error is made, and its `key=`."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        if isinstance(node, ast.Call) and name in {kind.__name__ for kind in CLASSES}:
            key = next((keyword.value for keyword in node.keywords if keyword.arg == "key"), None)
            yield f"{file.relative_to(SOURCE)}:{node.lineno}", key


def files() -> list[Path]:
    return [file for package in PACKAGES for file in (SOURCE / package).rglob("*.py")]


def test_every_error_has_a_key() -> None:
    assert [where for file in files() for where, key in raised(file) if key is None] == []


def test_keys_are_literals_of_the_form_that_is_documented() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    documented = {
        key for row in re.findall(r"^\|([^|]+)\|", page, re.MULTILINE) for key in re.findall("`([^`]+)`", row)
    }
    keys = {
        key.value: where
        for file in files()
        for where, key in raised(file)
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
    assert {key: where for key, where in keys.items() if not KEY.fullmatch(key)} == {}
    assert {key: where for key, where in keys.items() if key not in documented} == {}


@pytest.mark.parametrize("kind", [ExpertmeshError, *CLASSES])
def test_a_class_has_a_key_that_a_raise_site_replaces(kind: type[ExpertmeshError]) -> None:
    error = kind("a sentence", key="layout.ep-divides-experts")
    assert (str(error), error.key) == ("a sentence", "layout.ep-divides-experts")
    assert kind("a sentence").key == kind.key
    assert len({kind.key for kind in CLASSES}) == len(CLASSES)
