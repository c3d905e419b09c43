"""The writer between two saves: what goes on on its thread, and what the step that asks it never waits for."""

import threading
from pathlib import Path
from unittest import mock

import torch.distributed as dist

import expertmesh as em
from expertmesh.checkpoint.publish import publish
from expertmesh.checkpoint.write import IDLE, PUBLISHED, WRITING, WRITTEN, CheckpointWriter
from tests.checkpoint.tiny import Job
from tests.support.models import tiny_model
from tests.support.ranks import run_ranks


def _publish_slowly(directory: Path) -> None:
    job = Job(tiny_model("qwen3_moe"), em.ParallelConfig(ep=2))
    writer, go_on = CheckpointWriter(directory, asynchronous=True), threading.Event()

    def slowly(*args: object) -> object:
        go_on.wait()
        return publish(*args)  # type: ignore[arg-type]

    def exchanged(status: int) -> list[int]:
        """Every rank's status, when this rank's is `status`."""
        while writer.status() != status:
            pass
        statuses = [IDLE] * 2
        dist.all_gather_object(statuses, writer.status())
        return statuses

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
    assert exchanged(IDLE) == [IDLE] * 2
    assert writer.close() is None


def test_no_step_waits_for_rank_0_to_join_what_all_ranks_have_written(tmp_path: Path) -> None:
    run_ranks(_publish_slowly, 2, tmp_path)
