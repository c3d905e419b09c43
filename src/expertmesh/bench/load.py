"""Seconds and host memory that loading a checkpoint takes, beside transformers' own `from_pretrained`.

    python -m benchmarks.load                                  # 2.2 GB in bfloat16, on 1 rank and on 4
    python -m benchmarks.load --layers 1 --repeats 1           # a quick look

Writes a random Qwen3-MoE checkpoint in the published layout (one tensor per expert, several files, bfloat16) into a
temporary directory, and loads it with each system at ep 1 on 1 rank and ep 4 on 4 ranks, in fresh processes each time,
systems in turn. Both store the parameters in bfloat16 and shard them over all ranks; the sums of all squares must
agree. Files are in the page cache, since they have just been written: a cold disk adds the same to all. Needs as
much free memory as three checkpoints. Prints a Markdown table, writes JSON with --json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expertmesh.bench.case import SETTINGS, Case
from expertmesh.bench.step import launch, machine
from expertmesh.bench.worker import median
from expertmesh.config.errors import ExpertmeshError

SYSTEMS = ("transformers_ep", "expertmesh_ep")
MAX_SHARD_SIZE = "500MB"
ALLOWANCE_BYTES = 300_000_000
TOLERANCE = 1e-9
_WRITE = "from expertmesh.bench.case import *; write_checkpoint(Case.from_json({!r}), Path({!r}), {!r})"


def main() -> None:
    arguments = parse_arguments()
    case = dataclasses.replace(SETTINGS["load-2gb"], layers=arguments.layers)
    sizes = [int(size) for size in arguments.ep.split(",")]
    try:
        report = measure(case, SYSTEMS, sizes, arguments.repeats, arguments.directory)
    except ExpertmeshError as error:
        sys.exit(str(error))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report | {"machine": machine()}, indent=1) + "\n")
    print(table(case, report["checkpoint"], report["runs"]))
    disagreement = disagreements(report["runs"])
    if disagreement:
        sys.exit(disagreement)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=SETTINGS["load-2gb"].layers, help="201 MB each, beside 134 MB")
    parser.add_argument("--ep", default="1,4", help="sizes; each is also the number of ranks")
    parser.add_argument("--directory", help="where the temporary checkpoint goes")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def measure(
    case: Case, systems: Sequence[str], sizes: Sequence[int], repeats: int, directory: str | None = None
) -> dict[str, Any]:
    """Write a checkpoint of `case` into a temporary directory and load it with every system, on so many ranks each."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        # In a process of its own, whose memory is then free again.
        subprocess.run([sys.executable, "-c", _WRITE.format(case.to_json(), scratch, MAX_SHARD_SIZE)], check=True)
        case = dataclasses.replace(case, checkpoint=scratch)
        on_disk = checkpoint_facts(Path(scratch))
        runs = repeat_loads(case, systems, sizes, repeats)
    return {"case": dataclasses.asdict(case), "checkpoint": on_disk, "runs": runs}


def disagreements(runs: dict[str, list[dict[str, Any]]]) -> str:
    """A sentence on the first system that holds other weights than the first one; empty if none does."""
    squares = {name: run[0]["square"] for name, run in runs.items()}
    expected = next(iter(squares.values()))
    for name, square in squares.items():
        if not abs(square - expected) <= TOLERANCE * expected:
            return f"{name} holds other weights than {next(iter(squares))}: {square} against {expected}"
    return ""


def repeat_loads(
    case: Case, systems: Sequence[str], sizes: Sequence[int], repeats: int
) -> dict[str, list[dict[str, Any]]]:
    """Results of every run, by system and size; the order of systems is turned round each time."""
    runs: dict[str, list[dict[str, Any]]] = {f"{name}{size}": [] for size in sizes for name in systems}
    for size in sizes:
        for repeat in range(repeats):
            for name in systems if repeat % 2 == 0 else reversed(systems):
                result = launch("load", dataclasses.replace(case, ranks=size), [f"{name}{size}"], 1)
                runs[f"{name}{size}"].append(result)
    return runs


def checkpoint_facts(directory: Path) -> dict[str, int]:
    """Number of files, bytes of all tensors and of the largest one, from the headers."""
    from expertmesh.io.safetensors_reader import open_weight_files

    with open_weight_files(directory) as checkpoint:
        largest = max(tensor.nbytes for tensor in checkpoint.tensors.values())
        files = len({tensor.path for tensor in checkpoint.tensors.values()})
        return {"files": files, "tensors": len(checkpoint.tensors), "bytes": checkpoint.total_bytes, "largest": largest}


def table(case: Case, on_disk: dict[str, int], runs: dict[str, list[dict[str, Any]]]) -> str:
    """The figures as a Markdown table: median seconds, and of the memory the highest rank of all runs."""
    files = f"{on_disk['files']} file{'s' * (on_disk['files'] != 1)}"
    lines = [
        f"Qwen3-MoE, {case.layers} layers, hidden {case.hidden}, {case.experts} experts, width {case.expert_width},"
        f" {case.params}: {on_disk['bytes'] / 1e9:.2f} GB, {on_disk['tensors']:,} tensors in {files},"
        f" the largest {on_disk['largest'] / 1e6:.0f} MB",
        "",
        "| system | load s (all) | peak MB above the start | of it anonymous / mapped files | own shard MB |"
        " bound MB | read by calls MB | kept MB |",
        "|" + "---|" * 8,
    ]
    for name, results in runs.items():
        ranks = [rank for result in results for rank in result["ranks"]]
        seconds = [result["seconds"] for result in results]
        high = {key: max(rank[key] for rank in ranks) / 1e6 for key in ranks[0]}
        bound = high["shard"] + (on_disk["largest"] + ALLOWANCE_BYTES) / 1e6
        lines.append(
            f"| {name} | {median(seconds):.2f} ({', '.join(f'{each:.2f}' for each in sorted(seconds))}) |"
            f" {high['peak']:.0f} | {high['anonymous']:.0f} / {high['file']:.0f} | {high['shard']:.0f} |"
            f" {bound:.0f} | {high['read']:.1f} | {high['kept']:.0f} |"
        )
    return "\n".join([*lines, "", "MB = 10^6 bytes, of the highest rank; bound = own shard + largest tensor + 300 MB."])


if __name__ == "__main__":
    main()
