"""What a test says of a refusal: its class and its key. Sentences are compared in cli/test_golden_sentences.py."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from expertmesh.config.errors import ExpertmeshError, InputError


@contextmanager
def refused(key: str, kind: type[ExpertmeshError] = InputError) -> Iterator[pytest.ExceptionInfo[ExpertmeshError]]:
    """The block must raise exactly `kind` with `key`. Gives pytest's `ExceptionInfo`, for what a sentence must name."""
    with pytest.raises(kind) as caught:
        yield caught
    assert (type(caught.value), caught.value.key) == (kind, key), str(caught.value)
