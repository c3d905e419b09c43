"""Read a configuration file and overrides into a `Config`, and write it back.

`load_config` is the only way from text to a `Config`: it reads YAML, applies overrides, validates, and says where each
problem stands. It opens no file but the one it is given. An override, `train.max_steps=10`, is one dotted key and a
value that is read as YAML. `data.train.0.path=x` reaches into a list; the position behind the last item appends.
Sections on the way are created. Given twice, the later one wins, so that a caller's override may follow a script's.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from os import PathLike
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from expertmesh.config.errors import InputError
from expertmesh.config.explain import explain, show
from expertmesh.config.root import Config
from expertmesh.config.yaml_text import MAX_CHARACTERS, Path, dotted, dump_yaml, parse_yaml

Container = dict[str, Any] | list[Any]


def load_config(path: str | PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """Read, override and validate the YAML file at `path`.

    `overrides` are `dotted.key=value` texts, applied in order. Raises `InputError` with one line per problem.
    """
    source = str(path)
    return config_from(_read(source), source, overrides)


def config_from(text: str, source: str, overrides: Sequence[str] = ()) -> Config:
    """Return the same of the `text` of a file that `source` names."""
    document = parse_yaml(text, source)
    values = {} if document.value is None else document.value
    if not isinstance(values, dict):
        raise InputError(
            f"{source}: a configuration is a set of keys such as model and data, not {show(values)}",
            key="config.wrong-value",
        )
    lines = {key: f"{source}:{line}: " for key, line in document.lines.items() if key}
    return make_config(values, overrides, source, lines)


def make_config(
    values: dict[str, Any],
    overrides: Sequence[str] = (),
    source: str = "the configuration",
    lines: Mapping[Path, str] | None = None,
) -> Config:
    """Apply `overrides` to `values` (which changes) and validate; `InputError` with one line per problem.

    `source` names where values come from, and `lines` says it for single keys.
    """
    origins = dict(lines or {})
    for override in overrides:
        changed = apply_override(values, override)
        origins = {key: origin for key, origin in origins.items() if key[: len(changed)] != changed}
        origins[changed] = f"override {show(override)}: "

    def where(key: Path) -> str:
        ancestors = (key[:length] for length in range(len(key), 0, -1))
        return next((origins[ancestor] for ancestor in ancestors if ancestor in origins), f"{source}: ")

    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise explain(error, Config, where=where) from None


def _read(source: str) -> str:
    try:
        with FilePath(source).open(encoding="utf-8") as file:
            return file.read(MAX_CHARACTERS + 1)  # of a file without end, no more
    except FileNotFoundError:
        raise InputError(
            f"{source}: there is no such configuration file; check the path", key="config.file-missing"
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{source}: byte {error.start} is not UTF-8 text; save the file as UTF-8", key="config.file-unreadable"
        ) from None
    except OSError as error:
        raise InputError(
            f"{source}: the configuration cannot be read ({error.strerror}); check the path",
            key="config.file-unreadable",
        ) from None


def dump_config(config: Config) -> str:
    """Return the resolved configuration, defaults included, as YAML that `load_config` reads back as its equal."""
    return dump_yaml(config.model_dump(mode="json"))


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
        # The place behind the last item of a list has no value yet.
        known: dict[Any, Any] = container if isinstance(container, dict) else dict(enumerate(container))
        inner = known.get(key)
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


def _put(container: Container, key: str | int, value: Any) -> None:
    if isinstance(container, dict):
        container[str(key)] = value
    else:
        assert isinstance(key, int)
        container[key : key + 1] = [value]
