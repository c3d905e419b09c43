"""Which characters of a rendered conversation are targets: what the child process of `ChatRenderer` computes.

The template's `{% generation %}` marks decide where it has them. Without marks a turn's target is what the template
adds after the generation prompt, up to the end of that turn ("prefix difference"). Where the truncated conversation
renders differently from the full one (Qwen3 and GPT-OSS strip thinking from earlier turns), the turn is located in the
full rendering with two stand-in answers, or stand-in arguments of its last call ("stand-ins"). Every span is checked
against the full text; one that cannot be proven is refused, so a mask is never silently all ones or all zeros.
"""

import datetime
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from jinja2.exceptions import SecurityError as SandboxError
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from expertmesh.data.encoding.sandbox import LimitExceeded
from expertmesh.data.formats import THINKING_KEYS, MalformedRow, thoughts, visible, without_thinking

GENERATION_MARKS = "generation marks"
SOME_TURNS_MARKED = "generation marks on some assistant turns only"
PREFIX_DIFFERENCE = "prefix difference"
STAND_INS = "stand-ins"
EVERY_TOKEN = "every token"

# How much longer than the conversation itself its rendering may be, in characters.
MAX_ADDED_CHARACTERS = 4_000_000

_MAX_REASON = 300
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_END_OF_EMPTY_THOUGHT = re.compile(r"\s*</think>\s*")
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")
# Two answers that share no first and no last character, hold nothing a template might strip or parse, and are
# unlikely to occur in data: what differs between their renderings is the answer's place, and nothing else.
_STAND_INS = ("0stand0in0", "1stand1in1")
_HINT = "so its targets cannot be found: use a template with {% generation %} marks"

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How conversations are rendered and which turns are targets: keys of section `data`, and the date of a run.

    `date` is what a template writes that asks for today's; today's date unless it is given.
    """

    loss_on: str = "assistant"
    thinking: Literal["auto", "drop", "keep_last", "every_turn"] = "auto"
    template_args: Mapping[str, Any] = field(default_factory=dict)
    date: datetime.date = field(default_factory=datetime.date.today)


@dataclass(frozen=True, slots=True)
class Rendered:
    """The full text of one sample, the character spans that are targets, and how they were found.

    `empty_thoughts`: thinking blocks without a thought, which are no targets. `dropped_thinking`: some of a target
    turn's thinking is not in the text.
    """

    text: str
    spans: tuple[Span, ...]
    method: str
    empty_thoughts: int = 0
    dropped_thinking: bool = False


class TargetFinder:
    """Executes a tokenizer's template, as often as locating turns takes. Lives in the child process."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: ChatOptions) -> None:
        self._tokenizer = tokenizer
        self._template = ""
        self._options = options
        self._special_strings = special_strings(tokenizer)
        self._owner = os.getpid()
        self._given: dict[str, Any] = {}
        self._limit = 0

    def answer(self, request: Mapping[str, Any]) -> list[Any] | str:
        """A conversation's samples or a pair's texts, as JSON values; or the reason why the row is malformed."""
        assert os.getpid() != self._owner, "a template is executed in a child process only"
        chat_template_utils.datetime = _Clock(self._options.date)  # type: ignore[assignment, attr-defined]
        tools = request["tools"] or None
        self._template = self._tokenizer.get_chat_template(tools=tools)  # a tokenizer may have one for tools
        self._given = {"tools": tools, **self._options.template_args, **request["template_args"]}
        self._limit = MAX_ADDED_CHARACTERS + _characters(request)
        try:
            if "answers" in request:
                prompt = request["prompt"]
                texts = [self._render(self._prepared([*prompt, *answer])) for answer in request["answers"]]
                return [self._render(self._prepared(prompt), generation_prompt=True), *texts]
            return [asdict(each) for each in self._samples(request["messages"], set(request["untrained"]))]
        except MalformedRow as error:
            return str(error)

    def _samples(self, messages: Messages, untrained: set[int]) -> list[Rendered]:
        """One sample, or several if only so every turn can keep its thinking."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self._options.loss_on == "completion":
            turns = turns[-1:]
        turns = [turn for turn in turns if turn not in untrained]
        messages = self._prepared(messages)
        whole = self._find_targets(messages, turns)
        if self._options.thinking != "every_turn" or not whole.dropped_thinking:
            return [whole]
        samples = []
        asked = [i for i, message in enumerate(messages) if message["role"] == "user"]
        for start, end in zip(asked, [*asked[1:], len(messages)], strict=True):
            if of_this_answer := [turn for turn in turns if start < turn < end]:
                samples.append(self._find_targets(messages[:end], of_this_answer))
        if any(sample.dropped_thinking for sample in samples):
            raise MalformedRow("the chat template leaves out the thinking of an answer, even of the last one")
        return samples

    def _prepared(self, messages: Messages) -> list[Mapping[str, Any]]:
        """The messages with the thinking that `data.thinking` leaves them."""
        mode = self._options.thinking
        if mode not in ("drop", "keep_last"):
            return list(messages)
        last_question = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        kept_from = len(messages) if mode == "drop" else last_question
        return [
            message if i > kept_from or message["role"] != "assistant" else without_thinking(message)
            for i, message in enumerate(messages)
        ]

    def _find_targets(self, messages: Messages, turns: Sequence[int]) -> Rendered:
        """The sample of these messages whose targets are these turns."""
        if self._options.loss_on == "all":
            text = self._render(messages)
            return self._judged(text, [(0, len(text))], EVERY_TOKEN, [messages[turn] for turn in turns])
        if _GENERATION_MARK.search(self._template):
            return self._render_marked(messages, turns)
        text = self._render(messages)
        spans: list[Span] = []
        method = PREFIX_DIFFERENCE
        for turn in turns:
            span = self._span_by_prefixes(messages, turn, text)
            if span is None:
                span, method = self._span_by_stand_ins(messages, turn, text), STAND_INS
            if spans and span[0] < spans[-1][1]:
                raise MalformedRow(f"the chat template reorders assistant message {turn + 1}, {_HINT}")
            spans.append(span)
        return self._judged(text, spans, method, [messages[turn] for turn in turns])

    def _judged(self, text: str, spans: Sequence[Span], method: str, turns: Messages) -> Rendered:
        """Without thinking blocks that hold no thought: as targets they would teach not to think."""
        kept: list[Span] = []
        empty = 0
        blocks = [match.span() for match in _EMPTY_THOUGHT.finditer(text)] if method != EVERY_TOKEN else []
        for start, end in spans:
            for block in blocks:  # some begin in the generation prompt
                if start < block[1] and block[0] < end:
                    empty += 1
                    kept.append((start, block[0]))
                    start = block[1]
            kept.append((start, end))
        dropped = any(thought not in text for turn in turns for thought in thoughts(turn))
        return Rendered(text, tuple(span for span in kept if span[0] < span[1]), method, empty, dropped)

    def _render(self, messages: Messages, *, generation_prompt: bool = False) -> str:
        def apply() -> Any:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self._given,
            )

        text = _execute(apply)
        assert isinstance(text, str)
        self._refuse_flood(text)
        return text

    def _refuse_flood(self, text: str) -> None:
        if len(text) > self._limit:
            own = self._limit - MAX_ADDED_CHARACTERS
            raise LimitExceeded(f"turns a conversation of {own:,} characters into {len(text):,}")

    def _render_marked(self, messages: Messages, turns: Sequence[int]) -> Rendered:
        # `apply_chat_template(return_assistant_tokens_mask=True)` gives tokens only, and marks all of the text's rest
        # when a span's last character has no token. The renderer beneath it gives character spans.
        template_variables: dict[str, Any] = {**self._tokenizer.special_tokens_map, **self._given}

        def apply() -> Any:
            return chat_template_utils.render_jinja_template(
                conversations=[[{k: v for k, v in message.items() if v is not None} for message in messages]],
                chat_template=self._template,
                return_assistant_tokens_mask=True,
                **template_variables,
            )

        # annotated `-> str` upstream, but returns the texts and, for each, the spans of its marks
        (text,), (spans_of_text,) = _execute(apply)
        self._refuse_flood(text)
        spans = [(start, end) for start, end in spans_of_text]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if list(turns) != answers:
            if len(spans) != len(answers):
                raise MalformedRow(
                    f"the chat template marks {len(spans)} parts of {len(answers)} assistant messages, so those that "
                    "are no targets cannot be found"
                )
            spans = [span for span, answer in zip(spans, answers, strict=True) if answer in turns]
        spans = [(start, end) for start, end in spans if end > start]
        marked = "\n".join(text[start:end] for start, end in spans)
        covered = [_holds(marked, messages[turn]) for turn in turns if visible(messages[turn])]
        if covered and not any(covered):
            raise MalformedRow(
                "the {% generation %} marks of the chat template cover the text of no assistant message; "
                "repair or remove them"
            )
        method = GENERATION_MARKS if all(covered) else SOME_TURNS_MARKED
        return self._judged(text, spans, method, [messages[turn] for turn in turns])

    def _span_by_prefixes(self, messages: Messages, turn: int, text: str) -> Span | None:
        """What rendering up to and including `turn` adds to its generation prompt, if both begin `text`."""
        start = self._prompt_length(messages[:turn], text)
        until_turn = self._render_or_none(messages[: turn + 1])
        if start is None or until_turn is None or not text.startswith(until_turn) or len(until_turn) < start:
            return None
        # Stand-ins are tried for a template that omits or rewrites the answer.
        return (start, len(until_turn)) if _holds(until_turn[start:], messages[turn]) else None

    def _prompt_length(self, messages: Messages, text: str) -> int | None:
        """Length of the rendering of `messages` with the generation prompt, or None if `text` has another.

        Tried without their thinking as well, which a later answer may have removed from the text.
        """
        for tried in (messages, [without_thinking(message) for message in messages]):
            prompt = self._render_or_none(tried, generation_prompt=True)
            if prompt is not None and text.startswith(prompt):
                return len(prompt)
            # A prompt that asks for no thinking: what the text has in the place of its empty thought is the answer's.
            shared, rest = _split_where_they_part(prompt or "", text)
            if shared.rstrip().endswith("<think>") and _END_OF_EMPTY_THOUGHT.fullmatch(rest):
                return len(shared)
        return None

    def _render_or_none(self, messages: Messages, *, generation_prompt: bool = False) -> str | None:
        """A beginning of a conversation may be something the template refuses although the whole is not."""
        if not messages:
            return None
        try:
            return self._render(messages, generation_prompt=generation_prompt)
        except MalformedRow:
            return None

    def _span_by_stand_ins(self, messages: Messages, turn: int, text: str) -> Span:
        """Locate `turn` in the full rendering: what no answer changes is not part of the answer."""
        name = f"assistant message {turn + 1}"
        if messages[turn].get("tool_calls"):
            return self._span_of_calls(messages, turn, text)
        first, second = (self._render(_with_answer(messages, turn, answer)) for answer in _STAND_INS)
        if _STAND_INS[0] not in first:
            raise MalformedRow(f"the chat template leaves out the text of {name}")
        before, _, after = first.partition(_STAND_INS[0])
        if second != before + _STAND_INS[1] + after:
            raise MalformedRow(f"the chat template repeats or transforms the text of {name}, {_HINT}")
        if not text.endswith(after):
            raise MalformedRow(f"what the chat template writes after {name} depends on that message, {_HINT}")
        end = len(text) - len(after)
        start = self._prompt_length(messages[:turn], text)
        if start is None and text.startswith(before):
            start = len(before)
        if start is None or start > end:
            raise MalformedRow(f"the chat template does not begin {name} with its generation prompt, {_HINT}")
        return start, end + self._closing_length(messages, turn, after)

    def _closing_length(self, messages: Messages, turn: int, after: str) -> int:
        """How many characters at the start of `after` end the turn (`<|im_end|>`).

        They are what the template puts behind the answer when the turn is the last one. Templates that end
        the last turn with one special token and earlier turns with another (GPT-OSS) are recognised by that.
        """
        last = self._render(_with_answer(messages[: turn + 1], turn, _STAND_INS[0]))
        closing = last[last.rindex(_STAND_INS[0]) + len(_STAND_INS[0]) :] if _STAND_INS[0] in last else None
        if closing is not None and after.startswith(closing):
            return len(closing)
        if closing is not None and any(closing.startswith(special) for special in self._special_strings):
            for special in self._special_strings:
                if after.startswith(special):
                    return len(special)
        raise MalformedRow(f"the chat template does not show where assistant message {turn + 1} ends, {_HINT}")

    def _span_of_calls(self, messages: Messages, turn: int, text: str) -> Span:
        """Locate a turn with calls: what no arguments of its last call change lies before or after them."""
        name = f"assistant message {turn + 1}"
        others = [_with_arguments(messages, turn, {"argument": stand_in}) for stand_in in _STAND_INS]
        first, second = map(self._render, others)
        if first.count(_STAND_INS[0]) != 1 or second != first.replace(*_STAND_INS):
            raise MalformedRow(f"the chat template repeats or leaves out the arguments of {name}, {_HINT}")
        after = _common_end([text, first, second])
        # Closed as when it is the last message, where it ends the text.
        closing = _common_end([self._render(each[: turn + 1]) for each in (messages, *others)])
        start = self._prompt_length(messages[:turn], text)
        if start is None:  # earlier turns are written otherwise as the conversation grows; as they stand in the text:
            before, found, _ = self._render(_with_answer(messages, turn, _STAND_INS[0])).partition(_STAND_INS[0])
            start = len(before) if found and text.startswith(before) else None
        end = len(text) - len(after) + len(closing)
        if start is None or not closing or not after.startswith(closing) or not _holds(text[start:end], messages[turn]):
            raise MalformedRow(f"the chat template does not show where {name}, with calls, begins and ends, {_HINT}")
        return start, end


def _execute(apply: Callable[[], Any]) -> Any:
    """Run the template. Whatever else it raises is its way of refusing the conversation."""
    try:
        return apply()
    except MemoryError:
        raise
    except SandboxError as error:
        raise LimitExceeded(f"reaches for what its sandbox forbids ({_short(error)})") from error
    except RecursionError as error:
        raise LimitExceeded("is nested without end") from error
    except OverflowError as error:
        raise LimitExceeded(f"asks for more than a template may ({_short(error)})") from error
    except Exception as error:
        raise MalformedRow(f"the chat template refuses the conversation ({_short(error)})") from error


class _Clock:
    """Stands where transformers' `strftime_now` looks for the class `datetime`."""

    def __init__(self, date: datetime.date) -> None:
        self._now = datetime.datetime.combine(date, datetime.time())

    def now(self) -> datetime.datetime:
        return self._now


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_REASON]


def _characters(value: Any) -> int:
    """Of all strings in a JSON value."""
    if isinstance(value, str):
        return len(value)
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(_characters, parts))


def special_strings(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The strings of the tokenizer's special tokens; longest first, as one may begin another."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(added | set(tokenizer.all_special_tokens), key=lambda text: (-len(text), text)))


def _holds(text: str, message: Mapping[str, Any]) -> bool:
    """Whether the text shows the answer: its visible part, and the names of the functions that it calls."""
    names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    return all(part in text for part in (visible(message), *names))


def _split_where_they_part(text: str, other: str) -> tuple[str, str]:
    """What `other` begins with as well, and the rest of `text`."""
    length = next((i for i, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]), len(text))
    return text[:length], text[length:]


def _common_end(texts: Sequence[str]) -> str:
    """The longest end that all of them have."""
    shortest = min(texts, key=len)
    length = next(
        (i for i, last in enumerate(reversed(shortest), start=1) if any(text[-i] != last for text in texts)),
        len(shortest) + 1,
    )
    return shortest[len(shortest) - length + 1 :]


def _with_answer(messages: Messages, turn: int, answer: str) -> list[Mapping[str, Any]]:
    """The messages with another answer, and no thinking, at `turn`."""
    replaced = {key: value for key, value in messages[turn].items() if key not in THINKING_KEYS}
    return [*messages[:turn], {**replaced, "content": answer}, *messages[turn + 1 :]]


def _with_arguments(messages: Messages, turn: int, arguments: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """The messages with other arguments in the last call of `turn`."""
    *others, last = messages[turn]["tool_calls"]
    called = {**last, "function": {**last["function"], "arguments": arguments}}
    return [*messages[:turn], {**messages[turn], "tool_calls": [*others, called]}, *messages[turn + 1 :]]
