"""`expertmesh plan --simulate`: the best layout's first rank, run on fake tensors, beside what the formulas say."""

import sys

from rich.console import Console
from transformers import PreTrainedConfig

from expertmesh.cli.inspect import bytes_text, print_rows
from expertmesh.config import LoraConfig
from expertmesh.config.errors import InputError
from expertmesh.planning.memory import Batch, memory_of
from expertmesh.planning.search import Candidate, Job, explicit
from expertmesh.planning.traffic import traffic_of
from expertmesh.simulation.run import Simulated, simulate


def run(config: PreTrainedConfig, job: Job, best: Candidate, lora: LoraConfig | None) -> None:
    """Print peak and bytes of one micro-batch, simulated and predicted. `InputError` for what cannot be simulated."""
    if best.mode == "selective" or best.layout.pp * best.layout.tp * best.layout.cp > 1:
        raise InputError("--simulate: only ep, fsdp and replicate with no or full checkpointing can be simulated")
    experts = job.facts.moe[0].experts
    assert experts is not None
    facts, batch = job.facts, Batch(best.batch.rows, 1)
    found = simulate(
        config,
        explicit(best.layout),
        job.devices.count,
        length=facts.length,
        rows=batch.rows,
        mode=best.mode,
        precision=facts.precision,
        lora=lora,
        choice=experts.choice,
        packed=facts.packed,
    )
    memory = memory_of(facts, best.layout, batch, best.mode)
    rows = [("peak of a rank", bytes_text(found.peak), bytes_text(int(memory.total)), _off(memory.total, found.peak))]
    predicted: dict[tuple[str, str], float] = {}
    for transfer in traffic_of(facts, best.layout, batch, best.mode):
        key = (transfer.axis, transfer.kind)
        predicted[key] = predicted.get(key, 0.0) + transfer.bytes
    for (axis, kind), size in sorted(predicted.items()):
        _, sent = found.sent.get((axis, kind), (0, 0))
        rows.append((f"{axis} {kind}", bytes_text(sent), bytes_text(int(size)), _off(size, sent)))
    console = Console(file=sys.stdout, highlight=False, markup=False)
    print_rows(console, "one micro-batch, simulated", ("", "simulated", "predicted", "off by"), rows)
    console.print(_built(found), soft_wrap=True)


def _built(found: Simulated) -> str:
    return (
        f"rank 0 of {found.world_size:,}: {found.process_groups} process groups in {found.mesh_seconds:.1f} s, model "
        f"sharded in {found.shard_seconds:.1f} s, two steps in {found.step_seconds:.1f} s"
    )


def _off(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.2%}" if measured else "-"
