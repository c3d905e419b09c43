"""Options of Trainers, of which each changes what is computed, against the stock class under DDP on as many ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import Trainer

from tests.integrations.support import ONE_LAYER, Job, compare, even_rows, sharded, stock, uneven_rows

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}


def _accuracy(predictions: Any) -> dict[str, float]:
    logits, labels = predictions.predictions[..., :-1, :], predictions.label_ids[..., 1:]
    kept = labels != -100
    return {"accuracy": float((logits.argmax(-1) == labels)[kept].mean()), "mean": float(np.abs(logits[kept]).mean())}


OPTIONS: dict[str, dict[str, Any]] = {
    "neftune, label smoothing": {"neftune_noise_alpha": 5.0, "label_smoothing_factor": 0.1, "weight_decay": 0.1},
    "grouped by length, tokens averaged within ranks": {
        "train_sampling_strategy": "group_by_length",
        "average_tokens_across_devices": False,
        "gradient_accumulation_steps": 2,
        "include_num_input_tokens_seen": "all",
    },
    "metrics": {**EVALUATED, "eval_accumulation_steps": 1, "lr_scheduler_type": "reduce_lr_on_plateau"},
    "split batches": {
        "accelerator_config": {"split_batches": True},
        "dataloader_drop_last": True,
        "num_train_epochs": 1,
        "max_steps": -1,
    },
}


@pytest.mark.slow(why="each launches a stock job under DDP as well; test_sft.py stays")
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_means_what_it_means_under_ddp(option: str, tmp_path: Path) -> None:
    given = {"compute_metrics": _accuracy} if option == "metrics" else {}
    job = Job(tmp_path, args=OPTIONS[option], given=given, changes=ONE_LAYER)
    ours, expected = sharded(job, 2, ep=2), stock(job, 2)
    keys = {key for row in expected.logs for key in row if key.startswith(("eval_", "num_", "mean_token", "entropy"))}
    timed = {key for key in keys if "runtime" in key or "per_second" in key or "preparation" in key}
    compare(ours, expected, keys=("loss", *sorted(keys - timed)))
    if option == "metrics":
        assert "eval_accuracy" in keys


@pytest.mark.slow(why="each launches a stock job under DDP as well; test_sft.py stays")
def test_a_stream_of_rows_is_shared_out_as_under_ddp(tmp_path: Path) -> None:
    rows = Dataset.from_list(uneven_rows()).to_iterable_dataset()
    job = Job(tmp_path, given={"train_dataset": rows}, changes=ONE_LAYER)
    compare(sharded(job, 2, ep=2), stock(job, 2))


@pytest.mark.slow(why="each launches a stock job under DDP as well; test_sft.py stays")
@pytest.mark.parametrize(
    "args",
    [
        pytest.param({"gradient_accumulation_steps": 2, **EVALUATED}, id="accumulated"),
        pytest.param({"label_smoothing_factor": 0.1}, id="label smoothing"),
        pytest.param({"gradient_checkpointing": True, "optim": "adamw_torch"}, id="checkpointed"),
    ],
)
def test_the_plain_trainer_is_the_same_as_under_ddp(args: dict[str, Any], tmp_path: Path) -> None:
    job = Job(tmp_path, kind=Trainer, args=args, changes=ONE_LAYER, rows=even_rows)
    expected = {key: value for key, value in args.items() if key != "gradient_checkpointing"}
    compare(sharded(job, 2, ep=2), stock(replace(job, args=expected), 2))
