"""Responses to token ids, in pairs or with a label: what follows the prompt is the response, as TRL has it.

Prompt and prompt + response are tokenized whole. The responses of a row begin where the first of them leaves the
prompt's tokens, which is before the prompt's end if a token reaches across it or a template renders it otherwise.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from expertmesh.data.encoding.encode import Encoded, Encoder, completed
from expertmesh.data.encoding.targets import AFTER_PROMPT, Rendered
from expertmesh.data.formats import Judged, MalformedRow, Preference

BEFORE_PROMPTS_END = "the first token that is not the prompt's, before its end"

Texts = tuple[str, list[Rendered]]
"""A prompt, and the whole text with each response."""


class ResponseEncoder(Encoder):
    """Encodes rows of the formats `preference` and `unpaired_preference` with one tokenizer."""

    def encode_responses(self, records: Sequence[Preference | Judged]) -> list[list[Encoded] | MalformedRow]:
        """Return a sample for each response of each record, in order, or the reason why it has none.

        The tokenizer is called once for all records of messages and once for all others.
        """
        chats = [record for record in records if not isinstance(record.prompt, str)]
        rendered = iter(self._renderer_of_chats().render_responses(chats) if chats else [])
        texts = [_plain_texts(record) if isinstance(record.prompt, str) else next(rendered) for record in records]
        results: list[Any] = list(texts)
        for plain in (False, True):
            group = [i for i, record in enumerate(records) if isinstance(record.prompt, str) is plain]
            group = [i for i in group if not isinstance(texts[i], MalformedRow)]
            tokens = self._tokenize([text for i in group for text in _all_texts(*results[i])], plain)
            ids = iter(each for each, _ in tokens)
            for i in group:
                prompt, texts_of_row = next(ids), results[i][1]
                results[i] = self._responses(prompt, [next(ids) for _ in texts_of_row], texts_of_row, plain)
        return results

    def _responses(
        self, prompt: list[int], whole: list[list[int]], rendered: list[Rendered], plain: bool
    ) -> list[Encoded]:
        start = min(_common(prompt, ids) for ids in whole)
        method = AFTER_PROMPT if start == len(prompt) else BEFORE_PROMPTS_END
        return [
            self._encoded(
                np.array(ids, dtype=np.int32), np.arange(len(ids)) >= start, replace(each, method=method), plain=plain
            )
            for ids, each in zip(whole, rendered, strict=True)
        ]


def _plain_texts(record: Preference | Judged) -> Texts:
    prompt = f"{record.prompt}"
    return prompt, [completed(prompt, f"{response}", AFTER_PROMPT) for response in record.responses]


def _all_texts(prompt: str, responses: list[Rendered]) -> list[str]:
    return [prompt, *(each.text for each in responses)]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    length = min(len(first), len(second))
    return next((place for place in range(length) if first[place] != second[place]), length)
