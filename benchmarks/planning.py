"""Is the planner honest? Predicted state, activations, peak and bytes beside what gloo ranks hold and send.

    python -m benchmarks.planning            # docs/formulas.md has the largest differences; a few minutes
    python -m benchmarks.planning NAME ...   # some of its points

Each point trains a small model for three steps on forked gloo ranks and counts the third under the tracker: storages of
live tensors, saved bytes after forward, and every collective by the axis it runs over. Routing is the model's own, on
random tokens.
"""

import dataclasses
import gc
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

import expertmesh as em
from expertmesh.config import LoraConfig, OptimConfig, ParallelConfig, PrecisionConfig
from expertmesh.config.sections import OptimizerName
from expertmesh.distributed.layout import resolve_layout
from expertmesh.experts.placement import balanced, write_placement
from expertmesh.parallel.checkpointing import CheckpointingMode
from expertmesh.planning.memory import RankMemory, memory_of
from expertmesh.planning.probe import UsageTracker
from expertmesh.planning.stages import Batch, CheckpointedLayers, Workload, resident_state
from expertmesh.planning.traffic import traffic_of
from expertmesh.simulation import planned_by_axis, sent_by_axis
from expertmesh.state.packed import stored
from expertmesh.step import forward_backward as training_step
from expertmesh.step import pipeline_schedule as stages
from expertmesh.step.forward_backward import Order
from expertmesh.training.optimizers.build import build_optimizer
from tests.support.models import tiny_config
from tests.support.planned import figures_of
from tests.support.ranks import run_ranks

LENGTH, EXPERTS, VOCABULARY = 256, 16, 512
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 96, "num_experts": EXPERTS, "head_dim": 32},
    # Heads of one width throughout: torch's fused attention on CPUs knows no other.
    "deepseek_v3": {
        "moe_intermediate_size": 96,
        "n_routed_experts": EXPERTS,
        "intermediate_size": 256,
        "v_head_dim": 16,
    },
    "mixtral": {"intermediate_size": 96, "num_local_experts": EXPERTS},
    "jetmoe": {"intermediate_size": 96, "num_local_experts": EXPERTS, "kv_channels": 16},
}
MIXED, ONE = PrecisionConfig(), Batch(1, 1)
BY_LAYER, IN_TWOS = Order(by_layer=True), Order(by_layer=True, round=2)
FP32 = PrecisionConfig(params="float32", compute="float32", reduce="float32")
BF16 = PrecisionConfig(params="bfloat16", compute="bfloat16", reduce="float32")


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One model, layout and mode. `ranks` real processes."""

    name: str
    family: str
    ranks: int
    parallel: ParallelConfig
    mode: CheckpointingMode = "none"
    precision: PrecisionConfig = MIXED
    lora: LoraConfig | None = None
    batch: Batch = ONE
    layers: CheckpointedLayers = "all"
    optimizer: OptimizerName = "adamw"
    replicas: int = 0


def _points() -> tuple[Point, ...]:
    ep, lora = (lambda size, **more: ParallelConfig(ep=size, **more)), LoraConfig()
    virtual = lambda size: ep(size, pp=2, pp_virtual_stages=2)  # noqa: E731
    return (
        Point("qwen3 ep1 of 1", "qwen3_moe", 1, ep(1)),
        Point("qwen3 ep1 of 2", "qwen3_moe", 2, ep(1)),
        Point("qwen3 ep2 of 4", "qwen3_moe", 4, ep(2)),
        Point("qwen3 ep4 of 4", "qwen3_moe", 4, ep(4)),
        Point("qwen3 ep1 of 4, full", "qwen3_moe", 4, ep(1), "full"),
        Point("qwen3 ep2 of 4, full", "qwen3_moe", 4, ep(2), "full"),
        Point("qwen3 ep4 of 4, full", "qwen3_moe", 4, ep(4), "full"),
        Point("qwen3 ep2 of 4, 2 accumulated", "qwen3_moe", 4, ep(2), batch=Batch(1, 2)),
        Point("qwen3 ep2 of 4, micro-batch 2", "qwen3_moe", 4, ep(2), batch=Batch(2, 1)),
        Point("qwen3 ep2, 2 replicas", "qwen3_moe", 4, ep(2, replicate=2)),
        Point(
            "qwen3 ep2, 2 replicas, full, 2 accumulated", "qwen3_moe", 4, ep(2, replicate=2), "full", batch=Batch(1, 2)
        ),
        Point("qwen3 ep2 of 4, fp32", "qwen3_moe", 4, ep(2), precision=FP32),
        Point("qwen3 ep4 of 4, bf16 masters", "qwen3_moe", 4, ep(4), precision=BF16),
        Point("qwen3 ep2 of 4, LoRA", "qwen3_moe", 4, ep(2), lora=lora),
        Point(
            "qwen3 ep2 of 4, LoRA on nf4", "qwen3_moe", 4, ep(2), lora=lora, precision=em.PrecisionConfig(frozen="nf4")
        ),
        Point("qwen3 ep4 of 4, LoRA, full", "qwen3_moe", 4, ep(4), "full", lora=lora),
        Point("qwen3 ep4 of 4, LoRA, 2 copies", "qwen3_moe", 4, ep(4), lora=lora, replicas=2),
        Point("deepseek ep2 of 4", "deepseek_v3", 4, ep(2)),
        Point("deepseek ep4 of 4, full", "deepseek_v3", 4, ep(4), "full"),
        Point("deepseek ep2 of 4, LoRA", "deepseek_v3", 4, ep(2), lora=lora),
        Point("mixtral ep2 of 4", "mixtral", 4, ep(2)),
        Point("mixtral ep4 of 4, full", "mixtral", 4, ep(4), "full"),
        Point("qwen3 ep2 of 4, selective", "qwen3_moe", 4, ep(2), "selective"),
        Point("qwen3 tp2", "qwen3_moe", 2, ep(1, tp=2)),
        Point("qwen3 tp2 ep2 of 4", "qwen3_moe", 4, ep(2, tp=2)),
        Point("qwen3 tp2 ep2 of 4, full", "qwen3_moe", 4, ep(2, tp=2), "full"),
        Point("qwen3 tp2 ep2 of 4, LoRA", "qwen3_moe", 4, ep(2, tp=2), lora=lora),
        Point("deepseek tp2 ep2 of 4", "deepseek_v3", 4, ep(2, tp=2)),
        Point("qwen3 cp2", "qwen3_moe", 2, ep(1, cp=2)),
        Point("qwen3 cp2 ep2 of 4", "qwen3_moe", 4, ep(2, cp=2)),
        Point("qwen3 cp2 ep2 of 4, full", "qwen3_moe", 4, ep(2, cp=2), "full"),
        Point("qwen3 cp2 ep2 of 4, selective", "qwen3_moe", 4, ep(2, cp=2), "selective"),
        Point("qwen3 cp4 of 4", "qwen3_moe", 4, ep(2, cp=4)),
        Point("qwen3 tp2 cp2 ep4", "qwen3_moe", 4, ep(4, tp=2, cp=2)),
        Point("qwen3 tp2 cp2 ep4, full", "qwen3_moe", 4, ep(4, tp=2, cp=2), "full"),
        Point("qwen3 pp2, 2 micro-batches", "qwen3_moe", 2, ep(1, pp=2), batch=Batch(1, 2)),
        Point("qwen3 pp2 ep2, 4 micro-batches", "qwen3_moe", 4, ep(2, pp=2), batch=Batch(1, 4)),
        Point("qwen3 pp2 ep2, full, 4 micro-batches", "qwen3_moe", 4, ep(2, pp=2), "full", batch=Batch(1, 4)),
        Point("qwen3 pp4, 2 micro-batches", "qwen3_moe", 4, ep(1, pp=4), batch=Batch(1, 2)),
        Point("qwen3 pp2, 2 micro-batches, gpipe", "qwen3_moe", 2, ep(1, pp=2, pp_schedule="gpipe"), batch=Batch(1, 2)),
        Point("qwen3 pp2 x 2 stages, 4 micro-batches", "qwen3_moe", 2, virtual(1), batch=Batch(1, 4)),
        Point("qwen3 pp2 x 2 stages ep2, 2 micro-batches", "qwen3_moe", 4, virtual(2), batch=Batch(1, 2)),
        Point("qwen3 pp2 x 2 stages ep2, full, 4 micro-batches", "qwen3_moe", 4, virtual(2), "full", batch=Batch(1, 4)),
        Point("qwen3 ep2 of 4, full, every 2nd block", "qwen3_moe", 4, ep(2), "full", layers=2),
        Point("qwen3 ep2 of 4, selective, block 3", "qwen3_moe", 4, ep(2), "selective", layers=(3,)),
        Point("qwen3 tp2 ep2 of 4, full, blocks 0 and 1", "qwen3_moe", 4, ep(2, tp=2), "full", layers=(0, 1)),
        Point("deepseek ep2 of 4, full, every 2nd block", "deepseek_v3", 4, ep(2), "full", layers=2),
        Point("qwen3 ep2 of 4, full, 4 by layer", "qwen3_moe", 4, ep(2), "full", batch=Batch(1, 4, BY_LAYER)),
        Point(
            "deepseek ep4 of 4, LoRA, full, 4 by layer in 2 rounds",
            "deepseek_v3",
            4,
            ep(4),
            "full",
            lora=lora,
            batch=Batch(1, 4, IN_TWOS),
        ),
        Point("qwen3 tp2 ep2 of 4, 2 by layer", "qwen3_moe", 4, ep(2, tp=2), batch=Batch(1, 2, BY_LAYER)),
        Point("qwen3 ep2 of 4, adamw_8bit", "qwen3_moe", 4, ep(2), optimizer="adamw_8bit"),
        Point("qwen3 tp2 ep2 of 4, adamw_8bit", "qwen3_moe", 4, ep(2, tp=2), optimizer="adamw_8bit"),
        Point("qwen3 tp2 ep2 of 4, muon", "qwen3_moe", 4, ep(2, tp=2), optimizer="muon"),
        Point("qwen3 ep2 of 4, LoRA, muon", "qwen3_moe", 4, ep(2), lora=lora, optimizer="muon"),
        Point("qwen3 ep2 of 4, LoRA, adamw_8bit", "qwen3_moe", 4, ep(2), lora=lora, optimizer="adamw_8bit"),
    )


POINTS = _points()


@dataclasses.dataclass(frozen=True, slots=True)
class Honesty:
    """Predicted over measured, minus one; of the stages the worst. `traffic` is the worst axis and kind of collective
    with more than a kilobyte; `axes` are its bytes of a rank and step, (measured, predicted), by axis.
    """

    state: float
    saved: float
    peak: float
    traffic: float
    axes: dict[str, tuple[float, float]]


def config_of(point: Point) -> PreTrainedConfig:
    sizes = {"hidden_size": 128, "vocab_size": VOCABULARY, "num_hidden_layers": 4, "num_experts_per_tok": 4}
    return tiny_config(point.family, max_position_embeddings=1024, **sizes, **SIZES[point.family])


def measure(point: Point) -> Honesty:
    """Run the ranks of one point and compare; parts that differ between ranks by their mean, the peak by the worst."""
    results = run_ranks(_rank, point.ranks, point, timeout=120)
    model = figures_of(config_of(point), length=LENGTH, precision=point.precision, lora=point.lora, packed=False)
    model, layout = (
        dataclasses.replace(model, replicas=point.replicas),
        resolve_layout(point.parallel, point.ranks, EXPERTS),
    )
    workload = Workload(model, layout, point.batch, point.mode, point.layers, on_cpu=True, optimizer=point.optimizer)
    each = layout.ranks_per_stage
    states, saves = [], []
    sent: dict[tuple[str, str], list[float]] = {}
    for stage in range(layout.pp):
        ranks = results[stage * each : (stage + 1) * each]
        state = resident_state(model, layout, stage, point.optimizer)
        states.append((state.frozen + state.master + state.moments) / ranks[0]["state"] - 1)
        if not point.batch.together:  # by layer nothing runs a whole forward
            # What its first stage saves for backward: blocks, what is around them, and the head.
            memory = RankMemory(workload)
            saved = memory.saved(stage, 0)[-1] + memory.tables + memory.at_borders(stage, 0)
            saved += memory.outside + memory.head_saved if memory.is_last(stage, 0) else 0.0
            saves.append(saved / (sum(rank["saved"] for rank in ranks) / each) - 1)
        for key, transfer in planned_by_axis(traffic_of(workload, stage), ranks[0]["sent"]).items():
            sent.setdefault(key, [0.0, 0.0])[1] += transfer.bytes / layout.pp
        for rank in ranks:
            for key, size in rank["sent"].items():
                sent.setdefault(key, [0.0, 0.0])[0] += size / point.ranks
    compared = {key: sizes for key, sizes in sent.items() if max(sizes) > 1024}
    worst = max((own / real - 1 if real else float("inf") for real, own in compared.values()), key=abs, default=0.0)
    axes: dict[str, tuple[float, float]] = {}
    for (axis, _), (real, own) in compared.items():
        before = axes.get(axis, (0.0, 0.0))
        axes[axis] = (before[0] + real, before[1] + own)
    peak = max(result["peak"] for result in results)
    return Honesty(
        state=max(states, key=abs),
        saved=max(saves, key=abs, default=0.0),
        peak=memory_of(workload).total / peak - 1,
        traffic=worst,
        axes=axes,
    )


def _rank(point: Point) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config_of(point), dtype=getattr(torch, point.precision.params))
    if point.lora is not None:
        model.to(getattr(torch, point.precision.compute))
    mesh = em.init_mesh(point.parallel, num_experts=EXPERTS)
    with tempfile.TemporaryDirectory() as directory:
        em.parallelize(
            model,
            mesh,
            precision=point.precision,
            moe=_section(point, model, mesh.layout.ep, Path(directory, "placement.json")),
            activation_checkpointing=point.mode,
            checkpoint_layers=point.layers,
            lora=point.lora,
        )
    optimizer = build_optimizer(
        model, OptimConfig(name=point.optimizer), seed=0, compute=getattr(torch, point.precision.compute)
    )
    generator = torch.Generator().manual_seed(mesh.data_rank)
    shape = (point.batch.rows, LENGTH)
    ids = [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(point.batch.accumulation)]
    batches = [{"input_ids": part, "labels": part, "attention_mask": torch.ones_like(part)} for part in ids]

    order: Any = "by_layer" if point.batch.together else "by_micro_batch"

    def step() -> None:
        em.forward_backward(model, batches, target_tokens=1000, accumulate=order, round=point.batch.order.round)
        em.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    gc.collect()
    tracker = UsageTracker()
    with tracker, _noting_saved(model, tracker) as saved:
        tracker.include(_local(parameter) for parameter in model.parameters())
        moments = [_local(tensor) for state in optimizer.state.values() for tensor in state.values()]
        tracker.include(tensor for tensor in moments if tensor.dim())
        state = tracker.live
        tracker.include(model.buffers())
        tracker.reset_peak()
        step()
    sent = {key: entry.bytes for key, entry in sent_by_axis(tracker.sent, mesh).items()}
    # The first forwards are all of the rank's first stage; one may find a message that gloo's threads still hold.
    kept = min(saved[: min(mesh.layout.pp, point.batch.accumulation)], default=None)
    return {"state": state, "saved": kept, "peak": tracker.peak, "sent": sent}


def _section(point: Point, model: Any, ep: int, path: Path) -> em.MoeConfig:
    """Return the section `moe` of a point; for copies a placement by even loads is written to `path`."""
    if not point.replicas:
        return em.MoeConfig()
    layers = [f"model.layers.{number}.mlp.experts" for number in range(model.config.num_hidden_layers)]
    write_placement(balanced({name: [1] * EXPERTS for name in layers}, ep, point.replicas), path)
    return em.MoeConfig(placement=str(path), replicas=point.replicas)


@contextmanager
def _noting_saved(model: Any, tracker: UsageTracker) -> Iterator[list[float]]:
    """Yield what each forward leaves for backward, in order. The root's gathered parameters are no activation."""
    saved: list[float] = []
    loop: Any = training_step
    staged: Any = stages._PipelineRun
    before = loop.loss_of_batch, staged.forward

    def noting(forward: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            before = tracker.live - _gathered(model)
            result = forward(*args, **kwargs)
            saved.append(tracker.live - before - _gathered(model))
            return result

        return run

    loop.loss_of_batch, staged.forward = map(noting, before)
    try:
        yield saved
    finally:
        loop.loss_of_batch, staged.forward = before


def _gathered(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters() if not isinstance(parameter, DTensor))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return stored(tensor.to_local()) if isinstance(tensor, DTensor) else tensor


def main(names: list[str]) -> None:
    print("| point | state | activations | peak | bytes, worst kind |\n|---|---|---|---|---|")
    lines = []
    for point in POINTS:
        if not names or point.name in names:
            found = measure(point)
            cells = (f"{value:+.1%}" for value in (found.state, found.saved, found.peak, found.traffic))
            print(f"| {point.name} | {' | '.join(cells)} |", flush=True)
            lines += [f"| {point.name} | {axis} | {_beside(*sizes)} |" for axis, sizes in found.axes.items()]
    print("\n| point | axis | measured, kB | formula, kB | |\n|---|---|---|---|---|", *lines, sep="\n")


def _beside(measured: float, predicted: float) -> str:
    off = f"{predicted / measured - 1:+.1%}" if measured else "not sent"
    return f"{measured / 1e3:,.1f} | {predicted / 1e3:,.1f} | {off}"


if __name__ == "__main__":
    main(sys.argv[1:])
