"""A Qwen3-MoE on local ranks beside transformers' own expert parallelism on FSDP2: a training step, and loading.

All systems load one checkpoint and read the same tokens. Their losses and gradient norms, or the sums of squares of
what they have loaded, must agree: a figure for a different computation is worth nothing.
"""

import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from expertmesh.bench.case import Case, Sizes, write_checkpoint
from expertmesh.bench.probes import alternating, median
from expertmesh.bench.result import Ratio, Result, markdown, why_missing
from expertmesh.bench.worker import launch
from expertmesh.config.errors import InputError, IntegrityError

MEMORY_REPEATS = 3
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
LOAD_TOLERANCE = 1e-9
ALLOWANCE_BYTES = 300_000_000


def bench_step(sizes: Sizes, ranks: int, device: torch.device) -> Result:
    """Forward and backward, on `ranks` local ranks."""
    case = dataclasses.replace(sizes.step, ranks=ranks)
    missing, ours, theirs = why_missing("transformers"), f"expertmesh_ep{ranks}", f"transformers_ep{ranks}"
    # Resident memory is read where Linux keeps it.
    with_memory = device.type != "cpu" or sys.platform == "linux"
    report = measure_step(case, [ours] if missing else [theirs, ours], sizes.step_repeats, with_memory=with_memory)
    check_steps(case, report["time"])
    ratios = () if missing else tuple(_step_ratios(report, ours, theirs))
    return Result("transformers", step_table(case, report), ratios, missing, report)


def measure_step(
    case: Case, names: Sequence[str], repeats: int, *, with_memory: bool, worker: str = "expertmesh.bench.worker"
) -> dict[str, Any]:
    """Time all systems in one job and, in jobs of their own, measure the memory of each."""
    with tempfile.TemporaryDirectory(prefix="expertmesh-bench-") as scratch:
        case = write_checkpoint(case, Path(scratch))
        timing = launch("time", case, names, repeats, worker)
        found = {name: launch("memory", case, [name], MEMORY_REPEATS, worker) for name in names if with_memory}
    return {"case": dataclasses.asdict(case), "time": timing, "memory": found}


def check_steps(case: Case, timing: dict[str, Any], keys: Sequence[str] = ("loss", "grad_norm")) -> None:
    """`IntegrityError` on the first system whose loss or gradient norm is not the first one's."""
    first, *others = timing.items()
    for name, row in others:
        for key in keys:
            expected, got = first[1][key], row[key]
            if not abs(got - expected) <= LOSS_TOLERANCE[case.compute] * abs(expected):
                raise IntegrityError(
                    f"{name} computes something else than {first[0]}: {key} {got:.6f} against {expected:.6f}",
                    key="bench.results-differ",
                )


def step_table(case: Case, report: dict[str, Any]) -> str:
    """The figures as a Markdown table; ratios are to the first system."""
    timing, rows = report["time"], []
    base = [median(next(iter(timing.values()))[key]) for key in ("wall", "cpu")]
    for name, row in timing.items():
        spent = [median(row[key]) for key in ("wall", "cpu")]
        peaks = report["memory"].get(name, {}).get("ranks", [])
        anonymous, resident, tensors = (
            f"{max(rank[key] for rank in peaks) / 1e6:.0f}" if peaks else "-"
            for key in ("step_anonymous", "step", "tensors")
        )
        times = [f"{spent[0]:.3f}", f"{spent[1]:.3f}", f"{spent[0] / base[0]:.2f} / {spent[1] / base[1]:.2f}"]
        sent = [_traffic(row["traffic"], all_to_all) for all_to_all in (True, False)]
        results = [f"{row['loss']:.6f}", f"{row['grad_norm']:.6f}"]
        rows.append([name, *times, *sent, f"{anonymous} ({resident})", tensors, *results])
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


def _step_ratios(report: dict[str, Any], ours: str, theirs: str) -> Iterator[Ratio]:
    timing = [report["time"][name] for name in (ours, theirs)]
    for key, what in (("wall", "wall seconds"), ("cpu", "CPU seconds of all ranks")):
        yield Ratio(what, *(median(row[key]) for row in timing))
    traffic = [sum(rank.get("all_to_all", {"bytes": 0})["bytes"] for rank in row["traffic"]) for row in timing]
    if traffic[1]:
        yield Ratio("all-to-all bytes", *traffic)
    for key, what in (("step_anonymous", "peak memory of a rank"), ("tensors", "peak tensor memory of a rank")):
        if report["memory"]:
            yield Ratio(what, *(max(rank[key] for rank in report["memory"][name]["ranks"]) for name in (ours, theirs)))


def bench_load(sizes: Sizes, ranks: int, device: torch.device) -> Result:
    """Loading a checkpoint, on one rank and on `ranks`."""
    del device
    if sys.platform != "linux":
        raise InputError(
            "bench load reads resident memory from /proc, which only Linux has; leave load out", key="bench.needs-linux"
        )
    missing = why_missing("transformers")
    systems, counts = ("expertmesh_ep",) if missing else ("transformers_ep", "expertmesh_ep"), sorted({1, ranks})
    report = measure_load(sizes.load, systems, counts, sizes.load_repeats)
    check_loads(report["runs"])
    ratios = []
    for count in () if missing else counts:
        both = [report["runs"][f"{name}{count}"] for name in ("expertmesh_ep", "transformers_ep")]
        where = f"{count} rank{'s' * (count > 1)}"
        ratios.append(Ratio(f"seconds, {where}", *(median([run["seconds"] for run in runs]) for runs in both)))
        peaks = (max(rank["peak"] for run in runs for rank in run["ranks"]) for runs in both)
        ratios.append(Ratio(f"peak host memory of a rank, {where}", *peaks))
    return Result("transformers", load_table(sizes.load, report), tuple(ratios), missing, report)


def measure_load(
    case: Case, systems: Sequence[str], counts: Sequence[int], repeats: int, directory: str | None = None
) -> dict[str, Any]:
    """Write a checkpoint of `case` into a temporary directory and load it with every system, on so many ranks each."""
    from expertmesh.io.safetensors_reader import open_weight_files

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
    """`IntegrityError` on the first system that holds other weights than the first one."""
    squares = {name: run[0]["square"] for name, run in runs.items()}
    first, expected = next(iter(squares.items()))
    for name, square in squares.items():
        if not abs(square - expected) <= LOAD_TOLERANCE * expected:
            raise IntegrityError(
                f"{name} holds other weights than {first}: {square} against {expected}", key="bench.results-differ"
            )


def load_table(case: Case, report: dict[str, Any]) -> str:
    """The figures as a Markdown table: median seconds, and of the memory the highest rank of all runs."""
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
