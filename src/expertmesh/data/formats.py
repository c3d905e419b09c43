"""The row formats people keep training data in, each turned into one of four record types.

`messages`, `sharegpt` and `alpaca` rows become a `Conversation`, `prompt_completion` rows a
`PromptCompletion`, `text` rows a `PlainText`, `preference` rows a `Preference`. `build_dataset` asks
`fitting_formats` which formats a row could be, picks one per source and converts every row of the source with it.
Whatever cannot be trained on faithfully (tool calls, images, unknown roles, per-message weights) is refused by name,
never dropped.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

PREFERENCE = "preference"
ROLES = ("system", "developer", "user", "assistant")
_SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
_TOOL_ROLES = ("tool", "function", "function_call", "tool_call", "tool_response", "observation", "ipython")
_TOOL_KEYS = ("tools", "functions", "tool_calls", "function_call", "tool_call_id")
_MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
_WEIGHT_KEYS = ("weight", "train", "train_on_turn")


# As a chat template takes them: `role`, a string `content`, and keys that pass through.
Messages = tuple[Mapping[str, Any], ...]


class MalformedRow(Exception):
    """Why one row cannot be used; becomes an `InputError` with file and line, or a counted skip."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation, all of it."""

    messages: Messages


@dataclass(frozen=True, slots=True)
class PromptCompletion:
    """A plain prompt and the plain text that follows it; no chat template is involved."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class PlainText:
    """One document of running text."""

    text: str


@dataclass(frozen=True, slots=True)
class Preference:
    """Two responses to one prompt, the better one first: all three plain text, or all three messages."""

    prompt: str | Messages
    chosen: str | Messages
    rejected: str | Messages


Record = Conversation | PromptCompletion | PlainText | Preference


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
    return Conversation((*messages, *_messages(turns, "message", role_key, text_key, roles)))


def _messages(turns: Sequence[Any], what: str, role_key: str, text_key: str, roles: Mapping[str, str]) -> Messages:
    """Messages as templates take them; `what` they are called in complaints."""
    messages: list[Mapping[str, Any]] = []
    for number, turn in enumerate(turns, start=1):
        where = f"{what} {number}"
        if not isinstance(turn, Mapping):
            raise MalformedRow(f"{where} is {_kind(turn)}, not an object with {role_key!r} and {text_key!r}")
        _refuse_unsupported_keys(turn, where)
        role = _role(turn.get(role_key), where, roles)
        # Keys such as `name` or `reasoning_content` mean something to some templates, so they stay.
        extra = {k: v for k, v in turn.items() if k not in (role_key, text_key) and v is not None}
        messages.append({**extra, "role": role, "content": _content(turn.get(text_key), where, text_key)})
    return tuple(messages)


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


def _parse_preference(row: Mapping[str, Any]) -> Preference:
    """As TRL reads them: with a prompt of its own, or with one that both responses begin with."""
    if row.get("chat_template_kwargs"):
        raise MalformedRow("the row has 'chat_template_kwargs', and templates get no arguments by row")
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    for key in ("chosen", "rejected"):
        if row[key] == [] or (isinstance(row[key], str) and not row[key].strip()):
            raise MalformedRow(f"{key!r} is empty")
        if isinstance(row[key], list) != isinstance(chosen, list):
            raise MalformedRow(f"'chosen' is {_kind(chosen)} and 'rejected' {_kind(rejected)}; both must be alike")
    if isinstance(chosen, list):
        return _parse_conversational_preference(prompt, chosen, rejected)
    texts = [_text(chosen, "'chosen'"), _text(rejected, "'rejected'")]
    if prompt is not None:
        return Preference(_text(prompt, "'prompt'"), *texts)
    shared = _shared(*texts)
    shared -= shared > 0 and chosen[shared - 1] == " "  # a token begins with its space
    return Preference(chosen[:shared], chosen[shared:], rejected[shared:])


def _parse_conversational_preference(prompt: Any, chosen: list[Any], rejected: list[Any]) -> Preference:
    roles = {role: role for role in ROLES}
    better, worse = (
        _messages(turns, f"{key!r} message", "role", "content", roles)
        for key, turns in (("chosen", chosen), ("rejected", rejected))
    )
    if isinstance(prompt, list):
        before = _messages(prompt, "'prompt' message", "role", "content", roles)
    else:
        shared = _shared(better, worse)
        before, better, worse = better[:shared], better[shared:], worse[shared:]
        # Many data sets repeat the last question as text.
        if prompt is not None and (not before or before[-1]["content"] != _text(prompt, "'prompt'")):
            raise MalformedRow(
                "'prompt' is a string, but not the text of the last message that 'chosen' and 'rejected' begin with; "
                "give 'prompt' as a list of messages"
            )
    if not before or before[-1]["role"] == "assistant":
        raise MalformedRow(f"the prompt {'ends with an assistant message' if before else 'has no message'}")
    for key, response in (("chosen", better), ("rejected", worse)):
        if others := [message["role"] for message in response if message["role"] != "assistant"]:
            raise MalformedRow(f"{key!r} has a message of role {others[0]!r} after the prompt, not only answers")
        if not any(message["content"].strip() for message in response):
            raise MalformedRow(f"{key!r} is empty")
    return Preference(before, better, worse)


def _shared(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """How many items both begin with; at least one is left to each."""
    most = min(len(chosen), len(rejected)) - 1
    return next((place for place in range(most) if chosen[place] != rejected[place]), most)


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
    PREFERENCE: (_has("chosen", "rejected"), _parse_preference),
}
FORMATS = tuple(_FORMATS)
