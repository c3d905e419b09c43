"""Columns and roles that a source names, in every kind of file; columns that nothing reads are listed or refused."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow
import pytest
from pyarrow import parquet

from expertmesh.config import DataConfig, DataSource
from expertmesh.config.errors import InputError
from expertmesh.config.yaml_text import parse_yaml
from expertmesh.data import DataReport, Ranks, Recipe, Stream, TokenizedDataset, build_dataset
from expertmesh.data.formats import FORMATS, PREFERENCE, UNPAIRED, MalformedRow, convert
from tests.data.test_build import VOCABULARY, chat, write
from tests.data.test_formats import ASSISTANT, ROWS, USER
from tests.data.test_prepared import make, preparation
from tests.data.tokenizers_on_the_fly import CHATML, bpe_tokenizer
from tests.support.errors import refused

SFT = [name for name in FORMATS if name not in (PREFERENCE, UNPAIRED)]
QUESTIONS = [{"question": f"What is {n} + 1?", "answer": f"It is {n + 1}."} for n in range(5)]
SOLVED = {"columns": {"prompt": "question", "completion": "answer"}}


def build(
    path: Path | str, pairs: bool = False, source: dict[str, Any] | None = None, **data: Any
) -> tuple[TokenizedDataset, DataReport]:
    config = DataConfig(train=[{"path": str(path), **(source or {})}], **data)  # type: ignore[list-item]
    return build_dataset(
        Recipe(
            config.train,
            config,
            bpe_tokenizer(CHATML),
            model_vocab_size=VOCABULARY,
            responses=PREFERENCE if pairs else None,
        )
    )


def _csv(path: Path, rows: list[dict[str, Any]], delimiter: str = ",") -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(rows[0])
        writer.writerows([each if isinstance(each, str) else json.dumps(each) for each in row.values()] for row in rows)


def _arrow(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], object]] = {
    "a.jsonl": write,
    "a.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "a.parquet": lambda path, rows: parquet.write_table(pyarrow.Table.from_pylist(rows), path),
    "a.feather": _arrow,
    "a.csv": _csv,
    "a.tsv": lambda path, rows: _csv(path, rows, "\t"),
    "saved": lambda path, rows: datasets.Dataset.from_list(rows).save_to_disk(str(path)),
}


@pytest.mark.parametrize("name", [*WRITERS, "url", "hub"])
def test_named_columns_are_read_from_every_kind_of_source(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the file had the format's names, also for lists in CSV cells; another column of such a name gives way."""
    rows = [{"dialog": chat(f"answer {n}")["messages"], "messages": "flat"} for n in range(3)]
    path = str(tmp_path / name)
    if name == "url":
        path = "memory://named/a.jsonl"
        fsspec.filesystem("memory").pipe("/named/a.jsonl", "\n".join(map(json.dumps, rows)).encode())
    elif name == "hub":
        path = "org/name"
        monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: datasets.Dataset.from_list(rows))
    else:
        WRITERS[name](Path(path), rows)
    found, report = build(path, source={"columns": {"messages": "dialog"}})
    expected, _ = build(write(tmp_path / "plain.jsonl", [chat(f"answer {n}") for n in range(3)]))
    assert [found.sample(n).input_ids.tolist() for n in range(3)] == [
        expected.sample(n).input_ids.tolist() for n in range(3)
    ]
    assert (report.sources[0].format, report.sources[0].unused) == ("messages", [])


def test_streams_and_prepared_tokens_have_the_named_columns(tmp_path: Path) -> None:
    path, (expected, _) = (
        write(tmp_path / "a.jsonl", QUESTIONS),
        build(write(tmp_path / "b.jsonl", QUESTIONS), source=SOLVED),
    )
    config = DataConfig(train=[DataSource(path=str(path), **SOLVED)], stream=True, stream_rows=5)
    window = Stream(Recipe(config.train, config, bpe_tokenizer(CHATML), VOCABULARY), 0, Ranks()).first()
    assert window.dataset.tokens == expected.tokens
    named, swapped = (
        preparation(tmp_path, DataSource(path=str(path), columns=columns))
        for columns in (SOLVED["columns"], {"prompt": "answer", "completion": "question"})
    )
    assert make(named).dataset.tokens == expected.tokens
    assert swapped.find() is None
    assert make(swapped).dataset.sha256() != make(named).dataset.sha256()


@pytest.mark.parametrize(
    ("rows", "pairs"),
    [
        (QUESTIONS, False),
        ([{"Question": "q", "Answer": "a", "id": 1}], False),
        ([{"instruction": "q", "context": "c", "response": "a"}], False),
        ([{"dialog": [USER, ASSISTANT]}], False),
        ([{"thread": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}], False),
        ([{"content": "running text", "id": 3}], False),
        ([{"question": "q", "good": "a", "bad": "b"}], True),
        ([{"a: b": "running, text"}], False),
    ],
)
@pytest.mark.parametrize("others", [0, 1])
def test_unknown_columns_are_refused_with_the_yaml_that_trains_them(
    tmp_path: Path, rows: list[dict[str, Any]], pairs: bool, others: int
) -> None:
    """What the refusal says, written into the file, is what trains: GSM8K's own rows first of all."""
    paths = [write(tmp_path / f"{n}.jsonl", rows) for n in range(1 + others)]
    train = [DataSource(path=str(path), repeat=2, max_rows=100) for path in paths]
    config, tokenizer = DataConfig(train=train), bpe_tokenizer(CHATML)
    with pytest.raises(InputError, match=r"write data\.train") as caught:
        build_dataset(
            Recipe(
                config.train, config, tokenizer, model_vocab_size=VOCABULARY, responses=PREFERENCE if pairs else None
            )
        )
    text = str(caught.value).partition("write data.train")[2].removesuffix(" (docs/data.md).")
    suggestions = text.removesuffix(" for conversations by the chat template").split(", or ")
    suggestions[0] = suggestions[0].partition(": ")[2]
    for suggestion in suggestions:
        source = parse_yaml(suggestion, "refusal").value
        said = DataConfig(train=[source] if others else source)
        assert (said.train[0].repeat, said.train[0].max_rows) == (2, None)
        _, report = build_dataset(
            Recipe(said.train, said, tokenizer, model_vocab_size=VOCABULARY, responses=PREFERENCE if pairs else None)
        )
        assert report.samples == len(rows)
    if rows is QUESTIONS and not others:
        assert "{prompt: question, completion: answer}" in suggestions[0]
        assert "{instruction: question, output: answer}" in suggestions[1]


@pytest.mark.parametrize(
    ("source", "naming"),
    [
        ({"columns": {"promt": "question"}}, "columns.promt is no column of any format; did you mean prompt?"),
        ({"columns": {"input": "question"}, "format": "text"}, "columns.input is no column of format text; choose"),
        ({"roles": {"bot": "user"}, "format": "text"}, "roles does nothing with format text"),
    ],
)
def test_names_of_no_format_are_refused_with_the_configuration(source: dict[str, Any], naming: str) -> None:
    with refused("config.combination", naming=f"data.eval.0.{naming}"):
        DataConfig(train=["a.jsonl"], eval=[{"path": "b.jsonl", **source}])  # type: ignore[list-item]
    with refused("config.combination", naming=f"data.train.1.{naming}"):
        DataConfig(train=["a.jsonl", {"path": "b.jsonl", **source}])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("source", "naming"),
    [
        ({"columns": {"prompt": "questoin", "completion": "answer"}}, "columns names 'questoin', and no row of"),
        ({"columns": {**SOLVED["columns"], "labl": None}}, "columns names 'labl', and no row of"),
        ({"columns": {**SOLVED["columns"], "system": "answer"}}, "columns.system is no column of format prompt_compl"),
    ],
)
@pytest.mark.parametrize("format_name", ["auto", "prompt_completion"])
def test_names_without_effect_on_the_rows_are_refused(
    tmp_path: Path, source: dict[str, Any], naming: str, format_name: str
) -> None:
    path = write(tmp_path / "a.jsonl", QUESTIONS)
    known_before = format_name != "auto" and "names" not in naming
    with refused("config.combination" if known_before else "data.unmatched-names", naming=f"data.train.0.{naming}"):
        build(path, source={"format": format_name, **source})


def test_roles_of_a_prompt_and_a_completion_that_are_text_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", QUESTIONS)
    with refused("data.malformed-row", naming="roles does nothing with a prompt and a completion that are text"):
        build(path, source={**SOLVED, "roles": {"bot": "user"}})


@pytest.mark.parametrize("name", ["messages", "sharegpt", "prompt_completion", PREFERENCE])
def test_named_roles_are_read_by_every_format_that_has_some(name: str) -> None:
    role, text = ("from", "value") if name == "sharegpt" else ("role", "content")
    ask, answer, other = ({role: each, text: each[0]} for each in ("frage", "antwort", "nein"))
    row = {"messages": [ask, answer]}
    if name == PREFERENCE:
        row = {"prompt": [ask], "chosen": [answer], "rejected": [other]}
    elif name == "prompt_completion":
        row = {"prompt": [ask], "completion": [answer]}
    with pytest.raises(MalformedRow, match=r"unknown role .(frage|antwort)") as caught:
        convert(row, name)
    assert re.search(r"as in roles: {(frage|antwort): assistant} beside the path of its source$", caught.value.mend)
    record = convert(row, name, {"frage": "user", "antwort": "assistant", "nein": "assistant"})
    messages = record.messages if name != PREFERENCE else (*record.prompt, *record.chosen)  # type: ignore[union-attr,misc]
    assert [message["role"] for message in messages] == ["user", "assistant"]


@pytest.mark.parametrize("roles", [("human", "gpt"), ("human", "ai"), ("user", "assistant")])
@pytest.mark.parametrize("name", ["messages", "sharegpt"])
def test_usual_names_of_the_two_speakers_are_known(name: str, roles: tuple[str, str]) -> None:
    role, text = ("from", "value") if name == "sharegpt" else ("role", "content")
    row = {"conversations": [{role: each, text: said} for each, said in zip(roles, "qa", strict=True)]}
    assert convert(row, name) == convert(ROWS["messages"], "messages")


@pytest.mark.parametrize("name", [*SFT, PREFERENCE])
def test_columns_that_a_format_does_not_read_are_listed(tmp_path: Path, name: str) -> None:
    """Another column may have what an optional one of the format is for, as a system text or a context."""
    own = ROWS[name]
    rows = [own | {"persona": "brief", "nothing": None, "empty": []}, own | {"context": "c", "id": 0}]
    path = write(tmp_path / "a.jsonl", rows)
    _, report = build(path, name == PREFERENCE)
    assert "  columns that are not used: persona, context, id" in report.lines()
    (_, report) = build(path, name == PREFERENCE, {"columns": dict.fromkeys(("persona", "context", "id"))})
    assert "not used" not in "".join(report.lines())
    prepared = make(preparation(tmp_path, path, responses=name if name == PREFERENCE else None))
    assert "  columns that are not used: persona, context, id" in prepared.report.lines()


def test_the_conversation_under_the_other_name_is_listed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [ROWS["messages"] | ROWS["sharegpt"]])
    assert build(path)[1].sources[0].unused == ["conversations"]
    assert build(path, format="sharegpt")[1].sources[0].unused == ["messages"]


@pytest.mark.parametrize("name", SFT)
@pytest.mark.parametrize(
    ("column", "value"), [("label", False), ("score", 0.0), ("rejected", "b"), ("rejected", [USER])]
)
def test_judgements_of_answers_stop_sft_unless_left_out(tmp_path: Path, name: str, column: str, value: Any) -> None:
    path = write(tmp_path / "a.jsonl", [ROWS[name], ROWS[name] | {column: value}])
    with refused("data.malformed-row", naming=f"a.jsonl:2: the row has {column!r}"):
        build(path, format=name)
    with refused("data.malformed-row", naming=f"columns: {{{column}: null}} beside the path"):
        build(path, format=name)
    _, report = build(path, source={"columns": {column: None}}, format=name)
    assert (report.samples, report.skipped) == (2, 0)
    _, report = build(path, format=name, on_error="skip")
    assert (report.samples, report.skipped) == (1, 1)


@pytest.mark.parametrize(
    ("row", "naming"),
    [
        (
            {"system": "s", "question": "q?", "chosen": "Twelve.", "rejected": "Nobody."},
            "begin with nothing in common (its keys: system, question, chosen, rejected); write columns: {prompt: "
            "question} beside",
        ),
        # Both begin with a T by chance.
        ({"instruction": "q?", "chosen": "Twelve.", "rejected": "Ten."}, "{prompt: instruction}, or {instruction: nul"),
        (
            {"frage": "q?", "chosen": "Twelve.", "rejected": "Nobody."},
            "begin with nothing in common (its keys: frage",
        ),
        (
            {"frage": "q?", "chosen": [ASSISTANT], "rejected": [ASSISTANT]},
            "none comes before both answers (its keys: frage",
        ),
    ],
)
def test_pairs_without_a_prompt_are_refused_by_their_keys(tmp_path: Path, row: dict[str, Any], naming: str) -> None:
    path = write(tmp_path / "a.jsonl", [row])
    with refused("data.malformed-row", naming=naming):
        build(path, pairs=True)
    (asked,) = {"question", "instruction", "frage"} & row.keys()
    if isinstance(row["chosen"], str):
        dataset, report = build(path, pairs=True, source={"columns": {"prompt": asked}})
        assert report.sources[0].unused == [key for key in row if key == "system"]
        assert bpe_tokenizer().decode(dataset.sample(0).input_ids).startswith("q?Twelve.")


@pytest.mark.parametrize(
    ("content", "encoding", "key", "naming"),
    [
        ('{"text": "ä"}\n{"text": "ü"}\n', "utf-16", "damaged-file", " is UTF-16, not UTF-8"),
        ('{"text": "ä"}\n{"text": "ü"}\n', "latin-1", "malformed-row", ":1: byte 11 of the line is not UTF-8"),
        ('{"text": "ä"}\n{"txt": "u"}\n', "latin-1", "unknown-format", ":1: byte 11 of the line is not UTF-8"),
        ("{'text': 'a'}\n", "utf-8", "malformed-row", ":1: the line is not JSON"),
        ('"text"\n', "utf-8", "malformed-row", ":1: the row is not a JSON object"),
    ],
)
def test_rows_all_unreadable_are_refused_by_the_first_ones_reason(
    tmp_path: Path, content: str, encoding: str, key: str, naming: str
) -> None:
    """With `on_error: skip`, too: keys are not what is wrong then."""
    (tmp_path / "a.jsonl").write_bytes(content.encode(encoding))
    with refused(f"data.{key}", naming=f"a.jsonl{naming}"):
        build(tmp_path / "a.jsonl", on_error="skip")
    with refused(f"data.{key.replace('unknown-format', 'malformed-row')}", naming=f"a.jsonl{naming}"):
        build(tmp_path / "a.jsonl")
