"""Pairs of responses to token ids: what follows the prompt is the response, as TRL has it.

Prompt, prompt + chosen and prompt + rejected are tokenized whole. The responses begin where the first of the two leaves
the prompt's tokens, which is before the prompt's end if a token reaches across it or a template renders it otherwise.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from expertmesh.data.encoding.encode import Encoded, Encoder, completed
from expertmesh.data.encoding.targets import AFTER_PROMPT, Rendered
from expertmesh.data.formats import MalformedRow, Preference

BEFORE_PROMPTS_END = "the first token that is not the prompt's, before its end"

Texts = tuple[str, Rendered, Rendered]
"""A prompt, and the whole text with either response."""


class PairEncoder(Encoder):
    """Encodes rows of format `preference` with one tokenizer."""

    def encode_pairs(self, records: Sequence[Preference]) -> list[tuple[Encoded, Encoded] | MalformedRow]:
        """Return the chosen and the rejected sample of each record, in order, or the reason why it has none.

        The tokenizer is called once for all records of messages and once for all others.
        """
        chats = [record for record in records if not isinstance(record.prompt, str)]
        rendered = iter(self._renderer_of_chats().render_pairs(chats) if chats else [])
        texts = [_plain_texts(record) if isinstance(record.prompt, str) else next(rendered) for record in records]
        results: list[Any] = list(texts)
        for plain in (False, True):
            group = [i for i, record in enumerate(records) if isinstance(record.prompt, str) is plain]
            group = [i for i in group if not isinstance(texts[i], MalformedRow)]
            tokens = self._tokenize([text for i in group for text in _all_texts(*results[i])], plain)
            ids = iter(each for each, _ in tokens)
            for i in group:
                results[i] = self._pair(next(ids), next(ids), next(ids), results[i], plain)
        return results

    def _pair(
        self, prompt: list[int], chosen: list[int], rejected: list[int], rendered: Texts, plain: bool
    ) -> tuple[Encoded, Encoded]:
        start = min(_common(prompt, chosen), _common(prompt, rejected))
        method = AFTER_PROMPT if start == len(prompt) else BEFORE_PROMPTS_END
        better, worse = (replace(each, method=method) for each in rendered[1:])
        return self._response(chosen, start, better, plain), self._response(rejected, start, worse, plain)

    def _response(self, ids: list[int], start: int, rendered: Rendered, plain: bool) -> Encoded:
        return self._encoded(np.array(ids, dtype=np.int32), np.arange(len(ids)) >= start, rendered, plain=plain)


def _plain_texts(record: Preference) -> Texts:
    prompt = f"{record.prompt}"
    chosen, rejected = (completed(prompt, f"{response}", AFTER_PROMPT) for response in (record.chosen, record.rejected))
    return prompt, chosen, rejected


def _all_texts(prompt: str, chosen: Rendered, rejected: Rendered) -> list[str]:
    return [prompt, chosen.text, rejected.text]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    length = min(len(first), len(second))
    return next((place for place in range(length) if first[place] != second[place]), length)
