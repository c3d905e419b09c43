"""Every example is read by the real configuration code, and the example script trains on two ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from expertmesh.config import load_config
from expertmesh.mesh import resolve_layout
from tests.data.tokenizers_on_the_fly import bpe_tokenizer
from tests.support.models import tiny_model

EXAMPLES = Path(__file__).parents[1] / "examples"
RANKS_AND_EXPERTS = {
    "qwen3-30b-a3b": (8, 128),
    "qwen3-30b-a3b-lora": (8, 128),
    "mixtral-8x7b": (16, 8),
    "deepseek-v3": (256, 256),
}


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_each_example_is_valid_and_its_layout_possible(file: Path) -> None:
    world_size, experts = RANKS_AND_EXPERTS[file.stem]
    layout = resolve_layout(load_config(file).parallel, world_size, experts)
    assert layout.world_size == world_size


def test_the_python_example_trains_and_saves(tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer()
    tiny_model("qwen3_moe", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": f"one and one is {n}"}) + "\n" for n in range(9)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += [str(EXAMPLES / "train_without_trainer.py"), "model", "train.jsonl", "out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)
    losses = [float(line.split()[3]) for line in run.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 10, run.stderr[-3000:]
    assert losses[-1] < losses[0]
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(not torch.equal(before[name], tensor) for name, tensor in after.items())  # everything trained
