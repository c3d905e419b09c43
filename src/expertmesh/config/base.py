"""Define the base class of every section: frozen, strict, and refusing in sentences.

Strict means that no value changes its type on the way in (`"10"` is text, not a number; an integer is taken where a
number is expected) and that no key is ignored. Built from YAML or from Python, a wrong value ends in `InputError` with
one sentence per problem, never in pydantic's own report.
"""

import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema

from expertmesh.config.explain import explain

T = TypeVar("T")


class Section(BaseModel):
    """One section of the configuration; `section` is its dotted name in a file, empty for the root."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    section: ClassVar[str] = ""

    def __init__(self, /, **values: Any) -> None:
        """Validate `values`; `ParallelConfig(tp="2")` raises the `InputError` that `load_config` would raise."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise explain(error, type(self), prefix=(self.section,) if self.section else ()) from None

    # Pydantic then builds nested sections without it, so that the problems of a whole file are collected.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def idle(self) -> dict[str, str]:
        """Return the keys that do nothing beside the others, each with those others and how to mend it.

        They are refused if they are given, unless the sentence is empty, and left out where the section is written.
        """
        return {}

    @model_validator(mode="after")
    def _refuse_idle(self) -> Self:
        given = {key: why for key, why in self.idle().items() if why and key in self.model_fields_set}
        refuse(*(f"{self.section}.{key} does nothing {why}" for key, why in given.items()))
        return self

    @model_serializer(mode="wrap")
    def _without_idle(self, serialize: Callable[[Self], dict[str, Any]]) -> dict[str, Any]:
        idle = self.idle()
        return {key: value for key, value in serialize(self).items() if key not in idle}


class _TextForOne:
    """The JSON schema of a list that takes text for a list of one, where its items may be text."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        listed = handler(schema)
        items = listed["items"]
        text = [item for item in items.get("anyOf", [items]) if item.get("type") == "string"]
        return {"anyOf": [listed, *text]} if text else listed


def _as_tuple(value: object) -> object:
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, str) else value


Listed = Annotated[tuple[T, ...], BeforeValidator(_as_tuple), _TextForOne()]
"""A list of the file, or text for a list of one, kept as a tuple: a frozen section must not hold something that can
change."""


class _Frozen(dict[str, Any]):
    """A dictionary of the file that stays as it is."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("a configuration cannot change")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True, default=str))


_MAX_TEXT, _MAX_PART = 4096, 255  # of a path, and of a name in it, in bytes


def _plain(text: str) -> str:
    """Return a name or path as an operating system can have it, with a user's directory in place of `~`."""
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise ValueError("a name has no control characters; remove them")
    if len(text.encode()) > _MAX_TEXT or any(len(part.encode()) > _MAX_PART for part in text.split("/")):
        raise ValueError(
            f"a name has at most {_MAX_PART} bytes, and a path of names at most {_MAX_TEXT:,}; give another one"
        )
    try:
        return str(Path(text).expanduser()) if text.startswith("~") else text
    except RuntimeError:
        raise ValueError("there is no such user; write the path in full") from None


Plain = Annotated[str, AfterValidator(_plain)]
Name = Annotated[Plain, Field(min_length=1)]
"""A path, or the name of something."""

Mapped = Annotated[dict[str, T], AfterValidator(_Frozen)]
"""Values by keys that nobody here knows: arguments of a template, patterns of names, columns of data."""


def pattern_problem(pattern: str) -> str | None:
    """Return why `pattern` is no regular expression, or None."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"{pattern[:80]!r} is not a regular expression: {error}"
    return None


def is_named(name: str, pattern: str) -> bool:
    """Return whether the end of `name`, from a dot on, is what a pattern of PEFT's says."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def refuse(*problems: str) -> None:
    """Raise a section's problems at once, or return; each sentence begins with the dotted key it is about."""
    if problems:
        raise ValueError("\n".join(problems))
