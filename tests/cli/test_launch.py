"""How a job of local ranks ends: one message, the right exit code, nothing left behind."""

import contextlib
import logging
import multiprocessing
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from expertmesh.config import Config, DistributedFailure, InputError, IntegrityError
from expertmesh.io.parent import watch_parent
from expertmesh.launcher import launch as launcher
from expertmesh.launcher import torchrun
from expertmesh.launcher.launch import (
    HANDLED_SIGNALS,
    RunOptions,
    _continued,
    _with_next_start,
    job_size,
    join_job,
    launch,
    local_ranks,
    open_store,
    run,
)
from expertmesh.launcher.rank_files import stopped_sentence
from expertmesh.launcher.torchrun import TorchrunAgent
from expertmesh.training.control import Control, StopReason
from tests.cli.jobs import CONFIG, FAKE, ForkedJob, is_alive, own_temporary, wait_until
from tests.support.errors import refused

JOB = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PYTORCH_ALLOC_CONF")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Whatever a launch sets in this process, it must put back as well."""
    for name in (*JOB, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    with own_temporary(tmp_path, monkeypatch):
        before = state()
        yield tmp_path
        assert state() == before


def test_ranks_form_a_group_and_their_output_passes_through(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(CONFIG, 2, f"{FAKE}:succeed") == 0
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert capfd.readouterr().out == f"out: 2 ranks of {threads} threads\n"


def test_an_error_of_all_ranks_is_reported_once_and_not_tried_again(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"^data\.train\.0\.path: there is no such file$") as caught:
        launch(CONFIG, 2, f"{FAKE}:refuse_everywhere", options=RunOptions(max_restarts=3))
    assert caught.value.key == "data.no-such-file"
    assert capfd.readouterr() == ("", "")


def test_an_error_of_one_rank_ends_the_others_and_names_the_rank(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.5)
    with pytest.raises(IntegrityError, match=r"^rank 1: a weight is not what it should be$"):
        launch(CONFIG, 2, f"{FAKE}:corrupt_on_rank_1", options=RunOptions(max_restarts=3))
    assert capfd.readouterr() == ("", "")


def test_a_bug_on_one_rank_is_reported_with_its_place_and_traceback() -> None:
    said = r"(?s)^rank 1 failed at step 3, reading data: ZeroDivisionError: a bug; .* in bug_on_rank_1"
    with pytest.raises(DistributedFailure, match=said):
        launch(CONFIG, 2, f"{FAKE}:bug_on_rank_1")


def test_a_killed_rank_is_blamed_with_its_place_and_not_the_peer_that_lost_it() -> None:
    said = r"^rank 1 was ended by signal 9 \(SIGKILL\) at step 12, forward and backward: if nobody sent it"
    with pytest.raises(DistributedFailure, match=said):
        launch(CONFIG, 2, f"{FAKE}:die_on_rank_1")


@pytest.mark.slow(why="a killed rank and its peers stay")
def test_what_a_dead_rank_had_started_is_ended(temporary: Path) -> None:
    with pytest.raises(DistributedFailure, match=r"rank 1 .* \(SIGKILL\) before the first step, starting"):
        launch(CONFIG, 2, f"{FAKE}:leave_a_child_behind")
    assert not is_alive(int((temporary / "child").read_text()))


@pytest.mark.slow_cases(
    r"(stopped_by_a_signal|slow_reader).*", why="each waits for a time limit; the endless loop stays"
)
@pytest.mark.parametrize(
    ("hang", "ranks", "found"),
    [
        ("stopped_by_a_signal", 3, r"it was stopped by a signal \(SIGSTOP\); where it was.*in stopped_by_a_signal"),
        ("endless_loop", 2, r"its process was running; where it was.*in endless_loop\n.*in hang_on_rank_1"),
        ("slow_reader", 2, r"its process was running; where it was.*in slow_reader"),
    ],
)
def test_a_hung_rank_is_named_with_its_place_and_stack(hang: str, ranks: int, found: str) -> None:
    job = ForkedJob("hang_on_rank_1", ranks, HANG=hang)
    (hung,) = job.wait_for("hanging", 1)
    assert job.end() == 5
    said = job.said()
    assert_matches(rf"error: rank 1 hung at step 3, reading data: it had not moved for \d s; {found}", said)
    assert_matches(r"\nrank [02] gave up waiting at step 3, forward and backward: .*Timed out", said)
    assert not is_alive(hung)


@pytest.mark.slow_cases(r"(2|10)-.*", why="SIGTERM stays")
@pytest.mark.parametrize(
    ("number", "code", "reason"),
    [
        (signal.SIGTERM, 143, "SIGTERM"),
        (signal.SIGINT, 130, "Ctrl-C"),
        (signal.SIGUSR1, 143, "SIGUSR1 (a notice of preemption)"),
    ],
)
def test_a_job_that_is_asked_to_stop_saves_and_ends(
    number: signal.Signals, code: int, reason: str, temporary: Path
) -> None:
    job = ForkedJob("loop", SAVE_SECONDS="1")
    ranks = job.wait_for("up")
    os.kill(job.process, number)
    assert job.end() == code
    assert job.said().splitlines()[2:] in ([f"saving {a}", f"saving {b}"] for a, b in (ranks, reversed(ranks)))
    assert [path.read_text() for path in temporary.glob("saved-*")] == [reason, reason]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_that_reaches_launcher_and_ranks_is_one_request(number: signal.Signals, temporary: Path) -> None:
    """Ctrl-C in a terminal, or a scheduler that signals every process of a job."""
    job = ForkedJob("loop")
    ranks = job.wait_for("up")
    os.killpg(job.process, number)
    for process in (*ranks, job.process, *ranks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
    assert job.end() == 128 + number
    assert len(list(temporary.glob("saved-*"))) == 2


@pytest.mark.slow_cases(r"(15|1)-.*", why="Ctrl-C stays")
@pytest.mark.parametrize(
    ("second", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)  # fmt: skip
def test_a_second_signal_ends_the_job_at_once(second: signal.Signals, code: int, temporary: Path) -> None:
    job = ForkedJob("loop", one_request=0, SAVE_SECONDS="300")
    job.wait_for("up")
    os.kill(job.process, signal.SIGTERM)
    job.wait_for("saving")
    os.kill(job.process, second)
    assert job.end() == code
    assert list(temporary.glob("saved-*")) == []


@pytest.mark.slow_cases(r"(1|2)-.*", why="SIGTERM stays")
@pytest.mark.parametrize(
    ("number", "code", "by"),
    [(signal.SIGTERM, 143, "SIGTERM"), (signal.SIGINT, 130, "Ctrl-C"), (signal.SIGHUP, 129, "SIGHUP")],
)
def test_a_job_that_is_not_in_its_loop_ends_at_once_with_one_line(number: signal.Signals, code: int, by: str) -> None:
    job = ForkedJob("load")
    job.wait_for("up")
    os.killpg(job.process, number)
    assert job.end() == code
    line = f"stopped by {by} before the first step, loading weights: nothing was saved; the same command starts again"
    assert job.said().splitlines()[2:] == [line]


def test_under_a_launcher_rank_0_says_that_it_was_stopped_before_its_loop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(KeyboardInterrupt):
        run(CONFIG, f"{FAKE}:interrupted")
    line = "stopped by Ctrl-C before the first step, loading weights: nothing was saved"
    assert capsys.readouterr().err == f"{line}; the same command starts again\n"


def test_a_launcher_that_is_stopped_before_its_ranks_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(config: Config, ranks: int, ranks_per_node: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(CONFIG, f"{FAKE}:succeed", preflight=interrupted)
    assert capsys.readouterr().err.startswith(
        "stopped by Ctrl-C before ranks were started: nothing was saved; the same"
    )


def test_what_a_start_after_a_stop_continues_from(tmp_path: Path) -> None:
    for step in ("step-99999999", "step-100000000", "step-100000012.tmp-12"):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
    sentence = "stopped by Ctrl-C before ranks were started: nothing was saved"
    assert (
        stopped_sentence(signal.SIGINT, None, str(tmp_path))
        == f"{sentence}; the same command continues from step-100000000"
    )
    assert stopped_sentence(signal.SIGINT, None, None) == sentence


@pytest.mark.slow(why="a signal to the job stays")
def test_a_signal_to_one_rank_that_loads_names_the_rank_and_the_signal() -> None:
    job = ForkedJob("load")
    ranks = job.wait_for("up")
    os.kill(ranks[0], signal.SIGTERM)
    assert job.end() == 5
    assert_matches(r"error: rank \d was ended by signal 15 \(SIGTERM\) before the first step, loading", job.said())


def test_the_time_that_was_given_ends_a_run_as_sigterm_does(temporary: Path) -> None:
    job = ForkedJob("loop", seconds=1)
    assert job.end() == 143
    assert [path.read_text() for path in temporary.glob("saved-*")] == ["--max-time", "--max-time"]


def test_failed_ranks_are_started_again_as_often_as_allowed(temporary: Path) -> None:
    job = ForkedJob("fail_twice", restarts=2)
    assert job.end() == 0
    said = job.said()
    first = (
        r"^rank 1 was ended by signal 9 \(SIGKILL\) at step 1, update: .*\nall ranks are started again \(restart 1 of"
    )
    assert_matches(first, said)
    assert_matches(r"rank 1 failed at step 2, update: RuntimeError: the network is gone; .*\(restart 2 of 2\)\n$", said)
    assert [path.read_text() for path in temporary.glob("starts-*")] == ["xxx", "xxx"]


def test_a_restart_goes_on_from_the_run_s_own_checkpoint_whatever_it_began_with(tmp_path: Path) -> None:
    checkpoint = CONFIG.checkpoint.model_copy(update={"resume": "never"})
    config = CONFIG.model_copy(update={"checkpoint": checkpoint, "output_dir": str(tmp_path)})
    (tmp_path / "checkpoints" / "step-00000003.tmp-12").mkdir(parents=True)
    assert _continued(config).checkpoint.resume == "never"
    (tmp_path / "checkpoints" / "step-00000003").mkdir()
    assert _continued(config).checkpoint.resume == "auto"


def test_a_failure_says_that_the_same_command_continues_if_it_does(tmp_path: Path) -> None:
    failure = DistributedFailure("rank 1 hung", key="rank.hung")
    config = CONFIG.model_copy(update={"output_dir": str(tmp_path)})
    assert _with_next_start(failure, config, RunOptions()) is failure
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    said = _with_next_start(failure, config, RunOptions())
    assert (str(said), said.key) == ("rank 1 hung\nthe same command continues from step-00000003", "rank.hung")
    checkpoint = config.checkpoint.model_copy(update={"resume": "never"})
    assert _with_next_start(failure, config.model_copy(update={"checkpoint": checkpoint}), RunOptions()) is failure


@pytest.mark.slow(why="that failed ranks are started again stays")
def test_after_the_last_restart_the_failure_is_the_job_s(temporary: Path) -> None:
    job = ForkedJob("fail_twice", restarts=1)
    assert job.end() == 5
    assert_matches(r"error: rank 1 failed at step 2, update: RuntimeError: the network is gone", job.said())
    assert [path.read_text() for path in temporary.glob("starts-*")] == ["xx", "xx"]


def test_no_restart_begins_when_the_time_is_over(temporary: Path) -> None:
    job = ForkedJob("fail_twice", restarts=2, seconds=0.0)
    assert job.end() == 5
    assert [path.read_text() for path in temporary.glob("starts-*")] == ["x", "x"]


@pytest.mark.parametrize("stopped", [False, True])
def test_ranks_do_not_outlive_a_killed_launcher(stopped: bool, temporary: Path) -> None:
    job = ForkedJob("load")
    ranks = job.wait_for("up")
    if stopped:
        os.kill(ranks[0], signal.SIGSTOP)
    os.kill(job.process, signal.SIGKILL)
    assert job.end() == -signal.SIGKILL
    wait_until(lambda: not any(is_alive(rank) for rank in ranks))
    for left in (temporary / "temporary").iterdir():  # what SIGKILL lets nobody remove
        shutil.rmtree(left)


@pytest.mark.slow(why="waits for a time limit; a hung rank among others stays")
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_are_all_stopped_are_noticed_although_nobody_waits_for_them(ranks: int, temporary: Path) -> None:
    job = ForkedJob("loop", ranks, timeout=5)
    for rank in job.wait_for("up", ranks):
        os.kill(rank, signal.SIGSTOP)
    assert job.end() == 5
    assert_matches(r"error: rank \d hung at step \d+, forward and backward.*: it had not moved for \d", job.said())
    assert "stopped by a signal (SIGSTOP)" in job.said()


def test_stopped_ranks_are_woken_to_save_when_the_job_is_asked_to_end(temporary: Path) -> None:
    job = ForkedJob("loop")
    for rank in job.wait_for("up"):
        os.kill(rank, signal.SIGSTOP)
    os.kill(job.process, signal.SIGTERM)
    assert job.end() == 143
    assert len([*temporary.glob("saved-*")]) == 2


def test_a_job_whose_output_nobody_reads_goes_on_to_its_end(temporary: Path) -> None:
    job = ForkedJob("talk", OUTPUT="/dev/full")
    assert job.end() == 0
    assert [path.read_text() for path in temporary.glob("saved-*")] == ["done", "done"]


def test_a_rank_ends_with_the_agent_that_started_it(tmp_path: Path) -> None:
    def agent() -> None:
        if os.fork() == 0:
            watch_parent(os.getppid(), lambda: None)
            (tmp_path / "rank").write_text(str(os.getpid()))
            time.sleep(100)
        time.sleep(100)

    process = multiprocessing.get_context("fork").Process(target=agent)
    process.start()
    wait_until(lambda: (tmp_path / "rank").exists() and (tmp_path / "rank").read_text() != "")
    process.kill()
    process.join()
    wait_until(lambda: not is_alive(int((tmp_path / "rank").read_text())))


def test_what_no_attempt_can_change_is_not_tried_again_under_torchrun(tmp_path: Path) -> None:
    def agent(attempt: int) -> TorchrunAgent:
        error_file = tmp_path / f"attempt_{attempt}" / "0" / "error.json"
        places = {"TORCHELASTIC_ERROR_FILE": str(error_file), "TORCHELASTIC_RESTART_COUNT": str(attempt)}
        return TorchrunAgent.of({**places, "RANK": "0", "WORLD_SIZE": "2"})

    agent(0).refuse_again()
    agent(0).remember(DistributedFailure("a rank died", key="rank.exited"))
    agent(1).refuse_again()
    agent(1).remember(InputError("no such file", key="data.not-found"))
    with refused("data.not-found", naming=r"not tried again (attempt 3): no such file"):
        agent(2).refuse_again()
    assert not TorchrunAgent.of({}).is_there
    for reason in (StopReason.NONE, StopReason.SIGTERM, StopReason.SIGUSR1):  # the agent's own, and a machine's
        agent(0).remember_stop(reason)
        assert agent(0).stopped() is None
    agent(0).remember_stop(StopReason.MAX_TIME)
    assert agent(1).stopped() == StopReason.MAX_TIME.exit_code != 0


def test_a_job_that_has_used_up_its_time_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[str] = []

    def ends(config: Config, function: str, control: Control) -> int:
        starts.append(os.environ["TORCHELASTIC_RESTART_COUNT"])
        control.stopped_by = StopReason.MAX_TIME
        return control.stopped_by.exit_code

    monkeypatch.setattr(torchrun, "run_rank", ends)
    monkeypatch.setattr(torchrun, "watch_parent", lambda *_: None)
    monkeypatch.setattr(torchrun, "open_liveness", lambda *_: None)
    for attempt in ("0", "1"):
        error_file = tmp_path / "job" / f"attempt_{attempt}" / "0" / "error.json"
        error_file.parent.mkdir(parents=True)
        places = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        places |= {"TORCHELASTIC_RESTART_COUNT": attempt, "TORCHELASTIC_ERROR_FILE": str(error_file)}
        with mock.patch.dict(os.environ, places):
            assert torchrun.run_here(CONFIG, f"{FAKE}:succeed", Control()) == StopReason.MAX_TIME.exit_code
    assert starts == ["0"]


def test_under_a_launcher_the_process_is_one_rank(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    (temporary / "here-0").touch()
    with pytest.raises(InputError, match="there is no such file"):
        run(CONFIG, f"{FAKE}:refuse_everywhere")
    with pytest.raises(IntegrityError, match="a weight is not what it should be"):
        run(CONFIG, f"{FAKE}:corrupt_on_rank_1")
    assert run(CONFIG, f"{FAKE}:bug_on_rank_1") == 1
    said = "error: rank 1 failed at step 3, reading data:\nTraceback (most recent call last):\n"
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_under_a_launcher_a_rank_stops_by_the_same_signals(number: signal.Signals, code: int, temporary: Path) -> None:
    job = ForkedJob("loop", RANK="1", WORLD_SIZE="2")
    job.wait_for("up", 1)
    os.kill(job.process, number)
    assert job.end() == code
    assert (temporary / "saved-1").exists()


def test_options_must_agree_with_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    join_job(RunOptions())
    join_job(RunOptions(nproc=8))
    assert job_size() == (16, 8)
    for options, rank, key in (
        (RunOptions(nproc=2), "1", "launch.nproc-differs"),
        (RunOptions(max_restarts=1), "1", "launch.restarts-in-job"),
        (RunOptions(), "one", "launch.environment"),
    ):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(InputError) as caught:
            join_job(options)
        assert caught.value.key == key


def test_ranks_default_to_the_accelerators_or_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert (local_ranks(None), local_ranks(5)) == (2, 5)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert (local_ranks(None), local_ranks(3)) == (4, 3)
    with pytest.raises(InputError) as caught:
        local_ranks(5)
    assert caught.value.key == "launch.too-few-accelerators"


def test_a_job_on_one_machine_is_reached_from_there_alone() -> None:
    store = open_store()
    listening = f":{store.port:04X}"
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    addresses = [line.split()[1] for table in tables for line in table if line.split()[3] == "0A"]
    assert [address for address in addresses if address.endswith(listening)] == [f"0100007F{listening}"]


def state() -> tuple[object, ...]:
    """What a launch might change in this process while it runs."""
    environment = {name: value for name, value in os.environ.items() if name not in (*JOB, "PYTEST_CURRENT_TEST")}
    handlers = [signal.getsignal(number) for number in HANDLED_SIGNALS]
    return environment, handlers, logging.root.manager.disable


def assert_matches(pattern: str, said: str) -> None:
    assert re.search(pattern, said, re.DOTALL), said
