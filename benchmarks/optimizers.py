"""What each way to store parameters and moments does to the loss, to memory and to the time of an optimizer's step.

    python -m benchmarks.optimizers [--steps 300] [--only NAME ...]

Losses: `expertmesh train` on 2 ranks, ep 2, from one checkpoint on the same rows of real text (those of
`benchmarks.layouts`), computing in bfloat16, at a learning rate whose updates are smaller than half a unit in the last
place of most bfloat16 weights. Seconds: one step over one layer
of 16 experts with its vocabulary (8.1 M parameters), one process with one thread, median of 9.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.layouts import configuration, write_inputs
from expertmesh.config import OptimConfig
from expertmesh.training.optimizers.build import build_optimizer

LEARNING_RATE, LAST = 3e-5, 20
LAYER: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}


@dataclass(frozen=True, slots=True)
class Way:
    """How parameters are stored, and what updates them."""

    name: str
    params: str
    optim: OptimConfig


WAYS = (
    Way("AdamW, float32 masters", "float32", OptimConfig()),
    Way("AdamW, bfloat16, stochastic rounding", "bfloat16", OptimConfig(stochastic_rounding=True)),
    Way("AdamW, bfloat16, rounded to nearest", "bfloat16", OptimConfig()),
    Way("AdamW 8-bit, float32 parameters", "float32", OptimConfig(name="adamw_8bit")),
    Way(
        "AdamW 8-bit, bfloat16, stochastic rounding",
        "bfloat16",
        OptimConfig(name="adamw_8bit", stochastic_rounding=True),
    ),
    Way("Muon, float32 masters", "float32", OptimConfig(name="muon")),
    Way("Muon, bfloat16, stochastic rounding", "bfloat16", OptimConfig(name="muon", stochastic_rounding=True)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", nargs="*", default=[way.name for way in WAYS], metavar="NAME")
    parser.add_argument("--directory", help="where the temporary files go")
    arguments = parser.parse_args()
    ways = [way for way in WAYS if way.name in arguments.only]
    print(f"| | loss, mean of the last {LAST} of {arguments.steps} steps | bytes a parameter | ns a parameter |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
        write_inputs(Path(scratch))
        for way in ways:
            size, seconds = state_and_seconds(way)
            loss = last_loss(Path(scratch), way, arguments.steps)
            print(f"| {way.name} | {loss:.4f} | {size:.2f} | {seconds * 1e9:.1f} |", flush=True)


def last_loss(root: Path, way: Way, steps: int) -> float:
    """Of a run by the command line."""
    output = root / "".join(letter for letter in way.name if letter.isalnum())
    values = {**way.optim.model_dump(mode="json", exclude_unset=True), "learning_rate": LEARNING_RATE}
    overrides = [f"optim.{key}={json.dumps(value)}" for key, value in values.items()]
    command = ["train", str(configuration(root, output, steps, "bfloat16")), "--nproc", "2", "parallel.ep=2"]
    done = subprocess.run(
        [sys.executable, "-m", "expertmesh", *command, f"precision.params={way.params}", *overrides],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{way.name}: exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return mean(row["loss"] for row in rows[-LAST:])


def state_and_seconds(way: Way) -> tuple[float, float]:
    """Bytes of parameters and optimizer, and seconds of a step, for each parameter."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**LAYER), dtype=getattr(torch, way.params))
    count = sum(parameter.numel() for parameter in model.parameters())
    optimizer, seconds = build_optimizer(model, way.optim, seed=0, compute=torch.bfloat16), []
    for _ in range(10):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        began = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    slots = [tensor for state in optimizer.state.values() for tensor in state.values()]
    stored = sum(tensor.nbytes for tensor in (*model.parameters(), *slots) if tensor.dim())
    return stored / count, median(seconds[1:]) / count


if __name__ == "__main__":
    main()
