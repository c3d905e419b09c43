"""What a checkpoint costs: each byte is written once, and each rank reads what it holds and no more."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import expertmesh as em
from expertmesh.checkpoint import interface, read
from expertmesh.checkpoint.state import model_state, optimizer_state
from expertmesh.checkpoint.write import SavedCheckpoint
from expertmesh.io.safetensors_reader import read_header
from expertmesh.state.shards import local_tensor
from tests.checkpoint.tiny import Job
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks


def _save(directory: Path, parallel: em.ParallelConfig) -> SavedCheckpoint:
    job = Job(tiny_model("qwen3_moe"), parallel)
    job.train([0])
    return em.save_checkpoint(job.model, job.optimizer, directory, step=1)


@pytest.mark.slow_cases(r"parallel1", why="another layout stays")
@pytest.mark.parametrize("parallel", [em.ParallelConfig(ep=2), em.ParallelConfig(ep=2, replicate=2)])
def test_all_ranks_together_write_each_tensor_once(tmp_path: Path, parallel: em.ParallelConfig) -> None:
    saved = shared_ranks(_save, 4, tmp_path, parallel)
    assert len({each.total_bytes for each in saved}) == 1
    assert sum(each.bytes_written for each in saved) == saved[0].total_bytes
    on_disk = 0
    for path in saved[0].directory.glob("*.safetensors"):
        tensors = read_header(path).values()
        on_disk += sum(tensor.nbytes for tensor in tensors)
        assert path.stat().st_size == sum(tensor.nbytes for tensor in tensors) + min(t.offset for t in tensors)
    assert on_disk == saved[0].total_bytes
    assert saved[0].files == sum(path.is_file() for path in saved[0].directory.rglob("*")) - 1  # without the manifest
    writers = {each.bytes_written for each in saved}
    # Each replica's first copy writes; the other half of the ranks writes nothing.
    assert (0 in writers) == (parallel.replicate > 1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four ranks."""
    directory = tmp_path_factory.mktemp("checkpoints")
    shared_ranks(_save, 4, directory, em.ParallelConfig(ep=2))
    return directory


def _bytes_read(directory: Path, parallel: em.ParallelConfig) -> tuple[int, int]:
    """(read from the tensors' bytes, held after it), on this rank."""
    job = Job(tiny_model("qwen3_moe", seed=9), parallel)
    read_bytes = 0

    def counted(state: read.OpenCheckpoint, targets: Any) -> None:
        nonlocal read_bytes
        original(state, targets)
        read_bytes = state.files.bytes_read

    original = interface.read_state
    with mock.patch.object(interface, "read_state", counted):
        em.load_checkpoint(job.model, job.optimizer, directory)
    tensors = {**model_state(job.model), **optimizer_state(job.model, job.optimizer)}
    dist.barrier()
    return read_bytes, sum(local_tensor(tensor).nbytes for tensor in tensors.values())


@pytest.mark.slow_cases(r"(2-parallel1|4-parallel0)", why="two ranks stay")
@pytest.mark.parametrize(
    ("world", "parallel"),
    [(4, em.ParallelConfig(ep=4)), (2, em.ParallelConfig(ep=2)), (2, em.ParallelConfig(ep=1, replicate=2))],
)
def test_each_rank_reads_what_it_holds_and_no_more(saved: Path, world: int, parallel: em.ParallelConfig) -> None:
    for got, held in shared_ranks(_bytes_read, world, saved, parallel):
        assert got == held


def _headers_read(directory: Path) -> set[str]:
    """Names of the files whose headers this rank has read to load the checkpoint."""
    job = Job(tiny_model("qwen3_moe", seed=9), em.ParallelConfig(ep=2))
    opened: list[str] = []

    def noted(path: Path) -> Any:
        opened.append(path.name)
        return read_header(path)

    with mock.patch.object(read, "read_header", noted):
        em.load_checkpoint(job.model, job.optimizer, directory)
    assert len(opened) == len(set(opened))
    return set(opened)


def test_each_header_is_checked_by_somebody_and_read_by_those_who_need_it(saved: Path) -> None:
    ranks = shared_ranks(_headers_read, 4, saved)
    assert set().union(*ranks) == {path.name for path in (saved / "step-00000001").glob("*.safetensors")}
    # Two to check, and its own two on the layout that wrote it; rank 0's files also hold the optimizer's step counts.
    assert all(len(names) <= 5 for names in ranks), ranks
