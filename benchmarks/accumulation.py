"""A step of M accumulated micro-batches: ours in both orders, beside transformers' FSDP2 and its expert parallelism.

    python -m benchmarks.accumulation --micro-batches 1,2,4,8 --json benchmarks/data/accumulation.json

Measures as `benchmarks.step` does, once for each M: the losses and gradient norms of all systems must agree. Prints a
Markdown table, and adds its rows to the file that --json names, from which `make figures` draws.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.case import Case
from benchmarks.probes import median
from benchmarks.result import machine, markdown
from benchmarks.step import case_of, case_parser, check_steps, measure_step

SYSTEMS = (
    "transformers_fsdp4", "transformers_no_sync_fsdp4", "expertmesh_ep1", "expertmesh_by_layer_ep1",
    "expertmesh_by_layer_full_ep1", "transformers_ep4", "expertmesh_ep4", "expertmesh_by_layer_ep4",
    "expertmesh_by_layer_full_ep4",
)  # fmt: skip
KINDS = ("all_gather", "reduce_scatter", "all_to_all")


def main() -> None:
    parser = case_parser(__doc__, ",".join(SYSTEMS), repeats=3)
    parser.add_argument("--micro-batches", default="1,2,4,8,16", help="per rank and step, measured one after the other")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for number in map(int, arguments.micro_batches.split(",")):
        case = case_of(arguments, number)
        timing = measure_step(case, arguments.systems.split(","), arguments.repeats, with_memory=False)["time"]
        check_steps(case, timing)
        rows += rows_of(number, timing)
        print(table(rows[-len(timing) :]), flush=True)
        if arguments.json:
            add_rows(Path(arguments.json), case, rows[-len(timing) :])


def rows_of(micro_batches: int, timing: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the figures of each system: seconds of all repeats, bytes (mean over ranks) and calls, the highest peak."""
    for name, row in timing.items():
        figures = {key: [round(seconds, 3) for seconds in row[key]] for key in ("wall", "cpu")}
        sent = {
            kind: [
                round(sum(rank.get(kind, {}).get(key, 0) for rank in row["traffic"]) / len(row["traffic"]))
                for key in ("bytes", "calls")
            ]
            for kind in KINDS
        }
        results = {key: row[key] for key in ("loss", "grad_norm")}
        results |= {"tensors": max(row["tensors"])}
        yield {"micro_batches": micro_batches, "system": name, **figures, **sent, **results}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a Markdown table; seconds are medians."""
    head = ["system", "M", "wall s", "CPU s"]
    head += [f"{what} MB (calls)" for what in ("gathers", "reductions", "all-to-alls")] + ["peak tensor MB"]
    cells = [
        [
            row["system"], str(row["micro_batches"]),
            *(f"{median(row[key]):.1f}" if row[key] else "-" for key in ("wall", "cpu")),
            *(f"{row[kind][0] / 1e6:.1f} ({row[kind][1]})" if row[kind][1] else "-" for kind in KINDS),
            f"{row['tensors'] / 1e6:.0f}",
        ]
        for row in rows
    ]  # fmt: skip
    return markdown(head, cells)


def add_rows(path: Path, case: Case, rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows of a case into a file, in the place of those of the same system and M; all of M must agree."""
    found = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    merged = {(row["micro_batches"], row["system"]): row for row in (*found, *rows)}
    check_steps(case, {name: row for (number, name), row in merged.items() if number == case.micro_batches})
    lines = ",\n".join(f"  {json.dumps(merged[key])}" for key in sorted(merged))
    path.write_text(f'{{\n "machine": {json.dumps(machine())},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
