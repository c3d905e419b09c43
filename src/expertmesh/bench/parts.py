"""The comparisons that `expertmesh bench` makes: sizes, peers, and what the figures of ours are of theirs.

Each part gives a `Result`: a Markdown table, ratios in one run, and everything as data. A peer that is not installed
is named in `missing`, and ours is measured alone. Nothing is compared that does not compute the same.
"""

import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from expertmesh.bench import layer, load, lora, step
from expertmesh.bench.case import SETTINGS, Case, write_checkpoint
from expertmesh.bench.layer import Shape
from expertmesh.bench.lora import AdapterCase
from expertmesh.bench.peers import why_missing
from expertmesh.bench.worker import median
from expertmesh.config.errors import InputError, IntegrityError

CPU_RANKS, QUICK_RANKS = 4, 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured, and how often. `ranks` of the cases are replaced by `--nproc`."""

    step: Case
    load: Case
    layer: Shape
    layer_dtypes: tuple[torch.dtype, ...]
    layer_tokens: tuple[int, ...]
    lora: tuple[AdapterCase, ...]
    step_repeats: int
    load_repeats: int
    layer_repeats: int
    lora_repeats: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of ours to the peer's, both from one run; below 1 is less. `what` names the figure and the case."""

    what: str
    ours: float
    peer: float

    @property
    def value(self) -> float:
        return self.ours / self.peer


@dataclass(frozen=True, slots=True)
class Result:
    """What one part has measured. `missing` says why a peer is not in the table."""

    part: str
    peer: str
    table: str
    ratios: tuple[Ratio, ...]
    missing: str | None
    data: dict[str, Any]


_TINY_LAYER = Shape(hidden=256, width=128, experts=16, top_k=4)
_BOTH = (torch.float32, torch.bfloat16)
_GPU_STEP = Case(
    tokens=8192, sequence=4096, compute="bfloat16", params="bfloat16", layers=2, hidden=2048, experts=128,
    expert_width=768, vocabulary=32768, heads=32, head_dim=128,
)  # fmt: skip
_GPU_LORA = AdapterCase(16384, Shape(), "bfloat16")

CPU = Sizes(
    SETTINGS["fp32-512"], SETTINGS["load-2gb"], _TINY_LAYER, _BOTH, (2048,), lora.CASES,
    step_repeats=7, load_repeats=3, layer_repeats=15, lora_repeats=5,
)  # fmt: skip
CPU_QUICK = Sizes(
    dataclasses.replace(CPU.step, layers=2, tokens=128, sequence=128), dataclasses.replace(CPU.load, layers=1),
    _TINY_LAYER, (torch.float32,), (512,), (AdapterCase(512, Shape(256, 128, 16, 4), "float32"),),
    step_repeats=3, load_repeats=1, layer_repeats=5, lora_repeats=3,
)  # fmt: skip
# Qwen3-30B-A3B's layer; two of them in the step.
ACCELERATOR = Sizes(
    _GPU_STEP, SETTINGS["load-2gb"], Shape(), (torch.bfloat16,), (8192, 32768), (_GPU_LORA,),
    step_repeats=9, load_repeats=3, layer_repeats=15, lora_repeats=9,
)  # fmt: skip
ACCELERATOR_QUICK = dataclasses.replace(
    ACCELERATOR, step=dataclasses.replace(_GPU_STEP, tokens=2048, sequence=2048), load=CPU_QUICK.load,
    layer_tokens=(8192,), step_repeats=3, load_repeats=1, layer_repeats=5, lora_repeats=3,
)  # fmt: skip


def sizes_for(device: torch.device, quick: bool) -> Sizes:
    if device.type == "cpu":
        return CPU_QUICK if quick else CPU
    return ACCELERATOR_QUICK if quick else ACCELERATOR


def check_ranks(nproc: int | None, device: torch.device, quick: bool, sizes: Sizes) -> int:
    """How many ranks `step` and `load` use: `nproc`, else one per accelerator, else a few on the CPU.

    Raises `InputError` for a number that the machine or the models' experts do not allow.
    """
    devices = torch.accelerator.device_count() if device.type != "cpu" else None
    if devices is not None and nproc is not None and nproc > devices:
        raise InputError(f"--nproc is {nproc}, but this machine has {devices} accelerators; use {devices} or fewer")
    ranks = nproc or devices or (QUICK_RANKS if quick else CPU_RANKS)
    for case in (sizes.step, sizes.load):
        if case.experts % ranks:
            choices = ", ".join(str(size) for size in range(1, case.experts + 1) if case.experts % size == 0)
            raise InputError(f"--nproc {ranks} does not divide the {case.experts} experts of a layer; use {choices}")
    return ranks


def bench_step(sizes: Sizes, ranks: int, device: torch.device) -> Result:
    """A training step beside transformers' own expert parallelism, on `ranks` local ranks."""
    case = dataclasses.replace(sizes.step, ranks=ranks)
    missing, ours, theirs = why_missing("transformers"), f"expertmesh_ep{ranks}", f"transformers_ep{ranks}"
    names = [ours] if missing else [theirs, ours]
    with tempfile.TemporaryDirectory(prefix="expertmesh-bench-") as scratch:
        case = write_checkpoint(case, Path(scratch) / "checkpoint")
        # Resident memory is read where Linux keeps it.
        with_memory = device.type != "cpu" or sys.platform == "linux"
        report = step.measure(case, names, sizes.step_repeats, with_memory=with_memory)
    _agree(step.disagreements(case, report["time"]))
    ratios = () if missing else tuple(_step_ratios(report, ours, theirs))
    return Result("step", "transformers", step.table(case, report["time"], report["memory"]), ratios, missing, report)


def _step_ratios(report: dict[str, Any], ours: str, theirs: str) -> Iterator[Ratio]:
    for key, what in (("wall", "wall seconds"), ("cpu", "CPU seconds of all ranks")):
        yield Ratio(what, *(median(report["time"][name][key]) for name in (ours, theirs)))
    traffic = [
        sum(rank.get("all_to_all", {"bytes": 0})["bytes"] for rank in report["time"][name]["traffic"])
        for name in (ours, theirs)
    ]
    if traffic[1]:
        yield Ratio("all-to-all bytes", *traffic)
    for key, what in (("step_anonymous", "peak memory of a rank"), ("tensors", "peak tensor memory of a rank")):
        if report["memory"]:
            peaks = (max(rank[key] for rank in report["memory"][name]["ranks"]) for name in (ours, theirs))
            yield Ratio(what, *peaks)


def bench_layer(sizes: Sizes, ranks: int, device: torch.device) -> Result:
    """One layer's experts beside transformers' `grouped_mm`, on one device."""
    del ranks
    names = tuple(layer.BUILDERS)
    reports = [
        layer.measure(names, sizes.layer, device, dtype, sizes.layer_tokens, sizes.layer_repeats)
        for dtype in sizes.layer_dtypes
    ]
    ratios = []
    for report in reports:
        for row in report["rows"]:
            if row["system"] == "expertmesh_grouped_mm":
                peer = next(
                    each
                    for each in report["rows"]
                    if each["system"] == "transformers_grouped_mm"
                    and (each["tokens"], each["routing"]) == (row["tokens"], row["routing"])
                )
                where = f"{report['dtype']}, {row['tokens']} tokens, {row['routing']} routing"
                ratios.append(Ratio(f"seconds, {where}", row["seconds"], peer["seconds"]))
                ratios.append(Ratio(f"peak memory, {where}", row["peak_bytes"], peer["peak_bytes"]))
                ratios.append(Ratio(f"bytes saved for backward, {where}", row["saved_bytes"], peer["saved_bytes"]))
    tables = "\n\n".join(layer.table(report) for report in reports)
    return Result("layer", "transformers", tables, tuple(ratios), None, {"reports": reports})


def bench_load(sizes: Sizes, ranks: int, device: torch.device) -> Result:
    """Loading a checkpoint beside transformers' `from_pretrained`, on one rank and on `ranks`."""
    del device
    if sys.platform != "linux":
        raise InputError("bench load reads resident memory from /proc, which only Linux has; leave load out")
    missing = why_missing("transformers")
    systems = ("expertmesh_ep",) if missing else ("transformers_ep", "expertmesh_ep")
    counts = sorted({1, ranks})
    report = load.measure(sizes.load, systems, counts, sizes.load_repeats)
    _agree(load.disagreements(report["runs"]))
    ratios = []
    for count in () if missing else counts:
        ours, theirs = (report["runs"][f"{name}{count}"] for name in ("expertmesh_ep", "transformers_ep"))
        seconds = (median([run["seconds"] for run in runs]) for runs in (ours, theirs))
        peaks = (max(rank["peak"] for run in runs for rank in run["ranks"]) for runs in (ours, theirs))
        ratios.append(Ratio(f"seconds, {count} rank{'s' * (count > 1)}", *seconds))
        ratios.append(Ratio(f"peak host memory of a rank, {count} rank{'s' * (count > 1)}", *peaks))
    case = Case(**report["case"])
    return Result(
        "load", "transformers", load.table(case, report["checkpoint"], report["runs"]), tuple(ratios), missing, report
    )


def bench_lora(sizes: Sizes, ranks: int, device: torch.device) -> Result:
    """Adapters on one layer's experts beside stock PEFT, on one device."""
    del ranks
    missing = why_missing("peft")
    systems = ("ours",) if missing else ("ours", "peft")
    reports = [lora.measure(case, systems, device, sizes.lora_repeats) for case in sizes.lora]
    ratios = []
    for report in () if missing else reports:
        where = f"{report['case']['dtype']}, {report['case']['tokens']} tokens"
        for key, what in (("seconds", "seconds"), ("peak_bytes", "peak memory")):
            ratios.append(Ratio(f"{what}, {where}", report[key]["ours"], report[key]["peft"]))
    return Result("lora", "PEFT", lora.table(reports), tuple(ratios), missing, {"reports": reports})


@dataclass(frozen=True, slots=True)
class Part:
    """What is measured, in a line, and the function that does it with sizes, number of ranks and device."""

    summary: str
    run: Callable[[Sizes, int, torch.device], Result]


PARTS = {
    "step": Part("forward and backward of a model beside transformers' own expert parallelism", bench_step),
    "layer": Part("one layer's experts beside transformers' grouped_mm", bench_layer),
    "load": Part("loading a checkpoint beside transformers' from_pretrained", bench_load),
    "lora": Part("adapters on one layer's experts beside stock PEFT", bench_lora),
}


def _agree(disagreement: str) -> None:
    if disagreement:
        raise IntegrityError(disagreement)
