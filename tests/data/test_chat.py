"""Targets are exactly what the assistant writes, with its end token, whatever the template's habits."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase

from expertmesh.data.encoding.encode import Encoded, Encoder
from expertmesh.data.encoding.targets import ChatOptions
from expertmesh.data.formats import Conversation, MalformedRow, PlainText, PromptCompletion, Record
from tests.data import tokenizers_on_the_fly as on_the_fly
from tests.data.tokenizers_on_the_fly import bpe_tokenizer
from tests.support.errors import refused

END = "<|im_end|>"


def talk(*contents: str, system: str | None = None) -> Conversation:
    """Alternating user and assistant messages."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return Conversation(tuple([{"role": "system", "content": system}] * (system is not None) + messages))


def encode(tokenizer: PreTrainedTokenizerBase, record: Record, loss_on: str = "assistant") -> Encoded:
    (result,) = Encoder(tokenizer, ChatOptions(loss_on)).encode([record])
    assert not isinstance(result, MalformedRow), result
    (sample,) = result
    return sample


def target_texts(tokenizer: PreTrainedTokenizerBase, encoded: Encoded) -> list[str]:
    """The decoded runs of consecutive target tokens."""
    ids, targets = encoded.input_ids, encoded.targets
    borders = np.flatnonzero(np.diff(targets.astype(int))) + 1
    runs = zip(np.split(ids, borders), np.split(targets, borders), strict=True)
    return [str(tokenizer.decode(run.tolist())) for run, is_target in runs if is_target.any()]


PLAIN = ("What is this?", "A test, no more.", "And  that?", "Another one:\n    indented   é漢🙂\n")
THINKING = (
    "Hi",
    "<think>\nshort\n</think>\n\nHello.",
    "Why?",
    "<think>\nlonger thought\n</think>\n\nBecause.",
)


@pytest.mark.parametrize(
    ("template", "contents", "expected", "method"),
    [
        pytest.param(on_the_fly.CHATML, PLAIN, [PLAIN[1] + END, PLAIN[3] + END], "prefix difference", id="chatml"),
        pytest.param(
            on_the_fly.CHATML_WITH_MARKS,
            PLAIN,
            [PLAIN[1] + END, PLAIN[3] + END],
            "generation marks",
            id="marks",
        ),
        pytest.param(
            on_the_fly.DEFAULT_SYSTEM,
            PLAIN,
            [PLAIN[1] + END, PLAIN[3] + END],
            "prefix difference",
            id="system",
        ),
        pytest.param(
            on_the_fly.STRIPS_EARLIER_THINKING,
            THINKING,
            ["Hello." + END, "<think>\nlonger thought\n</think>\n\nBecause." + END],
            "stand-ins",
            id="strips-thinking",
        ),
        pytest.param(
            on_the_fly.STRIPS_EARLIER_THINKING,
            ("Hi", "Hello.", "Why?", "Because."),
            ["Hello." + END, "Because." + END],
            "stand-ins",
            id="adds-empty-thinking-which-is-no-target",
        ),
        pytest.param(
            on_the_fly.COUNTS_MESSAGES,
            PLAIN,
            [PLAIN[1] + END, PLAIN[3] + END],
            "stand-ins",
            id="not-prefix-stable",
        ),
        pytest.param(
            on_the_fly.ENDS_DIFFERENTLY,
            PLAIN,
            [PLAIN[1] + END, PLAIN[3] + "<|return|>"],
            "stand-ins",
            id="ends-differently",
        ),
    ],
)
@pytest.mark.parametrize("trim_offsets", [False, True])
def test_targets_are_the_answers_and_their_end_token(
    template: str, contents: tuple[str, ...], expected: list[str], method: str, trim_offsets: bool
) -> None:
    tokenizer = bpe_tokenizer(template, trim_offsets=trim_offsets)
    encoded = encode(tokenizer, talk(*contents))
    assert target_texts(tokenizer, encoded) == expected
    assert encoded.method == method
    assert encoded.end is not None
    assert expected[-1].rstrip().endswith(tokenizer.decode(encoded.end))
    text = tokenizer.apply_chat_template(list(talk(*contents).messages), tokenize=False)
    assert tokenizer.decode(encoded.input_ids.tolist()) == text


def test_marks_and_prefix_difference_give_the_same_targets() -> None:
    conversation = talk(*PLAIN, system="Be brief.")
    marked = encode(bpe_tokenizer(on_the_fly.CHATML_WITH_MARKS), conversation)
    unmarked = encode(bpe_tokenizer(on_the_fly.CHATML), conversation)
    assert np.array_equal(marked.input_ids, unmarked.input_ids)
    assert np.array_equal(marked.targets, unmarked.targets)


def test_prefix_difference_equals_the_difference_of_token_ids() -> None:
    tokenizer = bpe_tokenizer(on_the_fly.CHATML)
    messages = list(talk(*PLAIN).messages)
    encoded = encode(tokenizer, talk(*PLAIN))
    before = tokenizer.apply_chat_template(messages[:3], add_generation_prompt=True, return_dict=False)
    full = tokenizer.apply_chat_template(messages, return_dict=False)
    assert full[: len(before)] == before
    line_break = len(tokenizer("\n")["input_ids"])
    last_turn = [False] * len(before) + [True] * (len(full) - len(before) - line_break) + [False] * line_break
    first_turn_end = len(tokenizer.apply_chat_template(messages[:2], return_dict=False))
    assert encoded.targets[first_turn_end:].tolist() == last_turn[first_turn_end:]


def test_token_that_reaches_across_the_border_belongs_to_the_answer() -> None:
    tokenizer = bpe_tokenizer(on_the_fly.CHATML)
    messages = list(talk("Go on", "  indented answer").messages)
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    encoded = encode(tokenizer, talk("Go on", "  indented answer"))
    assert encoded.input_ids[: len(prompt)].tolist() != prompt, "the line break should join the spaces"
    assert target_texts(tokenizer, encoded) == ["\n  indented answer<|im_end|>"]


def test_template_without_end_token_is_told() -> None:
    tokenizer = bpe_tokenizer(on_the_fly.PLAIN_WORDS)
    encoded = encode(tokenizer, talk("Hello", "you there"))
    assert target_texts(tokenizer, encoded) == ["you there\n"]
    assert encoded.end is None


def test_completion_takes_the_last_assistant_turn_only() -> None:
    for template in (on_the_fly.CHATML, on_the_fly.CHATML_WITH_MARKS):
        tokenizer = bpe_tokenizer(template)
        assert target_texts(tokenizer, encode(tokenizer, talk(*PLAIN), "completion")) == [PLAIN[3] + END]


def test_all_takes_every_token() -> None:
    assert encode(bpe_tokenizer(on_the_fly.CHATML), talk(*PLAIN), "all").targets.all()


def test_conversation_without_an_answer_has_no_target() -> None:
    for template in (on_the_fly.CHATML, on_the_fly.CHATML_WITH_MARKS):
        assert not encode(bpe_tokenizer(template), talk("Anyone there?")).targets.any()


def test_conversation_that_begins_with_the_assistant() -> None:
    conversation = Conversation(({"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Bye."}))
    tokenizer = bpe_tokenizer(on_the_fly.CHATML)
    assert target_texts(tokenizer, encode(tokenizer, conversation)) == ["Hi." + END]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (on_the_fly.MARKS_NOTHING, "marks of the chat template cover the text and the calls of no assistant message"),
        (on_the_fly.DROPS_ANSWERS, "leaves out the text of assistant message 2"),
        (on_the_fly.REPEATS_ANSWERS, "repeats or transforms the text of assistant message 2"),
        (on_the_fly.ALTERNATES_ONLY, "roles must alternate"),
    ],
)
def test_templates_that_hide_the_targets_are_refused_with_the_reason(template: str, reason: str) -> None:
    conversation = talk("one", "two", "three", "four")
    if template == on_the_fly.ALTERNATES_ONLY:
        conversation = Conversation(conversation.messages[1:])
    (result,) = Encoder(bpe_tokenizer(template), ChatOptions()).encode([conversation])
    assert isinstance(result, MalformedRow)
    assert reason in str(result)


def test_missing_chat_template_names_the_tokenizer_and_the_mend() -> None:
    tokenizer = bpe_tokenizer(None)
    tokenizer.name_or_path = "some/model"
    with refused("tokenizer.no-chat-template", naming="some/model"):
        encode(tokenizer, talk("a", "b"))


def test_marks_on_some_turns_only_are_told() -> None:
    template = on_the_fly.CHATML_WITH_MARKS.replace("== 'assistant' %}{% gen", "== 'assistant' and loop.last %}{% gen")
    assert encode(bpe_tokenizer(template), talk(*PLAIN)).method == "generation marks on some assistant turns only"


def test_prompt_is_no_target_and_the_completion_ends_with_eos() -> None:
    tokenizer = bpe_tokenizer(adds_bos=True)
    record = PromptCompletion("Question: why?\nAnswer:", " because\n")
    for loss_on, begin in (("assistant", ""), ("completion", ""), ("completion", "<|bos|>")):
        encoded = encode(tokenizer, replace(record, prompt=begin + record.prompt), loss_on)
        assert target_texts(tokenizer, encoded) == [" because\n<|eos|>"]
        assert tokenizer.decode(encoded.input_ids.tolist()).startswith("<|bos|>Question")
    assert encode(tokenizer, record, "all").targets.all()


def test_text_is_all_target_and_gets_bos_and_eos_once() -> None:
    tokenizer = bpe_tokenizer(adds_bos=True)
    for text in ("A document.", "A document.<|eos|>", "<|bos|>A document.<|eos|>"):
        encoded = encode(tokenizer, PlainText(text))
        assert tokenizer.decode(encoded.input_ids.tolist()) == "<|bos|>A document.<|eos|>"
        assert encoded.targets.all()
    without_eos = bpe_tokenizer(eos=None)
    encoded = encode(without_eos, PlainText("A document."))
    assert without_eos.decode(encoded.input_ids.tolist()) == "A document."
    assert encoded.end is None


class Letters(PreTrainedTokenizer):
    """A tokenizer without offsets: one token per character, or one per pair of `pairs`."""

    def __init__(self, pairs: tuple[str, ...] = (), **kwargs: Any) -> None:
        self._pieces = [*pairs, *map(chr, range(128))]
        super().__init__(unk_token="?", **kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def get_vocab(self) -> dict[str, int]:
        return {piece: i for i, piece in enumerate(self._pieces)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        pieces = []
        while text:
            pieces.append(next(piece for piece in self._pieces if text.startswith(piece)))
            text = text[len(pieces[-1]) :]
        return pieces

    def _convert_token_to_id(self, token: str) -> int:
        return self._pieces.index(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._pieces[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def test_tokenizer_without_offsets_uses_true_prefixes_and_refuses_joint_tokens() -> None:
    tokenizer = Letters()
    tokenizer.chat_template = on_the_fly.PLAIN_WORDS
    assert target_texts(tokenizer, encode(tokenizer, talk("Hi", "yes"))) == ["yes\n"]
    joining = Letters(pairs=(":y",))
    joining.chat_template = on_the_fly.PLAIN_WORDS
    (result,) = Encoder(joining, ChatOptions()).encode([talk("Hi", "yes")])
    assert isinstance(result, MalformedRow)
    assert "across the border" in str(result)
