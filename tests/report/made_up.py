"""Run directories without a run: metrics, configuration and record as `train` would have left them."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expertmesh.config import dump_config, load_config
from expertmesh.training.reporting.record import DataCounts, MoeLayer, Prediction, RunRecord, Share, Start

CONFIG = """\
model: {{name_or_path: {model}}}
data: {{train: [{{path: train.jsonl}}], packing: false}}
train: {{max_steps: {steps}}}
output_dir: {output}
{more}"""


def row(step: int, steps: int, layers: int, **changes: Any) -> dict[str, Any]:
    """One row of metrics.jsonl; a change to None leaves the key out."""
    load = [
        {
            "max_over_mean": 1.2 + layer / 4 + math.sin(step / 9) / 5,
            "ranks_max_over_mean": 1.1 + layer / 8 - (0.05 if step > steps // 2 else 0),
            "entropy": 0.98 - layer / 40,
            "dead": (step + layer) % 3,
        }
        for layer in range(layers)
    ]
    values: dict[str, Any] = {
        "step": step,
        "epoch": step / steps,
        "loss": 4 * math.exp(-step / steps) + math.sin(step) / 10,
        "grad_norm": 1.0 + math.cos(step) / 2,
        "learning_rate": 1e-4 * step / steps,
        "target_tokens": 900 + step % 7,
        "tokens_per_second": 5000.0 + 100 * math.sin(step),
        "peak_memory_bytes": 3 * 2**30,
        "elapsed_seconds": 0.5 * step,
        "expert_load": load,
    } | changes
    return {key: value for key, value in values.items() if value is not None}


def start(after_step: int = 0, total_steps: int = 40, **changes: Any) -> Start:
    values: dict[str, Any] = {
        "started": "2026-11-20T12:00:00+00:00",
        "after_step": after_step,
        "total_steps": total_steps,
        "world_size": 4,
        "layout": {"pp": 1, "replicate": 1, "fsdp": 4, "cp": 1, "tp": 1, "efsdp": 2, "ep": 2},
        "device": "cpu",
        "device_name": "A processor, 2 cores",
        "versions": {"expertmesh": "0.1.0", "torch": "2.13.0"},
        "shares": [Share(ranks=4, dense=10, expert=20, adapter=0, bytes_to_load=60)],
        "micro_batch_size": 2,
        "data_ranks": 4,
        "accumulation": 3,
        "dispatch": "all_to_all",
        "compute": "grouped_mm",
        "activation_checkpointing": "none",
        "accumulate": "by_micro_batch",
        "printed": ["model      m: qwen3_moe", "steps      40 optimizer steps"],
    }
    return Start(**(values | changes))


def record(starts: Sequence[Start], layers: int = 3) -> RunRecord:
    return RunRecord(
        model_type="qwen3_moe",
        parameters=1_234_567,
        blocks=layers + 1,
        # The first block is dense.
        moe_layers=[
            MoeLayer(name=f"model.layers.{layer + 1}.mlp.experts", experts=8, top_k=2) for layer in range(layers)
        ],
        train_data=DataCounts(rows=100, samples=99, tokens=5000, target_tokens=3000),
        eval_data=None,
        starts=list(starts),
    )


def write_run(
    directory: Path,
    *,
    steps: int = 40,
    layers: int = 3,
    model: str = "some/model",
    rows: Sequence[dict[str, Any]] | None = None,
    starts: Sequence[Start] | None = None,
    more: str = "",
) -> Path:
    """A stopped run of so many steps, with `more` lines of configuration; returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    source = directory.parent / f"{directory.name}-source.yaml"
    quoted = json.dumps(model)
    output = json.dumps(str(directory))
    source.write_text(CONFIG.format(model=quoted, steps=max(steps, 1), output=output, more=more), "utf-8")
    (directory / "config.yaml").write_text(dump_config(load_config(source)), encoding="utf-8")
    rows = [row(step, steps, layers) for step in range(1, steps + 1)] if rows is None else rows
    (directory / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    written = record(starts or [start(total_steps=max(steps, 1))], layers)
    (directory / "run.json").write_text(written.model_dump_json(), encoding="utf-8")
    return directory


PREDICTED = Prediction(step_seconds=0.25, tokens_per_second=10_000.0, peak_memory_bytes=2.0 * 2**30)
