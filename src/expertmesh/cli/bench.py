"""`expertmesh bench [step|layer|load|lora]`: expertmesh beside its peers on this machine, in one run, as tables.

For someone who wants to know what to expect here before believing figures from elsewhere. Repetitions of all systems
alternate, medians are compared, and systems that do not compute the same are refused (exit 3).
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from expertmesh.bench.case import Sizes, check_ranks, sizes_for
from expertmesh.bench.layer import bench_layer
from expertmesh.bench.lora import bench_lora
from expertmesh.bench.model import bench_load, bench_step
from expertmesh.bench.result import Result, machine
from expertmesh.cli.printing import refuse_unwritable
from expertmesh.config.errors import InputError
from expertmesh.io.directory import io_errors
from expertmesh.io.terminal import printable

# What each part measures, in a line, and the function that does it with sizes, number of ranks and device.
PARTS: dict[str, tuple[str, Callable[[Sizes, int, torch.device], Result]]] = {
    "step": ("forward and backward of a model beside transformers' own expert parallelism", bench_step),
    "layer": ("one layer's experts beside transformers' grouped_mm", bench_layer),
    "load": ("loading a checkpoint beside transformers' from_pretrained", bench_load),
    "lora": ("adapters on one layer's experts beside stock PEFT", bench_lora),
}


def run(parts: Sequence[str], quick: bool, nproc: int | None, report: str | None) -> int:
    """Measure `parts` (all, if none is named) and print their tables; returns 0. `report` is a JSON file to write.

    Raises `InputError` for what this machine cannot do, `IntegrityError` when a peer computes something else.
    """
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise InputError(
            f"bench has no part {unknown[0]}; use {', '.join(PARTS)}, or none for all", key="bench.no-such-part"
        )
    refuse_unwritable(report)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    sizes = sizes_for(device, quick)
    ranks = check_ranks(nproc, device, quick, sizes)
    here = machine()
    for line in _machine_lines(here, ranks, device):
        print(line, flush=True)
    threads = torch.get_num_threads()
    results = {}
    try:
        if device.type == "cpu":
            # As the ranks of a step: one thread, so that figures of machines with many cores can be compared.
            torch.set_num_threads(1)
        for part in dict.fromkeys(parts or PARTS):
            summary, measure = PARTS[part]
            print(f"\n## {part}: {summary}\n", flush=True)
            results[part] = measure(sizes, ranks, device)
            for line in _result_lines(results[part]):
                print(printable(line), flush=True)
    finally:
        torch.set_num_threads(threads)
    if report is not None:
        _write(Path(report), {"machine": here, "ranks": ranks, "quick": quick}, results)
    return 0


def _machine_lines(machine: dict[str, Any], ranks: int, device: torch.device) -> Iterator[str]:
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in machine["versions"].items())
    yield f"versions    {versions}"
    where = "a thread each" if device.type == "cpu" else "an accelerator each"
    yield f"machine     {machine['device']}; step and load on {ranks} local rank{'s' * (ranks > 1)}, {where}"
    busy = machine["load_average"][0]
    if device.type == "cpu" and busy > 0.5:
        yield f"note        the machine is busy (load average {busy:.1f}); ratios hold better than seconds"


def _result_lines(result: Result) -> Iterator[str]:
    yield result.table
    yield ""
    if result.missing is not None:
        yield f"missing     {result.missing}; ours is measured alone"
    width = max((len(ratio.what) for ratio in result.ratios), default=0)
    for ratio in result.ratios:
        yield f"ratio       {ratio.what:<{width}}  {ratio.value:.2f}× {result.peer}"


def _write(path: Path, head: dict[str, Any], results: dict[str, Result]) -> None:
    found = {
        part: {
            "peer": result.peer,
            "missing": result.missing,
            "ratios": [dataclasses.asdict(ratio) | {"ratio": ratio.value} for ratio in result.ratios],
            "figures": result.data,
        }
        for part, result in results.items()
    }
    content = json.dumps({"format": "expertmesh-bench", "version": 1, **head, "parts": found}, indent=1) + "\n"
    with io_errors(path, len(content)):
        path.write_text(content, encoding="utf-8")
