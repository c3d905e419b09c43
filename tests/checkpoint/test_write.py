"""The writer between two saves: what goes on on its thread, and what the step that asks it never waits for."""

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import expertmesh as em
from expertmesh.checkpoint import write
from expertmesh.checkpoint.manifest import read_manifest
from expertmesh.checkpoint.write import IDLE, PUBLISHED, STATUSES, WRITING, WRITTEN, CheckpointWriter, publish
from expertmesh.io.directory import rename_synced
from tests.checkpoint.tiny import Job
from tests.support.models import tiny_model
from tests.support.ranks import run_ranks, shared_ranks


def _publish_slowly(directory: Path) -> None:
    job = Job(tiny_model("qwen3_moe"), em.ParallelConfig(ep=2))
    writer, go_on = CheckpointWriter(directory, asynchronous=True), threading.Event()

    def slowly(*args: object) -> object:
        go_on.wait()
        return publish(*args)  # type: ignore[arg-type]

    def exchanged(status: int) -> list[int]:
        """How many ranks have each status, when this rank's is `status`."""
        while writer.status() != status:
            pass
        ranks = torch.tensor([int(each == writer.status()) for each in STATUSES])
        dist.all_reduce(ranks)
        return list(ranks.tolist())

    first = dist.get_rank() == 0
    with mock.patch("expertmesh.checkpoint.write.publish", slowly):
        assert writer.save(job.model, job.optimizer, 1, {}) is None
        assert writer.settle(exchanged(WRITTEN)) is None
        for _ in range(2):  # steps go by
            assert writer.settle(exchanged(WRITING if first else WRITTEN)) is None
        assert not (directory / "step-00000001").exists()
        dist.barrier()
        go_on.set()
        saved = writer.settle(exchanged(PUBLISHED if first else WRITTEN))
    assert saved is not None
    assert saved.directory.is_dir()
    assert saved.files == (3 if first else None)  # two parts and the generators
    assert exchanged(IDLE)[IDLE] == 2
    assert writer.close() is None


def test_no_step_waits_for_rank_0_to_join_what_all_ranks_have_written(tmp_path: Path) -> None:
    shared_ranks(_publish_slowly, 2, tmp_path)


def _save_while_an_old_one_is_removed(directory: Path) -> list[list[str]]:
    job, there = Job(tiny_model("qwen3_moe"), em.ParallelConfig(ep=2)), []
    writer, prune, space = CheckpointWriter(directory, keep_last=1), write.prune, write.require_space

    def slowly(*arguments: Any) -> list[str]:
        time.sleep(0.3)
        return prune(*arguments)

    def seen(*arguments: Any) -> None:
        there.append(sorted(path.name for path in directory.iterdir()))
        space(*arguments)

    with mock.patch.object(write, "prune", slowly), mock.patch.object(write, "require_space", seen):
        for step in (1, 2, 3):
            writer.save(job.model, job.optimizer, step, {})
        writer.close()
    return there


def test_space_is_asked_for_when_old_checkpoints_are_gone(tmp_path: Path) -> None:
    there = shared_ranks(_save_while_an_old_one_is_removed, 2, tmp_path)[0]
    assert there == [[], ["step-00000001"], ["step-00000002"]]


@contextmanager
def _a_rank_is_lost(doing: str) -> Iterator[None]:
    yield
    raise ConnectionError(doing)


def _lose_a_rank_while_publishing(directory: Path) -> None:
    job = Job(tiny_model("qwen3_moe"), em.ParallelConfig(ep=2))
    writer, go_on = CheckpointWriter(directory, asynchronous=True), threading.Event()
    rename, target, remove = rename_synced, directory / "step-00000001", shutil.rmtree

    def renaming(*names: object) -> None:
        go_on.wait()
        rename(*names)  # type: ignore[arg-type]

    def removing(path: Path, **options: object) -> None:
        """What removes a directory holds on to it: renamed meanwhile, it is emptied under its new name."""
        under_way = path.exists()
        go_on.set()
        while not target.exists():
            pass
        remove(target if under_way else path, ignore_errors=True)

    with mock.patch("expertmesh.checkpoint.write.rename_synced", renaming):
        writer.save(job.model, job.optimizer, 1, {})
        while writer.status() != WRITTEN:
            pass
        dist.barrier()
        writer.settle([2 * (status == WRITTEN) for status in STATUSES])
        threading.Timer(0.3, go_on.set).start()
        with (
            mock.patch("expertmesh.checkpoint.write.raise_on_all_ranks", _a_rank_is_lost),
            mock.patch("expertmesh.checkpoint.write.shutil.rmtree", removing),
            pytest.raises(ConnectionError),
        ):
            writer.finish()
    if dist.get_rank() == 0:
        assert read_manifest(target).step == 1
        assert [path.name for path in directory.iterdir()] == [target.name]


def test_what_is_being_published_when_a_rank_is_lost_is_published_whole(tmp_path: Path) -> None:
    run_ranks(_lose_a_rank_while_publishing, 2, tmp_path)
