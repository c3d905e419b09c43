"""What a test says of a refusal: its class, its key, what the sentence names. Whole ones: cli/test_golden_sentences.py.

`with refused("model.no-experts", naming="llama"): describe(llama)`
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from expertmesh.config.errors import ExpertmeshError, InputError
from tests.support.ranks import RankFailed


@contextmanager
def refused(
    key: str, kind: type[ExpertmeshError] = InputError, *, naming: str = ""
) -> Iterator[pytest.ExceptionInfo[ExpertmeshError]]:
    """Expect the block to raise a `kind` of this key whose sentence has `naming` in it: a module, a key, a number."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.key == key, str(caught.value)
    assert naming in str(caught.value)


@contextmanager
def refused_on_ranks(key: str, kind: type[ExpertmeshError] = InputError, *, naming: str = "") -> Iterator[None]:
    """Expect the same of `run_ranks`, for the ranks that fail first."""
    with pytest.raises(RankFailed) as caught:
        yield
    assert f"{kind.__name__} of key {key}" in str(caught.value)
    assert naming in str(caught.value)
