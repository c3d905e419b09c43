"""Read training data while training goes: larger than memory and disk, in an order that a run resumes exactly.

A stream is cut into windows of `data.stream_rows` rows. Rank 0 reads a window, ahead of the others by one; all ranks
tokenize it together; its samples are shuffled and packed by themselves. So the rows of step s are a function of the
data, the seed and s, for any number of ranks, and where a run stands is a few numbers: the window, the rows of it that
are done, and where in the sources it began. A resumed run reads that window again and compares its tokens.

Sources with weights are drawn from by these, each read from its own beginning again when it is through; sources without
are one sequence of files. With `data.shuffle` the files of each pass come in another order. The functions that
communicate come from outside, as `Ranks`.
"""

import itertools
import logging
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from expertmesh.config.errors import InputError
from expertmesh.data.blocks import Block, BlockEncoder
from expertmesh.data.build import Recipe, encoder_of, joined, source_report
from expertmesh.data.loader import BatchLayout, PackedRows, Row, Rows, Step, accumulation_of
from expertmesh.data.report import DataReport, SourceReport
from expertmesh.data.sources import BLOCK_ROWS, Location, RawRow, locations
from expertmesh.data.tokenized import TokenizedDataset, Tokens, no_data

_Count = Annotated[int, Field(ge=0, lt=2**53)]
log = logging.getLogger(__name__)
Plan = Callable[[TokenizedDataset, Row], PackedRows]
# Keep the seeds of files, of draws and of windows apart.
_OF_FILES, _OF_DRAWS, _OF_WINDOWS = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Cursor:
    """The position of reading in a sequence of files."""

    passes: _Count = 0
    """Complete passes over all files."""
    file: _Count = 0
    """Files of this pass that are read."""
    row: _Count = 0
    """Number of the last row read in the next file."""


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """The position of a run in a stream."""

    window: _Count
    """Number of the window."""
    row: _Count
    """Number of its rows that are trained on."""
    cursors: list[Cursor]
    """Start of the window: one cursor, or one for each source with a weight."""
    crc32: _Count
    """crc32 of the window's tokens."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that read a stream together; every rank calls each of the functions."""

    rank: int = 0
    count: int = 1
    from_first: Callable[[Any], Any] = lambda own: own
    """Returns rank 0's value on all ranks."""
    of_all: Callable[[Any], list[Any]] = lambda own: [own]
    """Returns the values of all ranks, by rank."""
    together: Callable[[str], AbstractContextManager[Any]] = nullcontext
    """A block in it that fails on one rank fails on all."""


@dataclass(slots=True)
class Window:
    """A part of a stream that is shuffled and packed as a whole."""

    number: int
    cursors: list[Cursor]
    """Its start."""
    dataset: TokenizedDataset
    samples: list[Tokens]
    """The samples in the order that they are trained in."""
    rows: Rows
    """Sample indices of each packed row."""
    crc32: int
    """crc32 of its tokens."""
    report: DataReport


@dataclass(frozen=True, slots=True)
class _RawWindow:
    number: int
    cursors: list[Cursor]
    rows: list[tuple[int, RawRow]]


class _Files:
    """Files of which one follows the other for ever, each with the number of its source in `recipe`."""

    def __init__(self, recipe: Recipe, files: list[tuple[int, Location]], seed: list[int], start: Cursor) -> None:
        self._files, self._seed, self._shuffle = files, seed, recipe.config.shuffle
        self._columns = [source.columns for source in recipe.sources]
        self.cursor = start
        self.rows = self._rows()

    def _rows(self) -> Iterator[tuple[int, RawRow]]:
        while True:
            empty = self.cursor == Cursor(self.cursor.passes)
            order = np.arange(len(self._files))
            if self._shuffle:
                order = np.random.default_rng([*self._seed, self.cursor.passes, _OF_FILES]).permutation(order)
            for place in order[self.cursor.file :].tolist():
                source, location = self._files[place]
                done = self.cursor.row
                for row in location.rows(lambda number, done=done: number > done, self._columns[source]):
                    if row is not None:
                        empty = False
                        self.cursor = replace(self.cursor, row=row.number)
                        yield source, row
                self.cursor = Cursor(self.cursor.passes, self.cursor.file + 1)
            if empty:
                raise no_data(f"the data source {self._files[0][1].name} holds no row", "name a source that does")
            self.cursor = Cursor(self.cursor.passes + 1)


class _WindowReader:
    """Windows of rows, for rank 0."""

    def __init__(self, recipe: Recipe, seed: int, number: int, cursors: Sequence[Cursor]) -> None:
        self._recipe, self._seed, self._number = recipe, seed, number
        files = [
            [(at, location) for location in locations(source.path, stream=True)] * source.repeat
            for at, source in enumerate(recipe.sources)
        ]
        weights = [source.weight for source in recipe.sources if source.weight is not None]
        self._shares = np.array(weights) / sum(weights) if len(weights) > 1 else np.ones(1)
        sequences = files if len(weights) > 1 else [list(itertools.chain(*files))]
        starts = list(cursors) or [Cursor()] * len(sequences)
        if len(starts) != len(sequences):
            raise InputError(
                "data.train has other sources than the run started with; put them back", key="data.stream-changed"
            )
        self._sequences = [
            _Files(recipe, each, [seed, at], start)
            for at, (each, start) in enumerate(zip(sequences, starts, strict=True))
        ]

    def read(self) -> _RawWindow:
        count, number = self._recipe.config.stream_rows, self._number
        cursors = [each.cursor for each in self._sequences]
        draws = np.random.default_rng([self._seed, number, _OF_DRAWS]).choice(len(cursors), size=count, p=self._shares)
        rows = [next(self._sequences[place].rows) for place in draws.tolist()]
        # Rows of one file stand together, whoever tokenizes them.
        rows.sort(key=lambda each: each[0])
        self._number += 1
        return _RawWindow(number, cursors, rows)


class _Ahead:
    """The windows of a reader, one after the other; a thread makes the next one while the last is used."""

    def __init__(self, reader: _WindowReader) -> None:
        self._reader = reader
        self._begin()

    def _begin(self) -> None:
        self._made = Future[_RawWindow]()
        threading.Thread(target=self._work, args=(self._made,), daemon=True).start()

    def _work(self, made: Future[_RawWindow]) -> None:
        try:
            made.set_result(self._reader.read())
        except BaseException as error:  # raised where the window is requested
            made.set_exception(error)

    def next(self) -> _RawWindow:
        made = self._made.result()
        self._begin()
        return made


@dataclass(slots=True)
class Stream:
    """The windows of `data.train`, equal on all ranks."""

    recipe: Recipe
    seed: int
    ranks: Ranks
    sources: list[SourceReport] = field(default_factory=list)
    """The format of each source, known on all ranks once rank 0 has opened its reader."""
    _encoder: BlockEncoder | None = None

    def first(self) -> Window:
        """Return the first window, for what is to be known before training. Every rank calls it, as `windows`."""
        reader = self._open(None)
        raw: _RawWindow | None = None
        with self.ranks.together("reading the stream of data"):
            if reader is not None:
                raw = reader.read()
        one_by_one: Plan = lambda dataset, order: PackedRows(Rows(order, np.arange(len(order) + 1)), 0.0)  # noqa: E731
        return self._tokenized(self.ranks.from_first(raw), one_by_one)

    def windows(self, plan: Plan, start: StreamPosition | None = None) -> Iterator[Window]:
        """Yield the windows from `start` on, without end; `plan` makes rows of samples. Every rank calls it, and goes
        on together with the others: one broadcast and one gathering of objects for each window.

        Raises `InputError` for rows as `build_dataset`, and for data that have changed since `start`.
        """
        reader = self._open(start)
        ahead = None if reader is None else _Ahead(reader)
        while True:
            raw: _RawWindow | None = None
            with self.ranks.together("reading the stream of data"):
                if ahead is not None:
                    raw = ahead.next()
            window = self._tokenized(self.ranks.from_first(raw), plan)
            if start is not None and start.window == window.number and start.crc32 != window.crc32:
                first = start.window * self.recipe.config.stream_rows + 1
                raise InputError(
                    f"data.train has changed: the rows of the stream from {first:,} on are not those that the run "
                    "was trained on; put them back, or choose another output_dir",
                    key="data.stream-changed",
                )
            if (lost := window.report.lost()) and window.number and self.ranks.rank == 0:
                log.warning(
                    f"data: of rows {window.number * self.recipe.config.stream_rows + 1:,} and following, {lost}"
                )
            if window.samples:
                yield window

    def _open(self, start: StreamPosition | None) -> _WindowReader | None:
        """Return the reader, on rank 0; all ranks know the sources' formats afterwards."""
        reader = None
        with self.ranks.together("opening the stream of data"):
            self._encoder = self._encoder or encoder_of(self.recipe)
            if self.ranks.rank == 0:
                self.sources = self.sources or [source_report(self.recipe, each) for each in self.recipe.sources]
                number, cursors = (0, []) if start is None else (start.window, start.cursors)
                reader = _WindowReader(self.recipe, self.seed, number, cursors)
        self.sources = self.ranks.from_first(self.sources)
        return reader

    def _tokenized(self, raw: _RawWindow, plan: Plan) -> Window:
        count, ranks = len(raw.rows), self.ranks
        with ranks.together("tokenizing the stream of data"):
            mine = raw.rows[count * ranks.rank // ranks.count : count * (ranks.rank + 1) // ranks.count]
            own: list[Block] = []
            assert self._encoder is not None
            for (source, _), of_file in itertools.groupby(mine, key=lambda each: (each[0], each[1].file)):
                rows_of, name = [row for _, row in of_file], self.sources[source].format
                for at in range(0, len(rows_of), BLOCK_ROWS):
                    own.append(self._encoder.encode((source, 0, at), rows_of[at : at + BLOCK_ROWS], name))
        blocks: list[Block] = [block for part in ranks.of_all(own) for block in part]
        recipe = self.recipe
        files = list(dict.fromkeys(block.file for block in blocks))
        samples = [sample for block in blocks for sample in block.samples]
        file_of = [files.index(block.file) for block in blocks for _ in block.samples]
        numbers = [row for block in blocks for row in block.rows]
        with ranks.together("joining the stream of data"):
            report = self._report(blocks, raw.number)
        order = np.arange(len(samples))
        if recipe.config.shuffle:
            order = np.random.default_rng([self.seed, raw.number, _OF_WINDOWS]).permutation(order)
        dataset = TokenizedDataset.in_memory(samples, file_of, numbers, files=files)
        rows = plan(dataset, order).rows
        crc = 0
        for row in rows:
            for sample in row.tolist():
                crc = zlib.crc32(samples[sample].data, crc)
        return Window(raw.number, raw.cursors, dataset, samples, rows, crc, report)

    def _report(self, blocks: Sequence[Block], window: int) -> DataReport:
        """Report the first window as a full data set; later ones only count."""
        if not window:
            report, _ = joined(self.recipe, [replace(each) for each in self.sources], [b.facts() for b in blocks])
            rows = self.recipe.config.stream_rows
            report.notes.append(f"these are the first {rows:,} rows of a stream, which is read as training goes")
            return report
        report = DataReport(self.recipe.config.max_length)
        for block in blocks:
            report.add(block.report)
        return report


class StreamBatches:
    """The optimizer steps of a stream, for one data rank; as `TrainingBatches`, without an end."""

    def __init__(self, stream: Stream, layout: BatchLayout, *, global_batch_size: int) -> None:
        self.accumulation = accumulation_of(global_batch_size, layout.micro_batch_size, layout.data_ranks)
        self._stream, self._layout, self._size = stream, layout, global_batch_size

    def steps(self, done: int, position: StreamPosition | None) -> Iterator[Step]:
        """Yield the steps after the first `done`, which ended at `position`."""
        windows = self._stream.windows(self._layout.plan, position)
        ready: deque[tuple[Window, int]] = deque()
        skip = 0 if position is None else position.row
        for number in itertools.count(done):
            while len(ready) < self._size:
                window = next(windows)
                ready.extend((window, row) for row in range(skip, len(window.rows)))
                skip = 0
            part = [ready.popleft() for _ in range(self._size)]
            window, row = ready[0] if ready else (part[-1][0], part[-1][1] + 1)
            yield self._step(number, part, StreamPosition(window.number, row, window.cursors, window.crc32))

    def _step(self, number: int, part: list[tuple[Window, int]], position: StreamPosition) -> Step:
        rows = [[window.samples[sample] for sample in window.rows[row].tolist()] for window, row in part]
        dataset = TokenizedDataset.in_memory([sample for row in rows for sample in row])
        ends = np.cumsum([len(row) for row in rows])
        packed = Rows(np.arange(len(dataset)), np.concatenate(([0], ends)))
        passes = min(cursor.passes for cursor in position.cursors)
        return Step(
            rows=len(rows),
            tokens=dataset.tokens,
            target_tokens=dataset.target_tokens,
            micro_batches=tuple(self._layout.micro_batches(dataset, packed[:], number * self._size)),
            progress=float(passes),
            position=position,
        )


def first_rows(recipe: Recipe) -> tuple[TokenizedDataset, DataReport]:
    """Return what a run that streams `recipe` begins with, in file order."""
    window = Stream(recipe, 0, Ranks()).first()
    return window.dataset, window.report
