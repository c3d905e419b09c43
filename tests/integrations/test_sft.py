"""`em.trainer(SFTTrainer)` computes what the stock SFTTrainer computes on the unsharded model in one process.

fp32, different rows on every rank, rows with very different numbers of targets: losses, gradient norms, learning rates
and evaluation to 1e-5, every weight to 5e-4 of its move. The planted bug shows that the comparison can fail.
"""

import functools
import shutil
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

import expertmesh as em
from expertmesh.integrations import patches
from expertmesh.state.model_view import attach
from tests.adapters.reference import random_adapter
from tests.integrations.support import ONE_LAYER, Job, Result, accumulating, compare, even_rows, sharded, stock
from tests.support.models import tiny_model

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
ACCUMULATED = {"gradient_accumulation_steps": 3, **EVALUATED}
ATTENTION_AND_EXPERTS = ("q_proj", "v_proj"), ("experts.gate_up_proj", "experts.down_proj")
AUX = {"router_aux_loss_coef": 0.05, "gradient_accumulation_steps": 2}
SELECTIVE = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"selective": True}}


@pytest.mark.slow_cases(
    r"(?!ep 2, accumulated).*", why="pairwise; accumulated and evaluated, with very uneven targets, stays"
)
@pytest.mark.parametrize(
    ("world", "parallel", "args"),
    [
        pytest.param(2, {"ep": 2}, ACCUMULATED, id="ep 2, accumulated"),
        pytest.param(4, {"ep": 4}, EVALUATED, id="ep 4"),
        pytest.param(4, {"ep": 2, "replicate": 2}, {"gradient_accumulation_steps": 2}, id="ep 2, replicate 2"),
        pytest.param(4, {"ep": 2}, {"optim": "sgd", "learning_rate": 0.1}, id="ep 2 of 4, SGD"),
        pytest.param(2, {"ep": 2}, {"max_grad_norm": 0.0}, id="not clipped"),
        pytest.param(2, {"ep": 2}, {"gradient_checkpointing": True}, id="checkpointed"),
        pytest.param(2, {"ep": 2}, SELECTIVE, id="selective"),
        pytest.param(2, {"ep": 2}, {"padding_free": True}, id="padding-free"),
        pytest.param(2, {"ep": 2}, {"packing": True, "max_length": 40}, id="packed"),
        pytest.param(2, {"ep": 2}, {"loss_type": "dft", "lr_scheduler_type": "cosine", "warmup_steps": 2}, id="dft"),
    ],
)
def test_losses_norms_and_weights_equal_the_stock_trainer(
    world: int, parallel: dict[str, Any], args: dict[str, Any], tmp_path: Path
) -> None:
    job = Job(tmp_path, args=args, changes={} if args is ACCUMULATED else ONE_LAYER)
    expected = accumulating(job, world)
    without = {"gradient_checkpointing", "gradient_checkpointing_kwargs"}
    expected = replace(expected, args={key: value for key, value in expected.args.items() if key not in without})
    compare(sharded(job, world, **parallel), stock(expected))


@pytest.mark.slow(why="each launches a stock job as well")
def test_the_routers_auxiliary_loss_is_the_stock_trainers(tmp_path: Path) -> None:
    """Of equally long rows: TRL logs its mean over micro-batches."""
    job = Job(tmp_path, args=AUX, changes=ONE_LAYER, rows=even_rows)
    compare(sharded(job, 2, ep=2), stock(accumulating(job, 2)), keys=("loss", "aux_loss"))


@pytest.mark.slow(why="each launches a stock job as well")
@pytest.mark.parametrize("wraps", [False, True], ids=["lora", "PeftModel"])
def test_adapters_on_attention_and_experts_equal_stock_peft(wraps: bool, tmp_path: Path) -> None:
    random_adapter(tiny_model("qwen3_moe", **ONE_LAYER), tmp_path / "start", *ATTENTION_AND_EXPERTS)
    lora = em.LoraConfig(from_adapter=str(tmp_path / "start"))
    args = {"gradient_accumulation_steps": 2, **EVALUATED}
    job = Job(tmp_path, args=args, changes=ONE_LAYER, after=saved_adapter)
    wrapped = functools.partial(PeftModel.from_pretrained, model_id=tmp_path / "start", is_trainable=True)
    expected = stock(replace(accumulating(job, 2), prepare=wrapped))
    ours = sharded(replace(job, prepare=wrapped) if wraps else replace(job, given={"lora": lora}), 2, ep=2)
    first = load_file(tmp_path / "start" / "adapter_model.safetensors")
    compare(of_files(ours, first), of_files(expected, first))


def _with_dropout(tmp_path: Path) -> Job:
    random_adapter(tiny_model("qwen3_moe", **ONE_LAYER), tmp_path / "start", *ATTENTION_AND_EXPERTS)
    lora = em.LoraConfig(from_adapter=str(tmp_path / "start"), dropout=0.3)
    return Job(tmp_path / "run", given={"lora": lora}, changes=ONE_LAYER, rows=even_rows)


@pytest.mark.slow(why="five launches; the planted bug stays, and adapters/test_dropout.py has every layout")
def test_dropout_of_adapters_drops_the_same_in_every_layout_and_after_a_resume(tmp_path: Path) -> None:
    job = _with_dropout(tmp_path)
    saved = accumulating(replace(job, args={"save_strategy": "steps", "save_steps": 2}), 2)
    two, four = sharded(saved, 2, ep=2), sharded(replace(job, args={"gradient_checkpointing": True}), 4, ep=2)
    compare(four, two)
    compare(sharded(accumulating(job, 4), 1, ep=1), two)
    without = replace(job, given={"lora": em.LoraConfig(from_adapter=str(tmp_path / "start"))})
    assert sharded(without, 4, ep=2).series("loss")[0] != pytest.approx(two.series("loss")[0], rel=1e-3)
    shutil.rmtree(saved.output / "checkpoint-4")
    resumed = sharded(replace(saved, resume=True), 2, ep=2)
    assert len(resumed.rates) == 2
    assert all(torch.equal(resumed.weights[name], tensor) for name, tensor in two.weights.items())


def test_rows_that_each_rank_numbers_for_itself_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = _with_dropout(tmp_path)
    two = sharded(accumulating(job, 2), 2, ep=2)
    alone = types.SimpleNamespace(get_rank=lambda: 0, get_world_size=torch.distributed.get_world_size)
    monkeypatch.setattr(patches, "dist", alone)
    with pytest.raises(AssertionError, match="loss"):
        compare(sharded(job, 4, ep=2), two)


def test_gradients_that_are_summed_instead_of_averaged_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(em, "like_ddp", _only_allowed, raising=False)
    job = Job(tmp_path, args={"max_steps": 2}, changes=ONE_LAYER)
    ours, expected = sharded(job, 2, ep=2), stock(accumulating(job, 2))
    assert ours.series("loss")[0] == pytest.approx(expected.series("loss")[0], rel=1e-5)
    assert ours.series("grad_norm")[0] == pytest.approx(2 * expected.series("grad_norm")[0], rel=1e-5)
    with pytest.raises(AssertionError, match="grad_norm"):
        compare(ours, expected)


def _only_allowed(model: Any) -> Any:
    """Calls with labels are let through, and gradients stay sums."""
    attach(model, averages_gradients=True)
    return model


def saved_adapter(trainer: Any) -> Any:
    directory = Path(trainer.args.output_dir) / "adapter"
    trainer.save_model(str(directory))
    return load_file(directory / "adapter_model.safetensors")


def of_files(result: Result, first: dict[str, Any]) -> Result:
    """Adapters by their names in PEFT's files, which both write."""
    return replace(result, initial=first, weights=result.extra)
