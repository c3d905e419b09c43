"""Read YAML text as plain values and write it back, with YAML 1.2 scalars and the line of every key.

`1e-5` is a number, `yes` and `2024-01-01` are text, and a key given twice is refused with both lines. Only mappings,
lists and scalars exist: tags that would build objects, and aliases, are refused. Values keep their lines, so that a
later error can name `file:line`.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import yaml

from expertmesh.config.errors import InputError

Path = tuple[str | int, ...]
"""Place of a value in a document: keys and list positions from the root."""


def dotted(path: Path) -> str:
    """Return a path as a user writes it: `train.max_steps`."""
    return ".".join(str(part) for part in path)


@dataclass(frozen=True, slots=True)
class Document:
    """The value of a YAML text, and the line (from 1) on which each of its keys and list items starts."""

    value: Any
    lines: dict[Path, int]


# Sections of a configuration lie three deep, template_args as deep as their template wants them.
_MAX_DEPTH = 50
MAX_CHARACTERS = 1 << 18
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]{1,99}|0o[0-7]{1,99}|0x[0-9a-fA-F]{1,99}")  # Python refuses huge ones
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def parse_yaml(text: str, source: str) -> Document:
    """Return the one document in `text`; `InputError` for text that is not one, with `source` as its name."""
    if len(text) > MAX_CHARACTERS:
        most = f"has more characters than a configuration may have, {MAX_CHARACTERS:,}"
        raise _invalid(source, f"{most}; name directories instead of files")
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            _refuse_more_than_plain(event, source)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:  # PyYAML's time grows with the square of it
                raise RecursionError
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise _invalid(f"{source}{line}", f"this is not valid YAML ({what}); correct the line") from None
    except RecursionError:
        raise _invalid(source, "lists and mappings are nested too deeply; flatten them") from None
    except yaml.YAMLError as error:  # a character that YAML does not allow
        first_line = str(error).splitlines()[0]
        raise _invalid(source, f"this is not valid YAML ({first_line}); remove the character") from None
    lines: dict[Path, int] = {}
    return Document(None if node is None else _value(node, (), source, lines), lines)


def _invalid(where: str, problem: str) -> InputError:
    return InputError(f"{where}: {problem}", key="config.invalid-yaml")


def _refuse_more_than_plain(event: yaml.Event, source: str) -> None:
    """Refuse tags, which could build objects, and aliases, which could expand to any size."""
    where = f"{source}:{event.start_mark.line + 1}" if event.start_mark else source
    if isinstance(event, yaml.AliasEvent):
        raise InputError(
            f"{where}: the alias *{event.anchor} is refused, because aliases are not read; repeat the value",
            key="config.yaml-alias",
        )
    tag = getattr(event, "tag", None)
    if tag is not None:
        raise InputError(
            f"{where}: the tag {tag} is refused, because only plain values are read; remove the tag",
            key="config.yaml-tag",
        )


def _value(node: yaml.Node, path: Path, source: str, lines: dict[Path, int]) -> Any:
    lines.setdefault(path, node.start_mark.line + 1)  # a key has set its own line, which is the better one
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, source, lines)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*path, i), source, lines) for i, item in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode)
    return node.value if node.style in ("'", '"', "|", ">") else _scalar(node.value)


def _mapping(node: yaml.MappingNode, path: Path, source: str, lines: dict[Path, int]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise _invalid(f"{source}:{line}", "a key must be plain text, not a list or a mapping")
        key: str = key_node.value
        here = (*path, key)
        if key in values:
            raise InputError(
                f"{source}:{line}: {dotted(here)} is given twice (first on line {lines[here]}); remove one",
                key="config.duplicate-key",
            )
        lines[here] = line
        values[key] = _value(value_node, here, source, lines)
    return values


def _scalar(text: str) -> Any:
    """Return a plain (unquoted) scalar by the core schema of YAML 1.2, so `010` is ten and `1_000` is text."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if _FLOAT.fullmatch(text):
        return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
    return text


class _Dumper(yaml.SafeDumper):
    """Quotes text that either YAML 1.1 (PyYAML's own table) or 1.2 (below) would read as something else."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^(?:{_FLOAT.pattern})$"), list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(f"^(?:{_INT.pattern})$"), list("-+0123456789"))


def dump_yaml(value: Any, *, one_line: bool = False) -> str:
    """Return YAML that `parse_yaml` reads back as `value`, keys in their order; `one_line` puts it in braces."""
    width = math.inf if one_line else 1000
    text = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width, default_flow_style=one_line
    )
    assert isinstance(text, str)
    return text.removesuffix("...\n").rstrip("\n") if one_line else text
