"""The five row formats people keep instruction data in, each turned into one of three record types.

`messages`, `sharegpt` and `alpaca` rows become a `Conversation`, `prompt_completion` rows a
`PromptCompletion`, `text` rows a `PlainText`. `build_dataset` asks `fitting_formats` which formats a row
could be, picks one per source and converts every row of the source with it. Whatever cannot be trained on
faithfully (tool calls, images, unknown roles, per-message weights) is refused by name, never dropped.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

ROLES = ("system", "developer", "user", "assistant")
_SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
_TOOL_ROLES = ("tool", "function", "function_call", "tool_call", "tool_response", "observation", "ipython")
_TOOL_KEYS = ("tools", "functions", "tool_calls", "function_call", "tool_call_id")
_MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
_WEIGHT_KEYS = ("weight", "train", "train_on_turn")


class MalformedRow(Exception):
    """Why one row cannot be used; becomes an `InputError` with file and line, or a counted skip."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as a chat template takes them: `role`, a string `content`, and keys that pass through."""

    messages: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class PromptCompletion:
    """A plain prompt and the plain text that follows it; no chat template is involved."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class PlainText:
    """One document of running text."""

    text: str


Record = Conversation | PromptCompletion | PlainText


def fitting_formats(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the formats whose keys `row` has, the most specific first; `auto` takes the first."""
    return tuple(name for name, (fits, _) in _FORMATS.items() if fits(row))


def convert(row: Mapping[str, Any], format_name: str) -> Record:
    """Convert one row of the named format, or raise `MalformedRow` saying what is wrong with it."""
    fits, parse = _FORMATS[format_name]
    _refuse_unsupported_keys(row, "the row")
    if not fits(row):
        keys = ", ".join(map(str, row)) or "none"
        raise MalformedRow(f"the row does not have the keys of format {format_name} (its keys: {keys})")
    return parse(row)


def _turns(row: Mapping[str, Any], marker: str) -> list[Any] | None:
    """The list of turns of a chat row whose first turn has the key `marker`, under either usual name."""
    for key in ("messages", "conversations"):
        turns = row.get(key)
        if isinstance(turns, list) and turns and isinstance(turns[0], Mapping) and marker in turns[0]:
            return turns
    return None


def _has_turns(marker: str, key: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda row: _turns(row, marker) is not None or row.get(key) == []


def _has(*keys: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda row: all(key in row for key in keys)


def _parse_turns(row: Mapping[str, Any], role_key: str, text_key: str, roles: Mapping[str, str]) -> Conversation:
    turns = _turns(row, role_key)
    if not turns:
        raise MalformedRow("the conversation has no message")
    messages: list[Mapping[str, Any]] = []
    if row.get("system") and role_key == "from":
        messages.append({"role": "system", "content": _text(row["system"], "'system'")})
    for number, turn in enumerate(turns, start=1):
        where = f"message {number}"
        if not isinstance(turn, Mapping):
            raise MalformedRow(f"{where} is {_kind(turn)}, not an object with {role_key!r} and {text_key!r}")
        _refuse_unsupported_keys(turn, where)
        role = _role(turn.get(role_key), where, roles)
        # Keys such as `name` or `reasoning_content` mean something to some templates, so they stay.
        extra = {k: v for k, v in turn.items() if k not in (role_key, text_key) and v is not None}
        messages.append({**extra, "role": role, "content": _content(turn.get(text_key), where, text_key)})
    return Conversation(tuple(messages))


def _parse_alpaca(row: Mapping[str, Any]) -> Conversation:
    messages: list[Mapping[str, Any]] = []
    if row.get("system"):
        messages.append({"role": "system", "content": _text(row["system"], "'system'")})
    for number, pair in enumerate(row.get("history") or (), start=1):
        if not isinstance(pair, list) or len(pair) != 2:
            raise MalformedRow(f"'history' entry {number} is not a pair of question and answer")
        messages.append({"role": "user", "content": _text(pair[0], f"'history' entry {number}")})
        messages.append({"role": "assistant", "content": _text(pair[1], f"'history' entry {number}")})
    question = _text(row["instruction"], "'instruction'")
    if row.get("input"):
        question += "\n\n" + _text(row["input"], "'input'")
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": _text(row["output"], "'output'")})
    return Conversation(tuple(messages))


def _parse_prompt_completion(row: Mapping[str, Any]) -> PromptCompletion:
    if isinstance(row["prompt"], list) or isinstance(row["completion"], list):
        raise MalformedRow(
            "'prompt' and 'completion' hold lists of messages; join them under one key 'messages' "
            "(with data.loss_on: completion only the last assistant turn is a target)"
        )
    return PromptCompletion(_text(row["prompt"], "'prompt'"), _text(row["completion"], "'completion'"))


def _role(value: Any, where: str, roles: Mapping[str, str]) -> str:
    if isinstance(value, str) and value in roles:
        return roles[value]
    if value in _TOOL_ROLES:
        raise MalformedRow(f"{where} has the role {value!r}, and tool messages are not supported")
    raise MalformedRow(f"{where} has the unknown role {value!r} (known: {', '.join(roles)})")


def _content(value: Any, where: str, key: str) -> str:
    """A message's text; a list of text parts is joined, any other part is refused by its type."""
    if not isinstance(value, list):
        return _text(value, f"{key!r} of {where}")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise MalformedRow(f"{where} has a content part of type {kind!r}, and only 'text' parts are supported")
        texts.append(_text(part.get("text"), f"a text part of {where}"))
    return "".join(texts)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise MalformedRow(f"{what} is {_kind(value)}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair; no tokenizer can encode it
        raise MalformedRow(f"{what} holds an unpaired surrogate and so is not valid Unicode") from None
    return value


def _refuse_unsupported_keys(item: Mapping[str, Any], where: str) -> None:
    for keys, why in ((_TOOL_KEYS, "tool use is not supported"), (_MEDIA_KEYS, "only text can be trained on")):
        for key in keys:
            if item.get(key):
                raise MalformedRow(f"{where} has {key!r}, and {why}")
    if where == "the row":
        return
    for key in _WEIGHT_KEYS:
        if item.get(key) not in (None, True, 1):
            raise MalformedRow(f"{where} has {key!r}: {item[key]!r}, and per-message weights are not supported")


def _kind(value: Any) -> str:
    if value is None:
        return "missing or null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "list"}
    return "an object" if isinstance(value, dict) else f"a {names.get(type(value), type(value).__name__)}"


_Fits = Callable[[Mapping[str, Any]], bool]
_Parse = Callable[[Mapping[str, Any]], Record]
# Most specific first: chat data sets often carry a flattened `prompt` or `text` beside `messages`.
_FORMATS: dict[str, tuple[_Fits, _Parse]] = {
    "messages": (
        _has_turns("role", "messages"),
        partial(_parse_turns, role_key="role", text_key="content", roles={role: role for role in ROLES}),
    ),
    "sharegpt": (
        _has_turns("from", "conversations"),
        partial(_parse_turns, role_key="from", text_key="value", roles=_SHAREGPT_ROLES),
    ),
    "alpaca": (_has("instruction", "output"), _parse_alpaca),
    "prompt_completion": (_has("prompt", "completion"), _parse_prompt_completion),
    "text": (_has("text"), lambda row: PlainText(_text(row["text"], "'text'"))),
}
FORMATS = tuple(_FORMATS)
