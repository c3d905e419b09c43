"""`expertmesh plan MODEL --devices "2x8 h200"`: which layouts fit, how fast each will be, and why the others do not.

For someone who has a model and may get some GPUs. Reads config.json only; needs no GPU, no weights and no process
group. What it prints are predictions by the formulas of docs/formulas.md: tables for a reader, a dictionary for
`--json`. `--yaml` prints a configuration to run, `--simulate` runs one rank of the best layout on fake tensors, beside
what the formulas say.

`expertmesh plan --placement RUN --ep N` places experts on EP ranks by what the experts of a run got. It reads
expert_load.json alone, and writes a file for `moe.placement`.
"""

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from math import gcd, inf
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedConfig

from expertmesh.cli.options import PlanOptions
from expertmesh.cli.printing import Terminal, count_text, print_rows
from expertmesh.config import Config, LoraConfig, PrecisionConfig, dump_config
from expertmesh.config.errors import InputError
from expertmesh.config.yaml_text import parse_yaml
from expertmesh.distributed.layout import (
    CONFIGURED_AXES,
    Layout,
    divisors,
    explicit,
    node_crossing,
    refuse_divided_experts,
)
from expertmesh.experts.placement import (
    Placement,
    balanced,
    check_layers,
    least_busiest,
    no_copies,
    read_loads,
    read_pairs,
    too_many_copies,
    write_placement,
)
from expertmesh.introspection.attention import packing_refusal
from expertmesh.io.terminal import bytes_text, plural
from expertmesh.model import ModelOptions, build_model, plan_model
from expertmesh.parallel.shard_plan import ShardOptions
from expertmesh.planning.hardware import hardware_table, parse_devices
from expertmesh.planning.memory import fullest_stage, memory_of
from expertmesh.planning.model_figures import ModelFigures
from expertmesh.planning.read_model import figures_of_plan
from expertmesh.planning.search import (
    GIB,
    Candidate,
    Job,
    Plan,
    checkpoint_bytes,
    measured_imbalance,
    nothing_fits,
    plan,
)
from expertmesh.planning.stages import Batch, resident_state
from expertmesh.planning.traffic import bytes_between_nodes, traffic_of
from expertmesh.training.startup.model_check import OrderWish, longest, refuse_length
from expertmesh.weights.meta_model import read_model_config

USUAL_LENGTH, USUAL_BATCH = 4096, 64
REJECTED_SHOWN = 6
COLUMNS = (*CONFIGURED_AXES, "checkpointing", "micro-batch", "peak", "s/step", "tokens/s/device", "MFU")
# More of them add nothing but buffers for what stages receive, which the formulas count, and take as long again.
MICRO_BATCHES_PER_STAGE = 2


def run(options: PlanOptions) -> int:
    """Print the plan; return 0.

    Raises:
        InputError: Bad options, a model that cannot be read or sharded, or no layout fits.
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
    precision = PrecisionConfig(params=options.params, compute=options.compute, frozen=options.frozen)
    built = ModelOptions(precision, lora, trust_remote_code=options.trust_remote_code, name=options.model)
    config, directory = read_model_config(options.model, trust_remote_code=options.trust_remote_code, weights=False)
    length = options.seq_len or usual_length(config)
    refuse_length("--seq-len", length, config)
    kind = devices.hardware.torch_device
    figures, why_unpacked = read_figures(config, directory, built, length, packing=not options.no_packing, device=kind)
    size = options.global_batch_size or -(-USUAL_BATCH // devices.count) * devices.count
    optimizer, offload, order = options.optimizer, options.offload, OrderWish(options.accumulate)
    loads = None if options.load is None else read_loads(options.load)
    if loads is not None:
        layers = {spec.name: spec.num_experts for spec in figures.anatomy.experts}
        check_layers("--load", {name: len(load_E) for name, load_E in loads.items()}, layers)
    measured = {} if loads is None else measured_imbalance(loads, figures.anatomy)
    job = Job(figures, devices, size, optimizer, options.imbalance, offload=offload, order=order, measured=measured)
    found = plan(job, options.goal)
    best = found.best
    if best is None:
        raise nothing_fits(f"no layout fits on {devices}", *rejection_lines(found))
    if options.yaml:
        print(_yaml(options, job, best, lora, why_unpacked), end="")
        return 0
    splits = divisors(gcd(devices.count, figures.anatomy.num_experts))[1:]
    if options.json:
        load = [] if loads is None else [loads_over(loads, balanced(loads, ep)) for ep in splits]
        print(json.dumps(as_json(options, found, best) | {"load": load}, indent=2))
        return 0
    console = Terminal()
    print_candidates(console, options.model, job, found.candidates[: options.top])
    print_best(console, job, best)
    print_rows(console, "assumed, as no option says otherwise", None, list(assumptions(options, job)))
    if loads is not None and splits:
        print_loads(console, f"{options.load}; planned with contiguous", loads, [balanced(loads, ep) for ep in splits])
    if found.rejected:
        console.print("rejected", *(f"  {line}" for line in rejection_lines(found)), sep="\n", soft_wrap=True)
    if why_unpacked is not None:
        console.print(f"planned with data.packing off: {why_unpacked}", soft_wrap=True)
    if options.simulate:
        _simulate(config, built, best)
    return 0


def _check(options: PlanOptions) -> None:
    if options.simulate and options.optimizer != "adamw":
        raise InputError(f"--simulate runs adamw, not {options.optimizer}; leave one of the two out", key="cli.usage")
    if options.simulate and options.compute != "bfloat16":
        raise InputError(f"--simulate computes in bfloat16, not {options.compute}; leave one out", key="cli.usage")
    if options.simulate and options.frozen is not None:
        raise InputError(
            f"--simulate: experts in {options.frozen} are dequantised for the tokens they get, which fake tensors do "
            "not say; leave --simulate or --frozen out",
            key="cli.usage",
        )
    if options.offload != "none" and options.frozen is None:
        raise InputError(f"--offload {options.offload}: packed experts alone; give --frozen as well", key="cli.usage")
    if options.load is not None and options.imbalance != 1:
        raise InputError("--load and --imbalance: give one of them", key="cli.usage")
    if not 1 <= options.imbalance < inf:
        raise InputError(f"--imbalance {options.imbalance}: the busiest rank has at least the mean, 1", key="cli.usage")


def _lora(pairs: list[str]) -> LoraConfig:
    values = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise InputError(f"--lora {pair}: write KEY=VALUE, as in r=16", key="cli.usage")
        if key.strip() in values:
            raise InputError(f"--lora {pair}: {key.strip()} is given twice", key="cli.usage")
        values[key.strip()] = parse_yaml(value, f"--lora {pair}").value
    return LoraConfig(**values)


def _yaml(options: PlanOptions, job: Job, best: Candidate, lora: LoraConfig | None, why_unpacked: str | None) -> str:
    """Return a configuration that `expertmesh train` takes, with what was predicted for it in comments."""
    crosses = node_crossing(best.layout, job.devices.per_node) is not None
    config = Config.model_validate(
        {
            "model": {"name_or_path": options.model, "trust_remote_code": options.trust_remote_code},
            "precision": job.model.precision.model_dump(),
            "data": {"train": [{"path": options.data}], "max_length": job.model.length, "packing": job.model.packed},
            "optim": {"name": options.optimizer},
            "lora": None if lora is None else lora.model_dump(mode="json"),
            "train": {
                "global_batch_size": job.global_batch_size,
                "micro_batch_size": best.workload.batch.rows,
                "activation_checkpointing": best.workload.mode,
                "accumulate": options.accumulate,
            },
            "parallel": explicit(best.layout).model_dump() | {"ep_across_nodes": crosses},
            "output_dir": f"runs/{Path(options.model).name}",
        }
    )
    devices = job.devices
    start = f"--nproc {devices.per_node}"
    if devices.nodes > 1:
        start = f"{plural(devices.per_node, 'rank')} on each of {devices.nodes} nodes, by torchrun"
    took = f"{best.memory.total / GIB:.1f} GiB a rank, {best.speed.seconds:.2f} s a step"
    return (
        f"# expertmesh plan for {devices}: {took}, {best.tokens_per_second:,.0f} tokens/s.\n"
        f"# Set data.train to your data; start it with {start}.\n"
        + (f"# data.packing is off: {why_unpacked}.\n" if why_unpacked else "")
        + dump_config(config)
    )


def read_figures(
    config: PreTrainedConfig, directory: Path, options: ModelOptions, length: int, *, packing: bool, device: str
) -> tuple[ModelFigures, str | None]:
    """Return the figures of the model that a plan is for, and why it cannot have packed rows, if they are wanted.

    Args:
        length: Tokens of a sequence.
        packing: Pack rows, if the model can have packed rows.
        device: Torch device type that packed rows are attended on.

    Raises:
        InputError: The model cannot be sharded.
    """
    model = build_model(config, directory, options)
    why_unpacked = packing_refusal(model) if packing else None
    shards, packed = plan_model(model, Layout(), ShardOptions(options.precision)), packing and why_unpacked is None
    return figures_of_plan(shards, length=length, lora=options.lora, packed=packed, device=device), why_unpacked


def usual_length(config: PreTrainedConfig) -> int:
    """Return the tokens of a sequence if `--seq-len` is not given."""
    return min(USUAL_LENGTH, longest(config) or USUAL_LENGTH)


def print_candidates(console: Console, name: str, job: Job, candidates: Sequence[Candidate]) -> None:
    """Print the layouts that fit, best first, under what is trained on what."""
    figures = job.model
    what = f"{name}: {count_text(figures.total)} parameters ({count_text(figures.expert)} in experts)"
    title = f"{what}, {figures.length:,} tokens x {job.global_batch_size} sequences on {job.devices}"
    rows = []
    for candidate in candidates:
        workload, speed = candidate.workload, candidate.speed
        axes = [str(candidate.layout.size(axis)) for axis in CONFIGURED_AXES]
        batch = f"{workload.batch.rows} x {workload.batch.accumulation}"
        if workload.batch.together:
            batch += f" by layer{f', {workload.batch.passes} rounds' if workload.batch.passes > 1 else ''}"
            batch += ", inputs on host" if workload.batch.order.inputs_on_host else ""
        peak, rate = f"{candidate.memory.total / GIB:.1f} GiB", candidate.tokens_per_second / job.devices.count
        rows.append((*axes, workload.mode, batch, peak, f"{speed.seconds:.2f}", f"{rate:,.0f}", f"{speed.mfu:.1%}"))
    print_rows(console, title, COLUMNS, rows)
    crossings = (node_crossing(candidate.layout, job.devices.per_node) for candidate in candidates)
    for crossing in dict.fromkeys(filter(None, crossings)):
        console.print(crossing, soft_wrap=True)


def print_best(console: Console, job: Job, best: Candidate) -> None:
    """Print the first layout in detail: memory, traffic and time."""
    print_rows(console, f"memory of a rank of the first, at its peak ({best.memory.moment})", None, _memory(job, best))
    per_node, several = job.devices.per_node, job.devices.nodes > 1
    links = [
        (
            link.transfer.axis,
            link.transfer.kind,
            f"{link.transfer.calls:.0f}",
            bytes_text(link.transfer.bytes),
            *([bytes_text(bytes_between_nodes(link.transfer, best.layout, per_node))] if several else []),
            f"{link.seconds:.3f}",
            f"{link.exposed:.3f}",
        )
        for link in best.speed.links
    ]
    columns = ("axis", "what", "calls", "bytes", *(["to other nodes"] if several else []), "seconds", "not hidden")
    print_rows(console, "bytes of a rank and step", columns, links)
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
    rows += [("pipeline bubble", f"{speed.bubble:.1%} on top")] if speed.bubble else []
    print_rows(console, "time of a step", None, rows)


def rejection_lines(found: Plan) -> list[str]:
    """Return one line for each reason, with the layouts that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for each in found.rejected:
        axes = " ".join(f"{axis}={each.layout.size(axis)}" for axis in CONFIGURED_AXES if each.layout.size(axis) > 1)
        by_reason.setdefault(each.reason, []).append(axes or "one rank")
    lines = [f"{' or '.join(names[:3])}{' ...' if len(names) > 3 else ''}: {why}" for why, names in by_reason.items()]
    more = len(lines) - REJECTED_SHOWN
    return lines[:REJECTED_SHOWN] + ([f"... and {more} more reasons (--json lists all)"] if more > 0 else [])


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
    }
    yield from ((option, text) for option, (given, text) in values.items() if not given and text)
    links = f"{hardware.within_node / 1e9:,g} GB/s within a node"
    if job.devices.nodes > 1:
        links += f", {hardware.between_nodes / 1e9:,g} GB/s between nodes"
    reach = hardware.efficiency
    yield "--hardware", f"{links}; {reach.links:.0%} of them in gathers, {reach.all_to_all:.0%} in all-to-alls"


def as_json(options: PlanOptions, found: Plan, best: Candidate) -> dict[str, Any]:
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
        "rejected": [{"layout": axes(each.layout), "reason": each.reason} for each in found.rejected],
        "checkpoint_bytes": checkpoint_bytes(found.job, best.layout),
        "hardware": found.job.devices.hardware.model_dump(mode="json"),
    }


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
    rows = [(names.get(name, name), bytes_text(size)) for name, size in items.items()]
    peak = f"{bytes_text(best.memory.total)} of {bytes_text(job.budget)}"
    saved = bytes_text(checkpoint_bytes(job, best.layout))
    return [*rows, ("peak", peak), ("a checkpoint, of all ranks", saved)]


def loads_over(loads: Mapping[str, Sequence[int]], placement: Placement) -> dict[str, Any]:
    """Return what contiguous placement and `placement` make of the tokens of each layer's experts.

    Returns:
        The EP ranks, then pairs: the tokens of the busiest rank over the mean, in the mean of all layers and in the
        worst; `at_least` is a bound that no placement without copies is below.
    """
    at_least = [least_busiest(load_E, placement.ep) for load_E in loads.values()]
    return {
        "ep": placement.ep,
        "contiguous": Placement(placement.ep, {}).over(loads),
        "balanced": placement.over(loads),
        "at_least": (sum(at_least) / len(at_least), max(at_least)),
    }


def print_loads(
    console: Console, source: str, loads: Mapping[str, Sequence[int]], placements: Sequence[Placement]
) -> None:
    """Print a line for each placement: what contiguous placement and it make of `loads`, read from `source`."""
    columns = ("ep", "contiguous", "worst", "balanced", "worst", "at least", "worst")
    rows = []
    for placement in placements:
        ep, *pairs = loads_over(loads, placement).values()
        rows.append((str(ep), *(f"{value:.2f}" for pair in pairs for value in pair)))
    title = f"busiest EP rank over the mean, of all {len(loads)} layers and the worst, by {source}"
    print_rows(console, title, columns, rows)


def run_placement(options: PlanOptions) -> int:
    """Write the placement and print what it gains; returns 0. `InputError` for bad options and loads."""
    assert options.placement is not None
    if (ep := options.ep) is None:
        raise InputError("--placement: give --ep, the EP ranks that experts are placed on", key="cli.usage")
    path = Path(options.output or "placement.json")
    if path.exists():
        raise InputError(f"{path} exists already and stays as it is; choose another --output", key="placement.exists")
    loads = read_loads(options.placement)
    for name, load_E in loads.items():
        refuse_divided_experts(f"--ep {ep}", ep, len(load_E), len(load_E), f" of {name}")
        if why := too_many_copies(options.replicas or 0, len(load_E), ep):
            raise no_copies(f"--replicas {options.replicas}", why)
    placement = balanced(loads, ep, options.replicas or 0, read_pairs(options.placement, loads))
    write_placement(placement, path)
    console = Terminal()
    print_loads(console, options.placement, loads, [placement])
    also = f" moe.replicas={options.replicas}" if options.replicas else ""
    console.print(f"wrote {path}; train with moe.placement={path}{also} parallel.ep={ep}", soft_wrap=True)
    return 0


def _simulate(config: PreTrainedConfig, options: ModelOptions, best: Candidate) -> None:
    """Print state, peak and bytes of a step of `best`, simulated and predicted, on the fullest stage by prediction.

    The step has one micro-batch, two by layer, and with pp as many of the plan's as fill the pipeline twice.
    """
    from expertmesh.simulation import planned_by_axis, simulate  # only wanted here

    pp, planned = best.layout.pp, best.workload.batch
    enough = 2 if planned.together else 1 if pp == 1 else MICRO_BATCHES_PER_STAGE * pp
    batch = Batch(planned.rows, min(planned.accumulation, enough), planned.order)
    workload = replace(best.workload, batch=batch, imbalance=1.0, by_block=(), on_cpu=False)
    stage = fullest_stage(workload)
    found = simulate(config, workload, options, stage=stage)
    state = resident_state(workload.model, best.layout, stage)
    compared = [
        ("state of a rank", found.state, state.frozen + state.master + state.moments),
        ("peak of a rank", found.peak, memory_of(workload).total),
    ]
    transfers = planned_by_axis(traffic_of(workload, stage), found.sent)
    sent = {key: count.bytes for key, count in found.sent.items()}
    for axis, kind in sorted({*transfers, *(key for key, size in sent.items() if size)}):
        predicted = transfers[axis, kind].bytes if (axis, kind) in transfers else 0.0
        compared.append((f"{axis} {kind}", sent.get((axis, kind), 0), predicted))
    rows = [
        (what, bytes_text(simulated), bytes_text(size), f"{size / simulated - 1:+.2%}" if simulated else "-")
        for what, simulated, size in compared
    ]
    console = Terminal()
    counted = "one micro-batch" if batch.accumulation == 1 else f"{batch.accumulation} micro-batches"
    print_rows(console, f"{counted}, simulated", ("", "simulated", "predicted", "off by"), rows)
    console.print(
        f"rank {found.rank:,} of {found.world_size:,}: {found.process_groups} process groups in "
        f"{found.mesh_seconds:.1f} s, model sharded in {found.shard_seconds:.1f} s, two steps in "
        f"{found.step_seconds:.1f} s",
        soft_wrap=True,
    )
