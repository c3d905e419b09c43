"""A run that is stopped and started again equals the one that was not: weights, metrics, sample order, counters."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from expertmesh.config import Config
from expertmesh.config.errors import InputError
from expertmesh.data.encoding.encode import Encoder
from expertmesh.experts.placement import Placement, balanced, busiest, read_loads, read_pairs
from expertmesh.training import loop
from expertmesh.training.exchange import NonFiniteGuard
from expertmesh.training.loop import TrainingLoop
from expertmesh.training.reporting.metrics import placement_advice
from expertmesh.training.reporting.record import read_record
from expertmesh.training.run import train
from tests.support.ranks import run_ranks, shared_ranks
from tests.training.tiny_run import loads_of_experts, rows_without_times, run_config, train_steps, weights, write_inputs
from tests.training.tiny_run import metrics as rows_of

# Two epochs of four steps, the last of an epoch shorter; packed, shuffled, with a norm that clips.
LONG = ["train.max_steps=null", "train.num_epochs=2", "data.shuffle=true", "checkpoint.every_steps=2"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.slow_cases(r"(4-overrides1|2-overrides2)", why="other optimizers and accumulation; one stays")
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


def _steps_of_a_second(config: Config, stop_after: int | None) -> None:
    """Train by a clock that goes on by one second in each step, and skip step 6."""
    now, step, check = [0.0], TrainingLoop._train_step, NonFiniteGuard.check

    def timed(*arguments: Any) -> Any:
        now[0] += 1
        return step(*arguments)

    def skipping(self: NonFiniteGuard, number: int, *rest: Any) -> str | None:
        return "a test" if number == 6 else check(self, number, *rest)

    with (
        mock.patch.object(TrainingLoop, "_train_step", timed),
        mock.patch.object(NonFiniteGuard, "check", skipping),
        mock.patch.object(loop, "time", SimpleNamespace(monotonic=lambda: now[0])),
    ):
        train(config) if stop_after is None else train_steps(config, stop_after)


def test_seconds_of_steps_are_true_after_a_skipped_step_and_with_other_reports(inputs: Path, tmp_path: Path) -> None:
    options = ["train.max_steps=null", "train.num_epochs=3"]
    for every, stop_after in ((5, 7), (4, None)):
        config = run_config(inputs, tmp_path / "run", *options, f"log.every_steps={every}")
        run_ranks(_steps_of_a_second, 1, config, stop_after)
    rows = rows_of(tmp_path / "run")
    assert [(row["step"], row["step_seconds"]) for row in rows] == [(5, 1.0), (6, 1.0), (8, 1.0), (12, 1.0)]


def test_a_balanced_run_is_placed_anew_by_its_load_when_it_goes_on(
    inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = [*LONG, "parallel.ep=2", "checkpoint.every_steps=null"]
    run_ranks(train, 2, run_config(inputs, tmp_path / "whole", *options))
    (advice,) = placement_advice(read_loads(tmp_path / "whole"), Placement(2, {}))
    assert f"{advice}\n" in capfd.readouterr().out
    placed = run_config(inputs, tmp_path / "placed", *options, "moe.placement=balanced", "moe.calibration_batches=2")
    shared_ranks(train_steps, 2, placed, 1)
    shared_ranks(train, 2, placed)
    expected, got = (rows_without_times(tmp_path / run) for run in ("whole", "placed"))
    for row, other in zip(got, expected, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert loads_of_experts(row) == loads_of_experts(other)
        assert row["expert_tokens"] == other["expert_tokens"]
    # The file has the steps of the last start alone: all but the first.
    for layer, load_E in enumerate(read_loads(tmp_path / "placed").values()):
        assert load_E == [sum(each) for each in zip(*(row["expert_tokens"][layer] for row in got[1:]), strict=True)]
    record = read_record(tmp_path / "placed")
    assert record is not None
    first, second = (next(line for line in each.printed if "placed balanced by" in line) for each in record.starts)
    assert re.search(r"balanced by a calibration in \d\S* s: the busiest EP rank has \d\.\d\d \(at most ", first)
    assert f"balanced by the load in {tmp_path / 'placed' / 'expert_load.json'}: the busiest EP rank has " in second
    assert [each.plan is not None and each.plan.ranks_max_over_mean is not None for each in record.starts] == [True] * 2
    # Two micro-batches of each rank are the first step; experts that they choose together share ranks.
    loads = dict(zip(read_loads(tmp_path / "placed"), got[0]["expert_tokens"], strict=True))
    together = read_pairs(tmp_path / "placed", loads)
    assert [pairs_EE.diagonal().tolist() for pairs_EE in together.values()] == list(loads.values())
    orders = list(balanced(loads, 2, 0, together).orders.values())
    assert orders != [tuple(range(8))] * 2
    for rows, placement in ((expected, [range(8)] * 2), (got[1:], orders)):
        for row in rows:
            ranks = [busiest(load_E, order, 2) for load_E, order in zip(row["expert_tokens"], placement, strict=True)]
            assert [layer["ranks_max_over_mean"] for layer in row["expert_load"]] == ranks


@pytest.mark.slow(why="parallel/test_by_layer.py compares the orders")
def test_a_run_continues_in_the_other_order_of_micro_batches(inputs: Path, tmp_path: Path) -> None:
    """Global batches of four on two data ranks: two micro-batches a step."""
    shared_ranks(train, 2, run_config(inputs, tmp_path / "whole", "train.accumulate=by_layer"))
    shared_ranks(train_steps, 2, run_config(inputs, tmp_path / "broken", "train.accumulate=by_micro_batch"), 1)
    shared_ranks(train, 2, run_config(inputs, tmp_path / "broken", "train.accumulate=by_layer", "train.round=1"))
    expected, got = (rows_without_times(tmp_path / run) for run in ("whole", "broken"))
    assert [row["step"] for row in got] == [1, 2, 3]
    for row, other in zip(got, expected, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
        assert row["expert_load"] == other["expert_load"]  # tokens are counted once
    orders = [start["accumulate"] for start in json.loads((tmp_path / "broken" / "run.json").read_text())["starts"]]
    assert orders == ["by_micro_batch", "by_layer"]


@pytest.mark.slow(why="three launches; data/test_stream.py resumes without ranks")
def test_a_stream_goes_on_at_the_same_rows_on_other_ranks(inputs: Path, tmp_path: Path) -> None:
    options = ["data.stream=true", "data.stream_rows=7", "data.packing=true", "data.shuffle=true", "train.max_steps=5"]
    options += [f"data.eval=[{{path: {inputs / 'train.jsonl'}, max_rows: 3}}]", "checkpoint.every_steps=1"]
    shared_ranks(train, 2, run_config(inputs, tmp_path / "whole", *options))
    broken = run_config(inputs, tmp_path / "broken", *options)
    shared_ranks(train_steps, 2, broken, 2)
    shared_ranks(train_steps, 1, broken, 1)
    shared_ranks(train, 4, broken)
    expected, got = (rows_without_times(tmp_path / run) for run in ("whole", "broken"))
    assert [row["step"] for row in got] == [row["step"] for row in expected] == [1, 2, 3, 4, 5, 5]
    for row, other in zip(got, expected, strict=True):
        assert row.get("target_tokens") == other.get("target_tokens")
        key = "loss" if "loss" in row else "eval_loss"
        assert row[key] == pytest.approx(other[key], rel=1e-5)
    assert got[:2] == expected[:2]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.max_steps=null"], "a stream has no end; set train.max_steps"),
        (["train.num_epochs=2"], "a stream begins again until train.max_steps"),
        (["objective={name: dpo}", "data.format=preference"], "objective dpo needs all pairs before the first step"),
    ],
)
def test_what_a_stream_cannot_be_is_refused(inputs: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        run_config(inputs, inputs / "any", "data.stream=true", *overrides)
