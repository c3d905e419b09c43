"""`expertmesh plan MODEL --devices "2x8 h200"`: which layouts fit, how fast each will be, and why the others do not.

For someone who has a model and may get some GPUs. Reads config.json only; needs no GPU, no weights and no process
group. What it prints are predictions by the formulas of docs/formulas.md. `--yaml` prints a configuration to run,
`--simulate` runs one rank of the best layout on fake tensors.
"""

import gc
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from expertmesh.cli.options import PlanOptions
from expertmesh.cli.printing import bytes_text, count_text, print_rows
from expertmesh.config import Config, LoraConfig, PrecisionConfig, dump_config
from expertmesh.config.errors import InputError
from expertmesh.config.yaml_text import parse_yaml
from expertmesh.distributed.layout import Layout, explicit
from expertmesh.introspection.attention import packing_refusal
from expertmesh.model import ModelOptions, build_model, plan_model
from expertmesh.parallel.shard_plan import ShardOptions
from expertmesh.planning.blocks import saved_by_kind
from expertmesh.planning.hardware import hardware_table, parse_devices
from expertmesh.planning.read_model import figures_of_plan
from expertmesh.planning.search import GIB, Candidate, Job, Plan, RunCosts, modes, plan, run_costs
from expertmesh.training.preflight import refuse_length
from expertmesh.weights.mapping import refuse_quantised
from expertmesh.weights.meta_model import read_model_config

REJECTED_SHOWN = 6
AXES = ("pp", "replicate", "fsdp", "cp", "tp", "ep")
COLUMNS = (*AXES, "checkpointing", "micro-batch", "peak", "s/step", "tokens/s/device", "MFU")


def run(options: PlanOptions) -> int:
    """Print the plan; returns 0. `InputError` for bad options, a model that cannot be read or sharded, and when no
    layout fits.
    """
    # A plan of a large job is a hundred thousand small objects without cycles: looking for some again and again takes
    # longer than making them.
    gc.disable()
    try:
        return _run(options)
    finally:
        gc.enable()


def _run(options: PlanOptions) -> int:
    devices = parse_devices(options.devices, hardware_table(options.hardware))
    _check(options)
    lora = None if options.lora is None else _lora(options.lora)
    config, directory = read_model_config(options.model, trust_remote_code=options.trust_remote_code, weights=False)
    refuse_quantised(config, directory)
    refuse_length("--seq-len", options.seq_len, config)
    precision = PrecisionConfig(params=options.params, compute=options.compute)
    built = ModelOptions(precision, lora, trust_remote_code=options.trust_remote_code, name=options.model)
    model = build_model(config, directory, built)
    why_unpacked = None if options.no_packing else packing_refusal(model)
    shards = plan_model(model, Layout(), ShardOptions(precision))
    packed = not options.no_packing and why_unpacked is None
    figures = figures_of_plan(shards, length=options.seq_len, lora=lora, packed=packed)
    size = options.global_batch_size or max(64, devices.count)
    job = Job(figures, devices, size, imbalance=options.imbalance, gloo=devices.name == "cpu")
    found = plan(job, options.goal)
    best = found.best
    if best is None:
        raise InputError("\n".join([f"no layout fits on {devices}", *_rejections(found)]), key="plan.nothing-fits")
    if options.yaml:
        print(_yaml(options, job, best, lora, why_unpacked), end="")
        return 0
    costs = run_costs(job, best, options.tokens, options.price, options.mtbf)
    if options.json:
        print(json.dumps(_json(found, best, costs), indent=2))
        return 0
    console = Console(file=sys.stdout, highlight=False, markup=False)
    what = f"{options.model}: {count_text(figures.total)} parameters ({count_text(figures.expert)} in experts)"
    title = f"{what}, {figures.length:,} tokens x {size} sequences on {devices}"
    print_rows(console, title, COLUMNS, [_row(job, candidate) for candidate in found.candidates[: options.top]])
    _print_best(console, job, best, costs)
    if found.rejected:
        console.print("rejected", *(f"  {line}" for line in _rejections(found)), sep="\n", soft_wrap=True)
    if why_unpacked is not None:
        console.print(f"planned with data.packing off: {why_unpacked}", soft_wrap=True)
    if options.simulate:
        from expertmesh.cli import simulate  # heavy, and only wanted here

        simulate.run(config, best, lora)
    return 0


def _check(options: PlanOptions) -> None:
    if options.mtbf is not None and not options.mtbf > 0:
        raise InputError(f"--mtbf {options.mtbf:g}: must be more than 0 hours", key="cli.usage")
    if options.imbalance < 1:
        raise InputError(f"--imbalance {options.imbalance}: the busiest rank has at least the mean, 1", key="cli.usage")


def _lora(pairs: list[str]) -> LoraConfig:
    values = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise InputError(f"--lora {pair}: write KEY=VALUE, as in r=16", key="cli.usage")
        values[key.strip()] = parse_yaml(value, f"--lora {pair}").value
    return LoraConfig(**values)


def _row(job: Job, candidate: Candidate) -> tuple[str, ...]:
    workload, speed = candidate.workload, candidate.speed
    axes = [str(candidate.layout.size(axis)) for axis in AXES]
    per_device = candidate.tokens_per_second / job.devices.count
    batch = f"{workload.batch.rows} x {workload.batch.accumulation}"
    peak = f"{candidate.memory.total / GIB:.1f} GiB"
    return (*axes, workload.mode, batch, peak, f"{speed.seconds:.2f}", f"{per_device:,.0f}", f"{speed.mfu:.1%}")


def _print_best(console: Console, job: Job, best: Candidate, costs: RunCosts) -> None:
    """The first layout in detail: memory, activations, traffic, time and what a run costs."""
    print_rows(console, f"memory of a rank of the first, at its peak ({best.memory.moment})", None, _memory(job, best))
    tokens = best.workload.batch.rows * job.model.length
    kinds = saved_by_kind(best.workload, modes(job.model))
    print_rows(
        console,
        f"activations that a rank keeps of a block and a micro-batch of {tokens:,} tokens",
        ("blocks", "", *kinds[0].by_mode),
        [
            (
                str(kind.blocks),
                "MoE" if kind.has_experts else "dense",
                *(bytes_text(int(n)) for n in kind.by_mode.values()),
            )
            for kind in kinds
        ],
    )
    links = [
        (
            link.transfer.axis,
            link.transfer.kind,
            f"{link.transfer.calls:.0f}",
            bytes_text(int(link.transfer.bytes)),
            f"{link.seconds:.3f}",
            f"{link.exposed:.3f}",
        )
        for link in best.speed.links
    ]
    print_rows(console, "bytes of a rank and step", ("axis", "what", "calls", "bytes", "seconds", "not hidden"), links)
    print_rows(console, "time of a step", None, _time(best))
    print_rows(console, "run", None, list(_costs(costs)))


def _memory(job: Job, best: Candidate) -> list[tuple[str, str]]:
    names = {
        "frozen": "parameters, frozen",
        "master": f"parameters, {job.model.precision.params} masters",
        "unsharded": "gathered blocks and their gradients",
        "activations": f"activations ({best.workload.mode} checkpointing)",
        "dispatch": "routed experts at work",
        "working": "a block at work",
    }
    items = {name: size for name, size in asdict(best.memory).items() if name != "moment" and size}
    rows = [(names.get(name, name), bytes_text(int(size))) for name, size in items.items()]
    return [*rows, ("peak", f"{bytes_text(int(best.memory.total))} of {bytes_text(int(job.budget))}")]


def _time(best: Candidate) -> list[tuple[str, str]]:
    speed = best.speed
    seconds = {
        "dense products": speed.products,
        "experts": speed.experts,
        "attention": speed.attention,
        "other operations": speed.memory,
        "head": speed.head,
        "waiting for the host": speed.host,
        "optimizer": speed.optimizer,
        "communication not hidden": speed.exposed,
    }
    rows = [(name, f"{value:.3f} s") for name, value in seconds.items()]
    return rows + ([("pipeline bubble", f"{speed.bubble:.1%} on top")] if speed.bubble else [])


def _costs(costs: RunCosts) -> Iterator[tuple[str, str]]:
    save = f"{costs.save_seconds:.0f} s to write, best every {costs.interval_seconds / 60:.0f} min"
    yield "checkpoint", f"{bytes_text(int(costs.checkpoint_bytes))}, {save}"
    yield "lost", f"{costs.lost:.1%} of the time, with a failure every {costs.hours_between_failures:,.0f} h"
    if costs.hours is not None and costs.device_hours is not None:
        yield "token budget", f"{costs.hours:,.1f} h, {costs.device_hours:,.0f} device hours"
    if costs.cost is not None:
        yield "cost", f"{costs.cost:,.0f}"


def _rejections(found: Plan) -> list[str]:
    """One line for each reason, with the layouts that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for each in found.rejected:
        axes = " ".join(f"{axis}={each.layout.size(axis)}" for axis in AXES if each.layout.size(axis) > 1)
        by_reason.setdefault(each.reason, []).append(axes or "one rank")
    lines = [f"{' or '.join(names[:3])}{' ...' if len(names) > 3 else ''}: {why}" for why, names in by_reason.items()]
    more = len(lines) - REJECTED_SHOWN
    return lines[:REJECTED_SHOWN] + ([f"... and {more} more reasons (--json lists all)"] if more > 0 else [])


def _yaml(options: PlanOptions, job: Job, best: Candidate, lora: LoraConfig | None, why_unpacked: str | None) -> str:
    """A configuration that `expertmesh train` takes, with what was predicted for it in comments."""
    config = Config.model_validate(
        {
            "model": {"name_or_path": options.model, "trust_remote_code": options.trust_remote_code},
            "precision": job.model.precision.model_dump(),
            "data": {
                "train": [{"path": options.data}],
                "max_length": options.seq_len,
                "packing": job.model.packed,
            },
            "lora": None if lora is None else lora.model_dump(mode="json"),
            "train": {
                "global_batch_size": job.global_batch_size,
                "micro_batch_size": best.workload.batch.rows,
                "activation_checkpointing": best.workload.mode,
            },
            "parallel": explicit(best.layout).model_dump(),
            "output_dir": f"runs/{Path(options.model).name}",
        }
    )
    devices = job.devices
    start = f"--nproc {devices.per_node}"
    if devices.nodes > 1:
        start = f"{devices.per_node} ranks on each of {devices.nodes} nodes, by torchrun"
    took = f"{best.memory.total / GIB:.1f} GiB a rank, {best.speed.seconds:.2f} s a step"
    return (
        f"# expertmesh plan for {devices}: {took}, {best.tokens_per_second:,.0f} tokens/s.\n"
        f"# Set data.train to your data; start it with {start}.\n"
        + (f"# data.packing is off: {why_unpacked}.\n" if why_unpacked else "")
        + dump_config(config)
    )


def _json(found: Plan, best: Candidate, costs: RunCosts) -> dict[str, Any]:
    def axes(layout: Layout) -> dict[str, int]:
        return {axis: layout.size(axis) for axis in (*AXES, "efsdp")}

    model = found.job.model
    return {
        "devices": str(found.job.devices),
        "family": model.family,
        "packing": model.packed,
        "parameters": {"dense": model.dense, "expert": model.expert},
        "candidates": [
            {
                "layout": axes(each.layout),
                "activation_checkpointing": each.workload.mode,
                "micro_batch_size": each.workload.batch.rows,
                "accumulation": each.workload.batch.accumulation,
                "memory": asdict(each.memory) | {"total": each.memory.total},
                "seconds": each.speed.seconds,
                "tokens_per_second": each.tokens_per_second,
                "mfu": each.speed.mfu,
                "links": [asdict(link) for link in each.speed.links],
            }
            for each in found.candidates
        ],
        "activations": [asdict(kind) for kind in saved_by_kind(best.workload, modes(model))],
        "rejected": [{"layout": axes(each.layout), "reason": each.reason} for each in found.rejected],
        "run": asdict(costs),
        "hardware": found.job.devices.hardware.model_dump(mode="json"),
    }
