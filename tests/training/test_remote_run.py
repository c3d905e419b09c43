"""`checkpoint.remote`: a run whose machine is lost goes on elsewhere from object storage, with the same bits."""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from expertmesh.config import Config
from expertmesh.training.run import train
from tests.support.errors import refused
from tests.support.ranks import run_ranks
from tests.training.tiny_run import rows_without_times, run_config, train_steps, weights, write_inputs


def _lose_machines(first: Config, second: Config, other: Config) -> None:
    """Two steps on a machine that is lost, then the rest on another whose directory is empty."""
    train_steps(first, 2)
    if dist.get_rank() == 0:
        shutil.rmtree(first.output_dir)
    dist.barrier()
    with refused("storage.other-run", naming="train.seed"):
        train(other)
    train(second)


def test_a_run_goes_on_where_its_directory_is_empty_with_the_same_bits(tmp_path: Path) -> None:
    inputs, remote = write_inputs(tmp_path / "inputs"), tmp_path / "remote"
    common = ("checkpoint.every_steps=1", "checkpoint.keep_last=1", "parallel.ep=2")
    there = (*common, f"checkpoint.remote=file://{remote}")
    run_ranks(train, 2, run_config(inputs, tmp_path / "whole", *common))
    first, second = (run_config(inputs, tmp_path / name, *there) for name in ("first", "second"))
    other = run_config(inputs, tmp_path / "other", *there, "train.seed=7")
    run_ranks(_lose_machines, 2, first, second, other)
    expected, got = weights(tmp_path / "whole"), weights(tmp_path / "second")
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())
    assert rows_without_times(tmp_path / "second") == rows_without_times(tmp_path / "whole")
    assert rows_without_times(remote) == rows_without_times(tmp_path / "whole")
    assert [path.name for path in (remote / "checkpoints").iterdir()] == ["step-00000003"]
    here, stored = (
        sorted(path.name for path in root.iterdir()) for root in (tmp_path / "second/model", remote / "model")
    )
    assert here == stored
