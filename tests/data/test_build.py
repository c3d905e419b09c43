"""Every row becomes a sample or is counted under the reason why not; hopeless data is refused by line."""

import json
from pathlib import Path
from typing import Any

import pytest

from expertmesh.config import DataConfig, DataSource
from expertmesh.data import DataReport, Recipe, TokenizedDataset, build_dataset
from tests.data import tokenizers_on_the_fly as on_the_fly
from tests.data.tokenizers_on_the_fly import bpe_tokenizer
from tests.support.errors import refused

VOCABULARY = 706


def chat(answer: str, question: str = "q") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(path: Path, rows: list[Any]) -> Path:
    """Write rows as JSON lines; a string is written as it stands."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def build(
    path: Path, *, template: str | None = on_the_fly.CHATML, vocab_size: int = VOCABULARY, **data: Any
) -> tuple[TokenizedDataset, DataReport]:
    source = DataSource(path=str(path), format=data.pop("format", "auto"))
    config = DataConfig(train=[source], **data)
    return build_dataset(Recipe(config.train, config, bpe_tokenizer(template), model_vocab_size=vocab_size))


def test_format_is_detected_per_source_and_echoed(tmp_path: Path) -> None:
    chats = write(tmp_path / "chat.jsonl", [{**chat("a"), "text": "flat"}])
    texts = write(tmp_path / "text.jsonl", [{"text": "running text"}])
    config = DataConfig(train=[DataSource(path=str(chats)), DataSource(path=str(texts), format="text")])
    dataset, report = build_dataset(
        Recipe(config.train, config, bpe_tokenizer(on_the_fly.CHATML), model_vocab_size=VOCABULARY)
    )
    assert [(s.format, s.detected, s.also_fits) for s in report.sources] == [
        ("messages", True, ("text",)),
        ("text", False, ()),
    ]
    assert "format messages (detected; its rows also fit text" in report.lines()[0]
    assert [dataset.position(i) for i in range(2)] == [f"{chats}:1", f"{texts}:1"]
    assert dict(report.methods) == {"prefix difference": 1, "every token": 1}


def test_samples_stay_in_file_order_across_tokenizer_calls(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": f"number {i}"} for i in range(1100)])
    dataset, report = build(path)
    assert [dataset.position(i) for i in range(1100)] == [f"{path}:{i + 1}" for i in range(1100)]
    tokenizer = bpe_tokenizer()
    assert tokenizer.decode(dataset.sample(1023).input_ids) == "number 1023<|eos|>"
    assert report.rows == report.samples == 1100


BAD_ROWS = ['{"messages": ', chat("a") | {"messages": [{"role": "critic", "content": "x"}]}, {"other": 1}]


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_malformed_row_stops_with_file_and_line(tmp_path: Path, bad: Any) -> None:
    path = write(tmp_path / "a.jsonl", [chat("a"), bad, chat("b")])
    with refused("data.malformed-row", naming="a.jsonl:2: "):
        build(path)


def test_malformed_rows_are_skipped_and_counted_when_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*BAD_ROWS, chat("a"), *BAD_ROWS])
    dataset, report = build(path, on_error="skip")
    assert (len(dataset), report.rows, report.skipped) == (1, 7, 6)
    assert dataset.position(0) == f"{path}:4"
    assert [message.split(": ")[0].removeprefix(f"{path}:") for message in report.skipped_at] == list("123567")
    assert any("unknown role 'critic'" in line for line in report.lines())


def test_only_the_first_skipped_positions_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [chat("a"), *["{"] * 50])
    _, report = build(path, on_error="skip")
    assert (report.skipped, len(report.skipped_at)) == (50, 20)
    assert "skipped, malformed: 50, the first 20:" in report.lines()


def test_unknown_keys_are_refused_with_the_formats(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": 1}])
    for on_error in ("stop", "skip"):
        with refused("data.unknown-format", naming="messages, sharegpt, alpaca, prompt_completion, text"):
            build(path, on_error=on_error)


def test_a_csv_without_header_is_told_where_its_keys_are_from(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("What is 1+1?,2\nWhat is 2+2?,4\n")
    with refused("data.unknown-format", naming="(What is 1+1?, 2), which the first line of the file names, fit none"):
        build(path)


def test_empty_source_is_refused(tmp_path: Path) -> None:
    with refused("data.empty", naming="a.jsonl"):
        build(write(tmp_path / "a.jsonl", [""]))
    config = DataConfig(train=[DataSource(path="x")])
    with refused("data.no-source"):
        build_dataset(Recipe(config.eval, config, bpe_tokenizer(), model_vocab_size=VOCABULARY))


def test_overlong_samples_are_cut_dropped_or_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [chat("a"), chat("word " * 50), chat("b", question="long " * 50)])
    dataset, report = build(path, max_length=32, on_overlong="cut")
    assert (report.cut, report.no_target, report.no_target_after_cut) == (1, 1, 1)
    assert report.no_target_at == [f"{path}:3"]
    assert dataset.lengths.max() == 32
    dataset, report = build(path, max_length=32, on_overlong="drop")
    assert (len(dataset), report.dropped, report.cut) == (1, 2, 0)
    with refused("data.overlong-sample", naming="a.jsonl:2: "):
        build(path, max_length=32, on_overlong="stop")


def test_histogram_counts_every_length_before_cutting(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "x" * n} for n in (1, 7, 8, 15, 16, 40)])
    for on_overlong in ("cut", "drop"):
        _, report = build(path, max_length=16, on_overlong=on_overlong)
        assert [(b.above, b.up_to) for b in report.histogram[-2:]] == [(14, 16), (16, None)]
        assert sum(b.samples for b in report.histogram) == 6
        # eos makes the 15 letters 16 tokens, which is not too long
        assert report.histogram[-1].samples == 2


def test_samples_without_target_are_left_out_counted_and_named(tmp_path: Path) -> None:
    silent = {"messages": [{"role": "user", "content": "anyone?"}]}
    path = write(tmp_path / "a.jsonl", [chat("a"), silent, chat("b"), silent])
    for template in (on_the_fly.CHATML, on_the_fly.CHATML_WITH_MARKS):
        dataset, report = build(path, template=template)
        assert (len(dataset), report.no_target, report.no_target_after_cut) == (2, 2, 0)
        assert report.no_target_at == [f"{path}:2", f"{path}:4"]
        assert any(f"no target token: 2 ({path}:2, {path}:4)" in line for line in report.lines())


def test_rows_add_up(tmp_path: Path) -> None:
    silent = {"messages": [{"role": "user", "content": "anyone?"}]}
    path = write(tmp_path / "a.jsonl", [chat("a"), silent, "{", chat("word " * 50)])
    _, report = build(path, max_length=32, on_overlong="drop", on_error="skip")
    assert report.rows == report.samples + report.skipped + report.dropped + report.no_target == 4


def test_data_without_any_target_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "anyone?"}]}] * 3)
    with refused("data.no-targets", naming="3 without a target under data.loss_on: assistant (first"):
        build(path)


def test_targets_that_are_all_cut_off_lead_to_max_length(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "word " * 50}, {"role": "assistant", "content": "a"}]}
    path = write(tmp_path / "a.jsonl", [row] * 3)
    with refused("data.no-targets", naming="3 of them because of the cut to data.max_length 16"):
        build(path, max_length=16)


def test_marks_that_cover_nothing_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [chat("a")])
    with refused("data.malformed-row", naming="a.jsonl:1: the {% generation %} marks"):
        build(path, template=on_the_fly.MARKS_NOTHING)
    with refused("data.no-targets", naming="of 1 rows 1 are malformed"):
        build(path, template=on_the_fly.MARKS_NOTHING, on_error="skip")


def test_missing_template_is_refused_for_chat_rows_only(tmp_path: Path) -> None:
    with refused("tokenizer.no-chat-template"):
        build(write(tmp_path / "chat.jsonl", [chat("a")]), template=None)
    build(write(tmp_path / "text.jsonl", [{"text": "abc"}]), template=None)


def test_token_id_beyond_the_embeddings_is_refused_and_a_large_tokenizer_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "q", "completion": "a"}])
    with refused("data.unknown-token-id", naming="a.jsonl:1: contains token id 701"):
        build(path, vocab_size=700)
    _, report = build(write(tmp_path / "b.jsonl", [{"text": "abc"}]), vocab_size=702)
    assert "the tokenizer knows 706 tokens but the model has 702 embeddings" in report.notes[0]


def test_template_without_end_token_is_noted(tmp_path: Path) -> None:
    _, report = build(write(tmp_path / "a.jsonl", [chat("a")]), template=on_the_fly.PLAIN_WORDS)
    assert "in 1 samples the last answer ends without a special token" in report.notes[0]
