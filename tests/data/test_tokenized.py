"""The compact data set gives back what was put in, with labels that nothing can be wrong about."""

import numpy as np

from expertmesh.data.sources import SourceFile
from expertmesh.data.tokenized import TokenizedDataset, check_vocabulary
from tests.support.errors import refused


def dataset_of(*samples: tuple[list[int], list[int]]) -> TokenizedDataset:
    """Samples as (ids, targets as 0 and 1), from two files."""
    files = [SourceFile("a.jsonl", by_line=True), SourceFile("b.parquet", by_line=False)]
    return TokenizedDataset(
        [np.array(ids, dtype=np.int32) for ids, _ in samples],
        [np.array(targets, dtype=np.bool_) for _, targets in samples],
        files=files,
        file_of=[i % 2 for i in range(len(samples))],
        rows=[10 + i for i in range(len(samples))],
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


def test_token_id_without_embedding_is_refused_with_its_line() -> None:
    dataset = dataset_of(([1, 2], [0, 1]), ([3, 9], [0, 1]), ([4, 5], [0, 1]))
    check_vocabulary(dataset, 10)
    with refused("data.unknown-token-id", naming="b.parquet:row 11: contains token id 9"):
        check_vocabulary(dataset, 9)
