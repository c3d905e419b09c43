"""Cases that share a launch are tests of their own: each gets its own result, or its own failing ranks' tracebacks."""

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import expertmesh as em
from expertmesh.config.errors import InputError
from expertmesh.experts import micro_batch
from expertmesh.experts.layer import ExpertLayer
from tests.support.one_launch import Launched, one_launch
from tests.support.ranks import TURNS, LivingRanks, RankFailed, SharedRanks, shared_ranks

_STARTED_BY = os.getpid()


def _sum_of_ranks() -> tuple[float, int, float]:
    """What collectives of groups give, which process this is, and a random number."""
    mesh = em.init_mesh(em.ParallelConfig(ep=2))
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total, group=mesh.expert.get_group("ep"))
    return float(total), os.getpid(), float(torch.rand(()))


def _raise_on_all() -> None:
    raise ValueError("on all ranks")


def _raise_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("on rank 1 alone")
    dist.barrier()


def _crash_on_one() -> None:
    if dist.get_rank() == 1:
        ctypes.string_at(0)  # a fault of this thread, which the kernel cannot leave pending, as it can what is sent
    dist.barrier()


BROKEN: dict[str, tuple[Callable[[], object], str]] = {
    "all raise": (_raise_on_all, r"raised:(.|\n)*on all ranks\n(.|\n)*raised:(.|\n)*on all ranks\n"),
    "one raises": (_raise_on_one, r"rank 1 raised:(.|\n)*on rank 1 alone"),
    "one crashes": (_crash_on_one, r"rank 1 hung or died(.|\n)*Segmentation fault(.|\n)*_crash_on_one"),
}
ORDER = ["right", "all raise", "right again", "one raises", "and again", "one crashes", "at the end"]
_SEEN: list[tuple[float, int, float]] = []


@pytest.mark.parametrize("name", ORDER)
@one_launch(lambda name: (2, BROKEN[name][0] if name in BROKEN else _sum_of_ranks), limit_seconds=60)
def test_a_case_that_fails_is_red_alone(launched: Launched, name: str) -> None:
    if name in BROKEN:
        with pytest.raises(RankFailed, match=BROKEN[name][1]):
            launched()
    else:
        assert [total for total, *_ in launched()] == [3.0, 3.0]


@pytest.mark.parametrize("name", ["first", "second", "third"])
@one_launch(lambda name: (4, _sum_of_ranks))
def test_cases_share_ranks_and_start_from_the_same_random_state(launched: Launched, name: str) -> None:
    totals, pids, numbers = zip(*launched(), strict=True)
    assert totals == (3.0, 3.0, 7.0, 7.0)
    assert _STARTED_BY not in pids
    _SEEN.append((totals[0], pids[0], numbers[0]))
    assert set(_SEEN) == {_SEEN[0]}


def _not_built(name: str) -> tuple[int, Callable[[], object]]:
    if name == "not built":
        raise KeyError(name)
    return 1, dist.get_world_size


@pytest.mark.parametrize("name", ["built", "not built"])
@one_launch(_not_built)
def test_a_case_that_cannot_be_built_is_red_alone(launched: Launched, name: str) -> None:
    if name == "built":
        assert launched() == [1]
    else:
        with pytest.raises(KeyError, match=name):
            launched()


@pytest.mark.slow(why="it waits for a time limit; failures and crashes stay")
def test_a_hang_is_shown_with_its_stack_and_leaves_no_process() -> None:
    def hang() -> None:
        if dist.get_rank() == 0:
            time.sleep(1000)

    ranks = LivingRanks([dist.get_world_size, hang], 2, timeout=5)
    pids = [process.pid for process in ranks._processes]
    assert ranks.start(0)
    assert ranks.results() == [2, 2]
    assert ranks.start(1)
    with pytest.raises(RankFailed, match=r"rank 0 hung or died(.|\n)*in hang"):
        ranks.results()
    assert not ranks.alive
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_new_ranks_take_over_before_groups_that_stay_are_too_many() -> None:
    shared = SharedRanks()
    ranks = [tuple(shared(os.getpid, 2)) for _ in range(TURNS + 1)]
    shared.end()
    assert len(set(ranks[:TURNS])) == 1
    assert not set(ranks[0]) & set(ranks[TURNS])


def test_shared_ranks_stay_until_one_fails() -> None:
    first = shared_ranks(os.getpid, 2)
    assert shared_ranks(os.getpid, 2) == first
    with pytest.raises(RankFailed, match=BROKEN["one raises"][1]):
        shared_ranks(_raise_on_one, 2)
    assert not set(shared_ranks(os.getpid, 2)) & set(first)


def _refuse(ranks: int) -> None:
    if dist.get_rank() < ranks:
        raise InputError("not this", key="test.refused")
    dist.barrier()


def test_ranks_stay_when_all_of_them_refuse_and_end_when_one_does() -> None:
    shared = SharedRanks()
    first = shared(os.getpid, 2)
    for _ in range(2):
        with pytest.raises(RankFailed) as caught:
            shared(_refuse, 2, 2)
        assert str(caught.value).count("InputError of key test.refused") == 2
        assert shared(os.getpid, 2) == first
    with pytest.raises(RankFailed, match="rank 0 raised"):
        shared(_refuse, 2, 1)
    assert not set(shared(os.getpid, 2)) & set(first)
    shared.end()


def test_what_a_function_patches_is_put_back_behind_it() -> None:
    def values() -> list[Any]:
        return [
            micro_batch.real_tokens(3),
            ExpertLayer.shared,
            ExpertLayer.slot_E,
            ExpertLayer.__dir__ is object.__dir__,
            os.environ.get("PATCHED"),
            torch.relu(torch.ones(1)),
        ]

    def patch() -> None:
        micro_batch.real_tokens = lambda tokens: "patched"  # type: ignore[assignment]
        ExpertLayer.slot_E, ExpertLayer.shared = 7, "patched"  # type: ignore[assignment]
        ExpertLayer.__dir__ = lambda layer: []  # type: ignore[assignment,method-assign]
        os.environ["PATCHED"] = "1"
        mock.patch.object(torch, "relu", lambda x: 2 * x).start()
        assert values() == ["patched", "patched", 7, False, "1", 2]

    shared = SharedRanks()
    (before,) = shared(values, 1)
    shared(patch, 1)
    assert shared(values, 1) == [before]
    shared.end()


def test_ranks_have_what_is_patched_here(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedRanks()
    (first,) = shared(os.getpid, 1)
    monkeypatch.setenv("PATCHED", "1")
    assert shared(os.getenv, 1, "PATCHED") == ["1"]
    assert shared(os.getpid, 1) == [first]
    with mock.patch.object(micro_batch, "real_tokens", return_value="patched"):
        assert shared(lambda: micro_batch.real_tokens(3), 1) == ["patched"]
    assert shared(lambda: micro_batch.real_tokens(3), 1) == [None]
    shared.end()
