"""The base class of every configuration section: frozen, strict, and refusing in sentences.

Strict means that no value changes its type on the way in (`"10"` is text, not a number; an integer is taken
where a number is asked) and that no key is ignored. Built from YAML or from Python, a bad value ends in
`InputError` with one sentence per problem, never in pydantic's own report.
"""

from typing import Annotated, Any, ClassVar, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic._internal._model_construction import ModelMetaclass

from expertmesh.config.errors import InputError

T = TypeVar("T")


class _RefusesInSentences(ModelMetaclass):
    """Turns the `ValidationError` of `ParallelConfig(tp="2")` into an `InputError`, as `load_config` does.

    It sits on the call of the class, because pydantic builds nested sections without calling their class: the
    problems of a whole file are then still collected before the first one is reported.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        from expertmesh.config.explain import explain  # explain reads the sections' fields, hence this base

        try:
            return super().__call__(*args, **kwargs)
        except ValidationError as error:
            section = cast(type[Section], cls)
            raise InputError(explain(error, section, prefix=tuple(filter(None, [section.section])))) from None


class Section(BaseModel, metaclass=_RefusesInSentences):
    """One section of the configuration; `section` is its dotted name in a file, empty for the root."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    section: ClassVar[str] = ""


Listed = Annotated[tuple[T, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
"""A list of the file, kept as a tuple: a frozen section must not hold something that can change."""


def refuse(problems: list[str]) -> None:
    """Raise a section's problems at once, or return; each sentence begins with the dotted key it is about."""
    if problems:
        raise ValueError("\n".join(problems))


def show(value: object) -> str:
    """A value as its author knows it from YAML; text in quotes, so that '10' and 10 look different."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict | BaseModel):
        return "a section of keys"
    items = value if isinstance(value, list | tuple) else None
    text = repr(value) if items is None else f"[{', '.join(show(item) for item in items)}]"
    return text if len(text) <= 80 else f"{text[:76]} ..."
