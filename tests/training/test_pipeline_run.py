"""Runs with pipeline stages: the losses, files and metrics of a run without, across a resume, with adapters."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file

from expertmesh.config import Config
from expertmesh.export.checkpoint import export
from expertmesh.step import forward_backward
from expertmesh.step.loss import Term
from expertmesh.training.run import train
from expertmesh.training.startup.preflight import preflight
from tests.support.errors import refused
from tests.support.ranks import run_ranks, shared_ranks
from tests.training.tiny_run import (
    loads_of_experts,
    metrics,
    rows_without_times,
    run_config,
    train_steps,
    weights,
    write_inputs,
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"), "deepseek_v3")


def _options(inputs: Path) -> list[str]:
    """Evaluation, a last step of an epoch with fewer micro-batches, biases that move, and the load of each layer."""
    return [
        f"data.eval=[{{path: {inputs / 'train.jsonl'}}}]",
        "train.max_steps=5",
        "train.num_epochs=2",
        "train.micro_batch_size=2",
        "moe.bias_update_rate=0.01",
        "moe.z_loss_coef=0.01",
        "log.every_steps=2",
        "parallel.ep=1",
    ]


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole") / "run"
    shared_ranks(train, 1, run_config(inputs, output, *_options(inputs)))
    return output


def _check_equal(one: Path, other: Path) -> None:
    rows, others = rows_without_times(one), rows_without_times(other)
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    for row, expected in zip(rows, others, strict=True):
        assert row.keys() == expected.keys()
        for key in row.keys() - {"expert_load", "expert_tokens"}:
            assert row[key] == pytest.approx(expected[key], rel=1e-5), key
        assert loads_of_experts(row) == loads_of_experts(expected)
        assert row.get("expert_tokens") == expected.get("expert_tokens")
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert (ours[name] - theirs[name]).norm() <= 1e-5 * theirs[name].norm(), name


@pytest.mark.slow_cases(r"(4-.*|2-parallel0)", why="two ranks and another schedule stay")
@pytest.mark.parametrize(
    ("world", "parallel"),
    [(2, ["pp=2"]), (2, ["pp=2", "pp_schedule=gpipe"]), (4, ["pp=2", "ep=2"]), (4, ["pp=2", "replicate=2"])],
)
def test_a_run_with_stages_gives_the_metrics_and_the_model_of_one_without(
    inputs: Path, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], world: int, parallel: list[str]
) -> None:
    options = [*_options(inputs), *(f"parallel.{each}" for each in parallel)]
    run_ranks(train, world, run_config(inputs, tmp_path / "run", *options))
    _check_equal(tmp_path / "run", whole)
    printed = capfd.readouterr().out
    stage = "rank 1" if world == 2 else "ranks 2 to 3"
    assert f"stages     1: block 1, final norm and head on {stage}" in printed


@pytest.mark.slow(why="checkpoint/test_stages.py without the trainer")
def test_a_run_goes_on_with_and_without_stages(inputs: Path, whole: Path, tmp_path: Path) -> None:
    options, output = _options(inputs), tmp_path / "run"
    shared_ranks(train_steps, 2, run_config(inputs, output, *options, "parallel.pp=2"), 1)
    shared_ranks(train_steps, 2, run_config(inputs, output, *options, "parallel.ep=2"), 2)
    shared_ranks(train, 4, run_config(inputs, output, *options, "parallel.pp=2", "parallel.ep=2"))
    _check_equal(output, whole)
    export(output / "checkpoints" / "step-00000003", tmp_path / "exported")
    assert load_file(tmp_path / "exported" / "model.safetensors").keys() == weights(output).keys()


@pytest.mark.slow(why="full weights with stages stay")
def test_adapters_are_the_same_with_stages(inputs: Path, tmp_path: Path) -> None:
    lora = "lora={r: 4, alpha: 8, targets: [attention, experts, router], dropout: 0.3}"
    for name, world, parallel in (("whole", 1, "ep=1"), ("stages", 2, "pp=2")):
        shared_ranks(train, world, run_config(inputs, tmp_path / name, lora, "parallel.ep=1", f"parallel.{parallel}"))
    ours, theirs = (
        load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("stages", "whole")
    )
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert (ours[name] - theirs[name]).norm() <= 1e-5 * theirs[name].norm().clamp_min(1e-12), name
    losses = [[row["loss"] for row in metrics(tmp_path / name)] for name in ("stages", "whole")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    configs = [
        json.loads((tmp_path / name / "adapter" / "adapter_config.json").read_text()) for name in ("stages", "whole")
    ]
    assert configs[0] == configs[1]


def _train_with_a_bad_loss(config: Config) -> None:
    real, calls = forward_backward.loss_of_base, 0

    def poisoned(*args: Any, **kwargs: Any) -> Term:
        nonlocal calls
        calls += 1
        term = real(*args, **kwargs)
        # The second micro-batch of the second step.
        return replace(term, loss=term.loss * float("nan")) if calls == 6 else term

    with mock.patch.object(forward_backward, "loss_of_base", poisoned):
        train(config)


def test_a_loss_that_is_not_finite_skips_the_step_on_every_stage(inputs: Path, tmp_path: Path) -> None:
    shared_ranks(_train_with_a_bad_loss, 2, run_config(inputs, tmp_path / "run", "parallel.ep=1", "parallel.pp=2"))
    rows = metrics(tmp_path / "run")
    assert [row.get("skipped") for row in rows] == [None, "the loss is nan on rank 1", None]


@pytest.mark.parametrize(
    ("options", "key", "named"),
    [
        (["parallel.pp=3", "train.global_batch_size=6"], "layout.pp-exceeds-blocks", "3 stages"),
        (["parallel.pp=2", "parallel.pp_virtual_stages=2"], "layout.pp-exceeds-blocks", "2 × 2 virtual stages"),
        (["lora={targets: [layers.1.self_attn.o_proj]}", "parallel.pp=2"], "layout.pp-untrained-stage", "stage 0"),
    ],
)
def test_stages_that_cannot_be_are_refused_before_ranks_start(
    inputs: Path, tmp_path: Path, options: list[str], key: str, named: str
) -> None:
    config: Any = run_config(inputs, tmp_path / "run", "parallel.ep=1", *options)
    with refused(key, naming=named):
        preflight(config, config.parallel.pp)
