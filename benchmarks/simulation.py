"""One rank of large jobs on fake tensors, beside the formulas; docs/formulas.md has the largest differences.

    python -m benchmarks.simulation            # all jobs, each in a process of its own; a minute or two each
    python -m benchmarks.simulation NUMBER ... # some of them, by their place in the list

Whole published models, 4,096 tokens, balanced routing, samples not packed. Of a pipeline the rank that the formulas
call the fullest.
"""

import subprocess
import sys
from dataclasses import dataclass

from transformers import PreTrainedConfig

from expertmesh.config import ParallelConfig, PrecisionConfig
from expertmesh.distributed.layout import resolve_layout
from expertmesh.parallel.checkpointing import CheckpointingMode
from expertmesh.planning.memory import fullest_stage, memory_of
from expertmesh.planning.stages import Batch, Workload, resident_state
from expertmesh.planning.traffic import traffic_of
from expertmesh.simulation import planned_by_axis, simulate
from tests.support.planned import figures_of

from .shapes import deepseek_v3, qwen3_30b_a3b

LENGTH = 4096


@dataclass(frozen=True, slots=True)
class Job:
    """A model of shapes.py on `world` ranks, `accumulation` micro-batches of one sequence."""

    model: str
    world: int
    parallel: ParallelConfig
    mode: CheckpointingMode = "full"
    accumulation: int = 1

    def config(self) -> PreTrainedConfig:
        return qwen3_30b_a3b() if self.model.startswith("Qwen") else deepseek_v3()


QWEN, DEEPSEEK = "Qwen3-30B-A3B", "DeepSeek-V3"
JOBS = (
    Job(QWEN, 64, ParallelConfig(ep=8, tp=2, cp=2), "selective"),
    Job(QWEN, 512, ParallelConfig(ep=8, tp=2, cp=2), "selective"),
    Job(QWEN, 4096, ParallelConfig(ep=8, tp=2, cp=2, replicate=4), "selective"),
    Job(QWEN, 64, ParallelConfig(ep=8, pp=4, tp=2), "full", 8),
    Job(QWEN, 512, ParallelConfig(ep=8, pp=4, tp=2), "full", 8),
    Job(QWEN, 4096, ParallelConfig(ep=8, pp=4, tp=2, replicate=4), "full", 8),
    Job(QWEN, 512, ParallelConfig(ep=8, pp=4, pp_virtual_stages=3), "full", 8),
    Job(DEEPSEEK, 64, ParallelConfig(ep=8, pp=8, tp=2), "full", 16),
    Job(DEEPSEEK, 512, ParallelConfig(ep=32, pp=8, tp=2, cp=2), "selective", 16),
    Job(DEEPSEEK, 4096, ParallelConfig(ep=64, pp=16, cp=4), "full", 32),
    Job(DEEPSEEK, 4096, ParallelConfig(ep=64, tp=8, replicate=4), "full"),
)


def line(job: Job) -> str:
    """Return one row of the table."""
    config = job.config()
    model = figures_of(config, length=LENGTH, precision=PrecisionConfig(), packed=False)
    layout = resolve_layout(job.parallel, job.world, model.anatomy.num_experts)
    workload = Workload(model, layout, Batch(1, job.accumulation), job.mode)
    stage = fullest_stage(workload)
    found = simulate(config, workload, stage=stage)
    held = resident_state(model, layout, stage)
    state = (held.frozen + held.master + held.moments) / found.state - 1
    peak = memory_of(workload).total / found.peak - 1
    planned = planned_by_axis(traffic_of(workload, stage), found.sent)
    off = {key: planned[key].bytes / sent.bytes - 1 for key, sent in found.sent.items() if sent.bytes > 1024}
    (axis, kind), worst = max(off.items(), key=lambda item: abs(item[1]))
    traffic = f"{worst:+.2%} ({axis} {kind})" if abs(worst) > 0.00005 else "exact"
    axes = " ".join(
        f"{name} {getattr(job.parallel, name)}"
        for name in ("pp", "pp_virtual_stages", "replicate", "cp", "tp", "ep")
        if getattr(job.parallel, name) != 1
    ).replace("pp_virtual_stages", "stages")
    micro = f", {job.accumulation} micro-batches" if job.accumulation > 1 else ""
    where = f", rank {found.rank}" if found.rank else ""
    return (
        f"| {job.model}, {job.world:,} ranks, {axes}, {job.mode}{micro}{where} | {state:+.1%} | "
        f"{found.peak / 2**30:.2f} GiB, {peak:+.1%} | {traffic} | {found.mesh_seconds:.1f} s | "
        f"{found.shard_seconds:.0f} s | {found.step_seconds:.0f} s | {found.process_groups} |"
    )


def main(numbers: list[str]) -> None:
    if numbers[:1] == ["--one"]:
        print(line(JOBS[int(numbers[1])]), flush=True)
        return
    print("| job | state | peak | bytes, worst kind | meshes | model sharded | two steps | process groups |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for number in numbers or map(str, range(len(JOBS))):
        subprocess.run([sys.executable, "-m", "benchmarks.simulation", "--one", number], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
