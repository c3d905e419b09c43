"""Forward and backward of a Qwen3-MoE on local ranks, beside transformers' own EP x FSDP2.

    python -m benchmarks.step --setting fp32-512 --systems transformers_ep4,expertmesh_ep4
    python -m benchmarks.step --profile expertmesh_ep4          # where the time goes

Per system: median wall seconds, CPU seconds of all ranks together (the figure that repeats on a shared
machine), exact all-to-all bytes and calls per rank, other collectives, and peak memory per rank above imports
(measured in processes of its own). All systems load one checkpoint and read the same tokens; their losses and
gradient norms must agree, or the run fails: a figure for a different computation is worth nothing. Prints a
Markdown table, writes JSON with --json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from expertmesh.bench import peers
from expertmesh.bench.case import SETTINGS, Case, write_checkpoint
from expertmesh.bench.worker import median
from expertmesh.config.errors import DistributedFailure, ExpertmeshError

MEMORY_REPEATS = 3
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}


def main() -> None:
    arguments = parse_arguments()
    case = dataclasses.replace(
        SETTINGS[arguments.setting],
        **{k: v for k in ("ranks", "tokens", "experts", "layers") if (v := getattr(arguments, k)) is not None},
    )
    names = [arguments.profile] if arguments.profile else arguments.systems.split(",")
    with tempfile.TemporaryDirectory() as scratch:
        case = write_checkpoint(case, Path(scratch) / "checkpoint")
        try:
            if arguments.profile:
                print(launch("profile", case, names, arguments.repeats)["profile"])
                return
            report = measure(case, names, arguments.repeats, with_memory=not arguments.no_memory)
        except ExpertmeshError as error:
            sys.exit(str(error))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report | {"machine": machine()}, indent=1) + "\n")
    print(table(case, report["time"], report["memory"]))
    disagreement = disagreements(case, report["time"])
    if disagreement:
        sys.exit(disagreement)


def parse_arguments() -> argparse.Namespace:
    """The command line; shapes that are not given come from the named setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=sorted(SETTINGS), default="fp32-512")
    parser.add_argument("--systems", default="transformers_ep4,transformers_fsdp4,unsharded")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--tokens", type=int, help="tokens per rank and step")
    parser.add_argument("--experts", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--no-memory", action="store_true", help="skip the launches that measure memory")
    parser.add_argument("--profile", metavar="SYSTEM", help="print one system's CPU profile and nothing else")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def measure(case: Case, names: Sequence[str], repeats: int, *, with_memory: bool) -> dict[str, Any]:
    """Time all systems in one job and, in jobs of their own, measure the memory of each. `case` names a checkpoint."""
    timing = launch("time", case, names, repeats)
    memory = {name: launch("memory", case, [name], MEMORY_REPEATS) for name in names} if with_memory else {}
    return {"case": dataclasses.asdict(case), "time": timing, "memory": memory}


def launch(
    mode: str, case: Case, names: Sequence[str], repeats: int, worker: str = "expertmesh.bench.worker"
) -> dict[str, Any]:
    """Start `case.ranks` fresh one-thread workers, wait for all of them and return what rank 0 wrote.

    Raises `DistributedFailure` when one of them fails; its output tells why.
    """
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "result.json"
        command = [
            *(sys.executable, "-W", "ignore", "-m", worker, mode),
            *("--case", case.to_json(), "--systems", ",".join(names), "--repeats", str(repeats)),
            *("--store", str(Path(scratch) / "store"), "--out", str(out)),
        ]
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(case.ranks),
            "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1",
        }  # fmt: skip
        ranks = [
            subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(case.ranks)
        ]
        try:
            failed = [rank for rank, process in enumerate(ranks) if process.wait() != 0]
        finally:
            for process in ranks:
                process.kill()
        if failed:
            raise DistributedFailure(
                f"ranks {failed} of the {mode} run over {', '.join(names)} failed; their output is above"
            )
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def table(case: Case, timing: dict[str, Any], memory: dict[str, Any]) -> str:
    """The figures as a Markdown table; ratios are to the first system."""
    lines = [
        f"Qwen3-MoE, {case.layers} layers, hidden {case.hidden}, {case.experts} experts, top-{case.top_k},"
        f" width {case.expert_width}; {case.ranks} ranks, {case.tokens} tokens per rank,"
        f" {case.compute} compute; medians",
        "",
        "| system | wall s | CPU s | ratio wall / CPU | all-to-all MB (calls) |"
        " other collectives MB (calls) | peak MB (with file pages) | peak tensor MB | loss | gradient norm |",
        "|" + "---|" * 10,
    ]
    base_wall, base_cpu = (median(next(iter(timing.values()))[key]) for key in ("wall", "cpu"))
    for name, row in timing.items():
        wall, cpu = median(row["wall"]), median(row["cpu"])
        peaks = memory.get(name, {}).get("ranks", [])
        lines.append(
            f"| {name} | {wall:.3f} | {cpu:.3f} | {wall / base_wall:.2f} / {cpu / base_cpu:.2f} |"
            f" {traffic_text(row['traffic'], ['all_to_all'])} |"
            f" {traffic_text(row['traffic'], ['all_gather', 'reduce_scatter', 'all_reduce', 'broadcast'])} |"
            f" {megabytes(peaks, 'step_anonymous')} ({megabytes(peaks, 'step')}) |"
            f" {megabytes(peaks, 'tensors')} | {row['loss']:.6f} | {row['grad_norm']:.6f} |"
        )
    notes = [f"- {name}: {row['note']}" for name, row in timing.items()]
    return "\n".join([*lines, "", "MB = 10^6 bytes; traffic is the mean over ranks, memory the highest rank.", *notes])


def traffic_text(per_rank: list[dict[str, dict[str, int]]], kinds: Sequence[str]) -> str:
    """Mean megabytes and calls per rank and step of these kinds of collective."""
    entries = [rank[kind] for rank in per_rank for kind in kinds if kind in rank]
    if not entries:
        return "-"
    megabytes = sum(entry["bytes"] for entry in entries) / len(per_rank) / 1e6
    return f"{megabytes:.1f} ({sum(entry['calls'] for entry in entries) / len(per_rank):.0f})"


def megabytes(peaks: list[dict[str, int]], figure: str) -> str:
    """The highest rank's figure in megabytes."""
    return f"{max(rank[figure] for rank in peaks) / 1e6:.0f}" if peaks else "-"


def disagreements(case: Case, timing: dict[str, Any]) -> str:
    """A sentence on the first system whose loss or gradient norm is not the first one's; empty if none."""
    first, *others = timing.items()
    for name, row in others:
        for key in ("loss", "grad_norm") if row["trains_all"] else ("loss",):
            expected, got = first[1][key], row[key]
            if not abs(got - expected) <= LOSS_TOLERANCE[case.compute] * abs(expected):
                return f"{name} computes something else than {first[0]}: {key} {got:.6f} against {expected:.6f}"
    return ""


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    accelerator = torch.accelerator.current_accelerator()
    return peers.machine(accelerator or torch.device("cpu"))


if __name__ == "__main__":
    main()
