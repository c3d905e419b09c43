"""What a loop hears of its surroundings (signals, the launcher, the clock), and what it leaves behind of itself."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from expertmesh.training import control as control_module
from expertmesh.training.control import Control, Progress, Stopped, StopReason, StopState

LIMIT = 120.0  # only what hangs takes as long


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def foreground() -> Iterator[None]:
    """Whatever a shell starts in the background ignores Ctrl-C, the tests too, and an ignored signal stays ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def forked(function: Callable[[], None]) -> int:
    """Run `function` in a forked process with the default signal handlers; returns its process id."""
    child = os.fork()
    if child == 0:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        try:
            function()
        finally:
            os._exit(0)
    return child


def end_of(child: int) -> int:
    """Exit code, negative for a signal. A child that does not end in time is ended here."""
    deadline = time.monotonic() + LIMIT
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(ended[1])


@pytest.mark.parametrize(
    ("number", "reason", "code", "name"),
    [
        (signal.SIGTERM, StopReason.SIGTERM, 143, "SIGTERM"),
        (signal.SIGINT, StopReason.SIGINT, 130, "Ctrl-C"),
        (signal.SIGUSR1, StopReason.SIGUSR1, 143, "SIGUSR1 (a notice of preemption)"),
    ],
)
@pytest.mark.usefixtures("foreground")
def test_the_first_signal_inside_is_noted(number: int, reason: StopReason, code: int, name: str) -> None:
    control = Control()
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with control.accepting_stop():
        assert not control.stop_requested()
        os.kill(os.getpid(), number)
        wait_until(control.stop_requested)
        assert control.stop_requested() is reason
    assert (reason.exit_code, str(reason), Stopped(reason).exit_code) == (code, name, code)
    assert handlers == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))


@pytest.mark.parametrize("one_request", [True, False], ids=["one request", "two requests"])
def test_signals_are_heard_and_a_second_request_ends_the_process_while_python_cannot_run(
    one_request: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a collective: the main thread is inside native code that no signal wakes."""
    monkeypatch.setattr(control_module, "ONE_REQUEST_SECONDS", 2 * LIMIT if one_request else 0.0)
    progress, heard = Progress(tmp_path / "progress"), tmp_path / "heard"
    heard.touch()

    class Listener(Control):
        def _on_signal(self, number: int) -> None:
            super()._on_signal(number)
            with heard.open("a") as file:
                file.write(".")

    def stuck() -> None:
        native = ctypes.CDLL(None)
        mutex = ctypes.create_string_buffer(64)
        native.pthread_mutex_lock(mutex)
        with Listener(Progress(tmp_path / "progress")).accepting_stop():
            native.pthread_mutex_lock(mutex)

    child = forked(stuck)
    wait_until(lambda: progress.stop_state is StopState.ACCEPTING)
    os.kill(child, signal.SIGTERM)
    wait_until(lambda: heard.read_text() == ".")
    os.kill(child, signal.SIGTERM)
    if one_request:  # that a scheduler and a launcher deliver
        wait_until(lambda: heard.read_text() == "..")
        os.kill(child, signal.SIGKILL)
    assert end_of(child) == (-signal.SIGKILL if one_request else 143)


def test_outside_a_signal_ends_the_process() -> None:
    def outside() -> None:
        with Control().accepting_stop():
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LIMIT)

    assert end_of(forked(outside)) == -signal.SIGTERM


def test_an_ignored_signal_stays_ignored() -> None:
    def ignoring() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        control = Control()
        with control.accepting_stop():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(control.stop_requested)
            os._exit(control.stop_requested())

    assert end_of(forked(ignoring)) == signal.SIGTERM


def test_a_loop_outside_the_main_thread_is_asked_by_the_clock_and_the_launcher() -> None:
    heard: list[StopReason] = []

    def loop() -> None:
        control = Control()
        with control.accepting_stop():
            control.progress.stop = signal.SIGINT
            heard.append(control.stop_requested())

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert heard == [StopReason.SIGINT]


def test_the_clock_asks_when_the_time_is_over() -> None:
    assert not Control(deadline=time.monotonic() + 60).stop_requested()
    reason = Control(deadline=time.monotonic()).stop_requested()
    assert (reason, reason.exit_code, str(reason)) == (StopReason.MAX_TIME, 143, "--max-time")


def test_the_reason_travels_as_a_number() -> None:
    reasons = [StopReason.NONE, StopReason.MAX_TIME, StopReason.SIGTERM, StopReason.SIGINT]
    assert StopReason(int(max(float(reason) for reason in reasons))) is StopReason.SIGTERM


def test_the_launcher_sees_whether_a_rank_listens_and_asks_it_without_a_signal(tmp_path: Path) -> None:
    launcher, control = Progress(tmp_path / "p"), Control(Progress(tmp_path / "p"))
    assert launcher.stop_state is StopState.NOT_ACCEPTING
    with control.accepting_stop():
        assert launcher.stop_state is StopState.ACCEPTING
        launcher.stop = signal.SIGTERM
        assert control.stop_requested() is StopReason.SIGTERM
    assert launcher.stop_state is StopState.NOT_ACCEPTING
    with pytest.raises(Stopped), control.accepting_stop():
        raise Stopped(StopReason.SIGTERM)
    assert launcher.stop_state is StopState.STOPPED


def test_where_a_rank_stood_outlives_sigkill(tmp_path: Path) -> None:
    def work() -> None:
        progress = Progress(tmp_path / "p")
        progress.start()
        progress.at(12, "forward and backward")
        os.kill(os.getpid(), signal.SIGKILL)

    before = time.monotonic()
    child = forked(work)
    assert end_of(child) == -signal.SIGKILL
    status = Progress(tmp_path / "p").status()
    assert (status.process, status.step, status.phase) == (child, 12, "forward and backward")
    assert str(status) == "at step 12, forward and backward"
    assert before <= status.heartbeat <= status.since <= time.monotonic()


def test_a_rank_that_has_not_come_up_or_not_begun_has_a_place_too(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "p")
    assert str(progress.status()) == "before the first step, starting"
    progress.at(0, "é" * 500)
    assert str(progress.status()) == "before the first step, " + "é" * 64
