"""Faults of the machine that need no training: full disks, quotas, power losses, removed files, signals."""

import errno
import multiprocessing
import os
import resource
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import expertmesh.cli.main as command_line
from expertmesh.cli.main import entry_point
from expertmesh.config import load_config
from expertmesh.config.errors import InputError
from expertmesh.config.files import dump_config
from expertmesh.data.encoding.sandbox import Sandbox
from expertmesh.experts.placement import write_pairs
from expertmesh.io.directory import io_errors, write_synced
from expertmesh.training.lock import NAME, RunLock, holder
from expertmesh.training.reporting import reporter
from expertmesh.training.reporting.reporter import keep_rows
from expertmesh.training.startup.output_dir import refuse_output_dir
from tests.cli.jobs import is_alive, wait_until
from tests.config.minimal import write
from tests.support.errors import refused


@pytest.mark.parametrize(
    ("number", "key", "why"),
    [
        (errno.ENOSPC, "output.no-space", "the disk is full: it has "),
        (errno.EDQUOT, "output.no-space", "the quota of this user or project is used up"),
        (errno.EFBIG, "output.no-space", "ulimit -f"),
        (errno.EIO, "output.unwritable", "Input/output error"),
        (errno.EROFS, "output.unwritable", "Read-only file system"),
    ],
)
def test_a_disk_that_takes_no_more_is_said_with_needed_and_free_bytes(
    number: int, key: str, why: str, tmp_path: Path
) -> None:
    with refused(key, naming=why), io_errors(tmp_path / "run", 1_234_567):
        raise OSError(number, os.strerror(number))
    with pytest.raises(InputError) as error, io_errors(tmp_path / "run", 1_234_567):
        raise OSError(number, os.strerror(number))
    assert "1,234,567" in str(error.value)


def test_a_limit_of_file_size_ends_in_a_sentence_and_not_in_a_signal(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with refused("output.no-space", naming="100,000 are needed"), io_errors(tmp_path / "x", 100_000):
            write_synced(tmp_path / "x", b"x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("tail", [b"\0" * 4096, b'{"step": 4, "lo' + b"\0" * 4096, b'{"step": 4, "lo'])
def test_what_a_power_loss_leaves_behind_metrics_is_cut_back_and_said(
    tail: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    monkeypatch.setattr(reporter.log, "info", said.append)
    path, sound = tmp_path / "metrics.jsonl", b'{"step": 2}\n{"step": 3}\n'
    path.write_bytes(sound + tail)
    keep_rows(path, 3)
    assert path.read_bytes() == sound
    assert "cut back to its last whole row" in said.pop()
    keep_rows(path, 2)
    assert path.read_bytes() == sound[:12]
    assert said == []


@pytest.mark.parametrize("line", [b'{"step": 1e999}', b"[" * 100_000, b"null"])
def test_a_line_that_is_no_row_of_metrics_is_refused_by_its_number(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "elapsed_seconds": 1e999}\n' + line + b"\n")
    with refused("run.damaged-metrics", naming="metrics.jsonl:2"):
        keep_rows(tmp_path / "metrics.jsonl", 3)


def test_a_run_whose_config_was_removed_is_known_by_its_checkpoints(tmp_path: Path) -> None:
    config = load_config(write(tmp_path), [f"output_dir={tmp_path / 'run'}"])
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    with refused("output.not-empty"):
        refuse_output_dir(config)
    (checkpoint / "config.yaml").write_text(dump_config(config))
    refuse_output_dir(config)
    other = load_config(write(tmp_path), [f"output_dir={tmp_path / 'run'}", "train.seed=9"])
    with refused("run.other-configuration", naming="train.seed"):
        refuse_output_dir(other)


def test_a_start_that_ended_after_its_calibration_may_start_again(tmp_path: Path) -> None:
    config = load_config(write(tmp_path), [f"output_dir={tmp_path / 'run'}"])
    (tmp_path / "run" / "prepared").mkdir(parents=True)
    write_pairs(tmp_path / "run", {"model.layers.0.mlp.experts": torch.eye(4, dtype=torch.int64)})
    refuse_output_dir(config)


@pytest.mark.slow_cases(r"(?!b''$).*", why="an empty one stays")
@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 4096, b"[" * 60_000, b'{"token": "../../x"}', b'{"token": 1e999}', b'"x"'],
    ids=lambda content: repr(content[:20]),
)
def test_a_lock_file_with_anything_in_it_keeps_nobody_out(content: bytes, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(content)
    found = holder(tmp_path)
    assert found is None or not found.lives
    with RunLock(tmp_path):
        (tmp_path / NAME).write_bytes(content)
        with refused("output.in-use", naming="an unknown host"), RunLock(tmp_path):
            pass


def test_nothing_that_renders_templates_outlives_its_rank(tmp_path: Path) -> None:
    def rank() -> None:
        sandbox = Sandbox(lambda seconds: time.sleep(seconds))
        (tmp_path / "child").write_text(str(sandbox._pid))
        sandbox.map([100])

    process = multiprocessing.get_context("fork").Process(target=rank)
    process.start()
    wait_until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text() != "")
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    wait_until(lambda: not is_alive(int((tmp_path / "child").read_text())))


def test_ctrl_c_twice_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(arguments: object) -> int:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(command_line, "main", twice)
    monkeypatch.setattr(command_line, "prepare_output", lambda: None)
    monkeypatch.setattr(command_line.gc, "freeze", lambda: None)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["expertmesh", "schema"])
    try:
        with pytest.raises(SystemExit) as ended:
            entry_point()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130
