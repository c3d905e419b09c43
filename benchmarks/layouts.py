"""The reference experiment: one seed checkpoint, three layouts, the same loss curve as one process.

    python -m benchmarks.layouts [--steps 100] [--document benchmarks/layouts.md]

Trains a small Qwen3-MoE on real text (the docs of Python's standard library) four times from the same weights on the
same rows: by plain transformers and PyTorch in one process, and by `expertmesh train` on FSDP 2, on FSDP 2 (EP 2) ×
TP 2 × PP 2, and on HSDP 4 (replicate 2, CP 2, EP 4) × TP 2. Then each goes on from each other's
checkpoint. Reports the largest relative difference of any step's loss; in fp32 it has to stay below 1e-4. bf16 is
trained as well and reported. Steps per second are of gloo ranks that share a few cores: they compare layouts with each
other only.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.result import machine
from expertmesh.config import Config, load_config
from expertmesh.data import BatchLayout, Recipe, TrainingBatches, build_dataset, load_tokenizer
from expertmesh.demo.run import stdlib_samples, train_tokenizer, write_dataset
from expertmesh.training.optimizers.build import build_optimizer

TOLERANCE = 1e-4
MAX_LENGTH, BATCH, CONTINUED = 128, 8, 10
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": MAX_LENGTH,
    "tie_word_embeddings": False,
    "bos_token_id": None,
}
CONFIG = """\
model: {{name_or_path: {root}/model}}
precision: {{params: float32, compute: {compute}}}
data: {{train: [{{path: {root}/train.jsonl}}], max_length: {max_length}, packing: false, shuffle: false}}
optim: {{name: adamw, learning_rate: 3.0e-4, eps: 1.0e-5, max_grad_norm: 1.0}}
schedule: {{name: constant, warmup_ratio: 0.0}}
train: {{global_batch_size: {batch}, micro_batch_size: {micro}, max_steps: {steps}}}
checkpoint: {{every_steps: {steps}}}
output_dir: {output}
"""


@dataclass(frozen=True, slots=True)
class Layout:
    """`overrides` are what the command line gets beside the number of ranks."""

    name: str
    ranks: int
    overrides: tuple[str, ...]

    @property
    def short(self) -> str:
        return "".join(letter if letter.isalnum() else "-" for letter in self.name.lower())


LAYOUTS = (
    Layout("FSDP 2", 2, ("parallel.ep=1",)),
    Layout("FSDP 2 (EP 2) × TP 2 × PP 2", 8, ("parallel.ep=2", "parallel.tp=2", "parallel.pp=2")),
    Layout(
        "HSDP 4 (replicate 2, CP 2, EP 4) × TP 2",
        8,
        ("parallel.replicate=2", "parallel.cp=2", "parallel.ep=4", "parallel.tp=2"),
    ),
)


@dataclass(frozen=True, slots=True)
class Curve:
    """Of one run: its losses from `first` on, and what a step took (NaN for the one process)."""

    name: str
    losses: list[float]
    first: int = 1
    steps_per_second: float = math.nan
    peak_memory_bytes: int = 0

    def distance(self, reference: Curve) -> tuple[float, int]:
        """Return the largest relative difference, and the step where it is."""
        pairs = zip(self.losses, reference.losses[self.first - 1 :], strict=False)
        return max((abs(own - other) / abs(other), self.first + place) for place, (own, other) in enumerate(pairs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--directory", help="where the temporary files go")
    parser.add_argument("--document", type=Path, help="write the tables here, as Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--layout", type=int, nargs="*", default=list(range(len(LAYOUTS))), help="numbers from 0")
    arguments = parser.parse_args()
    layouts = [LAYOUTS[number] for number in arguments.layout]
    with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
        root = Path(scratch)
        write_inputs(root)
        reference = one_process(root, arguments.steps + CONTINUED)
        control = one_process(root, arguments.steps + CONTINUED, micro=2)
        curves = [run(root, layout, arguments.steps) for layout in layouts]
        narrow = [run(root, layout, arguments.steps, compute="bfloat16") for layout in layouts]
        continued = [
            run(root, layout, arguments.steps + CONTINUED, start=start)
            for start in layouts
            for layout in layouts
            if layout is not start
        ]
    text = document(arguments.steps, reference, [control, *curves], narrow, continued)
    print(text)
    if arguments.json:
        everything = {"machine": machine(), "runs": [vars_of(c) for c in (reference, *curves, *narrow, *continued)]}
        arguments.json.write_text(json.dumps(everything, indent=1) + "\n")
    if arguments.document:
        arguments.document.write_text(text)
    worst = max(curve.distance(reference)[0] for curve in (*curves, *continued))
    if worst > TOLERANCE:
        print(f"error: a loss is off by {worst:.1e}, more than {TOLERANCE:g}", file=sys.stderr)
    return int(worst > TOLERANCE)


def write_inputs(root: Path) -> None:
    """Model, tokenizer and rows under `root`; the same on every machine with the same Python and torch."""
    samples = stdlib_samples()
    write_dataset(samples, root / "train.jsonl", root / "eval.jsonl")
    texts = (text for sample in samples for text in (sample.question, sample.answer))
    tokenizer = train_tokenizer(texts, vocabulary=1024, max_length=MAX_LENGTH)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **SIZES)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")


def configuration(root: Path, output: Path, steps: int, compute: str = "float32", micro: int = 2) -> Path:
    path = output.with_suffix(".yaml")
    values = {"root": root, "output": output, "steps": steps, "compute": compute, "micro": micro}
    path.write_text(CONFIG.format(max_length=MAX_LENGTH, batch=BATCH, **values))
    return path


def one_process(root: Path, steps: int, micro: int = BATCH) -> Curve:
    """Plain transformers and PyTorch on the rows that every layout gets; nothing of the product but the rows.

    With another micro-batch size only rounding differs: how far that leads says what a difference means.
    """
    config = load_config(configuration(root, root / "one-process", steps))
    model: Any = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    model.config._experts_implementation = "eager"
    optimizer = build_optimizer(model.train(), config.optim, config.train.seed)
    losses = []
    for step in _rows(config, micro).epoch(0):
        total = torch.zeros(())
        for batch in step.micro_batches:
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            targets = batch["labels"][:, 1:].reshape(-1)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum") / step.target_tokens
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
        if len(losses) == steps:
            break
    return Curve("one process" if micro == BATCH else f"one process, micro-batches of {micro}", losses)


def _rows(config: Config, micro: int) -> TrainingBatches:
    tokenizer = load_tokenizer(config.model)
    dataset, _ = build_dataset(Recipe(config.data.train, config.data, tokenizer, model_vocab_size=len(tokenizer)))
    layout = BatchLayout(
        micro_batch_size=micro,
        data_rank=0,
        data_ranks=1,
        packing=False,
        pad_token_id=tokenizer.pad_token_id,
        max_length=MAX_LENGTH,
    )
    return TrainingBatches(dataset, layout, global_batch_size=BATCH, shuffle=False, seed=config.train.seed)


def run(
    root: Path, layout: Layout, steps: int, *, compute: str = "float32", start: Layout | None = None, micro: int = 2
) -> Curve:
    """Train by the command line; from the last checkpoint of layout `start`, if given."""
    output = root / f"{layout.short}-{compute}{f'-from-{start.short}' if start else ''}"
    command = ["train", str(configuration(root, output, steps, compute, micro)), "--nproc", str(layout.ranks)]
    name = layout.name if compute == "float32" else f"{layout.name}, {compute}"
    if start is not None:
        saved = root / f"{start.short}-{compute}" / "checkpoints" / f"step-{steps - CONTINUED:08d}"
        command.append(f"checkpoint.resume={saved}")
        name = f"{layout.name} from {start.name}"
    print(f"{name} ...", file=sys.stderr, flush=True)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "expertmesh", *command, *layout.overrides], check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{name}: exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    print(f"  {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    # The first steps warm up.
    times = [after["elapsed_seconds"] - before["elapsed_seconds"] for before, after in pairwise(rows[2:])]
    peak = max(row["peak_memory_bytes"] for row in rows)
    return Curve(name, [row["loss"] for row in rows], rows[0]["step"], 1 / median(times) if times else math.nan, peak)


def document(
    steps: int, reference: Curve, curves: Sequence[Curve], narrow: Sequence[Curve], continued: Sequence[Curve]
) -> str:
    """Markdown; the picture is that of `make figures`, from what --json writes."""
    shown = [step for step in (1, 2, 5, 10, 20, 50, 100) if step <= steps]
    lines = ["# One model, three layouts, one loss curve", ""]
    lines += [_INTRODUCTION.format(steps=steps, tolerance=TOLERANCE, continued=CONTINUED), ""]
    lines += ["![loss over steps](../docs/pictures/parity-light.svg)", ""]
    lines += ["| fp32 | " + " | ".join(f"step {step}" for step in shown) + " | largest difference |"]
    lines += ["|---|" + "---|" * (len(shown) + 1)]
    for curve in (reference, *curves):
        row = " | ".join(f"{curve.losses[step - 1]:.6f}" for step in shown)
        lines.append(f"| {curve.name} | {row} | {'' if curve is reference else _difference(curve, reference)} |")
    lines += ["", "| continued from another layout's checkpoint | first loss | last loss | largest difference |"]
    lines += ["|---|---|---|---|"]
    for curve in continued:
        values = f"{curve.losses[0]:.6f} | {curve.losses[-1]:.6f}"
        lines.append(f"| {curve.name} | {values} | {_difference(curve, reference)} |")
    lines += ["", "| bf16 compute, against one process in fp32 | last loss | largest difference |", "|---|---|---|"]
    lines += [f"| {curve.name} | {curve.losses[-1]:.6f} | {_difference(curve, reference)} |" for curve in narrow]
    lines += ["", "| gloo ranks sharing the cores of one machine | steps/s | peak memory of a rank |", "|---|---|---|"]
    for curve in curves[1:]:
        lines.append(f"| {curve.name} | {curve.steps_per_second:.2f} | {curve.peak_memory_bytes / 2**20:.0f} MiB |")
    here = machine()
    lines += [
        "",
        f"Machine: {date.today()}, {here['device']}, {', '.join(map(' '.join, here['versions'].items()))}.",
        "",
    ]
    return "\n".join(lines)


_INTRODUCTION = """\
The reference experiment of this field, as `python -m benchmarks.layouts` ran it: the same seed checkpoint (Qwen3-MoE,
4 layers, 8 experts, random weights) and the same rows, {steps} optimizer steps of AdamW with clipping. One process runs
plain transformers and PyTorch without any sharding. Every difference is relative to its loss at the same step; in fp32
the largest of any step has to stay below {tolerance:g}. Each layout then goes on for {continued} steps from each other
layout's checkpoint, against the one process that was never interrupted. The second row is one process again, with
other micro-batches: what rounding alone does.

Learning rate and AdamW's eps (3e-4, 1e-5) are such that training does not amplify rounding: all weights changed by 1e-5
of themselves change no loss of 100 steps by more than 1.4e-5. At 1e-3 the same change leads to 2e-3, as does a single
token whose second expert is decided by rounding: there FSDP 2 alone ended 2e-3 from one process, and the layout with
three more axes 2e-7, by chance."""


def _difference(curve: Curve, reference: Curve) -> str:
    worst, step = curve.distance(reference)
    return f"{worst:.1e} (step {step})"


def vars_of(curve: Curve) -> dict[str, Any]:
    return {name: getattr(curve, name) for name in curve.__slots__}


if __name__ == "__main__":
    sys.exit(main())
