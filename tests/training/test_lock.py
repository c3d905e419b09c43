"""One run at a time in an output directory: who is refused, who takes over, and that of many one wins."""

import contextlib
import fcntl
import itertools
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from expertmesh.config import InputError
from expertmesh.io.terminal import print_log
from expertmesh.training import lock as lock_module
from expertmesh.training.lock import NAME, STALE_SECONDS, RunLock
from expertmesh.training.startup.data import held_by_another
from tests.cli.jobs import wait_until
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


def write_lock(directory: Path, **changes: object) -> None:
    """A lock of this process, but for `changes`."""
    owner = replace(RunLock(directory).owner, **changes)  # type: ignore[arg-type]
    written = directory / "written"
    written.write_text(json.dumps(asdict(owner)))
    written.replace(directory / NAME)  # who reads meanwhile never sees half of it


def test_a_second_run_is_refused_and_told_who_holds_the_directory(tmp_path: Path) -> None:
    with RunLock(tmp_path / "new"):
        with pytest.raises(InputError) as refusal, RunLock(tmp_path / "new"):
            pass
        said = str(refusal.value)
        assert f"is in use by another run: process {os.getpid()} on {socket.gethostname()}, since 20" in said
        assert "(last sign of life 0 s ago)" in said
        assert f"remove {tmp_path / 'new' / NAME}" in said
    assert list((tmp_path / "new").iterdir()) == []


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


def test_the_lock_of_a_killed_run_is_taken_over_and_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dead = hold_and_die(tmp_path)
    print_log("info")
    with RunLock(tmp_path):
        said = capsys.readouterr().out
        assert f"the run that held it has ended without giving it back (process {dead} on " in said
        assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_restart_by_the_same_launcher_takes_over_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hold_and_die(tmp_path, launch="one")
    with RunLock(tmp_path, launch="one"):
        assert capsys.readouterr().out == ""


def test_a_process_that_only_has_the_number_of_the_holder_is_not_the_holder(tmp_path: Path) -> None:
    write_lock(tmp_path, process_started="12345")
    with RunLock(tmp_path):
        pass


def test_a_stopped_holder_on_this_host_keeps_its_lock_however_old_its_heartbeat(tmp_path: Path) -> None:
    write_lock(tmp_path, heartbeat=time.time() - 100 * STALE_SECONDS)
    with refused("output.in-use", naming="last sign of life 300"), RunLock(tmp_path):
        pass


def test_on_another_host_the_heartbeat_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lock(tmp_path, host="far", space="far", process=1, heartbeat=time.time() - STALE_SECONDS + 60)
    with refused("output.in-use", naming="process 1 on far"), RunLock(tmp_path):
        pass
    monkeypatch.setattr(lock_module, "WATCH_SECONDS", 0.3)
    print_log("info")
    write_lock(tmp_path, host="far", space="far", process=1, heartbeat=time.time() - STALE_SECONDS - 1)
    with RunLock(tmp_path):
        assert "process 1 on far" in capsys.readouterr().out


def test_a_run_on_another_host_whose_clock_is_behind_keeps_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "WATCH_SECONDS", 300.0)
    far = {"host": "far", "space": "far", "process": 1}
    write_lock(tmp_path, **far, heartbeat=time.time() - 10 * STALE_SECONDS)
    done, ages = threading.Event(), itertools.count(9 * int(STALE_SECONDS), -1)

    def beat() -> None:  # whenever the watch begins, there is another one
        while not done.wait(0.1):
            write_lock(tmp_path, **far, heartbeat=time.time() - next(ages))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with refused("output.in-use", naming="process 1 on far"), RunLock(tmp_path):
            pass
    finally:
        done.set()
        thread.join()


def test_a_lock_that_was_never_written_holds_until_it_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "_WRITING_SECONDS", 0.1)
    path = tmp_path / NAME
    path.write_text("")
    with refused("output.in-use", naming="unknown host"), RunLock(tmp_path):
        pass
    os.utime(path, (0, 0))
    with RunLock(tmp_path):
        pass


def test_the_heartbeat_goes_on_and_notices_who_took_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "BEAT_SECONDS", 0.02)
    path = tmp_path / NAME
    with RunLock(tmp_path) as lock:
        first = json.loads(path.read_text())
        wait_until(lambda: json.loads(path.read_text())["heartbeat"] > first["heartbeat"])
        later = json.loads(path.read_text())
        assert {**later, "heartbeat": 0} == {**first, "heartbeat": 0}
        lock.check()

        def is_taken_over() -> bool:
            write_lock(tmp_path, host="far")  # again and again: a heartbeat in between may put the old owner back
            with contextlib.suppress(InputError):
                lock.check()
                return False
            return True

        wait_until(is_taken_over)
        with refused("output.taken-over", naming="on far"):
            lock.check()
    assert json.loads(path.read_text())["host"] == "far"  # not removed: it is not ours


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
