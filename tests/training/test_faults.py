"""Faults that are no kills: bad data on one rank, a full disk, damage. Said alike on all ranks; nothing is lost."""

import contextlib
import errno
import itertools
import os
import pickle
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from expertmesh.checkpoint.directory import published
from expertmesh.checkpoint.small_files import state_bytes
from expertmesh.checkpoint.write import WRITING, CheckpointWriter
from expertmesh.config import Config
from expertmesh.config.errors import ExpertmeshError, InputError
from expertmesh.data.loader import TrainingBatches
from expertmesh.training.reporting.reporter import MetricsFile
from expertmesh.training.run import train
from tests.checkpoint.damage import Canary, flip_a_bit, replace_file
from tests.support.ranks import RankFailed, run_ranks, shared_ranks
from tests.training.tiny_run import metrics, rows_without_times, run_config, weights, write_inputs

# One epoch and a half of four steps, a checkpoint after every second.
RUN = ["train.max_steps=6", "train.num_epochs=2", "parallel.ep=2", "checkpoint.every_steps=2", "checkpoint.keep_last=3"]
SYNCHRONOUS = "checkpoint.asynchronous=false"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def whole(inputs: Path) -> Path:
    """The output of the run that nothing happened to."""
    shared_ranks(train, 2, run_config(inputs, inputs / "whole", *RUN))
    return inputs / "whole"


def _assert_equal(output: Path, whole: Path) -> None:
    expected, got = weights(whole), weights(output)
    assert expected.keys() == got.keys()
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())
    assert rows_without_times(output) == rows_without_times(whole)


def _names(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir())


def _break_the_data_of_rank_1(config: Config) -> None:
    original = TrainingBatches.epoch

    def epoch(batches: TrainingBatches, number: int, start: int = 0) -> Iterator[Any]:
        for place, step in enumerate(original(batches, number, start), start):
            if dist.get_rank() == 1 and place == 3:
                raise OSError(errno.EIO, "the data went away")
            yield step

    with mock.patch.object(TrainingBatches, "epoch", epoch):
        train(config)


@pytest.mark.slow_cases(r"synchronous", why="the asynchronous save stays")
@pytest.mark.parametrize("mode", [[], [SYNCHRONOUS]], ids=["asynchronous", "synchronous"])
def test_bad_data_on_one_rank_ends_all_with_its_traceback_first_and_loses_nothing(
    inputs: Path, whole: Path, tmp_path: Path, mode: list[str]
) -> None:
    config = run_config(inputs, tmp_path / "run", *RUN, *mode)
    with pytest.raises(RankFailed) as failed:
        shared_ranks(_break_the_data_of_rank_1, 2, config)
    first, second = str(failed.value).split("rank 0 raised:")
    assert first.startswith("rank 1 raised:")
    assert first.strip().endswith("OSError: [Errno 5] the data went away")
    assert "died" not in second
    shared_ranks(train, 2, config)
    _assert_equal(tmp_path / "run", whole)


@dataclass(frozen=True)
class FullDisk:
    """Writing step 4's checkpoint, `rank` gets half of what it writes to a file `name` onto the disk, and no more."""

    rank: int
    name: str
    rows: dict[bool, int]
    """How many steps are reported before the error, asynchronous and synchronous."""

    @contextlib.contextmanager
    def on_this_rank(self) -> Iterator[None]:
        original, full = os.pwrite, []

        def write(descriptor: int, buffer: memoryview, offset: int) -> int:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if "step-00000004.tmp-" not in path or self.name not in path:
                return int(original(descriptor, buffer, offset))
            if full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            full.append(path)
            return int(original(descriptor, buffer[: len(buffer) // 2], offset))

        with mock.patch("os.pwrite", write) if dist.get_rank() == self.rank else contextlib.nullcontext():
            yield

    def train(self, config: Config) -> str:
        with self.on_this_rank():
            return _refused(config)


def _refused(config: Config) -> str:
    """The sentence with which `train` refuses; what is written on the thread is over when a rank is asked for it."""
    status = CheckpointWriter.status

    def settled(writer: CheckpointWriter) -> int:
        while status(writer) == WRITING:
            time.sleep(0.001)
        return status(writer)

    with mock.patch.object(CheckpointWriter, "status", settled), pytest.raises(InputError) as refused:
        train(config)
    return str(refused.value)


FULL_DISKS = {
    "state.json": FullDisk(0, "state.json", {True: 4, False: 4}),
    "a shard": FullDisk(1, "optimizer-00001", {True: 4, False: 4}),
    "a rank's note": FullDisk(1, "part-00001.json", {True: 4, False: 4}),
    "the manifest": FullDisk(0, "manifest.json", {True: 5, False: 4}),
}


@pytest.mark.slow_cases(r"(?!a shard-True).*", why="each place where a save can stop, both ways of saving")
@pytest.mark.parametrize(
    ("file", "asynchronous"), [*((file, True) for file in FULL_DISKS), ("a shard", False), ("the manifest", False)]
)
def test_a_full_disk_is_said_on_all_ranks_alike_and_the_run_continues_when_there_is_space(
    inputs: Path, whole: Path, tmp_path: Path, file: str, asynchronous: bool
) -> None:
    disk = FULL_DISKS[file]
    config = run_config(inputs, tmp_path / "run", *RUN, f"checkpoint.asynchronous={str(asynchronous).lower()}")
    first, second = run_ranks(disk.train, 2, config)
    assert first == second
    assert re.search(
        r"checkpoints: the disk is full: it has [\d,]+ bytes free, [\d,]+ are needed; free space or", first
    )
    assert _names(tmp_path / "run") == ["step-00000002"]
    assert len(metrics(tmp_path / "run")) == disk.rows[asynchronous]
    shared_ranks(train, 2, config)
    _assert_equal(tmp_path / "run", whole)


def _refused_to_remove(config: Config) -> str:
    def rmtree(directory: Path, **options: Any) -> None:
        if ".old-" in str(directory):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))
        original(directory, **options)

    original = shutil.rmtree
    with mock.patch("shutil.rmtree", rmtree):
        return _refused(config)


@pytest.mark.slow(why="twelve steps of a real run")
def test_an_old_checkpoint_that_cannot_be_removed_ends_the_run_before_the_disk_is_full(
    inputs: Path, whole: Path, tmp_path: Path
) -> None:
    config = run_config(inputs, tmp_path / "run", *RUN, "checkpoint.keep_last=1", "checkpoint.every_steps=1")
    first, second = shared_ranks(_refused_to_remove, 2, config)
    assert first == second
    assert "step-00000001: cannot be removed, as checkpoint.keep_last demands: [Errno 13]" in first
    assert published(tmp_path / "run" / "checkpoints")[-1][0] == 3
    shared_ranks(train, 2, config)
    _assert_equal(tmp_path / "run", whole)
    assert _names(tmp_path / "run") == ["step-00000006"]


def _refused_while_writing(config: Config) -> str:
    with mock.patch("expertmesh.checkpoint.write.require_space"):
        return _refused(config)


@pytest.mark.slow(why="writes that a full disk refuses stay")
@pytest.mark.parametrize("refused", [_refused, _refused_while_writing])
def test_a_real_disk_that_is_full(inputs: Path, whole: Path, tmp_path: Path, refused: Callable[[Config], str]) -> None:
    size = sum(path.stat().st_size for path in (whole / "checkpoints" / "step-00000002").rglob("*"))
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(1.5 * size)}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        config = run_config(inputs, tmp_path / "disk" / "run", *RUN)
        first, second = run_ranks(refused, 2, config)
        assert first == second
        assert re.search(r"bytes free, [\d,]+ are needed; free space or choose another directory", first)
        assert _names(disk / "run") == ["step-00000002"]
        subprocess.run(["mount", "-o", f"remount,size={20 * size}", str(disk)], check=True)
        shared_ranks(train, 2, config)
        _assert_equal(disk / "run", whole)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _fill_the_disk_of_the_metrics(config: Config) -> str:
    opened = MetricsFile.__init__

    def on_a_full_disk(writer: MetricsFile, path: Path, done: int) -> None:
        opened(writer, path, done)
        os.dup2(os.open("/dev/full", os.O_WRONLY), writer.file.fileno())

    with mock.patch.object(MetricsFile, "__init__", on_a_full_disk):
        return _refused(config)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_that_is_full_for_the_metrics_is_said_as_such(inputs: Path, tmp_path: Path) -> None:
    (refused,) = shared_ranks(_fill_the_disk_of_the_metrics, 1, run_config(inputs, tmp_path / "run", *RUN[:2]))
    assert re.search(r"run: the disk is full: it has [\d,]+ bytes free, \d+ are needed; free space or", refused)


def _refuse_each(configs: list[Config]) -> list[tuple[str, str]]:
    """Class and sentence of what `train` raises for each."""
    outcomes = []
    for config in configs:
        with pytest.raises(ExpertmeshError) as refused:
            train(config)
        outcomes.append((type(refused.value).__name__, str(refused.value)))
        dist.barrier()
    return outcomes


def _flip_a_digit_of_the_seed(path: Path) -> None:
    content = (path / "state.json").read_bytes()
    assert b'"train.seed": 42' in content
    (path / "state.json").write_bytes(content.replace(b'"train.seed": 42', b'"train.seed": 43'))


def _of_no_run(path: Path) -> None:
    replace_file("state.json", state_bytes(4, {}, None))(path)


def _of_a_strange_run(path: Path) -> None:
    replace_file("state.json", state_bytes(4, {"identity": {}, "counters": {"hours": 3}}, None))(path)


def test_damage_found_at_resume_is_said_on_all_ranks_alike_before_anything_is_written(
    inputs: Path, whole: Path, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    content = pickle.dumps(Canary(canary))
    newest = Path("checkpoints", "step-00000004")
    cases: list[tuple[Callable[[Path], Any], str, str]] = [
        (lambda run: flip_a_bit("optimizer-00001-of-00002.safetensors", 0.8)(run / newest), "IntegrityError", "optim"),
        (lambda run: _flip_a_digit_of_the_seed(run / newest), "IntegrityError", "state.json: damaged: its content"),
        (lambda run: _of_no_run(run / newest), "InputError", "was not written by a training run"),
        (lambda run: _of_a_strange_run(run / newest), "IntegrityError", "state.json: is not the state of a training"),
        (lambda run: os.truncate(run / newest / "manifest.json", 999), "IntegrityError", "manifest.json: damaged"),
        (lambda run: (run / newest / "state.json").write_bytes(content), "IntegrityError", "state.json: has"),
        (lambda run: (run / "metrics.jsonl").write_bytes(content + b"\n"), "InputError", "metrics.jsonl:1: is no row"),
        (lambda run: (run / "config.yaml").write_bytes(content), "InputError", "config.yaml"),
    ]
    configs, before = [], []
    for number, (damage, _, _) in enumerate(cases):
        run = tmp_path / str(number)
        shutil.copytree(whole, run)
        shutil.rmtree(run / "model")
        shutil.rmtree(run / "checkpoints" / "step-00000006")
        damage(run)
        configs.append(run_config(inputs, run, *RUN))
        before.append(_contents(run))
    first, second = shared_ranks(_refuse_each, 2, configs)
    assert first == second
    for (_, kind, text), (got, sentence) in zip(cases, first, strict=True):
        assert (got, text in sentence) == (kind, True), (text, got, sentence)
    for number, content_before in enumerate(before):
        after = _contents(tmp_path / str(number))
        assert {name for name in after if after[name] != content_before.get(name)} <= {"config.yaml"}
        assert after.keys() == content_before.keys()
    assert not canary.exists()


def _contents(directory: Path) -> dict[str, bytes]:
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def _train_while_the_clock_jumps(config: Config) -> None:
    """Of each rank by itself, at every look: years ahead, years back, an hour back."""
    jumps, real = itertools.cycle((0.0, 7e7, -7e7, -3600.0, 1e6)), time.time
    with mock.patch("time.time", side_effect=lambda: real() + next(jumps)):
        train(config)


@pytest.mark.slow(why="trains twice; no other test depends on a clock")
def test_a_wall_clock_that_jumps_changes_nothing(
    inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = (
        "parallel.ep=2",
        "train.max_steps=6",
        "train.num_epochs=2",
        "checkpoint.every_minutes=10",
        "data.shuffle=true",
    )
    run_ranks(train, 2, run_config(inputs, tmp_path / "steady", *options))
    capfd.readouterr()
    run_ranks(_train_while_the_clock_jumps, 2, run_config(inputs, tmp_path / "jumps", *options))
    said = capfd.readouterr().out
    assert "step 6/6" in said
    assert not re.search(r"-\d+(\.\d)? ?(s|min|h|d)\b|\d day", said)
    steady, jumps = tmp_path / "steady", tmp_path / "jumps"
    assert rows_without_times(jumps) == rows_without_times(steady)
    assert all(torch.equal(tensor, weights(steady)[name]) for name, tensor in weights(jumps).items())
    seconds = [row["elapsed_seconds"] for row in metrics(jumps)]
    assert seconds == sorted(seconds)
    assert 0 < seconds[0] < seconds[-1] < 3600 / 2  # the smallest jump is an hour
    assert all(row["step_seconds"] > 0 and row["tokens_per_second"] > 0 for row in metrics(jumps))
    assert not (jumps / "checkpoints").exists()  # ten minutes have not passed
