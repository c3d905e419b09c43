"""An error on one rank is the same error on all of them, and the group can be used afterwards."""

import pytest
import torch.distributed as dist

from expertmesh.config.errors import (
    DistributedFailure,
    InputError,
    IntegrityError,
    SecurityError,
)
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from tests.support.ranks import shared_ranks

KINDS = {kind.__name__: kind for kind in (InputError, IntegrityError, SecurityError, DistributedFailure)}


def _raise_on(ranks: dict[int, tuple[str, str]]) -> tuple[str, str] | None:
    """Each rank in `ranks` raises its error inside; what came out, after using the group again."""
    try:
        with raise_on_all_ranks("working"):
            if dist.get_rank() in ranks:
                kind, text = ranks[dist.get_rank()]
                raise KINDS.get(kind, ValueError)(text)
    except Exception as error:
        caught: tuple[str, str] | None = (type(error).__name__, str(error))
    else:
        caught = None
    dist.barrier()
    return caught


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_ours_is_raised_as_it_is_on_every_rank(kind: str) -> None:
    sentence = "file.yaml:3: 'ключ' is wrong; mend it"
    assert shared_ranks(_raise_on, 3, {1: (kind, sentence)}) == [(kind, sentence)] * 3


def _key_of_an_error_on_rank_1() -> str:
    try:
        with raise_on_all_ranks("working"):
            if dist.get_rank() == 1:
                raise InputError("wrong", key="layout.wrong")
    except InputError as error:
        return error.key
    return "none"


def test_the_key_of_an_error_is_known_on_every_rank() -> None:
    assert shared_ranks(_key_of_an_error_on_rank_1, 2) == ["layout.wrong"] * 2


class _Derived(InputError):
    """An error of a module's own, as `CannotCut` is, which other arguments make."""

    def __init__(self, number: int) -> None:
        super().__init__(f"wrong {number}", key="layout.wrong")


def _derived_on_rank_1() -> tuple[str, str, bool]:
    try:
        with raise_on_all_ranks("working"):
            if dist.get_rank() == 1:
                raise _Derived(2)
    except InputError as error:
        return str(error), error.key, isinstance(error, DistributedFailure)
    return "", "", False


def test_an_error_of_a_derived_class_is_that_of_its_base_on_the_other_ranks() -> None:
    assert shared_ranks(_derived_on_rank_1, 2) == [("wrong 2", "layout.wrong", False)] * 2


def test_the_lowest_failing_rank_speaks_for_all() -> None:
    ranks = {2: ("InputError", "second"), 1: ("IntegrityError", "first")}
    results = shared_ranks(_raise_on, 3, ranks)
    assert results[0] == results[1] == ("IntegrityError", "first")
    # A rank with an error of its own keeps it as the cause.
    assert results[2] == ("IntegrityError", "first")


def test_any_other_exception_names_its_rank_on_the_others() -> None:
    results = shared_ranks(_raise_on, 2, {1: ("ValueError", "bug")})
    assert results[1] == ("ValueError", "bug")
    assert results[0][0] == "DistributedFailure"
    assert results[0][1].startswith("rank 1 failed while working: ValueError: bug")


def test_a_long_sentence_arrives_whole() -> None:
    assert shared_ranks(_raise_on, 2, {0: ("InputError", "é" * 100_000)}) == [("InputError", "é" * 100_000)] * 2


def test_without_errors_nothing_happens() -> None:
    assert shared_ranks(_raise_on, 2, {}) == [None, None]


def test_without_a_process_group_errors_pass_through() -> None:
    with pytest.raises(KeyError), raise_on_all_ranks("working"):
        raise KeyError("x")
    with raise_on_all_ranks("working"):
        pass
