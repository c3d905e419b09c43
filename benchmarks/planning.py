"""Is the planner honest? Predicted state, activations, peak and bytes beside what gloo ranks hold and send.

    python -m benchmarks.planning            # the table of docs/planning.md; a minute or two
    python -m benchmarks.planning NAME ...   # some of its points

Each point trains a small model for three steps on forked gloo ranks and counts the third under the census: storages of
live tensors, saved bytes after forward, and every collective. Routing is the model's own, on random tokens.
"""

import dataclasses
import gc
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

import expertmesh as em
from expertmesh.config import LoraConfig, ParallelConfig, PrecisionConfig
from expertmesh.mesh import resolve_layout
from expertmesh.planning.census import Census
from expertmesh.planning.facts import facts_of
from expertmesh.planning.memory import Batch, Mode, memory_of, saved_of, state_of
from expertmesh.planning.traffic import traffic_of
from tests.support.models import tiny_config
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
}
MIXED, ONE = PrecisionConfig(), Batch(1, 1)
FP32 = PrecisionConfig(params="float32", compute="float32", reduce="float32")
BF16 = PrecisionConfig(params="bfloat16", compute="bfloat16", reduce="float32")


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One model, layout and mode. `ranks` real processes."""

    name: str
    family: str
    ranks: int
    parallel: ParallelConfig
    mode: Mode = "none"
    precision: PrecisionConfig = MIXED
    lora: LoraConfig | None = None
    batch: Batch = ONE


def _points() -> tuple[Point, ...]:
    ep, lora = (lambda size, **more: ParallelConfig(ep=size, **more)), LoraConfig()
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
        Point("qwen3 ep4 of 4, LoRA, full", "qwen3_moe", 4, ep(4), "full", lora=lora),
        Point("deepseek ep2 of 4", "deepseek_v3", 4, ep(2)),
        Point("deepseek ep4 of 4, full", "deepseek_v3", 4, ep(4), "full"),
        Point("deepseek ep2 of 4, LoRA", "deepseek_v3", 4, ep(2), lora=lora),
        Point("mixtral ep2 of 4", "mixtral", 4, ep(2)),
        Point("mixtral ep4 of 4, full", "mixtral", 4, ep(4), "full"),
    )


POINTS = _points()


@dataclasses.dataclass(frozen=True, slots=True)
class Honesty:
    """Predicted over measured, minus one. `traffic` is the worst kind of collective with more than a kilobyte."""

    state: float
    saved: float
    peak: float
    traffic: float


def config_of(point: Point) -> PreTrainedConfig:
    sizes = {"hidden_size": 128, "vocab_size": VOCABULARY, "num_hidden_layers": 4, "num_experts_per_tok": 4}
    return tiny_config(point.family, max_position_embeddings=1024, **sizes, **SIZES[point.family])


def measure(point: Point) -> Honesty:
    """Run the ranks of one point and compare; parts that differ between ranks by their mean, the peak by the worst."""
    results = run_ranks(_rank, point.ranks, point, timeout=120)
    facts = facts_of(config_of(point), length=LENGTH, precision=point.precision, lora=point.lora, packed=False)
    layout = resolve_layout(point.parallel, point.ranks, EXPERTS)
    state = state_of(facts, layout)
    predicted_state = state.frozen + 3 * state.master
    predicted: dict[str, float] = {}
    for transfer in traffic_of(facts, layout, point.batch, point.mode):
        predicted[transfer.kind] = predicted.get(transfer.kind, 0.0) + transfer.bytes
    measured: dict[str, float] = {}
    for result in results:
        for kind, size in result["sent"].items():
            measured[kind] = measured.get(kind, 0.0) + size / point.ranks
    kinds = {kind for kind, size in (measured | predicted).items() if size > 1024 and point.ranks > 1}
    worst = max((predicted.get(kind, 0.0) / measured[kind] - 1 for kind in kinds), key=abs, default=0.0)
    peak = max(result["peak"] for result in results)
    saved = sum(result["saved"] for result in results) / point.ranks
    return Honesty(
        state=predicted_state / results[0]["state"] - 1,
        saved=saved_of(facts, layout, point.batch, point.mode) / saved - 1,
        peak=memory_of(facts, layout, point.batch, point.mode, gloo=True).total / peak - 1,
        traffic=worst,
    )


def _rank(point: Point) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config_of(point), dtype=getattr(torch, point.precision.params))
    if point.lora is not None:
        model.to(getattr(torch, point.precision.compute))
    mesh = em.init_mesh(point.parallel, num_experts=EXPERTS)
    checkpointing = point.mode == "full"
    em.parallelize(model, mesh, precision=point.precision, activation_checkpointing=checkpointing, lora=point.lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (point.batch.rows, LENGTH)
    ids = [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(point.batch.accumulation)]
    batches = [{"input_ids": part, "labels": part, "attention_mask": torch.ones_like(part)} for part in ids]
    saved: list[int] = []

    def step(census: Census | None = None) -> None:
        for index, batch in enumerate(batches, start=1):
            if mesh.layout.replicate > 1:
                model.set_requires_all_reduce(index == len(batches))
            before = 0 if census is None else census.live
            loss = em.causal_lm_loss(model, batch, target_tokens=1000)
            if census is not None:
                # The root's gathered parameters are no activation.
                gathered = sum(p.nbytes for p in model.parameters() if not isinstance(p, DTensor))
                saved.append(census.live - before - gathered)
            loss.backward()
            del loss
        em.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    gc.collect()
    census = Census()
    with census:
        census.know(_local(parameter) for parameter in model.parameters())
        moments = [_local(tensor) for state in optimizer.state.values() for tensor in state.values()]
        census.know(tensor for tensor in moments if tensor.dim())
        state = census.live
        census.know(model.buffers())
        census.reset_peak()
        step(census)
    sent: dict[str, float] = {}
    for kinds in census.sent.values():
        for kind, entry in kinds.items():
            sent[kind] = sent.get(kind, 0.0) + entry.bytes
    return {"state": state, "saved": saved[0], "peak": census.peak, "sent": sent}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main(names: list[str]) -> None:
    print("| point | state | activations | peak | bytes, worst kind |\n|---|---|---|---|---|")
    for point in POINTS:
        if not names or point.name in names:
            found = measure(point)
            cells = (f"{value:+.1%}" for value in dataclasses.astuple(found))
            print(f"| {point.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
