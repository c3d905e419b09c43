"""Find what a chat template leaves out of a conversation, and thinking that it or the row has broken.

For targets.py, in the child process. A *part* is one thing that a row says: a text, a thought, the name or the
arguments of a call, a tool, any other key of a message. It is left out when the rendered text stays the same with
another word in its place. That needs no generation marks, and a short value that the text has by chance hides nothing.
"""

import copy
import functools
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from expertmesh.data.formats import IMAGE, THINKING_KEYS, THOUGHT, Messages, thoughts, visible

TEXT, THINKING, CALLS, TOOLS, KEY = "text", "thinking", "calls", "tools", "key"

# Which call a result belongs to: few templates write it, and the order of the messages says it as well.
_IDENTITIES = ("id", "tool_call_id")
_THINK = re.compile(r"</?think>")
_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a conversation."""

    kind: str
    """text, thinking, calls, tools, or any other key of a message."""
    path: tuple[str | int, ...]
    """Its path in {messages, tools}."""
    role: str = ""
    """Role of its message."""
    verbatim: str = field(default="", compare=False)
    """The text that most templates write unchanged; empty for what they give another form."""

    @property
    def message(self) -> int:
        """The place of its message; of a tool, that of the tool."""
        return int(self.path[1])

    @property
    def name(self) -> str:
        """The name in counts."""
        return f"text of {self.role} messages" if self.kind == TEXT else str(self.path[-1 if self.kind == KEY else 0])

    def replaced(self, value: Any, word: str) -> Any:
        """Return `value`, found at `path`, with `word` in place of the part."""
        if self.kind == TOOLS:
            function = value.get("function")
            return {**value, "function": {**(function if isinstance(function, Mapping) else {}), "name": word}}
        if self.kind == TEXT:
            head, closed, tail = value.rpartition(_CLOSE)
            # Images stay: the rendering of a text that is left out must not change by them.
            return head + closed + tail.replace(tail.strip(), IMAGE * tail.count(IMAGE) + word, 1)
        if self.kind == THINKING and self.path[-1] == "content":
            matched = THOUGHT.match(value)
            assert matched is not None
            return f"{value[: matched.start(1)]}{word}{value[matched.end(1) :]}"
        return {"argument": word} if self.path[-1] == "arguments" else word


def parts_of(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Return all parts of a conversation and its tools, those of a message together."""
    found = [Part(TOOLS, (TOOLS, number)) for number in range(len(tools))]
    for place, message in enumerate(messages):
        found += _parts_of_message(message, ("messages", place))
    return found


def _parts_of_message(message: Mapping[str, Any], path: tuple[str | int, ...]) -> Iterator[Part]:
    role = message["role"]
    if (text := visible(message)).replace(IMAGE, "").strip():
        yield Part(TEXT, (*path, "content"), role, text)
    if role == "assistant" and (inside := thoughts({"content": message.get("content")})):
        yield Part(THINKING, (*path, "content"), role, inside[0])
    for number, call in enumerate(message.get("tool_calls") or ()):
        for key in ("name", "arguments"):
            if call["function"][key]:
                yield Part(CALLS, (*path, "tool_calls", number, "function", key), role)
    for key, value in message.items():
        if key in ("role", "content", "tool_calls", *_IDENTITIES) or value in ("", [], {}):
            continue
        if role != "assistant" or key not in THINKING_KEYS or not isinstance(value, str):
            yield Part(KEY, (*path, key), role)
        elif value.strip():
            yield Part(THINKING, (*path, key), role, value.strip())


def with_words(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], words: Mapping[Part, str]
) -> tuple[Messages, list[dict[str, Any]]]:
    """Return the conversation and its tools with the word of `words` in place of each of its parts."""
    changed: Any = copy.deepcopy({"messages": list(messages), TOOLS: list(tools)})
    for part, word in words.items():
        *path, last = part.path
        holder = functools.reduce(operator.getitem, path, changed)
        holder[last] = part.replaced(holder[last], word)
    return tuple(changed["messages"]), changed[TOOLS]


def has_broken_thinking(text: str, spans: Sequence[tuple[int, int]]) -> bool:
    """Return whether in one of the spans a thinking block is not closed, closed without being opened, or one of
    several.

    A block that begins right before a span, in the generation prompt, belongs to it.
    """
    for start, end in spans:
        opened = [_OPEN] if text[:start].rstrip().endswith(_OPEN) else []
        if [*opened, *_THINK.findall(text, start, end)] not in ([], [_OPEN, _CLOSE]):
            return True
    return False
