"""How much: rates of the device, layers and steps beside others', memory beside the plan's, where time goes.

Stages of gpu.py. Seconds are medians of repetitions between two synchronisations, systems alternating; whatever is
compared with a peer must give the peer's results first.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import expertmesh as em
from benchmarks import frozen, layer, lora
from benchmarks.case import Case, LayerCase, Shape, input_ids, qwen3_moe_config, random_model
from benchmarks.gpu import Row
from benchmarks.gpu_stage import Run, Stage, start_one_rank
from benchmarks.probes import median, peak_bytes, seconds_of, synchronize
from benchmarks.result import ResultsDiffer, why_missing
from expertmesh.distributed.layout import Layout
from expertmesh.experts.expert_mlp import grouped_mm
from expertmesh.experts.mlp_spec import ExpertMlpSpec, Gate, activate, activation_backward
from expertmesh.experts.pairs import Segments, order_by_expert, segment_sum, segments_of
from expertmesh.planning.forecast import devices_here
from expertmesh.planning.search import Job, evaluate
from expertmesh.planning.stages import Batch
from tests.support.planned import figures_of

# Experts of DeepSeek-V3 on one of 8 ranks.
SHAPES = {"Qwen3-30B-A3B": Shape(), "DeepSeek-V3, a rank of 8": Shape(7168, 2048, 32, 8)}
SMALL = {"tiny": Shape(64, 32, 8, 2)}
# Two layers of Qwen3-30B-A3B.
STEP = Case(
    tokens=8192, sequence=4096, compute="bfloat16", params="float32", layers=2, hidden=2048, experts=128,
    expert_width=768, vocabulary=32768, heads=32, head_dim=128,
)  # fmt: skip
# Of an optimizer; its loss, on the device.
Step = Callable[[], torch.Tensor]
PEERS = ("liger_kernel", "sonicmoe", "nccl_extensions", "deep_ep", "flash_attn")


def of_ceilings(run: Run) -> Iterator[Row]:
    """Measure what the device reaches: the planner's constants, and what everything else is held against."""
    device, size = run.device, run.pick(8192, 256)
    source, target = torch.empty(2, run.pick(1 << 31, 1 << 20), dtype=torch.uint8, device=device)
    yield {"copy_TBps": 2 * source.nbytes / _seconds(run, lambda: target.copy_(source)) / 1e12}
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    yield {"matmul_TFLOPs": 2 * size**3 / _seconds(run, lambda: left @ right) / 1e12}
    yield from _of_host(run, source)
    for name, shape in run.pick(SHAPES, SMALL).items():
        yield {"shape": name} | _products_and_rows(run, shape, run.pick(8192, 64))


def _of_host(run: Run, on_device: torch.Tensor) -> Iterator[Row]:
    """Measure what launching, waiting and copying take."""
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
    """Return what moves around the products, by torch and by Triton's kernels: bytes that have to be moved a second."""
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
    """Time one layer's experts, forward and backward, beside transformers' grouped_mm; what else is installed is
    named.
    """
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
    """Time a LoRA step with frozen experts in 4 and 8 bits."""
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
    """Compare the plan of a step's memory and time with what the allocator and the clock say."""
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
    # What adapters leave frozen is kept in the compute dtype, as `load_model` does.
    built = case if adapters is None else dataclasses.replace(case, params="bfloat16")
    step = _ours(run, built, em.ParallelConfig(ep=1), precision, mode, adapters)
    return row | _measured(run, step, run.pick(5, 1))


def of_step(run: Run) -> Iterator[Row]:
    """Steps of as many layers as fit, beside transformers' own: both hold the same weights, and lose the same."""
    start_one_rank(run)
    case = dataclasses.replace(run.pick(STEP, _small()), layers=run.pick(4, 2), params="bfloat16")
    precision = em.PrecisionConfig(params="bfloat16", compute="bfloat16", reduce="float32")
    systems: dict[str, Callable[[], Step]] = {
        "transformers": partial(_transformers, run, case, recomputed=False),
        "ours": partial(_ours, run, case, em.ParallelConfig(ep=1), precision, "none"),
        "ours, selective": partial(_ours, run, case, em.ParallelConfig(ep=1), precision, "selective"),
        "ours, compiled": partial(_ours, run, case, em.ParallelConfig(ep=1), precision, "none", compile=True),
    }
    yield from _beside(run, case, systems, run.pick(7, 1))


def of_whole(run: Run) -> Iterator[Row]:
    """Time a LoRA step of all of Qwen3-30B-A3B on one device, beside transformers with PEFT; random weights."""
    start_one_rank(run)
    case = dataclasses.replace(run.pick(STEP, _small()), layers=run.pick(48, 2), params="bfloat16")
    case = dataclasses.replace(case, vocabulary=run.pick(151936, case.vocabulary))
    adapters = em.LoraConfig(r=16, targets=("attention", "experts"))
    for tokens in run.pick((4096, 16384), (case.tokens,)):
        each = dataclasses.replace(case, tokens=tokens)
        ours = partial(_ours, run, each, em.ParallelConfig(ep=1), em.PrecisionConfig(), "full", adapters)
        systems: dict[str, Callable[[], Step]] = {
            "ours": ours,
            "ours, compiled": partial(ours, compile=True),
            "transformers and PEFT": partial(_transformers, run, each, recomputed=True, adapters=adapters),
        }
        yield from _beside(run, each, systems, run.pick(3, 1))


def _beside(run: Run, case: Case, systems: dict[str, Callable[[], Step]], times: int) -> Iterator[Row]:
    """Run each of `systems`, one after the other, since not all fit at once; that their losses agree after two
    updates.
    """
    losses: dict[str, float] = {}
    for name, build in systems.items():
        row: Row = {"system": name, "layers": case.layers, "tokens": case.tokens}
        try:
            step = build()
            losses[name] = float([step() for _ in range(3)][-1])
            measured = _measured(run, step, times)
            yield row | {"loss": losses[name], **measured, "tokens_per_second": case.tokens / measured["seconds"]}
        except torch.OutOfMemoryError as problem:
            yield row | {"out_of_memory": str(problem).partition(". ")[0]}
        step = build = None  # type: ignore[assignment]
        _forget(run)
    if max(losses.values()) > 1.01 * min(losses.values()):
        raise ResultsDiffer(f"losses after two updates differ: {losses}")


def _measured(run: Run, step: Step, times: int) -> Row:
    """Of a step: its peak, median seconds, and how long the host takes to launch it.

    Python's collector does not look through the model and its imports again and again meanwhile.
    """
    step()
    gc.collect()
    gc.freeze()
    row: Row = {}
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        row = {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    row["seconds"] = median([seconds_of(step, run.device) for _ in range(times)])
    launching = []
    for _ in range(times):
        synchronize(run.device)
        start = time.perf_counter()
        step()
        launching.append(time.perf_counter() - start)
    return row | {"host_seconds": median(launching)}


def of_profile(run: Run) -> Iterator[Row]:
    """Device time by kernel, launches, and how long the device is busy: of one layer's experts, and of a step of two
    layers; a trace of the former in --out.
    """
    start_one_rank(run)
    shape = run.pick(Shape(), SMALL["tiny"])
    weights = layer.make_weights(shape, run.device, torch.bfloat16)
    ours = layer.TRITON if layer.TRITON in layer.systems_on(run.device) else "expertmesh_grouped_mm"
    experts = layer.SYSTEMS[ours](shape, weights)
    inputs = layer.make_inputs(shape, run.pick(8192, 64), "real", run.device, torch.bfloat16)
    yield from _kernels(run, "layer", lambda: layer.forward_backward(experts, inputs, weights), "layer_trace.json")
    case = run.pick(STEP, _small())
    precision = em.PrecisionConfig(params=case.params, compute="bfloat16", reduce="float32")  # type: ignore[arg-type]
    yield from _kernels(run, "step", _ours(run, case, em.ParallelConfig(ep=1), precision, "none"))


def _kernels(run: Run, name: str, call: Callable[[], object], trace: str | None = None) -> Iterator[Row]:
    for _ in range(3):
        call()
    on_cuda, times = run.device.type == "cuda", 5
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]) as profiler:
        for _ in range(times):
            call()
        synchronize(run.device)
    spent: dict[str, tuple[float, float]] = {}
    for event in profiler.key_averages():
        # An operation's device time is that of its kernels, which are events themselves; so are ranges with a name.
        if on_cuda and (event.device_type.name != "CUDA" or event.is_user_annotation):
            continue
        microseconds = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        if microseconds:
            spent[event.key] = event.count / times, microseconds / times
    busy = sum(microseconds for _, microseconds in spent.values()) / 1e6
    seconds = _seconds(run, call)
    launches = sum(count for count, _ in spent.values())
    yield {"of": name, "seconds": seconds, "device_busy_seconds": busy, "launches": launches}
    for kernel, (count, microseconds) in sorted(spent.items(), key=lambda each: -each[1][1])[:30]:
        yield {"of": name, "kernel": kernel[:160], "launches": count, "us": microseconds}
    if trace is not None:
        profiler.export_chrome_trace(str(run.out / trace))


def _ours(
    run: Run,
    case: Case,
    parallel: em.ParallelConfig,
    precision: Any,
    mode: Any,
    adapters: em.LoraConfig | None = None,
    compile: bool = False,
) -> Step:
    """Return an optimizer step of a random model of `case`, which returns its loss."""
    model = random_model(case, run.device)
    mesh = em.init_mesh(parallel, device=run.device)
    em.parallelize(model, mesh, precision=precision, activation_checkpointing=mode, lora=adapters, compile=compile)
    ids = input_ids(case, 0).to(run.device)
    targets = em.count_targets(ids)

    def loss() -> torch.Tensor:
        return em.forward_backward(model, [{"input_ids": ids, "labels": ids}], target_tokens=targets).loss

    return _updating(model, loss, partial(em.clip_grad_norm_, model, 1.0))


def _transformers(run: Run, case: Case, recomputed: bool, adapters: em.LoraConfig | None = None) -> Step:
    """Return the same by transformers' model alone, adapted by PEFT; `recomputed`: with its gradient checkpointing."""
    model = random_model(case, run.device)
    model.set_experts_implementation("grouped_mm")
    if adapters is not None:
        from peft import LoraConfig, get_peft_model

        lora_config = LoraConfig(
            r=adapters.r, lora_alpha=adapters.alpha, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )  # fmt: skip
        model.enable_input_require_grads()
        model = get_peft_model(model, lora_config, autocast_adapter_dtype=False)
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = input_ids(case, 0).to(run.device)

    def loss() -> torch.Tensor:
        found: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        found.backward()
        return found.detach()

    return _updating(model, loss, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def _updating(model: Any, loss: Step, clip: Callable[[], object]) -> Step:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)

    def step() -> torch.Tensor:
        found = loss()
        clip()
        optimizer.step()
        optimizer.zero_grad()
        return found

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
    gc.unfreeze()
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()


STAGES: dict[str, Stage] = {
    "ceilings": of_ceilings, "layer_bench": of_layer_bench, "lora_bench": of_lora_bench,
    "frozen_bench": of_frozen_bench, "memory": of_memory, "step": of_step, "whole": of_whole, "profile": of_profile,
}  # fmt: skip
