"""Ranks that start again are processes which have stood by for it, and none of those is left behind."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from expertmesh.launcher.rank_files import progress_file
from expertmesh.training.progress import Progress
from tests.cli.jobs import ROOT, ForkedJob, children, is_alive, own_temporary, standing_by, wait_until
from tests.training.tiny_run import run_config, write_inputs


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with own_temporary(tmp_path, monkeypatch):
        yield tmp_path


def kill(processes: Iterable[int]) -> None:
    for process in processes:
        os.kill(process, signal.SIGKILL)


def test_ranks_start_again_in_the_processes_that_stood_by_and_others_then_stand_by() -> None:
    job = ForkedJob("loop", restarts=2)
    ranks = job.wait_for("up")
    for restart in (1, 2):
        standbys = standing_by(job.process, ranks)
        kill(ranks)
        ranks = job.wait_for("up", 2 * restart + 2)[-2:]
        assert set(ranks) == standbys
    os.kill(job.process, signal.SIGTERM)
    assert job.end() == 143


def test_a_rank_whose_standby_is_gone_starts_in_a_new_process() -> None:
    job = ForkedJob("loop", restarts=1)
    ranks = job.wait_for("up")
    first, second = sorted(standing_by(job.process, ranks))
    kill([first])
    wait_until(lambda: not is_alive(first))
    kill(ranks)
    ranks = job.wait_for("up", 4)[-2:]
    assert second in ranks
    assert sorted(children(job.process).values()) == [False, True]
    os.kill(job.process, signal.SIGTERM)
    assert job.end() == 143


@pytest.mark.parametrize(("restarts", "killed"), [(0, False), (1, True)])
def test_nothing_stands_by_for_a_restart_that_cannot_be(restarts: int, killed: bool, scratch: Path) -> None:
    job = ForkedJob("loop", restarts=restarts)
    ranks = job.wait_for("up")
    if killed:
        standing_by(job.process, ranks)
        kill(ranks)
        ranks = job.wait_for("up", 4)[-2:]
    (attempt,) = (scratch / "temporary").glob(f"expertmesh-*/attempt-{restarts + 1}")
    for rank in range(2):
        progress = Progress(progress_file(attempt, rank))
        wait_until(lambda progress=progress: progress.status().step > 50)  # type: ignore[misc]
    assert set(children(job.process)) == set(ranks)
    os.kill(job.process, signal.SIGTERM)
    assert job.end() == 143


def test_standbys_end_as_soon_as_the_job_is_asked_to_stop() -> None:
    job = ForkedJob("loop", restarts=1, one_request=0, SAVE_SECONDS="300")
    ranks = job.wait_for("up")
    standing_by(job.process, ranks)
    os.kill(job.process, signal.SIGTERM)
    job.wait_for("saving")
    standing_by(job.process, ranks, 0)
    os.kill(job.process, signal.SIGTERM)
    assert job.end() == 143


def test_standbys_do_not_outlive_a_killed_launcher(scratch: Path) -> None:
    job = ForkedJob("loop", restarts=1)
    ranks = job.wait_for("up")
    standbys = standing_by(job.process, ranks)
    os.kill(min(standbys), signal.SIGSTOP)
    os.kill(job.process, signal.SIGKILL)
    assert job.end() == -signal.SIGKILL
    wait_until(lambda: not any(is_alive(process) for process in (*standbys, *ranks)))
    for left in (scratch / "temporary").iterdir():  # what SIGKILL lets nobody remove
        shutil.rmtree(left)


def test_a_run_that_goes_on_in_standbys_ends_with_the_weights_of_one_without_a_failure(scratch: Path) -> None:
    write_inputs(scratch)
    run_config(scratch, scratch / "run")
    arguments = ["parallel.ep=2", "train.max_steps=20", "train.num_epochs=20", "checkpoint.every_steps=5"]
    command = [sys.executable, "-m", "expertmesh", "train", str(scratch / "run.yaml"), *arguments, "--nproc", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, f"output_dir={scratch / 'whole'}"], env=environment, check=True, timeout=600)
    job = subprocess.Popen([*command, "--max-restarts", "1"], env=environment, stderr=subprocess.PIPE, text=True)
    standing_by(job.pid, [], 1)
    ranks = [process for process, began_so in children(job.pid).items() if not began_so]
    for rank in ranks:  # the run must not end before both stand by
        os.kill(rank, signal.SIGSTOP)
    standbys = standing_by(job.pid, [])
    kill(ranks)
    wait_until(lambda: set(children(job.pid)) == standbys)
    _, said = job.communicate(timeout=600)
    assert job.returncode == 0
    assert "all ranks are started again (restart 1 of 1)" in said
    whole, restarted = (scratch / name / "model" / "model.safetensors" for name in ("whole", "run"))
    assert whole.read_bytes() == restarted.read_bytes()
