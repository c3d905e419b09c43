"""kto in every layout equals the unsharded model under TRL's KTOTrainer; planted bugs; what is kept and refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from expertmesh.config import Config, ObjectiveConfig
from expertmesh.config.objective import OBJECTIVES
from expertmesh.data import loader
from expertmesh.step.objectives import kto, objective_of
from expertmesh.training.run import train
from tests.support.errors import refused, refused_on_ranks
from tests.support.ranks import run_ranks
from tests.support.reference import worst
from tests.training.dpo_by_trl import ByTrl
from tests.training.kto_by_trl import FIGURES, OBJECTIVE, ROWS, STEPS, kto_config, train_kto_by_hand, train_kto_by_trl
from tests.training.test_distill_parity import EXACT, start_adapter
from tests.training.test_dpo_parity import ADAPTED, BY_LAYER, EPS, LAYOUTS, LORA, train_keeping_gradients
from tests.training.tiny_run import metrics, rows_without_times, train_steps, weights, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def expected(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> ByTrl:
    scratch = tmp_path_factory.mktemp("trl")
    return train_kto_by_trl(kto_config(inputs, scratch / "run"), scratch)


def check(output: Path, gradients: dict[str, Tensor], expected: ByTrl, tolerance: float) -> None:
    """Loss, gradient norm and figures of every step, every gradient, the weights at the end."""
    rows = [row for row in metrics(output) if "loss" in row]
    assert len(rows) == len(expected.rows) == STEPS
    assert sum(row["kl"] > 0.01 for row in rows) >= 2
    for row, want in zip(rows, expected.rows, strict=True):
        for name in ("loss", "grad_norm", *FIGURES):
            # TRL leaves out the rewards of a step that has no such row.
            if name in want:
                assert row[name] == pytest.approx(want[name], rel=tolerance, abs=tolerance), (name, row["step"])
    adapter = output / "adapter" / "adapter_model.safetensors"
    trained = load_file(adapter) if adapter.exists() else None
    trained = trained or dict(AutoModelForCausalLM.from_pretrained(output / "model").named_parameters())
    for got, wanted in ((gradients, expected.gradients), (trained, expected.weights)):
        by_key = {name.replace(".default.", "."): tensor for name, tensor in wanted.items()}
        assert worst(got, by_key)[0] <= tolerance, worst(got, by_key)


CASES = {
    **{name: LAYOUTS[name] for name in ("one rank", "fsdp", "tp", "cp", "pp", "all", "replicas of ep")},
    **BY_LAYER,
}


@pytest.mark.slow_cases(r"(?!replicas of ep|pp).*", why="stages stay, and experts with replicas, recomputed")
@pytest.mark.parametrize("layout", CASES)
def test_every_layout_equals_trls_trainer(inputs: Path, tmp_path: Path, expected: ByTrl, layout: str) -> None:
    world, options = CASES[layout]
    config = kto_config(inputs, tmp_path / "run", *options)
    check(tmp_path / "run", run_ranks(train_keeping_gradients, world, config)[0], expected, 1e-5)


def test_the_plain_formula_in_fp64(inputs: Path, tmp_path: Path) -> None:
    config = kto_config(inputs, tmp_path / "run", *EXACT, "save.dtype=float64", "parallel.ep=2", "parallel.cp=2")
    model = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float64, experts_implementation="eager")
    by_hand = train_kto_by_hand(config, model)
    check(tmp_path / "run", run_ranks(train_keeping_gradients, 2, config)[0], by_hand, 1e-10)


@pytest.mark.slow_cases(r"(?!tp).*", why="one axis stays; the whole model has the others")
@pytest.mark.parametrize("layout", ["tp", "replicate", "all"])
def test_adapters_equal_stock_pefts_under_trl(inputs: Path, tmp_path: Path, layout: str) -> None:
    world, options = ADAPTED[layout]
    config = kto_config(inputs, tmp_path / "run", LORA, EPS, *options)
    run_ranks(start_adapter, 1, config, tmp_path / "start")
    base = AutoModelForCausalLM.from_pretrained(inputs / "model")
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "start"), is_trainable=True)
    by_trl = train_kto_by_trl(config, tmp_path / "trl", adapted)
    check(tmp_path / "run", run_ranks(train_keeping_gradients, world, config)[0], by_trl, 1e-5)
