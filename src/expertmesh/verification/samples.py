"""Choose the data of a verification: a few steps of the run's samples, small enough for the allowed tokens.

The sharded job gets its batches from the training data loader, packed or padded as configured. The reference gets each
sample by itself, so an error in packing, padding or the distribution of rows to ranks becomes visible. Every rank makes
the same steps; nothing here communicates.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertmesh.config import Config, ObjectiveConfig
from expertmesh.config.errors import InputError
from expertmesh.data import IGNORE, BatchLayout, Sample, Step, TokenizedDataset, TrainingBatches
from expertmesh.distributed.layout import Layout
from expertmesh.step.objective import Objective
from expertmesh.step.objectives import objective_of

LEAST_LENGTH = 16


@dataclass(frozen=True, slots=True)
class PlacedSample:
    """A sample and its place in the batches of the sharded job."""

    index: int
    """The number of the sample in its data set."""
    input_ids: Tensor
    """The token ids, `[tokens]`."""
    labels: Tensor
    """The labels, `[tokens]`."""
    micro: int
    """The number of its micro-batch."""
    row: int
    """The number of its row in the micro-batch."""
    start: int
    """The position of its first token in the row."""

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class StepData:
    """The samples of one optimizer step."""

    dataset: TokenizedDataset
    """The samples."""
    form: BatchLayout
    """The shape of the step's rows and micro-batches; its data rank has no meaning."""
    minimised: ObjectiveConfig
    """The objective; with one of pairs, so are the samples."""

    @property
    def mismatched(self) -> "StepData | None":
        """The mismatched rows of the step (`Step.mismatched`), for kto."""
        if self.dataset.desirable is None:
            return None
        every = np.arange(len(self.dataset))
        return replace(self, dataset=self.form.mismatched(self.dataset, [every], self.dataset.mismatched_reference))

    @property
    def targets(self) -> int:
        """The number of targets: all labels but the first of each sample. Counted independently of the data loader."""
        return sum(int((self.dataset.sample(i).labels[1:] != IGNORE).sum()) for i in range(len(self.dataset)))

    @property
    def rows(self) -> Sequence[np.ndarray]:
        """The numbers of the samples in each row, for all data ranks."""
        return self.form.plan(self.dataset, np.arange(len(self.dataset) // self.dataset.samples_per_row)).rows

    def objective(self, step: Step) -> Objective:
        """Return the objective that the job minimises in `step`, made of these samples."""
        return objective_of(self.minimised, rows=step.rows, target_tokens=step.target_tokens)

    def batches(self, layout: Layout, rank: int, **changes: Any) -> Step:
        """Return the step of the data rank of `rank`, from the training data loader.

        Args:
            layout: The layout of the job.
            rank: A rank of the job; ranks of one data rank get the same step.
            changes: Fields of `form` to replace.
        """
        form = replace(self.form, data_rank=layout.data_rank(rank), data_ranks=layout.data_ranks, **changes)
        per_pass = form.micro_batch_size * form.data_ranks
        rows = len(self.dataset) // self.dataset.samples_per_row  # an upper bound, packed or not
        size = -(-rows // per_pass) * per_pass
        return next(TrainingBatches(self.dataset, form, global_batch_size=size, shuffle=False, seed=0).epoch(0))

    def placed(self, layout: Layout, rank: int) -> list[PlacedSample]:
        """Return the samples of the data rank of `rank`, in the order of its micro-batches."""
        found = []
        for number, samples in enumerate(self.rows[layout.data_rank(rank) :: layout.data_ranks]):
            micro, row = divmod(number, self.form.micro_batch_size)
            start = 0
            for place, index in enumerate(samples.tolist()):
                sample = self.dataset.sample(index)
                ids, labels = torch.from_numpy(sample.input_ids), torch.from_numpy(sample.labels)
                of_batch = row if self.form.packing else row * len(samples) + place
                found.append(PlacedSample(index, ids, labels, micro, of_batch, start))
                start += len(ids) if self.form.packing else 0
        return found

    def repeated(self, multiple: int) -> "StepData":
        """Return the step with samples repeated to a multiple of `multiple` rows, one sample (or pair) a row."""
        each = multiple * self.dataset.samples_per_row
        indices = np.arange(-(-len(self.dataset) // each) * each) % len(self.dataset)
        samples = [self.dataset.sample(index) for index in indices.tolist()]
        kept = [(sample.input_ids, sample.labels != IGNORE) for sample in samples]
        return replace(self, dataset=_like(self.dataset, indices, kept), form=replace(self.form, packing=False))

    def uneven(self) -> "StepData":
        """Return the step with uneven numbers of targets: sample i keeps the first (1 + i mod 4) / 4 of its targets."""
        samples = [self.dataset.sample(index) for index in range(len(self.dataset))]
        kept = []
        for number, sample in enumerate(samples):
            places = (sample.labels != IGNORE).nonzero()[0]
            wanted = np.zeros(len(sample.labels), dtype=np.bool_)
            wanted[places[: max(1, len(places) * (1 + number % 4) // 4)]] = True
            kept.append((sample.input_ids, wanted))
        return replace(self, dataset=_like(self.dataset, np.arange(len(kept)), kept))


def steps_of(
    dataset: TokenizedDataset, config: Config, layout: Layout, *, tokens: int, steps: int, pad_token_id: int
) -> list[StepData]:
    """Return `steps` steps of about `tokens` tokens each, from the first samples of the run, in its order.

    A step has as many rows as a step of the run, but at most two micro-batches per rank (times pp, so that a pipeline
    uses the run's schedule and has micro-batches between filling and draining). Samples are cut to fit `tokens`, but
    not below `LEAST_LENGTH`; a long sample keeps the part that ends with its last target. The samples of a small data
    set repeat. With an objective of pairs a row is a pair.

    Args:
        tokens: Tokens of one step over all ranks.
        pad_token_id: For padding of rows.

    Raises:
        InputError: If the data set is empty.
    """
    train, packing, each = config.train, config.data.packing, dataset.samples_per_row
    per_pass = train.micro_batch_size * layout.data_ranks
    rows = per_pass * min(2 * layout.pp, train.global_batch_size // per_pass)
    length = min(config.data.max_length, max(LEAST_LENGTH, tokens // (rows * each)))
    longest = max(LEAST_LENGTH // 2, length // 2) if packing else length
    order = np.arange(len(dataset) // each)
    if config.data.shuffle:
        order = np.random.default_rng([train.seed, 0]).permutation(len(order))
    samples = _endless(dataset, order)
    form, made = BatchLayout(train.micro_batch_size, 0, 1, packing, pad_token_id, length), []
    for _ in range(steps):
        chosen: list[tuple[np.ndarray, np.ndarray]] = []
        labels: list[bool] = []
        while len(chosen) < (16 * rows if packing else rows * each):
            index = next(samples)
            cut = _cut(dataset.sample(index), longest)
            labels += [bool(dataset.desirable[index])] if dataset.desirable is not None else []
            if packing and sum(len(ids) for ids, _ in chosen) + len(cut[0]) > rows * length:
                break
            chosen.append(cut)
        step = StepData(_dataset(chosen, each, labels), form, config.objective)
        while packing and len(step.rows) > rows:  # free positions at the ends of rows can add up to one more row
            chosen.pop()
            step = replace(step, dataset=_dataset(chosen))
        made.append(step)
    return made


def random_dataset(vocab_size: int, length: int, samples: int, seed: int) -> TokenizedDataset:
    """Return samples of random token ids and different lengths; all tokens but each first quarter are targets."""
    generator = np.random.default_rng(seed)
    ids = [generator.integers(vocab_size, size=max(4, length - 3 * n % (length // 2))) for n in range(samples)]
    targets = [np.arange(len(each)) >= len(each) // 4 for each in ids]
    return TokenizedDataset.of_samples([each.astype(np.int32) for each in ids], targets)


def _endless(dataset: TokenizedDataset, order: np.ndarray) -> Iterator[int]:
    """Yield the numbers of the samples of the rows `order` in an endless loop. Raises `InputError` for an empty data
    set.
    """
    if not len(dataset):
        raise InputError("the training data has no sample to verify on; correct data.train", key="data.empty")
    each = dataset.samples_per_row
    while True:
        for index in order.tolist():
            yield from range(index * each, (index + 1) * each)


def _cut(sample: Sample, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and target mask of at most `longest` tokens that end with the last target, if the sample is longer."""
    targets = sample.labels != IGNORE
    stop = len(targets) if len(targets) <= longest else int(targets.nonzero()[0][-1]) + 1
    part = slice(max(0, stop - longest), max(stop, min(longest, len(targets))))
    ids, kept = sample.input_ids[part], targets[part].copy()
    kept[0] = False
    return ids, kept


def _dataset(
    samples: Sequence[tuple[np.ndarray, np.ndarray]], samples_per_row: int = 1, desirable: Sequence[bool] = ()
) -> TokenizedDataset:
    ids, targets = [ids.astype(np.int32) for ids, _ in samples], [targets for _, targets in samples]
    facts = {"desirable": desirable, "judged": len(desirable) > 0}
    return TokenizedDataset.of_samples(ids, targets, samples_per_row=samples_per_row, **facts)


def _like(
    dataset: TokenizedDataset, indices: np.ndarray, samples: Sequence[tuple[np.ndarray, np.ndarray]]
) -> TokenizedDataset:
    """Return a data set of `samples`, made of the samples `indices` of `dataset`, with their labels and references."""
    labels = () if dataset.desirable is None else dataset.desirable[indices].tolist()
    made = _dataset(samples, dataset.samples_per_row, labels)
    made.reference = None if dataset.reference is None else dataset.reference[indices]
    if dataset.mismatched_reference is not None:
        made.mismatched_reference = dataset.mismatched_reference[indices]
    return made
