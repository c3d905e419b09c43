"""`train.max_steps=10` on the command line: one dotted key, and a value that is read as YAML.

`data.train.0.path=x` reaches into a list; the position behind the last item appends. Sections on the way are
created. Given twice, the later one wins, so that a script's own overrides can be followed by the caller's.
"""

from itertools import pairwise
from typing import Any

from expertmesh.config.errors import InputError
from expertmesh.config.explain import show
from expertmesh.config.yaml_text import Path, dotted, parse_yaml

Container = dict[str, Any] | list[Any]


def apply_override(values: dict[str, Any], override: str) -> Path:
    """Set one `dotted.key=value` inside `values`; returns the path of the outermost value that is new."""
    key_text, equals, text = override.partition("=")
    parts = key_text.split(".")
    if not equals or not all(parts):
        raise InputError(
            f"override {show(override)} is not of the form key=value; write for example train.max_steps=10",
            key="config.invalid-override",
        )
    value = parse_yaml(text, f"override {show(override)}").value
    container: Container = values
    path: Path = ()
    new: Path = ()
    for part, following in pairwise(parts):
        key = _key_in(container, part, path, override)
        path = (*path, key)
        inner = _get(container, key)
        if inner is None:
            inner = [] if _is_place(following) else {}
            _put(container, key, inner)
            new = new or path
        if not isinstance(inner, dict | list):
            here = dotted(path)
            raise InputError(
                f"override {show(override)}: {here} is {show(inner)}, which has no keys; set {here} itself",
                key="config.invalid-override",
            )
        container = inner
    key = _key_in(container, parts[-1], path, override)
    _put(container, key, value)
    return new or (*path, key)


def _key_in(container: Container, part: str, path: Path, override: str) -> str | int:
    """Return `part` as a key or position of `container`. Raises `InputError` if a list has no such position."""
    if isinstance(container, dict):
        return part
    if not _is_place(part) or int(part) > len(container):
        raise InputError(
            f"override {show(override)}: {dotted(path)} is a list of {len(container)}, counted from 0, and "
            f"{part} is not in it; use a smaller number, or {len(container)} to append",
            key="config.invalid-override",
        )
    return int(part)


def _is_place(part: str) -> bool:
    """Return whether it is a position in a list; Python's own digits have many scripts, and powers."""
    return part.isascii() and part.isdigit() and len(part) < 10


def _get(container: Container, key: str | int) -> Any:
    if isinstance(container, dict):
        return container.get(str(key))
    assert isinstance(key, int)
    return container[key] if key < len(container) else None


def _put(container: Container, key: str | int, value: Any) -> None:
    if isinstance(container, dict):
        container[str(key)] = value
    else:
        assert isinstance(key, int)
        container[key : key + 1] = [value]
