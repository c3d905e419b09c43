"""`args.bf16` is bf16 compute over fp32 masters by FSDP2, not autocast on top of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import expertmesh as em
from tests.integrations.support import ONE_LAYER, Job, sharded
from tests.support.errors import refused_on_ranks


def _dtypes(trainer: Any) -> tuple[str, set[torch.dtype], torch.dtype]:
    seen: list[torch.dtype] = []
    handle = trainer.model.model.layers[0].register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    trainer.evaluate()
    handle.remove()
    masters = {parameter.dtype for parameter in trainer.model.parameters()}
    return trainer.accelerator.mixed_precision, masters, seen[0]


@pytest.mark.slow(why="test_sft.py stays")
def test_bf16_computes_in_bf16_over_fp32_masters(tmp_path: Path) -> None:
    args = {"bf16": True, "eval_strategy": "steps", "eval_steps": 4}
    ours = sharded(Job(tmp_path, changes=ONE_LAYER, args=args, after=_dtypes), 2, ep=2)
    assert ours.extra == ("no", {torch.float32}, torch.bfloat16)
    wide = sharded(Job(tmp_path, changes=ONE_LAYER, args={**args, "bf16": False}), 2, ep=2)
    assert ours.series("loss") == pytest.approx(wide.series("loss"), rel=0.02)
    assert ours.series("loss") != wide.series("loss")


@pytest.mark.slow(why="test_sft.py stays")
def test_adapters_on_a_model_in_memory_that_is_fp32_compute_in_bf16(tmp_path: Path) -> None:
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    args = {"bf16": True, "eval_strategy": "steps", "eval_steps": 4}
    job = Job(tmp_path, changes=ONE_LAYER, args=args, given={"peft_config": lora}, after=_dtypes)
    ours = sharded(job, 2, ep=2)
    assert ours.extra == ("no", {torch.float32}, torch.bfloat16)
    assert ours.weights
    assert all("lora_" in name for name in ours.weights)
    wide = sharded(replace(job, args={**args, "bf16": False}, given={"lora": lora}), 2, ep=2)
    assert ours.series("loss") == pytest.approx(wide.series("loss"), rel=0.02)
    assert ours.series("loss") != wide.series("loss")


@pytest.mark.slow(why="test_sft.py stays")
def test_of_two_dtypes_in_memory_the_sentence_says_what_mends_it(tmp_path: Path) -> None:
    def half(model: Any) -> Any:
        model.lm_head.to(torch.bfloat16)
        return model

    job = Job(tmp_path, prepare=half, given={"precision": em.PrecisionConfig(), "lora": em.LoraConfig()})
    with refused_on_ranks("precision.mixed-dtypes", naming="model.to(torch.bfloat16)"):
        sharded(job, 2, ep=2)


@pytest.mark.slow(why="test_sft.py stays")
def test_precision_says_more_than_args(tmp_path: Path) -> None:
    precision = em.PrecisionConfig(params="float32", compute="float32")
    job = Job(tmp_path, changes=ONE_LAYER, args={"bf16": True, "max_steps": 2}, given={"precision": precision})
    ours = sharded(job, 2, ep=2)
    wide = sharded(Job(tmp_path, changes=ONE_LAYER, args={"max_steps": 2}), 2, ep=2)
    assert ours.series("loss") == wide.series("loss")
