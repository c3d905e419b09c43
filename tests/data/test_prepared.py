"""Tokens are made once, by processes that share the rows, and are those that one process makes in memory."""

import datetime
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from expertmesh.config import DataConfig, DataSource
from expertmesh.config.errors import IntegrityError
from expertmesh.data import BatchLayout, DataReport, Recipe, TokenizedDataset, TrainingBatches, build_dataset
from expertmesh.data.formats import PREFERENCE
from expertmesh.data.prepared import Preparation, PreparedData
from expertmesh.data.sources import RowShare
from tests.data import tokenizers_on_the_fly as on_the_fly
from tests.data.test_build import chat, write
from tests.data.tokenizers_on_the_fly import bpe_tokenizer
from tests.support.errors import refused


def preparation(
    tmp_path: Path, *paths: Path | DataSource, template: str = on_the_fly.CHATML, **options: Any
) -> Preparation:
    facts = {name: options.pop(name) for name in ("responses", "date") if name in options}
    sources = [path if isinstance(path, DataSource) else DataSource(path=str(path)) for path in paths]
    config = DataConfig(train=sources, **options)
    tokenizer = bpe_tokenizer(template)
    return Preparation(tmp_path / "prepared", Recipe(config.train, config, tokenizer, len(tokenizer), **facts))


def make(preparing: Preparation, processes: int = 1, name: str = "x") -> PreparedData:
    building = preparing.building(name)
    for process in range(processes):
        preparing.write_share(building, RowShare(process, processes), lambda rows: None)
    preparing.finish(building, processes)
    found = preparing.find()
    assert found is not None
    return found


def in_memory(preparing: Preparation) -> tuple[TokenizedDataset, DataReport]:
    return build_dataset(preparing.recipe)


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    """Three files over several blocks, of two formats, with rows of every kind that is counted."""
    odd: list[Any] = ['{"messages": ', chat(""), {"messages": [{"role": "user", "content": "no answer"}]}]
    chats = [odd[i // 200 % 3] if i % 200 == 7 else chat(f"answer {i} " * (i % 40)) for i in range(1, 1500)]
    directory = tmp_path / "rows"
    directory.mkdir()
    write(directory / "a.jsonl", chats[:900])
    write(directory / "b.jsonl", chats[900:])
    return [directory, write(tmp_path / "texts.jsonl", [{"text": f"text {i}"} for i in range(700)])]


@pytest.mark.slow_cases(r"1", why="three stay")
@pytest.mark.parametrize("processes", [1, 3])
def test_processes_that_share_the_rows_make_what_one_makes_in_memory(
    tmp_path: Path, sources: list[Path], processes: int
) -> None:
    preparing = preparation(tmp_path, *sources, on_error="skip", max_length=64)
    found, (dataset, report) = make(preparing, processes), in_memory(preparing)
    assert found.dataset.sha256() == dataset.sha256()
    assert found.report.lines() == report.lines()
    assert found.report.histogram == report.histogram
    assert [found.dataset.position(i) for i in range(len(dataset))] == [
        dataset.position(i) for i in range(len(dataset))
    ]
    for i in range(0, len(dataset), 97):
        assert found.dataset.sample(i).labels.tolist() == dataset.sample(i).labels.tolist()
    assert sorted(path.name for path in found.directory.parent.iterdir()) == [found.directory.name]


def test_second_start_calls_no_tokenizer_and_maps_the_tokens(tmp_path: Path, sources: list[Path]) -> None:
    first = make(preparation(tmp_path, *sources, on_error="skip"), 2)
    again = preparation(tmp_path, *sources, on_error="skip")
    with mock.patch.object(type(again.recipe.tokenizer), "__call__", side_effect=AssertionError):
        second = again.find()
    assert second is not None
    assert second.report.lines() == first.report.lines()
    assert second.dataset.sha256() == first.dataset.sha256()
    assert all(isinstance(shard, np.memmap) for shard in second.dataset._shards)
    layout = BatchLayout(1, 0, 1, packing=True, pad_token_id=0, max_length=4096)
    with mock.patch.object(TokenizedDataset, "sample", side_effect=AssertionError):  # packing reads no token
        batches = TrainingBatches(second.dataset, layout, global_batch_size=2, shuffle=True, seed=1)
        assert batches.total_steps(2) > 0


def test_pairs_stay_together(tmp_path: Path) -> None:
    rows = [{"prompt": f"p {i}", "chosen": f"good {i}", "rejected": "bad"} for i in range(1100)]
    preparing = preparation(tmp_path, write(tmp_path / "pairs.jsonl", rows), responses=PREFERENCE)
    found, (dataset, report) = make(preparing, 2), in_memory(preparing)
    assert found.dataset.sha256() == dataset.sha256()
    assert (found.dataset.samples_per_row, found.report.samples, len(found.dataset)) == (2, report.samples, 2200)


def test_what_tokens_depend_on_is_in_the_key_and_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [chat("yes")])
    first = make(preparation(tmp_path, path))
    for same in ({"packing": False}, {"shuffle": False}, {"prepared_path": "elsewhere"}):
        found = preparation(tmp_path, path, **same).find()
        assert found is not None
        assert found.directory == first.directory
    for other in ({"max_length": 8}, {"loss_on": "all"}, {"on_empty_answer": "drop"}, {"template_args": {"a": 1}}):
        assert preparation(tmp_path, path, **other).find() is None
    assert preparation(tmp_path, path, template=on_the_fly.DEFAULT_SYSTEM).find() is None
    with mock.patch("expertmesh.data.prepared._code_sha256", return_value="of another version"):
        assert preparation(tmp_path, path).find() is None


def test_changed_rows_are_prepared_anew_and_touched_files_are_not(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [chat("yes")])
    first = make(preparation(tmp_path, path))
    os.utime(path, (1, 1))
    touched = preparation(tmp_path, path)
    found = touched.find()
    assert found is not None
    assert found.directory == first.directory
    write(path, [chat("no!")])
    changed = preparation(tmp_path, path)
    assert changed.find() is None
    assert changed.is_stale()
    second = make(changed)
    assert second.directory != first.directory
    assert second.dataset.sha256() != first.dataset.sha256()


def test_a_file_of_another_name_is_read_anew(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    path = write(tmp_path / "rows" / "a.jsonl", [chat("yes")])
    first = make(preparation(tmp_path, path.parent))
    path.rename(path.with_name("b.jsonl"))
    renamed = preparation(tmp_path, path.parent)
    assert renamed.find() is None
    assert renamed.is_stale()
    second = make(renamed)
    assert second.directory != first.directory
    assert second.dataset.position(0).endswith("b.jsonl:1")


def test_first_bad_row_in_the_order_of_the_data_is_the_one_that_is_named(tmp_path: Path) -> None:
    rows: list[Any] = [chat("a") for _ in range(2600)]
    rows[1600] = rows[2100] = "{"  # in the second blocks of processes 0 and 1 of 3
    preparing = preparation(tmp_path, write(tmp_path / "a.jsonl", rows))
    building = preparing.building("x")
    for process in (2, 1, 0):
        preparing.write_share(building, RowShare(process, 3), lambda rows: None)
    with refused("data.malformed-row", naming="a.jsonl:1601: "):
        preparing.finish(building, 3)
    assert not building.exists()
    assert preparing.find() is None


def test_two_jobs_at_once_leave_one_set_of_tokens(tmp_path: Path) -> None:
    preparing = preparation(tmp_path, write(tmp_path / "a.jsonl", [chat("yes")]))
    for job in ("one", "two"):
        preparing.write_share(preparing.building(job), RowShare(), lambda rows: None)
    preparing.finish(preparing.building("one"), 1)
    preparing.finish(preparing.building("two"), 1)
    assert len(list(preparing.directory.iterdir())) == 1
    assert preparing.find() is not None


def test_rows_that_change_while_they_are_read_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [chat("yes")])
    preparing = preparation(tmp_path, path)
    preparing.write_share(preparing.building("x"), RowShare(), lambda rows: None)
    write(path, [chat("yes"), chat("more")])
    with refused("data.changed-while-read", naming="a.jsonl"):
        preparing.finish(preparing.building("x"), 1)


def test_damaged_tokens_are_named_before_they_are_trained_on(tmp_path: Path) -> None:
    preparing = preparation(tmp_path, write(tmp_path / "a.jsonl", [chat("yes"), chat("no")]))
    directory = make(preparing).directory
    tokens, lengths = directory / "tokens-00000.bin", directory / "lengths.npy"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    found = preparing.find()
    assert found is not None
    found.dataset.sample(0)
    with refused("data.damaged-preparation", IntegrityError, naming="a.jsonl:2"):
        found.dataset.sample(1)
    tokens.write_bytes(whole[:-4])
    with refused("data.damaged-preparation", IntegrityError, naming="tokens-00000.bin"):
        preparing.find()
    tokens.write_bytes(whole)
    lengths.write_bytes(lengths.read_bytes()[:-1] + b"\1")
    with refused("data.damaged-preparation", IntegrityError, naming="index"):
        preparing.find()
    (directory / "manifest.json").write_text("{")
    with refused("data.damaged-preparation", IntegrityError, naming="manifest.json"):
        preparing.find()


_FOR_TOOLS: Any = {"default": on_the_fly.CHATML, "tool_use": on_the_fly.WRITES_DATE}


@pytest.mark.parametrize("template", [on_the_fly.WRITES_DATE, _FOR_TOOLS], ids=["every row", "rows with tools"])
def test_a_template_that_writes_the_date_has_tokens_for_each_date(template: Any, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}]
    path = write(tmp_path / "a.jsonl", [{**chat("yes"), "tools": tools}])
    day = datetime.date(2026, 1, 2)

    def of(date: datetime.date | None) -> Preparation:
        return preparation(tmp_path, path, template=template, date=date)

    assert make(of(day)).date == day
    kept = of(None).find()  # a run that starts anew takes the date of the preparation
    assert kept is not None
    assert kept.date == day
    assert of(datetime.date(2026, 1, 3)).find() is None
    assert "which is 2026-01-02" in " ".join(kept.report.lines())
    assert json.loads((kept.directory / "manifest.json").read_text())["date"] == "2026-01-02"
