"""Read the rows of files: JSON lines and JSON lists, Parquet, Arrow, CSV, and data sets of the package datasets.

Rows have positions, and some are read for each of the processes that share the reading. A row that cannot be read
carries its `problem` instead of stopping the reader, so that the caller decides between `on_error: stop` and `skip`;
only what makes the rest of a file unreadable raises `InputError`. JSON is decoded strictly: repeated keys and NaN are
problems, not choices. formats.py interprets the rows.
"""

import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from expertmesh.config.errors import InputError
from expertmesh.io.reading import (
    MAX_LIST_BYTES,
    MAX_ROW_BYTES,
    MiB,
    check_depth,
    first_repeated,
    parse_text,
    refuse_surrogates,
    rows,
    shortened,
    too_large,
)
from expertmesh.io.terminal import first_line

BLOCK_ROWS = 512
"""Rows of a file that are tokenized together, and by the same process."""

Takes = Callable[[int], bool]
"""True if this process takes the row of that number; the readers yield None in the place of others."""

Columns = Mapping[str, str | None]
"""`data.train.N.columns`: where the column of that name stands in the file, None for nowhere."""
_SPACE = re.compile(r"\s*")
_BYTE_ORDER_MARK, _UTF_16 = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
# How many times as large as its file a table may be: repetition is cheap to store, and costly to read.
_MOST_EXPANSION = 1000
# Columns whose cells are lists or objects, which CSV can hold as JSON alone.
_NESTED = ("messages", "conversations", "tools", "functions", "history", "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file (or hub split) as the user knows it."""

    name: str
    by_line: bool
    """True if positions are lines; else they are rows."""

    @property
    def directory(self) -> Path | None:
        """The directory that paths in its rows are relative to; None for what is no local file or saved table."""
        local = Path(self.name)
        return (local if local.is_dir() else local.parent) if local.exists() else None

    def position(self, number: int) -> str:
        """Return `train.jsonl:12` for a line, `train.parquet:row 12` for a row; both count from 1."""
        return f"{self.name}:{number}" if self.by_line else f"{self.name}:row {number}"


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as read."""

    file: SourceFile
    number: int
    """Its line or row in the file, from 1."""
    value: Mapping[str, Any] | None
    """None if the row cannot be read."""
    problem: str | None = None
    """The reason why there is no value."""

    @property
    def position(self) -> str:
        return self.file.position(self.number)


def renamed(row: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    """Return the row with `columns` under their new names, in place of columns of the file that have such a name."""
    given = {*columns, *columns.values()}
    named = {ours: row[theirs] for ours, theirs in columns.items() if theirs is not None and theirs in row}
    return named | {name: value for name, value in row.items() if name not in given}


def with_columns(rows: Iterator[RawRow | None], columns: Columns) -> Iterator[RawRow | None]:
    """Return the rows, each `renamed`."""
    if not columns:
        return rows
    return (
        row if row is None or row.value is None else replace(row, value=renamed(row.value, columns)) for row in rows
    )


@dataclass(frozen=True, slots=True)
class RowShare:
    """The rows that one of several processes takes: blocks of neighbouring rows, in turn."""

    index: int = 0
    """Number of the process, from 0."""
    count: int = 1
    """Number of processes."""

    def of_file(self, file: int) -> Takes:
        """Return those of the file of that number."""
        if self.count == 1:
            return lambda number: True
        return lambda number: (file + (number - 1) // BLOCK_ROWS) % self.count == self.index


def read_lines(stream: IO[bytes], name: str, takes: Takes) -> Iterator[RawRow | None]:
    """Yield the rows of JSON lines, None for one that `takes` leaves to another process; blank lines are no rows.

    `name` is the file's, for messages.
    """
    source = SourceFile(name, by_line=True)
    for number, line in enumerate(rows(stream, name), start=1):
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
            if line.startswith(_UTF_16):
                raise InputError(f"{name} is UTF-16, not UTF-8; convert it.", key="data.damaged-file")
        if line.strip():
            yield _parse_line(source, number, line) if takes(number) else None


def _parse_line(source: SourceFile, number: int, line: bytes) -> RawRow:
    try:
        text = line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        why = f"{error.reason}; is the file in another encoding, as Latin-1 or UTF-16?"
        return RawRow(source, number, None, f"byte {error.start + 1} of the line is not UTF-8 ({why})")
    duplicates: list[str] = []
    try:
        value, end = _decoder(duplicates).raw_decode(text)
    except (ValueError, RecursionError) as error:
        return RawRow(source, number, None, f"the line is not JSON ({_json_reason(error)})")
    if end != len(text):
        return RawRow(source, number, None, f"the line goes on after its JSON value ends, at column {end + 1}")
    return _object_row(source, number, value, duplicates)


def read_json(stream: IO[bytes], name: str, takes: Takes) -> Iterator[RawRow | None]:
    """Yield the rows of a `.json` file, which holds a list of rows, or JSON lines."""
    # A plain file says its size, so that none of a giant is read.
    giant = isinstance(stream, io.BufferedReader) and stream.seek(0, os.SEEK_END) > MAX_LIST_BYTES
    stream.seek(0)
    head = stream.read(4096).removeprefix(_BYTE_ORDER_MARK).lstrip()
    stream.seek(0)
    if not head.startswith(b"["):
        yield from read_lines(stream, name, takes)
        return
    source = SourceFile(name, by_line=False)
    try:
        content = b"" if giant else stream.read(MAX_LIST_BYTES + 1)
        if giant or len(content) > MAX_LIST_BYTES:
            raise too_large(name, "is one list, and longer", MAX_LIST_BYTES)
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 ({error.reason} at byte {error.start + 1}); convert it.", key="data.damaged-file"
        ) from error
    for row in _list_rows(source, text):
        yield row if takes(row.number) else None


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
    """Return a strict decoder that notes repeated keys in `duplicates`; Python's own keeps the last in silence."""

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
        refuse_surrogates(value)
    except ValueError as error:
        return RawRow(source, number, None, f"the row cannot be used: {error}")
    if duplicates:
        return RawRow(source, number, None, f"the key {duplicates[0]!r} appears twice in one object")
    return RawRow(source, number, value)


def read_parquet(stream: IO[bytes], name: str, takes: Takes) -> Iterator[RawRow | None]:
    import pyarrow
    from pyarrow import parquet

    source = SourceFile(name, by_line=False)
    number, size, most = 0, 0, _MOST_EXPANSION * stream.seek(0, os.SEEK_END)
    stream.seek(0)
    try:
        with parquet.ParquetFile(stream) as table:
            texts = _refuse_bomb(table.metadata, name)
            # As a dictionary: a text that many rows share is held once, however many they are.
            with parquet.ParquetFile(stream, read_dictionary=texts) as rows_of:
                for batch in rows_of.iter_batches(batch_size=1024):
                    for row in _of_batch(batch, source, number, takes):
                        number += 1
                        size += 0 if row is None else _characters(row.value)
                        if size > max(1024 * MiB, most):
                            raise too_large(
                                source.position(number), f"the rows so far have {size:,} characters", 1024 * MiB
                            )
                        yield row
    except (pyarrow.ArrowException, MemoryError, KeyError, ValueError, TypeError) as error:  # all by the file
        raise _damaged(source, number + 1, "Parquet", error) from error


def _refuse_bomb(metadata: Any, name: str) -> list[str]:
    """Return the columns of text. `InputError` for one that takes a thousand times its size in the file."""
    texts = []
    for group in range(metadata.num_row_groups):
        for place in range(metadata.num_columns):
            column = metadata.row_group(group).column(place)
            stored, size = column.total_compressed_size, column.total_uncompressed_size
            if size > 256 * MiB and size > _MOST_EXPANSION * max(stored, 1):
                raise too_large(
                    f"{name}, column {column.path_in_schema}", f"has {size:,} bytes in {stored:,}", 256 * MiB
                )
            if group == 0 and column.physical_type == "BYTE_ARRAY":
                texts.append(column.path_in_schema)
    return texts


def _characters(value: Any) -> int:
    """Return the length of all texts in a row."""
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else len(value) if isinstance(value, str) else 0


def read_arrow(stream: IO[bytes], name: str, takes: Takes) -> Iterator[RawRow | None]:
    """Yield the rows of Arrow's file format (feather) or stream format (tables of the package datasets)."""
    import pyarrow

    source = SourceFile(name, by_line=False)
    number = 0
    try:
        is_file = stream.read(6) == b"ARROW1"
        stream.seek(0)
        reader = pyarrow.ipc.open_file(stream) if is_file else pyarrow.ipc.open_stream(stream)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            for row in _of_batch(batch, source, number, takes):
                number += 1
                yield row
    except pyarrow.ArrowException as error:
        raise _damaged(source, number + 1, "Arrow", error) from error


def read_csv(stream: IO[bytes], name: str, takes: Takes, columns: Columns, separator: str) -> Iterator[RawRow | None]:
    """Yield rows of strings by the header's names and `columns`; cells of `messages` and the like are JSON."""
    source = SourceFile(name, by_line=False)
    csv.field_size_limit(MAX_ROW_BYTES)
    text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
    number = 0
    try:
        reader = csv.reader(text, delimiter=separator, strict=True)
        header = next(reader, [])
        named = [column for column in header if column]  # a table program may leave columns without a name
        if len(set(named)) < len(named):
            twice = shortened(first_repeated([(column, None) for column in named]))
            raise InputError(
                f"{name}: the header names the column {twice!r} twice; rename one of them.",
                key="data.damaged-file",
            )
        for number, cells in enumerate((row for row in reader if row), start=1):
            yield _of_cells(source, number, header, cells, columns) if takes(number) else None
    except (csv.Error, UnicodeDecodeError) as error:
        raise _damaged(source, number + 1, "CSV", error) from error


def read_table(table: Any, source: SourceFile, takes: Takes) -> Iterator[RawRow | None]:
    """Yield the rows of a `datasets.Dataset`."""
    for start in range(0, len(table), BLOCK_ROWS):
        numbers = range(start + 1, min(start + BLOCK_ROWS, len(table)) + 1)
        if not any(map(takes, numbers)):
            yield from (None for _ in numbers)
            continue
        # As they are stored, all columns: its own format decodes images, and may leave columns out.
        block = table.with_format("arrow")[start : start + BLOCK_ROWS]
        for place, number in enumerate(numbers):
            yield _of_slice(source, number, block.slice(place, 1)) if takes(number) else None


def read_examples(examples: Any, source: SourceFile, takes: Takes) -> Iterator[RawRow | None]:
    """Yield the rows of a `datasets.IterableDataset`."""
    for number, value in enumerate(examples, start=1):
        yield RawRow(source, number, _without_nulls(value)) if takes(number) else None


def _of_batch(batch: Any, source: SourceFile, before: int, takes: Takes) -> Iterator[RawRow | None]:
    for index in range(batch.num_rows):
        number = before + index + 1
        if not takes(number):
            yield None
            continue
        yield _of_slice(source, number, batch.slice(index, 1))


def _of_slice(source: SourceFile, number: int, row: Any) -> RawRow:
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


def _of_cells(source: SourceFile, number: int, header: list[str], cells: list[str], columns: Columns) -> RawRow:
    if len(cells) != len(header):
        return RawRow(source, number, None, f"the row has {len(cells)} cells, and the header {len(header)}")
    value: dict[str, Any] = {}
    for name, cell in renamed(dict(zip(header, cells, strict=True)), columns).items():
        if not cell and name in _NESTED:
            continue
        try:
            value[name] = parse_text(cell) if name in _NESTED else cell
        except ValueError as error:
            return RawRow(source, number, None, f"the cell of column {name!r} is not JSON ({error})")
    return RawRow(source, number, value)


def _without_nulls(value: Any) -> Any:
    """Drop keys with null: a row of a table has every key that any row has, and null means that this one lacks it."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _damaged(source: SourceFile, number: int, kind: str, error: Exception) -> InputError:
    reason = shortened(first_line(error))
    return InputError(
        f"{source.position(number)}: not readable as {kind} ({reason}); write it anew.", key="data.damaged-file"
    )
