"""Rows of JSON lines and of JSON lists, decoded strictly: repeated keys and NaN are problems, not choices."""

import io
import json
import os
import re
from collections.abc import Iterator
from typing import IO, Any

from expertmesh.config.errors import InputError
from expertmesh.data.sources.rows import RawRow, SourceFile, Takes
from expertmesh.io.reading import MAX_LIST_BYTES, check_depth, first_repeated, rows, shortened, too_large

_SPACE = re.compile(r"\s*")
_BYTE_ORDER_MARK, _UTF_16 = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")


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
    head = stream.read(4096).removeprefix(_BYTE_ORDER_MARK).lstrip()
    stream.seek(0)
    if not head.startswith(b"["):
        yield from read_lines(stream, name, takes)
        return
    source = SourceFile(name, by_line=False)
    try:
        # A plain file says its size, so that none of a giant is read.
        giant = isinstance(stream, io.BufferedReader) and os.fstat(stream.fileno()).st_size > MAX_LIST_BYTES
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
    except ValueError as error:
        return RawRow(source, number, None, f"the row cannot be used: {error}")
    if duplicates:
        return RawRow(source, number, None, f"the key {duplicates[0]!r} appears twice in one object")
    return RawRow(source, number, value)
