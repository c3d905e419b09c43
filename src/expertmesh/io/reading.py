"""Reads files that others have made, within limits of kind, size, depth and count; all limits stand here.

Only regular files are opened (links to them too: the hub's cache is made of links): a pipe would wait for a writer for
ever, a device has no end. A size is checked before a byte is read, and again while reading, since a sparse file of a
terabyte takes no room on the disk. JSON is refused that is nested deeper than any honest file, or says a key twice.
"""

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

from expertmesh.config.errors import InputError, SecurityError

MiB = 1 << 20
# Configurations, records, templates; those of published models have some KiB.
MAX_SMALL_BYTES = 16 * MiB
# tokenizer.json, vocabularies and the like: published ones have up to 35 MB.
MAX_TOKENIZER_BYTES = 256 * MiB
# Grows with the numbers of tensors and of ranks.
MAX_MANIFEST_BYTES = 256 * MiB
# One row of training data, or of metrics.jsonl.
MAX_ROW_BYTES = 64 * MiB
# A list of rows is one JSON value, which is read as a whole; JSON lines are read row by row, whatever their number.
MAX_LIST_BYTES = 2048 * MiB
MAX_METRICS_BYTES = 16384 * MiB
# Rows of data hold JSON schemas of tools, some ten levels deep.
MAX_DEPTH = 100
_SHOWN = 200


def open_file(path: Path, *, key: str = "file.unsafe", mend: str = "remove it") -> int:
    """A descriptor of a regular file, for reading. `SecurityError` (of `key`) for any other kind, and `OSError`."""
    unsafe = SecurityError(f"{path}: is neither a file nor a link to one; {mend}", key=key)
    try:
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
    """A regular file of at most `limit` bytes, buffered. Raises `SecurityError`, `InputError` and `OSError`."""
    with os.fdopen(open_file(path), "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > limit:
            raise too_large(path, f"has {size:,} bytes", limit)
        yield file


def read_file(path: Path, limit: int = MAX_SMALL_BYTES) -> bytes:
    """All of a regular file of at most `limit` bytes. Raises as `opened` does."""
    with opened(path, limit) as file:
        content = file.read(limit + 1)
    if len(content) > limit:  # it has grown, or is one of those that say they have no size
        raise too_large(path, "has more", limit)
    return content


def too_large(path: Path | str, what: str, limit: int) -> InputError:
    return InputError(
        f"{path}: {what}, and at most {limit:,} bytes are read of such a file; see what it really is",
        key="file.too-large",
    )


def read_json(path: Path, limit: int = MAX_SMALL_BYTES) -> Any:
    """The value of a JSON file. Raises as `read_file` and `parse_json` do."""
    return parse_json(read_file(path, limit))


def parse_json(content: bytes | str) -> Any:
    """The JSON value that `content` is; `ValueError` for anything else, also for keys that are said twice."""
    text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
    try:
        value = json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_depth(value)
    return value


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's `pairs` as a dictionary; `ValueError` names a key that is said twice."""
    built = dict(pairs)
    if len(built) != len(pairs):
        raise ValueError(f"{shortened(first_repeated(pairs))} appears twice in one object")
    return built


def first_repeated(pairs: list[tuple[str, Any]]) -> str:
    """The first key of `pairs` that stands there again, which one does."""
    seen: set[str] = set()
    return next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]


def check_depth(value: Any) -> None:
    """Raise `ValueError` for a JSON value with more than `MAX_DEPTH` lists and objects inside each other."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        # By class, as JSON has no others: a manifest has half a million values.
        level = [each for each in level if each.__class__ is dict or each.__class__ is list]
        if not level:
            return
        level = [each for one in level for each in (one.values() if one.__class__ is dict else one)]
    raise ValueError(f"it is nested more than {MAX_DEPTH} deep")


def shortened(text: str) -> str:
    """`text` as it can stand in a sentence."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ... ({len(text):,} characters)"


def rows(file: IO[bytes], path: Path | str, limit: int = MAX_ROW_BYTES) -> Iterator[bytes]:
    """The lines of a file with their newlines, the last perhaps without. `InputError` names one that is too long."""
    number = 0
    while line := file.readline(limit + 1):
        number += 1
        if len(line) > limit:
            raise too_large(f"{path}:{number}", "the row is longer", limit)
        yield line
