"""Streams: the same rows for any number of ranks and after any resume, from disk, memory, web and hub."""

import functools
import gzip
import http.server
import importlib.util
import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pytest
from pyarrow import parquet

from expertmesh.config import DataConfig
from expertmesh.config.errors import InputError
from expertmesh.data import BatchLayout, Ranks, Recipe, Step, Stream, StreamBatches, StreamPosition
from expertmesh.data.stream import _WindowReader
from expertmesh.training.resume import Counters, read_counters
from tests.data.test_build import write
from tests.data.tokenizers_on_the_fly import bpe_tokenizer
from tests.support.errors import refused

ROWS = 40


def texts(name: str, count: int = ROWS) -> list[dict[str, str]]:
    return [{"text": f"{name} {i} " * (1 + i % 5)} for i in range(count)]


def source_files(tmp_path: Path) -> list[str]:
    """Three files of a directory, in as many formats, and one beside it."""
    directory = tmp_path / "rows"
    directory.mkdir(exist_ok=True)
    write(directory / "a.jsonl", texts("a"))
    parquet.write_table(pa.Table.from_pylist(texts("b")), directory / "b.parquet")
    with gzip.open(directory / "c.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in texts("c", 7))
    return [str(directory), str(write(tmp_path / "d.jsonl", texts("d")))]


def stream_of(paths: list[str], weights: list[float] | None = None, ranks: Ranks | None = None, **keys: Any) -> Stream:
    train = [
        {"path": path, **({} if weights is None else {"weight": weight})}
        for path, weight in zip(paths, weights or paths, strict=True)
    ]
    config = DataConfig(train=train, stream=True, **({"max_length": 48, "stream_rows": 16} | keys))  # type: ignore[arg-type]
    tokenizer = bpe_tokenizer()
    return Stream(Recipe(config.train, config, tokenizer, len(tokenizer)), 7, ranks or Ranks())


def steps_of(
    stream: Stream, count: int, done: int = 0, position: StreamPosition | None = None, data: tuple[int, int] = (0, 1)
) -> list[Step]:
    layout = BatchLayout(1, *data, stream.recipe.config.packing, pad_token_id=0, max_length=48)
    batches = StreamBatches(stream, layout, global_batch_size=4)
    return list(itertools.islice(batches.steps(done, position), count))


def rows_of(step: Step) -> list[tuple[list[int], list[int]]]:
    batches = [{name: tensor.numpy() for name, tensor in batch.items()} for batch in step.micro_batches]
    return [
        (batch["input_ids"][row][batch["real_tokens"][row]].tolist(), batch["row_numbers"][row].tolist())
        for batch in batches
        for row in range(len(batch["input_ids"]))
    ]


@pytest.mark.parametrize("keys", [{}, {"packing": False, "shuffle": False}, {"weights": [0.7, 0.3]}])
def test_every_resume_goes_on_with_the_same_rows(tmp_path: Path, keys: dict[str, Any]) -> None:
    paths = source_files(tmp_path)
    whole = steps_of(stream_of(paths, **keys), 18)
    assert len({json.dumps(rows_of(step)) for step in whole}) == 18
    for done in (1, 2, 5, 9, 17):
        saved = asdict(Counters(step=done, stream=whole[done - 1].position))
        counters = read_counters(tmp_path, json.loads(json.dumps(saved)), done)
        assert len(json.dumps(saved["stream"])) < 400
        again = steps_of(stream_of(paths, **keys), 18 - done, done, counters.stream)
        assert [rows_of(step) for step in again] == [rows_of(step) for step in whole[done:]], done
        assert [step.position for step in again] == [step.position for step in whole[done:]]
    other = steps_of(stream_of(paths, **keys), 18, data=(1, 2))
    assert [rows_of(step) for step in other] == [rows_of(step)[1::2] for step in whole]


class _Threads:
    """Ranks that are threads of this process."""

    def __init__(self, count: int) -> None:
        self.count, self.barrier, self.slots = count, threading.Barrier(count, timeout=300), [None] * count

    def of_all(self, own: Any, rank: int) -> list[Any]:
        self.slots[rank] = own
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found

    def rank(self, rank: int) -> Ranks:
        of_all = functools.partial(self.of_all, rank=rank)
        return Ranks(rank, self.count, lambda own: of_all(own)[0], of_all)


def test_ranks_share_the_work_and_have_the_same_rows(tmp_path: Path) -> None:
    paths = source_files(tmp_path)
    expected = [rows_of(step) for step in steps_of(stream_of(paths), 8)]
    threads, found = _Threads(3), [[]] * 3

    def work(rank: int) -> None:
        stream = stream_of(paths if rank == 0 else ["/nowhere"] * 2, ranks=threads.rank(rank))
        found[rank] = [rows_of(step) for step in steps_of(stream, 8)]

    running = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for each in running:
        each.start()
    for each in running:
        each.join(300)
    assert found == [expected] * 3


def test_a_pass_has_every_row_once_and_the_next_another_order(tmp_path: Path) -> None:
    paths, total = source_files(tmp_path), 3 * ROWS + 7
    stream = stream_of(paths, stream_rows=total)
    windows = list(itertools.islice(stream.windows(_plan), 2))
    orders = [[window.dataset.position(int(row[0])) for row in window.rows] for window in windows]
    assert Counter(orders[0]) == Counter(orders[1])
    assert [source.files for source in windows[0].report.sources] == [3, 1]
    assert len(set(orders[0])) == total
    assert orders[0] != orders[1]
    plain = stream_of(paths, stream_rows=total, shuffle=False, packing=False)
    assert [rows_of(step)[0] for step in steps_of(plain, 1)] == [rows_of(step)[0] for step in steps_of(plain, 1)]


def _plan(dataset: Any, order: Any) -> Any:
    return BatchLayout(1, 0, 1, False, 0, 48).plan(dataset, order)


def test_sources_are_drawn_by_weight(tmp_path: Path) -> None:
    windows = itertools.islice(stream_of(source_files(tmp_path), [0.9, 0.1], stream_rows=500).windows(_plan), 3)
    of_source = Counter(
        "d.jsonl" in window.dataset.position(row) for window in windows for row in range(len(window.dataset))
    )
    assert 100 < of_source[True] < 200  # of 1,500
    assert of_source[False] == 1500 - of_source[True]


def test_what_has_changed_is_not_gone_on_with(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", texts("a"))
    whole = steps_of(stream_of([str(path)]), 6)
    rows = texts("a")
    rows[5] = {"text": "something else"}
    write(path, rows)
    with refused("data.stream-changed", naming="put them back, or choose another output_dir"):
        steps_of(stream_of([str(path)]), 1, 1, whole[0].position)
    write(path, texts("a", 0))
    with refused("data.empty"):
        steps_of(stream_of([str(path)], format="text"), 1)
    write(path, [*texts("a", 20), {"txt": 1}])
    with refused("data.malformed-row", naming="a.jsonl:21"):
        steps_of(stream_of([str(path)]), 20)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_files_elsewhere_are_streamed_as_those_here(tmp_path: Path, web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", texts("a"))
    expected = [rows_of(step) for step in steps_of(stream_of([str(path)]), 6)]
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/a.jsonl", path.read_bytes())
    load = datasets.load_dataset

    def of_hub(name: str, split: str, streaming: bool) -> Any:
        assert (name, split, streaming) == ("org/name", "train", True)
        return load("json", data_files=[str(path)], split="train", streaming=True, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", of_hub)
    urls = ["memory://bucket", "memory://bucket/a.jsonl", "org/name"]
    if importlib.util.find_spec("aiohttp") is not None:
        urls.append(f"{web}/a.jsonl")
    for url in urls:
        steps = steps_of(stream_of([url]), 6)
        assert [rows_of(step) for step in steps] == expected, url
        again = steps_of(stream_of([url]), 3, 3, steps[2].position)
        assert [rows_of(step) for step in again] == expected[3:], url


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"stream_rows": 5}, "data.stream_rows does nothing without data.stream"),
        ({"stream": True, "train": [{"path": "a", "max_rows": 5}]}, "data.train.0.max_rows does nothing"),
    ],
)
def test_keys_that_would_do_nothing_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        DataConfig(**({"train": [{"path": "a"}]} | keys))


def test_what_later_windows_lose_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*texts("a", 20), {"txt": 1}, {"text": "too long " * 50}, *texts("b", 10)]
    stream = stream_of([str(write(tmp_path / "a.jsonl", rows))], on_error="skip", on_overlong="drop", shuffle=False)
    windows = list(itertools.islice(stream.windows(_plan), 2))
    assert [len(window.dataset) for window in windows] == [16, 14]
    (said,) = caplog.messages
    assert said.startswith("data: of rows 17 and following, not trained on: 1 malformed, 1 too long (first: ")


def test_no_more_than_a_few_windows_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is read: a window in use, one that waits, and one that is being read."""
    stream = stream_of([str(write(tmp_path / "a.jsonl", texts("a", 4000)))])
    read, windows = _WindowReader.read, []
    monkeypatch.setattr(_WindowReader, "read", lambda self: windows.append(read(self)) or windows[-1])
    layout = BatchLayout(1, 0, 1, True, pad_token_id=0, max_length=48)
    for step in itertools.islice(StreamBatches(stream, layout, global_batch_size=4).steps(0, None), 100):
        assert step.position is not None
        assert len(windows) <= step.position.window + 4
    assert len(windows) > 50
