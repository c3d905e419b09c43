"""Turn rows, in the formats people keep training data in, into one of five record types.

`messages`, `sharegpt` and `alpaca` rows become a `Conversation`, `prompt_completion` rows one too where they hold
messages, else a `PromptCompletion`, `text` rows a `PlainText`, `preference` rows a `Preference`, those of
`unpaired_preference` a `Judged`. `build_dataset` asks `fitting_formats` which formats a row could be, picks one per
source and converts every row of the source with it.
Tools and calls are brought to the one form that chat templates read. Images stand in the text of a message as `IMAGE`,
and beside the conversation in their order. Whatever cannot be trained on faithfully (video, sound, unknown roles,
weights between 0 and 1, judgements that no loss here reads) is refused by name, never dropped; columns that mean
nothing to a format are named by `unused_columns`.
"""

import contextlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from expertmesh.config.data import COLUMNS, Role
from expertmesh.config.explain import show
from expertmesh.config.yaml_text import dump_yaml
from expertmesh.io.reading import parse_text, shortened

PREFERENCE, UNPAIRED = "preference", "unpaired_preference"
_ROLES = {role: role for role in get_args(Role)} | {"function": "tool", "human": "user"}
_ROLES |= dict.fromkeys(("gpt", "ai"), "assistant")
_CALL = "call"  # an assistant message that is nothing but calls, as sharegpt rows have them
_SHAREGPT_ROLES = {
    **{"system": "system", "human": "user", "user": "user"},
    **dict.fromkeys(("gpt", "assistant", "ai"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), _CALL),
    **dict.fromkeys(("observation", "tool_response", "function_response", "tool"), "tool"),
}
_TOOL_KEYS = ("tools", "functions", "tool_calls", "function_call", "tool_call_id")
_MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
# The column of images to which parts of messages without a file refer, in their order.
_IMAGES = "images"
_TARGET_KEYS = ("weight", "train", "train_on_turn")
# Columns that separate good answers from bad: training on every answer would ignore them.
_JUDGEMENTS = ("label", "score", "rejected")
_KEYS_NAMED = 30
_TURNS = ("messages", "conversations")
# Text, or lists of messages.
_RESPONSES = ("prompt", "completion", "chosen", "rejected")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|data:")
_BEGINS_LIST = re.compile(r"\s*\[\s*\{")
_BEGINS_MESSAGES = re.compile(_BEGINS_LIST.pattern + r'\s*"(role|from)"\s*:')
# What data sets call the columns of a format, the likeliest first.
_USUAL_NAMES = {
    "prompt": ("prompt", "question", "instruction", "query", "problem", "input", "request"),
    "completion": ("completion", "answer", "response", "output", "solution", "reply"),
    "chosen": ("chosen", "preferred", "accepted", "better", "good"),
    "rejected": ("rejected", "dispreferred", "worse", "bad"),
    "label": ("label", "desirable", "kto_tag", "thumbs_up"),
}
THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
IMAGE = "\ufdd0"
"""Stands for an image in the text of a message: a code point that no text has."""
THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


# As a chat template takes them: `role`, a string `content`, and keys that pass through. With `tool_calls` there may be
# no content.
Messages = tuple[Mapping[str, Any], ...]


class MalformedRow(Exception):
    """A row that cannot be used, and how to `mend` it; becomes an `InputError` with its place, or a counted skip."""

    def __init__(self, reason: str, mend: str = "correct the row") -> None:
        super().__init__(reason)
        self.mend = mend


@dataclass(frozen=True, slots=True)
class ImageSource:
    """The place of an image: a path, or bytes in the row."""

    path: str | None = None
    """Path of its file, relative to that of the row."""
    content: bytes | str | None = None
    """Bytes of its file without a path; in a string as base64."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation, all of it."""

    messages: Messages
    untrained: frozenset[int] = frozenset()
    """Positions of messages that are no targets though their role is."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools for the chat template."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template."""
    images: tuple[ImageSource, ...] = ()
    """The image of each `IMAGE` in the messages, in their order."""


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
    """The better response."""
    rejected: str | Messages
    """The worse response."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools for the chat template."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template."""

    @property
    def responses(self) -> tuple[str | Messages, ...]:
        return self.chosen, self.rejected


@dataclass(frozen=True, slots=True)
class Judged:
    """A response to a prompt, with a label: both plain text, or both messages."""

    prompt: str | Messages
    completion: str | Messages
    desirable: bool
    """The label."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools for the chat template."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template."""

    @property
    def responses(self) -> tuple[str | Messages, ...]:
        return (self.completion,)


Record = Conversation | PromptCompletion | PlainText | Preference | Judged


def fitting_formats(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the formats whose keys `row` has, the most specific first; `auto` takes the first."""
    row = _with_lists(row)
    return tuple(name for name, fits in _FITS.items() if fits(row))


def convert(row: Mapping[str, Any], format_name: str, roles: Mapping[str, str] | None = None) -> Record:
    """Convert one row of the named format, or raise `MalformedRow` saying what is wrong with it.

    `roles` are names of roles beside the usual ones, and what they stand for.
    """
    row, roles = _with_lists(row), roles or {}
    for column in COLUMNS[format_name]:
        if isinstance(row.get(column), str) and _BEGINS_MESSAGES.match(row[column]):
            _json(row[column], f"{column!r}")  # raises: what is JSON is a list by now
    _refuse_unsupported_keys(row, "the row", tools="tools" in COLUMNS[format_name], images=format_name == "messages")
    if not _FITS[format_name](row):
        raise MalformedRow(_misfit(row, format_name))
    if format_name == PREFERENCE:
        return _parse_preference(row, {**_ROLES, **roles})
    if format_name == UNPAIRED:
        return _parse_judged(row, {**_ROLES, **roles})
    for column in _JUDGEMENTS:
        if not _is_empty(row.get(column)):
            said = _kind(row[column]) if isinstance(row[column], list | Mapping) else show(row[column])
            raise MalformedRow(
                f"the row has {column!r}: {said}, which tells good answers from bad, and sft learns all of them",
                mend=f"take out what the model must not learn, and write columns: {{{column}: null}} {_BESIDE_PATH}",
            )
    match format_name:
        case "messages":
            images: list[ImageSource | None] = []
            found = _parse_turns(row, "role", "content", {**_ROLES, **roles}, images)
            return replace(found, images=_matched(row, found.messages, images))
        case "sharegpt":
            return _parse_turns(row, "from", "value", {**_SHAREGPT_ROLES, **roles})
        case "alpaca":
            return _parse_alpaca(row)
        case "prompt_completion":
            return _parse_prompt_completion(row, roles)
    return PlainText(_text(row["text"], "'text'"))


def unused_columns(row: Mapping[str, Any], format_name: str) -> list[str]:
    """Return the columns that have something in them which `convert` does not read."""
    read, row = set(COLUMNS[format_name]), _with_lists(row)
    if turns := _turns(row, "from" if format_name == "sharegpt" else "role"):
        read -= {key for key in _TURNS if row.get(key) is not turns}
    return [str(key) for key, value in row.items() if key not in read and not _is_empty(value)]


def suggested_columns(row: Mapping[str, Any], wanted: Sequence[str]) -> list[dict[str, str]]:
    """Return what `data.train.N.columns` could say, by usual names, so that a row of unknown columns fits a format.

    Args:
        wanted: The columns of a format; with those of prompt_completion other formats of sft are tried.
    """
    responses = tuple(wanted) != ("prompt", "completion")
    for key, value in row.items():
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, Mapping) and not responses and ("role" in first or "from" in first):
            return [{"messages" if "role" in first else "conversations": key}]
    lower = {str(key).lower(): str(key) for key in row}
    found = {ours: next((lower[name] for name in _USUAL_NAMES[ours] if name in lower), "") for ours in wanted}
    texts = [str(key) for key, value in row.items() if isinstance(value, str) and value.lstrip()[:1] not in ("[", "{")]
    if not all(found.values()):
        return [{"text": texts[0]}] if len(texts) == 1 and not responses else []
    asked = [found] if responses else [found, {"instruction": found["prompt"], "output": found["completion"]}]
    return [{ours: theirs for ours, theirs in each.items() if ours != theirs} for each in asked]


def names_of(row: Mapping[str, Any]) -> list[str]:
    """Return the names of a row's columns, as a sentence lists them: not more than can be read."""
    names = [shortened(str(key)) for key in itertools.islice(row, _KEYS_NAMED + 1)]
    return [*names[:_KEYS_NAMED], *["..."] * (len(names) > _KEYS_NAMED)]


def visible(message: Mapping[str, Any]) -> str:
    """Return the part of an answer that every template shows: many strip white space and earlier turns' thinking."""
    content: str = message.get("content") or ""
    return content.rpartition("</think>")[2].strip()


def thoughts(message: Mapping[str, Any]) -> list[str]:
    """Return the thinking of an answer as it has to stand in the text: under its own key, or before the answer."""
    found = [message[key] for key in THINKING_KEYS if isinstance(message.get(key), str)]
    if in_content := THOUGHT.match(message.get("content") or ""):
        found.append(in_content[1])
    return [thought.strip() for thought in found if thought.strip()]


def without_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message without thinking under a key or at the beginning of its content."""
    kept = {key: value for key, value in message.items() if key not in THINKING_KEYS}
    return {**kept, "content": THOUGHT.sub("", kept["content"], count=1)} if kept.get("content") else kept


def _with_lists(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the row with its lists of messages as lists; each may be written as JSON in a string."""
    lists = {}
    for key in (*_TURNS, *_RESPONSES):
        value = row.get(key)
        if isinstance(value, str) and _BEGINS_LIST.match(value):
            with contextlib.suppress(ValueError):
                found = parse_text(value)
                if "role" in found[0] or "from" in found[0]:
                    lists[key] = found
    return {**row, **lists} if lists else row


def _misfit(row: Mapping[str, Any], format_name: str) -> str:
    """Return why a row does not fit a format."""
    column = next((key for key in _TURNS if not _is_empty(row.get(key))), None)
    if format_name not in ("messages", "sharegpt") or column is None:
        return f"the row does not have the keys of format {format_name} {_its_keys(row)}"
    turns = row[column]
    if isinstance(turns, list):
        marker = "from" if format_name == "sharegpt" else "role"
        is_object = isinstance(turns[0], Mapping)
        return f"message 1 of {column!r} " + (f"has no {marker!r}" if is_object else f"is {_kind(turns[0])}")
    return f"{column!r} is {_kind(turns)}, not a list of messages, nor JSON of one"


def _turns(row: Mapping[str, Any], marker: str) -> list[Any] | None:
    """Return the list of turns of a chat row whose first turn has the key `marker`, under either usual name."""
    for key in _TURNS:
        turns = row.get(key)
        if isinstance(turns, list) and turns and isinstance(turns[0], Mapping) and marker in turns[0]:
            return turns
    return None


def _has_turns(marker: str, key: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda row: _turns(row, marker) is not None or row.get(key) == []


def _has(*keys: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda row: all(key in row for key in keys)


def _parse_turns(
    row: Mapping[str, Any],
    role_key: str,
    text_key: str,
    roles: Mapping[str, str],
    images: list[ImageSource | None] | None = None,
) -> Conversation:
    turns = _turns(row, role_key)
    if not turns:
        raise MalformedRow("the conversation has no message")
    before: list[Mapping[str, Any]] = []
    if row.get("system") and role_key == "from":
        before.append({"role": "system", "content": _text(row["system"], "'system'")})
    messages = _messages(turns, "message", role_key, text_key, roles, images)
    return Conversation((*before, *messages), _untrained(turns, "message", len(before)), *_for_template(row))


def _untrained(turns: Sequence[Any], what: str, before: int) -> frozenset[int]:
    """Return the positions of turns that say they are no targets; `before` messages come first. Errors say `what`."""
    says_no = (_says_no_target(turn, f"{what} {number}") for number, turn in enumerate(turns, start=1))
    return frozenset(before + place for place, each in enumerate(says_no) if each)


def _for_template(row: Mapping[str, Any]) -> tuple[tuple[Mapping[str, Any], ...], Mapping[str, Any]]:
    """Return the row's tools, and its arguments for the template, under the name that TRL gives them."""
    args = row.get("chat_template_kwargs") or {}
    if not isinstance(args, Mapping):
        raise MalformedRow(f"'chat_template_kwargs' is {_kind(args)}, not an object")
    key = "tools" if row.get("tools") else "functions"
    tools = []
    for number, tool in enumerate(_listed(row.get(key) or [], f"{key!r}"), start=1):
        tool = _json(tool, f"tool {number} of {key!r}") if isinstance(tool, str) else tool
        if not isinstance(tool, Mapping):
            raise MalformedRow(f"tool {number} of {key!r} is {_kind(tool)}, not an object")
        # What OpenAI called functions came without the wrapper that templates unpack.
        bare = "function" not in tool and isinstance(tool.get("name"), str)
        tools.append({"type": "function", "function": tool} if bare else tool)
    return tuple(tools), args


def _messages(
    turns: Sequence[Any],
    what: str,
    role_key: str,
    text_key: str,
    roles: Mapping[str, str],
    images: list[ImageSource | None] | None = None,
) -> Messages:
    """Return messages as templates take them; errors call a message `what`. `images` as for `_content`."""
    messages: list[Mapping[str, Any]] = []
    for number, turn in enumerate(turns, start=1):
        where = f"{what} {number}"
        if not isinstance(turn, Mapping):
            raise MalformedRow(f"{where} is {_kind(turn)}, not an object with {role_key!r} and {text_key!r}")
        _refuse_unsupported_keys(turn, where, tools=True, images=False)
        role = _role(turn.get(role_key), where, roles)
        # Keys such as `name` or `reasoning_content` mean something to some templates, so they stay.
        own = (role_key, text_key, "tool_calls", "function_call", *_TARGET_KEYS)
        message = {k: v for k, v in turn.items() if k not in own and v is not None}
        called = turn.get(text_key) if role == _CALL else turn.get("tool_calls") or turn.get("function_call")
        if called:
            if role not in (_CALL, "assistant"):
                raise MalformedRow(f"{where} has calls, and its role is {role!r}")
            message["tool_calls"] = _calls(called, where)
        if role != _CALL and not (called and turn.get(text_key) is None):
            message["content"] = _content(turn.get(text_key), where, text_key, None if role == "assistant" else images)
        messages.append({"role": "assistant" if role == _CALL else role, **message})
    return tuple(messages)


def _calls(value: Any, where: str) -> list[Mapping[str, Any]]:
    """Return calls as templates read them: a function's name, and its arguments as an object."""
    calls: list[Mapping[str, Any]] = []
    for call in _listed(value, f"the calls of {where}"):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise MalformedRow(f"{where} has a call that names no function")
        arguments = function.get("arguments", function.get("parameters")) or {}
        if isinstance(arguments, str):
            arguments = _json(arguments, f"the arguments of the call of {function['name']!r} in {where}")
        if not isinstance(arguments, Mapping):
            raise MalformedRow(f"the arguments of the call of {function['name']!r} in {where} are no object")
        also = {"id": call["id"]} if call.get("id") is not None else {}
        calls.append({"type": "function", **also, "function": {"name": function["name"], "arguments": arguments}})
    return calls


def _listed(value: Any, what: str) -> list[Any]:
    """Return a list, or one object as a list; tables may hold it as JSON in a string."""
    value = _json(value, what) if isinstance(value, str) else value
    if not isinstance(value, (list, Mapping)):
        raise MalformedRow(f"{what} is {_kind(value)}, not a list")
    return value if isinstance(value, list) else [value]


def _json(text: str, what: str) -> Any:
    try:
        return parse_text(text)
    except ValueError as error:
        raise MalformedRow(f"{what} is a string that is not JSON ({error})") from None


def _parse_alpaca(row: Mapping[str, Any]) -> Conversation:
    messages: list[Mapping[str, Any]] = []
    if row.get("system"):
        messages.append({"role": "system", "content": _text(row["system"], "'system'")})
    for number, pair in enumerate(_listed(row.get("history") or [], "'history'"), start=1):
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


def _parse_prompt_completion(row: Mapping[str, Any], roles: Mapping[str, str]) -> PromptCompletion | Conversation:
    """Read text that follows text, or messages that follow messages, of which the prompt's are no targets."""
    prompt, completion = row["prompt"], row["completion"]
    if _are_messages(row, "prompt", "completion"):
        before, after = (
            _messages(row[key], f"{key!r} message", "role", "content", {**_ROLES, **roles})
            for key in ("prompt", "completion")
        )
        _refuse_no_question(before)
        untrained = _untrained(completion, "'completion' message", len(before)).union(range(len(before)))
        return Conversation((*before, *after), untrained, *_for_template(row))
    if roles:
        raise MalformedRow(
            "roles does nothing with a prompt and a completion that are text", mend=f"remove roles {_BESIDE_PATH}"
        )
    return PromptCompletion(_text(prompt, "'prompt'"), _text(completion, "'completion'"))


def _refuse_no_question(prompt: Messages) -> None:
    if not prompt:
        raise MalformedRow("'prompt' has no message")
    if prompt[-1]["role"] == "assistant":
        raise MalformedRow("the prompt ends with an assistant message")


def _are_messages(row: Mapping[str, Any], one: str, other: str) -> bool:
    """Return whether both columns hold messages. If both are text, refuse columns for the chat template they lack."""
    is_list = isinstance(row[one], list)
    if is_list != isinstance(row[other], list):
        raise MalformedRow(f"{one!r} is {_kind(row[one])} and {other!r} {_kind(row[other])}; both must be alike")
    for key in () if is_list else ("tools", "functions", "chat_template_kwargs"):
        if row.get(key):
            raise MalformedRow(
                f"the row has {key!r}, which is for chat templates, but its {one} and {other} are plain text"
            )
    return is_list


def _parse_preference(row: Mapping[str, Any], roles: Mapping[str, str]) -> Preference:
    """Read a pair as TRL does: with a prompt of its own, or with one that both responses begin with."""
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    _refuse_empty(row, "prompt", "chosen", "rejected")
    if _are_messages(row, "chosen", "rejected"):
        before, (better, worse) = _parse_responses(row, roles, "chosen", "rejected")
        return Preference(before, better, worse, *_for_template(row))
    chosen, rejected = _text(chosen, "'chosen'"), _text(rejected, "'rejected'")
    if prompt is not None:
        return Preference(_text(prompt, "'prompt'"), chosen, rejected)
    shared = _shared(chosen, rejected)
    _refuse_missing_prompt(row, shared)
    shared -= chosen[shared - 1] == " "  # a token begins with its space
    return Preference(chosen[:shared], chosen[shared:], rejected[shared:])


def _parse_judged(row: Mapping[str, Any], roles: Mapping[str, str]) -> Judged:
    """Read a response with its label as TRL does."""
    prompt, completion, label = row["prompt"], row["completion"], row["label"]
    if isinstance(label, str):  # all that CSV has
        label = {"true": True, "false": False}.get(label.lower(), label)
    if not isinstance(label, bool | int) or label not in (0, 1):
        said = "missing or null" if label is None else show(label)
        raise MalformedRow(f"'label' is {said}, not true (a desirable completion) or false")
    _refuse_empty(row, "prompt", "completion")
    if _are_messages(row, "prompt", "completion"):
        before, (answer,) = _parse_responses(row, roles, "completion")
        return Judged(before, answer, bool(label), *_for_template(row))
    return Judged(_text(prompt, "'prompt'"), _text(completion, "'completion'"), bool(label))


def _refuse_empty(row: Mapping[str, Any], *keys: str) -> None:
    for key in keys:
        value = row.get(key)
        if (value == [] and key != "prompt") or (isinstance(value, str) and not value.strip()):
            raise MalformedRow(f"{key!r} is empty")


def _refuse_missing_prompt(row: Mapping[str, Any], shared: int) -> None:
    """Refuse a preference row without a prompt, unless its responses share their beginning and no other column fits.

    Responses may share a beginning by chance, so a column under a usual name of prompts is stronger evidence.
    """
    named = next((key for key in _USUAL_NAMES["prompt"] if not _is_empty(row.get(key))), None)
    if shared and named is None:
        return
    why = f"{named!r} may be it" if shared else "'chosen' and 'rejected' begin with nothing in common"
    leave = f", or {{{named}: null}} if both responses begin with the prompt," if named and shared else ""
    raise MalformedRow(
        f"the row has no 'prompt', and {why} {_its_keys(row)}",
        mend=f"write columns: {{prompt: {named or 'COLUMN'}}}{leave} {_BESIDE_PATH}",
    )


def _parse_responses(
    row: Mapping[str, Any], roles: Mapping[str, str], *keys: str
) -> tuple[Messages, Sequence[Messages]]:
    """Return the prompt and the responses, which are messages under `keys`; one response has a prompt of its own."""
    prompt = row.get("prompt")
    for turns in (*(row[key] for key in keys), prompt if isinstance(prompt, list) else ()):
        if any(isinstance(turn, Mapping) and _says_no_target(turn, "a message") for turn in turns):
            raise MalformedRow("a message says that it is no target, and every response is one")
    responses = [_messages(row[key], f"{key!r} message", "role", "content", roles) for key in keys]
    if isinstance(prompt, list):
        before = _messages(prompt, "'prompt' message", "role", "content", roles)
    else:
        shared = _shared(*responses)
        before, responses = responses[0][:shared], [each[shared:] for each in responses]
        # Many data sets repeat the last question as text.
        if prompt is not None and (not before or before[-1].get("content") != _text(prompt, "'prompt'")):
            raise MalformedRow(
                "'prompt' is a string, but not the text of the last message that 'chosen' and 'rejected' begin with; "
                "give 'prompt' as a list of messages"
            )
    if not before:
        raise MalformedRow(f"the prompt has no message, and none comes before both answers {_its_keys(row)}")
    _refuse_no_question(before)
    for key, response in zip(keys, responses, strict=True):
        if others := [message["role"] for message in response if message["role"] != "assistant"]:
            raise MalformedRow(f"{key!r} has a message of role {others[0]!r} after the prompt, not only answers")
        if not any(message.get("content", "").strip() or message.get("tool_calls") for message in response):
            raise MalformedRow(f"{key!r} is empty")
    return before, responses


def _shared(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Return how many items both begin with; at least one is left to each."""
    return min(shared_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1)


def shared_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many items both begin with."""
    length = min(len(first), len(second))
    return next((place for place in range(length) if first[place] != second[place]), length)


def _role(value: Any, where: str, roles: Mapping[str, str]) -> str:
    if isinstance(value, str) and value in roles:
        return roles[value]
    reason = f"{where} has the unknown role {value!r} (known: {', '.join(roles)})"
    if not isinstance(value, str):
        raise MalformedRow(reason)
    stands_for = dump_yaml({value: "assistant"}, one_line=True)
    raise MalformedRow(
        reason, mend=f"correct the row, or say what the role stands for, as in roles: {stands_for} {_BESIDE_PATH}"
    )


def _content(value: Any, where: str, key: str, images: list[ImageSource | None] | None) -> str:
    """Return a message's text; a list of parts is joined, with `IMAGE` for an image, which is added to `images`.

    Other parts are refused by their type, and images where `images` is None.
    """
    if not isinstance(value, list):
        return _text(value, f"{key!r} of {where}")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "image" and images is not None:
            images.append(_image(part, where))
            texts.append(IMAGE)
        elif kind == "text":
            texts.append(_text(part.get("text"), f"a text part of {where}"))
        elif kind in ("image", "image_url"):
            why = "images are of parts {'type': 'image'} in what is no answer, in rows of format messages"
            raise MalformedRow(f"{where} has a content part of type {kind!r}, and {why}")
        else:
            raise MalformedRow(f"{where} has a content part of type {kind!r}, and only text and images are supported")
    return "".join(texts)


def _image(part: Mapping[str, Any], where: str) -> ImageSource | None:
    """Return the image of a part; None if its file stands in the row's `images`."""
    if part.get("url"):
        part = {"path": part["url"]}
    value = part.get("image") or part.get("path") or ({"bytes": part["bytes"]} if part.get("bytes") else None)
    return None if value is None else _image_source(value, f"the image of {where}")


def _image_source(value: Any, what: str) -> ImageSource:
    if isinstance(value, Mapping):  # as the package datasets keeps images
        if content := value.get("bytes"):
            if not isinstance(content, bytes | str):
                raise MalformedRow(f"{what} has bytes that are {_kind(content)}, not bytes nor base64 in a string")
            return ImageSource(content=content)
        value = value.get("path")
    if isinstance(value, bytes):
        return ImageSource(content=value)
    if not isinstance(value, str):
        raise MalformedRow(f"{what} is {_kind(value)}, not a path nor an object with 'bytes'")
    if _URL.match(value):
        reason = f"{what} is a URL ({shortened(value)}), which is never read"
        raise MalformedRow(reason, mend="write the path of a file")
    return ImageSource(path=_text(value, what))


def _matched(
    row: Mapping[str, Any], messages: Messages, images: Sequence[ImageSource | None]
) -> tuple[ImageSource, ...]:
    """Return the images of a row's messages, of which those without a file are the row's `images`, in their order."""
    column = row.get(_IMAGES) or []
    column = column if isinstance(column, list) else [column]
    missing = sum(image is None for image in images)
    if missing != len(column):
        raise MalformedRow(
            f"the row's {_IMAGES!r} holds {len(column)}, and its messages have {missing} image parts without a file"
        )
    if images and sum(str(each.get("content")).count(IMAGE) for each in messages) != len(images):
        raise MalformedRow(f"a text of the row holds U+{ord(IMAGE):04X}, which is no character")
    rest = iter([_image_source(value, f"image {number} of the row") for number, value in enumerate(column, start=1)])
    return tuple(next(rest) if image is None else image for image in images)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise MalformedRow(f"{what} is {_kind(value)}, not a string")
    return value


def _refuse_unsupported_keys(item: Mapping[str, Any], where: str, *, tools: bool, images: bool) -> None:
    media = [key for key in _MEDIA_KEYS if key != _IMAGES or not images]
    for keys, why in (
        (() if tools else _TOOL_KEYS, "tools are for rows of messages"),
        (media, "images are parts of the content of messages, and video and sound are not supported"),
    ):
        for key in keys:
            if item.get(key):
                raise MalformedRow(f"{where} has {key!r}, and {why}")


def _says_no_target(turn: Mapping[str, Any], where: str) -> bool:
    said = {key: turn[key] for key in _TARGET_KEYS if turn.get(key) is not None}
    for key, value in said.items():
        if value not in (0, 1):
            raise MalformedRow(f"{where} has {key!r}: {value!r}, but a message is a target or none; give true or false")
    if len(set(map(bool, said.values()))) > 1:
        raise MalformedRow(f"{where} has {' and '.join(map(repr, said))}, which contradict each other")
    return False in said.values()


def _kind(value: Any) -> str:
    if value is None:
        return "missing or null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "list"}
    return "an object" if isinstance(value, dict) else f"a {names.get(type(value), type(value).__name__)}"


def _its_keys(row: Mapping[str, Any]) -> str:
    return f"(its keys: {', '.join(names_of(row)) or 'none'})"


def _is_empty(value: Any) -> bool:
    """Return whether a column has nothing in it; 0 and false are something."""
    return value is None or value in ("", [], {})


_BESIDE_PATH = "beside the path of its source"
# Most specific first: chat data sets often carry a flattened `prompt` or `text` beside `messages`.
_FITS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "messages": _has_turns("role", "messages"),
    "sharegpt": _has_turns("from", "conversations"),
    "alpaca": _has("instruction", "output"),
    "prompt_completion": _has("prompt", "completion"),
    "text": _has("text"),
    PREFERENCE: _has("chosen", "rejected"),
    UNPAIRED: _has("prompt", "completion", "label"),
}
FORMATS = tuple(_FITS)
