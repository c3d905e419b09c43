"""Seconds and host memory that loading a checkpoint takes, beside transformers' own `from_pretrained`.

    python -m benchmarks.load                                  # 2.2 GB in bfloat16, on 1 rank and on 4
    python -m benchmarks.load --layers 1 --repeats 1           # a quick look

A random Qwen3-MoE checkpoint in the published layout (one tensor per expert, several files) is loaded in fresh
processes each time. Both systems store the parameters in bfloat16 and shard them over all ranks; the sums of all
squares must agree. Files are in the page cache, since they have just been written: a cold disk adds the same to all.
Needs as much free memory as three checkpoints. Prints a Markdown table, writes JSON with --json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.case import LOAD, Case, write_checkpoint
from benchmarks.probes import alternating, median
from benchmarks.result import ResultsDiffer, machine, markdown
from benchmarks.worker import launch
from expertmesh.io.safetensors_reader import open_weight_files

LOAD_TOLERANCE = 1e-9
ALLOWANCE_BYTES = 300_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=LOAD.layers, help="201 MB each, beside 134 MB")
    parser.add_argument("--ep", default="1,4", help="sizes; each is also the number of ranks")
    parser.add_argument("--directory", help="where the temporary checkpoint goes")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    case = dataclasses.replace(LOAD, layers=arguments.layers)
    sizes = [int(size) for size in arguments.ep.split(",")]
    systems = ("transformers_ep", "expertmesh_ep")
    report = measure_load(case, systems, sizes, arguments.repeats, arguments.directory)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report | {"machine": machine()}, indent=1) + "\n", encoding="utf-8")
    print(load_table(case, report))
    check_loads(report["runs"])


def measure_load(
    case: Case, systems: Sequence[str], counts: Sequence[int], repeats: int, directory: str | None = None
) -> dict[str, Any]:
    """Write a checkpoint of `case` into a temporary directory and load it with every system, on so many ranks each."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        case = write_checkpoint(case, Path(scratch), max_shard_size="500MB")
        with open_weight_files(Path(scratch)) as checkpoint:
            tensors = checkpoint.tensors.values()
            on_disk = {"files": len({tensor.path for tensor in tensors}), "tensors": len(tensors)}
            on_disk |= {"bytes": checkpoint.total_bytes, "largest": max(tensor.nbytes for tensor in tensors)}
        runs: dict[str, list[dict[str, Any]]] = {f"{name}{count}": [] for count in counts for name in systems}
        for count in counts:
            for name in alternating([f"{name}{count}" for name in systems], repeats):
                runs[name].append(launch("load", dataclasses.replace(case, ranks=count), [name], 1))
    return {"case": dataclasses.asdict(case), "checkpoint": on_disk, "runs": runs}


def check_loads(runs: dict[str, list[dict[str, Any]]]) -> None:
    """`ResultsDiffer` on the first system that holds other weights than the first one."""
    squares = {name: run[0]["square"] for name, run in runs.items()}
    first, expected = next(iter(squares.items()))
    for name, square in squares.items():
        if not abs(square - expected) <= LOAD_TOLERANCE * expected:
            raise ResultsDiffer(f"{name} holds other weights than {first}: {square} against {expected}")


def load_table(case: Case, report: dict[str, Any]) -> str:
    """Return the figures as a Markdown table: median seconds, and of the memory the highest rank of all runs."""
    on_disk, rows = report["checkpoint"], []
    for name, runs in report["runs"].items():
        seconds = sorted(run["seconds"] for run in runs)
        ranks = [rank for run in runs for rank in run["ranks"]]
        high = {key: max(rank[key] for rank in ranks) / 1e6 for key in ranks[0]}
        bound = high["shard"] + (on_disk["largest"] + ALLOWANCE_BYTES) / 1e6
        time, parts = f"{median(seconds):.2f} ({', '.join(f'{each:.2f}' for each in seconds)})", ("anonymous", "file")
        memory = [f"{high['peak']:.0f}", " / ".join(f"{high[part]:.0f}" for part in parts), f"{high['shard']:.0f}"]
        rows.append([name, time, *memory, f"{bound:.0f}", f"{high['read']:.1f}", f"{high['kept']:.0f}"])
    head = ["system", "load s (all)", "peak MB above the start", "of it anonymous / mapped files", "own shard MB"]
    head += ["bound MB", "read by calls MB", "kept MB"]
    return "\n".join([
        f"Qwen3-MoE, {case.layers} layers, hidden {case.hidden}, {case.experts} experts, width {case.expert_width}, "
        f"{case.params}: {on_disk['bytes'] / 1e9:.2f} GB, {on_disk['tensors']:,} tensors in {on_disk['files']} "
        f"file{'s' * (on_disk['files'] != 1)}, the largest {on_disk['largest'] / 1e6:.0f} MB",
        "", markdown(head, rows), "",
        "MB = 10^6 bytes, of the highest rank; bound = own shard + largest tensor + 300 MB.",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
