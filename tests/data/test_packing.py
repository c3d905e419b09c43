"""Packing loses nothing, splits nothing and always comes out the same."""

import numpy as np
import pytest
import torch

from expertmesh.data.loader import pack, packed_batch, padded_batch
from tests.data.test_tokenized import dataset_of


def test_every_sample_is_packed_once_and_no_row_overflows() -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 101, size=2000)
    order = generator.permutation(2000)
    packed = pack(lengths, order, 100)
    assert sorted(np.concatenate(packed.rows).tolist()) == list(range(2000))
    sums = [int(lengths[row].sum()) for row in packed.rows]
    assert max(sums) <= 100
    assert packed.fill == pytest.approx(sum(sums) / (100 * len(sums)))
    assert packed.fill > 0.95


def test_tightest_row_with_room_is_taken() -> None:
    packed = pack(np.array([6, 7, 3, 2, 4, 6]), np.arange(6), 10)
    assert [row.tolist() for row in packed.rows] == [[0, 3], [1, 2], [4, 5]]


def test_fullest_row_is_closed_when_too_many_are_open() -> None:
    packed = pack(np.array([6, 7, 8, 4, 3]), np.arange(5), 10, open_rows=2)
    # 7 leaves the least room when 8 needs a row, so 3 finds no place beside it
    assert [row.tolist() for row in packed.rows] == [[0, 3], [1], [2], [4]]


def test_neighbours_stay_together() -> None:
    lengths = np.random.default_rng(1).integers(1, 60, size=5000)
    packed = pack(lengths, np.arange(5000), 100)
    spread = [int(row.max() - row.min()) for row in packed.rows]
    assert np.median(spread) < 300


def test_same_order_gives_the_same_rows() -> None:
    lengths = np.random.default_rng(2).integers(1, 50, size=500)
    order = np.random.default_rng(3).permutation(500)
    first, second = pack(lengths, order, 64), pack(lengths, order, 64)
    assert [row.tolist() for row in first.rows] == [row.tolist() for row in second.rows]


def test_packed_row_restarts_positions_and_hides_each_first_label() -> None:
    dataset = dataset_of(([1, 2, 3], [1, 1, 1]), ([4, 5], [1, 1]), ([6, 7], [1, 1]))
    batch = packed_batch(dataset, [np.array([0, 1]), np.array([2])], pad_token_id=9)
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [6, 7, 9, 9, 9]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 5], [-100, 7, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_unpacked_rows_are_padded_on_the_right_under_a_mask() -> None:
    dataset = dataset_of(([1, 2, 3], [0, 1, 1]), ([4, 5], [0, 1]))
    batch = padded_batch(dataset, [np.array([1]), np.array([0])], pad_token_id=9)
    assert set(batch) == {"input_ids", "labels", "attention_mask"}
    assert batch["input_ids"].tolist() == [[4, 5, 9], [1, 2, 3]]
    assert batch["labels"].tolist() == [[-100, 5, -100], [-100, 2, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
