"""`expertmesh plan MODEL --devices "2x8 h200"`: which layouts fit, how fast each will be, and why the others do not.

For someone who has a model and may get some GPUs. Reads config.json only; needs no GPU, no weights and no process
group. What it prints are predictions by the formulas of docs/planning.md. `--yaml` prints a configuration to run,
`--simulate` runs one rank of the best layout on fake tensors.
"""

import gc
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.console import Console

from expertmesh.cli.options import PlanOptions
from expertmesh.cli.printing import bytes_text, count_text, print_rows
from expertmesh.config import Config, LoraConfig, PrecisionConfig, dump_config
from expertmesh.config.errors import InputError
from expertmesh.config.yaml_text import parse_yaml
from expertmesh.distributed.layout import explicit
from expertmesh.planning.blocks import Kept, Share, kept_by_kind
from expertmesh.planning.economics import Economics, economics_of
from expertmesh.planning.facts import facts_of
from expertmesh.planning.hardware import hardware_table, parse_devices
from expertmesh.planning.search import Candidate, Job, Plan, modes, plan
from expertmesh.weights.meta_model import read_model_config

REJECTED_SHOWN = 6
COLUMNS = (
    "pp",
    "replicate",
    "fsdp",
    "cp",
    "tp",
    "ep",
    "checkpointing",
    "micro-batch",
    "peak",
    "s/step",
    "tokens/s/device",
    "MFU",
)


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
    table = hardware_table(options.hardware)
    devices = parse_devices(options.devices, table)
    for name in ("seq_len", "global_batch_size", "top"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 1")
    if options.mtbf is not None and not options.mtbf > 0:
        raise InputError(f"--mtbf {options.mtbf:g}: must be more than 0 hours")
    if options.imbalance < 1:
        raise InputError(f"--imbalance {options.imbalance}: the busiest rank has at least the mean, 1")
    lora = None if options.lora is None else _lora(options.lora)
    precision = PrecisionConfig(params=options.params, compute=options.compute)
    config, _ = read_model_config(options.model, trust_remote_code=options.trust_remote_code, weights=False)
    facts = facts_of(
        config,
        length=options.seq_len,
        precision=precision,
        lora=lora,
        packed=not options.no_packing,
        trust_remote_code=options.trust_remote_code,
    )
    size = options.global_batch_size or max(64, devices.count)
    job = Job(facts, devices, size, imbalance=options.imbalance, gloo=devices.name == "cpu")
    found = plan(job, options.goal)
    best = found.best
    if best is None:
        raise InputError("\n".join([f"no layout fits on {devices}", *_rejections(found)]))
    if options.yaml:
        print(_yaml(options, job, best, lora), end="")
        return 0
    costs = economics_of(job, best, options.tokens, options.price, options.mtbf)
    if options.json:
        print(json.dumps(_json(found, costs), indent=2))
        return 0
    console = Console(file=sys.stdout, highlight=False, markup=False)
    _print(console, options.model, found, costs, options.top)
    if options.simulate:
        from expertmesh.cli import simulate  # heavy, and only wanted here

        simulate.run(config, job, best, lora)
    return 0


def _print(console: Console, model: str, found: Plan, costs: Economics, top: int) -> None:
    job, best = found.job, found.best
    assert best is not None
    facts = job.facts
    what = f"{model}: {count_text(facts.total)} parameters ({count_text(facts.expert)} in experts)"
    title = f"{what}, {facts.length:,} tokens x {job.global_batch_size} sequences on {job.devices}"
    print_rows(console, title, COLUMNS, [_row(job, candidate) for candidate in found.candidates[:top]])
    print_rows(
        console, f"memory of a rank of the first, at its peak ({best.memory.moment})", None, list(_memory(job, best))
    )
    kept = _kept(job, best)
    tokens = best.batch.rows * facts.length
    print_rows(
        console,
        f"activations that a rank keeps of a block and a micro-batch of {tokens:,} tokens",
        ("blocks", "", *kept[0].by_mode),
        [
            (
                str(kind.blocks),
                "MoE" if kind.has_experts else "dense",
                *map(bytes_text, map(int, kind.by_mode.values())),
            )
            for kind in kept
        ],
    )
    print_rows(
        console,
        "bytes of a rank and step",
        ("axis", "what", "calls", "bytes", "seconds", "not hidden"),
        list(_links(best)),
    )
    print_rows(console, "time of a step", None, list(_time(best)))
    print_rows(console, "run", None, list(_costs(costs)))
    if found.rejected:
        console.print("rejected", soft_wrap=True)
        for line in _rejections(found):
            console.print(f"  {line}", soft_wrap=True)


def _row(job: Job, candidate: Candidate) -> tuple[str, ...]:
    layout, speed = candidate.layout, candidate.speed
    axes = [str(layout.size(axis)) for axis in COLUMNS[:6]]
    per_device = speed.tokens / speed.seconds / job.devices.count
    batch = f"{candidate.batch.rows} x {candidate.batch.accumulation}"
    peak = f"{candidate.memory.total / 2**30:.1f} GiB"
    return (*axes, candidate.mode, batch, peak, f"{speed.seconds:.2f}", f"{per_device:,.0f}", f"{speed.mfu:.1%}")


def _memory(job: Job, best: Candidate) -> Iterator[tuple[str, str]]:
    names = {
        "frozen": "parameters, frozen",
        "master": f"parameters, {job.facts.precision.params} masters",
        "unsharded": "gathered blocks and their gradients",
        "activations": f"activations ({best.mode} checkpointing)",
        "dispatch": "routed experts at work",
        "working": "a block at work",
    }
    for item in fields(best.memory):
        value = getattr(best.memory, item.name)
        if item.name != "moment" and value:
            yield names.get(item.name, item.name), bytes_text(int(value))
    yield "peak", f"{bytes_text(int(best.memory.total))} of {bytes_text(int(job.budget))}"


def _kept(job: Job, best: Candidate) -> list[Kept]:
    share = Share.of(best.layout, best.batch.rows, job.imbalance, gloo=job.gloo)
    return kept_by_kind(job.facts, share, modes(job.facts))


def _links(best: Candidate) -> Iterator[tuple[str, ...]]:
    for link in best.speed.links:
        transfer = link.transfer
        size, calls = bytes_text(int(transfer.bytes)), f"{transfer.calls:.0f}"
        yield transfer.axis, transfer.kind, calls, size, f"{link.seconds:.3f}", f"{link.exposed:.3f}"


def _time(best: Candidate) -> Iterator[tuple[str, str]]:
    speed = best.speed
    for name in ("products", "experts", "attention", "memory", "head", "host", "optimizer", "exposed"):
        label = {"products": "dense products", "memory": "other operations", "host": "waiting for the host"}.get(
            name, name
        )
        label = "communication not hidden" if name == "exposed" else label
        yield label, f"{getattr(speed, name):.3f} s"
    if speed.bubble:
        yield "pipeline bubble", f"{speed.bubble:.1%} on top"


def _costs(costs: Economics) -> Iterator[tuple[str, str]]:
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
        axes = " ".join(f"{axis}={each.layout.size(axis)}" for axis in COLUMNS[:6] if each.layout.size(axis) > 1)
        by_reason.setdefault(each.reason, []).append(axes or "one rank")
    lines = [f"{' or '.join(names[:3])}{' ...' if len(names) > 3 else ''}: {why}" for why, names in by_reason.items()]
    more = len(lines) - REJECTED_SHOWN
    return lines[:REJECTED_SHOWN] + ([f"... and {more} more reasons (--json lists all)"] if more > 0 else [])


def _yaml(options: PlanOptions, job: Job, best: Candidate, lora: LoraConfig | None) -> str:
    """A configuration that `expertmesh train` takes, with what was predicted for it in comments."""
    config = Config.model_validate(
        {
            "model": {"name_or_path": options.model, "trust_remote_code": options.trust_remote_code},
            "precision": job.facts.precision.model_dump(),
            "data": {
                "train": [{"path": options.data}],
                "max_length": options.seq_len,
                "packing": not options.no_packing,
            },
            "lora": None if lora is None else lora.model_dump(mode="json"),
            "train": {
                "global_batch_size": job.global_batch_size,
                "micro_batch_size": best.batch.rows,
                "activation_checkpointing": best.mode,
            },
            "parallel": explicit(best.layout).model_dump(),
            "output_dir": f"runs/{Path(options.model).name}",
        }
    )
    speed, devices = best.speed, job.devices
    peak, tokens = best.memory.total / 2**30, speed.tokens / speed.seconds
    start = f"--nproc {devices.per_node}"
    if devices.nodes > 1:
        start = f"{devices.per_node} ranks on each of {devices.nodes} nodes, by torchrun"
    return (
        f"# expertmesh plan for {devices}: {peak:.1f} GiB a rank, {speed.seconds:.2f} s a step, {tokens:,.0f} "
        "tokens/s.\n"
        f"# Set data.train to your data; start it with {start}.\n"
    ) + dump_config(config)


def _json(found: Plan, costs: Economics) -> dict[str, Any]:
    def layout(of: Any) -> dict[str, int]:
        return {axis: of.size(axis) for axis in (*COLUMNS[:6], "efsdp")}

    return {
        "devices": str(found.job.devices),
        "family": found.job.facts.family,
        "parameters": {"dense": found.job.facts.dense, "expert": found.job.facts.expert},
        "candidates": [
            {
                "layout": layout(each.layout),
                "activation_checkpointing": each.mode,
                "micro_batch_size": each.batch.rows,
                "accumulation": each.batch.accumulation,
                "memory": asdict(each.memory) | {"total": each.memory.total},
                "seconds": each.speed.seconds,
                "tokens_per_second": each.speed.tokens / each.speed.seconds,
                "mfu": each.speed.mfu,
                "links": [asdict(link) for link in each.speed.links],
            }
            for each in found.candidates
        ],
        "activations": [asdict(kind) for kind in _kept(found.job, found.candidates[0])],
        "rejected": [{"layout": layout(each.layout), "reason": each.reason} for each in found.rejected],
        "run": asdict(costs),
        "hardware": found.job.devices.hardware.model_dump(mode="json"),
    }


def _lora(pairs: list[str]) -> LoraConfig:
    values = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise InputError(f"--lora {pair}: write KEY=VALUE, as in r=16")
        values[key.strip()] = parse_yaml(value, f"--lora {pair}").value
    return LoraConfig(**values)
