"""Launchers in processes of their own, to be signalled and killed by tests, and the search for what they leave behind.

They are forked from a server that has imported torch and has done nothing else: forking from a test process whose
stores and groups have threads crashes at times.
"""

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

from expertmesh.config import Config, DataConfig, DataSource, DistributedConfig, ExpertmeshError, ModelConfig
from expertmesh.launcher import launch as launcher
from expertmesh.launcher.launch import HANDLED_SIGNALS, RunOptions

ROOT = Path(__file__).parents[2]
FAKE = "tests.cli.fake_training"
CONFIG = Config(model=ModelConfig(name_or_path="m"), data=DataConfig(train=(DataSource(path="d"),)), output_dir="out")
LIMIT = 120.0  # only what hangs takes as long
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch.distributed", "tests.cli.jobs"])


def start_server() -> None:
    """Before a test changes where temporary files go: the server keeps one as long as it lives."""
    forkserver.ensure_running()


@contextlib.contextmanager
def own_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks find this package. Every launch within must leave the temporary directory as it was, and no process."""
    start_server()
    monkeypatch.chdir(ROOT)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    yield
    assert list(temporary.iterdir()) == []
    wait_until(lambda: left_behind(tmp_path) == [])


class ForkedJob:
    """`expertmesh train` without its command line: the function `train` of fake_training.py on `ranks` local ranks.

    With RANK in `environment` it is one rank of somebody else's job instead. Signals within `one_request` seconds are
    one request, both for the launcher and for its ranks: by default all, 0 for none.
    """

    def __init__(
        self,
        train: str,
        ranks: int = 2,
        *,
        seconds: float | None = None,
        restarts: int = 0,
        timeout: int = 600,
        one_request: float = 600,
        **environment: str,
    ) -> None:
        self.output = Path(os.environ["SCRATCH"], "output")
        environment = {name: os.environ[name] for name in ("SCRATCH", "TMPDIR")} | environment
        environment["ONE_REQUEST_SECONDS"] = str(one_request)
        options = RunOptions(max_seconds=seconds, max_restarts=restarts)
        self._process = _SERVER.Process(target=_launch, args=(self.output, train, ranks, options, timeout, environment))
        self._process.start()
        assert self._process.pid is not None
        self.process = self._process.pid

    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def wait_for(self, word: str, times: int = 2) -> list[int]:
        """Wait until `word NUMBER` has been said so often; returns the numbers."""
        deadline = time.monotonic() + LIMIT
        while len(found := [line.split() for line in self.said().splitlines() if line.startswith(f"{word} ")]) < times:
            assert time.monotonic() < deadline, f"still not {word}: {self.said()}"
            assert self._process.is_alive(), f"ended with {self.end()} before it said {word}: {self.said()}"
            time.sleep(0.01)
        return [int(number) for _, number in found]

    def end(self) -> int:
        """Wait for the end; returns the exit code, negative for a signal."""
        self._process.join(LIMIT)
        if (code := self._process.exitcode) is None:
            self._process.kill()
            raise AssertionError(f"still runs after {LIMIT} s; it said: {self.said()}")
        return code


def _launch(
    output: Path, train: str, ranks: int, options: RunOptions, timeout: int, environment: dict[str, str]
) -> None:
    os.setpgid(0, 0)  # as a shell does, so that a test can press Ctrl-C
    for number in HANDLED_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    descriptor = os.open(environment.get("OUTPUT", output), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.update(environment)
    tempfile.tempdir = environment["TMPDIR"]  # the server has asked for it already, and remembers
    os.chdir(ROOT)
    launcher.ONE_REQUEST_SECONDS = float(environment["ONE_REQUEST_SECONDS"])
    code = 1
    config = CONFIG.model_copy(update={"distributed": DistributedConfig(timeout_seconds=timeout)})
    try:
        if "RANK" in os.environ:
            code = launcher.run(config, f"{FAKE}:{train}", options)
        else:
            deadline = None if options.max_seconds is None else time.monotonic() + options.max_seconds
            code = launcher.launch(config, ranks, f"{FAKE}:{train}", options, deadline)
    except ExpertmeshError as error:
        print(f"error: {error}")
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def free_port() -> int:
    """A port that nobody listens on, below those that the system gives to whoever asks for any."""
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.SystemRandom().sample(range(10_000, max(ephemeral, 12_000)), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            return port
    raise AssertionError("no port is free")


def left_behind(scratch: Path) -> list[str]:
    """What launches have started and is still there: ranks, processes of ranks, the dead that nobody waited for."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            of_a_job = f"SCRATCH={scratch}".encode() in (process / "environ").read_bytes().split(b"\0")
            state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
            if of_a_job or (state == "Z" and int(parent) == os.getpid()):
                found.append(f"{process.name}: {(process / 'cmdline').read_text()}")
    return found


def is_alive(process: int) -> bool:
    """Whether a process still runs; one that has ended may stay listed until its parent asks about it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
