"""Preference runs: planted bugs, what a checkpoint holds of the reference, what is refused before weights are read."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import expertmesh as em
from expertmesh.config import Config, ObjectiveConfig
from expertmesh.config.errors import IntegrityError
from expertmesh.config.objective import OBJECTIVES
from expertmesh.data import loader
from expertmesh.step import loss as loss_module
from expertmesh.step.objectives import OF_PAIRS, Dpo, Orpo, PairObjective, objective_of
from expertmesh.training import objective
from expertmesh.training.objective import first_loss_of_responses_lines
from expertmesh.training.run import train
from expertmesh.training.startup.preflight import preflight
from tests.support.errors import refused, refused_on_ranks
from tests.support.ranks import run_ranks, shared_ranks
from tests.training.dpo_by_trl import FIGURES, preference_config
from tests.training.tiny_run import metrics, rows_without_times, train_steps, weights, write_inputs

LORA = "lora={r: 4, alpha: 8, targets: [attention, experts]}"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def _losses(output: Path) -> list[list[float]]:
    return [[row["loss"], row["grad_norm"], *(row[name] for name in FIGURES)] for row in metrics(output)]


@contextmanager
def _adapters_on(model: nn.Module) -> Iterator[None]:
    yield


def _with_adapters_on(config: Config) -> None:
    with mock.patch.object(objective, "adapters_off", _adapters_on):
        train(config)


def _normalised_by_rank(config: Config) -> None:
    """Each rank divides by its own pairs, and ranks are averaged: right only where all have equally many."""
    term = PairObjective.term

    def own(self: PairObjective, losses: Any, batch: dict[str, Any]) -> Any:
        pairs = int((batch["labels"] != -100).any(dim=1).sum()) // 2
        return term(replace(self, count=max(1, pairs) * dist.get_world_size()), losses, batch)

    with mock.patch.object(PairObjective, "term", own):
        train(config)


def _swapped(config: Config) -> None:
    def swapped(*args: Any) -> Any:
        batch = padded(*args)
        return {key: value.view(-1, 2, *value.shape[1:]).flip(1).flatten(0, 1) for key, value in batch.items()}

    padded = loader.padded_batch
    with mock.patch.object(loader, "padded_batch", swapped):
        train(config)


def _without_the_sum_over_cp(config: Config) -> None:
    with mock.patch.object(loss_module, "dist"):  # nothing else there communicates
        train(config)


def _with_the_current_weights_as_reference(config: Config) -> None:
    """A resumed run that computes its reference anew, from the weights that it goes on with."""
    give = objective.RunObjective.give_reference

    def anew(self: Any, model: Any, mesh: Any, datasets: Any, layout: Any, checkpoint: Any, *mismatched: Any) -> None:
        if checkpoint is not None:
            em.load_checkpoint(model, None, checkpoint)
        give(self, model, mesh, datasets, layout, None, *mismatched)

    with mock.patch.object(objective.RunObjective, "give_reference", anew):
        train(config)


BUGS: dict[str, tuple[Any, list[str]]] = {
    "the reference has its adapters on": (_with_adapters_on, [LORA, "parallel.ep=2"]),
    "normalised by rank": (_normalised_by_rank, ["parallel.ep=2", "train.micro_batch_size=2"]),
    "chosen and rejected are swapped": (_swapped, ["parallel.ep=2"]),
    "log-probabilities are not summed over cp": (_without_the_sum_over_cp, ["parallel.cp=2"]),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_show(inputs: Path, tmp_path: Path, bug: str) -> None:
    train_wrongly, options = BUGS[bug]
    configs = [preference_config(inputs, tmp_path / name, *options) for name in ("sound", "bug")]
    shared_ranks(lambda: [run(config) for run, config in zip((train, train_wrongly), configs, strict=True)], 2)
    sound, wrong = _losses(tmp_path / "sound"), _losses(tmp_path / "bug")
    assert float((torch.tensor(sound) - torch.tensor(wrong)).abs().max()) > 1e-3


@pytest.mark.slow(why="five launches; what is refused on resume stays, and every planted bug of the loss")
def test_a_resumed_run_keeps_the_reference_it_began_with(inputs: Path, tmp_path: Path) -> None:
    options = [f"data.eval=[{{path: {inputs / 'pairs.jsonl'}}}]", "train.eval_every_steps=2", "parallel.ep=2"]
    shared_ranks(train, 2, preference_config(inputs, tmp_path / "whole", *options))
    for name in ("broken", "bug"):
        shared_ranks(train_steps, 2, preference_config(inputs, tmp_path / name, *options), 2)
    shared_ranks(train, 2, preference_config(inputs, tmp_path / "broken", *options))
    whole, broken = rows_without_times(tmp_path / "whole"), rows_without_times(tmp_path / "broken")
    assert whole == broken
    assert all(torch.equal(weights(tmp_path / "whole")[n], w) for n, w in weights(tmp_path / "broken").items())
    shared_ranks(_with_the_current_weights_as_reference, 2, preference_config(inputs, tmp_path / "bug", *options))
    steps = [[row["loss"] for row in metrics(tmp_path / name) if "loss" in row] for name in ("whole", "bug")]
    assert abs(steps[0][2] - steps[1][2]) > 1e-3


@pytest.mark.slow(why="checkpoint/ tests it; the resume on the same layout stays")
def test_a_run_goes_on_in_another_layout(inputs: Path, tmp_path: Path) -> None:
    shared_ranks(train, 2, preference_config(inputs, tmp_path / "whole", "parallel.ep=2"))
    shared_ranks(train_steps, 2, preference_config(inputs, tmp_path / "broken", "parallel.ep=2"), 2)
    shared_ranks(train, 2, preference_config(inputs, tmp_path / "broken", "parallel.pp=2", "parallel.ep=1"))
    for row, other in zip(_losses(tmp_path / "whole"), _losses(tmp_path / "broken"), strict=True):
        assert other == pytest.approx(row, rel=1e-5, abs=1e-5)


def test_other_evaluation_data_and_a_damaged_reference_are_refused_on_resume(inputs: Path, tmp_path: Path) -> None:
    config = preference_config(inputs, tmp_path / "run")
    shared_ranks(train_steps, 1, config, 2)
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"}))
    with refused_on_ranks("checkpoint.no-reference"):
        shared_ranks(train, 1, preference_config(inputs, tmp_path / "run", f"data.eval=[{{path: {other}}}]"))
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    file = checkpoint / objective.REFERENCE_FILE
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with refused_on_ranks("checkpoint.damaged", IntegrityError):
        shared_ranks(train, 1, preference_config(inputs, tmp_path / "run"))


def test_a_run_with_adapters_may_go_on_with_other_evaluation_data(inputs: Path, tmp_path: Path) -> None:
    shared_ranks(train_steps, 1, preference_config(inputs, tmp_path / "run", LORA), 2)
    assert not (tmp_path / "run" / "checkpoints" / "step-00000002" / objective.REFERENCE_FILE).exists()
    shared_ranks(
        train, 1, preference_config(inputs, tmp_path / "run", LORA, f"data.eval=[{{path: {inputs / 'pairs.jsonl'}}}]")
    )
    assert metrics(tmp_path / "run")[-1].keys() >= {"eval_loss", *(f"eval_{name}" for name in FIGURES)}


def test_the_plan_and_the_first_loss_are_said(inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(train, 1, preference_config(inputs, tmp_path / "run", LORA, "train.max_steps=1"))
    said = capfd.readouterr().out
    assert "objective  dpo, beta 0.2; reference: the base with adapters off\n" in said
    assert "batch      4 pairs = 1 micro-batch × 1 data ranks × 4 accumulation\n" in said
    assert "first loss 0.6931 before any update; a model that equals its reference has ln 2 = 0.6931\n" in said
    assert "warning" not in said
    dpo = ObjectiveConfig(name="dpo")
    (warning,) = [line for line in first_loss_of_responses_lines(dpo, 0.9) if line.startswith("warning")]
    assert "the reference is not the model that training starts from" in warning
    assert not list(first_loss_of_responses_lines(dpo, float("nan")))


def test_what_a_preference_run_cannot_have_is_refused_before_weights_are_read(inputs: Path, tmp_path: Path) -> None:
    with refused("config.combination", naming="data.packing is true, but objective dpo"):
        preference_config(inputs, tmp_path / "run", "data.packing=true")
    with refused("config.combination", naming="data.loss_on is all, but with objective dpo"):
        preference_config(inputs, tmp_path / "run", "data.loss_on=all")
    with refused("config.combination", naming="lora.dropout is 0.1, but objective dpo"):
        preference_config(inputs, tmp_path / "run", "lora={dropout: 0.1}")
    with refused("config.combination", naming="data.format is text, but objective.name is dpo"):
        preference_config(inputs, tmp_path / "run", "data.format=text")
    with refused("config.combination", naming="objective.beta does nothing with objective.name sft"):
        preference_config(inputs, tmp_path / "run", "objective={beta: 0.1}")
    with refused(
        "config.combination", naming="objective.gamma does nothing with objective.name orpo; remove it or use s"
    ):
        preference_config(inputs, tmp_path / "run", "objective={name: orpo, gamma: 0.1}")
    with refused("config.combination", naming="objective simpo takes its rows in twos, which a stream"):
        preference_config(inputs, tmp_path / "run", "objective={name: simpo}", "data.stream=true")
    noisy, simpo = write_inputs(tmp_path / "noisy", attention_dropout=0.1), "objective={name: simpo}"
    with refused("model.noise-in-training", naming="objective.name dpo: qwen3_moe has attention_dropout 0.1"):
        preflight(preference_config(noisy, tmp_path / "run"), 1)
    # Without a reference there is nothing that noise would set the model apart from.
    preflight(preference_config(noisy, tmp_path / "run", simpo, "lora={dropout: 0.1}"), 1)


def test_a_batch_without_a_reference_is_refused() -> None:
    with refused("data.no-reference"):
        Dpo(beta=0.1, count=1).term(mock.Mock(by_row=lambda: torch.zeros(2)), {"labels": torch.zeros(2, 4)})


def test_every_objective_of_pairs_has_a_class_that_reports_what_is_promised() -> None:
    facts = {name: each for name, each in OBJECTIVES.items() if each.format == "preference"}
    assert OF_PAIRS.keys() == facts.keys()
    for name in facts:
        made = objective_of(ObjectiveConfig(name=name), rows=1, target_tokens=1, evaluated=True)
        assert made.figures == facts[name].evaluated


def test_a_response_that_is_certain_leaves_orpos_gradient_finite() -> None:
    score_P = torch.tensor([0.0, -1e-15, -1.0], dtype=torch.float64, requires_grad=True)
    loss_P = Orpo(beta=1.0, count=1).pair_losses(score_P, score_P.flip(0))
    (gradient_P,) = torch.autograd.grad(loss_P.sum(), score_P)
    assert loss_P.isfinite().all()
    assert gradient_P.isfinite().all()
