"""`em.trainer(GRPOTrainer)`: completions that ranks generate in lockstep, rewards and losses are the stock trainer's.

Under DDP on as many ranks, where each samples by random numbers of its own. Completions end at very different lengths.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

import expertmesh as em
from tests.integrations.support import Job, compare, sharded, stock
from tests.integrations.test_dpo import pairs
from tests.support.models import tiny_model

LOGGED = ("loss", "reward", "reward_std", "entropy", "completions/mean_length", "completions/min_length")


def prompts() -> list[dict[str, str]]:
    return [{"prompt": row["prompt"].strip()} for row in pairs()]


def _reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Depends on every token."""
    return [sum(position * token for position, token in enumerate(ids, 1)) % 11 / 10 for ids in completion_ids]


def _ends_often() -> Any:
    """A model whose completions end at very different lengths: the end of a text is likely."""
    model: Any = tiny_model("qwen3_moe")
    with torch.no_grad():
        model.lm_head.weight[1] *= 8
    return model


def _job(tmp_path: Path, args: dict[str, Any], **given: Any) -> Job:
    _ends_often().save_pretrained(tmp_path / "base")
    own = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 16, "max_steps": 3}
    given = {"reward_funcs": _reward, **given}
    return Job(
        tmp_path, kind=GRPOTrainer, args={**own, **args}, given=given, rows=prompts, model=str(tmp_path / "base")
    )


@pytest.mark.parametrize(
    "args",
    [
        pytest.param({"num_iterations": 2}, id="two iterations"),
        pytest.param({"beta": 0.1, "gradient_accumulation_steps": 2}, id="with a reference"),
        pytest.param({"gradient_checkpointing": True, "loss_type": "grpo"}, id="checkpointed"),
    ],
)
def test_completions_rewards_and_steps_are_the_stock_trainers(args: dict[str, Any], tmp_path: Path) -> None:
    job = _job(tmp_path, args)
    expected = replace(job, args={key: value for key, value in job.args.items() if key != "gradient_checkpointing"})
    ours, theirs = sharded(job, 2, ep=2), stock(expected, 2)
    assert min(theirs.series("completions/min_length")) < 16
    # Advantages of a group add up to zero, and so do the terms of the first losses: 1e-6 is 1e-5 of the terms.
    compare(ours, theirs, keys=LOGGED, absolute=1e-6)
    assert ours.series("kl") == pytest.approx(theirs.series("kl"), rel=1e-3, abs=1e-6)


def test_adapters_off_are_the_reference(tmp_path: Path) -> None:
    """Adapters start at the base, so that there is no divergence before the first step and some after it."""
    lora = em.LoraConfig(r=4, targets=["attention", "experts"])
    result = sharded(_job(tmp_path, {"beta": 0.1}, lora=lora), 2, ep=2)
    first, *others = result.series("kl")
    assert first == pytest.approx(0.0, abs=1e-7)
    assert all(kl > 1e-7 for kl in others)
