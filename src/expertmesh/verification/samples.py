"""What a verification computes on: a few steps of the run's own samples, small enough for the tokens allowed.

The sharded job gets its batches from the product's own loader, packed or padded as the run says; the reference gets
each sample alone, so that a mistake in packing, padding or dealing rows to ranks shows. Every rank makes the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertmesh.config import Config
from expertmesh.config.errors import InputError
from expertmesh.data import IGNORE, BatchLayout, Sample, Step, TokenizedDataset, TrainingBatches
from expertmesh.distributed.layout import Layout
from expertmesh.step.objective import Objective
from expertmesh.training.objective import RunObjective

LEAST_LENGTH = 16


@dataclass(frozen=True, slots=True)
class PlacedSample:
    """Sample `index` and where the sharded job has it: row `row` of micro-batch `micro`, from position `start`."""

    index: int
    input_ids: Tensor
    labels: Tensor
    micro: int
    row: int
    start: int

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class StepData:
    """The samples of one optimizer step, and the `form` of its rows (whatever data rank that is for); `beta` is that of
    objective dpo, whose samples are pairs.
    """

    dataset: TokenizedDataset
    form: BatchLayout
    beta: float | None = None

    @property
    def targets(self) -> int:
        """Counted here once more: labels but for each sample's first."""
        return sum(int((self.dataset.sample(i).labels[1:] != IGNORE).sum()) for i in range(len(self.dataset)))

    @property
    def rows(self) -> Sequence[np.ndarray]:
        """The samples of each row of the whole step."""
        return self.form.plan(self.dataset, np.arange(len(self.dataset) // self.dataset.samples_per_row)).rows

    @property
    def share(self) -> float:
        """What the loss of one target counts in that of the step; with dpo at most."""
        return 1 / self.targets if self.beta is None else self.beta / len(self.rows)

    def objective(self, step: Step) -> Objective:
        """What the job minimises in `step`, which is one of these samples."""
        return RunObjective(self.beta).over(rows=step.rows, target_tokens=step.target_tokens)

    def batches(self, layout: Layout, rank: int, **changes: Any) -> Step:
        """The step as the data rank of `rank` trains on it, by the product's loader; `changes` are to its `form`."""
        form = replace(self.form, data_rank=layout.data_rank(rank), data_ranks=layout.data_ranks, **changes)
        per_pass = form.micro_batch_size * form.data_ranks
        rows = len(self.dataset) // self.dataset.samples_per_row  # at most so many, packed or not
        size = -(-rows // per_pass) * per_pass
        return next(TrainingBatches(self.dataset, form, global_batch_size=size, shuffle=False, seed=0).epoch(0))

    def placed(self, layout: Layout, rank: int) -> list[PlacedSample]:
        """The samples of the data rank of `rank`, in the order of its micro-batches."""
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
        """A multiple of so many rows, each of one sample (or pair), beginning again where there are too few."""
        each = multiple * self.dataset.samples_per_row
        indices = np.arange(-(-len(self.dataset) // each) * each) % len(self.dataset)
        samples = [self.dataset.sample(index) for index in indices.tolist()]
        kept = [(sample.input_ids, sample.labels != IGNORE) for sample in samples]
        return replace(self, dataset=_like(self.dataset, indices, kept), form=replace(self.form, packing=False))

    def uneven(self) -> "StepData":
        """The same tokens with very uneven numbers of targets: sample i keeps the first (1 + i mod 4) / 4 of them."""
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
    """`steps` steps of about `tokens` tokens, from the samples that the run trains on first, in its order.

    A step has the run's rows, but at most two micro-batches per rank (times pp, so that a pipeline runs in the schedule
    of the run and has something to do between filling and emptying), cut to what the tokens allow and to no less than
    `LEAST_LENGTH`; of a long sample the part that ends with its last target stays. A small data set is used again. With
    objective dpo a row is a pair.
    """
    train, packing, each = config.train, config.data.packing, dataset.samples_per_row
    beta = config.objective.beta if config.objective.name == "dpo" else None
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
        while len(chosen) < (16 * rows if packing else rows * each):
            cut = _cut(next(samples), longest)
            if packing and sum(len(ids) for ids, _ in chosen) + len(cut[0]) > rows * length:
                break
            chosen.append(cut)
        step = StepData(_dataset(chosen, each), form, beta)
        while packing and len(step.rows) > rows:  # what is left free at the ends of rows adds up to one more
            chosen.pop()
            step = replace(step, dataset=_dataset(chosen))
        made.append(step)
    return made


def random_dataset(vocab_size: int, length: int, samples: int, seed: int) -> TokenizedDataset:
    """Token ids drawn at random, of different lengths, all of them targets but the first quarter of each sample."""
    generator = np.random.default_rng(seed)
    ids = [generator.integers(vocab_size, size=max(4, length - 3 * n % (length // 2))) for n in range(samples)]
    targets = [np.arange(len(each)) >= len(each) // 4 for each in ids]
    return TokenizedDataset.of_samples([each.astype(np.int32) for each in ids], targets)


def _endless(dataset: TokenizedDataset, order: np.ndarray) -> Iterator[Sample]:
    """The samples of the rows `order`, again and again."""
    if not len(dataset):
        raise InputError("the training data has no sample to verify on; correct data.train", key="data.empty")
    each = dataset.samples_per_row
    while True:
        for index in order.tolist():
            yield from (dataset.sample(index * each + place) for place in range(each))


def _cut(sample: Sample, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and targets of at most `longest` tokens that end with the last target."""
    targets = sample.labels != IGNORE
    stop = len(targets) if len(targets) <= longest else int(targets.nonzero()[0][-1]) + 1
    part = slice(max(0, stop - longest), max(stop, min(longest, len(targets))))
    ids, kept = sample.input_ids[part], targets[part].copy()
    kept[0] = False
    return ids, kept


def _dataset(samples: Sequence[tuple[np.ndarray, np.ndarray]], samples_per_row: int = 1) -> TokenizedDataset:
    ids, targets = [ids.astype(np.int32) for ids, _ in samples], [targets for _, targets in samples]
    return TokenizedDataset.of_samples(ids, targets, samples_per_row=samples_per_row)


def _like(
    dataset: TokenizedDataset, indices: np.ndarray, samples: Sequence[tuple[np.ndarray, np.ndarray]]
) -> TokenizedDataset:
    """`samples`, made of those of `dataset` that `indices` say, with their reference."""
    made = _dataset(samples, dataset.samples_per_row)
    made.reference = None if dataset.reference is None else dataset.reference[indices]
    return made
