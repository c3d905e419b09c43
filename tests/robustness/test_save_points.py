"""A save that is cut short before any of its file operations, or whose file operations fail one by one, loses nothing.

A process that is killed does no further file operation: from the point of a kill on every one raises what no code
catches. Afterwards whatever has a checkpoint's name is whole, the next save works, and reads as what was saved.
"""

import errno
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch

import expertmesh as em
from expertmesh.checkpoint.directory import clean, published
from expertmesh.checkpoint.read import check_hashes, open_state
from expertmesh.config import Config
from expertmesh.config.errors import InputError
from expertmesh.training.run import train
from tests.checkpoint.tiny import Job
from tests.support.models import tiny_model
from tests.support.ranks import run_ranks, shared_ranks
from tests.training.tiny_run import run_config, write_inputs

OPERATIONS = ("open", "write", "ftruncate", "pwrite", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir", "link")
Fault = Literal["kill", "EIO", "ENOSPC", "EDQUOT", "short writes"]


class Killed(BaseException):
    """The process would be gone."""


class FaultPoint:
    """Inside, file operation number `at` of this process, from 0, and for a kill every later one, goes wrong. Of short
    writes every one is: the system takes half of what it is given, as it may.
    """

    def __init__(self, fault: Fault, at: int | None) -> None:
        self.fault, self.at, self.seen = fault, at, 0
        self._own = {name: getattr(os, name) for name in OPERATIONS}
        self._lock = threading.Lock()

    def __enter__(self) -> "FaultPoint":
        for name, operation in self._own.items():
            setattr(os, name, self._counted(operation))
        return self

    def __exit__(self, *_: object) -> None:
        for name, operation in self._own.items():
            setattr(os, name, operation)

    def _counted(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            with self._lock:
                here, self.seen = self.seen, self.seen + 1
            if self.fault == "short writes" and operation in (self._own["write"], self._own["pwrite"]):
                descriptor, buffer, *offset = arguments
                return operation(descriptor, buffer[: max(1, len(buffer) // 2)], *offset)
            if self.at is not None and self.fault == "kill" and here >= self.at:
                raise Killed
            if self.at is not None and here == self.at and self.fault != "kill":
                number = getattr(errno, self.fault)
                raise OSError(number, os.strerror(number))
            return operation(*arguments, **named)

        return call


def _save_with_faults(directory: Path, fault: Fault, victim: int, stride: int) -> tuple[int, int, set[str]]:
    """Save once at every `stride`th point. How many points there are, how many saves came to nothing, errors' keys."""
    job = Job(tiny_model("qwen3_moe"), em.ParallelConfig(ep=1))
    job.train([0])
    rank = job.mesh.rank

    def save(step: int) -> None:
        em.save_checkpoint(job.model, job.optimizer, directory, step=step, state={"seen": step})

    with FaultPoint(fault, None) as counting:
        save(1)
    seen = torch.tensor(counting.seen)
    torch.distributed.broadcast(seen, victim)
    lost, points, at, step, keys = 0, int(seen), 0, 1, set[str]()
    while at < points:
        step += 1
        before = len(published(directory))
        try:
            with FaultPoint(fault, at if rank == victim else None):
                save(step)
        except Killed:
            lost += 1
        except InputError as error:
            lost += 1
            keys.add(error.key)
        torch.distributed.barrier()
        for _, path in published(directory):
            with open_state(path) as state:
                check_hashes(state)
        assert len(published(directory)) in (before, before + 1)
        torch.distributed.barrier()
        if rank == 0:
            clean(directory)
        torch.distributed.barrier()
        at += stride
    save(step + 1)
    again = Job(tiny_model("qwen3_moe", seed=9), em.ParallelConfig(ep=1))
    em.load_checkpoint(again.model, again.optimizer, published(directory)[-1][1])
    assert all(torch.equal(tensor, again.state()[name]) for name, tensor in job.state().items())
    return points, lost, keys


@pytest.mark.slow(why="150 saves")
def test_a_kill_before_any_file_operation_of_a_save_loses_nothing(tmp_path: Path) -> None:
    ((points, lost, _),) = shared_ranks(_save_with_faults, 1, tmp_path, "kill", 0, 1)
    assert points > 40
    assert lost > points / 2
    print(f"{points} points, {lost} saves that came to nothing")


@pytest.mark.slow(why="dozens of saves")
@pytest.mark.parametrize(
    ("fault", "world", "victim", "stride", "key"),
    [
        ("EIO", 2, 0, 4, "output.unwritable"),
        ("EIO", 2, 1, 4, "output.unwritable"),
        ("ENOSPC", 1, 0, 1, "output.no-space"),
        ("EDQUOT", 2, 1, 4, "output.no-space"),
    ],
)
def test_an_error_of_any_file_operation_of_a_save_is_said_and_loses_nothing(
    fault: Fault, world: int, victim: int, stride: int, key: str, tmp_path: Path
) -> None:
    results = shared_ranks(_save_with_faults, world, tmp_path, fault, victim, stride)
    points, lost, keys = results[victim]
    assert points > 10
    assert lost > points / (2 * stride)
    assert {lost for _, lost, _ in results} == {lost}
    assert keys == {key}
    print(f"{points} points, {lost} saves that came to nothing")


def test_writes_of_which_the_system_takes_half_are_made_whole(tmp_path: Path) -> None:
    def save() -> None:
        job = Job(tiny_model("qwen3_moe"), em.ParallelConfig(ep=1))
        job.train([0])
        em.save_model(job.model, tmp_path / "whole")
        with FaultPoint("short writes", None) as counted:
            em.save_checkpoint(job.model, job.optimizer, tmp_path, step=1, state={"seen": 1})
            em.save_model(job.model, tmp_path / "halves")
        assert counted.seen > 100
        with open_state(tmp_path / "step-00000001") as state:
            check_hashes(state)

    run_ranks(save, 1)
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "halves" / file.name).read_bytes(), file.name


def _syncs_around_renames(config: Config) -> list[tuple[str, bool, bool]]:
    """For each rename and link under `output_dir` in a run: its target, was the source synced since it last changed its
    name, was the target's directory synced after.
    """
    events: list[tuple[str, str, str]] = []
    output, own = str(Path(config.output_dir).resolve()), {name: getattr(os, name) for name in OPERATIONS}

    def fsync(descriptor: int) -> None:
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}"), ""))
        own["fsync"](descriptor)

    def renaming(name: str) -> Callable[..., None]:
        def call(source: Any, target: Any, **named: Any) -> None:
            own[name](source, target, **named)
            events.append(
                ("rename", *(os.path.realpath(os.path.dirname(p)) + "/" + Path(p).name for p in (source, target)))
            )

        return call

    with mock.patch.object(os, "fsync", fsync), ExitStack() as stack:
        for name in ("rename", "replace", "link"):
            stack.enter_context(mock.patch.object(os, name, renaming(name)))
        train(config)
    found = []
    for at, (kind, source, target) in enumerate(events):
        if kind == "rename" and target.startswith(output):
            before = ("fsync", source, "") in events[:at]
            after = ("fsync", os.path.dirname(target), "") in events[at + 1 : at + 2]
            found.append((target.removeprefix(output), before, after))
    return found


def test_a_rename_publishes_what_the_disk_holds_and_is_on_the_disk_itself(tmp_path: Path) -> None:
    overrides = ("checkpoint.every_steps=1", "checkpoint.keep_last=1", "checkpoint.asynchronous=false")
    config = run_config(write_inputs(tmp_path / "inputs"), tmp_path / "run", *overrides)
    [renames] = shared_ranks(_syncs_around_renames, 1, config)
    kinds = {"checkpoints/step-00000003", "model", "config.yaml", "metrics.jsonl", "run.json", "manifest"}
    kinds |= {".old-", "prepared/"}
    targets = [target for target, _, _ in renames]
    assert not [kind for kind in kinds if not any(kind in target for target in targets)], targets
    assert [each for each in renames if not all(each[1:])] == []
