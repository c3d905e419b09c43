"""kill -9 of a rank at any moment loses nothing: the same call continues, and ends as if nothing had happened."""

import contextlib
import itertools
import os
import pkgutil
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from expertmesh.checkpoint.directory import published
from expertmesh.checkpoint.manifest import read_manifest
from expertmesh.config import Config
from expertmesh.training.run import train
from tests.support.ranks import RankFailed, run_ranks
from tests.training.tiny_run import metrics, rows_without_times, run_config, train_steps, weights, write_inputs

# Two epochs of four steps, the last of an epoch shorter; a checkpoint after every second.
RUN = [
    "train.max_steps=null",
    "train.num_epochs=2",
    "data.shuffle=true",
    "parallel.ep=2",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=1",
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def whole(inputs: Path) -> Path:
    """The output of the run that nothing happened to."""
    run_ranks(train, 2, run_config(inputs, inputs / "whole", *RUN))
    return inputs / "whole"


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _at_once(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    _die()


def _after_half_of_it(original: Callable[..., Any], descriptor: int, buffer: memoryview, offset: int) -> None:
    original(descriptor, buffer[: len(buffer) // 2], offset)
    _die()


def _after_half_of_the_files(original: Callable[..., Any], directory: Path) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    assert len(files) > 5
    for path in files[::2]:
        path.unlink()
    _die()


def _after_half_of_the_row(original: Callable[..., Any], writer: Any, row: dict[str, Any]) -> None:
    writer.file.write(f'{{"step": {row["step"]}, "lo'.encode())
    _die()


@dataclass(frozen=True)
class Kill:
    """Of `rank`, in the `at`-th call of `target` whose arguments mention `about`. Restarts continue after `newest`, or
    after `or_before` where the newest may still have been on its way.
    """

    rank: int
    target: str
    at: int = 1
    about: str = ""
    how: Callable[..., None] = _at_once
    newest: int = 0
    or_before: int | None = None

    def train(self, config: Config) -> None:
        if dist.get_rank() != self.rank:
            return train(config)
        original = pkgutil.resolve_name(self.target)
        calls = itertools.count(1)

        def sabotaged(*args: Any, **kwargs: Any) -> Any:
            if self.about in str(args) and next(calls) == self.at:
                self.how(original, *args, **kwargs)
            return original(*args, **kwargs)

        with mock.patch(self.target.replace(":", "."), sabotaged):
            return train(config)


def _run_into(kill: Kill, config: Config) -> None:
    """The killed rank says nothing, every other one ends by itself, and what has a checkpoint's name is complete."""
    with pytest.raises(RankFailed) as failed:
        run_ranks(kill.train, 2, config)
    assert re.findall(r"rank (\d) hung or died \(exit -9", str(failed.value)) == [str(kill.rank)]
    assert f"rank {1 - kill.rank} raised:" in str(failed.value)
    for step, path in published(Path(config.output_dir) / "checkpoints"):
        assert read_manifest(path).step == step


def _assert_as_if_nothing_had_happened(output: Path, whole: Path) -> None:
    expected, got = weights(whole), weights(output)
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, got[name]), name
    assert rows_without_times(output) == rows_without_times(whole)
    written = [
        "checkpoints",
        "config.yaml",
        "data.json",
        "expert_load.json",
        "metrics.jsonl",
        "model",
        "prepared",
        "run.json",
    ]
    assert sorted(path.name for path in output.iterdir()) == written
    assert all(re.fullmatch(r"step-\d{8}", path.name) for path in (output / "checkpoints").iterdir())


LOOP, PART, PUBLISH = "expertmesh.training.loop", "expertmesh.checkpoint.state", "expertmesh.checkpoint.write"
KILLS = {
    "in a step": Kill(1, "expertmesh.step.forward_backward:loss_of_batch", at=11, newest=4, or_before=2),
    "while writing a part": Kill(1, f"{PART}:write_at", at=100, how=_after_half_of_it, newest=2),
    "while writing rank 0's note": Kill(0, f"{PART}:write_synced", at=2, newest=2),
    "before publishing": Kill(0, f"{PUBLISH}:rename_synced", about="step-00000004", newest=2),
    "before pruning": Kill(0, "expertmesh.checkpoint.write:prune", at=2, newest=4),
    "while removing an old one": Kill(
        0,
        "expertmesh.checkpoint.directory:shutil.rmtree",
        about="checkpoints/step-",
        how=_after_half_of_the_files,
        newest=4,
    ),
}


# Where the mode makes a difference, both.
@pytest.mark.slow_cases(
    r"(before pruning-True|before publishing-False|in a step-True|while writing a part-.*|while removing.*)",
    why="the moments around publishing stay",
)
@pytest.mark.slow_cases(r"while writing rank 0's note-True", why="the moment before publishing stays")
@pytest.mark.parametrize(
    ("moment", "asynchronous"),
    [*((moment, True) for moment in KILLS), ("while writing a part", False), ("before publishing", False)],
)
def test_a_killed_run_continues_from_the_newest_checkpoint(
    inputs: Path, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], moment: str, asynchronous: bool
) -> None:
    kill = KILLS[moment]
    config = run_config(inputs, tmp_path / "run", *RUN, f"checkpoint.asynchronous={str(asynchronous).lower()}")
    _run_into(kill, config)
    capfd.readouterr()
    newest = published(tmp_path / "run" / "checkpoints")[-1][0]
    assert newest in (kill.newest, kill.or_before)
    run_ranks(train, 2, config)
    assert f"resume     step-{newest:08d}, after step {newest};" in capfd.readouterr().out
    _assert_as_if_nothing_had_happened(tmp_path / "run", whole)


METRICS, REPLACE = "expertmesh.training.reporting.reporter", "expertmesh.io.directory:os.replace"
FIRST_START = {
    "publishing the configuration": Kill(0, REPLACE, about="config.yaml"),
    "opening the metrics": Kill(0, REPLACE, about="metrics.jsonl"),
    "writing a row": Kill(0, f"{METRICS}:MetricsFile.write", at=2, how=_after_half_of_the_row),
}


@pytest.mark.slow(why="a run that is killed later stays")
@pytest.mark.parametrize("moment", FIRST_START)
def test_a_run_killed_before_its_first_checkpoint_starts_again(
    inputs: Path, whole: Path, tmp_path: Path, moment: str
) -> None:
    config = run_config(inputs, tmp_path / "run", *RUN)
    _run_into(FIRST_START[moment], config)
    run_ranks(train, 2, config)
    _assert_as_if_nothing_had_happened(tmp_path / "run", whole)


@pytest.mark.slow(why="six launches")
def test_restarts_that_are_killed_too_lose_nothing(
    inputs: Path, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Synchronous: step 6 has its checkpoint before step 7 begins.
    config = run_config(inputs, tmp_path / "run", *RUN, "checkpoint.asynchronous=false")
    _run_into(Kill(0, f"{PUBLISH}:rename_synced", about="step-00000006"), config)
    config_replaced = Kill(0, REPLACE, about="config.yaml")
    metrics_replaced = Kill(0, REPLACE, about="metrics.jsonl")
    cleaned = Kill(0, "expertmesh.checkpoint.directory:shutil.rmtree", about=".tmp-", how=_after_half_of_the_files)
    row = Kill(0, f"{METRICS}:MetricsFile.write", at=3, how=_after_half_of_the_row)  # the row of step 7
    saving = Kill(0, "expertmesh.weights.save:write_sidecars")
    for kill, newest in ((config_replaced, 4), (metrics_replaced, 4), (cleaned, 4), (row, 4), (saving, 6)):
        capfd.readouterr()
        _run_into(kill, config)
        expected = f"resume     step-{newest:08d}"
        assert expected in capfd.readouterr().out or kill is config_replaced
    run_ranks(train, 2, config)
    assert "resume     step-00000008, after step 8;" in capfd.readouterr().out
    _assert_as_if_nothing_had_happened(tmp_path / "run", whole)


KILLED_TIMES = int(os.environ.get("EXPERTMESH_KILLS", "10"))
MANY = [*RUN[1:3], "train.num_epochs=20", "checkpoint.every_steps=1", "checkpoint.keep_last=2"]
# A run of so many steps changes its layout after every `SEGMENT` of them: ranks, and what `parallel` is.
LAYOUTS = [
    (2, "{ep: 2}"),
    (4, "{ep: 2, tp: 2}"),
    (2, "{ep: 1, pp: 2}"),
    (1, "{ep: 1}"),
    (2, "{ep: 1, cp: 2}"),
    (4, "{ep: 2}"),
    (2, "{ep: 1}"),
    (4, "{ep: 2, replicate: 2}"),
    (2, "{ep: 2, tp: 2}"),
    (2, "{ep: 2}"),
]
SEGMENT = 4


class _Assassin:
    """Kills one rank at a random moment before the step `last`: in the start, or around a step after the newest."""

    def __init__(self, output: Path, seed: int) -> None:
        self.output, self.last = output, 0
        self.random = random.Random(seed)
        self.kills = 0

    def __call__(self, processes: Sequence[BaseProcess]) -> None:
        newest = _newest(self.output)
        step = min(newest + self.random.randrange(4), self.last - 1)
        until = time.monotonic() + 30
        while self._rows() < step and time.monotonic() < until and all(each.is_alive() for each in processes):
            time.sleep(0.001)
        time.sleep(self.random.uniform(0, 0.1 if step > newest else 0.5))
        victim = self.random.choice(processes)
        if victim.is_alive():
            victim.kill()
            self.kills += 1

    def _rows(self) -> int:
        path = self.output / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0


def _newest(output: Path) -> int:
    checkpoints = published(output / "checkpoints")
    return checkpoints[-1][0] if checkpoints else 0


def _train_until(config: Config, step: int) -> None:
    """Go on from the newest checkpoint, and stop in order after `step`, as for a start with another layout."""
    if step == config.train.max_steps:
        return train(config)
    return train_steps(config, step - _newest(Path(config.output_dir)))


@pytest.mark.slow(why="thirty launches")
@pytest.mark.timeout(max(600, 10 * KILLED_TIMES))
def test_random_kills_in_layouts_that_change_end_in_the_bits_of_the_run_without_them(
    inputs: Path, tmp_path: Path
) -> None:
    assassin, last = _Assassin(tmp_path / "run", seed=4), SEGMENT * len(LAYOUTS)
    for number, (world, layout) in enumerate(LAYOUTS, start=1):
        options = (*MANY, f"train.max_steps={last}", f"parallel={layout}")
        run_ranks(_train_until, world, run_config(inputs, tmp_path / "whole", *options), number * SEGMENT)
        config = run_config(inputs, tmp_path / "run", *options)
        assassin.last = number * SEGMENT
        while assassin.kills < KILLED_TIMES * number // len(LAYOUTS) and _newest(assassin.output) < assassin.last:
            with contextlib.suppress(RankFailed):  # of a run that was faster, none is killed
                run_ranks(_train_until, world, config, assassin.last, meanwhile=assassin)
        if _newest(assassin.output) < assassin.last:
            run_ranks(_train_until, world, config, assassin.last)
    assert assassin.kills > 0.8 * KILLED_TIMES
    if not (tmp_path / "run" / "model").exists():  # killed after its last checkpoint
        run_ranks(train, world, config)
    _assert_as_if_nothing_had_happened(tmp_path / "run", tmp_path / "whole")
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(1, last + 1))
