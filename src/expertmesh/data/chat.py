"""A conversation rendered by the tokenizer's own chat template, and which characters of it are targets.

`loss_on: assistant` follows the template's `{% generation %}` marks where it has them. Without marks a turn's
target is what the template adds after the generation prompt, up to the end of that turn ("prefix
difference"); where the truncated conversation renders differently from the full one (Qwen3 and GPT-OSS
strip thinking from earlier turns), the turn is located in the full rendering with two stand-in answers
("stand-ins"). Every span is checked against the full text; one that cannot be proven is refused, so a mask
is never silently all ones or all zeros. Templates run in transformers' Jinja sandbox, in a child process with
limits (sandbox.py); one that reaches out of the sandbox or exceeds a limit is refused.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jinja2.exceptions import SecurityError as SandboxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from expertmesh.config.errors import InputError, SecurityError
from expertmesh.data.formats import Conversation, MalformedRow, Preference
from expertmesh.data.sandbox import LimitExceeded, Sandbox, restart_clock

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
# Two answers that share no first and no last character, hold nothing a template might strip or parse, and are
# unlikely to occur in data: what differs between their renderings is the answer's place, and nothing else.
_STAND_INS = ("0stand0in0", "1stand1in1")

GENERATION_MARKS = "generation marks"
SOME_TURNS_MARKED = "generation marks on some assistant turns only"
PREFIX_DIFFERENCE = "prefix difference"
STAND_INS = "stand-ins"
EVERY_TOKEN = "every token"

# How much longer than the conversation itself its rendering may be, in characters.
MAX_ADDED_CHARACTERS = 4_000_000
_MAX_REASON = 300

_HINT = "so its targets cannot be found: use a template with {% generation %} marks"

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rendered:
    """The full text of one conversation, the character spans that are targets, and how they were found."""

    text: str
    spans: tuple[Span, ...]
    method: str


class ChatRenderer:
    """Renders conversations with one tokenizer's chat template; `loss_on` is assistant, completion or all.

    Raises `InputError` when the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss_on: str) -> None:
        self._name = tokenizer.name_or_path or type(tokenizer).__name__
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            raise InputError(
                f"the tokenizer {self._name} has no chat template, "
                "which rows of format messages, sharegpt, alpaca and preference (of messages) need; put a "
                "chat_template.jinja into the model directory, or use data of plain text.",
                key="tokenizer.no-chat-template",
            ) from error
        self._child = Sandbox(_InChild(tokenizer, template, loss_on).answer)

    def render(self, conversations: Sequence[Conversation]) -> list[Rendered | MalformedRow]:
        """Render each conversation and find its targets, or say why its row cannot be used.

        Raises `SecurityError` for a template that reaches out of its sandbox, or takes more time or memory or writes
        more text than any honest one.
        """
        answers = self._asked([conversation.messages for conversation in conversations])
        return [
            MalformedRow(answer)
            if isinstance(answer, str)
            else Rendered(answer["text"], tuple((start, end) for start, end in answer["spans"]), answer["method"])
            for answer in answers
        ]

    def render_pairs(self, pairs: Sequence[Preference]) -> list[list[str] | MalformedRow]:
        """Of each pair the prompt up to where an answer begins, and the whole text with either answer; or why not.

        Raises as `render` does.
        """
        answers = self._asked([{"prompt": pair.prompt, "answers": [pair.chosen, pair.rejected]} for pair in pairs])
        return [MalformedRow(answer) if isinstance(answer, str) else answer for answer in answers]

    def _asked(self, requests: Sequence[Any]) -> list[Any]:
        try:
            return self._child.map(requests)
        except LimitExceeded as error:
            raise SecurityError(
                f"the chat template of {self._name} is refused: it {error}; read it, and put a chat_template.jinja "
                "that you trust into the model directory",
                key="tokenizer.unsafe-chat-template",
            ) from error


class _InChild:
    """What the child process does for `ChatRenderer`: executes the template, as often as locating turns takes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str, loss_on: str) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._loss_on = loss_on
        self._special_strings = special_strings(tokenizer)
        self._marked = _GENERATION_MARK.search(template) is not None

    def answer(self, request: Any) -> dict[str, Any] | list[str] | str:
        """A conversation's `Rendered`, or a pair's texts, or the reason why its row is malformed, as JSON values."""
        try:
            if isinstance(request, dict):
                prompt = request["prompt"]
                texts = [self._render([*prompt, *answer]) for answer in request["answers"]]
                return [self._render(prompt, generation_prompt=True), *texts]
            return asdict(self._find_targets(request))
        except MalformedRow as error:
            return str(error)

    def _find_targets(self, messages: Messages) -> Rendered:
        if self._loss_on == "all":
            text = self._render(messages)
            return Rendered(text, ((0, len(text)),), EVERY_TOKEN)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self._loss_on == "completion":
            turns = turns[-1:]
        elif self._marked:
            return self._render_marked(messages, [messages[i] for i in turns])
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
        return Rendered(text, tuple(spans), method)

    def _render(self, messages: Messages, *, generation_prompt: bool = False) -> str:
        def apply() -> Any:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )

        text = _execute(apply)
        assert isinstance(text, str)
        _refuse_flood(text, messages)
        return text

    def _render_marked(self, messages: Messages, assistant_turns: Messages) -> Rendered:
        # `apply_chat_template(return_assistant_tokens_mask=True)` gives tokens only, and marks all of the text's rest
        # when a span's last character has no token. The renderer beneath it gives character spans.
        template_variables: dict[str, Any] = dict(self._tokenizer.special_tokens_map)

        def apply() -> Any:
            return render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=self._template,
                return_assistant_tokens_mask=True,
                **template_variables,
            )

        # annotated `-> str` upstream, but returns the texts and, for each, the spans of its marks
        (text,), (spans_of_text,) = _execute(apply)
        _refuse_flood(text, messages)
        spans = tuple((start, end) for start, end in spans_of_text if end > start)
        marked = "\n".join(text[start:end] for start, end in spans)
        covered = [_visible(message) in marked for message in assistant_turns if _visible(message)]
        if covered and not any(covered):
            raise MalformedRow(
                "the {% generation %} marks of the chat template cover the text of no assistant message; "
                "repair or remove them"
            )
        return Rendered(text, spans, GENERATION_MARKS if all(covered) else SOME_TURNS_MARKED)

    def _span_by_prefixes(self, messages: Messages, turn: int, text: str) -> Span | None:
        """What rendering up to and including `turn` adds to its generation prompt, if both begin `text`."""
        start = self._prompt_length(messages, turn, text)
        until_turn = self._render_or_none(messages[: turn + 1])
        if start is None or until_turn is None or not text.startswith(until_turn) or len(until_turn) < start:
            return None
        # Stand-ins are tried for a template that omits or rewrites the answer.
        return (start, len(until_turn)) if _visible(messages[turn]) in until_turn[start:] else None

    def _prompt_length(self, messages: Messages, turn: int, text: str) -> int | None:
        """Length of the rendering before `turn` with the generation prompt, or None if `text` has another."""
        prompt = self._render_or_none(messages[:turn], generation_prompt=True)
        return len(prompt) if prompt is not None and text.startswith(prompt) else None

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
        first, second = (self._render(_with_answer(messages, turn, answer)) for answer in _STAND_INS)
        if _STAND_INS[0] not in first:
            raise MalformedRow(f"the chat template leaves out the text of {name}")
        before, _, after = first.partition(_STAND_INS[0])
        if second != before + _STAND_INS[1] + after:
            raise MalformedRow(f"the chat template repeats or transforms the text of {name}, {_HINT}")
        if not text.endswith(after):
            raise MalformedRow(f"what the chat template writes after {name} depends on that message, {_HINT}")
        end = len(text) - len(after)
        start = self._prompt_length(messages, turn, text)
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


def _execute(apply: Callable[[], Any]) -> Any:
    """Run the template. Whatever else it raises is its way of refusing the conversation."""
    restart_clock()
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


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_REASON]


def _refuse_flood(text: str, messages: Messages) -> None:
    own = sum(len(value) for message in messages for value in message.values() if isinstance(value, str))
    if len(text) > own + MAX_ADDED_CHARACTERS:
        raise LimitExceeded(f"turns a conversation of {own:,} characters into {len(text):,}")


def special_strings(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The strings of the tokenizer's special tokens; longest first, as one may begin another."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(added | set(tokenizer.all_special_tokens), key=lambda text: (-len(text), text)))


def _visible(message: Mapping[str, Any]) -> str:
    """The part of an answer that every template shows: many strip white space and earlier turns' thinking."""
    content: str = message["content"]
    return content.rpartition("</think>")[2].strip()


def _with_answer(messages: Messages, turn: int, answer: str) -> list[Mapping[str, Any]]:
    """The messages with another answer, and no thinking, at `turn`."""
    replaced = {key: value for key, value in messages[turn].items() if key not in _THINKING_KEYS}
    return [*messages[:turn], {**replaced, "content": answer}, *messages[turn + 1 :]]
