"""Every example is read by the real configuration code, and the example script trains on two ranks."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from expertmesh.config import load_config
from expertmesh.distributed.layout import resolve_layout
from tests.data.tokenizers_on_the_fly import bpe_tokenizer
from tests.support.models import tiny_model
from tests.support.ranks import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
RANKS_AND_EXPERTS = {
    "qwen3-30b-a3b": (8, 128),
    "qwen3-30b-a3b-lora": (8, 128),
    "qwen3-30b-a3b-dpo": (8, 128),
    "qwen3-30b-a3b-qlora-24gb": (1, 128),
    "mixtral-8x7b": (16, 8),
    "deepseek-v3": (256, 256),
    "gpt-oss-20b-lora": (8, 32),
}


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_each_example_is_valid_and_its_layout_possible(file: Path) -> None:
    world_size, experts = RANKS_AND_EXPERTS[file.stem]
    layout = resolve_layout(load_config(file).parallel, world_size, experts)
    assert layout.world_size == world_size


def _write_inputs(directory: Path) -> None:
    tokenizer = bpe_tokenizer()
    tiny_model("qwen3_moe", vocab_size=len(tokenizer)).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    lines = [json.dumps({"text": f"one and one is {n}"}) + "\n" for n in range(8)]
    (directory / "train.jsonl").write_text("".join(lines))


def _start_with_trl(directory: Path, script: str, data: str, **environment: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += [str(EXAMPLES / script), "model", data, "out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CI": "1", **environment}
    run = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stderr[-3000:]


def test_the_example_with_trl_trains_and_resumes(tmp_path: Path) -> None:
    _write_inputs(tmp_path)
    for steps in (2, 4):
        _start_with_trl(tmp_path, "sft_with_trl.py", "train.jsonl", MAX_STEPS=str(steps))
        AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    state = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())
    assert [row["step"] for row in state["log_history"] if "loss" in row] == [1, 2, 3, 4]


def test_the_examples_with_preferences_and_rewards_run(tmp_path: Path) -> None:
    _write_inputs(tmp_path)
    row = {"prompt": "one and one is", "chosen": " 2", "rejected": " not known to anybody"}
    (tmp_path / "pairs.jsonl").write_text((json.dumps(row) + "\n") * 8)
    _start_with_trl(tmp_path, "dpo_with_trl.py", "pairs.jsonl", MAX_STEPS="2")
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").exists()
    (tmp_path / "prompts.jsonl").write_text((json.dumps({"prompt": row["prompt"]}) + "\n") * 8)
    _start_with_trl(tmp_path, "grpo_with_trl.py", "prompts.jsonl", MAX_STEPS="2", MAX_COMPLETION="4")
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")


def _losses(printed: str) -> list[float]:
    return [float(line.split()[3]) for line in printed.splitlines() if line.startswith("step")]


def test_the_python_example_trains_and_saves(tmp_path: Path) -> None:
    _write_inputs(tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += [str(EXAMPLES / "train_without_trainer.py"), "model", "train.jsonl", "out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)
    losses = _losses(run.stdout)
    assert len(losses) == 10, run.stderr[-3000:]
    assert losses[-1] < losses[0]
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(not torch.equal(before[name], tensor) for name, tensor in after.items())  # everything trained


def _in_layout(directory: Path, parallel: str, rows: int) -> list[float]:
    """The example with another layout and as many rows in a step: its losses on rank 0."""
    source = (EXAMPLES / "train_without_trainer.py").read_text()
    changes = {"em.ParallelConfig(ep=2)": f"em.ParallelConfig({parallel})", "= 10, 4, 256": f"= 3, {rows}, 256"}
    for old, new in changes.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    arguments = ["example", str(directory / "model"), str(directory / "train.jsonl"), str(directory / parallel)]
    printed = io.StringIO()
    own_end = mock.patch.object(dist, "destroy_process_group")  # run_ranks ends the group itself
    with contextlib.redirect_stdout(printed), own_end, mock.patch.object(sys, "argv", arguments):
        exec(compile(source, "example", "exec"), {"__name__": "__main__"})
    return _losses(printed.getvalue())


def test_the_python_example_computes_the_same_in_every_layout(tmp_path: Path) -> None:
    _write_inputs(tmp_path)
    expected = run_ranks(_in_layout, 2, tmp_path, "ep=2", 4)[0]
    assert len(expected) == 3
    for parallel in ("ep=2, tp=2", "ep=2, cp=2", "ep=1, pp=2"):
        assert run_ranks(_in_layout, 2, tmp_path, parallel, 8)[0] == pytest.approx(expected, rel=1e-2), parallel
