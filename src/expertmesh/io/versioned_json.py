"""Reading our own JSON files, which say their `schema_version`: a manifest, a run's record."""

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.io.reading import MAX_SMALL_BYTES, parse_json, read_file, shortened

Content = TypeVar("Content", bound=BaseModel)


def read_versioned(path: Path, kind: type[Content], version: int, *, key: str) -> Content:
    """The file as `kind`; `key` is that of the error about a damaged one.

    Raises `FileNotFoundError`, `InputError` for a file that cannot be read or that a newer version wrote, and
    `IntegrityError` for one that is damaged.
    """
    return validated(path, kind, read_content(path, version, key=key), key=key)


def read_content(path: Path, version: int, mend: str = "", *, key: str, limit: int = MAX_SMALL_BYTES) -> Any:
    """What the file, of at most `limit` bytes, says, of schema `version` or an older one; `mend` says what to do about
    damage.
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
    if found is not None and type(found) is not int:  # true and 1.0 are equal to 1
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
    """The `content` of the file as `kind`. Raises `IntegrityError`."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise IntegrityError(f"{path}: damaged: {first_problem(error)}{mend and f'; {mend}'}", key=key) from error


def first_problem(error: ValidationError) -> str:
    """Where and what, in a few words."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(shortened(str(part)) for part in first["loc"])
    return ": ".join(filter(None, (where, shortened(first["msg"]))))
