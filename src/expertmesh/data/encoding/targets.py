"""Find which characters of a rendered conversation are targets, in the child process of `ChatRenderer`.

The template's `{% generation %}` marks decide where it has them. Without marks a turn's target is what the template
adds after the generation prompt, up to the end of that turn ("prefix difference"). Where the truncated conversation
renders differently from the full one (Qwen3 and GPT-OSS strip thinking from earlier turns), the turn is located in the
full rendering with two stand-in answers, or stand-in arguments of its last call ("stand-ins"). Every span is checked
against the full text; one that cannot be proven is refused, so a mask is never silently all ones or all zeros. With
marks or without, a row is refused whose calls, results, questions or trained answers the template leaves out
(unwritten.py); what else it leaves out is counted.
"""

import datetime
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

from jinja2.exceptions import SecurityError as SandboxError
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from expertmesh.data.encoding.sandbox import LimitExceeded
from expertmesh.data.encoding.unwritten import (
    CALLS,
    TEXT,
    THINKING,
    Part,
    has_broken_thinking,
    parts_of,
    with_words,
)
from expertmesh.data.formats import IMAGE, THINKING_KEYS, MalformedRow, shared_length, visible, without_thinking

GENERATION_MARKS = "generation marks"
SOME_TURNS_MARKED = "generation marks on some assistant turns only"
PREFIX_DIFFERENCE = "prefix difference"
STAND_INS = "stand-ins"
EVERY_TOKEN = "every token"
AFTER_PROMPT = "the prompt's end"

# How much longer than the conversation itself its rendering may be, in characters.
MAX_ADDED_CHARACTERS = 4_000_000

_MAX_REASON = 300
# Kinds of conversations of which it is remembered which parts the template writes.
_MAX_REMEMBERED = 4096
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
    """The rendering of conversations and the choice of targets: keys of section `data`, and the date of a run."""

    loss_on: str = "assistant"
    """data.loss_on."""
    thinking: Literal["auto", "drop", "keep_last", "every_turn"] = "auto"
    """data.thinking."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    date: datetime.date = field(default_factory=datetime.date.today)
    """The date that a template writes as today's."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The full text of one sample and its targets."""

    text: str
    spans: tuple[Span, ...]
    """Character ranges of the text that are targets."""
    method: str
    """The way in which the targets were found."""
    empty_thoughts: int = 0
    """Thinking blocks without a thought, which are no targets."""
    odd: tuple[str, ...] = ()
    """Keys of report.ODD_ROWS that apply to the text."""
    unwritten: tuple[str, ...] = ()
    """Names of parts of the conversation that the template leaves out, thinking aside."""


@dataclass(frozen=True, slots=True)
class _Probe:
    """A template's treatment of a kind of conversation."""

    unwritten: frozenset[Part]
    """Parts that it writes nowhere."""
    unmarked: frozenset[Part] = frozenset()
    """Parts that it does not write between its marks."""
    owners: Sequence[set[int]] = ()
    """For each span that it marks, the assistant messages whose parts are in it."""


class TargetFinder:
    """Executes a tokenizer's template, as often as locating turns takes. Lives in the child process."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: ChatOptions) -> None:
        self._tokenizer = tokenizer
        self._template = ""
        self._options = options
        self._special_strings = special_strings(tokenizer)
        self._nothing = re.compile("|".join([r"\s", *map(re.escape, self._special_strings)]).join(("(?:", ")*")))
        self._owner = os.getpid()
        self._given: dict[str, Any] = {}
        self._tools: list[dict[str, Any]] = []
        self._has_images = False
        self._limit = 0
        self._remembered: dict[int, _Probe] = {}

    def answer(self, request: Mapping[str, Any]) -> list[Any] | str:
        """Return a conversation's samples, or a pair's prompt and its two responses, each with the prompt before it, as
        JSON values; or the reason why the row is malformed.
        """
        assert os.getpid() != self._owner, "a template is executed in a child process only"
        chat_template_utils.datetime = _Clock(self._options.date)  # type: ignore[assignment, attr-defined]
        self._tools, self._has_images = request["tools"], request.get("has_images", False)
        self._template = self._tokenizer.get_chat_template(tools=self._tools or None)  # there may be one for tools
        self._given = {**self._options.template_args, **request["template_args"]}
        self._limit = MAX_ADDED_CHARACTERS + _characters(request)
        try:
            if "answers" in request:
                prompt = request["prompt"]
                pairs = [self._response(prompt, answer) for answer in request["answers"]]
                return [self._render(self._prepared(prompt), generation_prompt=True), *map(asdict, pairs)]
            return [asdict(each) for each in self._samples(request["messages"], set(request["untrained"]))]
        except MalformedRow as error:
            return str(error)

    def _samples(self, messages: Messages, untrained: set[int]) -> list[Rendered]:
        """Return one sample, or several if only so every turn can keep its thinking."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self._options.loss_on == "completion":
            turns = turns[-1:]
        turns = [turn for turn in turns if turn not in untrained]
        messages = self._prepared(messages)
        whole = self._find_targets(messages, turns)
        if self._options.thinking != "every_turn" or "dropped_thinking" not in whole.odd:
            return [whole]
        samples = []
        questions = [i for i, message in enumerate(messages) if message["role"] == "user"]
        for start, end in pairwise((-1, *questions, len(messages))):  # there may be answers before the first question
            if of_this_answer := [turn for turn in turns if start < turn < end]:
                samples.append(self._find_targets(messages[:end], of_this_answer))
        if any("dropped_thinking" in sample.odd for sample in samples):
            raise MalformedRow("the chat template leaves out the thinking of an answer, even of the last one")
        return samples

    def _response(self, prompt: Messages, answer: Messages) -> Rendered:
        """Render prompt and response as one text; encode.py finds the response's tokens in it."""
        messages = self._prepared([*prompt, *answer])
        text = self._render(messages)
        turns = range(len(prompt), len(messages))
        left_out = self._left_out(messages, text, turns, parts_of(messages, self._tools))
        return self._judged(text, [], AFTER_PROMPT, messages[len(prompt) :], left_out)

    def _prepared(self, messages: Messages) -> list[Mapping[str, Any]]:
        """Return the messages with the thinking that `data.thinking` leaves them."""
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
        """Return the sample of these messages whose targets are these turns."""
        text, marked = self._written(messages)
        parts = parts_of(messages, self._tools)
        left_out = self._left_out(messages, text, turns, parts)
        if self._options.loss_on == "all":
            spans, method = [(0, len(text))], EVERY_TOKEN
        elif self._has_marks:
            spans, method = self._marked_turns(messages, turns, text, marked, parts)
        else:
            spans, method = self._located_turns(messages, turns, text)
        return self._judged(text, spans, method, [messages[turn] for turn in turns], left_out)

    def _judged(
        self, text: str, spans: Sequence[Span], method: str, turns: Messages, left_out: Sequence[Part]
    ) -> Rendered:
        """Return the text with target spans less empty thinking blocks, which would teach the model not to think."""
        kept: list[Span] = []
        empty, has_empty_answer = 0, False
        blocks = [match.span() for match in _EMPTY_THOUGHT.finditer(text)] if method != EVERY_TOKEN else []
        for start, end in spans:
            goes_on = bool(kept) and kept[-1][1] == start  # some marks have a text's last special token by itself
            pieces: list[Span] = []
            for block in blocks:  # some begin in the generation prompt
                if start < block[1] and block[0] < end:
                    empty += 1
                    pieces.append((start, block[0]))
                    start = block[1]
            pieces = [piece for piece in (*pieces, (start, end)) if piece[0] < piece[1]]
            has_empty_answer |= not goes_on and all(self._nothing.fullmatch(text, *piece) for piece in pieces)
            kept += pieces
        in_turns = kept if method not in (EVERY_TOKEN, AFTER_PROMPT) else _places(text, turns)
        odd = {
            "empty_answer": has_empty_answer,
            "dropped_thinking": any(part.kind == THINKING for part in left_out),
            "broken_thinking": has_broken_thinking(text, in_turns),
        }
        unwritten = dict.fromkeys(part.name for part in left_out if part.kind != THINKING)
        return Rendered(text, tuple(kept), method, empty, tuple(kind for kind in odd if odd[kind]), tuple(unwritten))

    def _left_out(self, messages: Messages, text: str, turns: Sequence[int], parts: Sequence[Part]) -> list[Part]:
        """Return the parts that the text lacks, thoughts of `turns` alone.

        Raises `MalformedRow` where nobody can have meant it: calls, results, questions, the text of a target.
        """
        unwritten = self._probed(messages, parts).unwritten
        suspects = [part for part in parts if part in unwritten or part.verbatim not in text]

        def are_left_out(*some: Part) -> bool:
            try:
                return self._render(*with_words(messages, self._tools, {part: _STAND_INS[0] for part in some})) == text
            except MalformedRow:  # so the template looks at them
                return False

        if suspects and not are_left_out(*suspects):
            suspects = [part for part in suspects if are_left_out(part)]
        for part in suspects:
            is_needed = part.role in ("user", "tool") or part.message in turns
            if part.kind == CALLS or (part.kind == TEXT and is_needed):
                what = f"the {part.path[-1]} of a call" if part.kind == CALLS else "the text"
                raise MalformedRow(
                    f"the chat template leaves out {what} of {part.role} message {part.message + 1}; use a template "
                    "that writes it (data.chat_template)"
                )
        return [part for part in suspects if part.kind != THINKING or part.message in turns]

    def _probed(self, messages: Messages, parts: Sequence[Part]) -> _Probe:
        """Return what the template does with a conversation of this kind: one with the same roles, parts and arguments,
        and a word of its own for each part. Rendered once for each kind.
        """
        kind = hash((*parts, *(message["role"] for message in messages), json.dumps(self._given, default=str)))
        if kind not in self._remembered:
            words = {part: f"p{number:06}word" for number, part in enumerate(parts)}
            found = _Probe(frozenset(parts))
            with suppress(MalformedRow):  # by words that a template refuses nothing is known: each part is suspect
                text, spans = self._written(*with_words(messages, self._tools, words))
                marked = [[part for part in parts if words[part] in text[start:end]] for start, end in spans]
                found = _Probe(
                    frozenset(part for part in parts if words[part] not in text),
                    frozenset(parts).difference(*marked),
                    [{part.message for part in span if part.role == "assistant"} for span in marked],
                )
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[kind] = found
        return self._remembered[kind]

    def _located_turns(self, messages: Messages, turns: Sequence[int], text: str) -> tuple[list[Span], str]:
        """Return where the turns stand in the text of a template without marks, and how that was found."""
        spans: list[Span] = []
        method = PREFIX_DIFFERENCE
        for turn in turns:
            span = self._span_by_prefixes(messages, turn, text)
            if span is None:
                span, method = self._span_by_stand_ins(messages, turn, text), STAND_INS
            if spans and span[0] < spans[-1][1]:
                raise MalformedRow(f"the chat template reorders assistant message {turn + 1}, {_HINT}")
            spans.append(span)
        return spans, method

    def _marked_turns(
        self, messages: Messages, turns: Sequence[int], text: str, marked: Sequence[Span], parts: Sequence[Part]
    ) -> tuple[list[Span], str]:
        """Return those of the marked spans that are of these turns, and whether each of the turns is in one."""
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        probe = self._probed(messages, parts)
        if list(turns) != answers:
            empty = {*answers}.difference(part.message for part in parts if part.role == "assistant")
            owners = list(probe.owners)
            if len(owners) == len(answers):  # one each: those without a word are of answers that have none
                owners = [owned or empty & {answer} for owned, answer in zip(owners, answers, strict=True)]
            told = [bool(owned) and (owned.issubset(turns) or owned.isdisjoint(turns)) for owned in owners]
            if len(owners) != len(marked) or not all(told):
                raise MalformedRow(
                    f"the chat template marks {len(marked)} parts of {len(answers)} assistant messages, not each of "
                    "one of these, so those that are no targets cannot be found"
                )
            marked = [span for span, owned in zip(marked, owners, strict=True) if owned.issubset(turns)]
        spans = [(start, end) for start, end in marked if end > start]
        learned = "\n".join(text[start:end] for start, end in spans)
        missed = {part.message for part in parts if part.kind in (TEXT, CALLS) and part in probe.unmarked}
        answering = [turn for turn in turns if visible(messages[turn]) or messages[turn].get("tool_calls")]
        covered = [turn not in missed and _holds(learned, messages[turn]) for turn in answering]
        if covered and not any(covered):
            raise MalformedRow(
                "the {% generation %} marks of the chat template cover the text and the calls of no assistant message; "
                "repair or remove them"
            )
        return spans, GENERATION_MARKS if all(covered) else SOME_TURNS_MARKED

    @property
    def _has_marks(self) -> bool:
        return _GENERATION_MARK.search(self._template) is not None

    def _written(self, messages: Messages, tools: Sequence[dict[str, Any]] | None = None) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the spans that the template marks; none if it has no marks.

        `tools` are the row's unless they are given.
        """
        if not self._has_marks:
            return self._render(messages, tools), []
        # `apply_chat_template(return_assistant_tokens_mask=True)` gives tokens only, and marks all of the text's rest
        # when a span's last character has no token. The renderer beneath it gives character spans.
        template_variables: dict[str, Any] = {**self._tokenizer.special_tokens_map, **self._given}

        def apply() -> Any:
            given = [{k: v for k, v in message.items() if v is not None} for message in self._given_as(messages)]
            return chat_template_utils.render_jinja_template(
                conversations=[given],
                tools=list(self._tools if tools is None else tools) or None,
                chat_template=self._template,
                return_assistant_tokens_mask=True,
                **template_variables,
            )

        # annotated `-> str` upstream, but returns the texts and, for each, the spans of its marks
        (text,), (spans,) = _execute(apply)
        self._refuse_flood(text)
        return text, [(start, end) for start, end in spans]

    def _render(
        self,
        messages: Messages,
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        generation_prompt: bool = False,
    ) -> str:
        def apply() -> Any:
            return self._tokenizer.apply_chat_template(
                self._given_as(messages),
                tools=list(self._tools if tools is None else tools) or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self._given,
            )

        text = _execute(apply)
        assert isinstance(text, str)
        self._refuse_flood(text)
        return text

    def _given_as(self, messages: Messages) -> list[dict[str, Any]]:
        """Return the messages as a template takes them: where images stand in a text, as a list of parts."""
        if not self._has_images:
            return [dict(message) for message in messages]
        return [
            {**message, "content": _parts(text)} if IMAGE in (text := message.get("content") or "") else dict(message)
            for message in messages
        ]

    def _refuse_flood(self, text: str) -> None:
        if len(text) > self._limit:
            own = self._limit - MAX_ADDED_CHARACTERS
            raise LimitExceeded(f"turns a conversation of {own:,} characters into {len(text):,}")

    def _span_by_prefixes(self, messages: Messages, turn: int, text: str) -> Span | None:
        """Return what rendering up to and including `turn` adds to its generation prompt, if both begin `text`."""
        start = self._prompt_length(messages[:turn], text)
        until_turn = self._render_or_none(messages[: turn + 1])
        if start is None or until_turn is None or not text.startswith(until_turn) or len(until_turn) < start:
            return None
        # Stand-ins are tried for a template that omits or rewrites the answer.
        return (start, len(until_turn)) if _holds(until_turn[start:], messages[turn]) else None

    def _prompt_length(self, messages: Messages, text: str) -> int | None:
        """Return the characters of `messages` rendered with the generation prompt, or None if `text` begins otherwise.

        Try the messages without their thinking as well: a later answer may have removed it from the text.
        """
        for tried in (messages, [without_thinking(message) for message in messages]):
            prompt = self._render_or_none(tried, generation_prompt=True)
            if prompt is not None and text.startswith(prompt):
                return len(prompt)
            # A prompt that asks for no thinking: what the text has in the place of its empty thought is the answer's.
            length = shared_length(prompt or "", text)
            shared, rest = text[:length], (prompt or "")[length:]
            if shared.rstrip().endswith("<think>") and _END_OF_EMPTY_THOUGHT.fullmatch(rest):
                return len(shared)
        return None

    def _render_or_none(self, messages: Messages, *, generation_prompt: bool = False) -> str | None:
        """Render a conversation's beginning, or return None: a template may refuse it and take the whole."""
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
        """Return how many characters at the start of `after` end the turn (`<|im_end|>`).

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
    """Return the length of all strings in a JSON value."""
    if isinstance(value, str):
        return len(value)
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(_characters, parts))


def special_strings(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the strings of the tokenizer's special tokens; longest first, as one may begin another."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(added | set(tokenizer.all_special_tokens), key=lambda text: (-len(text), text)))


def _holds(text: str, message: Mapping[str, Any]) -> bool:
    """Return whether the text shows the answer: its visible part, and the names of the functions that it calls."""
    names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    return all(part in text for part in (visible(message), *names))


def _parts(text: str) -> list[dict[str, str]]:
    """Return the texts and images of a text in which `IMAGE` stands for each image."""
    pieces = re.split(f"({IMAGE})", text)
    return [{"type": "image"} if each == IMAGE else {"type": "text", "text": each} for each in pieces if each]


def _places(text: str, turns: Messages) -> list[Span]:
    """Return where the contents of these answers stand in the text, as far as it has them as they are."""
    contents = [str(turn.get("content") or "").strip() for turn in turns]
    return [(at, at + len(content)) for content in contents if content and (at := text.find(content)) >= 0]


def _common_end(texts: Sequence[str]) -> str:
    """Return the longest end that all of them have."""
    shortest = min(texts, key=len)
    length = next(
        (i for i, last in enumerate(reversed(shortest), start=1) if any(text[-i] != last for text in texts)),
        len(shortest) + 1,
    )
    return shortest[len(shortest) - length + 1 :]


def _with_answer(messages: Messages, turn: int, answer: str) -> list[Mapping[str, Any]]:
    """Return the messages with another answer, and no thinking, at `turn`."""
    replaced = {key: value for key, value in messages[turn].items() if key not in THINKING_KEYS}
    return [*messages[:turn], {**replaced, "content": answer}, *messages[turn + 1 :]]


def _with_arguments(messages: Messages, turn: int, arguments: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """Return the messages with other arguments in the last call of `turn`."""
    *others, last = messages[turn]["tool_calls"]
    called = {**last, "function": {**last["function"], "arguments": arguments}}
    return [*messages[:turn], {**messages[turn], "tool_calls": [*others, called]}, *messages[turn + 1 :]]
