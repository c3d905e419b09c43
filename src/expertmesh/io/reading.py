"""Read files that others have made, within limits of kind, size, depth and count; all limits are in this file.

Only regular files are opened (and links to them: the hub's cache consists of links), because a pipe would wait for a
writer forever, and a device has no end. A size is checked before a byte is read, and again while reading, because a
sparse file of a terabyte takes no room on the disk. JSON is refused if it is nested deeper than any honest file, or if
an object has a key twice.

Files of expertmesh record their `schema_version` (`read_versioned`): one of a newer version is refused, and a damaged
one is reported with the place of the damage.
"""

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

from pydantic import BaseModel, ValidationError

from expertmesh.config.errors import InputError, IntegrityError, SecurityError

MiB = 1 << 20
# Configurations, records, templates. Those of published models have a few KiB.
MAX_SMALL_BYTES = 16 * MiB
# tokenizer.json, vocabularies and the like. Published ones have up to 35 MB.
MAX_TOKENIZER_BYTES = 256 * MiB
# A manifest grows with the number of tensors and of ranks.
MAX_MANIFEST_BYTES = 256 * MiB
# One row of training data, or of metrics.jsonl.
MAX_ROW_BYTES = 64 * MiB
# A list of rows is one JSON value and is read at once. JSON lines have no such limit, because they are read row by row.
MAX_LIST_BYTES = 2048 * MiB
MAX_METRICS_BYTES = 16384 * MiB
# Counts of pairs of experts: 134 MB of 64 layers of 512.
MAX_PAIRS_BYTES = 512 * MiB
# The deepest honest values are JSON schemas of tools in rows of data, about ten levels.
MAX_DEPTH = 100
_SHOWN = 200
Content = TypeVar("Content", bound=BaseModel)


def open_file(path: Path, *, key: str = "file.unsafe", mend: str = "remove it") -> int:
    """Open a regular file for reading and return its descriptor.

    Raises:
        SecurityError: It is another kind of file; the error has `key` and names `mend` as the fix.
        OSError: It cannot be opened, or is a directory.
    """
    unsafe = SecurityError(f"{path}: is neither a file nor a link to one; {mend}", key=key)
    try:
        # O_NONBLOCK: without it the open of a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ELOOP):  # a socket; links in a circle
            raise unsafe from error
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory", str(path))
    raise unsafe


@contextmanager
def opened(path: Path, limit: int) -> Iterator[BinaryIO]:
    """Open a regular file of at most `limit` bytes, buffered, for the block.

    Raises:
        SecurityError, InputError, OSError: Not a regular file; too large; cannot be opened.
    """
    with os.fdopen(open_file(path), "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > limit:
            raise too_large(path, f"has {size:,} bytes", limit)
        yield file


def read_file(path: Path, limit: int = MAX_SMALL_BYTES) -> bytes:
    """Return the content of a regular file of at most `limit` bytes. Raises as `opened` does."""
    with opened(path, limit) as file:
        content = file.read(limit + 1)
    if len(content) > limit:  # it has grown, or is a file that reports the size 0 (as in /proc)
        raise too_large(path, "has more", limit)
    return content


def too_large(path: Path | str, what: str, limit: int) -> InputError:
    """Return the error for a file that is larger than `limit` bytes."""
    return InputError(
        f"{path}: {what}, and at most {limit:,} bytes are read of such a file; see what it really is",
        key="file.too-large",
    )


def read_json(path: Path, limit: int = MAX_SMALL_BYTES) -> Any:
    """Return the value of a JSON file. Raises as `read_file` and `parse_json` do."""
    return parse_json(read_file(path, limit))


def parse_json(content: bytes | str) -> Any:
    """Return the JSON value of `content`. Raises `ValueError` for anything else, and for an object with a key twice."""
    text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
    try:
        value = json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_depth(value)
    return value


def parse_text(text: str) -> Any:
    """Return the JSON value of a text in a row of data. Raises `ValueError` as `parse_json` and `refuse_surrogates`."""
    value = parse_json(text)
    refuse_surrogates(value)
    return value


def refuse_surrogates(value: Any) -> None:
    """Raise `ValueError` for half of a surrogate pair: JSON can spell it, and no tokenizer or file can hold it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it holds an unpaired surrogate and so is not valid Unicode") from None


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's `pairs` as a dictionary. Raises `ValueError` that names a key that appears twice."""
    built = dict(pairs)
    if len(built) != len(pairs):
        raise ValueError(f"{shortened(first_repeated(pairs))} appears twice in one object")
    return built


def first_repeated(pairs: list[tuple[str, Any]]) -> str:
    """Return the first key of `pairs` that appears a second time; there must be one."""
    seen: set[str] = set()
    return next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]


def check_depth(value: Any) -> None:
    """Raise `ValueError` for a JSON value with more than `MAX_DEPTH` lists and objects inside each other."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        # Compare classes, which is fast: JSON has no subclasses, and a manifest has half a million values.
        level = [each for each in level if each.__class__ is dict or each.__class__ is list]
        if not level:
            return
        level = [each for one in level for each in (one.values() if one.__class__ is dict else one)]
    raise ValueError(f"it is nested more than {MAX_DEPTH} deep")


def shortened(text: str) -> str:
    """Return `text`, cut to a length that fits in a sentence."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ... ({len(text):,} characters)"


def rows(file: IO[bytes], path: Path | str, limit: int = MAX_ROW_BYTES) -> Iterator[bytes]:
    """Yield the lines of a file with their newlines; the last line may lack one.

    Raises:
        InputError: A line is longer than `limit` bytes; the error gives its number.
    """
    number = 0
    while line := file.readline(limit + 1):
        number += 1
        if len(line) > limit:
            raise too_large(f"{path}:{number}", "the row is longer", limit)
        yield line


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
