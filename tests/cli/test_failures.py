"""Which rank is blamed, and in which words, when several fail."""

import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from expertmesh.config import DistributedFailure, ExpertmeshError, InputError, IntegrityError
from expertmesh.launcher.rank_files import RankFailure, failures_in, root_cause
from expertmesh.launcher.torchrun import must_print
from expertmesh.training.control import RankStatus, StopState

TRACEBACK = "Traceback (most recent call last):\n  File ...\nRuntimeError: boom\n"
STATUSES = {rank: RankStatus(1, 1, 0.0, 7, "update", 0.0, StopState.ACCEPTING) for rank in range(2)}


def sentence(rank: int, text: str, exit_code: int = 2) -> RankFailure:
    return RankFailure(rank, exit_code, text, "", 0)


def crash(rank: int, text: str = "RuntimeError: boom") -> RankFailure:
    return RankFailure(rank, 1, text, TRACEBACK, 0)


KILLED, FAILED = "rank.ended-by-signal", "rank.unexpected-error"


@pytest.mark.parametrize(
    ("failures", "exit_codes", "error", "key", "start"),
    [
        ([sentence(0, "x"), sentence(1, "x")], {0: 2, 1: 2}, InputError, "input", "x"),
        ([sentence(1, "x"), sentence(0, "y")], {0: 2, 1: 2}, InputError, "input", "rank 1: x"),
        ([sentence(1, "x", 3)], {1: 3}, IntegrityError, "integrity", "rank 1: x"),
        ([crash(0), sentence(1, "x", 3)], {0: 1, 1: 3}, IntegrityError, "integrity", "rank 1: x"),
        ([sentence(0, "peer gone", 5)], {0: 5, 1: -9}, DistributedFailure, KILLED, "rank 1 was ended by signal 9 "),
        ([sentence(0, "peer gone", 5)], {0: 5, 1: -15}, DistributedFailure, KILLED, "rank 1 was ended by signal 15 "),
        ([sentence(0, "peer gone", 5)], {0: 5, 1: -6}, DistributedFailure, "distributed", "rank 0: peer gone"),
        ([sentence(0, "peer gone", 5)], {0: 5, 1: 0}, DistributedFailure, "distributed", "rank 0: peer gone"),
        ([crash(0)], {0: 1, 1: -11}, DistributedFailure, KILLED, "rank 1 was ended by signal 11 "),
        ([crash(1)], {0: -6, 1: 1}, DistributedFailure, FAILED, "rank 1 failed at step 7, update"),
        ([crash(1), crash(0)], {0: 1, 1: 1}, DistributedFailure, FAILED, "rank 1 failed at step 7, update"),
        ([], {0: -6, 1: 7}, DistributedFailure, "rank.exited", "rank 1 ended with exit code 7 "),
        ([], {1: -6}, DistributedFailure, KILLED, "rank 1 was ended by signal 6 "),
        ([], {0: 0, 1: -15}, DistributedFailure, KILLED, "rank 1 was ended by signal 15 "),
    ],
)  # fmt: skip
def test_the_cause_is_reported_and_not_what_follows_from_it(
    failures: list[RankFailure], exit_codes: Mapping[int, int], error: type[ExpertmeshError], key: str, start: str
) -> None:
    found = root_cause(failures, exit_codes, STATUSES)
    assert type(found) is error
    assert found.key == key
    assert str(found).startswith(start)


def test_an_unexpected_error_brings_the_end_of_its_traceback() -> None:
    lines = "".join(f"line {number}\n" for number in range(50))
    found = str(root_cause([RankFailure(0, 1, "E: x", lines, 0)], {0: 1}, STATUSES)).splitlines()
    assert found[1:] == [f"line {number}" for number in range(30, 50)]


def test_a_killed_rank_is_told_about_memory() -> None:
    assert "out of memory" in str(root_cause([], {0: -signal.SIGKILL}, STATUSES))


def test_records_come_back_in_the_order_of_time(tmp_path: Path) -> None:
    late, early = RankFailure(0, 3, "é\n", "", 20), RankFailure(1, 1, "b", TRACEBACK, 10)
    late.write(tmp_path)
    early.write(tmp_path)
    assert failures_in(tmp_path) == [early, late]


@pytest.fixture
def rank_of_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Become a rank of an attempt that torchrun has started; gives the file where its error goes."""

    def become(local_rank: int) -> Path:
        file = tmp_path / "attempt_0" / str(local_rank) / "error.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        return file

    return become


def test_under_torchrun_one_rank_tells_what_all_would(rank_of_torchrun: Callable[[int], Path]) -> None:
    told = rank_of_torchrun(1)
    assert must_print("ep 3 does not divide", may_follow=False)
    assert json.loads(told.read_text())["message"]["message"] == "ep 3 does not divide"
    silent = rank_of_torchrun(0)
    assert not must_print("ep 3 does not divide", may_follow=False)
    assert not must_print("connection closed by peer", may_follow=True)
    assert not silent.exists()
    assert must_print("another cause", may_follow=False)


def test_under_torchrun_the_first_lost_connection_is_told_if_nothing_else_is(
    rank_of_torchrun: Callable[[int], Path],
) -> None:
    rank_of_torchrun(0)
    assert must_print("connection closed by peer 1", may_follow=True)
    rank_of_torchrun(1)
    assert not must_print("connection closed by peer 0", may_follow=True)
    assert must_print("the cause, which came later", may_follow=False)


def test_a_rank_tells_its_error_where_there_is_no_place_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert must_print("x", may_follow=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/nowhere/0/error.json")
    assert must_print("x", may_follow=False)
