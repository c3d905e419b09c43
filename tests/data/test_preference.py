"""Preference rows become pairs of samples with TRL's tokens; what cannot be a pair is refused or counted by line."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from expertmesh.config import DataConfig, DataSource
from expertmesh.data import (
    BatchLayout,
    DataReport,
    EvaluationBatches,
    Recipe,
    TokenizedDataset,
    TrainingBatches,
    build_dataset,
)
from expertmesh.data.formats import PREFERENCE, MalformedRow, Preference, convert
from tests.data.test_build import VOCABULARY, write
from tests.data.tokenizers_on_the_fly import CHATML, STRIPS_EARLIER_THINKING, bpe_tokenizer
from tests.support.errors import refused

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def build(
    path: Path, rows: list[Any], template: str | None = CHATML, **data: Any
) -> tuple[TokenizedDataset, DataReport]:
    config = DataConfig(train=[DataSource(path=str(write(path / "pairs.jsonl", rows)))], **data)
    tokenizer = bpe_tokenizer(template)
    return build_dataset(Recipe(config.train, config, tokenizer, model_vocab_size=VOCABULARY, responses=PREFERENCE))


SHAPES: dict[str, list[dict[str, Any]]] = {
    "text": [{"prompt": f"What is {n}? ", "chosen": "one " * n, "rejected": f"two {n}"} for n in (1, 2, 3)],
    "text whose tokens merge": [{"prompt": "The number i", "chosen": "s one", "rejected": "n two"}],
    "text with the prompt in both": [{"chosen": "q: what? a: this", "rejected": "q: what? a: that and more"}],
    "messages": [{"prompt": [SYSTEM, USER], "chosen": [answer("yes")], "rejected": [answer("no, never")]}],
    "messages with the prompt in both": [
        {"chosen": [USER, answer("a"), USER, answer("yes")], "rejected": [USER, answer("a"), USER, answer("no")]}
    ],
    "several answers": [{"prompt": [USER], "chosen": [answer("a"), answer("b")], "rejected": [answer("c")]}],
}


@pytest.mark.parametrize("template", [CHATML, STRIPS_EARLIER_THINKING])
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_and_targets_are_trls(tmp_path: Path, shape: str, template: str) -> None:
    dataset, _ = build(tmp_path, SHAPES[shape], template)
    for row, (tokens, targets) in enumerate(_by_trl(SHAPES[shape], template)):
        sample = dataset.sample(row)
        assert sample.input_ids.tolist() == tokens
        assert (sample.labels != -100).tolist() == targets
    assert len(dataset) == 2 * len(SHAPES[shape])


def _by_trl(rows: list[dict[str, Any]], template: str) -> list[tuple[list[int], list[bool]]]:
    """TRL's own preparation: chosen and rejected of each row in turn."""
    trl = pytest.importorskip("trl", reason="the oldest versions are tested without TRL")
    tokenizer = bpe_tokenizer(template)
    trainer: Any = SimpleNamespace(_tokenizer=tokenizer)
    args: Any = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start")
    prepared = trl.DPOTrainer._prepare_dataset(trainer, Dataset.from_list(rows), tokenizer, args, "train")
    found = []
    for row in prepared:
        for key in ("chosen_ids", "rejected_ids"):
            found.append((row["prompt_ids"] + row[key], [False] * len(row["prompt_ids"]) + [True] * len(row[key])))
    return found


def test_a_question_that_stands_beside_the_conversations_as_text_is_taken_once() -> None:
    row = {"prompt": "q", "chosen": [USER, answer("yes")], "rejected": [USER, answer("no")]}
    assert convert(row, "preference") == Preference((USER,), (answer("yes"),), (answer("no"),))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "q", "chosen": "", "rejected": "b"}, "'chosen' is empty"),
        ({"prompt": " ", "chosen": "a", "rejected": "b"}, "'prompt' is empty"),
        ({"prompt": "q", "chosen": "a", "rejected": " \n"}, "'rejected' is empty"),
        ({"prompt": "q", "chosen": "a", "rejected": None}, "'rejected' is missing or null"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "'prompt' is a number, not a string"),
        ({"prompt": [USER], "chosen": "a", "rejected": "b"}, "'prompt' is a list, not a string"),
        ({"prompt": "q", "chosen": "a", "rejected": [answer("b")]}, "'chosen' is a string and 'rejected' a list"),
        ({"prompt": [USER], "chosen": [], "rejected": [answer("b")]}, "'chosen' is empty"),
        ({"prompt": [USER], "chosen": [answer("a")], "rejected": [answer("")]}, "'rejected' is empty"),
        (
            {"prompt": [USER], "chosen": [answer("a"), USER], "rejected": [answer("b")]},
            "'chosen' has a message of role",
        ),
        ({"prompt": [USER], "chosen": [answer("a"), 1], "rejected": [answer("b")]}, "'chosen' message 2 is a number"),
        ({"prompt": [], "chosen": [answer("a")], "rejected": [answer("b")]}, "the prompt has no message"),
        ({"prompt": [USER, answer("a")], "chosen": [answer("a")], "rejected": [answer("b")]}, "ends with an assistant"),
        ({"prompt": "q", "chosen": [answer("a")], "rejected": [answer("b")]}, "'prompt' is a string, but not the text"),
        ({"chosen": [USER, answer("a")], "rejected": [SYSTEM, answer("b")]}, "the prompt has no message"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "tools": [{}]}, "'tools', which is for chat templates"),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b", "chat_template_kwargs": {"x": 1}},
            "'chat_template_kwargs', which is for",
        ),
    ],
)
def test_rows_that_are_no_pair_say_why(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(MalformedRow, match=reason):
        convert(row, "preference")
    good = {"prompt": "q", "chosen": "a", "rejected": "b"}
    with refused("data.malformed-row", naming="pairs.jsonl:2: "):
        build(tmp_path, [good, row])


def test_each_pair_is_counted_under_what_became_of_it(tmp_path: Path) -> None:
    rows = [
        {"prompt": "q:", "chosen": "this", "rejected": "that"},
        {"prompt": "q:", "chosen": "this", "rejected": "this"},
        {"prompt": "The number i", "chosen": "s one", "rejected": "n two"},
        {"prompt": "q:", "chosen": "this", "rejected": "that " * 40},
        {"prompt": "q:" * 40, "chosen": "this", "rejected": "that"},
    ]
    dataset, report = build(tmp_path, rows, max_length=20)
    assert (report.rows, report.samples, report.cut, report.no_target, report.no_target_after_cut) == (5, 4, 1, 1, 1)
    assert report.no_target_at == [dataset.files[0].position(5)]
    assert any("in 1 pairs chosen and rejected response have the same tokens" in line for line in report.lines())
    assert sum(report.methods.values()) == 4
    assert report.methods["the first token that is not the prompt's, before its end"] == 1
    assert [dataset.position(sample).rpartition(":")[2] for sample in range(8)] == list("11223344")
    dropped, report = build(tmp_path, rows, max_length=20, on_overlong="drop")
    assert (len(dropped), report.samples, report.dropped) == (6, 3, 2)
    with refused("data.overlong-sample", naming="pairs.jsonl:4: "):
        build(tmp_path, rows, max_length=20, on_overlong="stop")


def test_rows_of_another_objective_are_refused(tmp_path: Path) -> None:
    with refused("data.other-objective", naming="pairs.jsonl:1: the row is of format text"):
        build(tmp_path, [{"text": "running"}])
    path = write(tmp_path / "a.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "b"}])
    config = DataConfig(train=[DataSource(path=str(path))])
    with refused("data.other-objective", naming="which only objective.name dpo, simpo, orpo or reward trains on"):
        build_dataset(Recipe(config.train, config, bpe_tokenizer(), model_vocab_size=VOCABULARY))
    mixed = write(tmp_path / "b.jsonl", [{"text": "t", "chosen": "a", "rejected": "b"}])
    config = DataConfig(train=[DataSource(path=str(mixed), columns={"rejected": None})])
    _, report = build_dataset(Recipe(config.train, config, bpe_tokenizer(), model_vocab_size=VOCABULARY))
    assert [(source.format, source.also_fits) for source in report.sources] == [("text", ())]


def test_the_format_of_all_sources_may_be_said_once(tmp_path: Path) -> None:
    _, report = build(tmp_path, [{"prompt": "q", "chosen": "a", "rejected": "b"}], format="preference")
    assert [(source.format, source.detected) for source in report.sources] == [("preference", False)]


def _pairs(count: int) -> TokenizedDataset:
    ids = [np.full(3 + sample % 5, sample, dtype=np.int32) for sample in range(2 * count)]
    return TokenizedDataset.of_samples(ids, [np.arange(len(each)) > 0 for each in ids], samples_per_row=2)


def _layout(rank: int, ranks: int) -> BatchLayout:
    return BatchLayout(
        micro_batch_size=2, data_rank=rank, data_ranks=ranks, packing=False, pad_token_id=0, max_length=16
    )


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_pairs_stay_together_and_each_is_trained_on_once(ranks: int, shuffle: bool) -> None:
    dataset = _pairs(13)
    dataset.reference = np.arange(26) / 2.0
    seen, numbers = [], []
    for rank in range(ranks):
        batches = TrainingBatches(dataset, _layout(rank, ranks), global_batch_size=12, shuffle=shuffle, seed=1)
        steps = list(batches.epoch(0))
        assert [step.rows for step in steps] == [12, 1]
        for batch in (batch for step in steps for batch in step.micro_batches):
            assert batch["row_numbers"].tolist()[1::2] == [n + 1 for n in batch["row_numbers"].tolist()[::2]]
            for row in range(0, len(batch["input_ids"]), 2):
                chosen, rejected = (int(batch["input_ids"][row + place, 0]) for place in (0, 1))
                assert rejected == chosen + 1
                assert batch["reference"][row : row + 2].tolist() == [chosen / 2, rejected / 2]
                real = (batch["labels"][row : row + 2] != -100).any(dim=1).tolist()
                assert real[0] == real[1] == bool(batch["real_tokens"][row].any())
                if real[0]:
                    seen.append(chosen // 2)
                    numbers.append(int(batch["row_numbers"][row]))
    assert sorted(seen) == list(range(13))
    assert len(set(numbers)) == 13


def test_rows_of_an_evaluation_are_numbered_by_sample() -> None:
    batches = EvaluationBatches(_pairs(5), _layout(1, 2))
    assert (batches.rows, len(batches)) == (5, 2)
    found = [(batch["input_ids"][:, 0].tolist(), batch["row_numbers"].tolist()) for batch in batches]
    assert found[0] == ([2, 3, 6, 7], [2, 3, 6, 7])
