"""`em.trainer(DPOTrainer)` computes what the stock DPOTrainer computes on unsharded models in one process."""

import functools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, load_dataset
from peft import PeftModel
from safetensors.torch import load_file
from trl import DPOTrainer

import expertmesh as em
from tests.adapters.reference import random_adapter
from tests.integrations.support import ONE_LAYER, Job, accumulating, compare, sharded, stock
from tests.integrations.test_sft import ATTENTION_AND_EXPERTS, of_files, saved_adapter
from tests.support.models import tiny_model

# Rewards are small differences of these, in which fp32 leaves fewer digits.
LOGGED = ("loss", "rewards/accuracies", "logps/chosen", "logps/rejected")
LOSSES = [
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
]
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2}


def pairs() -> list[dict[str, str]]:
    """Prompts with a chosen and a rejected completion of very different lengths."""
    drawn = random.Random(7)
    words = [f"w{number}" for number in range(3, 96)]

    def text(count: int) -> str:
        return " ".join(drawn.choices(words, k=count))

    return [
        {"prompt": text(3 + n % 5) + " ", "chosen": text(1 + n * 5 % 17), "rejected": text(1 + n * 3 % 11)}
        for n in range(48)
    ]


def _job(tmp_path: Path, args: dict[str, Any], **given: Any) -> Job:
    args = {"beta": 0.5, "learning_rate": 1e-3, **args}
    return Job(tmp_path, kind=DPOTrainer, args=args, given=given, changes=ONE_LAYER, rows=pairs)


_model = functools.partial(tiny_model, "qwen3_moe", **ONE_LAYER)


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """The model in a directory, from which the stock trainer reads its reference."""
    _model().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.mark.slow(why="test_sft.py stays")
@pytest.mark.parametrize(
    ("world", "args"),
    [
        pytest.param(2, EVALUATED, id="accumulated"),
        pytest.param(4, {"router_aux_loss_coef": 0.05}, id="auxiliary loss"),
        pytest.param(2, {"gradient_checkpointing": True, "loss_type": ["ipo"]}, id="checkpointed, ipo"),
    ],
)
def test_full_training_against_a_second_sharded_model(world: int, args: dict[str, Any], saved: str) -> None:
    job = replace(_job(Path(saved).parent, args), model=saved)
    expected = accumulating(job, world)
    expected = replace(expected, args={k: v for k, v in expected.args.items() if k != "gradient_checkpointing"})
    compare(sharded(job, world, ep=2), stock(expected), keys=LOGGED)


@pytest.mark.slow(why="test_sft.py stays")
@pytest.mark.parametrize(
    "args",
    [
        pytest.param({"loss_type": LOSSES}, id="all losses"),
        *(
            pytest.param({"loss_type": ["sigmoid", "exo_pair"], "f_divergence_type": kind}, id=kind)
            for kind in ("forward_kl", "js_divergence", "alpha_divergence")
        ),
    ],
)
def test_every_loss_is_the_stock_trainers_in_fp64(args: dict[str, Any], tmp_path: Path) -> None:
    """At a small rate weights move by little more than fp32 rounds; in fp64 nothing is left of the distance."""
    model = functools.partial(_model, dtype=torch.float64)
    own = {"max_steps": 2, "learning_rate": 1e-6, "label_smoothing": 1e-3}
    job = replace(_job(tmp_path, {**own, **args}), prepare=lambda _: model())
    expected = replace(accumulating(job, 2), given={"ref_model": model()})
    compare(sharded(job, 2, ep=2), stock(expected), relative=1e-10, of_move=1e-9)


@pytest.mark.slow(why="test_sft.py stays")
def test_a_model_in_memory_is_its_own_reference(tmp_path: Path, saved: str) -> None:
    job = _job(tmp_path, {"max_steps": 2})
    compare(sharded(job, 2, ep=2), stock(replace(accumulating(job, 2), model=saved)), keys=LOGGED)


@pytest.mark.slow(why="test_sft.py stays")
def test_a_reference_of_ones_own(tmp_path: Path, saved: str) -> None:
    """In memory, beside a policy that is read from a directory."""
    other = _model(seed=3)
    job = replace(_job(tmp_path, {"max_steps": 2}, ref_model=other), model=saved)
    compare(sharded(job, 2, ep=2), stock(accumulating(job, 2)), keys=LOGGED)


@pytest.mark.slow(why="test_sft.py stays")
def test_adapters_off_are_the_reference(tmp_path: Path) -> None:
    random_adapter(_model(), tmp_path / "start", *ATTENTION_AND_EXPERTS)
    wrapped = functools.partial(PeftModel.from_pretrained, model_id=tmp_path / "start", is_trainable=True)
    job = replace(_job(tmp_path, EVALUATED), after=saved_adapter)
    lora = em.LoraConfig(from_adapter=str(tmp_path / "start"))
    ours = sharded(replace(job, given={"lora": lora}), 2, ep=2)
    # PEFT's own reference for a loaded adapter is a copy of it; the base is what was asked for here.
    expected = stock(replace(accumulating(job, 2), prepare=wrapped, given={"ref_model": _model()}))
    first = load_file(tmp_path / "start" / "adapter_model.safetensors")
    compare(of_files(ours, first), of_files(expected, first), keys=LOGGED)


@pytest.mark.slow(why="test_sft.py stays")
@pytest.mark.parametrize("trained", ["full", "adapters", "adapters beside nf4"])
def test_log_probabilities_of_the_reference_computed_before(trained: str, tmp_path: Path, saved: str) -> None:
    """From a file of its own in each run, as TRL keeps them beside the data."""

    def rows(name: str) -> Dataset:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs()))
        files = str(directory / "pairs.jsonl")
        return load_dataset("json", data_files=files, split="train", cache_dir=str(directory / "cache"))

    given: dict[str, Any] = {"train_dataset": rows("before")}
    if trained != "full":
        given["lora"] = em.LoraConfig(r=4, targets=["attention", "experts"])
    if trained == "adapters beside nf4":
        given["precision"] = em.PrecisionConfig(compute="float32", frozen="nf4")
    job = replace(_job(tmp_path, {"max_steps": 2}, **given), model=saved)
    args = {**job.args, "precompute_ref_log_probs": True}
    ours = sharded(replace(job, args=args, output=tmp_path / "ours"), 2, ep=2)
    compare(ours, sharded(replace(job, given={**given, "train_dataset": rows("while")}), 2, ep=2), keys=LOGGED)
