"""A conversation rendered by the tokenizer's own chat template, and which characters of it are targets.

Templates run in transformers' Jinja sandbox, in a child process with limits (sandbox.py); one that reaches out of the
sandbox or exceeds a limit is refused. What the child does is in targets.py.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from expertmesh.config.errors import InputError, SecurityError
from expertmesh.data.encoding.sandbox import LimitExceeded, Sandbox
from expertmesh.data.encoding.targets import ChatOptions, Rendered, TargetFinder
from expertmesh.data.formats import Conversation, MalformedRow, Preference

# What the renderer itself gives to a template, or takes for itself.
_RESERVED = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"kwargs"}


class ChatRenderer:
    """Renders conversations with one tokenizer's chat template.

    Raises `InputError` when the tokenizer has no chat template, or for `data.template_args` that are no template's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: ChatOptions) -> None:
        self._name = tokenizer.name_or_path or type(tokenizer).__name__
        if taken := sorted(_RESERVED & set(options.template_args)):
            raise InputError(
                f"data.template_args.{taken[0]} is not an argument of a template but of transformers; remove it.",
                key="data.template-args",
            )
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            raise InputError(
                f"the tokenizer {self._name} has no chat template, "
                "which rows of format messages, sharegpt, alpaca and preference (of messages) need; put a "
                "chat_template.jinja into the model directory, set data.chat_template to a file, or use data of plain "
                "text.",
                key="tokenizer.no-chat-template",
            ) from error
        self.writes_date = "strftime_now" in template
        self._child = Sandbox(TargetFinder(tokenizer, options).answer)

    def render(self, conversations: Sequence[Conversation]) -> list[list[Rendered] | MalformedRow]:
        """Return the samples of each conversation with their targets, or why its row cannot be used.

        A conversation is one sample unless `data.thinking: every_turn` takes several to keep the thinking of all turns.
        Raises `SecurityError` for a template that reaches out of its sandbox, or takes more time or memory or writes
        more text than any honest one.
        """
        answers = self._asked(
            [{"messages": each.messages, "untrained": list(each.untrained), **_given(each)} for each in conversations]
        )
        return [answer if isinstance(answer, MalformedRow) else list(map(_rendered, answer)) for answer in answers]

    def render_pairs(self, pairs: Sequence[Preference]) -> list[tuple[str, Rendered, Rendered] | MalformedRow]:
        """Return for each pair the prompt up to where an answer begins, and the full text with either answer; or why
        not.

        Raises as `render` does.
        """
        answers = self._asked(
            [{"prompt": pair.prompt, "answers": [pair.chosen, pair.rejected], **_given(pair)} for pair in pairs]
        )
        return [
            answer if isinstance(answer, MalformedRow) else (answer[0], _rendered(answer[1]), _rendered(answer[2]))
            for answer in answers
        ]

    def _asked(self, requests: Sequence[Mapping[str, Any]]) -> list[Any]:
        good = [request for request in requests if not _RESERVED & request["template_args"].keys()]
        try:
            answers = iter(self._child.map(good))
        except LimitExceeded as error:
            raise SecurityError(
                f"the chat template of {self._name} is refused: it {error}; read it, and put a chat_template.jinja "
                "that you trust into the model directory",
                key="tokenizer.unsafe-chat-template",
            ) from error
        found: list[Any] = []
        for request in requests:
            if taken := sorted(_RESERVED & request["template_args"].keys()):
                found.append(MalformedRow(f"'chat_template_kwargs' has {taken[0]!r}, which is not for a template"))
                continue
            answer = next(answers)
            found.append(MalformedRow(answer) if isinstance(answer, str) else answer)
        return found


def _rendered(answer: Mapping[str, Any]) -> Rendered:
    lists = {key: tuple(answer[key]) for key in ("odd", "unwritten")}
    return Rendered(**{**answer, **lists, "spans": tuple((start, end) for start, end in answer["spans"])})


def _given(row: Conversation | Preference) -> dict[str, Any]:
    return {"tools": list(row.tools), "template_args": dict(row.template_args)}
