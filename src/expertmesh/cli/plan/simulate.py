"""`expertmesh plan --simulate`: a rank of the best layout, run on fake tensors, beside what the formulas say."""

from dataclasses import replace

from transformers import PreTrainedConfig

from expertmesh.cli.printing import Terminal, bytes_text, print_rows
from expertmesh.config import LoraConfig
from expertmesh.planning.memory import fullest_stage, memory_of
from expertmesh.planning.search import Candidate
from expertmesh.planning.stages import Batch, resident_state
from expertmesh.planning.traffic import traffic_of
from expertmesh.simulation.run import planned_by_axis, simulate

# More of them add nothing but buffers for what stages receive, which the formulas count, and take as long again.
MICRO_BATCHES_PER_STAGE = 2


def run(config: PreTrainedConfig, best: Candidate, lora: LoraConfig | None) -> None:
    """Print state, peak and bytes of a step of `best`, simulated and predicted, on the fullest stage by prediction.

    The step has one micro-batch, two by layer, and with pp as many of the plan's as fill the pipeline twice.
    """
    pp, planned = best.layout.pp, best.workload.batch
    enough = 2 if planned.together else 1 if pp == 1 else MICRO_BATCHES_PER_STAGE * pp
    batch = Batch(planned.rows, min(planned.accumulation, enough), planned.order)
    workload = replace(best.workload, batch=batch, imbalance=1.0, by_block=(), on_cpu=False)
    stage = fullest_stage(workload)
    found = simulate(config, workload, lora=lora, stage=stage)
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
        (what, bytes_text(simulated), bytes_text(int(size)), f"{size / simulated - 1:+.2%}" if simulated else "-")
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
