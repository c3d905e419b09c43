"""Which of the ranks that did not give up is the one the others waited for."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from expertmesh.config.errors import DistributedFailure
from expertmesh.distributed.environment import Rank
from expertmesh.launcher import hangs
from expertmesh.launcher import launch as launcher
from expertmesh.launcher.hangs import Answer, Liveness, RankSnapshot, hang_error, judge, read_stack, timed_out
from expertmesh.launcher.launch import Attempt, LocalRank, StopRequests
from expertmesh.launcher.rank_files import RankFailure, progress_file
from expertmesh.training.control import Progress, RankStatus, StopState
from expertmesh.training.startup.output_dir import refuse_output_dir
from tests.cli.jobs import CONFIG

NOW = 1000.0
IN_A_COLLECTIVE = ('  File "/x/torch/distributed/distributed_c10d.py", line 1 in all_reduce',)
ELSEWHERE = ('  File "/x/reader.py", line 2 in read', '  File "/x/train.py", line 3 in train')
TIMED_OUT = "RuntimeError: [gloo/unbound_buffer.cc:78] Timed out waiting 15000ms for recv operation to complete"
TIMEOUT = RankFailure(0, 1, TIMED_OUT, "Traceback", 0)


def status(step: int, phase: str, ago: float, silent: float = 0.0) -> RankStatus:
    return RankStatus(1, 1, NOW - ago, step, phase, NOW - silent, StopState.ACCEPTING)


def snapshot(
    rank: int,
    where: RankStatus,
    stack: tuple[str, ...] = ELSEWHERE,
    *,
    still_running: bool = True,
    stopped: bool = False,
) -> RankSnapshot:
    return RankSnapshot(rank, where, NOW, stopped, stack, still_running)


HERE = status(7, "forward and backward", 15)
BEHIND = status(7, "reading data", 15.1)


@pytest.mark.parametrize(
    ("snapshots", "blamed"),
    [
        ([snapshot(1, BEHIND)], 1),
        ([snapshot(1, HERE, IN_A_COLLECTIVE), snapshot(2, HERE), snapshot(3, HERE, IN_A_COLLECTIVE)], 2),
        (
            [snapshot(1, BEHIND, IN_A_COLLECTIVE), snapshot(2, HERE, IN_A_COLLECTIVE)],
            1,
        ),  # none is clear: the furthest behind
        ([snapshot(1, HERE), snapshot(2, HERE, (), stopped=True)], 2),
        ([snapshot(1, BEHIND), snapshot(2, HERE, stopped=True, still_running=False)], 2),  # looking at it woke it up
        ([snapshot(1, BEHIND), snapshot(2, status(7, "update", 1, silent=9))], 2),
        (
            [snapshot(1, HERE, IN_A_COLLECTIVE, still_running=False), snapshot(2, BEHIND, still_running=False)],
            2,
        ),  # slow, not dead
        ([snapshot(1, HERE, still_running=False), snapshot(2, HERE, IN_A_COLLECTIVE, still_running=False)], None),
        ([snapshot(1, status(8, "reading data", 15), still_running=False)], None),  # further than who timed out
        ([snapshot(1, status(7, "update", 0.1), still_running=False)], None),  # has moved
        ([], None),
    ],
)
def test_the_rank_that_the_others_waited_for_is_blamed(snapshots: list[RankSnapshot], blamed: int | None) -> None:
    found = hang_error(snapshots, TIMEOUT, HERE)
    assert (found and str(found).split()[:3]) == (["rank", f"{blamed}", "hung"] if blamed else None)


def test_when_a_rank_aborted_only_one_that_clearly_does_not_wait_is_blamed() -> None:
    """NCCL's watchdog ends its process; an abort may also be just that."""
    waiting = snapshot(1, BEHIND, IN_A_COLLECTIVE)
    assert hang_error([waiting], None, None) is None
    assert str(hang_error([waiting, snapshot(2, HERE)], None, None)).startswith(
        "rank 2 hung at step 7, forward and backward: it"
    )


@pytest.mark.parametrize("file", ["distributed/all_ranks.py", "training/exchange.py"])
def test_who_waits_for_the_device_in_a_collective_of_ours_waits(file: str) -> None:
    stack = (
        f'  File "/venv/expertmesh/{file}", line 1 in f',
        '  File "/venv/expertmesh/training/loop.py", line 2 in g',
    )
    assert not snapshot(1, BEHIND, stack).outside_collectives


def test_all_is_said_in_one_message() -> None:
    snapshots = [snapshot(1, BEHIND, stopped=True), snapshot(2, HERE, (), stopped=True)]
    assert str(hang_error(snapshots, TIMEOUT, HERE)).splitlines() == [
        "rank 1 hung at step 7, reading data (and so did rank 2): it had not moved for 15 s; it was stopped by a "
        "signal (SIGSTOP); where it was, innermost call first:",
        *ELSEWHERE,
        f"rank 0 gave up waiting at step 7, forward and backward: {TIMED_OUT}",
    ]


@pytest.mark.parametrize(
    ("message", "waited"),
    [
        (TIMED_OUT, True),
        ("RuntimeError: Application timeout caused pair closure", True),
        ("DistBackendError: NCCL: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)", True),
        ("DistStoreError: wait timeout after 2000ms, keys: /default_pg/0", True),
        ("RuntimeError: Connection closed by peer [127.0.0.1]:1", False),
        ("ReadTimeout: HTTPSConnectionPool: Read timed out. (read timeout=10)", False),
    ],
)
def test_a_collective_that_timed_out_is_told_from_other_errors(message: str, waited: bool) -> None:
    assert timed_out(RankFailure(0, 1, message, "Traceback", 0)) is waited


STACKS = """\
Thread 0x00007f0000000002 (most recent call first):
  File "/x/heartbeat.py", line 1 in beat

Current thread 0x00007f0000000001 [main] (most recent call first):
  File "/x/reader.py", line 2 in read
  File "/x/src/expertmesh/launcher/worker.py", line 42 in run_rank
  File "<frozen runpy>", line 88 in _run_code
"""
BOTTOM = '  File "<frozen runpy>", line 198 in _run_module_as_main\n'


def test_the_main_thread_s_stack_is_read_when_all_of_it_is_there(tmp_path: Path) -> None:
    file = tmp_path / "stack"
    assert read_stack(file, 0x7F0000000001, seconds=0) == ()
    file.write_text(STACKS)
    assert read_stack(file, 0x7F0000000001, seconds=0) == ()

    def write_the_rest() -> None:
        time.sleep(0.1)
        file.write_text(STACKS + BOTTOM)

    thread = threading.Thread(target=write_the_rest)
    thread.start()
    assert read_stack(file, 0x7F0000000001, seconds=5) == ('  File "/x/reader.py", line 2 in read',)
    thread.join()


def test_of_a_deep_stack_both_ends_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "stack"
    calls = "".join(f'  File "/x/deep.py", line {line} in deep\n' for line in range(50))
    file.write_text(f"Thread 0x0000000000000001 (most recent call first):\n{calls}{BOTTOM}")
    lines = [int(line.split()[3]) if "line" in line else None for line in read_stack(file, 1, seconds=0)]
    assert lines == [*range(8), None, *range(44, 50)]


def test_a_stack_that_is_too_deep_for_faulthandler_is_complete_too(tmp_path: Path) -> None:
    file = tmp_path / "stack"
    calls = "".join(f'  File "/x/deep.py", line {line} in deep\n' for line in range(100))
    file.write_text(f"Thread 0x0000000000000001 (most recent call first):\n{calls}  ...\n")
    assert len(read_stack(file, 1, seconds=0)) == 15


def test_by_their_answers_ranks_find_out_who_was_waited_for(tmp_path: Path) -> None:
    """What `judge` says of answers; real ranks are in test_two_nodes.py."""
    caller, stacks = Rank("", 0, 4, None, 2), tmp_path / "stacks.txt"
    waits = Answer("a", 7, "forward and backward", 15, IN_A_COLLECTIVE, failed=True)
    reads = Answer("b", 7, "reading data", 15.1, ELSEWHERE, failed=False)
    hung = judge({0: waits, 1: waits, 2: reads, 3: waits}, caller, HERE, TIMED_OUT, stacks)
    assert hung.key == "rank.hung"
    assert str(hung).startswith("rank 2 hung at step 7, reading data: it had not moved for 15 s; its process was")
    assert str(hung).endswith(f"stacks of all ranks: {stacks}")
    assert "rank 2 on b at step 7, reading data, for 15 s:\n" + "\n".join(ELSEWHERE) in stacks.read_text()
    refuse_output_dir(CONFIG.model_copy(update={"output_dir": str(tmp_path)}))  # the next start is not held up by it
    lost = judge({0: waits, 1: waits}, caller, HERE, TIMED_OUT, stacks)
    assert lost.key == "rank.lost"
    assert str(lost).startswith("rank 2, 3 (node 1 of 2) did not answer within 5 s when the others had waited in vain")
    nobody = judge(dict.fromkeys(range(4), waits), caller, HERE, TIMED_OUT, stacks)
    assert str(nobody).startswith("all ranks waited in vain; rank 0 was the first to give up at step 7, forward and")


def test_a_rank_that_lost_a_peer_ends_by_the_verdict_of_the_one_that_timed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo closes the connections of a rank whose collective timed out, and others may see that first."""
    monkeypatch.setattr(hangs, "ANSWER_SECONDS", 1.0)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lost, late = RuntimeError("Connection closed by peer [10.0.0.1]"), RuntimeError("Timed out waiting 5ms")
    ranks = [
        Liveness(Rank("torchrun", rank, 2, rank, 2, "127.0.0.1", store.port), Progress(), "1", tmp_path / "s", print)
        for rank in range(2)
    ]
    assert ranks[1].verdict_on(lost) is None  # nobody timed out: its own error is told
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ranks[1].verdict_on, lost)
        verdict, other = ranks[0].verdict_on(late), waiting.result()
    assert verdict is not None
    assert "rank 0, 1 did not answer within 1 s" in str(verdict)  # their threads were not started
    assert (str(other), other and other.key) == (str(verdict), verdict.key)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["timed out first", "lost its peer first"])
def test_the_launcher_names_the_hung_rank_in_whatever_order_its_peers_fail(
    order: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(launcher, "STACK_SECONDS", 0.5)
    said = {
        0: "RuntimeError: [gloo] Timed out waiting 5000ms for recv operation to complete",
        1: "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:1234",
    }
    ranks = []
    for number in range(3):
        # The rank that hangs does not end by the request for its stack.
        hangs = "import signal, time; signal.signal(signal.SIGUSR2, signal.SIG_IGN); print(flush=True); time.sleep(60)"
        code = hangs if number == 2 else "raise SystemExit(1)"
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
        progress = Progress(progress_file(tmp_path, number))
        progress.start()
        progress.at(7, "forward and backward")
        ranks.append(LocalRank(number, process, progress))
    assert ranks[2].process.stdout is not None
    ranks[2].process.stdout.readline()
    os.kill(ranks[2].process.pid, signal.SIGSTOP)
    for place, number in enumerate(order):
        RankFailure(number, 1, said[number], "Traceback", time.time_ns() + place).write(tmp_path)
    with pytest.raises(DistributedFailure, match="rank 2 hung at step 7") as found:
        Attempt(ranks, tmp_path, StopRequests(), 5.0).supervise()
    assert found.value.key == "rank.hung"
