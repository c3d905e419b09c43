"""How a job of local ranks ends: one message, the right exit code, nothing left behind."""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertmesh.cli import launch as launcher
from expertmesh.cli.launch import STOP_SIGNALS, check_job, launch, local_ranks
from expertmesh.config import (
    Config,
    DataConfig,
    DataSource,
    DistributedFailure,
    InputError,
    IntegrityError,
    ModelConfig,
)

ROOT = Path(__file__).parents[2]
JOB = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
FAKE = "tests.cli.fake_training"
CONFIG = Config(model=ModelConfig(name_or_path="m"), data=DataConfig(train=(DataSource(path="d"),)), output_dir="out")
LAUNCH_HANGING_RANKS = f"""
import sys
from expertmesh.cli.launch import launch
from tests.cli.test_launch import CONFIG
sys.exit(launch(CONFIG, 2, "{FAKE}:hang"))
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Ranks find this package, and every launch must leave the temporary directory as it was."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in (*JOB, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    before = state()
    yield tmp_path
    assert list(tmp_path.iterdir()) == []
    assert state() == before


def test_ranks_form_a_group_and_their_output_passes_through(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(CONFIG, 2, f"{FAKE}:succeed") == 0
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert capfd.readouterr().out == f"out: 2 ranks of {threads} threads\n"


def test_an_error_of_all_ranks_is_reported_once(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"^data\.train\.0\.path: there is no such file$"):
        launch(CONFIG, 2, f"{FAKE}:refuse_everywhere")
    assert capfd.readouterr() == ("", "")


def test_an_error_of_one_rank_ends_the_others_and_names_the_rank(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(IntegrityError, match=r"^rank 1: a weight is not what it should be$"):
        launch(CONFIG, 2, f"{FAKE}:corrupt_on_rank_1")
    assert capfd.readouterr() == ("", "")


def test_a_bug_on_one_rank_is_reported_with_its_traceback() -> None:
    with pytest.raises(DistributedFailure, match=r"(?s)^rank 1 .* ZeroDivisionError: a bug; .* in bug_on_rank_1"):
        launch(CONFIG, 2, f"{FAKE}:bug_on_rank_1")


def test_a_killed_rank_is_blamed_and_not_the_peer_that_lost_it() -> None:
    with pytest.raises(DistributedFailure, match=r"^rank 1 was ended by signal 9 \(SIGKILL\)"):
        launch(CONFIG, 2, f"{FAKE}:die_on_rank_1")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_job_ends_all_ranks_at_once(number: signal.Signals, code: int) -> None:
    job, ranks = start_hanging_job()
    started = time.monotonic()
    job.send_signal(number)
    _, errors = job.communicate(timeout=20)
    assert (job.returncode, errors) == (code, "")
    assert time.monotonic() - started < 10
    assert not any(is_alive(rank) for rank in ranks)


def test_ranks_do_not_outlive_a_killed_launcher(temporary: Path) -> None:
    job, ranks = start_hanging_job()
    job.kill()
    job.wait()
    deadline = time.monotonic() + 20
    while any(is_alive(rank) for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(rank) for rank in ranks)
    subprocess.run(["rm", "-r", *temporary.iterdir()], check=True)  # what SIGKILL lets nobody remove


def test_under_a_launcher_the_process_is_one_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for function, code, said in (
        ("refuse_everywhere", 2, "error: rank 1: data.train.0.path: there is no such file\n"),
        ("corrupt_on_rank_1", 3, "error: rank 1: a weight is not what it should be\n"),
    ):
        monkeypatch.setattr(launcher, "TRAIN", f"{FAKE}:{function}")
        assert launcher.run(CONFIG, None) == code
        assert capsys.readouterr().err == said


def test_nproc_must_agree_with_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    check_job(None)
    check_job(8)
    with pytest.raises(InputError, match="--nproc is 2, but the launcher that set RANK started 8 ranks"):
        check_job(2)
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(InputError, match="environment variable RANK is 'one', not a number"):
        check_job(None)


def test_ranks_default_to_the_accelerators_or_two(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert (local_ranks(None), local_ranks(5)) == (2, 5)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert (local_ranks(None), local_ranks(3)) == (4, 3)
    with pytest.raises(InputError, match="--nproc is 5, but this machine has 4 accelerators"):
        local_ranks(5)


def start_hanging_job() -> tuple["subprocess.Popen[str]", list[int]]:
    """A launcher process whose two ranks are up, and the ranks' process ids."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    job = subprocess.Popen(
        [sys.executable, "-c", LAUNCH_HANGING_RANKS],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    return job, [int(job.stdout.readline().split()[1]) for _ in range(2)]


def state() -> tuple[object, ...]:
    """What a launch changes in this process while it runs."""
    environment = {name: value for name, value in os.environ.items() if name not in (*JOB, "PYTEST_CURRENT_TEST")}
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    return environment, handlers, logging.root.manager.disable


def is_alive(process: int) -> bool:
    """Whether a process still runs; one that has ended may stay listed until its parent asks about it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
