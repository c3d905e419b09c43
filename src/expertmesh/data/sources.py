"""Rows out of files, directories and hub data sets, each with the position an error message can name.

`read_source` yields one `RawRow` per row, in file order (files of a directory sorted by name). A row that
cannot be read carries its `problem` instead of stopping the reader, so that the caller decides between
`on_error: stop` and `skip`; only what makes the rest of a file unreadable raises `InputError` here. formats.py
interprets the rows.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertmesh.config.errors import InputError
from expertmesh.io.reading import (
    MAX_LIST_BYTES,
    MAX_ROW_BYTES,
    MiB,
    check_depth,
    first_repeated,
    opened,
    read_file,
    rows,
    shortened,
    too_large,
)

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
# How many times as large as its file a table may be: repetition is cheap to store, and costly to read.
_MOST_EXPANSION = 1000
_SPACE = re.compile(r"\s*")
# `name` or `org/name`, then an optional split: what the hub allows, and nothing that looks like a local path.
_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?::(?P<split>[\w.-]+))?")
_FILE_LIKE = (*SUFFIXES, ".txt", ".csv", ".tsv", ".gz", ".zst", ".zip", ".arrow", ".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file (or hub split) as the user knows it; `by_line` tells whether positions are lines or rows."""

    name: str
    by_line: bool

    def position(self, number: int) -> str:
        """`train.jsonl:12` for a line, `train.parquet:row 12` for a row; both count from 1."""
        return f"{self.name}:{number}" if self.by_line else f"{self.name}:row {number}"


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as read: either `value` holds the object, or `problem` says why there is none."""

    file: SourceFile
    number: int
    value: Mapping[str, Any] | None
    problem: str | None = None

    @property
    def position(self) -> str:
        return self.file.position(self.number)


def read_source(path: str) -> Iterator[RawRow]:
    """Yield the rows of a file, a directory or a hub data set (`name`, `org/name`, `org/name:split`).

    Raises `InputError` when the path is neither, and when a file is damaged beyond single rows.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        for file in _files_of(local, path):
            yield from _read_file(file)
    elif local.exists():
        yield from _read_file(local)
    else:
        yield from _read_hub(path)


def _files_of(directory: Path, path: str) -> list[Path]:
    files = sorted(f for f in directory.iterdir() if f.is_file() and f.suffix in SUFFIXES and f.name[0] != ".")
    if not files:
        raise InputError(
            f"the data directory {path} holds no {', '.join(SUFFIXES)} file (sub-directories are not "
            "searched); name the directory that holds the data files.",
            key="data.no-files",
        )
    return files


def _read_file(file: Path) -> Iterator[RawRow]:
    try:
        if file.suffix == ".parquet":
            yield from _read_parquet(file)
        elif file.suffix == ".json":
            yield from _read_json(file)
        elif file.suffix in SUFFIXES:
            yield from _read_lines(file)
        else:
            raise InputError(
                f"the data file {file} ends in {file.suffix or 'no suffix'!r}, which is not one of "
                f"{', '.join(SUFFIXES)}; convert it to JSON lines.",
                key="data.unsupported-file",
            )
    except OSError as error:
        raise InputError(
            f"the data file {file} cannot be read ({error}); check the path and its permissions.",
            key="data.unreadable",
        ) from error


def _read_lines(file: Path) -> Iterator[RawRow]:
    source = SourceFile(str(file), by_line=True)
    with opened(file, sys.maxsize) as stream:
        for number, line in enumerate(rows(stream, file), start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield _parse_line(source, number, line)


def _parse_line(source: SourceFile, number: int, line: bytes) -> RawRow:
    try:
        text = line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        return RawRow(source, number, None, f"byte {error.start + 1} of the line is not UTF-8 ({error.reason})")
    duplicates: list[str] = []
    try:
        value, end = _decoder(duplicates).raw_decode(text)
    except (ValueError, RecursionError) as error:
        return RawRow(source, number, None, f"the line is not JSON ({_json_reason(error)})")
    if end != len(text):
        return RawRow(source, number, None, f"the line goes on after its JSON value ends, at column {end + 1}")
    return _object_row(source, number, value, duplicates)


def _read_json(file: Path) -> Iterator[RawRow]:
    """A `.json` file holds a list of rows, or JSON lines."""
    with opened(file, sys.maxsize) as stream:
        head = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not head.startswith(b"["):
        yield from _read_lines(file)
        return
    source = SourceFile(str(file), by_line=False)
    try:
        text = read_file(file, MAX_LIST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file} is not UTF-8 ({error.reason} at byte {error.start + 1}); convert it.", key="data.damaged-file"
        ) from error
    yield from _list_rows(source, text)


def _list_rows(source: SourceFile, text: str) -> Iterator[RawRow]:
    """Decode the list item by item, so that a damaged item can be named by its row and line."""
    duplicates: list[str] = []
    decoder = _decoder(duplicates)

    def after_space(index: int) -> int:
        match = _SPACE.match(text, index)
        return match.end() if match else index

    def damaged(number: int, index: int, reason: str) -> InputError:
        line = text.count("\n", 0, index) + 1
        return InputError(
            f"{source.position(number)} (line {line}): {reason}; the rest of the file cannot be read.",
            key="data.damaged-file",
        )

    position, number = after_space(text.index("[") + 1), 1
    if text[position : position + 1] == "]":
        return
    while True:
        duplicates.clear()
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            at = error.pos if isinstance(error, json.JSONDecodeError) else position
            raise damaged(number, at, f"the row is not JSON ({_json_reason(error)})") from error
        yield _object_row(source, number, value, duplicates)
        position = after_space(position)
        separator = text[position : position + 1]
        if separator == "]":
            break
        if separator != ",":
            raise damaged(number, position, "',' or ']' must follow a row of the list")
        position, number = after_space(position + 1), number + 1
    if text[position + 1 :].strip():
        raise damaged(number, position + 1, "text follows the end of the list")


def _decoder(duplicates: list[str]) -> json.JSONDecoder:
    """A strict decoder that notes repeated keys in `duplicates`; Python's own keeps the last in silence."""

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built = dict(pairs)
        if len(built) != len(pairs):
            duplicates.append(shortened(first_repeated(pairs)))
        return built

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    return json.JSONDecoder(object_pairs_hook=build, parse_constant=refuse)


def _json_reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _object_row(source: SourceFile, number: int, value: Any, duplicates: list[str]) -> RawRow:
    if not isinstance(value, dict):
        return RawRow(source, number, None, "the row is not a JSON object")
    try:
        check_depth(value)
    except ValueError as error:
        return RawRow(source, number, None, f"the row cannot be used: {error}")
    if duplicates:
        return RawRow(source, number, None, f"the key {duplicates[0]!r} appears twice in one object")
    return RawRow(source, number, value)


def _read_parquet(file: Path) -> Iterator[RawRow]:
    import pyarrow
    from pyarrow import parquet

    source = SourceFile(str(file), by_line=False)
    number, size = 0, 0
    try:
        with opened(file, sys.maxsize) as stream, parquet.ParquetFile(stream) as table:
            texts = _refuse_bomb(table.metadata, file)
            # As a dictionary: a text that many rows share is held once, however many they are.
            with parquet.ParquetFile(stream, read_dictionary=texts) as rows_of:
                for batch in rows_of.iter_batches(batch_size=1024):
                    for index in range(batch.num_rows):
                        number += 1
                        row = _parquet_row(source, number, batch.slice(index, 1))
                        size += _characters(row.value)
                        if size > 1024 * MiB and size > _MOST_EXPANSION * file.stat().st_size:
                            raise too_large(row.position, f"the rows so far have {size:,} characters", 1024 * MiB)
                        yield row
    except (pyarrow.ArrowException, MemoryError, KeyError, ValueError, TypeError) as error:  # all by the file
        reason = shortened((str(error) or type(error).__name__).splitlines()[0])
        raise InputError(
            f"{source.position(number + 1)}: not readable as Parquet ({reason}); write it anew.",
            key="data.damaged-file",
        ) from error


def _refuse_bomb(metadata: Any, file: Path) -> list[str]:
    """The columns of text. `InputError` for a part that would be a thousand times as large in memory as in the file."""
    texts = []
    for group in range(metadata.num_row_groups):
        for place in range(metadata.num_columns):
            column = metadata.row_group(group).column(place)
            stored, size = column.total_compressed_size, column.total_uncompressed_size
            if size > 256 * MiB and size > _MOST_EXPANSION * max(stored, 1):
                raise too_large(
                    f"{file}, column {column.path_in_schema}", f"has {size:,} bytes in {stored:,}", 256 * MiB
                )
            if group == 0 and column.physical_type == "BYTE_ARRAY":
                texts.append(column.path_in_schema)
    return texts


def _characters(value: Any) -> int:
    """Of all texts in a row."""
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else len(value) if isinstance(value, str) else 0


def _parquet_row(source: SourceFile, number: int, row: Any) -> RawRow:
    import pyarrow

    try:
        value = _without_nulls(row.to_pylist()[0])
        if _characters(value) > MAX_ROW_BYTES:
            raise too_large(source.position(number), "the row is longer", MAX_ROW_BYTES)
        return RawRow(source, number, value)
    except UnicodeDecodeError as error:
        return RawRow(source, number, None, f"a string is not UTF-8 ({error.reason})")
    except (ValueError, OverflowError, KeyError, TypeError, RecursionError, pyarrow.ArrowException) as error:
        # A date beyond the year 9999, two fields of one name: what Python has no value for.
        return RawRow(source, number, None, f"a value cannot be read ({shortened(str(error).splitlines()[0])})")


def _read_hub(path: str) -> Iterator[RawRow]:
    match = _HUB_ID.fullmatch(path)
    if match is None or path.endswith(_FILE_LIKE):
        raise InputError(
            f"the data path {path} does not exist; name a file, a directory or a hub data set.", key="data.not-found"
        )
    import datasets

    split = match["split"] or "train"
    try:
        table = datasets.load_dataset(match["id"], split=split)
    except Exception as error:  # the hub client raises a dozen unrelated classes; every one becomes this sentence
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"the data path {path} is no local file or directory, and split {split!r} of the hub data set "
            f"{match['id']} cannot be loaded ({reason}); correct the path or the split.",
            key="data.not-found",
        ) from error
    source = SourceFile(f"{match['id']}:{split}", by_line=False)
    for number, value in enumerate(table, start=1):
        yield RawRow(source, number, _without_nulls(value))


def _without_nulls(value: Any) -> Any:
    """A row of a table has every key that any row has; null is how it says that this one has it not."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
