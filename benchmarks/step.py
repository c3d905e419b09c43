"""Forward and backward of a Qwen3-MoE on local ranks, beside transformers' own EP x FSDP2 and others.

    python -m benchmarks.step --setting fp32-512 --systems transformers_ep4,expertmesh_ep4
    python -m benchmarks.step --profile expertmesh_ep4          # where the time goes

The systems stand in worker.py and systems.py. All of them load one checkpoint and read the same tokens, and their
losses and gradient norms must agree: a figure for a different computation is worth nothing. Prints a Markdown table,
writes JSON with --json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.case import Case, write_checkpoint
from benchmarks.probes import median
from benchmarks.result import ResultsDiffer, machine, markdown
from benchmarks.systems import SETTINGS, TRAIN_LESS
from benchmarks.worker import launch

WORKER = "benchmarks.systems"
MEMORY_REPEATS = 3
# Fields of a case that the command line can change.
SHAPE = {"ranks": "", "tokens": "per rank and micro-batch", "experts": "", "layers": ""}
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}


def main() -> None:
    parser = case_parser(__doc__, "transformers_ep4,transformers_fsdp4,unsharded", repeats=9)
    parser.add_argument("--micro-batches", type=int, default=1, help="of a rank and step")
    parser.add_argument("--no-memory", action="store_true", help="skip the launches that measure memory")
    parser.add_argument("--profile", metavar="SYSTEM", help="print one system's CPU profile and nothing else")
    arguments = parser.parse_args()
    case = case_of(arguments, arguments.micro_batches)
    if arguments.profile:
        with tempfile.TemporaryDirectory() as scratch:
            case = write_checkpoint(case, Path(scratch))
            print(launch("profile", case, [arguments.profile], arguments.repeats, WORKER)["profile"])
        return
    names = arguments.systems.split(",")
    report = measure_step(case, names, arguments.repeats, with_memory=not arguments.no_memory)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report | {"machine": machine()}, indent=1) + "\n", encoding="utf-8")
    print(step_table(case, report))
    check_steps(case, report["time"], keys=["loss"])
    if whole := {name: row for name, row in report["time"].items() if not name.startswith(TRAIN_LESS)}:
        check_steps(case, whole)


def measure_step(
    case: Case, names: Sequence[str], repeats: int, *, with_memory: bool, worker: str = WORKER
) -> dict[str, Any]:
    """Time all systems in one job and, in jobs of their own, measure the memory of each."""
    with tempfile.TemporaryDirectory(prefix="expertmesh-bench-") as scratch:
        case = write_checkpoint(case, Path(scratch))
        timing = launch("time", case, names, repeats, worker)
        found = {name: launch("memory", case, [name], MEMORY_REPEATS, worker) for name in names if with_memory}
    return {"case": dataclasses.asdict(case), "time": timing, "memory": found}


def check_steps(case: Case, timing: dict[str, Any], keys: Sequence[str] = ("loss", "grad_norm")) -> None:
    """`ResultsDiffer` on the first system whose loss or gradient norm is not the first one's."""
    first, *others = timing.items()
    for name, row in others:
        for key in keys:
            expected, got = first[1][key], row[key]
            if not abs(got - expected) <= LOSS_TOLERANCE[case.compute] * abs(expected):
                raise ResultsDiffer(
                    f"{name} computes something else than {first[0]}: {key} {got:.6f} against {expected:.6f}"
                )


def step_table(case: Case, report: dict[str, Any]) -> str:
    """Return the figures as a Markdown table; ratios are to the first system."""
    timing, rows = report["time"], []
    base = [median(next(iter(timing.values()))[key]) for key in ("wall", "cpu")]
    for name, row in timing.items():
        spent = [median(row[key]) for key in ("wall", "cpu")]
        peaks = report["memory"].get(name, {}).get("ranks", [])
        anonymous, resident = (
            f"{max(rank[key] for rank in peaks) / 1e6:.0f}" if peaks else "-" for key in ("step_anonymous", "step")
        )
        times = [f"{spent[0]:.3f}", f"{spent[1]:.3f}", f"{spent[0] / base[0]:.2f} / {spent[1] / base[1]:.2f}"]
        sent = [_traffic(row["traffic"], all_to_all) for all_to_all in (True, False)]
        results = [f"{row['loss']:.6f}", f"{row['grad_norm']:.6f}"]
        rows.append([name, *times, *sent, f"{anonymous} ({resident})", f"{max(row['tensors']) / 1e6:.0f}", *results])
    head = ["system", "wall s", "CPU s", "ratio wall / CPU", "all-to-all MB (calls)", "other collectives MB (calls)"]
    head += ["peak MB (with file pages)", "peak tensor MB", "loss", "gradient norm"]
    return "\n".join([
        f"Qwen3-MoE, {case.layers} layers, hidden {case.hidden}, {case.experts} experts, top-{case.top_k}, width "
        f"{case.expert_width}; {case.ranks} ranks, {case.tokens} tokens per rank, {case.compute} compute; medians",
        "", markdown(head, rows), "",
        "MB = 10^6 bytes; traffic is the mean over ranks, memory the highest rank.",
        *(f"- {name}: {row['note']}" for name, row in timing.items()),
    ])  # fmt: skip


def _traffic(per_rank: list[dict[str, dict[str, int]]], all_to_all: bool) -> str:
    """Mean megabytes and calls per rank and step of all-to-alls, or of all other collectives."""
    entries = [entry for rank in per_rank for kind, entry in rank.items() if (kind == "all_to_all") == all_to_all]
    sent, calls = (sum(entry[key] for entry in entries) / len(per_rank) for key in ("bytes", "calls"))
    return f"{sent / 1e6:.1f} ({calls:.0f})" if entries else "-"


def case_parser(doc: str | None, systems: str, repeats: int) -> argparse.ArgumentParser:
    """Return a parser of what is measured; shapes that are not given come from the named setting."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=sorted(SETTINGS), default="fp32-512")
    parser.add_argument("--systems", default=systems)
    parser.add_argument("--repeats", type=int, default=repeats, help="timed steps; 0: time the one that counts")
    for field, what in SHAPE.items():
        parser.add_argument(f"--{field}", type=int, help=what)
    parser.add_argument("--json", metavar="FILE")
    return parser


def case_of(arguments: argparse.Namespace, micro_batches: int) -> Case:
    """Return the case that the arguments of `case_parser` name."""
    given = {field: value for field in SHAPE if (value := getattr(arguments, field)) is not None}
    return dataclasses.replace(SETTINGS[arguments.setting], micro_batches=micro_batches, **given)


if __name__ == "__main__":
    main()
