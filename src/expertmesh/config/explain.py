"""Pydantic's validation errors as one sentence per problem: where, which key and value, why, how to mend it.

What a key accepts is read from the JSON schema of the sections, so no sentence can disagree with the check. An unknown
key is answered with the key that was probably meant, or the section that it belongs under.
"""

import difflib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from expertmesh.config.errors import InputError
from expertmesh.config.other_names import DERIVED, ELSEWHERE, NOT_YET
from expertmesh.config.yaml_text import Path, dotted

# More would not be read, and each takes a search through all keys.
_MOST_PROBLEMS = 20
_LONGEST_KEY = 100
_TYPES = {"integer": "an integer", "number": "a number", "boolean": "true or false", "string": "text", "null": "null"}
_LIMITS = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "of at most", "exclusiveMaximum": "below"}


def explain(
    error: ValidationError, root: type[BaseModel], prefix: Path = (), where: Callable[[Path], str] = lambda path: ""
) -> InputError:
    """Return the error to raise instead, with one line per problem of `error`, which arose in validating `root`.

    `prefix` stands before every key; `where` gives the text before a problem ("file:line: ") by its path. The first
    problem gives the error its key.
    """
    schema = _Schema(root, prefix)
    lines: list[str] = []
    explained: set[Path] = set()
    problems = error.errors(include_url=False)
    for problem in problems:
        if len(lines) >= _MOST_PROBLEMS:
            lines.append(f"{where(())}{len(problems):,} problems in all")
            break
        path = schema.path_of(problem["loc"])
        if path in explained:  # a union complains once per member
            continue
        for named, sentence in schema.sentences(problem, path):
            explained.add(path)
            lines.append(f"{where(named)}{sentence}")
    return InputError("\n".join(lines), key=schema.key_of(problems[0]))


@cache
def _json_schema(root: type[BaseModel]) -> dict[str, Any]:
    return root.model_json_schema()


class _Schema:
    """The keys below `root` and what each accepts. A node is a part of the JSON schema; {} is what is not known."""

    def __init__(self, root: type[BaseModel], prefix: Path) -> None:
        self._schema = _json_schema(root)
        self._prefix = prefix

    def path_of(self, loc: Path) -> Path:
        """Return the path of the value that pydantic's `loc` is about.

        A location goes on behind the value with the names of the union members that were tried.
        """
        return next((loc[:depth] for depth in range(len(loc)) if not self._inside(self._at(loc[:depth]))), loc)

    def key_of(self, problem: ErrorDetails) -> str:
        match problem["type"]:
            case "extra_forbidden":
                return "config.unknown-key"
            case "missing":
                return "config.missing-key"
            case "value_error" if "properties" in self._at(self.path_of(problem["loc"])):
                return "config.combination"
        return "config.wrong-value"

    def sentences(self, problem: ErrorDetails, path: Path) -> Iterator[tuple[Path, str]]:
        """Yield the path and the sentence of every problem that one of pydantic's errors, about `path`, stands for."""
        key = dotted((*self._prefix, *path)) or "the configuration"
        value, node = problem["input"], self._at(path)
        match problem["type"]:
            case "extra_forbidden":
                yield path, f"{key} is not a key of the configuration; {self._advice(path)}"
            case "missing":
                for name in node.get("required", [()]) if "properties" in node else [()]:
                    missing = (*path, name) if name else path
                    yield missing, f"{dotted((*self._prefix, *missing))} is missing; add it"
            case "too_short" if len(value) >= problem["ctx"]["min_length"]:
                return  # items of a list were refused, and pydantic counts what is left
            case "value_error" if "properties" in node:  # its sentences name their keys in full
                for sentence in str(problem["ctx"]["error"]).splitlines():
                    named = sentence.split(maxsplit=1)[0].rstrip(",")
                    yield tuple(named.split(".")), sentence
            case "value_error":
                yield path, f"{key} is {show(value)}, but {problem['ctx']['error']}"
            case "string_type" if isinstance(value, int | float):
                yield path, f"{key} must be {self._accepts(node)}, not the number {show(value)}; put it in quotes"
            case _:
                too_large = problem["type"] == "less_than_equal"
                yield path, f"{key} must be {self._accepts(node, too_large)}, not {show(value)}"

    def _resolved(self, node: dict[str, Any]) -> dict[str, Any]:
        """Return the node that a reference leads to; of alternatives the section, else the first list."""
        options = [self._resolved(option) for option in node.get("anyOf", [])]
        wanted = [option for option in options if "properties" in option] or [o for o in options[:1] if "items" in o]
        if wanted:
            return wanted[0]
        return self._schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node

    def _inside(self, node: dict[str, Any]) -> dict[str | int, Any]:
        """Return the nodes inside a section (by key) or a list (by position; only 0 where all items are alike)."""
        if "properties" in node:
            return dict(node["properties"])
        return dict(enumerate(node.get("prefixItems", [node["items"]] if "items" in node else [])))

    def _at(self, path: Path) -> dict[str, Any]:
        node = self._schema
        for part in path:
            members = self._inside(node)
            alike = isinstance(part, int) and len(members) == 1
            node = self._resolved(members.get(0 if alike else part, {}))
        return node

    def _accepts(self, node: dict[str, Any], too_large: bool = False) -> str:
        """Return what a node accepts, in words: "an integer of at least 1 or null". The most that is let through, far
        beyond what makes sense, is said where it is exceeded.
        """
        match node:
            case {"anyOf": options}:
                return " or ".join(self._accepts(option, too_large) for option in options)
            case {"$ref": _}:
                return self._accepts(self._resolved(node), too_large)
            case {"const": value}:
                return str(value)
            case {"enum": choices}:
                return f"one of {', '.join(map(str, choices))}"
            case {"properties": keys}:
                return f"a section of keys ({', '.join(keys)})"
            case {"prefixItems": items}:
                return f"a list of {len(items)} values, each {self._accepts(items[0])}"
            case {"items": item}:
                return f"a list of {'one or more' if 'minItems' in node else 'any'} items, each {self._accepts(item)}"
            case {"additionalProperties": True}:
                return "keys and values of your own"
            case {"additionalProperties": value}:
                return f"keys of your own, each {self._accepts(value)}"
        said = [name for name in _LIMITS if name in node and (name != "maximum" or too_large or node[name] <= 1)]
        limits = " and ".join(f"{_LIMITS[name]} {_number(node[name])}" for name in said)
        limits = "that is not empty" if "minLength" in node else limits
        return f"{_TYPES[node['type']]} {limits}".rstrip()

    def _advice(self, path: Path) -> str:
        """Return what to do about the unknown key at `path`."""
        key = str(path[-1])[:_LONGEST_KEY]
        theirs = key.replace("-", "_")
        if theirs in DERIVED:
            return f"it follows from {DERIVED[theirs]}; remove it"
        keys = list(self._all_keys(self._schema))
        homes = [dotted((*self._prefix, *known[:-1])) for known in keys if known[-1] == key]
        if homes:
            return f"it belongs {' or '.join(f'under {home}' if home else 'at the top level' for home in homes)}"
        if theirs in ELSEWHERE:
            return f"did you mean {ELSEWHERE[theirs]}?"
        if theirs in NOT_YET:
            return f"{NOT_YET[theirs]} is not in expertmesh yet; remove it"
        siblings = [str(sibling) for sibling in self._inside(self._at(path[:-1]))]
        if near := difflib.get_close_matches(key, siblings, n=1):
            return f"did you mean {dotted((*self._prefix, *path[:-1], near[0]))}?"
        by_name = {str(known[-1]): known for known in reversed(keys)}
        if near := difflib.get_close_matches(key, by_name, n=1, cutoff=0.75):
            return f"did you mean {dotted((*self._prefix, *by_name[near[0]]))}?"
        return f"the keys here are {', '.join(siblings)}"

    def _all_keys(self, node: dict[str, Any], path: Path = ()) -> Iterator[Path]:
        for part, member in self._inside(self._resolved(node)).items():
            if isinstance(part, str):
                yield (*path, part)
            yield from self._all_keys(member, (*path, part))


def close_to(name: str, known: Sequence[str]) -> str:
    """Return what to do about a name that is none of those known."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def show(value: object) -> str:
    """Return a value as its author knows it from YAML; text in quotes, so that '10' and 10 look different."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict | BaseModel):
        return "a section of keys"
    items = value if isinstance(value, list | tuple) else None
    text = repr(value) if items is None else f"[{', '.join(show(item) for item in items[:40])}]"
    return text if len(text) <= 80 else f"{text[:76]} ..."
