"""Every row arrives with its position, in file order; damage is named by file and line or row."""

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow
import pytest
from fsspec.registry import known_implementations
from PIL import Image
from pyarrow import parquet

from expertmesh.config.errors import SecurityError
from expertmesh.data.sources import RawRow, locations, read_source, refuse_source
from tests.support.errors import refused

ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
ROWS = [{"text": "one"}, {"text": "zwei ä"}, {"text": "three"}]


def read(path: Path | str) -> list[RawRow]:
    return list(read_source(str(path)))


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def test_json_lines_are_counted_by_line_and_blank_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"text": "one"}\n\n{"text": "two"}\r\n{"text": "three"}', "utf-8")
    rows = read(path)
    assert [row.value for row in rows] == [{"text": "one"}, {"text": "two"}, {"text": "three"}]
    assert [row.position for row in rows] == [f"{path}:1", f"{path}:3", f"{path}:4"]


def test_json_file_may_hold_a_list_or_lines(tmp_path: Path) -> None:
    as_list, as_lines = tmp_path / "list.json", tmp_path / "lines.json"
    as_list.write_text(json.dumps(ROWS, indent=2), "utf-8")
    write_lines(as_lines, ROWS)
    assert [row.value for row in read(as_list)] == ROWS
    assert [row.value for row in read(as_lines)] == ROWS
    assert read(as_list)[2].position == f"{as_list}:row 3"
    (tmp_path / "empty.json").write_text(" [ ] ")
    assert read(tmp_path / "empty.json") == []


def test_parquet_rows_are_counted_from_one(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert [row.value for row in read(path)] == ROWS
    assert read(path)[1].position == f"{path}:row 2"


def test_directory_is_read_file_by_file_in_sorted_order(tmp_path: Path) -> None:
    write_lines(tmp_path / "b.jsonl", ROWS[1:])
    write_lines(tmp_path / "a.jsonl", ROWS[:1])
    (tmp_path / "README.md").write_text("not data")
    assert [row.value for row in read(tmp_path)] == ROWS


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": "x"', "not JSON"),
        (b'{"text": "x"} {"text": "y"}', "goes on after its JSON value ends, at column 14"),
        (b'["text"]', "not a JSON object"),
        (b'{"text": "x", "text": "y"}', "key 'text' appears twice"),
        (b'{"text": {"a": 1, "a": 2}}', "key 'a' appears twice"),
        (b'{"text": NaN}', "NaN is not JSON"),
        (b'{"text": "\xff"}', "byte 11 of the line is not UTF-8"),
        (rb'{"text": "x", "tools": [{"name": "\ud83d"}]}', "holds an unpaired surrogate"),
        (rb'{"text": "x", "\udfff": ""}', "holds an unpaired surrogate"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_damaged_line_is_one_problem_row_and_the_others_are_read(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n' + line + b'\n{"text": "three"}\n')
    first, damaged, third = read(path)
    assert (first.value, third.value) == ({"text": "one"}, {"text": "three"})
    assert damaged.value is None
    assert damaged.position == f"{path}:2"
    assert problem in (damaged.problem or "")


def test_repeated_key_in_a_json_list_is_one_problem_row(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"text": "one"}, {"text": 1, "text": 2}, {"text": "three"}]')
    assert [row.problem is None for row in read(path)] == [True, False, True]


@pytest.mark.parametrize(
    ("content", "naming"),
    [
        (b'[{"text": "one"},\n {"text": }]', "a.json:row 2 (line 2): the row is not JSON"),
        (b'[{"text": "one"}\n {"text": "two"}]', "row 1 (line 2): ',' or ']' must follow"),
        (b'[{"text": "one"}', "',' or ']' must follow"),
        (b'[{"text": "one"}] tail', "text follows the end of the list"),
        (b'[{"text": "\xff"}]', "a.json is not UTF-8"),
    ],
)
def test_damaged_json_list_names_row_and_line(tmp_path: Path, content: bytes, naming: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with refused("data.damaged-file", naming=naming):
        read(tmp_path / "a.json")


def test_damaged_parquet_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really")
    with refused("data.damaged-file", naming="a.parquet:row 1: "):
        read(tmp_path / "a.parquet")


def test_paths_that_hold_no_data_are_refused(tmp_path: Path) -> None:
    with refused("data.no-files", naming=".jsonl, .ndjson, .json, .parquet"):
        read(tmp_path)
    (tmp_path / "a.xlsx").write_text("text\n")
    with refused("data.unsupported-file", naming="'.xlsx'"):
        read(tmp_path / "a.xlsx")


@pytest.mark.parametrize("path", ["nowhere/train.jsonl", "./train", "/no/such/dir", "a/b/c", "train.parquet"])
def test_missing_local_path_is_refused_without_asking_the_hub(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: pytest.fail("asked the hub"))
    with refused("data.not-found", naming=path):
        read(path)


def test_hub_id_loads_the_named_split_and_train_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, split: str, streaming: bool) -> datasets.Dataset:
        asked.append((name, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [row.value for row in read("org/name")] == ROWS
    assert read("name:test")[2].position == "name:test:row 3"
    assert asked == [("org/name", "train"), ("name", "test")]


def test_hub_failure_says_that_the_path_is_not_local_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, split: str, streaming: bool) -> datasets.Dataset:
        raise ConnectionError("no route to the hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with refused("data.not-found", naming="no route to the hub"):
        read("org/name")


def table(rows: list[Any]) -> Any:
    return pyarrow.Table.from_pylist(rows)


def test_arrow_files_and_streams_are_read(tmp_path: Path) -> None:
    for name, new in (("a.arrow", pyarrow.ipc.new_stream), ("a.feather", pyarrow.ipc.new_file)):
        with new(str(tmp_path / name), table(ROWS).schema) as writer:
            writer.write_table(table(ROWS))
        rows = read(tmp_path / name)
        assert [row.value for row in rows] == ROWS
        assert rows[1].position == f"{tmp_path / name}:row 2"
    (tmp_path / "b.arrow").write_bytes(b"not arrow")
    with refused("data.damaged-file", naming="b.arrow:row 1: not readable as Arrow"):
        read(tmp_path / "b.arrow")


def test_csv_cells_are_text_and_those_of_lists_are_json(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('\ufeffprompt,completion\n007,"two\nlines, ""quoted"""\nfew\n', "utf-8")
    first, second = read(tmp_path / "a.csv")
    assert first.value == {"prompt": "007", "completion": 'two\nlines, "quoted"'}
    assert second.problem == "the row has 1 cells, and the header 2"
    messages = [{"role": "user", "content": "a\tb"}]
    (tmp_path / "a.tsv").write_text("messages\ttools\n" + json.dumps(messages) + "\t\n[\t\n")
    good, bad = read(tmp_path / "a.tsv")
    assert good.value == {"messages": messages}
    assert "the cell of column 'messages' is not JSON" in (bad.problem or "")
    (tmp_path / "of.tsv.csv").write_text("prompt,completion\na,b\n")
    assert [row.value for row in read(tmp_path / "of.tsv.csv")] == [{"prompt": "a", "completion": "b"}]
    deep = "[" * 300 + "]" * 300
    for cell, problem in (('[{"a": 1, "a": 2}]', "a appears twice"), (deep, "100 deep"), (r'["\ud83d"]', "surrogate")):
        quoted = cell.replace('"', '""')
        (tmp_path / "c.csv").write_text(f'messages\n"{quoted}"\n')
        assert problem in str(read(tmp_path / "c.csv")[0].problem)
    (tmp_path / "twice.csv").write_text("prompt,completion,prompt,,\na,b,c,,\n")
    with refused("data.damaged-file", naming="twice.csv: the header names the column 'prompt' twice"):
        read(tmp_path / "twice.csv")
    (tmp_path / "b.csv").write_text('text\n"open')
    with refused("data.damaged-file", naming="b.csv:row 1: not readable as CSV"):
        read(tmp_path / "b.csv")


@pytest.mark.parametrize(("suffix", "module"), [(".gz", "gzip"), (".bz2", "bz2"), (".xz", "lzma"), (".zst", ZSTD)])
def test_compressed_files_are_read_and_damaged_ones_refused(tmp_path: Path, suffix: str, module: str) -> None:
    compress = pytest.importorskip(module).compress
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    contents = {"a.jsonl": lines, "a.json": json.dumps(ROWS).encode()}
    contents["a.parquet"] = (tmp_path / "a.parquet").read_bytes()
    for name, content in contents.items():
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(compress(content))
        assert [row.value for row in read(path)] == ROWS
    whole = compress(lines)
    for number, damaged in enumerate((whole[:-9], whole[:2] + bytes(8) + whole[10:])):
        path = tmp_path / f"{number}.jsonl{suffix}"
        path.write_bytes(damaged)
        with refused("data.unreadable", naming=path.name):
            read(path)


def test_a_package_that_decompresses_is_asked_for_before_rows_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, ZSTD, None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    with refused("install.missing-package", naming=f"pip install {ZSTD}"):
        refuse_source(str(tmp_path / "a.jsonl.zst"))


def test_saved_data_sets_are_read_by_split(tmp_path: Path) -> None:
    both = datasets.DatasetDict({name: datasets.Dataset.from_list(ROWS) for name in ("train", "test")})
    both.save_to_disk(str(tmp_path / "saved"))
    assert [row.value for row in read(tmp_path / "saved" / "train")] == ROWS
    with refused("data.no-files", naming="the splits train, test"):
        read(tmp_path / "saved")


def test_saved_data_sets_are_read_as_they_are_stored(tmp_path: Path) -> None:
    """Images as bytes, not decoded, and columns that the table's own format leaves out."""
    content = io.BytesIO()
    Image.new("RGB", (2, 2)).save(content, "png")
    features = datasets.Features({"images": [datasets.Image()], "text": datasets.Value("string")})
    rows = [{"images": [{"bytes": content.getvalue(), "path": None}], "text": "a"}]
    table = datasets.Dataset.from_list(rows, features=features)
    table.set_format(columns=["text"])
    table.save_to_disk(str(tmp_path / "saved"))
    (row,) = read(tmp_path / "saved")
    assert row.value == {"images": [{"bytes": content.getvalue()}], "text": "a"}


def test_urls_are_read_through_fsspec() -> None:
    storage = fsspec.filesystem("memory")
    for name, part in (("b.jsonl", ROWS[2:]), ("a.jsonl", ROWS[:2]), ("_SUCCESS", [])):
        storage.pipe(f"/bucket/rows/{name}", "".join(json.dumps(row) + "\n" for row in part).encode())
    try:
        storage.pipe("/bucket/list.json", json.dumps(ROWS).encode())
        assert [row.value for row in read("memory://bucket/list.json")] == ROWS
        rows = read("memory://bucket/rows")
        assert [row.value for row in rows] == ROWS
        assert rows[0].position == "memory://bucket/rows/a.jsonl:1"
        (location,) = locations("memory://bucket/rows/b.jsonl")
        before, content = location.stamp(), location.content()
        storage.pipe("/bucket/rows/b.jsonl", b'{"text": "other"}')
        assert location.stamp() != before
        assert location.content() != content
        with refused("data.not-found", naming="memory://bucket/nowhere.jsonl"):
            read("memory://bucket/nowhere.jsonl")
    finally:
        storage.rm("/bucket", recursive=True)


def test_urls_that_nothing_here_can_open_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("data.not-found", naming="nothing://bucket/a.jsonl"):
        refuse_source("nothing://bucket/a.jsonl")
    monkeypatch.setitem(known_implementations, "absent", {"class": "absent.Fs", "err": "Install absent"})
    with refused("install.missing-package", naming="Install absent"):
        refuse_source("absent://bucket/a.jsonl")


def test_tables_of_what_python_has_no_value_for_are_named_by_row(tmp_path: Path) -> None:
    twice = pyarrow.StructArray.from_arrays([pyarrow.array(["x"]), pyarrow.array(["y"])], names=["a", "a"])
    late = pyarrow.array([10**16], pyarrow.timestamp("ms"))
    for name, column in (("twice", twice), ("late", late)):
        path = tmp_path / f"{name}.parquet"
        parquet.write_table(pyarrow.table({"text": column}), path)
        (row,) = read(path)
        assert row.value is None
        assert str(row.problem).startswith("a value cannot be read")


def test_a_small_table_that_stands_for_gigabytes_is_refused(tmp_path: Path) -> None:
    path, text = tmp_path / "bomb.parquet", "x" * (1 << 20)
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 100_000, pyarrow.int32()), pyarrow.array([text]))
    parquet.write_table(pyarrow.table({"text": column}), path)
    with refused("file.too-large", naming="bomb.parquet:row 1025"):
        for _ in read_source(str(path)):
            pass


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with refused("file.unsafe", SecurityError, naming=name):
        read(tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with refused("file.unsafe", SecurityError, naming=name):
        read(tmp_path / name)


def test_a_row_without_end_is_refused_by_its_line_before_it_is_read(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ROWS)
    os.truncate(path, 1 << 40)
    with refused("file.too-large", naming="a.jsonl:4"):
        read(path)
    listed = tmp_path / "b.json"
    listed.write_text("[")
    os.truncate(listed, 1 << 40)
    with refused("file.too-large", naming="b.json"):
        read(listed)


def test_deep_rows_and_rows_of_a_million_keys_are_judged_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    keys = ",".join(f'"k{n}": 1' for n in range(200_000))
    path.write_text('{"text": ' + "[" * 500 + "]" * 500 + "}\n" + "[" * 100_000 + "\n{" + keys + ', "k7": 2}\n')
    deep, deeper, wide = read(path)
    assert deep.problem == "the row cannot be used: it is nested more than 100 deep"
    assert deeper.problem == "the line is not JSON (nested too deeply)"
    assert wide.problem == "the key 'k7' appears twice in one object"
