"""`expertmesh plan --simulate`: a rank of the best layout, run on fake tensors, beside what the formulas say."""

import sys

from rich.console import Console
from transformers import PreTrainedConfig

from expertmesh.cli.printing import bytes_text, print_rows
from expertmesh.config import LoraConfig
from expertmesh.distributed.layout import explicit
from expertmesh.planning.axes import planned_by_axis
from expertmesh.planning.memory import Batch, fullest_stage, memory_of
from expertmesh.planning.search import Candidate, Job
from expertmesh.planning.state import state_of
from expertmesh.planning.trackers import Sent
from expertmesh.planning.traffic import traffic_of
from expertmesh.simulation.run import Simulated, simulate

# More of them add nothing but buffers for what stages receive, which the formulas count, and take as long again.
MICRO_BATCHES_PER_STAGE = 2


def run(config: PreTrainedConfig, job: Job, best: Candidate, lora: LoraConfig | None) -> None:
    """Print state, peak and bytes of a step, simulated and predicted, on the stage that is predicted to be the fullest.
    The step has one micro-batch; with pp as many of the plan's as fill the pipeline twice.
    """
    experts = job.facts.moe[0].experts
    assert experts is not None
    facts, layout, mode = job.facts, best.layout, best.mode
    enough = 1 if layout.pp == 1 else MICRO_BATCHES_PER_STAGE * layout.pp
    batch = Batch(best.batch.rows, min(best.batch.accumulation, enough))
    stage = fullest_stage(facts, layout, batch, mode)
    found = simulate(
        config,
        explicit(layout),
        job.devices.count,
        length=facts.length,
        batch=batch,
        mode=mode,
        precision=facts.precision,
        lora=lora,
        choice=experts.choice,
        packed=facts.packed,
        stage=stage,
    )
    state, memory = state_of(facts, layout, stage), memory_of(facts, layout, batch, mode)
    held = state.frozen + 3 * state.master
    rows = [
        ("state of a rank", bytes_text(found.state), bytes_text(int(held)), _off(held, found.state)),
        ("peak of a rank", bytes_text(found.peak), bytes_text(int(memory.total)), _off(memory.total, found.peak)),
    ]
    planned = planned_by_axis(traffic_of(facts, layout, batch, mode, stage=stage), found.sent)
    for axis, kind in sorted({*planned, *(key for key, sent in found.sent.items() if sent.bytes)}):
        sent = found.sent.get((axis, kind), Sent()).bytes
        size = planned[axis, kind].bytes if (axis, kind) in planned else 0.0
        rows.append((f"{axis} {kind}", bytes_text(sent), bytes_text(int(size)), _off(size, sent)))
    console = Console(file=sys.stdout, highlight=False, markup=False)
    counted = "one micro-batch" if batch.accumulation == 1 else f"{batch.accumulation} micro-batches"
    print_rows(console, f"{counted}, simulated", ("", "simulated", "predicted", "off by"), rows)
    console.print(_built(found), soft_wrap=True)


def _built(found: Simulated) -> str:
    return (
        f"rank {found.rank:,} of {found.world_size:,}: {found.process_groups} process groups in "
        f"{found.mesh_seconds:.1f} s, model sharded in {found.shard_seconds:.1f} s, two steps in "
        f"{found.step_seconds:.1f} s"
    )


def _off(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.2%}" if measured else "-"
