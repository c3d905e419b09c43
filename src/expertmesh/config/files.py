"""A configuration file in, a `Config` out, and back.

`load_config` is the only way from text to a `Config`: it reads YAML, applies overrides, validates, and says
where each problem stands. It opens no file but the one it is given.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from expertmesh.config.errors import InputError
from expertmesh.config.explain import explain, show
from expertmesh.config.overrides import apply_override
from expertmesh.config.root import Config
from expertmesh.config.yaml_text import MAX_CHARACTERS, Path, dump_yaml, parse_yaml


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


def dump_config(config: Config) -> str:
    """Return the resolved configuration, defaults included, as YAML that `load_config` reads back as its equal."""
    return dump_yaml(config.model_dump(mode="json"))


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
