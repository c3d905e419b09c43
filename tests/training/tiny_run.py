"""A tiny run for tests of the trainer: a model directory, a data file, a configuration, and what the run wrote."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from expertmesh.config import Config, load_config
from expertmesh.training.control import Control, Stopped, StopReason
from expertmesh.training.run import train
from tests.data.tokenizers_on_the_fly import CHATML, bpe_tokenizer
from tests.support.models import tiny_model

ROWS = [
    {"prompt": f"What is {n} plus {n}?", "completion": " ".join([f"It is {2 * n}."] * (1 + n % 3))} for n in range(13)
]
STEPS, GLOBAL_BATCH = 3, 4
# What two equal runs need not have in common in a row of metrics.jsonl.
TIMES = ("tokens_per_second", "peak_memory_bytes", "elapsed_seconds", "step_seconds", "eval_runtime")


def write_inputs(root: Path, family: str = "qwen3_moe", **changes: Any) -> Path:
    """Write `root/model`, its config with `changes`, and `root/train.jsonl`; returns `root`."""
    root.mkdir(parents=True, exist_ok=True)
    tokenizer = bpe_tokenizer(CHATML)
    model: Any = tiny_model(family, vocab_size=len(tokenizer), **changes)
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return root


def run_config(inputs: Path, output: Path, *overrides: str) -> Config:
    text = f"""
model: {{name_or_path: {inputs / "model"}}}
precision: {{params: float32, compute: float32}}
data: {{train: [{{path: {inputs / "train.jsonl"}}}], max_length: 64, packing: false, shuffle: false}}
optim: {{name: adamw, learning_rate: 1.0e-2, weight_decay: 0.01, betas: [0.9, 0.95], eps: 1.0e-6, max_grad_norm: 0.5}}
schedule: {{name: linear, warmup_ratio: 0.5}}
train: {{global_batch_size: {GLOBAL_BATCH}, max_steps: {STEPS}}}
checkpoint: {{every_steps: null}}
output_dir: {output}
"""
    file = output.parent / f"{output.name}.yaml"
    file.write_text(text)
    return load_config(file, overrides)


class _StopAfter(Control):
    """Asks rank 1 (or the only one) to stop in the `steps`-th step from here on, as SIGTERM would."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.asked = 0

    def stop_requested(self) -> StopReason:
        self.asked += 1
        mine = dist.get_rank() == min(1, dist.get_world_size() - 1)
        return StopReason(signal.SIGTERM if mine and self.asked == self.steps else 0)


def train_steps(config: Config, steps: int) -> None:
    """Train, and stop after so many steps."""
    with pytest.raises(Stopped) as stopped:
        train(config, _StopAfter(steps))
    assert stopped.value.exit_code == 143


def metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def rows_without_times(output: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in TIMES} for row in metrics(output)]


def loads_of_experts(row: dict[str, Any]) -> list[dict[str, float]]:
    """What a row says of the layers' experts without their ranks, which other layouts do not share."""
    return [{k: v for k, v in layer.items() if k != "ranks_max_over_mean"} for layer in row.get("expert_load", ())]


def weights(output: Path) -> dict[str, Tensor]:
    """What the run has trained."""
    return load_file(output / "model" / "model.safetensors")
