"""What `expertmesh plan` prints of a plan: tables for a reader, a dictionary for --json."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from expertmesh.cli.options import PlanOptions
from expertmesh.cli.printing import bytes_text, count_text, print_rows
from expertmesh.distributed.layout import CONFIGURED_AXES, Layout, node_crossing
from expertmesh.planning.blocks import saved_by_kind
from expertmesh.planning.search import CARDS, GIB, Candidate, Job, Plan, RunCosts, cards_that_fit, modes
from expertmesh.planning.traffic import bytes_between_nodes

REJECTED_SHOWN = 6
COLUMNS = (*CONFIGURED_AXES, "checkpointing", "micro-batch", "peak", "s/step", "tokens/s/device", "MFU")


def print_candidates(console: Console, name: str, job: Job, candidates: Sequence[Candidate]) -> None:
    """Print the layouts that fit, best first, under what is trained on what."""
    figures = job.model
    what = f"{name}: {count_text(figures.total)} parameters ({count_text(figures.expert)} in experts)"
    title = f"{what}, {figures.length:,} tokens x {job.global_batch_size} sequences on {job.devices}"
    print_rows(console, title, COLUMNS, [_row(job, candidate) for candidate in candidates])
    crossings = (node_crossing(candidate.layout, job.devices.per_node) for candidate in candidates)
    for crossing in dict.fromkeys(filter(None, crossings)):
        console.print(crossing, soft_wrap=True)


def print_best(console: Console, job: Job, best: Candidate, costs: RunCosts) -> None:
    """Print the first layout in detail: memory, activations, traffic, time and what a run costs."""
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
    per_node, several = job.devices.per_node, job.devices.nodes > 1
    links = [
        (
            link.transfer.axis,
            link.transfer.kind,
            f"{link.transfer.calls:.0f}",
            bytes_text(int(link.transfer.bytes)),
            *([bytes_text(round(bytes_between_nodes(link.transfer, best.layout, per_node)))] if several else []),
            f"{link.seconds:.3f}",
            f"{link.exposed:.3f}",
        )
        for link in best.speed.links
    ]
    columns = ("axis", "what", "calls", "bytes", *(["to other nodes"] if several else []), "seconds", "not hidden")
    print_rows(console, "bytes of a rank and step", columns, links)
    print_rows(console, "time of a step", None, _time(best))
    print_rows(console, "run", None, list(_costs(costs)))


def rejection_lines(found: Plan) -> list[str]:
    """Return one line for each reason, with the layouts that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for each in found.rejected:
        axes = " ".join(f"{axis}={each.layout.size(axis)}" for axis in CONFIGURED_AXES if each.layout.size(axis) > 1)
        by_reason.setdefault(each.reason, []).append(axes or "one rank")
    lines = [f"{' or '.join(names[:3])}{' ...' if len(names) > 3 else ''}: {why}" for why, names in by_reason.items()]
    more = len(lines) - REJECTED_SHOWN
    return lines[:REJECTED_SHOWN] + ([f"... and {more} more reasons (--json lists all)"] if more > 0 else [])


def cards_lines(job: Job) -> Iterator[str]:
    """Yield which cards train a base that stays packed alone."""
    if job.model.precision.frozen is None:
        return
    needed, cards = cards_that_fit(job)
    sizes = ("" if cards else "none of ") + ", ".join(f"{size} GB" for size in cards or CARDS)
    yield f"one device by itself, one sequence at a time: {needed / GIB:.1f} GiB, which fits on {sizes}"


def assumptions(options: PlanOptions, job: Job) -> Iterator[tuple[str, str]]:
    """Yield what the figures assume that no option was given for, by the option or the key of the hardware table."""
    precision, hardware = job.model.precision, job.devices.hardware
    values: dict[str, tuple[object, str]] = {
        "--seq-len": (options.seq_len, f"{job.model.length:,} tokens, and every row is full"),
        "--global-batch-size": (options.global_batch_size, f"{job.global_batch_size:,} sequences"),
        "--no-packing": (options.no_packing, "samples share rows, each kept apart" if job.model.packed else ""),
        "--lora": (options.lora, "all weights train"),
        "--params": (options.params != "float32", precision.params),
        "--compute": (options.compute != "bfloat16", precision.compute),
        "--optimizer": (options.optimizer != "adamw", job.optimizer),
        "--imbalance": (options.load or options.imbalance != 1, "tokens are spread evenly over experts"),
        "--mtbf": (options.mtbf, f"{hardware.hours_between_failures:,.0f} hours"),
    }
    yield from ((option, text) for option, (given, text) in values.items() if not given and text)
    links = f"{hardware.within_node / 1e9:,g} GB/s within a node"
    if job.devices.nodes > 1:
        links += f", {hardware.between_nodes / 1e9:,g} GB/s between nodes"
    reach = hardware.efficiency
    yield "--hardware", f"{links}; {reach.links:.0%} of them in gathers, {reach.all_to_all:.0%} in all-to-alls"


def as_json(options: PlanOptions, found: Plan, best: Candidate, costs: RunCosts) -> dict[str, Any]:
    def axes(layout: Layout) -> dict[str, int]:
        return {axis: layout.size(axis) for axis in (*CONFIGURED_AXES, "efsdp")}

    model, per_node = found.job.model, found.job.devices.per_node
    return {
        "devices": str(found.job.devices),
        "family": model.family,
        "packing": model.packed,
        "seq_len": model.length,
        "global_batch_size": found.job.global_batch_size,
        "optimizer": found.job.optimizer,
        "imbalance": found.job.imbalance,
        "precision": model.precision.model_dump(mode="json"),
        "assumed": dict(assumptions(options, found.job)),
        "parameters": {"dense": model.dense, "expert": model.expert},
        "candidates": [
            {
                "layout": axes(each.layout),
                "activation_checkpointing": each.workload.mode,
                "micro_batch_size": each.workload.batch.rows,
                "accumulation": each.workload.batch.accumulation,
                "accumulate": "by_layer" if each.workload.batch.together else "by_micro_batch",
                "round": each.workload.batch.together or 1,
                "keep_inputs": "host" if each.workload.batch.order.inputs_on_host else "device",
                "memory": asdict(each.memory) | {"total": each.memory.total},
                "seconds": each.speed.seconds,
                "tokens_per_second": each.tokens_per_second,
                "mfu": each.speed.mfu,
                "links": [
                    asdict(link) | {"bytes_to_other_nodes": bytes_between_nodes(link.transfer, each.layout, per_node)}
                    for link in each.speed.links
                ],
            }
            for each in found.candidates
        ],
        "activations": [asdict(kind) for kind in saved_by_kind(best.workload, modes(model))],
        "rejected": [{"layout": axes(each.layout), "reason": each.reason} for each in found.rejected],
        "run": asdict(costs),
        "hardware": found.job.devices.hardware.model_dump(mode="json"),
    }


def _row(job: Job, candidate: Candidate) -> tuple[str, ...]:
    workload, speed = candidate.workload, candidate.speed
    axes = [str(candidate.layout.size(axis)) for axis in CONFIGURED_AXES]
    per_device = candidate.tokens_per_second / job.devices.count
    batch = f"{workload.batch.rows} x {workload.batch.accumulation}"
    if workload.batch.together:
        batch += f" by layer{f', {workload.batch.passes} rounds' if workload.batch.passes > 1 else ''}"
        batch += ", inputs on host" if workload.batch.order.inputs_on_host else ""
    peak = f"{candidate.memory.total / GIB:.1f} GiB"
    return (*axes, workload.mode, batch, peak, f"{speed.seconds:.2f}", f"{per_device:,.0f}", f"{speed.mfu:.1%}")


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
