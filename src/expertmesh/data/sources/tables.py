"""Rows of tables: Parquet, Arrow, CSV, and data sets of the package datasets."""

import csv
import io
import json
import sys
from collections.abc import Iterator
from typing import IO, Any

from expertmesh.config.errors import InputError
from expertmesh.data.sources.rows import BLOCK_ROWS, RawRow, SourceFile, Takes

# Columns whose cells are lists or objects, which CSV can hold as JSON alone.
_NESTED = ("messages", "conversations", "tools", "functions", "history", "chat_template_kwargs")


def read_parquet(stream: IO[bytes], name: str, takes: Takes) -> Iterator[RawRow | None]:
    import pyarrow
    from pyarrow import parquet

    source = SourceFile(name, by_line=False)
    number = 0
    try:
        with parquet.ParquetFile(stream) as table:
            for batch in table.iter_batches(batch_size=1024):
                for row in _of_batch(batch, source, number, takes):
                    number += 1
                    yield row
    except pyarrow.ArrowException as error:
        raise _damaged(source, number + 1, "Parquet", error) from error


def read_arrow(stream: IO[bytes], name: str, takes: Takes) -> Iterator[RawRow | None]:
    """Arrow's file format (feather), or its stream format, in which the package datasets keeps its tables."""
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


def read_csv(stream: IO[bytes], name: str, takes: Takes) -> Iterator[RawRow | None]:
    """A header, then rows of strings; cells of `messages` and the like are JSON, or empty for none."""
    source = SourceFile(name, by_line=False)
    csv.field_size_limit(sys.maxsize)
    text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
    tabs = ".tsv" in name.rpartition("/")[2]
    number = 0
    try:
        reader = csv.reader(text, delimiter="\t" if tabs else ",", strict=True)
        header = next(reader, [])
        for number, cells in enumerate((row for row in reader if row), start=1):
            yield _of_cells(source, number, header, cells) if takes(number) else None
    except (csv.Error, UnicodeDecodeError) as error:
        raise _damaged(source, number + 1, "CSV", error) from error


def read_table(table: Any, source: SourceFile, takes: Takes) -> Iterator[RawRow | None]:
    """The rows of a `datasets.Dataset`."""
    for start in range(0, len(table), BLOCK_ROWS):
        numbers = range(start + 1, min(start + BLOCK_ROWS, len(table)) + 1)
        if not takes(start + 1):
            yield from (None for _ in numbers)
            continue
        columns = table[start : start + BLOCK_ROWS]
        for place, number in enumerate(numbers):
            value = {name: cells[place] for name, cells in columns.items()}
            yield RawRow(source, number, _without_nulls(value))


def _of_batch(batch: Any, source: SourceFile, before: int, takes: Takes) -> Iterator[RawRow | None]:
    for index in range(batch.num_rows):
        number = before + index + 1
        if not takes(number):
            yield None
            continue
        try:
            yield RawRow(source, number, _without_nulls(batch.slice(index, 1).to_pylist()[0]))
        except UnicodeDecodeError as error:
            yield RawRow(source, number, None, f"a string is not UTF-8 ({error.reason})")


def _of_cells(source: SourceFile, number: int, header: list[str], cells: list[str]) -> RawRow:
    if len(cells) != len(header):
        return RawRow(source, number, None, f"the row has {len(cells)} cells, and the header {len(header)}")
    value: dict[str, Any] = {}
    for name, cell in zip(header, cells, strict=True):
        nested = name in _NESTED or (name in ("prompt", "chosen", "rejected") and cell.lstrip().startswith("[{"))
        if not cell and name in _NESTED:
            continue
        try:
            value[name] = json.loads(cell) if nested else cell
        except (ValueError, RecursionError) as error:
            return RawRow(source, number, None, f"the cell of column {name!r} is not JSON ({error})")
    return RawRow(source, number, value)


def _without_nulls(value: Any) -> Any:
    """A row of a table has every key that any row has; null is how it says that this one has it not."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _damaged(source: SourceFile, number: int, kind: str, error: Exception) -> InputError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return InputError(
        f"{source.position(number)}: not readable as {kind} ({reason}); write it anew.", key="data.damaged-file"
    )
