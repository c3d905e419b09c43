"""A run that is stopped and started again equals the one that was not: weights, metrics, sample order, counters."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from expertmesh.data.encoding.encode import Encoder
from expertmesh.training.run import train
from tests.support.ranks import run_ranks
from tests.training.tiny_run import rows_without_times, run_config, train_steps, weights, write_inputs

# Two epochs of four steps, the last of an epoch shorter; packed, shuffled, with a norm that clips.
LONG = ["train.max_steps=null", "train.num_epochs=2", "data.shuffle=true", "checkpoint.every_steps=2"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (2, ["parallel.ep=2"]),
        (4, ["parallel.ep=2", "log.every_steps=3", "data.packing=true"]),
        (2, ["parallel.replicate=2", "checkpoint.asynchronous=false"]),
    ],
)
def test_a_stopped_run_continues_bit_for_bit(inputs: Path, tmp_path: Path, world: int, overrides: list[str]) -> None:
    whole = run_config(inputs, tmp_path / "whole", *LONG, *overrides)
    run_ranks(train, world, whole)
    broken = run_config(inputs, tmp_path / "broken", *LONG, *overrides)
    run_ranks(train_steps, world, broken, 3)
    assert [path.name for path in (tmp_path / "broken" / "checkpoints").iterdir()].count("step-00000003") == 1
    prepared = list((tmp_path / "broken" / "prepared").glob("*/tokens-*.bin"))
    assert len(prepared) == world  # all ranks shared the rows
    with mock.patch.object(Encoder, "encode", side_effect=AssertionError("tokenized again")):
        run_ranks(train, world, broken)
    expected, got = weights(tmp_path / "whole"), weights(tmp_path / "broken")
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, got[name]), name
    assert rows_without_times(tmp_path / "broken") == rows_without_times(tmp_path / "whole")
