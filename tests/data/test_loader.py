"""Every row of an epoch is trained on exactly once, in the order (seed, epoch) gives, whatever the layout."""

import hashlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from expertmesh.data import BatchLayout, EvaluationBatches, Step, TokenizedDataset, TrainingBatches, padding_token_id
from expertmesh.data.loader import accumulation_of
from tests.data.test_tokenized import random_dataset
from tests.data.tokenizers_on_the_fly import bpe_tokenizer
from tests.support.errors import refused

ROWS = 37
LAYOUTS = [(ranks, micro) for ranks in (1, 2, 4) for micro in (1, 2)]


@pytest.fixture
def dataset() -> TokenizedDataset:
    """Sample i holds the ids 100+i, 200+i, ...: every id tells its sample. The last two are targets."""
    ids = [np.arange(1, 4 + i % 7, dtype=np.int32) * 100 + i for i in range(ROWS)]
    targets = [np.arange(len(row)) >= len(row) - 2 for row in ids]
    return TokenizedDataset.of_samples(ids, targets)


def batches(dataset: TokenizedDataset, rank: int = 0, ranks: int = 1, **changes: Any) -> TrainingBatches:
    steps: dict[str, Any] = {"global_batch_size": 8, "shuffle": False, "seed": 42}
    steps |= {name: changes.pop(name) for name in steps if name in changes}
    layout: dict[str, Any] = {"micro_batch_size": 1, "packing": False, "pad_token_id": 0, "max_length": 16, **changes}
    return TrainingBatches(dataset, BatchLayout(data_rank=rank, data_ranks=ranks, **layout), **steps)


def steps_of_all_ranks(dataset: TokenizedDataset, epoch: int, ranks: int, **changes: Any) -> list[tuple[Step, ...]]:
    per_rank = [list(batches(dataset, rank, ranks, **changes).epoch(epoch)) for rank in range(ranks)]
    return list(zip(*per_rank, strict=True))


def trained(steps: tuple[Step, ...]) -> Counter[int]:
    """How often each sample has its two labels in one step, over all ranks."""
    counts: Counter[int] = Counter()
    for step in steps:
        for batch in step.micro_batches:
            labels = batch["labels"]
            counts.update((labels[labels != -100] % 100).tolist())
    return Counter({sample: n // 2 for sample, n in counts.items()})


@pytest.mark.parametrize(("ranks", "micro"), LAYOUTS)
def test_without_shuffling_and_packing_step_s_holds_rows_in_file_order(
    dataset: TokenizedDataset, ranks: int, micro: int
) -> None:
    steps = steps_of_all_ranks(dataset, 0, ranks, micro_batch_size=micro)
    assert len(steps) == batches(dataset).steps_per_epoch == 5
    for s, step in enumerate(steps):
        assert trained(step) == Counter(range(s * 8, min(s * 8 + 8, ROWS)))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("ranks", "micro"), LAYOUTS)
def test_shuffled_epoch_trains_every_row_once_in_the_same_steps_for_every_layout(
    dataset: TokenizedDataset, ranks: int, micro: int, packing: bool
) -> None:
    settings = {"shuffle": True, "packing": packing, "global_batch_size": 8}
    steps = steps_of_all_ranks(dataset, 1, ranks, micro_batch_size=micro, **settings)
    assert sum((trained(step) for step in steps), Counter()) == Counter(range(ROWS))
    reference = steps_of_all_ranks(dataset, 1, 1, **settings)
    assert [trained(step) for step in steps] == [trained(step) for step in reference]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("ranks", "micro"), LAYOUTS)
def test_all_ranks_have_equally_many_micro_batches_and_know_the_global_counts(
    dataset: TokenizedDataset, ranks: int, micro: int, packing: bool
) -> None:
    for step in steps_of_all_ranks(dataset, 0, ranks, micro_batch_size=micro, packing=packing):
        assert len({len(rank.micro_batches) for rank in step}) == 1
        labels = [batch["labels"] for rank in step for batch in rank.micro_batches]
        targets = sum(int((label != -100).sum()) for label in labels)
        assert {rank.target_tokens for rank in step} == {targets}
        assert len({(rank.rows, rank.tokens) for rank in step}) == 1
    full = batches(dataset, 0, ranks, micro_batch_size=micro)
    assert full.accumulation == 8 // (ranks * micro) == len(next(full.epoch(0)).micro_batches)


def test_rank_without_rows_repeats_a_real_row_without_targets(dataset: TokenizedDataset) -> None:
    last = steps_of_all_ranks(dataset, 0, 8)[-1]  # 37 rows in steps of 8: five rows for eight ranks
    assert [int((rank.micro_batches[0]["labels"] != -100).sum()) for rank in last] == [2] * 5 + [0] * 3
    for rank in last[5:]:
        (batch,) = rank.micro_batches
        assert torch.equal(batch["input_ids"], last[0].micro_batches[0]["input_ids"])
        assert batch["attention_mask"].all()


def test_epochs_and_seeds_differ_and_repeat(dataset: TokenizedDataset) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        plan = batches(dataset, shuffle=True, seed=seed).plan(epoch)
        return np.concatenate(plan.rows).tolist()

    assert order(42, 0) == order(42, 0)
    assert len({tuple(order(*key)) for key in [(42, 0), (42, 1), (43, 0), (0, 42)]}) == 4


ORDERS = {  # (samples per row, packing, shuffle): as they were when checkpoints that are still resumed were written
    (1, False, False): "c11cd10fb1e59063",
    (1, False, True): "989996be5e3a4543",
    (1, True, False): "fe3b01294f443e22",
    (1, True, True): "70fce2fe5bdb202b",
    (2, False, False): "d3a3f08af7aa9a96",
    (2, False, True): "5d92f0b8cc6c723b",
}


@pytest.mark.parametrize(("samples_per_row", "packing", "shuffle"), ORDERS)
def test_order_of_an_epoch_is_that_of_older_versions(samples_per_row: int, packing: bool, shuffle: bool) -> None:
    layout = BatchLayout(2, 0, 2, packing, pad_token_id=0, max_length=64)
    data = random_dataset(samples_per_row)
    rows = TrainingBatches(data, layout, global_batch_size=8, shuffle=shuffle, seed=42).plan(1).rows
    text = "|".join(",".join(map(str, row.tolist())) for row in rows)
    found = hashlib.sha256(text.encode()).hexdigest()
    assert found.startswith(ORDERS[samples_per_row, packing, shuffle])


@pytest.mark.parametrize("packing", [False, True])
def test_epoch_can_start_at_any_step(dataset: TokenizedDataset, packing: bool) -> None:
    loader = batches(dataset, 1, 2, shuffle=True, packing=packing, global_batch_size=4)
    whole = list(loader.epoch(3))
    for start in range(len(whole) + 1):
        rest = list(loader.epoch(3, start_step=start))
        assert [step.progress for step in rest] == [step.progress for step in whole[start:]]
        for ours, theirs in zip(rest, whole[start:], strict=True):
            for a, b in zip(ours.micro_batches, theirs.micro_batches, strict=True):
                assert all(torch.equal(a[key], b[key]) for key in b)


def test_total_steps_counts_each_epoch_as_it_is_packed(dataset: TokenizedDataset) -> None:
    loader = batches(dataset, shuffle=True, packing=True, global_batch_size=2, max_length=10)
    rows = [len(loader.plan(epoch).rows) for epoch in range(6)]
    assert len(set(rows)) > 1, "the epochs should be packed differently"
    assert [sum(step.rows for step in loader.epoch(epoch)) for epoch in range(6)] == rows
    assert loader.total_steps(6) == sum(-(-count // 2) for count in rows)


def test_unpacked_micro_batch_is_as_wide_as_its_longest_row(dataset: TokenizedDataset) -> None:
    step = next(batches(dataset, micro_batch_size=2).epoch(0))
    assert [batch["input_ids"].shape[1] for batch in step.micro_batches] == [4, 6, 8, 9]


def test_batch_size_that_does_not_divide_names_the_nearest_valid_ones() -> None:
    assert accumulation_of(64, 2, 8) == 4
    with refused("config.combination", naming="is 48 or 64."):
        accumulation_of(60, 2, 8)
    with refused("config.combination", naming="is 16."):
        accumulation_of(4, 2, 8)


def test_no_rows_is_refused() -> None:
    empty = TokenizedDataset.of_samples([], [])
    with refused("data.empty", naming="data.train"):
        batches(empty)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (2, 3), (4, 2), (8, 4)])
def test_evaluation_sees_every_row_once_with_equally_many_batches_per_rank(
    dataset: TokenizedDataset, ranks: int, micro: int, packing: bool
) -> None:
    per_rank = [
        EvaluationBatches(dataset, BatchLayout(micro, rank, ranks, packing, pad_token_id=0, max_length=16))
        for rank in range(ranks)
    ]
    lists = [list(evaluation) for evaluation in per_rank]
    assert {len(batch_list) for batch_list in lists} == {len(evaluation) for evaluation in per_rank}
    labels = torch.cat([batch["labels"].flatten() for batch_list in lists for batch in batch_list])
    labels = labels[labels != -100]
    assert len(labels) == per_rank[0].target_tokens == 2 * ROWS
    assert Counter((labels % 100).tolist()) == Counter({sample: 2 for sample in range(ROWS)})


def test_padding_id_is_one_the_model_has() -> None:
    tokenizer = bpe_tokenizer()
    assert padding_token_id(tokenizer, 706) == tokenizer.pad_token_id == 702
    assert padding_token_id(tokenizer, 702) == tokenizer.eos_token_id == 701
    assert padding_token_id(tokenizer, 700) == 0
