"""Six formats become four record types; what cannot be trained on faithfully is refused by name."""

from typing import Any

import pytest

from expertmesh.data.formats import (
    FORMATS,
    Conversation,
    MalformedRow,
    PlainText,
    PromptCompletion,
    convert,
    fitting_formats,
)

USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}
ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [USER, ASSISTANT]},
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "alpaca": {"instruction": "q", "input": "", "output": "a"},
    "prompt_completion": {"prompt": "q", "completion": "a"},
    "text": {"text": "q a"},
    "preference": {"prompt": "q", "chosen": "a", "rejected": "b"},
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_told_by_its_keys(name: str) -> None:
    assert fitting_formats(ROWS[name]) == (name,)


def test_most_specific_format_comes_first_and_the_others_are_named() -> None:
    row = {**ROWS["text"], **ROWS["messages"], **ROWS["prompt_completion"]}
    assert fitting_formats(row) == ("messages", "prompt_completion", "text")


def test_unknown_keys_fit_nothing() -> None:
    assert fitting_formats({"question": "q", "answer": "a"}) == ()


@pytest.mark.parametrize("name", ["messages", "sharegpt", "alpaca"])
def test_chat_formats_become_the_same_conversation(name: str) -> None:
    assert convert(ROWS[name], name) == Conversation((USER, ASSISTANT))


def test_plain_formats_stay_plain() -> None:
    assert convert(ROWS["prompt_completion"], "prompt_completion") == PromptCompletion("q", "a")
    assert convert(ROWS["text"], "text") == PlainText("q a")


def test_messages_may_stand_under_conversations() -> None:
    row = {"conversations": [USER, ASSISTANT]}
    assert fitting_formats(row) == ("messages",)
    assert convert(row, "messages") == Conversation((USER, ASSISTANT))


def test_alpaca_input_system_and_history_take_their_places() -> None:
    row = {"system": "s", "history": [["q0", "a0"]], "instruction": "q", "input": "data", "output": "a"}
    record = convert(row, "alpaca")
    assert isinstance(record, Conversation)
    assert [m["content"] for m in record.messages] == ["s", "q0", "a0", "q\n\ndata", "a"]


def test_text_parts_are_joined_and_other_keys_pass_through_to_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = {"messages": [USER, {**ASSISTANT, "content": parts, "reasoning_content": "r", "name": None}]}
    record = convert(row, "messages")
    assert record == Conversation((USER, {**ASSISTANT, "content": "ab", "reasoning_content": "r"}))


@pytest.mark.parametrize(
    ("row", "format_name", "reason"),
    [
        ({"messages": []}, "messages", "has no message"),
        (
            {"messages": [USER, {"role": "critic", "content": "x"}]},
            "messages",
            r"message 2 .* unknown role 'critic'",
        ),
        (
            {"messages": [USER, {"role": "tool", "content": "x"}]},
            "messages",
            "role 'tool', and tool messages",
        ),
        ({"messages": [USER, {**ASSISTANT, "tool_calls": [{}]}]}, "messages", "message 2 has 'tool_calls'"),
        ({"messages": [USER, ASSISTANT], "tools": [{}]}, "messages", "row has 'tools'"),
        (
            {"messages": [USER, {**ASSISTANT, "weight": 0}]},
            "messages",
            "'weight': 0, and per-message weights",
        ),
        ({"messages": [USER], "images": ["x.png"]}, "messages", "'images', and only text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages",
            "part of type 'image'",
        ),
        (
            {"messages": [USER, {"role": "assistant"}]},
            "messages",
            "'content' of message 2 is missing or null",
        ),
        ({"messages": [USER, "hello"]}, "messages", "message 2 is a string"),
        ({"conversations": [{"from": "bing", "value": "x"}]}, "sharegpt", "unknown role 'bing'"),
        ({"instruction": "q", "output": 3}, "alpaca", "'output' is a number"),
        ({"instruction": "q", "output": "a", "history": ["x"]}, "alpaca", "'history' entry 1"),
        (
            {"prompt": [USER], "completion": [ASSISTANT]},
            "prompt_completion",
            "join them under one key 'messages'",
        ),
        ({"text": None}, "text", "'text' is missing or null"),
        ({"text": "\ud800"}, "text", "unpaired surrogate"),
        ({"text": "x"}, "messages", r"not have the keys of format messages \(its keys: text\)"),
    ],
)
def test_refused_rows_say_what_is_wrong(row: dict[str, Any], format_name: str, reason: str) -> None:
    with pytest.raises(MalformedRow, match=reason):
        convert(row, format_name)
