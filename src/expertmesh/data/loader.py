"""Decide which rows each optimizer step trains on, and assemble the batches of one data rank.

The order of an epoch depends on (seed, epoch) alone and the rows of a step on that order alone; the layout
only decides which data rank holds which of them. Every row of an epoch is trained on exactly once, whatever
the number of ranks. All ranks derive the same plan from the same data set: nothing here communicates.

1. `Mixture` chooses the rows of an epoch: each source is `repeat`ed, or, where sources have weights, drawn by them. A
   draw is exact, not only on average: an epoch has of each source the rows that its probability gives, and continues
   in the source where the epoch before ended, in an order that is new each time the source is through.
2. `pack` puts whole documents into rows of at most `max_length` tokens: greedy best fit over a bounded number of open
   rows, in the order given. Neighbours stay near each other, and no document is ever split.
3. `BatchLayout` deals rows to ranks, and `packed_batch` makes the tensors that a model takes of them.
4. `TrainingBatches` has the steps of every epoch, `EvaluationBatches` an evaluation set once.
"""

import itertools
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from expertmesh.config import DataSource
from expertmesh.config.errors import InputError
from expertmesh.data.images import Images
from expertmesh.data.report import DataReport
from expertmesh.data.tokenized import IGNORE, TokenizedDataset, no_data

if TYPE_CHECKING:
    from expertmesh.data.stream import StreamPosition


OPEN_ROWS = 64
"""More open rows mix documents from farther apart and fill little better: 256 gain less than 1 %."""

_ROW_BITS = 40
_ROW_MASK = (1 << _ROW_BITS) - 1
_LENGTHS_AT_A_TIME = 1 << 16

Batch = dict[str, torch.Tensor]
Row = npt.NDArray[np.int64]
"""Indices of the samples that share one row, in their order inside it."""
Order = npt.NDArray[np.int64]
# Keeps the seeds of sources apart from those of epochs: numpy takes missing numbers for zeros.
_OF_A_SOURCE = 1


class Rows(Sequence[Row]):
    """Rows in one array: row `r` is `samples[bounds[r] : bounds[r + 1]]`. A million of them are no million objects."""

    __slots__ = ("_bounds", "_samples")

    def __init__(self, samples: Row, bounds: Row) -> None:
        self._samples, self._bounds = samples, bounds

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        at = place % len(self)
        return self._samples[self._bounds[at] : self._bounds[at + 1]]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows of an epoch."""

    rows: Rows
    """Sample indices of each row, ordered by their first document."""
    fill: float
    """tokens / (rows × max_length)."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """The way the rows of each source enter an epoch."""

    rows: tuple[int, ...]
    """Rows of each source."""
    repeats: tuple[int, ...]
    """Times that an epoch has each source's rows; without weights."""
    shares: tuple[int, ...] | None = None
    """Rows that an epoch draws from each source; None without weights."""

    @classmethod
    def of(cls, sources: Sequence[DataSource], report: DataReport, samples_per_row: int) -> "Mixture":
        """Return the mixture of `data.train`, whose rows are those of `report`; the shares are noted in it."""
        rows = tuple(each.samples // samples_per_row for each in report.sources)
        repeats = tuple(source.repeat for source in sources)
        for each, repeat in zip(report.sources, repeats, strict=True):
            each.repeat = repeat
        weights = [source.weight for source in sources if source.weight is not None]
        if len(weights) < 2:
            return cls(rows, repeats)
        # A source without a sample has nothing to draw.
        drawn = np.array(weights) * (np.array(rows) > 0)
        exact = sum(rows) * drawn / drawn.sum()
        shares = exact.astype(np.int64).tolist()
        for at in np.argsort(shares - exact, kind="stable")[: sum(rows) - sum(shares)].tolist():
            shares[at] += 1
        for at, (source, share) in enumerate(zip(report.sources, shares, strict=True)):
            if rows[at] and not share:
                little = f"data.train.{at}.weight: {sources[at].weight:g} is less than one row of {sum(rows):,}"
                raise no_data(f"{little}, so {sources[at].path} is never trained", "raise it or remove the source")
            source.epoch_rows = share
        return cls(rows, repeats, tuple(shares))

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> Order:
        """Return the rows of an epoch; without `shuffle` in the order of the sources."""
        starts = np.cumsum([0, *self.rows])
        if self.shares is None:
            parts = [
                np.tile(np.arange(start, start + count), repeat)
                for start, count, repeat in zip(starts, self.rows, self.repeats, strict=False)
            ]
        else:
            parts = [
                starts[source] + self._drawn(source, seed, epoch * share, (epoch + 1) * share)
                for source, share in enumerate(self.shares)
            ]
        rows = np.concatenate(parts).astype(np.int64, copy=False)
        return rows[np.random.default_rng([seed, epoch]).permutation(len(rows))] if shuffle else rows

    def _drawn(self, source: int, seed: int, start: int, stop: int) -> Order:
        """Return rows `start` … `stop`-1 of the endless sequence of a source: all of its rows, again and again."""
        count = self.rows[source]
        parts = [np.empty(0, np.int64)]
        for cycle in range(start // count, -(-stop // count)) if stop > start else ():
            order = np.random.default_rng([seed, source, cycle, _OF_A_SOURCE]).permutation(count)
            parts.append(order[max(start - cycle * count, 0) : stop - cycle * count])
        return np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step as one data rank sees it.

    Counts are of the whole step, over all data ranks and micro-batches, so that the divisor of the summed loss is known
    without a collective.
    """

    rows: int
    """Rows, for preferences pairs."""
    tokens: int
    """Input tokens, padding left out."""
    target_tokens: int
    micro_batches: tuple[Batch, ...]
    """This rank's, equally many on every rank. Beside the model's inputs each holds `row_numbers` `[B]`, unique in a
    run and equal in every layout (for adapters' dropout); `real_tokens` `[B, S]` bool, false for padding and for filler
    rows; `desirable` `[B]` bool and `reference` `[B]` if the data set has them."""
    mismatched: tuple[Batch, ...] = ()
    """With labels, this rank's micro-batches of the same prompts, each with the completion of the next row of the step
    (the last with that of the first), by which kto estimates how far the model is from its reference."""
    desirable: int = 0
    """Rows whose label is desirable."""
    progress: float = 0.0
    """Passes over the data that are done after this step."""
    position: "StreamPosition | None" = None
    """Position at which a stream continues."""


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The way rows become the micro-batches of one data rank.

    Rows are dealt to the ranks in turn, so that no two ranks differ by more than one row. A row of preferences is a
    pair, whose two samples follow one another in a micro-batch. `fill` of a plan is relative to `max_length` in each
    case.
    """

    micro_batch_size: int
    """Rows."""
    data_rank: int
    data_ranks: int
    packing: bool
    """True if a row is several samples that together have at most `max_length` tokens; else it is one sample."""
    pad_token_id: int
    max_length: int
    """Tokens of a row."""
    images: Images | None = None
    """Pixels of the images of rows; None where no row has any."""
    guard: Callable[[str], AbstractContextManager[object]] = nullcontext
    """`raise_on_all_ranks`, where one rank's files of images may fail while its peers wait for the rank."""

    def __post_init__(self) -> None:
        assert 0 <= self.data_rank < self.data_ranks
        assert self.micro_batch_size > 0

    def plan(self, dataset: TokenizedDataset, order: Row) -> PackedRows:
        """Return the samples (of preferences, the pairs) `order` in rows."""
        if self.packing:
            return pack(dataset.lengths, order, self.max_length)
        each = dataset.samples_per_row
        samples = (order[:, None] * each + np.arange(each)).reshape(-1)
        fill = float(dataset.lengths[samples].sum()) / (len(samples) * self.max_length)
        return PackedRows(Rows(samples, np.arange(len(order) + 1) * each), fill)

    def micro_batches(self, dataset: TokenizedDataset, rows: Sequence[Row], first_number: int = 0) -> Iterator[Batch]:
        """Yield this rank's micro-batches of `rows`, which are numbered from `first_number`.

        Ranks that run out of rows repeat the first one with every label -100: its loss and its gradients are exactly
        zero, and the rank still takes part in every collective of its peers. Collectives: those of `guard` for each.
        """
        for start in range(0, -(-len(rows) // self.data_ranks), self.micro_batch_size):
            with self.guard("assembling a micro-batch"):
                batch = self._micro_batch(dataset, rows, start, first_number)
            yield batch

    def _micro_batch(self, dataset: TokenizedDataset, rows: Sequence[Row], start: int, first_number: int) -> Batch:
        """Return the micro-batch of this rank's rows from the `start`-th on."""
        part = range(self.data_rank, len(rows), self.data_ranks)[start : start + self.micro_batch_size]
        chosen = [rows[place] for place in part or [0]]
        sequences = chosen if self.packing else list(np.concatenate(chosen).reshape(-1, 1))
        batch = (packed_batch if self.packing else padded_batch)(dataset, sequences, self.pad_token_id)
        if not part:
            batch["labels"].fill_(IGNORE)
        numbers, each = np.array(part or [0]) + first_number, len(sequences) // len(chosen)
        batch["row_numbers"] = torch.from_numpy((numbers[:, None] * each + np.arange(each)).reshape(-1))
        # Padding is on the right, packed or not; a rank without rows of its own has no real token.
        lengths = torch.tensor([int(dataset.lengths[row].sum()) if part else 0 for row in sequences])
        batch["real_tokens"] = torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]
        if self.images is not None:
            # The rows of all ranks in this micro-batch: those without any of their own have the first.
            of_all = rows[start * self.data_ranks : (start + self.micro_batch_size) * self.data_ranks]
            of_all = [*of_all, *rows[:1]] if len(of_all) < self.data_ranks else of_all
            needed = bool(dataset.images_of[np.concatenate(of_all)].any())
            self.images.add_to(batch, dataset, sequences, self.pad_token_id, needed=needed)
        for key in ("reference", "desirable"):
            if (of_samples := getattr(dataset, key)) is not None:
                batch[key] = torch.from_numpy(of_samples[np.concatenate(sequences)])
        return batch

    def mismatched(
        self, dataset: TokenizedDataset, steps: Sequence[Row], reference: npt.NDArray[np.float64] | None = None
    ) -> TokenizedDataset:
        """Return the rows of some steps, each with the completion of the next row of its step, as TRL; a row that is
        alone in its step keeps its own.

        Args:
            steps: The samples of each step, one a row.
            reference: The `reference` of the result.
        """
        completions = np.concatenate([np.roll(step, -1) for step in steps])
        made = dataset.mismatched(np.concatenate(steps), completions, self.max_length)
        made.reference = reference
        return made


class TrainingBatches:
    """The optimizer steps of every epoch, for one data rank.

    `global_batch_size` counts rows per step over the whole job (packed rows under `packing`). The last step
    of an epoch holds what is left, with fewer micro-batches if that suffices. With `shuffle` and `packing`
    off, step s holds samples s·G … s·G+G-1 in file order. `mixture` says which rows an epoch has, by default each once.

    With `packing` and `shuffle` each epoch is packed anew after shuffling, so that its number of steps can
    differ by a little: use `steps_in_epoch` and `total_steps` for schedules.
    """

    def __init__(
        self,
        dataset: TokenizedDataset,
        layout: BatchLayout,
        *,
        global_batch_size: int,
        shuffle: bool,
        seed: int,
        mixture: Mixture | None = None,
    ) -> None:
        if not len(dataset):
            raise no_data("the training data has no sample, so there is no step to train", "correct data.train")
        self.accumulation = accumulation_of(global_batch_size, layout.micro_batch_size, layout.data_ranks)
        self._dataset = dataset
        self._layout = layout
        self._global_batch_size = global_batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._mixture = mixture or Mixture((len(dataset) // dataset.samples_per_row,), (1,))
        self._plans: dict[int, PackedRows] = {}
        self._steps: dict[int, int] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Steps of epoch 0; of every epoch unless both `packing` and `shuffle` are on."""
        return self.steps_in_epoch(0)

    def steps_in_epoch(self, epoch: int) -> int:
        """Return the optimizer steps of one epoch."""
        if epoch not in self._steps:
            fixed = not (self._layout.packing and self._shuffle)
            rows = self.plan(0 if fixed else epoch).rows
            self._steps[epoch] = -(-len(rows) // self._global_batch_size)
        return self._steps[epoch]

    def total_steps(self, num_epochs: int) -> int:
        """Return the optimizer steps of epochs 0 … `num_epochs`-1."""
        return sum(self.steps_in_epoch(epoch) for epoch in range(num_epochs))

    def plan(self, epoch: int) -> PackedRows:
        """Return the rows of one epoch in training order, equal on every rank, and how full they are."""
        if epoch not in self._plans:
            order = self._mixture.order(self._seed, epoch, shuffle=self._shuffle)
            self._plans.clear()  # one epoch is in use at a time, and a plan holds an array per row
            self._plans[epoch] = self._layout.plan(self._dataset, order)
        return self._plans[epoch]

    def steps(self, done: int, position: "StreamPosition | None" = None) -> Iterator[Step]:
        """Yield the steps after the first `done`, epoch after epoch without end; only a stream has a `position`."""
        for epoch in itertools.count():
            start = min(done, self.steps_in_epoch(epoch))
            done -= start
            yield from self.epoch(epoch, start)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Step]:
        """Yield the steps of one epoch from `start_step` (counted from 0) on; earlier rows are not touched."""
        rows, size = self.plan(epoch).rows, self._global_batch_size
        for step in range(start_step, self.steps_in_epoch(epoch)):
            part = rows[step * size : (step + 1) * size]
            samples = np.concatenate(part)
            mismatched: tuple[Batch, ...] = ()
            if self._dataset.desirable is not None:
                reference, first = self._dataset.mismatched_reference, epoch * len(rows) + step * size
                reference = None if reference is None else reference[first : first + len(part)]
                others = self._layout.mismatched(self._dataset, [samples], reference)
                mismatched = tuple(EvaluationBatches(others, self._layout))
            yield Step(
                rows=len(part),
                tokens=int(self._dataset.lengths[samples].sum()),
                target_tokens=int(self._dataset.target_counts[samples].sum()),
                micro_batches=tuple(self._layout.micro_batches(self._dataset, part, (epoch << 32) + step * size)),
                mismatched=mismatched,
                desirable=_desirable(self._dataset, samples),
                progress=epoch + (step + 1) / self.steps_in_epoch(epoch),
            )

    def mismatched(self, steps: int) -> TokenizedDataset:
        """Return the mismatched rows of the first `steps` steps, one after the other (`Step.mismatched`)."""
        size, found = self._global_batch_size, []
        for step in range(steps):
            epoch, place = divmod(step, self.steps_per_epoch)
            rows = self.plan(epoch).rows
            found.append(np.concatenate(rows[place * size : (place + 1) * size]))
        return self._layout.mismatched(self._dataset, found)


class EvaluationBatches:
    """Every row of an evaluation set once, in file order, over all data ranks.

    Iterating yields this rank's batches, equally many on every rank (a rank that runs out repeats a row
    without targets). `rows` and `target_tokens` are totals over all ranks. Without packing, `row_numbers` are the
    numbers of samples in the data set.
    """

    def __init__(self, dataset: TokenizedDataset, layout: BatchLayout) -> None:
        if not len(dataset):
            raise no_data("the evaluation data has no sample", "correct data.eval, or leave it empty")
        self.dataset = dataset
        self._layout = layout
        self._rows = layout.plan(dataset, np.arange(len(dataset) // dataset.samples_per_row)).rows
        self.rows, self.target_tokens = len(self._rows), dataset.target_tokens
        self.desirable = _desirable(dataset, slice(None))

    def __len__(self) -> int:
        """Return the micro-batches per rank."""
        return -(-len(self._rows) // (self._layout.data_ranks * self._layout.micro_batch_size))

    def __iter__(self) -> Iterator[Batch]:
        return self._layout.micro_batches(self.dataset, self._rows)

    def mismatched(self) -> "EvaluationBatches":
        """Return the batches of mismatched rows, as of a step that has the whole set (`Step.mismatched`)."""
        every = np.arange(len(self.dataset))
        others = self._layout.mismatched(self.dataset, [every], self.dataset.mismatched_reference)
        return EvaluationBatches(others, self._layout)


def _desirable(dataset: TokenizedDataset, samples: Any) -> int:
    return 0 if dataset.desirable is None else int(dataset.desirable[samples].sum())


def accumulation_of(global_batch_size: int, micro_batch_size: int, data_ranks: int) -> int:
    """Return the micro-batches per optimizer step and rank.

    Raises `InputError` with the nearest valid sizes if `global_batch_size` is not a multiple of the other two.
    """
    per_pass = micro_batch_size * data_ranks
    if global_batch_size > 0 and global_batch_size % per_pass == 0:
        return global_batch_size // per_pass
    below, above = global_batch_size // per_pass * per_pass, (global_batch_size // per_pass + 1) * per_pass
    nearest = f"{below} or {above}" if below > 0 else f"{above}"
    raise InputError(
        f"train.global_batch_size {global_batch_size} is not a multiple of train.micro_batch_size "
        f"{micro_batch_size} × {data_ranks} data ranks = {per_pass}; the nearest valid "
        f"train.global_batch_size is {nearest}.",
        key="config.combination",
    )


def padding_token_id(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """Return an id to pad with: the pad token, else eos, else 0, skipping those that the model has no embedding for.

    Padding carries no label and no other token attends to it, so the choice changes no result.
    """
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((int(token_id) for token_id in known if token_id is not None and token_id < vocab_size), 0)


def pack(
    lengths: npt.NDArray[np.integer[Any]],
    order: npt.NDArray[np.int64],
    max_length: int,
    *,
    open_rows: int = OPEN_ROWS,
) -> PackedRows:
    """Distribute samples over rows of at most `max_length` tokens.

    A sample goes into the open row that it leaves the least room in, the oldest of equals. If none has room,
    a new row is opened; when `open_rows` are open, the fullest is closed first.

    Args:
        lengths: Tokens of each sample of the data set, none above `max_length`.
        order: Indices into `lengths`, in the order of packing.
        open_rows: Rows that may be filled at the same time.
    """
    assert not len(order) or int(lengths[order].max()) <= max_length, "a sample is longer than a row"
    row_of = array("q")
    # The tokens left in a row times 2^40, plus the row's number, sorted: the row for a sample is the first that has
    # room, and of rows with equal room the oldest.
    free: list[int] = []
    opened = tokens = 0
    for start in range(0, len(order), _LENGTHS_AT_A_TIME):
        for length in lengths[order[start : start + _LENGTHS_AT_A_TIME]].tolist():
            place = bisect_left(free, length << _ROW_BITS)
            if place < len(free):
                row = free.pop(place)
            else:
                if len(free) == open_rows:
                    del free[0]
                row = (max_length << _ROW_BITS) + opened
                opened += 1
            insort(free, row - (length << _ROW_BITS))
            row_of.append(row & _ROW_MASK)
            tokens += length
    rows = np.frombuffer(row_of, dtype=np.int64) if row_of else np.empty(0, np.int64)
    bounds = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=opened))))
    fill = tokens / (opened * max_length) if opened else 0.0
    return PackedRows(Rows(order[np.argsort(rows, kind="stable")], bounds), fill)


def packed_batch(dataset: TokenizedDataset, rows: Sequence[Row], pad_token_id: int) -> Batch:
    """Return `input_ids`, `labels`, `position_ids` [B, S] int64 of packed rows; S is the longest of them.

    Shorter rows are padded on the right by tokens that form a document of their own (positions from 0, labels
    -100). There is no `attention_mask`: transformers finds the documents by `position_ids`, which needs
    `use_cache=False`, and under flash attention B = 1.
    """
    shape = (len(rows), max(int(dataset.lengths[row].sum()) for row in rows))
    input_ids, labels = np.full(shape, pad_token_id, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    for b, row in enumerate(rows):
        end = 0
        for index in row.tolist():
            sample = dataset.sample(index)
            start, end = end, end + len(sample.input_ids)
            input_ids[b, start:end] = sample.input_ids
            labels[b, start:end] = sample.labels
            position_ids[b, start:end] = np.arange(end - start)
        position_ids[b, end:] = np.arange(shape[1] - end)
    arrays = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def padded_batch(dataset: TokenizedDataset, rows: Sequence[Row], pad_token_id: int) -> Batch:
    """Return `input_ids`, `labels`, `attention_mask` [B, S] int64 of rows of one sample, padded on the right."""
    batch = packed_batch(dataset, rows, pad_token_id)
    del batch["position_ids"]
    lengths = torch.from_numpy(dataset.lengths[np.concatenate(rows)])
    batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]).long()
    return batch
