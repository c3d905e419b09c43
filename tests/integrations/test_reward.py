"""`em.trainer(RewardTrainer)` computes what the stock RewardTrainer computes on the unsharded model in one process.

The model is read from the files of a language model: its head is new, and has the values that the stock class draws.
"""

import functools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification
from trl import RewardTrainer

import expertmesh as em
from expertmesh.weights.first_values import start_head
from tests.adapters.reference import random_adapter
from tests.integrations.support import ONE_LAYER, Job, Result, accumulating, compare, sharded, stock
from tests.integrations.test_dpo import pairs
from tests.integrations.test_sft import ATTENTION_AND_EXPERTS, of_files, saved_adapter
from tests.support.models import tiny_config, tiny_model

IDS_BS = torch.randint(3, 96, (3, 8), generator=torch.Generator().manual_seed(1))
# The least and the greatest reward are means over micro-batches, which ranks gather and one process does not.
LOGGED = ("loss", "accuracy", "margin", "mean_reward")
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_model("qwen3_moe", **ONE_LAYER).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def _job(base: Path, args: dict[str, Any], **options: Any) -> Job:
    return Job(base.parent / "run", kind=RewardTrainer, args=args, rows=pairs, model=str(base), **options)


@pytest.mark.slow(why="test_sft.py stays, and the planted bug here")
@pytest.mark.parametrize(
    ("world", "parallel", "args"),
    [
        pytest.param(2, {"ep": 2}, EVALUATED, id="accumulated"),
        pytest.param(4, {"ep": 2, "replicate": 2}, {"center_rewards_coefficient": 0.1}, id="replicas, centered"),
        pytest.param(2, {"ep": 2}, {"gradient_checkpointing": True, "seed": 7}, id="checkpointed, another seed"),
    ],
)
def test_losses_rewards_and_weights_equal_the_stock_trainer(
    world: int, parallel: dict[str, Any], args: dict[str, Any], base: Path
) -> None:
    job = _job(base, args)
    expected = accumulating(job, world)
    expected = replace(expected, args={k: v for k, v in expected.args.items() if k != "gradient_checkpointing"})
    ours, theirs = sharded(job, world, **parallel), stock(expected)
    assert all(torch.equal(ours.initial[name], values) for name, values in theirs.initial.items())
    # Rewards add up to nearly nothing: 1e-6 is 1e-5 of the terms.
    compare(ours, theirs, keys=LOGGED, absolute=1e-6)


@pytest.mark.slow(why="test_sft.py stays, and the planted bug here")
def test_a_model_in_memory(base: Path) -> None:
    torch.manual_seed(1)
    config = tiny_config("mixtral", num_labels=1)
    model: Any = AutoModelForSequenceClassification.from_config(config)
    job = replace(_job(base, {"max_steps": 2}), model=model)
    compare(sharded(job, 2, ep=2), stock(accumulating(job, 2)), keys=LOGGED)


def test_a_head_that_differs_is_seen(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    another: Any = lambda model, names, seed: start_head(model, names, seed + 1)  # noqa: E731
    monkeypatch.setattr("expertmesh.model.start_head", another)
    job = _job(base, {"max_steps": 1})
    with pytest.raises(AssertionError, match="loss"):
        compare(sharded(job, 2, ep=2), stock(accumulating(job, 2)))


@pytest.mark.slow(why="test_sft.py stays, and the planted bug here")
def test_saved_it_is_what_stock_transformers_loads_and_training_goes_on_from_it(base: Path) -> None:
    trained = sharded(_job(base, {"max_steps": 2}, after=_saved), 2, ep=2)
    directory = Path(trained.extra)
    assert not any(name.startswith("lm_head") for name in load_file(directory / "model.safetensors"))
    loaded, about = AutoModelForSequenceClassification.from_pretrained(directory, output_loading_info=True)
    assert not about["missing_keys"]
    assert not about["unexpected_keys"]
    assert type(loaded).__name__ == "Qwen3MoeForSequenceClassification"
    assert loaded.config.num_labels == 1
    assert _equal(trained, dict(loaded.named_parameters()))
    going_on = sharded(replace(_job(directory, {"max_steps": 1}), output=base.parent / "on"), 4, ep=4)
    assert _equal(trained, going_on.initial)


@pytest.mark.slow(why="test_sft.py stays, and the planted bug here")
def test_resumed_it_ends_with_the_weights_of_the_run_that_was_not_stopped(base: Path) -> None:
    job = _job(base, {"save_strategy": "steps", "save_steps": 2})
    whole = sharded(job, 2, ep=2)
    shutil.rmtree(job.output / "checkpoint-4")
    resumed = sharded(replace(job, resume=True), 2, ep=2)
    assert len(resumed.rates) == 2
    assert _equal(whole, resumed.weights)


@pytest.mark.slow(why="test_sft.py stays, and the planted bug here")
def test_adapters_and_the_head_are_those_that_peft_reads(base: Path) -> None:
    lora = em.LoraConfig(r=2, targets=("attention", "experts"))
    job = _job(base, {"max_steps": 2, "learning_rate": 1e-2}, given={"lora": lora}, after=_rewards)
    trained = sharded(job, 2, ep=2)
    directory, rewards = trained.extra
    auto: Any = AutoModelForSequenceClassification
    adapted = peft.PeftModel.from_pretrained(auto.from_pretrained(base, num_labels=1, pad_token_id=0), directory).eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(input_ids=IDS_BS).logits, rewards, rtol=1e-5, atol=1e-6)
    start = trained.initial["score.weight_lora_W"]
    assert not torch.equal(adapted.base_model.model.score.modules_to_save.default.weight, start)


@pytest.mark.slow(why="test_sft.py stays, and the planted bug here")
@pytest.mark.parametrize("wraps", [False, True], ids=["directory", "PeftModel"])
def test_adapters_of_a_classifier_equal_stock_peft(wraps: bool, base: Path) -> None:
    """With task_type SEQ_CLS, by which PEFT trains the head too."""
    directory = base.parent / "start"
    random_adapter(_classifier(base), directory, *ATTENTION_AND_EXPERTS, task_type="SEQ_CLS")
    wrapped = functools.partial(peft.PeftModel.from_pretrained, model_id=directory, is_trainable=True)
    job = _job(base, {"gradient_accumulation_steps": 2}, after=saved_adapter)
    of_peft = replace(job, model=_classifier(base), prepare=wrapped)
    lora = em.LoraConfig(from_adapter=str(directory))
    ours = sharded(of_peft if wraps else replace(job, given={"lora": lora}), 2, ep=2)
    expected, first = stock(accumulating(of_peft, 2)), load_file(directory / "adapter_model.safetensors")
    assert "base_model.model.score.weight" in first
    compare(of_files(ours, first), of_files(expected, first), keys=LOGGED, absolute=1e-6)


def _classifier(base: Path) -> Any:
    auto: Any = AutoModelForSequenceClassification
    torch.manual_seed(3)
    return auto.from_pretrained(base, num_labels=1, pad_token_id=0)


def _rewards(trainer: Any) -> tuple[str, torch.Tensor]:
    directory = Path(trainer.args.output_dir) / "adapter"
    em.save_adapter(trainer.model, directory)
    with torch.no_grad():
        return str(directory), trainer.model.eval()(input_ids=IDS_BS).logits


def _saved(trainer: Any) -> str:
    directory = Path(trainer.args.output_dir) / "reward"
    trainer.save_model(str(directory))
    return str(directory)


def _equal(result: Result, weights: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(weights[name], values) for name, values in result.weights.items())
