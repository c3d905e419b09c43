"""One run at a time in an output directory: who is refused, who goes on after a run that died, and of many one wins."""

import contextlib
import errno
import fcntl
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from expertmesh.config import InputError
from expertmesh.io.terminal import print_log
from expertmesh.training import lock as lock_module
from expertmesh.training.lock import NAME, RunLock, holder
from expertmesh.training.startup.data import held_by_another
from tests.support.errors import refused

CONTENDERS, ROUNDS = 6, 12


def in_another_process(function: Callable[[], None]) -> int:
    """Fork, run `function`, and return the process id; `os.waitpid` it."""
    child = os.fork()
    if child == 0:
        try:
            function()
        finally:
            os._exit(0)
    return child


def hold_and_die(directory: Path, launch: str | None = None) -> int:
    """Leave the lock of a process that ended by SIGKILL; returns its id."""

    def die() -> None:
        with RunLock(directory, launch):
            os.kill(os.getpid(), signal.SIGKILL)

    child = in_another_process(die)
    os.waitpid(child, 0)
    return child


def test_a_second_run_is_refused_and_told_who_holds_the_directory(tmp_path: Path) -> None:
    with RunLock(tmp_path / "new"):
        with pytest.raises(InputError) as refusal, RunLock(tmp_path / "new"):
            pass
        said = str(refusal.value)
        assert f"is in use by another run: process {os.getpid()} on {socket.gethostname()}, since 20" in said
        found = holder(tmp_path / "new")
        assert found is not None
        assert found.lives
    assert list((tmp_path / "new").iterdir()) == []
    assert holder(tmp_path / "new") is None


def test_a_job_that_waits_for_tokens_learns_their_maker_from_the_lock(tmp_path: Path) -> None:
    """Whatever the sentence of the refusal says: this path has words of it."""
    preparation = SimpleNamespace(directory=tmp_path / "in use by another run: nobody (last sign", key="k")
    with RunLock(preparation.directory, name=".making-k.json") as lock, contextlib.ExitStack() as stack:
        assert held_by_another(stack, preparation) == str(lock.owner)  # type: ignore[arg-type]
    with contextlib.ExitStack() as stack:
        assert held_by_another(stack, preparation) == ""  # type: ignore[arg-type]
        assert (preparation.directory / ".making-k.json").exists()


def test_the_lock_is_given_back_when_the_run_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), RunLock(tmp_path):
        raise ZeroDivisionError
    with RunLock(tmp_path):
        pass


def test_a_killed_runs_lock_is_free_at_once_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dead = hold_and_die(tmp_path)
    found = holder(tmp_path)
    assert found is not None
    assert not found.lives
    print_log("info")
    with RunLock(tmp_path):
        said = capsys.readouterr().out
        assert f"the run that held it has ended without giving it back (process {dead} on " in said
        assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_restart_by_the_same_launcher_goes_on_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hold_and_die(tmp_path, launch="one")
    with RunLock(tmp_path, launch="one"):
        assert capsys.readouterr().out == ""


def test_a_restart_waits_for_the_attempt_before_it(tmp_path: Path) -> None:
    def hold() -> None:
        with RunLock(tmp_path, launch="one"):
            (tmp_path / "held").touch()
            time.sleep(1.5)

    child = in_another_process(hold)
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    with refused("output.in-use", naming=f"process {child}"), RunLock(tmp_path, launch="two"):
        pass
    with RunLock(tmp_path, launch="one"):
        pass
    os.waitpid(child, 0)


def test_a_stopped_holder_keeps_its_lock(tmp_path: Path) -> None:
    def hold() -> None:
        with RunLock(tmp_path):
            os.kill(os.getpid(), signal.SIGSTOP)

    child = in_another_process(hold)
    os.waitpid(child, os.WUNTRACED)
    with refused("output.in-use", naming=f"process {child}"), RunLock(tmp_path):
        pass
    os.kill(child, signal.SIGCONT)
    os.waitpid(child, 0)


def test_a_child_that_outlives_its_killed_run_does_not_keep_the_lock(tmp_path: Path) -> None:
    grandchild = tmp_path / "grandchild"

    def hold() -> None:
        with RunLock(tmp_path / "run"):
            grandchild.write_text(str(in_another_process(lambda: time.sleep(60))))
            os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(in_another_process(hold), 0)
    try:
        with RunLock(tmp_path / "run"):
            pass
    finally:
        os.kill(int(grandchild.read_text()), signal.SIGKILL)


def test_a_reader_in_the_way_for_a_moment_refuses_no_run(tmp_path: Path) -> None:
    hold_and_die(tmp_path)

    def read() -> None:
        with (tmp_path / NAME).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            (tmp_path / "reading").touch()
            time.sleep(lock_module.READER_SECONDS / 3)

    child = in_another_process(read)
    while not (tmp_path / "reading").exists():
        time.sleep(0.001)
    with RunLock(tmp_path):
        pass
    os.waitpid(child, 0)


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", none)
    print_log("info")
    with RunLock(tmp_path):
        assert "this file system has no locks" in "".join(capsys.readouterr())
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_locked_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused("output.unwritable", naming="Not a directory"), RunLock(tmp_path / "file" / "run"):
        pass


def contend(directory: Path, seed: int) -> None:
    """Take the lock again and again; inside, ask a referee (flock) whether we are alone, and die there at times."""
    rng = random.Random(seed)
    log = os.open(directory / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    referee = os.open(directory / "referee", os.O_RDWR | os.O_CREAT)
    while True:
        try:
            with RunLock(directory / "run", launch="x"):
                try:
                    fcntl.flock(referee, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.write(log, b"not alone\n")
                os.write(log, b"held\n")
                time.sleep(rng.random() * 0.003)
                if rng.random() < 0.4:
                    os.kill(os.getpid(), signal.SIGKILL)
                fcntl.flock(referee, fcntl.LOCK_UN)
        except InputError:
            time.sleep(rng.random() * 0.003)


@pytest.mark.slow(why="hundreds of processes")
def test_of_many_who_start_together_and_die_at_random_one_holds_the_lock(tmp_path: Path) -> None:
    deaths = 0
    children = {in_another_process(lambda n=n: contend(tmp_path, n)): n for n in range(CONTENDERS)}  # type: ignore[misc]
    try:
        while deaths < CONTENDERS * ROUNDS:
            ended, _ = os.wait()
            if ended not in children:
                continue
            deaths += 1
            seed = children.pop(ended) + CONTENDERS
            children[in_another_process(lambda n=seed: contend(tmp_path, n))] = seed  # type: ignore[misc]
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines.count("held") > deaths
    assert "not alone" not in lines
    with RunLock(tmp_path / "run", launch="x"):
        assert [path.name for path in (tmp_path / "run").iterdir()] == [NAME]
