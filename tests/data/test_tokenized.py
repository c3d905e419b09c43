"""The compact data set gives back what was put in, with labels that nothing can be wrong about."""

import numpy as np
import pytest

from expertmesh.data.sources import SourceFile
from expertmesh.data.tokenized import TokenizedDataset


def dataset_of(*samples: tuple[list[int], list[int]]) -> TokenizedDataset:
    """Samples as (ids, targets as 0 and 1), from two files."""
    files = [SourceFile("a.jsonl", by_line=True), SourceFile("b.parquet", by_line=False)]
    return TokenizedDataset.of_samples(
        [np.array(ids, dtype=np.int32) for ids, _ in samples],
        [np.array(targets, dtype=np.bool_) for _, targets in samples],
        files=files,
        file_of=[i % 2 for i in range(len(samples))],
        rows=[10 + i for i in range(len(samples))],
    )


def random_dataset(samples_per_row: int = 1, rows: int = 3000) -> TokenizedDataset:
    random = np.random.default_rng(7)
    ids = [
        random.integers(1, 99, size=length).astype(np.int32)
        for length in random.integers(2, 60, size=rows * samples_per_row).tolist()
    ]
    return TokenizedDataset.of_samples(
        ids, [np.arange(len(each)) >= len(each) // 2 for each in ids], samples_per_row=samples_per_row
    )


def test_samples_come_back_with_labels_outside_targets_ignored() -> None:
    dataset = dataset_of(([5, 6, 7], [0, 1, 0]), ([8, 9], [0, 1]))
    assert len(dataset) == 2
    assert dataset.sample(0).input_ids.tolist() == [5, 6, 7]
    assert dataset.sample(0).labels.tolist() == [-100, 6, -100]
    assert dataset.sample(1).labels.tolist() == [-100, 9]
    assert dataset.sample(1).input_ids.dtype == dataset.sample(1).labels.dtype == np.int64


def test_first_token_is_never_a_target() -> None:
    dataset = dataset_of(([5, 6, 7], [1, 1, 1]), ([8, 9], [1, 1]))
    assert dataset.sample(0).labels.tolist() == [-100, 6, 7]
    assert dataset.sample(1).labels.tolist() == [-100, 9]
    assert dataset.target_counts.tolist() == [2, 1]
    assert dataset.target_tokens == 3
    assert dataset.tokens == 5


def test_every_sample_knows_its_file_and_line() -> None:
    dataset = dataset_of(([1, 2], [0, 1]), ([3, 4], [0, 1]))
    assert dataset.position(0) == "a.jsonl:10"
    assert dataset.position(1) == "b.parquet:row 11"


@pytest.mark.parametrize(("samples_per_row", "sha256"), [(1, "5ba2acf5c2982cfa"), (2, "90c8dfecf5f8f2d1")])
def test_hash_of_the_data_is_the_one_that_older_checkpoints_hold(samples_per_row: int, sha256: str) -> None:
    assert random_dataset(samples_per_row).sha256().startswith(sha256)
