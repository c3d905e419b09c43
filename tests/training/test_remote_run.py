"""`checkpoint.remote`: a run whose machine is lost goes on elsewhere from object storage, with the same bits."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from expertmesh.checkpoint.remote import RemoteCheckpoints
from expertmesh.config import Config
from expertmesh.io import directory as directory_module
from expertmesh.io import storage as storage_module
from expertmesh.training.run import train
from expertmesh.training.startup import output_dir
from expertmesh.training.startup.output_dir import has_result, upload_result, withdraw_result
from tests.checkpoint.object_store import Killed, ObjectStore
from tests.support.errors import refused, refused_on_ranks
from tests.support.ranks import run_ranks, shared_ranks
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
    _wait_for_uploads()
    with refused("run.finished"):
        train(second)
    if dist.get_rank() == 0:  # as if it had been killed while it uploaded the result
        Path(str(second.checkpoint.remote).removeprefix("file://"), "model", "config.json").unlink()
    dist.barrier()
    train(second)
    _wait_for_uploads()


def _wait_for_uploads() -> None:
    """Rank 0 uploads when all collectives are done; a job ends there."""
    dist.barrier()


@pytest.mark.slow(why="two launches; checkpoint/test_remote.py ends uploads at every operation")
def test_a_run_goes_on_where_its_directory_is_empty_with_the_same_bits(tmp_path: Path) -> None:
    inputs, remote = write_inputs(tmp_path / "inputs"), tmp_path / "remote"
    common = ("checkpoint.every_steps=1", "checkpoint.keep_last=1", "parallel.ep=2")
    there = (*common, f"checkpoint.remote=file://{remote}")
    shared_ranks(train, 2, run_config(inputs, tmp_path / "whole", *common))
    first, second = (run_config(inputs, tmp_path / name, *there) for name in ("first", "second"))
    other = run_config(inputs, tmp_path / "other", *there, "train.seed=7")
    shared_ranks(_lose_machines, 2, first, second, other)
    expected, got = weights(tmp_path / "whole"), weights(tmp_path / "second")
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())
    assert rows_without_times(tmp_path / "second") == rows_without_times(tmp_path / "whole")
    assert rows_without_times(remote) == rows_without_times(tmp_path / "whole")
    assert (remote / "expert_load.json").is_file()
    assert [path.name for path in (remote / "checkpoints").iterdir()] == ["step-00000003"]
    here, stored = (
        sorted(path.name for path in root.iterdir()) for root in (tmp_path / "second/model", remote / "model")
    )
    assert here == stored


def test_a_result_is_there_when_all_of_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "PAUSE_SECONDS", 0.0)
    config = run_config(tmp_path, tmp_path / "run", "checkpoint.remote=s3://bucket/run")
    names = ["config.json", "model-1.safetensors", "model-2.safetensors", "tokenizer.json"]
    (tmp_path / "run" / "model").mkdir(parents=True)
    for name in names:
        (tmp_path / "run" / "model" / name).write_text(name)

    def started(died_at: int | None) -> ObjectStore:
        store = ObjectStore()
        store.objects |= {
            f"bucket/run/model/{name}": name.encode() for name in ("config.json", "of-before.safetensors")
        }
        monkeypatch.setattr(output_dir, "open_remote", lambda _: RemoteCheckpoints(store.storage()))
        store.die_at = died_at
        return store

    def finish() -> None:
        withdraw_result(config)
        upload_result(config)

    whole = started(None)
    finish()
    assert sorted(whole.objects) == [f"bucket/run/model/{name}" for name in names]
    for at in range(whole.seen):
        started(at)
        with pytest.raises(Killed):
            finish()
        assert has_result(config) == (at == 0)  # when it has withdrawn nothing of an earlier start's, which is whole


def _train_on_a_disk_of_its_own(configs: list[Config]) -> None:
    directory_module.VISIBLE_WITHIN_SECONDS = 0.2
    train(configs[dist.get_rank()])


def test_ranks_that_do_not_share_output_dir_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path / "inputs")
    remote = f"checkpoint.remote=file://{tmp_path}/remote"
    configs = [run_config(inputs, tmp_path / f"node-{node}", remote) for node in (0, 1)]
    with refused_on_ranks("output.not-shared", naming="node-1/lock.json"):
        run_ranks(_train_on_a_disk_of_its_own, 2, configs)


def test_a_directory_that_each_node_has_mounted_for_itself_is_no_storage(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path / "inputs")
    remotes = [f"checkpoint.remote=file://{tmp_path}/mounted-on-{node}" for node in (0, 1)]
    configs = [run_config(inputs, tmp_path / "run", remote) for remote in remotes]
    with refused_on_ranks("storage.not-shared", naming="rank 1"):
        run_ranks(_train_on_a_disk_of_its_own, 2, configs)
