"""What a source yields: rows with their positions, some for each of the processes that share the reading.

A row that cannot be read carries its `problem` instead of stopping the reader, so that the caller decides between
`on_error: stop` and `skip`; only what makes the rest of a file unreadable raises `InputError`. formats.py interprets
the rows.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

BLOCK_ROWS = 512
"""Rows of a file that are tokenized together, and by the same process."""

Takes = Callable[[int], bool]
"""True if this process takes the row of that number; the readers yield None in the place of others."""

Columns = Mapping[str, str | None]
"""`data.train.N.columns`: where the column of that name stands in the file, None for nowhere."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file (or hub split) as the user knows it."""

    name: str
    by_line: bool
    """True if positions are lines; else they are rows."""

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
