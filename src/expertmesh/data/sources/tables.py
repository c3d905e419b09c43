"""Rows of tables: Parquet, Arrow, CSV, and data sets of the package datasets."""

import csv
import io
import json
import os
from collections.abc import Iterator
from typing import IO, Any

from expertmesh.config.errors import InputError
from expertmesh.data.sources.rows import BLOCK_ROWS, Columns, RawRow, SourceFile, Takes, renamed
from expertmesh.io.reading import MAX_ROW_BYTES, MiB, shortened, too_large

# How many times as large as its file a table may be: repetition is cheap to store, and costly to read.
_MOST_EXPANSION = 1000
# Columns whose cells are lists or objects, which CSV can hold as JSON alone.
_NESTED = ("messages", "conversations", "tools", "functions", "history", "chat_template_kwargs")


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
    """Return the columns of text. `InputError` for a part that would be a thousand times as large in memory as in the
    file.
    """
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


def read_csv(stream: IO[bytes], name: str, takes: Takes, columns: Columns) -> Iterator[RawRow | None]:
    """Yield a header, then rows of strings under the names that `columns` gives them; cells of `messages` and the like
    are JSON, or empty for none.
    """
    source = SourceFile(name, by_line=False)
    csv.field_size_limit(MAX_ROW_BYTES)
    text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
    tabs = ".tsv" in name.rpartition("/")[2]
    number = 0
    try:
        reader = csv.reader(text, delimiter="\t" if tabs else ",", strict=True)
        header = next(reader, [])
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
        columns = table[start : start + BLOCK_ROWS]
        for place, number in enumerate(numbers):
            value = {name: cells[place] for name, cells in columns.items()}
            yield RawRow(source, number, _without_nulls(value)) if takes(number) else None


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
            value[name] = json.loads(cell) if name in _NESTED else cell
        except (ValueError, RecursionError) as error:
            return RawRow(source, number, None, f"the cell of column {name!r} is not JSON ({error})")
    return RawRow(source, number, value)


def _without_nulls(value: Any) -> Any:
    """Drop keys with null: a row of a table has every key that any row has, and null means that this one lacks it."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _damaged(source: SourceFile, number: int, kind: str, error: Exception) -> InputError:
    reason = shortened((str(error).splitlines() or [type(error).__name__])[0])
    return InputError(
        f"{source.position(number)}: not readable as {kind} ({reason}); write it anew.", key="data.damaged-file"
    )
