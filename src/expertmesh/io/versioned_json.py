"""Read JSON files of expertmesh that record their `schema_version`, such as a manifest or the record of a run.

A file of a newer version is refused, and a damaged one is reported with the place of the damage.
"""

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.io.reading import MAX_SMALL_BYTES, parse_json, read_file, shortened

Content = TypeVar("Content", bound=BaseModel)


def read_versioned(path: Path, kind: type[Content], version: int, *, key: str) -> Content:
    """Return the file as `kind`.

    Args:
        key: The key of the error about a damaged file.

    Raises:
        FileNotFoundError: There is no such file.
        InputError: It cannot be read, or a newer version wrote it.
        IntegrityError: It is damaged.
    """
    return validated(path, kind, read_content(path, version, key=key), key=key)


def read_content(path: Path, version: int, mend: str = "", *, key: str, limit: int = MAX_SMALL_BYTES) -> Any:
    """Return the JSON value of a file of schema `version` or an older one.

    Args:
        mend: What to do about damage, for the message.
        key: The key of the error about a damaged file.
        limit: The most bytes that are read.

    Raises:
        FileNotFoundError, InputError, IntegrityError: As `read_versioned` does.
    """
    try:
        content = parse_json(read_file(path, limit))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}", key="file.unreadable") from error
    except ValueError as error:
        raise IntegrityError(f"{path}: damaged: is not JSON ({error}){mend and f'; {mend}'}", key=key) from error
    found = content.get("schema_version") if isinstance(content, dict) else None
    if found is not None and type(found) is not int:  # not isinstance or ==: true and 1.0 are equal to 1
        problem = f"{path}: damaged: schema_version is {shortened(repr(found))}, not a whole number"
        raise IntegrityError(f"{problem}{mend and f'; {mend}'}", key=key)
    if found is not None and found > version:
        raise InputError(
            f"{path}: has schema version {found}, newer than the {version} that this version of expertmesh reads; "
            "update expertmesh",
            key="install.too-old",
        )
    return content


def validated(path: Path, kind: type[Content], content: Any, mend: str = "", *, key: str) -> Content:
    """Return the `content` of the file as `kind`. Raises `IntegrityError`."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise IntegrityError(f"{path}: damaged: {first_problem(error)}{mend and f'; {mend}'}", key=key) from error


def first_problem(error: ValidationError) -> str:
    """Return the place and the message of the first problem, in a few words."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(shortened(str(part)) for part in first["loc"])
    return ": ".join(filter(None, (where, shortened(first["msg"]))))
