"""Saving and loading training state: ours beside `cp`, PyTorch's DCP defaults and transformers' Trainer.

    python -m benchmarks.checkpoint

One random Qwen3-MoE with AdamW moments on gloo ranks, all in fp32. Saves end when the files are synced, for all of
them (DCP syncs by default; `cp` is followed by `sync` of its files; the Trainer does not sync). Our figures include
hashing everything, at save and at load. Medians of alternating repetitions; the Trainer runs in a process of its own,
unsharded, which is how it saves on a CPU. Also: how long training stands still per save, synchronous and asynchronous,
as a share of a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.case import Case, write_checkpoint
from benchmarks.probes import median
from benchmarks.result import machine
from benchmarks.worker import launch

CASE = Case(tokens=512, compute="float32", ranks=2, layers=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=CASE.ranks)
    parser.add_argument("--layers", type=int, default=CASE.layers)
    parser.add_argument("--directory", help="where the temporary files go")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--trainer", nargs=2, metavar=("CASE", "DIRECTORY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trainer:
        case = Case(**json.loads(arguments.trainer[0]))
        print(json.dumps(trainer(case, Path(arguments.trainer[1]), arguments.repeats)))
        return
    case = dataclasses.replace(CASE, ranks=arguments.ranks, layers=arguments.layers)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
        case = write_checkpoint(case, Path(scratch) / "model")
        files = Path(scratch) / "files"
        files.mkdir()
        ours = launch("save", case, [str(files)], arguments.repeats, "benchmarks.saving")
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.checkpoint", "--repeats", str(arguments.repeats)]
        command += ["--trainer", json.dumps(dataclasses.asdict(case)), str(files)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        theirs = json.loads(done.stdout.splitlines()[-1])
    if arguments.json:
        report = {"case": dataclasses.asdict(case), "machine": machine(), "ranks": ours, "trainer": theirs}
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(case, ours, theirs))


def table(case: Case, ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    seconds, size = {**ours["seconds"], **theirs["seconds"]}, ours["bytes"]
    copy = median(seconds["cp"])
    lines = [
        f"Qwen3-MoE, {case.layers} layers, {case.ranks} ranks, ep {case.ranks}: {size / 1e9:.2f} GB of fp32 weights and"
        f" moments; `cp` and sync: {copy:.2f} s, {size / copy / 1e9:.2f} GB/s",
        "",
        "| | save s | of cp | load s | of cp |",
        "|---|---|---|---|---|",
    ]
    for name in ("expertmesh", "dcp", "trainer"):
        save, load = median(seconds[f"{name} save"]), median(seconds[f"{name} load"])
        lines.append(f"| {name} | {save:.2f} | {save / copy:.2f}× | {load:.2f} | {load / copy:.2f}× |")
    step, save = median(seconds["step"]), median(seconds["expertmesh save"])
    pause, during = median(seconds["asynchronous pause"]), median(seconds["step during an asynchronous save"])
    lines += [
        "",
        f"A step takes {step:.2f} s. A synchronous save stops training for {save:.2f} s ({save / step:.1f} steps), an "
        f"asynchronous one for {pause:.2f} s ({pause / step:.2f} steps); a step while files are written takes "
        f"{during:.2f} s.",
    ]
    return "\n".join(lines)


def trainer(case: Case, directory: Path, repeats: int) -> dict[str, Any]:
    """transformers' Trainer saving and loading the same state in one process."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    model = AutoModelForCausalLM.from_pretrained(case.checkpoint, dtype=torch.float32)
    settings = TrainingArguments(output_dir=str(directory / "trainer"), report_to=[], use_cpu=True, disable_tqdm=True)
    run: Any = Trainer(model=model, args=settings)
    run.create_optimizer_and_scheduler(num_training_steps=10)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    run.optimizer.step()
    run.optimizer.zero_grad()
    seconds: dict[str, list[float]] = {"trainer save": [], "trainer load": []}
    for repeat in range(repeats):
        run.state.global_step = repeat + 1
        start = time.perf_counter()
        run._save_checkpoint(model, trial=None)
        seconds["trainer save"].append(time.perf_counter() - start)
        path = directory / "trainer" / f"checkpoint-{repeat + 1}"
        start = time.perf_counter()
        run._load_from_checkpoint(str(path))
        run._load_optimizer_and_scheduler(str(path))
        seconds["trainer load"].append(time.perf_counter() - start)
        subprocess.run(["rm", "-rf", str(path)], check=True)
    return {"seconds": seconds}


if __name__ == "__main__":
    main()
