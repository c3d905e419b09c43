"""How sources make up an epoch: repeated, or drawn by weight, the same for every layout and every start."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertmesh.config import DataConfig
from expertmesh.config.errors import InputError
from expertmesh.data import BatchLayout, Mixture, Recipe, TrainingBatches, build_dataset
from tests.data.test_build import VOCABULARY, write
from tests.data.tokenizers_on_the_fly import bpe_tokenizer
from tests.support.errors import refused

A, B = 600, 100


def sources(tmp_path: Path, first: dict[str, Any], second: dict[str, Any], **options: Any) -> DataConfig:
    paths = [
        write(tmp_path / f"{name}.jsonl", [{"text": f"{name} {i}"} for i in range(rows)])
        for name, rows in (("a", A), ("b", B))
    ]
    train = [{"path": str(path), **keys} for path, keys in zip(paths, (first, second), strict=True)]
    return DataConfig(train=train, **options)


def epochs(config: DataConfig, seed: int = 1, packing: bool = False) -> tuple[list[list[int]], list[str]]:
    dataset, report = build_dataset(Recipe(config.train, config, bpe_tokenizer(), model_vocab_size=VOCABULARY))
    mixture = Mixture.of(config.train, report, dataset.samples_per_row)
    layout = BatchLayout(1, 0, 1, packing, pad_token_id=0, max_length=64)
    batches = TrainingBatches(dataset, layout, global_batch_size=8, shuffle=config.shuffle, seed=seed, mixture=mixture)
    return [np.concatenate(batches.plan(epoch).rows).tolist() for epoch in range(4)], report.lines()


def test_repeated_sources_have_each_row_so_often_in_every_epoch(tmp_path: Path) -> None:
    config = sources(tmp_path, {}, {"repeat": 3})
    for order in (*epochs(config)[0], *epochs(config, packing=True)[0]):
        assert Counter(order) == {row: 1 if row < A else 3 for row in range(A + B)}
    ordered, lines = epochs(config.model_copy(update={"shuffle": False}))
    assert ordered[0] == [*range(A), *range(A, A + B), *range(A, A + B), *range(A, A + B)]
    assert lines[1].endswith("; 3 times in an epoch")


def test_weights_are_probabilities_whatever_the_sizes_of_sources(tmp_path: Path) -> None:
    orders, lines = epochs(sources(tmp_path, {"weight": 1.0}, {"weight": 3.0}))
    seen: Counter[int] = Counter()
    for order in orders:
        assert len(order) == A + B
        assert sum(row >= A for row in order) == 525
        assert 0.6 < np.mean([row >= A for row in order[:200]]) < 0.9  # all along the epoch
        seen.update(order)
    # The rows of a source are through before one comes again: 4 · 175 of 600, 4 · 525 of 100.
    assert set(map(seen.__getitem__, range(A))) == {1, 2}
    assert set(map(seen.__getitem__, range(A, A + B))) == {21}
    assert orders[0] != orders[1]
    assert "; 175 rows of an epoch, by its weight" in lines[0]
    assert "; 525 rows of an epoch, by its weight" in lines[1]


def test_the_order_is_a_function_of_seed_and_epoch(tmp_path: Path) -> None:
    config = sources(tmp_path, {"weight": 0.5}, {"weight": 0.5})
    first, _ = epochs(config)
    assert first == epochs(config)[0]
    assert first != epochs(config, seed=2)[0]
    _, report = build_dataset(Recipe(config.train, config, bpe_tokenizer(), model_vocab_size=VOCABULARY))
    mixture = Mixture.of(config.train, report, 1)
    assert mixture.order(1, 3, shuffle=True).tolist() == first[3]  # without the epochs before


def test_max_rows_takes_the_first_rows_over_files(tmp_path: Path) -> None:
    directory = tmp_path / "rows"
    directory.mkdir()
    for name in "abc":
        (directory / f"{name}.jsonl").write_text("".join(f'{{"text": "{name} {i}"}}\n\n' for i in range(10)))
    config = DataConfig(train=[{"path": str(directory), "max_rows": 14}])  # type: ignore[list-item]
    dataset, report = build_dataset(Recipe(config.train, config, bpe_tokenizer(), model_vocab_size=VOCABULARY))
    assert (report.rows, report.sources[0].files) == (14, 2)
    assert dataset.position(13) == f"{directory}/b.jsonl:7"


@pytest.mark.parametrize(
    ("first", "second", "options", "said"),
    [
        ({"weight": 1.0}, {}, {}, "data.train.1.weight is missing"),
        ({"weight": 1.0}, {"weight": 2.0}, {"shuffle": False}, "data.shuffle is false"),
        ({"weight": 1.0}, {"weight": 2.0, "repeat": 2}, {}, "data.train.1.repeat does nothing"),
        ({}, {}, {"eval": [{"path": "x", "repeat": 2}]}, "data.eval.0.repeat does nothing"),
        ({}, {}, {"eval": [{"path": "x", "weight": 2.0}]}, "data.eval.0.weight does nothing"),
    ],
)
def test_keys_that_would_do_nothing_are_refused(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        sources(tmp_path, first, second, **options)


def test_a_source_of_which_no_epoch_has_a_row_is_refused(tmp_path: Path) -> None:
    config = sources(tmp_path, {"weight": 0.9996}, {"weight": 0.0004})
    with refused("data.empty", naming="data.train.1.weight: 0.0004"):
        epochs(config)
