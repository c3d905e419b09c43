"""Encode records as token ids with a target mask: the one place that calls the tokenizer.

A token is a target when it covers at least one character of a target span; characters come from the fast
tokenizer's offsets, or, for a tokenizer without offsets, from prefixes whose ids must be true prefixes.
Chat text is tokenized as the template wrote it. `text` and `prompt_completion` rows get the special tokens
that the tokenizer adds by itself (usually a bos) and, if it has one, an eos at the end.

Of responses, in pairs or with a label, what follows the prompt is the target, as TRL has it: prompt and prompt +
response are tokenized whole, and the responses of a row begin where the first of them leaves the prompt's tokens. That
is before the prompt's end if a token reaches across it or a template renders it otherwise.

Chat templates run in transformers' Jinja sandbox, in a child process with limits (sandbox.py); one that reaches out of
the sandbox or exceeds a limit is refused. What the child does is in targets.py.
"""

import datetime
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from expertmesh.config.errors import InputError, SecurityError
from expertmesh.data.encoding.sandbox import LimitExceeded, Sandbox
from expertmesh.data.encoding.targets import (
    AFTER_PROMPT,
    EVERY_TOKEN,
    PREFIX_DIFFERENCE,
    STAND_INS,
    ChatOptions,
    Rendered,
    Span,
    TargetFinder,
    special_strings,
)
from expertmesh.data.encoding.unwritten import has_broken_thinking
from expertmesh.data.formats import (
    Conversation,
    Judged,
    MalformedRow,
    PlainText,
    Preference,
    PromptCompletion,
    shared_length,
)
from expertmesh.data.images import Images

# What the renderer itself gives to a template, or takes for itself.
_RESERVED = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"kwargs"}
COMPLETION = "completion"
BEFORE_PROMPTS_END = "the first token that is not the prompt's, before its end"


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
                "which rows of format messages, sharegpt, alpaca and preferences (of messages) need; put a "
                "chat_template.jinja into the model directory, set data.chat_template to a file, or use data of plain "
                "text.",
                key="tokenizer.no-chat-template",
            ) from error
        # Rows with tools may have a template of their own.
        self.writes_date = any("strftime_now" in each for each in (template, tokenizer.get_chat_template(tools=[{}])))
        self._child = Sandbox(TargetFinder(tokenizer, options).answer)

    def render(self, conversations: Sequence[Conversation]) -> list[list[Rendered] | MalformedRow]:
        """Return the samples of each conversation with their targets, or why its row cannot be used.

        A conversation is one sample unless `data.thinking: every_turn` takes several to keep the thinking of all turns.
        Raises `SecurityError` for a template that reaches out of its sandbox, or takes more time or memory or writes
        more text than any honest one.
        """
        answers = self._asked(
            [
                {
                    "messages": each.messages,
                    "untrained": list(each.untrained),
                    "has_images": bool(each.images),
                    **_given(each),
                }
                for each in conversations
            ]
        )
        return [answer if isinstance(answer, MalformedRow) else list(map(_rendered, answer)) for answer in answers]

    def render_responses(self, rows: Sequence[Preference | Judged]) -> list[tuple[str, list[Rendered]] | MalformedRow]:
        """Return for each row the prompt up to where an answer begins, and the full text with each response; or why
        not.

        Raises as `render` does.
        """
        answers = self._asked([{"prompt": row.prompt, "answers": list(row.responses), **_given(row)} for row in rows])
        return [
            answer if isinstance(answer, MalformedRow) else (answer[0], list(map(_rendered, answer[1:])))
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


def _given(row: Conversation | Preference | Judged) -> dict[str, Any]:
    return {"tools": list(row.tools), "template_args": dict(row.template_args)}


@dataclass(frozen=True, slots=True)
class Encoded:
    """One sample."""

    input_ids: npt.NDArray[np.int32]
    """`[S]` int32."""
    targets: npt.NDArray[np.bool_]
    """`[S]` bool."""
    method: str
    """The way in which the targets were found."""
    end: int | None
    """The special token that ends the last answer; None if none does."""
    empty_thoughts: int = 0
    """The field of `Rendered`."""
    odd: tuple[str, ...] = ()
    """The field of `Rendered`."""
    unwritten: tuple[str, ...] = ()
    """The field of `Rendered`."""
    pictures: bytes = b""
    """Its images, as `images.to_blob` returns them; empty without any."""

    @property
    def taught_end(self) -> int | None:
        """`end`, where nothing but a line break follows it: what the model is to stop at. In the middle of a
        conversation some templates (GPT-OSS) end an answer with another token than the one that ends generation.
        """
        return self.end if self.targets[-2:].any() else None


class Encoder:
    """Encodes records with one tokenizer, and rows of the formats `preference` and `unpaired_preference`.

    `images` are those of the model; None refuses rows that have some.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: ChatOptions, images: Images | None = None) -> None:
        self._tokenizer = tokenizer
        self._images = images
        self._options = options
        self._renderer: ChatRenderer | None = None
        self._eos: int | None = tokenizer.eos_token_id
        ids = [tokenizer.convert_tokens_to_ids(text) for text in special_strings(tokenizer)]
        self._special_ids = np.array([i for i in ids if i is not None], dtype=np.int64)

    @property
    def date_written(self) -> datetime.date | None:
        """The date that the chat template may have written; None for one that writes none, or has not been used."""
        return self._options.date if self._renderer is not None and self._renderer.writes_date else None

    def encode(
        self, records: Sequence[Conversation | PlainText | PromptCompletion], base: Path | None = None
    ) -> list[list[Encoded] | MalformedRow]:
        """Return the samples of each record, in order; of one that cannot be encoded the reason why.

        Images lie relative to the directory `base`.
        The tokenizer is called once for all chat records and once for all others.
        """
        conversations = [record for record in records if isinstance(record, Conversation)]
        chats = iter(self._renderer_of_chats().render(conversations) if conversations else [])
        rendered = [next(chats) if isinstance(record, Conversation) else self._document(record) for record in records]
        results: list[list[Encoded] | MalformedRow] = [
            each if isinstance(each, MalformedRow) else [] for each in rendered
        ]
        for plain in (False, True):
            group = [
                (i, each)
                for i, (record, samples) in enumerate(zip(records, rendered, strict=True))
                if isinstance(record, Conversation) is not plain and not isinstance(samples, MalformedRow)
                for each in samples
            ]
            for (i, each), tokens in zip(group, self._tokenize([each.text for _, each in group], plain), strict=True):
                found, encoded = results[i], self._mask(each, *tokens, plain=plain)
                if isinstance(encoded, Encoded):
                    encoded = self._with_images(records[i], each.text, encoded, base)
                if isinstance(encoded, MalformedRow):
                    results[i] = encoded
                elif not isinstance(found, MalformedRow):
                    found.append(encoded)
        return results

    def _renderer_of_chats(self) -> ChatRenderer:
        self._renderer = self._renderer or ChatRenderer(self._tokenizer, self._options)
        return self._renderer

    def _document(self, record: PlainText | PromptCompletion) -> list[Rendered]:
        if isinstance(record, PlainText):
            return [Rendered(record.text, ((0, len(record.text)),), EVERY_TOKEN)]
        found = completed(record.prompt, record.completion, COMPLETION)
        if self._options.loss_on == "all":
            return [replace(found, spans=((0, len(found.text)),), method=EVERY_TOKEN)]
        return [found]

    def _tokenize(self, texts: list[str], add_special_tokens: bool) -> list[tuple[list[int], Any]]:
        """Return ids and character offsets of each text; offsets are None from a tokenizer that has none.

        A text that begins with the bos token gets no second one.
        """
        if not texts:
            return []
        # verbose=False: `build_dataset` reports samples that are too long.
        encoding = self._tokenizer(
            texts,
            add_special_tokens=add_special_tokens,
            return_offsets_mapping=self._tokenizer.is_fast,
            return_attention_mask=False,
            verbose=False,
        )
        offsets = encoding["offset_mapping"] if self._tokenizer.is_fast else [None] * len(texts)
        twice = [self._tokenizer.bos_token_id] * 2
        return [
            (ids[1:], own and own[1:]) if add_special_tokens and ids[:2] == twice else (ids, own)
            for ids, own in zip(encoding["input_ids"], offsets, strict=True)
        ]

    def _mask(self, rendered: Rendered, ids: list[int], offsets: Any, *, plain: bool) -> Encoded | MalformedRow:
        input_ids = np.array(ids, dtype=np.int32)
        if rendered.method == EVERY_TOKEN:
            targets = np.ones(len(ids), dtype=np.bool_)
        else:
            try:
                covered = self._covered(rendered, ids, offsets, plain)
            except MalformedRow as error:
                return error
            targets = np.zeros(len(ids), dtype=np.bool_)
            for tokens in covered:
                trim = rendered.method in (PREFIX_DIFFERENCE, STAND_INS)
                targets[self._without_trailing_space(tokens, ids) if trim else tokens] = True
        return self._encoded(input_ids, targets, rendered, plain=plain)

    def _with_images(self, record: Any, text: str, encoded: Encoded, base: Path | None) -> Encoded | MalformedRow:
        """Return a sample with the tokens of its images, which are no targets."""
        sources = record.images if isinstance(record, Conversation) else ()
        if self._images is None:
            unread = MalformedRow("the row has images, which a stream does not read", mend="set data.stream to false")
            return unread if sources else encoded
        try:
            if not sources:
                self._images.refuse_token(encoded.input_ids)
                return encoded
            if self._options.thinking == "every_turn":
                raise MalformedRow("the row has images", mend="set data.thinking to another value than every_turn")
            ids, origins, pictures = self._images.expanded(text, encoded.input_ids, sources, base)
        except MalformedRow as error:
            return error
        targets = encoded.targets[origins] & (origins >= 0)
        return replace(encoded, input_ids=ids, targets=targets, pictures=pictures)

    def _encoded(
        self, input_ids: npt.NDArray[np.int32], targets: npt.NDArray[np.bool_], rendered: Rendered, *, plain: bool
    ) -> Encoded:
        end = self._eos
        if not plain:
            # The last but one too: some marks include the line break after the end token.
            last = input_ids[np.flatnonzero(targets)[-2:]]
            ends = last[np.isin(last, self._special_ids)]
            end = int(ends[-1]) if ends.size else None
        elif end is not None and input_ids.size and input_ids[-1] == end:
            targets[-1] = True
        elif end is not None:
            # A document or completion ends with eos, which is a target: so the model learns to stop.
            input_ids, targets = np.append(input_ids, np.int32(end)), np.append(targets, np.True_)
        facts = rendered.empty_thoughts, rendered.odd, rendered.unwritten
        return Encoded(input_ids, targets, rendered.method, end, *facts)

    def _covered(self, rendered: Rendered, ids: list[int], offsets: Any, plain: bool) -> list[npt.NDArray[np.int64]]:
        """Return for each span the indices of the tokens that cover at least one of its characters."""
        if offsets is None:
            return [self._covered_by_prefixes(rendered.text, span, ids, plain) for span in rendered.spans]
        own = np.array(offsets, dtype=np.int64).reshape(-1, 2)
        # Offsets leave out trimmed spaces and whatever the normalizer removed, and are (0, 0) for tokens that
        # the tokenizer added: so a token reaches from where its predecessors ended to where it ends.
        ends = np.maximum.accumulate(own[:, 1]) if len(own) else own[:, 1]
        previous = np.concatenate(([0], ends[:-1]))[: len(ends)]
        starts = np.where(own[:, 0] < own[:, 1], np.minimum(own[:, 0], previous), previous)
        return [np.flatnonzero((starts < end) & (ends > start) & (starts < ends)) for start, end in rendered.spans]

    def _covered_by_prefixes(self, text: str, span: Span, ids: list[int], plain: bool) -> npt.NDArray[np.int64]:
        (to_start, _), (to_end, _) = self._tokenize([text[: span[0]], text[: span[1]]], plain)
        if ids[: len(to_start)] != to_start or ids[: len(to_end)] != to_end:
            raise MalformedRow("tokens reach across the border of an answer, and this tokenizer gives no offsets")
        return np.arange(len(to_start), len(to_end))

    def _without_trailing_space(self, tokens: npt.NDArray[np.int64], ids: list[int]) -> npt.NDArray[np.int64]:
        """Drop what follows the turn's last special token when it is only white space.

        ChatML ends a turn with `<|im_end|>` and a newline that belongs to the layout: generation stops before
        it, and templates with generation marks leave it out as well.
        """
        special = np.flatnonzero(np.isin(np.array(ids, dtype=np.int64)[tokens], self._special_ids))
        if not special.size:
            return tokens
        kept, rest = np.split(tokens, [special[-1] + 1])
        text = str(self._tokenizer.decode([ids[token] for token in rest])) if rest.size else ""
        return tokens if text.strip() else kept

    def encode_responses(self, records: Sequence[Preference | Judged]) -> list[list[Encoded] | MalformedRow]:
        """Return a sample for each response of each record, in order, or the reason why it has none.

        The tokenizer is called once for all records of messages and once for all others.
        """
        chats = [record for record in records if not isinstance(record.prompt, str)]
        rendered = iter(self._renderer_of_chats().render_responses(chats) if chats else [])
        texts = [
            (record.prompt, [completed(record.prompt, f"{each}", AFTER_PROMPT) for each in record.responses])
            if isinstance(record.prompt, str)
            else next(rendered)
            for record in records
        ]
        results: list[Any] = list(texts)
        for plain in (False, True):
            group = [i for i, record in enumerate(records) if isinstance(record.prompt, str) is plain]
            group = [i for i in group if not isinstance(texts[i], MalformedRow)]
            every = [text for i in group for text in (results[i][0], *(each.text for each in results[i][1]))]
            tokens = self._tokenize(every, plain)
            ids = iter(each for each, _ in tokens)
            for i in group:
                prompt, responses = next(ids), results[i][1]
                whole = [next(ids) for _ in responses]
                start = min(shared_length(prompt, each) for each in whole)
                method = AFTER_PROMPT if start == len(prompt) else BEFORE_PROMPTS_END
                results[i] = [
                    self._encoded(np.array(own, np.int32), np.arange(len(own)) >= start, found, plain=plain)
                    for own, found in zip(whole, (replace(each, method=method) for each in responses), strict=True)
                ]
        return results


def completed(prompt: str, completion: str, method: str) -> Rendered:
    """Return plain text of which the completion is the target."""
    text, spans = prompt + completion, ((len(prompt), len(prompt) + len(completion)),)
    return Rendered(text, spans, method, odd=("broken_thinking",) * has_broken_thinking(text, spans))
