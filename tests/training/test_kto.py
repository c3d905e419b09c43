"""kto in every layout equals the unsharded model under TRL's KTOTrainer; planted bugs; what is kept and refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from expertmesh.config import Config, DataConfig, ObjectiveConfig
from expertmesh.config.objective import OBJECTIVES
from expertmesh.data import Recipe, TokenizedDataset, build_dataset, loader
from expertmesh.data.formats import UNPAIRED
from expertmesh.step.objectives import Kto, objective_of
from expertmesh.training.run import train
from tests.data.tokenizers_on_the_fly import CHATML, bpe_tokenizer
from tests.support.errors import refused, refused_on_ranks
from tests.support.ranks import shared_ranks
from tests.support.reference import worst
from tests.training.dpo_by_trl import ByTrl
from tests.training.kto_by_trl import (
    EVALUATED,
    FIGURES,
    ROWS,
    STEPS,
    kl_of_own_rows,
    kto_config,
    train_kto_by_hand,
    train_kto_by_trl,
)
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
        for name in ("loss", "grad_norm"):
            assert row[name] == pytest.approx(want[name], rel=tolerance), (name, row["step"])
        for name in FIGURES:
            # TRL leaves out the rewards of a step that has no such row. They are differences of sums of hundreds.
            if name in want:
                assert row[name] == pytest.approx(want[name], rel=tolerance, abs=10 * tolerance), (name, row["step"])
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


@pytest.mark.slow_cases(r"(?!pp$).*", why="stages stay, and ep with cp in fp64")
@pytest.mark.parametrize("layout", CASES)
def test_every_layout_equals_trls_trainer(inputs: Path, tmp_path: Path, expected: ByTrl, layout: str) -> None:
    world, options = CASES[layout]
    (inputs / "evaluated.jsonl").write_text("".join(json.dumps(row) + "\n" for row in EVALUATED))
    config = kto_config(inputs, tmp_path / "run", *options, f"data.eval={inputs / 'evaluated.jsonl'}")
    check(tmp_path / "run", shared_ranks(train_keeping_gradients, world, config)[0], expected, 1e-5)
    row = metrics(tmp_path / "run")[-1]
    assert row["eval_kl"] > 0.01
    for name in ("eval_loss", *(f"eval_{name}" for name in FIGURES)):
        assert row[name] == pytest.approx(expected.evaluation[name], rel=1e-4, abs=1e-4), name


def test_the_plain_formula_in_fp64(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float64).save_pretrained(inputs / "model")
    config = kto_config(inputs, tmp_path / "run", *EXACT, "parallel.ep=2", "parallel.cp=2")
    model = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float64, experts_implementation="eager")
    by_hand = train_kto_by_hand(config, model)
    check(tmp_path / "run", shared_ranks(train_keeping_gradients, 2, config)[0], by_hand, 1e-10)


@pytest.mark.slow(why="runs of TRL; the whole model's layouts stay")
@pytest.mark.parametrize("layout", ["tp", "replicate", "all"])
def test_adapters_equal_stock_pefts_under_trl(inputs: Path, tmp_path: Path, layout: str) -> None:
    world, options = ADAPTED[layout]
    config = kto_config(inputs, tmp_path / "run", LORA, EPS, *options)
    shared_ranks(start_adapter, 1, config, tmp_path / "start")
    base = AutoModelForCausalLM.from_pretrained(inputs / "model")
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "start"), is_trainable=True)
    by_trl = train_kto_by_trl(config, tmp_path / "trl", adapted)
    check(tmp_path / "run", shared_ranks(train_keeping_gradients, world, config)[0], by_trl, 1e-5)


def _own_kl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kto, "measured", kl_of_own_rows)


def _other_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every label is the other one."""
    batches = loader.BatchLayout.micro_batches

    def wrong(self: Any, *args: Any) -> Any:
        for batch in batches(self, *args):
            yield {**batch, "desirable": ~batch["desirable"]} if "desirable" in batch else batch

    monkeypatch.setattr(loader.BatchLayout, "micro_batches", wrong)


def _own_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are not mismatched."""
    monkeypatch.setattr(loader.np, "roll", lambda step, places: step)


@pytest.mark.slow_cases("_own_completion", why="fp64 has the rows written out")
@pytest.mark.parametrize("bug", [_own_kl, _other_label, _own_completion])
def test_a_planted_bug_is_seen(
    inputs: Path, tmp_path: Path, expected: ByTrl, bug: Callable[[pytest.MonkeyPatch], None]
) -> None:
    config = kto_config(inputs, tmp_path / "run", "parallel.ep=2")
    shared_ranks(train_with, 2, config, bug)
    rows = [row for row in metrics(tmp_path / "run") if "loss" in row]
    errors = [abs(row["loss"] - want["loss"]) for row, want in zip(rows, expected.rows, strict=True)]
    assert max(errors) > 1e-3, errors


def train_with(config: Config, bug: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        train(config)


@pytest.mark.slow(why="test_dpo.py has the reference on resume; what is refused on resume is among it")
def test_a_run_goes_on_with_the_reference_it_began_with(inputs: Path, tmp_path: Path) -> None:
    source = f"[{{path: {inputs / 'rows.jsonl'}, max_rows: 6}}]"  # two steps
    options = [f"data.train={source}", f"data.eval={source}", "parallel.ep=2", "data.shuffle=true"]
    options += ["train.num_epochs=2", "train.max_steps=3"]
    shared_ranks(train, 2, kto_config(inputs, tmp_path / "whole", *options))
    shared_ranks(train_steps, 2, kto_config(inputs, tmp_path / "broken", *options), 1)
    with refused_on_ranks("checkpoint.no-reference", naming="for the 10 rows that the run was to have, not for 12"):
        shared_ranks(train, 1, kto_config(inputs, tmp_path / "broken", *options, "train.max_steps=4", "parallel.ep=1"))
    shared_ranks(train, 2, kto_config(inputs, tmp_path / "broken", *options))
    assert rows_without_times(tmp_path / "whole") == rows_without_times(tmp_path / "broken")
    assert all(torch.equal(weights(tmp_path / "whole")[n], w) for n, w in weights(tmp_path / "broken").items())
    evaluated = metrics(tmp_path / "whole")[-1]
    assert evaluated.keys() >= {"eval_loss", *(f"eval_{name}" for name in FIGURES)}


def test_what_it_cannot_have_is_refused_before_weights_are_read(inputs: Path, tmp_path: Path) -> None:
    for options, naming in (
        (["data.packing=true"], "data.packing is true, but objective kto"),
        (["data.loss_on=all"], "data.loss_on is all, but with objective kto"),
        (["data.stream=true"], "objective kto needs all rows before the first step, for their reference"),
        (["lora={dropout: 0.1}"], "lora.dropout is 0.1, but objective kto"),
        (["data.format=preference"], "set data.format to unpaired_preference"),
        (["train.global_batch_size=1"], "objective kto needs the completion of another row of each step"),
        (["objective={desirable_weight: 2.0}"], "objective.desirable_weight does nothing with objective.name sft"),
        (["objective={name: sft}", "data.format=unpaired_preference"], "or objective.name to kto"),
    ):
        with refused("config.combination", naming=naming):
            kto_config(inputs, tmp_path / "run", *options)


@pytest.mark.parametrize(
    ("row", "naming"),
    [
        ({"label": "good"}, "'label' is 'good', not true (a desirable completion) or false"),
        ({"label": None}, "'label' is missing or null"),
        ({"completion": " "}, "'completion' is empty"),
        ({"prompt": "a question"}, "both must be alike"),
        ({"completion": [{"role": "user", "content": "a"}]}, "'completion' has a message of role 'user' after"),
        ({"completion": [{"role": "assistant", "content": "a", "weight": 0}]}, "every response is one"),
    ],
)
def test_rows_are_refused_by_name(tmp_path: Path, row: dict[str, Any], naming: str) -> None:
    with refused("data.malformed-row", naming=naming):
        read(tmp_path, [ROWS[1] | row], responses=UNPAIRED)


def read(tmp_path: Path, rows: list[dict[str, Any]], **facts: Any) -> TokenizedDataset:
    """The data set, whose labels are those of the rows."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, tokenizer = DataConfig(train=(str(path),)), bpe_tokenizer(CHATML)
    return build_dataset(Recipe(config.train, config, tokenizer, model_vocab_size=len(tokenizer), **facts))[0]


def test_rows_of_text_and_messages_keep_their_labels(tmp_path: Path) -> None:
    text = [{"prompt": f"{n} ", "completion": "one two", "label": label} for n, label in enumerate((0, 1, "False"))]
    dataset = read(tmp_path, [*ROWS[:3], *text], responses=UNPAIRED)
    assert dataset.desirable is not None
    assert dataset.desirable.tolist() == [row["label"] for row in ROWS[:3]] + [False, True, False]
    swapped = read(tmp_path, [*ROWS[:3], *reversed(text)], responses=UNPAIRED)
    other = read(tmp_path, [ROWS[0] | {"label": True}, *ROWS[1:3], *text], responses=UNPAIRED)
    assert len({each.sha256() for each in (dataset, swapped, other)}) == 3
    mismatched = dataset.mismatched(np.array([3, 4]), np.array([0, 5]), max_length=9)
    for number, (prompt, completion) in enumerate([(3, 0), (4, 5)]):
        own, answer, got = dataset.sample(prompt), dataset.sample(completion), mismatched.sample(number)
        wanted = [*own.input_ids[own.labels == -100], *answer.input_ids[answer.labels != -100]][:9]
        assert got.input_ids.tolist() == wanted
        assert len(got.input_ids) == mismatched.lengths[number]
        assert (got.labels != -100).sum() == mismatched.target_counts[number]


def test_labelled_rows_name_the_objective_that_trains_on_them(tmp_path: Path) -> None:
    with refused("data.other-objective", naming="format unpaired_preference, which only objective.name kto trains on"):
        read(tmp_path, ROWS)
    with refused("data.other-objective", naming="which only objective.name sft or distill trains on"):
        read(tmp_path, [{"messages": ROWS[0]["prompt"] + ROWS[0]["completion"]}], responses=UNPAIRED)
    with refused("data.unknown-format", naming="columns: {completion: response, label: desirable}"):
        read(tmp_path, [{"prompt": "a", "response": "b", "desirable": True}], responses=UNPAIRED)


def test_the_class_reports_what_is_promised() -> None:
    config = ObjectiveConfig(name="kto", desirable_weight=2.0)
    assert objective_of(config, rows=1, target_tokens=1, evaluated=True).figures == OBJECTIVES["kto"].evaluated
    assert config.at_reference is None
    assert ObjectiveConfig(name="kto").at_reference == ("1/2", 0.5)
