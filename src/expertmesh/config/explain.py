"""Pydantic's validation errors as one sentence per problem: where, which key and value, why, how to mend it.

What a key accepts is read from the sections' own annotations, so no sentence can disagree with the check. An
unknown key is answered with the key that was probably meant, or the section that it belongs under.
"""

import difflib
import types
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from expertmesh.config.base import Section, show
from expertmesh.config.yaml_text import Path, dotted

ELSEWHERE = {
    "lr": "optim.learning_rate",
    "batch_size": "train.global_batch_size",
    "per_device_train_batch_size": "train.micro_batch_size",
    "epochs": "train.num_epochs",
    "num_train_epochs": "train.num_epochs",
    "max_seq_length": "data.max_length",
    "seq_len": "data.max_length",
    "gradient_checkpointing": "train.activation_checkpointing",
    "activation_checkpoint": "train.activation_checkpointing",
    "torch_compile": "train.compile",
    "dtype": "precision.compute",
    "dataset": "data.train",
}
"""Names that other trainers use for our keys."""
DERIVED = {
    "gradient_accumulation_steps": "train.global_batch_size, train.micro_batch_size and the data ranks",
    "efsdp": "parallel.fsdp and parallel.ep",
    "world_size": "the number of ranks (--nproc, or the launcher)",
}
"""Names of values that nobody sets, because they follow from others."""


def explain(
    error: ValidationError,
    root: type[Section],
    prefix: Path = (),
    where: Callable[[Path], str] = lambda path: "",
) -> str:
    """One line per problem of `error`, which arose in validating `root`.

    `prefix` stands before every key; `where` gives the text before a problem ("file:line: ") by its path.
    """
    lines: list[str] = []
    explained: set[Path] = set()
    for problem in error.errors(include_url=False):
        path, annotation = _locate(root, problem["loc"])
        if path in explained:  # a union complains once per member
            continue
        for named, sentence in _sentences(problem, root, path, annotation, prefix):
            explained.add(path)
            lines.append(f"{where(named)}{sentence}")
    return "\n".join(lines)


def _sentences(
    problem: ErrorDetails, root: type[Section], path: Path, annotation: Any, prefix: Path
) -> Iterator[tuple[Path, str]]:
    """The path and the sentence of every problem that one of pydantic's errors stands for."""
    key = dotted((*prefix, *path)) or "the configuration"
    value = problem["input"]
    match problem["type"]:
        case "extra_forbidden":
            yield path, f"{key} is not a key of the configuration; {_advice(root, path, prefix)}"
        case "missing":
            for missing in _required(path, annotation):
                yield missing, f"{dotted((*prefix, *missing))} is missing; add it"
        case "too_short" if len(value) >= problem["ctx"]["min_length"]:
            return  # items of a list were refused, and pydantic counts what is left
        case "value_error" if _section_in(annotation):  # its sentences name their keys in full
            for sentence in str(problem["ctx"]["error"]).splitlines():
                named = sentence.split(maxsplit=1)[0].rstrip(",")
                yield tuple(named.split(".")), sentence
        case "value_error":
            yield path, f"{key} is {show(value)}, but {problem['ctx']['error']}"
        case "string_type" if isinstance(value, int | float):
            yield (
                path,
                f"{key} must be {_accepts(annotation)}, not the number {show(value)}; put it in quotes",
            )
        case _:
            yield path, f"{key} must be {_accepts(annotation)}, not {show(value)}"


def _locate(root: type[Section], loc: Path) -> tuple[Path, Any]:
    """The path of the value that pydantic's `loc` is about, and the annotation that it has to meet.

    A location goes on behind the value with the names of the union members that were tried. An unknown key
    ends the path, without an annotation of its own.
    """
    annotation: Any = root
    for depth, part in enumerate(loc):
        members = _members(annotation)
        if not members:
            return loc[:depth], annotation
        annotation = members[0] if isinstance(part, int) and len(members) == 1 else members.get(part)
    return loc, annotation


def _members(annotation: Any) -> dict[str | int, Any]:
    """The annotations inside a section (by key) or a list (by position; only 0 where all items are alike)."""
    if section := _section_in(annotation):
        return {key: _annotation_of(field) for key, field in section.model_fields.items()}
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) is tuple:
        return dict(enumerate(item for item in get_args(annotation) if item is not Ellipsis))
    return {}


def _annotation_of(field: FieldInfo) -> Any:
    metadata = tuple(field.metadata)
    return Annotated[(field.annotation, *metadata)] if metadata else field.annotation


def _section_in(annotation: Any) -> type[Section] | None:
    """The section that the annotation is, or may be beside null."""
    members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    sections = [member for member in members if _is_section(member)]
    return sections[0] if len(sections) == 1 else None


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _accepts(annotation: Any, bounds: tuple[Any, ...] = ()) -> str:
    """What an annotation accepts, in words: "an integer of at least 1 or null"."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        nested = [m.metadata if isinstance(m, FieldInfo) else [m] for m in inner[1:]]
        return _accepts(inner[0], (*bounds, *(bound for metadata in nested for bound in metadata)))
    if origin in (Union, types.UnionType):
        return " or ".join(_accepts(member, bounds) for member in inner)
    if origin is Literal:
        return str(inner[0]) if len(inner) == 1 else f"one of {', '.join(str(choice) for choice in inner)}"
    if origin is tuple and Ellipsis not in inner:
        return f"a list of {len(inner)} values, each {_accepts(inner[0])}"
    if origin is tuple:
        some = "one or more" if any(isinstance(bound, annotated_types.MinLen) for bound in bounds) else "any"
        return f"a list of {some} items, each {_accepts(inner[0])}"
    if _is_section(annotation):
        return f"a section of keys ({', '.join(annotation.model_fields)})"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    limits = " and ".join(filter(None, map(_limit, bounds))) if annotation in (int, float, str) else ""
    return f"{words[annotation]} {limits}".rstrip()


def _limit(bound: Any) -> str:
    match bound:
        case annotated_types.Ge(ge=limit):
            return f"of at least {limit}"
        case annotated_types.Gt(gt=limit):
            return f"above {limit}"
        case annotated_types.Le(le=limit):
            return f"of at most {limit}"
        case annotated_types.Lt(lt=limit):
            return f"below {limit}"
        case annotated_types.MinLen():
            return "that is not empty"
        case _:
            return ""


def _required(path: Path, annotation: Any) -> list[Path]:
    """The keys to add where `path` is missing: itself, or what a missing section requires."""
    if not _is_section(annotation):
        return [path]
    return [(*path, key) for key, field in annotation.model_fields.items() if field.is_required()]


def _advice(root: type[Section], path: Path, prefix: Path) -> str:
    """What to do about the unknown key at `path`."""
    key = str(path[-1])
    if key in DERIVED:
        return f"it follows from {DERIVED[key]}; remove it"
    keys = list(_all_keys(root))
    homes = [dotted((*prefix, *known[:-1])) for known in keys if known[-1] == key]
    if homes:
        return f"it belongs {' or '.join(f'under {home}' if home else 'at the top level' for home in homes)}"
    if key in ELSEWHERE:
        return f"did you mean {ELSEWHERE[key]}?"
    siblings = list(_members(_locate(root, path[:-1])[1]))
    by_name = {str(known[-1]): known for known in reversed(keys)}
    if near := difflib.get_close_matches(key, [str(sibling) for sibling in siblings], n=1):
        return f"did you mean {dotted((*prefix, *path[:-1], near[0]))}?"
    if near := difflib.get_close_matches(key, by_name, n=1, cutoff=0.75):
        return f"did you mean {dotted((*prefix, *by_name[near[0]]))}?"
    return f"the keys here are {', '.join(str(sibling) for sibling in siblings)}"


def _all_keys(annotation: Any, path: Path = ()) -> Iterator[Path]:
    for part, member in _members(annotation).items():
        if isinstance(part, str):
            yield (*path, part)
        yield from _all_keys(member, (*path, part))
