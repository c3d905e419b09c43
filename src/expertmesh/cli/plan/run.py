"""`expertmesh plan MODEL --devices "2x8 h200"`: which layouts fit, how fast each will be, and why the others do not.

For someone who has a model and may get some GPUs. Reads config.json only; needs no GPU, no weights and no process
group. What it prints are predictions by the formulas of docs/formulas.md. `--yaml` prints a configuration to run,
`--simulate` runs one rank of the best layout on fake tensors.
"""

import gc
import json
from dataclasses import asdict
from math import gcd, inf
from pathlib import Path

from expertmesh.anatomy import Anatomy
from expertmesh.cli.options import PlanOptions
from expertmesh.cli.plan.placement import load_of, print_loads
from expertmesh.cli.plan.read import read_figures
from expertmesh.cli.plan.tables import (
    as_json,
    assumptions,
    cards_lines,
    print_best,
    print_candidates,
    rejection_lines,
)
from expertmesh.cli.printing import Terminal, print_rows
from expertmesh.config import Config, LoraConfig, dump_config
from expertmesh.config.errors import InputError
from expertmesh.config.yaml_text import parse_yaml
from expertmesh.distributed.layout import divisors, explicit, node_crossing
from expertmesh.experts.placement import balanced, check_layers, read_loads
from expertmesh.io.terminal import plural
from expertmesh.planning.hardware import hardware_table, parse_devices
from expertmesh.planning.search import GIB, Candidate, Job, measured_imbalance, plan, run_costs
from expertmesh.training.startup.model_check import OrderWish


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
    config, figures, why_unpacked = read_figures(options, lora, devices.hardware.torch_device)
    size = options.global_batch_size or max(64, devices.count)
    optimizer, offload, order = options.optimizer, options.offload, OrderWish(options.accumulate)
    loads = None if options.load is None else _loads(options.load, figures.anatomy)
    measured = {} if loads is None else measured_imbalance(loads, figures.anatomy)
    job = Job(figures, devices, size, optimizer, options.imbalance, offload=offload, order=order, measured=measured)
    found = plan(job, options.goal)
    best = found.best
    if best is None:
        lines = [f"no layout fits on {devices}", *rejection_lines(found), *cards_lines(job)]
        raise InputError("\n".join(lines), key="plan.nothing-fits")
    if options.yaml:
        print(_yaml(options, job, best, lora, why_unpacked), end="")
        return 0
    costs = run_costs(job, best, options.tokens, options.price, options.mtbf)
    splits = divisors(gcd(devices.count, figures.anatomy.num_experts))[1:]
    if options.json:
        load = [] if loads is None else [asdict(load_of(loads, balanced(loads, ep))) for ep in splits]
        print(json.dumps(as_json(options, found, best, costs) | {"load": load}, indent=2))
        return 0
    console = Terminal()
    print_candidates(console, options.model, job, found.candidates[: options.top])
    print_best(console, job, best, costs)
    print_rows(console, "assumed, as no option says otherwise", None, list(assumptions(options, job)))
    if loads is not None and splits:
        print_loads(console, f"{options.load}; planned with contiguous", loads, [balanced(loads, ep) for ep in splits])
    console.print(*cards_lines(job), sep="\n", soft_wrap=True)
    if found.rejected:
        console.print("rejected", *(f"  {line}" for line in rejection_lines(found)), sep="\n", soft_wrap=True)
    if why_unpacked is not None:
        console.print(f"planned with data.packing off: {why_unpacked}", soft_wrap=True)
    if options.simulate:
        from expertmesh.cli.plan.simulate import run as simulate  # heavy, and only wanted here

        simulate(config, best, lora)
    return 0


def _check(options: PlanOptions) -> None:
    if options.mtbf is not None and not 0 < options.mtbf < inf:
        raise InputError(f"--mtbf {options.mtbf:g}: must be more than 0 hours", key="cli.usage")
    if options.simulate and options.optimizer != "adamw":
        raise InputError(f"--simulate runs adamw, not {options.optimizer}; leave one of the two out", key="cli.usage")
    if options.price is not None and not 0 <= options.price < inf:
        raise InputError(f"--price {options.price:g}: must be a number of at least 0", key="cli.usage")
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


def _loads(source: str, anatomy: Anatomy) -> dict[str, list[int]]:
    loads = read_loads(source)
    layers = {spec.name: spec.num_experts for spec in anatomy.experts}
    check_layers("--load", {name: len(load_E) for name, load_E in loads.items()}, layers)
    return loads


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
            "data": {
                "train": [{"path": options.data}],
                "max_length": job.model.length,
                "packing": job.model.packed,
            },
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
