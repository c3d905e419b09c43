"""Every error that a user can cause has a stable key, named by the rule in errors.py and documented."""

import ast
import functools
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
KEY = re.compile(r"[a-z]+\.[a-z0-9]+(-[a-z0-9]+)*")
# Kinds of failure, which are told where they happen. The key of a rule is raised in one file, by a function that other
# files call.
KINDS = {
    "a setting or an option has a value that it does not take": ("cli.usage", "config.wrong-value"),
    "two settings, each with the room that knows both": ("config.combination",),
    "something is absent": (
        *("checkpoint.not-found", "data.not-found", "model.not-found", "storage.not-found"),
        "install.missing-package",
    ),
    "a file cannot be read, or is not as it was written": (
        *("file.unreadable", "checkpoint.unsafe", "weights.damaged", "run.damaged-record"),
        *("data.damaged-file", "data.damaged-preparation"),
    ),
    "a row or a batch is not as its reader needs it": ("data.malformed-row", "data.batch-shape"),
    "something cannot be written": ("output.not-empty", "output.unwritable", "storage.failed"),
    "ranks no longer do the same": ("model.replicas-differ", "rank.hung", "rank.lost"),
}


@functools.cache
def trees() -> dict[str, ast.Module]:
    files = sorted(SOURCE.rglob("*.py"))
    return {str(file.relative_to(SOURCE)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def exit_codes() -> dict[str, int]:
    """Of each class of errors by its name, those that a file derives for itself included."""
    codes = {kind.__name__: kind.exit_code for kind in CLASSES}
    nodes = (node for tree in trees().values() for node in ast.walk(tree))
    for kind in (node for node in nodes if isinstance(node, ast.ClassDef)):
        for base in kind.bases:
            if isinstance(base, ast.Name) and base.id in codes:
                codes[kind.name] = codes[base.id]
    return codes


def raised() -> Iterator[tuple[str, int, ast.expr | None]]:
    """Where an error is made, the exit code of its class, and its `key=`."""
    codes = exit_codes()
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in codes:
                key = next((keyword.value for keyword in node.keywords if keyword.arg == "key"), None)
                yield f"{file}:{node.lineno}", codes[node.func.id], key


def documented() -> list[tuple[str, int]]:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)`(?: \((\d)\))? \|", page, re.MULTILINE)
    return [(key, int(code or 2)) for key, code in rows]


def test_every_error_has_a_key() -> None:
    assert [where for where, _, key in raised() if key is None] == []


def test_every_key_is_documented_with_its_exit_code() -> None:
    keys = {(key.value, code): where for where, code, key in raised() if isinstance(key, ast.Constant)}
    assert {key: where for key, where in keys.items() if not KEY.fullmatch(str(key[0]))} == {}
    assert {key: where for key, where in keys.items() if key not in documented()} == {}


def test_a_rule_is_refused_in_one_file_and_only_a_kind_of_failure_in_several() -> None:
    files: dict[str, set[str]] = {}
    for file, tree in trees().items():
        for node in (node for call in ast.walk(tree) if isinstance(call, ast.Call) for node in call.keywords):
            if node.arg == "key" and isinstance(node.value, ast.Constant) and KEY.fullmatch(str(node.value.value)):
                files.setdefault(str(node.value.value), set()).add(file)
    several = {key: found for key, found in files.items() if len(found) > 1}
    kinds = {key for keys in KINDS.values() for key in keys}
    assert {key: found for key, found in several.items() if key not in kinds} == {}
    assert kinds - several.keys() == set()


def test_every_documented_key_is_in_the_source_and_listed_once() -> None:
    keys = [key for key, _ in documented()]
    assert len(set(keys)) == len(keys)
    literals = {node.value for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert set(keys) - literals == set()


@pytest.mark.parametrize("kind", [ExpertmeshError, *CLASSES])
def test_a_class_has_a_key_that_a_raise_site_replaces(kind: type[ExpertmeshError]) -> None:
    error = kind("a sentence", key="layout.ep-divides-experts")
    assert (str(error), error.key) == ("a sentence", "layout.ep-divides-experts")
    assert kind("a sentence").key == kind.key
    assert len({kind.key for kind in CLASSES}) == len(CLASSES)
