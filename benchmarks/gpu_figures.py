"""How much: rates of the device, layers and steps beside others', memory beside the plan's, where time goes.

Stages of gpu.py. Seconds are medians of repetitions between two synchronisations, systems alternating; whatever is
compared with a peer must give the peer's results first.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

import expertmesh as em
from benchmarks import frozen, layer, lora
from benchmarks.case import Case, LayerCase, Shape, input_ids, qwen3_moe_config
from benchmarks.gpu import Row
from benchmarks.gpu_stage import Run, Stage, start_one_rank
from benchmarks.probes import median, peak_bytes, seconds_of, synchronize
from benchmarks.result import why_missing
from expertmesh.distributed.layout import Layout
from expertmesh.experts.expert_mlp import grouped_mm
from expertmesh.experts.mlp_spec import ExpertMlpSpec, Gate, activate, activation_backward
from expertmesh.experts.pairs import Segments, order_by_expert, segment_sum, segments_of
from expertmesh.planning.forecast import devices_here
from expertmesh.planning.read_model import figures_of
from expertmesh.planning.search import Job, evaluate
from expertmesh.planning.stages import Batch

# Experts of DeepSeek-V3 on one of 8 ranks.
SHAPES = {"Qwen3-30B-A3B": Shape(), "DeepSeek-V3, a rank of 8": Shape(7168, 2048, 32, 8)}
SMALL = {"tiny": Shape(64, 32, 8, 2)}
# Two layers of Qwen3-30B-A3B.
STEP = Case(
    tokens=8192, sequence=4096, compute="bfloat16", params="float32", layers=2, hidden=2048, experts=128,
    expert_width=768, vocabulary=32768, heads=32, head_dim=128,
)  # fmt: skip
PEERS = ("liger_kernel", "sonicmoe", "nccl_extensions", "deep_ep", "flash_attn")


def of_ceilings(run: Run) -> Iterator[Row]:
    """What the device reaches: the planner's constants, and what everything else is held against."""
    device, size = run.device, run.pick(8192, 256)
    source, target = torch.empty(2, run.pick(1 << 31, 1 << 20), dtype=torch.uint8, device=device)
    yield {"copy_TBps": 2 * source.nbytes / _seconds(run, lambda: target.copy_(source)) / 1e12}
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    yield {"matmul_TFLOPs": 2 * size**3 / _seconds(run, lambda: left @ right) / 1e12}
    yield from _of_host(run, source)
    for name, shape in run.pick(SHAPES, SMALL).items():
        yield {"shape": name} | _products_and_rows(run, shape, run.pick(8192, 64))


def _of_host(run: Run, on_device: torch.Tensor) -> Iterator[Row]:
    """What launching, waiting and copying take."""
    one, times = torch.zeros(1, device=run.device), 500

    def launches() -> None:
        for _ in range(times):
            one.add_(1)

    def waits() -> None:
        for _ in range(times):
            one.add_(1).item()

    yield {"launch_us": _seconds(run, launches) / times * 1e6, "wait_us": _seconds(run, waits) / times * 1e6}
    small = on_device[: run.pick(1 << 28, 1 << 16)]
    for name, pinned in (("pinned", True), ("pageable", False)):
        host = torch.empty(small.shape, dtype=torch.uint8, pin_memory=pinned and run.device.type == "cuda")
        seconds = _seconds(run, lambda h=host: h.copy_(small, non_blocking=True))
        yield {f"to_{name}_host_GBps": small.nbytes / seconds / 1e9}


def _products_and_rows(run: Run, shape: Shape, tokens: int) -> Row:
    """Grouped products alone, with even counts, in all directions; what moves a layer's rows around them."""
    pairs, bf16 = tokens * shape.top_k, torch.bfloat16
    x_PH, pre_P2I = (torch.randn(pairs, n, device=run.device, dtype=bf16) for n in (shape.hidden, 2 * shape.width))
    up_E2IH = torch.randn(shape.experts, 2 * shape.width, shape.hidden, device=run.device, dtype=bf16)
    end_E = (torch.arange(1, shape.experts + 1, device=run.device) * (pairs // shape.experts)).int()
    flops = 2 * pairs * shape.hidden * 2 * shape.width
    products: dict[str, Callable[[], torch.Tensor]] = {
        "forward": lambda: grouped_mm(x_PH, up_E2IH.transpose(1, 2), end_E),
        "input_gradient": lambda: grouped_mm(pre_P2I, up_E2IH, end_E),
        "weight_gradient": lambda: grouped_mm(pre_P2I.t(), x_PH, end_E),
    }
    rates = {f"{name}_TFLOPs": flops / _seconds(run, product) / 1e12 for name, product in products.items()}
    row_P = torch.randint(tokens, (pairs,), device=run.device)
    segments = segments_of(row_P, tokens)
    rates["gather_TBps"] = 2 * x_PH.nbytes / _seconds(run, lambda: x_PH.index_select(0, row_P)) / 1e12
    rates["sort_us"] = _seconds(run, lambda: torch.sort(row_P, stable=True)) * 1e6
    return rates | _around_products(run, pre_P2I, segments, x_PH)


def _around_products(run: Run, pre_P2I: torch.Tensor, segments: Segments, x_PH: torch.Tensor) -> Row:
    """What moves around the products, by torch and by Triton's kernels: bytes that have to be moved a second."""
    experts = torch.randint(128, (len(x_PH),), device=run.device)
    grad_PI = torch.randn(len(x_PH), pre_P2I.shape[1] // 2, device=run.device, dtype=torch.bfloat16)
    weight_P, found = torch.rand(len(x_PH), device=run.device), dict[str, Any]()
    for name, triton in (("torch", False), ("triton", True))[: run.pick(2, 1)]:
        mlp = ExpertMlpSpec(torch.nn.Identity(), True, False, False, triton, Gate() if triton else None)
        calls: dict[str, tuple[int, Callable[[], object]]] = {
            "segment_sum": (2 * x_PH.nbytes, partial(segment_sum, x_PH, segments, triton)),
            "swiglu": (pre_P2I.nbytes + grad_PI.nbytes, partial(activate, pre_P2I, weight_P, mlp)),
            # In place: values change from call to call, bytes do not.
            "swiglu_backward": (
                2 * pre_P2I.nbytes + 2 * grad_PI.nbytes, partial(activation_backward, pre_P2I, grad_PI, weight_P, mlp)
            ),
        }  # fmt: skip
        found |= {f"{what}_{name}_TBps": size / _seconds(run, call) / 1e12 for what, (size, call) in calls.items()}
        found[f"order_{name}_us"] = _seconds(run, partial(order_by_expert, experts, 128, triton)) * 1e6
    return found


def of_layer_bench(run: Run) -> Iterator[Row]:
    """One layer's experts, forward and backward, beside transformers' grouped_mm; what else is installed is named."""
    yield {"installed": [name for name in PEERS if importlib.util.find_spec(name)]}
    names = [name for name in layer.systems_on(run.device) if "loop" not in name]
    tokens = run.pick({"Qwen3-30B-A3B": (8192, 32768, 65536), "DeepSeek-V3, a rank of 8": (8192,)}, {"tiny": (64,)})
    for name, shape in run.pick(SHAPES, SMALL).items():
        for count in tokens[name]:
            case = LayerCase(count, shape, "bfloat16")
            report = layer.measure(case, names, run.device, run.pick(7, 2))
            for row in report["rows"]:
                yield {"shape": name, "tokens": count, **row}
            _forget(run)


def of_lora_bench(run: Run) -> Iterator[Row]:
    """Adapters on a layer's experts, beside stock PEFT where it is installed."""
    case = LayerCase(run.pick(16384, 64), run.pick(Shape(), SMALL["tiny"]), "bfloat16")
    systems = ("ours",) if (missing := why_missing("peft")) else tuple(lora.SYSTEMS)
    report = lora.measure(case, systems, run.device, run.pick(9, 2))
    yield {"missing": missing, "seconds": report["seconds"], "peak_bytes": report["peak_bytes"]}


def of_frozen_bench(run: Run) -> Iterator[Row]:
    """A LoRA step with frozen experts in 4 and 8 bits."""
    start_one_rank(run)
    case = dataclasses.replace(run.pick(STEP, _small()), layers=1, params="bfloat16")
    adapters = em.LoraConfig(r=16, targets=("attention", "experts"))
    mesh = em.init_mesh(em.ParallelConfig(ep=1), device=run.device)
    for kind in run.pick((None, "nf4", "mxfp4", "float8"), (None, "nf4")):
        step, model = frozen.build(case, mesh, adapters, kind)
        step()
        seconds = median([seconds_of(step, run.device) for _ in range(run.pick(5, 1))])
        yield {"experts": kind or "bfloat16", "seconds": seconds, "peak_bytes_above": peak_bytes(step, run.device)}
        del step, model
        _forget(run)


def of_memory(run: Run) -> Iterator[Row]:
    """What the plan says of a step's memory and time beside what the allocator and the clock say."""
    start_one_rank(run)
    case = run.pick(STEP, _small())
    adapters = em.LoraConfig(r=16, targets=("attention", "experts"))
    variants = [("none", None), ("selective", None), ("full", None), ("full", adapters)]
    for mode, adapter in variants[: run.pick(4, 2)]:
        yield {"mode": mode, "adapters": adapter is not None, **_planned_and_measured(run, case, mode, adapter)}
        _forget(run)


def _planned_and_measured(run: Run, case: Case, mode: Any, adapters: em.LoraConfig | None) -> Row:
    precision = em.PrecisionConfig(params=case.params, compute="bfloat16", reduce="float32")  # type: ignore[arg-type]
    config, length = qwen3_moe_config(case), min(case.sequence, case.tokens)
    rows, row = case.tokens // length, dict[str, Any]()
    if (devices := devices_here(1)) is not None:
        figures = figures_of(config, length=length, precision=precision, lora=adapters, packed=False)
        found = evaluate(Job(figures, devices, rows), Layout(), mode, Batch(rows, 1))
        row = {"planned_bytes": found.memory.total - found.memory.overhead, "planned_seconds": found.speed.seconds}
    step = _step(run, case, precision, mode, adapters)
    step()
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        row |= {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }
    row["seconds"] = median([seconds_of(step, run.device) for _ in range(run.pick(5, 1))])
    return row


def of_step(run: Run) -> Iterator[Row]:
    """Steps of as many layers as fit: tokens a second, and the share of it that the host would need alone."""
    start_one_rank(run)
    case = dataclasses.replace(run.pick(STEP, _small()), layers=run.pick(4, 2), params="bfloat16")
    precision = em.PrecisionConfig(params="bfloat16", compute="bfloat16", reduce="float32")
    step = _step(run, case, precision, "selective", None)
    step()
    seconds = median([seconds_of(step, run.device) for _ in range(run.pick(7, 1))])
    launched = []
    for _ in range(run.pick(5, 1)):
        synchronize(run.device)
        start = time.perf_counter()
        step()
        launched.append(time.perf_counter() - start)
    yield {
        "layers": case.layers, "tokens": case.tokens, "seconds": seconds, "tokens_per_second": case.tokens / seconds,
        "host_seconds": median(launched),
    }  # fmt: skip


def of_profile(run: Run) -> Iterator[Row]:
    """Device time of one layer by kernel, launches, and how long the device has nothing to do; a trace in --out."""
    shape = run.pick(Shape(), SMALL["tiny"])
    weights = layer.make_weights(shape, run.device, torch.bfloat16)
    ours = layer.TRITON if layer.TRITON in layer.systems_on(run.device) else "expertmesh_grouped_mm"
    experts = layer.SYSTEMS[ours](shape, weights)
    inputs = layer.make_inputs(shape, run.pick(8192, 64), "real", run.device, torch.bfloat16)
    for _ in range(3):
        layer.forward_backward(experts, inputs, weights)
    on_cuda, times = run.device.type == "cuda", 5
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as profiler:
        for _ in range(times):
            layer.forward_backward(experts, inputs, weights)
        synchronize(run.device)
    spent: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in profiler.key_averages():
        microseconds = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        if microseconds:
            spent[event.key[:80]][0] += event.count / times
            spent[event.key[:80]][1] += microseconds / times
    busy = sum(microseconds for _, microseconds in spent.values()) / 1e6
    seconds = _seconds(run, lambda: layer.forward_backward(experts, inputs, weights))
    yield {"seconds": seconds, "device_busy_seconds": busy, "launches": sum(count for count, _ in spent.values())}
    for kernel, (count, microseconds) in sorted(spent.items(), key=lambda each: -each[1][1])[:25]:
        yield {"kernel": kernel, "launches": count, "us": microseconds}
    profiler.export_chrome_trace(str(run.out / "layer_trace.json"))


def _step(run: Run, case: Case, precision: Any, mode: Any, adapters: em.LoraConfig | None) -> Callable[[], None]:
    """An optimizer step of a random model of `case`."""
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(qwen3_moe_config(case), dtype=getattr(torch, case.params)).train()
    mesh = em.init_mesh(em.ParallelConfig(ep=1), device=run.device)
    em.parallelize(model, mesh, precision=precision, activation_checkpointing=mode, lora=adapters)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    ids = input_ids(case, 0).to(run.device)

    def step() -> None:
        em.forward_backward(model, [{"input_ids": ids, "labels": ids}], target_tokens=em.count_targets(ids))
        em.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _small() -> Case:
    return dataclasses.replace(STEP.tiny(), params="float32", layers=2)


def _seconds(run: Run, call: Callable[[], object]) -> float:
    """Of one call, launched often enough that launching does not count."""
    times = run.pick(10, 1)

    def several() -> None:
        for _ in range(times):
            call()

    several()
    return median([seconds_of(several, run.device) for _ in range(run.pick(5, 1))]) / times


def _forget(run: Run) -> None:
    """What the last case held is free for the next one; models are cycles."""
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()


STAGES: dict[str, Stage] = {
    "ceilings": of_ceilings, "layer_bench": of_layer_bench, "lora_bench": of_lora_bench,
    "frozen_bench": of_frozen_bench, "memory": of_memory, "step": of_step, "profile": of_profile,
}  # fmt: skip
