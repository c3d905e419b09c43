"""Six formats become four record types; what cannot be trained on faithfully is refused by name."""

import json
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
    unused_columns,
)

USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [USER, ASSISTANT]},
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "alpaca": {"instruction": "q", "input": "", "output": "a"},
    "prompt_completion": {"prompt": "q", "completion": "a"},
    "text": {"text": "q a"},
    "preference": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "unpaired_preference": {"prompt": "q", "completion": "a", "label": True},
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_told_by_its_keys(name: str) -> None:
    also = ("prompt_completion",) if name == "unpaired_preference" else ()
    assert fitting_formats(ROWS[name]) == (*also, name)


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


def test_of_messages_after_messages_the_later_ones_are_targets() -> None:
    dull = {**ASSISTANT, "weight": 0}
    row = {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT, USER, dull], "tools": [TOOL]}
    read = convert(row, "prompt_completion")
    assert read == Conversation((*row["prompt"], ASSISTANT, USER, ASSISTANT), frozenset({0, 1, 2, 5}), (TOOL,))


def test_messages_and_tools_may_be_written_as_json() -> None:
    row = {"messages": json.dumps([USER, ASSISTANT]), "tools": [json.dumps(TOOL)], "topic": "t"}
    assert fitting_formats(row) == ("messages",)
    assert convert(row, "messages") == Conversation((USER, ASSISTANT), tools=(TOOL,))
    assert unused_columns(row, "messages") == ["topic"]


@pytest.mark.parametrize("key", ["completion", "chosen"])
def test_a_prompt_and_its_responses_may_be_written_as_json(key: str) -> None:
    other = {"rejected": [{**ASSISTANT, "content": "b"}]} if key == "chosen" else {}
    row = {"prompt": [USER], key: [ASSISTANT], **other}
    written = {name: json.dumps(value) for name, value in row.items()}
    name = "preference" if other else "prompt_completion"
    assert convert(written, name) == convert(row, name)
    text = {"prompt": '[{"city": "Rome"}]', key: "[{", **{name: "b" for name in other}}
    assert convert(text, name).prompt == '[{"city": "Rome"}]'  # type: ignore[union-attr]


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


@pytest.mark.parametrize("tools", [[TOOL], [TOOL["function"]], json.dumps([TOOL]), TOOL], ids=type)
@pytest.mark.parametrize(
    "calls",
    [
        {"tool_calls": [CALL]},
        {"tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]},
        {"tool_calls": json.dumps([CALL["function"]])},
        {"function_call": {"name": "weather", "arguments": '{"city": "Rome"}'}},
    ],
    ids=["objects", "text arguments", "text", "old"],
)
def test_tools_and_calls_come_out_in_the_one_form_that_templates_read(tools: Any, calls: dict[str, Any]) -> None:
    result = {"role": "tool", "name": "weather", "content": "22 degrees"}
    row = {"messages": [USER, {"role": "assistant", "content": None, **calls}, result, ASSISTANT], "tools": tools}
    called = {"role": "assistant", "tool_calls": [CALL]}
    assert convert(row, "messages") == Conversation((USER, called, result, ASSISTANT), tools=(TOOL,))


def test_sharegpt_calls_and_observations() -> None:
    said = [("human", "q"), ("function_call", json.dumps(CALL["function"])), ("observation", "22"), ("gpt", "a")]
    row = {"conversations": [{"from": role, "value": value} for role, value in said], "tools": json.dumps([TOOL])}
    called, result = {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "22"}
    assert convert(row, "sharegpt") == Conversation((USER, called, result, ASSISTANT), tools=(TOOL,))


def test_messages_say_whether_they_are_targets_and_rows_what_their_template_gets() -> None:
    answers = [{**ASSISTANT, "train": False}, {**ASSISTANT, "weight": 1}, {**ASSISTANT, "train_on_turn": 0}]
    messages = [message for answer in answers for message in (USER, answer)]
    record = convert({"messages": messages, "chat_template_kwargs": {"enable_thinking": False}}, "messages")
    assert record == Conversation(
        (USER, ASSISTANT) * 3, untrained=frozenset({1, 5}), template_args={"enable_thinking": False}
    )


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
            {"messages": [USER, {**ASSISTANT, "tool_calls": [{}]}]},
            "messages",
            "message 2 has a call that names no",
        ),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages", "message 1 has calls, and its role is 'user'"),
        (
            {"messages": [USER, {**ASSISTANT, "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "messages",
            "arguments of the call of 'f' in message 2 is a string that is not JSON",
        ),
        (
            {"messages": [USER, {**ASSISTANT, "tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
            "messages",
            "arguments of the call of 'f' in message 2 are no object",
        ),
        ({"conversations": [{"from": "function_call", "value": "f(1)"}]}, "sharegpt", "calls of message 1 is a string"),
        ({"messages": [USER, ASSISTANT], "tools": ["f"]}, "messages", "tool 1 of 'tools' is a string"),
        ({"messages": [USER, ASSISTANT], "tools": 3}, "messages", "'tools' is a number, not a list"),
        ({"messages": [USER], "chat_template_kwargs": [1]}, "messages", "'chat_template_kwargs' is a list"),
        ({"text": "x", "tools": [TOOL]}, "text", "row has 'tools', and tools are for rows of messages"),
        ({"messages": [USER, {**ASSISTANT, "weight": 0.5}]}, "messages", "'weight': 0.5, but a message is a target or"),
        (
            {"messages": [USER, {**ASSISTANT, "weight": 0, "train": True}]},
            "messages",
            "'weight' and 'train', which contradict",
        ),
        (
            {"prompt": [USER], "chosen": [{**ASSISTANT, "train": False}], "rejected": [ASSISTANT]},
            "preference",
            "says that it is no target",
        ),
        (
            {"messages": [USER], "images": ["x.png"]},
            "messages",
            "'images' holds 1, and its messages have 0 image parts",
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}], "images": ["x.png"]},
            "sharegpt",
            "'images', and images are",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            "messages",
            "part of type 'video'",
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
        ({"prompt": [USER], "completion": "a"}, "prompt_completion", "both must be alike"),
        ({"prompt": [], "completion": [ASSISTANT]}, "prompt_completion", "'prompt' has no message"),
        ({"prompt": [ASSISTANT], "completion": [ASSISTANT]}, "prompt_completion", "ends with an assistant message"),
        ({"prompt": "q", "completion": "a", "tools": [TOOL]}, "prompt_completion", "'tools', which is for chat"),
        ({"messages": "[{'role': 'user'}]"}, "messages", "'messages' is a string, not a list of messages"),
        ({"messages": json.dumps([USER, {"content": "x"}])}, "messages", "message 2 has the unknown role None"),
        (
            {"prompt": '[{"role": "user"', "completion": "a"},
            "prompt_completion",
            "'prompt' is a string that is not JSON",
        ),
        ({"messages": [{"content": "x"}]}, "messages", "message 1 of 'messages' has no 'role'"),
        ({"conversations": [USER]}, "sharegpt", "message 1 of 'conversations' has no 'from'"),
        ({"messages": [USER, ASSISTANT], "tools": ["{"]}, "messages", "tool 1 of 'tools' is a string that is not JSON"),
        ({"text": None}, "text", "'text' is missing or null"),
        ({"messages": [USER], "tools": [r'{"\ud83d": 1}']}, "messages", "tool 1 of 'tools' .* unpaired surrogate"),
        ({"messages": '[{"role": "user", "role": "user"}]'}, "messages", "role appears twice in one object"),
        ({"instruction": "q", "output": "a", "history": 5}, "alpaca", "'history' is a number, not a list"),
        ({"text": "x"}, "messages", r"not have the keys of format messages \(its keys: text\)"),
    ],
)
def test_refused_rows_say_what_is_wrong(row: dict[str, Any], format_name: str, reason: str) -> None:
    with pytest.raises(MalformedRow, match=reason):
        convert(row, format_name)
