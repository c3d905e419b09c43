"""Calls, thinking, turns that are no targets and dates: what conversations hold beside questions and answers."""

import datetime
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import DeepseekV4Config

from expertmesh.config import DataConfig, DataSource, ModelConfig
from expertmesh.config.errors import InputError
from expertmesh.data import Recipe, build_dataset, load_tokenizer
from expertmesh.data.encoding.encode import ChatRenderer, Encoded, Encoder
from expertmesh.data.encoding.targets import ChatOptions
from expertmesh.data.formats import PREFERENCE, Conversation, MalformedRow
from expertmesh.data.report import DataReport
from expertmesh.data.tokenized import TokenizedDataset
from expertmesh.demo.run import CHAT_TEMPLATE as DEMO_TEMPLATE
from tests.data import tokenizers_on_the_fly as on_the_fly
from tests.data.test_chat import END, talk, target_texts
from tests.data.tokenizers_on_the_fly import bpe_tokenizer
from tests.support.errors import refused

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def call(city: Any, name: str = "weather") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": {"city": city}}}


def agent(thinking: bool) -> Conversation:
    """Two questions; the first takes two calls, one of them of two functions, the second one."""

    def answer(thought: str, **said: Any) -> dict[str, Any]:
        return {"role": "assistant", **({"reasoning_content": thought} if thinking else {}), **said}

    return Conversation(
        (
            {"role": "user", "content": "Where is it warmer?"},
            answer("Both.", tool_calls=[call("Rome")]),
            {"role": "tool", "content": "22"},
            answer("And Oslo.", tool_calls=[call(3.5)]),
            {"role": "tool", "content": "14"},
            answer("Compare.", content="In Rome."),
            {"role": "user", "content": "And Cairo?"},
            answer("Again.", content="", tool_calls=[call("Cairo"), call("Cairo", "time")]),
            {"role": "tool", "content": "30"},
            answer("Warm.", content="Warmer still."),
        ),
        tools=(TOOL,),
    )


def samples(template: str, conversation: Conversation, **options: Any) -> list[Encoded]:
    (result,) = Encoder(bpe_tokenizer(template), ChatOptions(**options)).encode([conversation])
    assert not isinstance(result, MalformedRow), result
    return result


def targets(template: str, conversation: Conversation, **options: Any) -> list[list[str]]:
    """Of each sample, what it has for targets."""
    return [target_texts(bpe_tokenizer(template), each) for each in samples(template, conversation, **options)]


CALLS = [
    '<call>weather {"city": "Rome"}</call>',
    '<call>weather {"city": 3.5}</call>',
    '<call>weather {"city": "Cairo"}</call><call>time {"city": "Cairo"}</call>',
]
IN_CHANNELS = [" to=weather " + text[len("<call>weather ") : -len("</call>")] + "<|eos|>" for text in CALLS[:2]]


def test_calls_are_targets_and_results_are_not() -> None:
    (found,) = targets(on_the_fly.WITH_TOOLS, agent(thinking=False), template_args={"enable_thinking": False})
    assert found == [CALLS[0] + END, CALLS[1] + END, "In Rome." + END, CALLS[2] + END, "Warmer still." + END]
    (text,) = samples(on_the_fly.WITH_TOOLS, agent(thinking=False))
    assert json.dumps(TOOL["function"])[1:40] in bpe_tokenizer().decode(text.input_ids.tolist())


def test_calls_whose_thinking_a_later_answer_removes_are_found_all_the_same() -> None:
    (found,) = targets(on_the_fly.WITH_TOOLS, agent(thinking=True))
    thoughts = [f"<think>\n{thought}\n</think>\n\n" for thought in ("Again.", "Warm.")]
    before = [CALLS[0] + END, CALLS[1] + END, "In Rome." + END]
    assert found == [*before, thoughts[0] + CALLS[2] + END, thoughts[1] + "Warmer still." + END]


@pytest.mark.parametrize("thinking", [False, True])
def test_a_token_that_ends_calls_and_results_that_name_the_call(thinking: bool) -> None:
    (found,) = targets(on_the_fly.WITH_CHANNELS, Conversation(agent(thinking).messages[:6]))
    thought = [" thinks Compare." + END + "<|im_start|>assistant says In Rome.<|return|>"]
    assert found == IN_CHANNELS + (thought if thinking else [" says In Rome.<|return|>"])


def test_a_call_that_cannot_be_located_is_refused() -> None:
    repeated = on_the_fly.WITH_TOOLS + "{{- messages[1].tool_calls | tojson }}"
    (result,) = Encoder(bpe_tokenizer(repeated), ChatOptions()).encode([agent(thinking=True)])
    assert "repeats or leaves out the arguments of assistant message 2" in str(result)


@pytest.mark.parametrize("template", [on_the_fly.CHATML, on_the_fly.CHATML_WITH_MARKS], ids=["chatml", "marks"])
def test_turns_that_say_so_are_no_targets(template: str) -> None:
    conversation = replace(talk("one", "two", "three", "four"), untrained=frozenset({1}))
    assert targets(template, conversation) == [["four" + END]]
    assert targets(template, replace(conversation, untrained=frozenset({0, 3}))) == [["two" + END]]


MARKS_APART = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- if message.reasoning_content %}{% generation %}{{- message.reasoning_content }}{% endgeneration %}{% endif %}
{{- ' ' }}
{%- if message.content %}{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{% endif %}
{%- for call in message.tool_calls or [] %}{{- call.function.name ~ call.function.arguments | tojson }}{% endfor %}
{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}
{{- '\\n' }}
{%- endfor %}"""


@pytest.mark.parametrize(("thought", "text"), [("Hm.", "One."), ("Explain. Use weather.", "Use weather.")])
def test_marks_that_are_not_one_for_each_answer_never_make_targets_of_others(thought: str, text: str) -> None:
    """Two marks for the first answer, which is no target, none for the calls of the second: three for three answers."""
    conversation = Conversation(
        (
            {"role": "user", "content": "q"},
            {"role": "assistant", "reasoning_content": thought, "content": text},
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [call("Rome")]},
            {"role": "tool", "content": "22"},
            {"role": "assistant", "content": "Two."},
        ),
        frozenset({1}),
    )
    assert targets(MARKS_APART, conversation) == [[" Two." + END]]
    for text in ("One.", ""):
        one_each = replace(talk("q", text, "q", "Two."), untrained=frozenset({1}))
        assert targets(on_the_fly.CHATML_WITH_MARKS, one_each) == [["Two." + END]]


def test_a_mark_over_two_answers_of_which_one_is_no_target_is_refused() -> None:
    together = (
        "{% generation %}{%- for message in messages %}{{- message.role + '\\n' + message.content + '<|im_end|>' }}"
        "{%- endfor %}{% endgeneration %}"
    )
    conversation = replace(talk("q", "One.", "q", "Two."), untrained=frozenset({1}))
    (result,) = Encoder(bpe_tokenizer(together), ChatOptions()).encode([conversation])
    assert "marks 1 parts of 2 assistant messages, not each of one of these" in str(result)


THOUGHTS = Conversation(
    tuple(
        message
        for number in (1, 2)
        for message in (
            {"role": "user", "content": f"Question {number}"},
            {"role": "assistant", "reasoning_content": f"Thought {number}.", "content": f"Answer {number}."},
        )
    )
)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("auto", [["Answer 1." + END, "<think>\nThought 2.\n</think>\n\nAnswer 2." + END]]),
        ("keep_last", [["Answer 1." + END, "<think>\nThought 2.\n</think>\n\nAnswer 2." + END]]),
        ("drop", [["Answer 1." + END, "Answer 2." + END]]),
        (
            "every_turn",
            [[f"<think>\nThought {i}.\n</think>\n\nAnswer {i}." + END] for i in (1, 2)],
        ),
    ],
)
def test_thinking_is_what_the_key_says(mode: Any, expected: list[list[str]]) -> None:
    assert targets(on_the_fly.WITH_TOOLS, THOUGHTS, thinking=mode) == expected
    dropped = ["dropped_thinking" in each.odd for each in samples(on_the_fly.WITH_TOOLS, THOUGHTS, thinking=mode)]
    assert dropped == [mode == "auto"] * len(expected)


def test_a_template_that_keeps_all_thinking_needs_one_sample_for_every_turn() -> None:
    kept = on_the_fly.WITH_TOOLS.replace("loop.index0 > ns.question", "true")
    assert len(samples(kept, THOUGHTS, thinking="every_turn")) == 1
    never = on_the_fly.WITH_TOOLS.replace("loop.index0 > ns.question", "false")
    for thoughts in (THOUGHTS, replace(THOUGHTS, messages=THOUGHTS.messages[1:2])):
        (result,) = Encoder(bpe_tokenizer(never), ChatOptions(thinking="every_turn")).encode([thoughts])
        assert "leaves out the thinking of an answer, even of the last" in str(result)
    first = replace(THOUGHTS, messages=({"role": "system", "content": "Brief."}, *THOUGHTS.messages[1:]))
    assert len(targets(on_the_fly.WITH_TOOLS, first, thinking="every_turn")) == 2


def test_thinking_before_the_answer_is_told_from_the_answer() -> None:
    inside = Conversation(
        ({"role": "user", "content": "Q"}, {"role": "assistant", "content": "<think>\nWhy.\n</think>\n\nA."})
    )
    assert targets(on_the_fly.CHATML, inside) == [["<think>\nWhy.\n</think>\n\nA." + END]]
    assert targets(on_the_fly.CHATML, inside, thinking="drop") == [["A." + END]]


def test_the_date_is_the_one_that_is_given() -> None:
    (sample,) = samples(on_the_fly.WRITES_DATE, talk("Hi", "Hello."), date=datetime.date(2024, 2, 29))
    text = bpe_tokenizer().decode(sample.input_ids.tolist())
    assert text.startswith("Today is 29 February 2024 at 00:00.")


def build(
    tmp_path: Path,
    rows: list[dict[str, Any]],
    template: str = on_the_fly.WITH_TOOLS,
    *,
    pairs: bool = False,
    **options: Any,
) -> tuple[TokenizedDataset, DataReport]:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    config = DataConfig(train=[DataSource(path=str(file))], **options)
    tokenizer = bpe_tokenizer(template)
    return build_dataset(
        Recipe(
            config.train, config, tokenizer, model_vocab_size=len(tokenizer), responses=PREFERENCE if pairs else None
        )
    )


def messages(*contents: str, **keys: str) -> dict[str, Any]:
    return {"messages": [*talk(*contents[:-1]).messages, {**talk(*contents).messages[-1], **keys}]}


ROWS = [
    messages("one", "two"),
    messages("one", " \n", "three", "four"),
    messages("one", "two", "three"),
    {"messages": list(THOUGHTS.messages)},
]


def test_odd_rows_are_trained_on_counted_and_named(tmp_path: Path) -> None:
    dataset, report = build(tmp_path, ROWS)
    assert len(dataset) == 4
    assert report.odd == {"empty_answer": 1, "unanswered": 1, "dropped_thinking": 1}
    file = tmp_path / "rows.jsonl"
    assert f"an answer, or a text, is empty: 1 row ({file}:2); data.on_empty_answer decides" in report.lines()
    assert (
        f"the conversation does not end with an answer: 1 row ({file}:3); data.on_unanswered decides" in report.lines()
    )
    assert any("thinking blocks without a thought" in line for line in report.lines())


@pytest.mark.parametrize(("kind", "line"), [("empty_answer", 2), ("unanswered", 3), ("dropped_thinking", 4)])
def test_odd_rows_are_left_out_or_stop_as_the_key_says(tmp_path: Path, kind: str, line: int) -> None:
    dataset, report = build(tmp_path, ROWS, **{f"on_{kind}": "drop"})
    assert (len(dataset), report.left_out) == (3, 1)
    assert all(dataset.position(index) != f"{tmp_path / 'rows.jsonl'}:{line}" for index in range(3))
    with refused("data.odd-row", InputError, naming=f"rows.jsonl:{line}"):
        build(tmp_path, ROWS, **{f"on_{kind}": "stop"})


def test_every_turn_makes_several_samples_of_a_row(tmp_path: Path) -> None:
    dataset, report = build(tmp_path, ROWS, thinking="every_turn")
    assert [dataset.position(index)[-1] for index in range(len(dataset))] == ["1", "2", "3", "4", "4"]
    assert not report.odd["dropped_thinking"]


def with_all_parts(**answer: Any) -> dict[str, Any]:
    """A row of which a template may leave out anything."""
    calling = {"role": "assistant", "content": "", "tool_calls": [call("Rome")]}
    question = {"role": "user", "content": "The weather in Rome?", "name": "Ada"}
    result = {"role": "tool", "content": "22"}
    last = {"role": "assistant", "content": "The weather is warm.", **answer}
    return {"messages": [{"role": "system", "content": "Be"}, question, calling, result, last], "tools": [TOOL]}


NAMED = on_the_fly.WITH_TOOLS.replace(
    "message.role + '\\n'", "message.role + (' ' + message.name if message.name else '') + '\\n'"
)


def marked(template: str) -> str:
    """The same with marks: an answer's turn is written as any other, between them."""
    end = "{{- '<|im_end|>\\n' }}\n{%- endfor %}\n{%- if add"
    start = template.rindex("{%- if message.role == 'assistant' and")
    turn = template[start : template.index(end)] + "{{- '<|im_end|>' }}"
    turns = "{%- if message.role == 'assistant' %}{% generation %}" + turn + "{% endgeneration %}{%- else %}" + turn
    return template[:start] + turns + "{%- endif %}" + template[template.index(end) :].replace("<|im_end|>", "", 1)


@pytest.mark.slow_cases(
    r".*-(messages-marked|pairs-unmarked)",
    why="pairwise: each part of a row with and without marks, in conversations and in pairs",
)
@pytest.mark.parametrize("marks", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("answers", ["messages", "pairs"])
@pytest.mark.parametrize(
    ("written", "instead", "reason"),
    [
        ("call.function.name", "''", "leaves out the name of a call of assistant message 3"),
        ("call.function.arguments | tojson", "''", "leaves out the arguments of a call of assistant message 3"),
        ("message.content |", "(message.content if message.role != 'tool' else '') |", "the text of tool message 4"),
        ("message.content |", "(message.content if message.role != 'user' else '') |", "the text of user message 2"),
        ("message.content |", "(message.content if not loop.last else '') |", "the text of assistant message 5"),
        ("message.content |", "(message.content if message.role != 'system' else '') |", "text of system messages"),
        ("tool | tojson", "'weather'", "tools"),
        ("' ' + message.name", "''", "name"),
        ("message.reasoning_content |", "'' |", "dropped_thinking"),
    ],
)
def test_what_a_template_leaves_out_is_refused_or_counted(
    tmp_path: Path, written: str, instead: str, reason: str, marks: bool, answers: str
) -> None:
    assert NAMED.count(written) == 1
    template, changed = (marked(each) if marks else each for each in (NAMED, NAMED.replace(written, instead)))
    row = with_all_parts(reasoning_content="It is warm.")
    if answers == "pairs":
        prompt, worse = row.pop("messages"), {"role": "assistant", "content": "Cold."}
        row |= {"prompt": prompt[:-1], "chosen": prompt[-1:], "rejected": [worse]}
    asked = {"pairs": answers == "pairs"}
    _, report = build(tmp_path, [row], template, **asked)
    assert (report.unwritten, report.odd) == ({}, {})
    if "message " in reason:
        with refused("data.malformed-row", naming=reason):
            build(tmp_path, [row], changed, **asked)
        return
    _, report = build(tmp_path, [row], changed, **asked)
    assert {**report.unwritten, **report.odd} == {reason: 1}
    assert reason == "dropped_thinking" or f"left out by the chat template: {reason} in 1 row" in report.lines()


def test_calls_outside_the_marks_are_no_silent_empty_answer(tmp_path: Path) -> None:
    outside = on_the_fly.CHATML_WITH_MARKS.replace(
        "{% endgeneration %}", "{% endgeneration %}{{- message.tool_calls | default('', true) }}"
    )
    row = with_all_parts()
    with refused("data.malformed-row", naming="cover the text and the calls of no assistant message"):
        build(tmp_path, [{**row, "messages": row["messages"][:3]}], outside)
    _, report = build(tmp_path, [row], outside)
    assert report.methods == {"generation marks on some assistant turns only": 1}
    assert report.odd == {"empty_answer": 1}


def test_the_demos_template_refuses_calls_and_counts_tools(tmp_path: Path) -> None:
    row = with_all_parts()
    with refused("data.malformed-row", naming="leaves out the name of a call of assistant message 3"):
        build(tmp_path, [row], DEMO_TEMPLATE)
    del row["messages"][2:4]
    row["tools"].append({"type": "web_search", "function": None})
    row["messages"][0] |= {"text": ["a", 1], "thinking": {"a": 1}, "tools": 3}
    _, report = build(tmp_path, [row], DEMO_TEMPLATE)
    assert report.unwritten == {"tools": 1, "name": 1, "text": 1, "thinking": 1}


BROKEN = {
    "<think>\nWhy? Because.": True,
    "Why?\n</think>\n\nBecause.": True,
    "<think>\nWhy?\n</think>\n\n<think>\nHow?\n</think>\n\nBecause.": True,
    "<think>\nWhy?\n</think>\n\nBecause.": False,
    "Because.": False,
}


@pytest.mark.slow_cases(
    r"(template0-(completion|all)|template1-(assistant|all)|template2-(assistant|completion))",
    why="pairwise over templates and targets",
)
@pytest.mark.parametrize("loss_on", ["assistant", "completion", "all"])
@pytest.mark.parametrize("template", [on_the_fly.CHATML, on_the_fly.CHATML_WITH_MARKS, on_the_fly.COUNTS_MESSAGES])
def test_broken_thinking_is_counted_however_targets_are_found(tmp_path: Path, template: str, loss_on: str) -> None:
    rows = [messages("one <think>", answer) for answer in BROKEN]
    rows += [messages("one", "two", "three", answer) for answer in BROKEN]
    dataset, report = build(tmp_path, rows, template, loss_on=loss_on)
    assert (len(dataset), report.odd) == (10, {"broken_thinking": 6})
    plain = [{"prompt": "one ", "completion": answer} for answer in BROKEN]
    assert build(tmp_path, plain, template, loss_on=loss_on)[1].odd == {"broken_thinking": 3}
    opened = [{"prompt": "one <think>\n", "completion": "Why?\n</think>\n\nBecause."}]
    assert not build(tmp_path, opened, template, loss_on=loss_on)[1].odd
    pairs = [{"prompt": "one ", "chosen": answer, "rejected": "No."} for answer in BROKEN]
    no = [{"role": "assistant", "content": "No."}]
    pairs += [{"prompt": row["messages"][:1], "chosen": row["messages"][1:], "rejected": no} for row in rows[:5]]
    assert sum(build(tmp_path, [row], template, pairs=True)[1].odd["broken_thinking"] for row in pairs) == 6


def test_thinking_that_the_generation_prompt_opens_is_not_broken(tmp_path: Path) -> None:
    opens = on_the_fly.CHATML.replace("'assistant\\n'", "'assistant\\n<think>\\n'").replace(
        "message.role + '\\n'", "message.role + '\\n' + ('<think>\\n' if message.role == 'assistant' else '')"
    )
    for loss_on in ("assistant", "all"):
        assert not build(tmp_path, [messages("one", "Why?\n</think>\n\nBecause.")], opens, loss_on=loss_on)[1].odd


@pytest.mark.parametrize("template", [on_the_fly.CHATML, on_the_fly.CHATML_WITH_MARKS, on_the_fly.COUNTS_MESSAGES])
@pytest.mark.parametrize("loss_on", ["assistant", "completion", "all"])
def test_empty_answers_are_counted_however_targets_are_found(tmp_path: Path, template: str, loss_on: str) -> None:
    for rows in (
        [messages("one", " \n")],
        [messages("one", "two", "three", "")],
        [{"prompt": "one", "completion": " "}],
        [{"text": "\n"}],
    ):
        assert build(tmp_path, rows, template, loss_on=loss_on)[1].odd == {"empty_answer": 1}


def test_arguments_of_transformers_are_none_of_a_template(tmp_path: Path) -> None:
    with refused("data.template-args", naming="data.template_args.tokenize"):
        build(tmp_path, ROWS, template_args={"tokenize": True})
    with refused("data.malformed-row", naming="'messages', which is not for a template"):
        build(tmp_path, [{**ROWS[0], "chat_template_kwargs": {"messages": []}}])
    dataset, _ = build(tmp_path, [{**ROWS[0], "chat_template_kwargs": {"enable_thinking": False}}])
    assert "<think>" not in bpe_tokenizer().decode(dataset.sample(0).input_ids.tolist())


def _texts(template: str, conversation: Conversation) -> list[str]:
    """What a published template's targets are, its special tokens being the tokenizer's."""
    tokenizer = bpe_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(re.findall(r"<\|[a-z_]+\|>", template)))})
    (samples,) = ChatRenderer(tokenizer, ChatOptions()).render([conversation])
    assert not isinstance(samples, MalformedRow), samples
    return [samples[0].text[start:end].strip() for start, end in samples[0].spans]


@pytest.mark.parametrize(
    ("name", "header", "calls"),
    [
        ("qwen3", "", True),
        ("qwen3_instruct_2507", "", True),
        ("qwen3_5_think", "", True),
        ("qwen3_5_nothink", "", True),
        ("qwen3_vl", "", True),
        ("lfm2_v2", "", True),
        ("nemotron_3_nano", "", True),
        ("qwen2_5", "", True),
        ("gptoss", "<|start|>assistant", False),
        ("muse_glimmer", "<|start|>assistant", False),
        ("gemma3", "", False),
        ("llama3", "", False),
    ],
)
def test_published_templates_have_the_targets_of_their_copies_with_marks(name: str, header: str, calls: bool) -> None:
    """TRL has both; its copies count the turn's header among the targets where `header` says so."""
    templates = Path(pytest.importorskip("trl", reason="TRL is not installed").__file__).with_name("chat_templates")
    published, marked = ((templates / f"{name}{end}.jinja").read_text() for end in ("", "_training"))
    tool = {**TOOL, "function": {**TOOL["function"], "description": "Tells it."}}
    conversations = [talk("one", "two", "three", "four"), replace(agent(thinking=False), tools=(tool,))]
    for conversation in conversations[: 1 + calls]:
        expected = [text.removeprefix(header).strip() for text in _texts(marked, conversation)]
        assert _texts(published, conversation) == expected


def deepseek_v4(directory: Path) -> ModelConfig:
    """A checkpoint with the special words of DeepSeek-V4 and no template."""
    tokenizer = bpe_tokenizer()
    words = ["<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>", "<think>", "</think>", "｜DSML｜"]
    tokenizer.add_tokens([AddedToken(word, special=word.startswith("<｜")) for word in words])
    tokenizer.save_pretrained(directory)
    DeepseekV4Config().save_pretrained(directory)
    return ModelConfig(name_or_path=str(directory))


def of_deepseek_v4(tmp_path: Path, conversation: Conversation, **options: Any) -> tuple[str, list[str]]:
    """The text of its only sample, and its targets, as characters."""
    renderer = ChatRenderer(load_tokenizer(deepseek_v4(tmp_path)), ChatOptions(**options))
    (found,) = renderer.render([conversation])
    assert not isinstance(found, MalformedRow), found
    (one,) = found
    return one.text, [one.text[start:end] for start, end in one.spans]


# These texts are those of encoding_dsv4.py, which the checkpoints of DeepSeek-V4 have in place of a template.
BRIEF = "<|bos|>Be brief.<｜User｜>1 + 1?<｜Assistant｜>"
SUM = "<｜User｜>2 + 2?<｜Assistant｜>"


@pytest.mark.parametrize(
    ("args", "expected", "learned"),
    [
        ({}, f"{BRIEF}</think>2<|eos|>{SUM}<think>Sum.</think>4<|eos|>", ["2<|eos|>", "Sum.</think>4<|eos|>"]),
        ({"thinking_mode": "chat"}, f"{BRIEF}</think>2<|eos|>{SUM}</think>4<|eos|>", ["2<|eos|>", "4<|eos|>"]),
        (
            {"drop_thinking": False},
            f"{BRIEF}<think>Easy.</think>2<|eos|>{SUM}<think>Sum.</think>4<|eos|>",
            ["Easy.</think>2<|eos|>", "Sum.</think>4<|eos|>"],
        ),
    ],
)
def test_deepseek_v4_is_written_as_its_encoder_writes_it(
    tmp_path: Path, args: dict[str, Any], expected: str, learned: list[str]
) -> None:
    turns = [("1 + 1?", "Easy.", "2"), ("2 + 2?", "Sum.", "4")]
    talked = [
        message
        for asked, thought, answer in turns
        for message in (
            {"role": "user", "content": asked},
            {"role": "assistant", "reasoning_content": thought, "content": answer},
        )
    ]
    conversation = Conversation(({"role": "system", "content": "Be brief."}, *talked))
    assert of_deepseek_v4(tmp_path, conversation, template_args=args) == (expected, learned)


def test_tools_of_deepseek_v4_are_its_markup_and_results_stand_in_the_order_of_the_calls(tmp_path: Path) -> None:
    def called(place: str, city: str) -> dict[str, Any]:
        arguments = {"city": city, "days": [1, {"é": None}]}
        return {"type": "function", "id": place, "function": {"name": "weather", "arguments": arguments}}

    conversation = Conversation(
        (
            {"role": "user", "content": "Rome or Oslo?"},
            {"role": "assistant", "reasoning": "Both.", "tool_calls": [called("a", "Rome"), called("b", "Oslo")]},
            {"role": "tool", "tool_call_id": "b", "content": "14"},
            {"role": "tool", "tool_call_id": "a", "content": "22"},
            {"role": "user", "content": "In short."},
            {"role": "assistant", "reasoning_content": "Compare.", "content": "Rome."},
            {"role": "user", "content": "Thanks"},
            {"role": "assistant", "content": "Sure."},
        ),
        tools=(TOOL,),
    )
    text, learned = of_deepseek_v4(tmp_path, conversation)
    calls = "".join(
        f'<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">{city}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">[1, {"é": null}]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        for city in ("Rome", "Oslo")
    )
    both = f"Both.</think>\n\n<｜DSML｜tool_calls>\n{calls}</｜DSML｜tool_calls><|eos|>"
    results = (
        "<｜User｜><tool_result>22</tool_result>\n\n<tool_result>14</tool_result>\n\nIn short.<｜Assistant｜><think>"
    )
    end = f"{results}Compare.</think>Rome.<|eos|><｜User｜>Thanks<｜Assistant｜><think></think>Sure.<|eos|>"
    assert text.endswith(f"calls.\n<｜User｜>Rome or Oslo?<｜Assistant｜><think>{both}{end}")
    assert learned == [both, "Compare.</think>Rome.<|eos|>", "Sure.<|eos|>"]
    head = text.partition("<｜User｜>")[0]
    assert head.startswith("<|bos|>\n\n## Tools\n\nYou have access to a set of tools")
    schemas = '### Available Tool Schemas\n\n{"name": "weather", "parameters": {"type": "object"}}\n\nYou MUST strictly'
    assert schemas in head
    assert hashlib.sha256(head.encode()).hexdigest()[:16] == "7bbfa61156b93b67"


def test_only_deepseek_v4_without_a_template_gets_that_one(tmp_path: Path) -> None:
    model = deepseek_v4(tmp_path)
    (tmp_path / "encoding").mkdir()
    (tmp_path / "encoding" / "encoding.py").touch()  # as DeepSeek-V4.1 has, which writes calls otherwise
    assert load_tokenizer(model).chat_template is None
    (tmp_path / "encoding" / "encoding_dsv4.py").touch()
    assert "｜DSML｜" in str(load_tokenizer(model).chat_template)
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = on_the_fly.CHATML
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(model).chat_template == on_the_fly.CHATML
