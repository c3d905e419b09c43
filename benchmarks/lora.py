"""Adapters on one MoE layer's experts, forward and backward, on one device: ours beside stock PEFT.

    OMP_NUM_THREADS=1 python -m benchmarks.lora            # two shapes on a CPU, as in RESULTS.md
    python -m benchmarks.lora --device cuda --dtype bfloat16

Both systems hold the same frozen weights and the same adapters (rank 16 on both projections), get the same tokens,
and their outputs and gradients are compared first. Times are medians of alternating repetitions in one process; the
peak of each system's tensors above weights and adapters is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .layer import (
    TOLERANCE,
    Inputs,
    Shape,
    Weights,
    device_name,
    make_inputs,
    make_weights,
    peak_bytes,
    qwen3_experts,
    timed,
)
from .worker import median

R, ALPHA = 16, 32
CASES = {
    "512 tokens": (512, Shape(hidden=1024, width=512, experts=64, top_k=8), ("float32", "bfloat16")),
    "4096 tokens": (4096, Shape(hidden=512, width=256, experts=64, top_k=8), ("float32",)),
}
PROJECTIONS = ("gate_up_proj", "down_proj")
Step = Callable[[], list[torch.Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    accelerator = torch.accelerator.current_accelerator()
    parser.add_argument("--device", default=accelerator.type if accelerator else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="instead of those of each case")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--peak-of", nargs=3, metavar=("CASE", "DTYPE", "SYSTEM"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.peak_of:
        case, dtype, system = arguments.peak_of
        print(json.dumps(peak_of(case, dtype, system, device)))
        return
    print(f"rank {R}, {device_name(device)}, torch {torch.__version__}\n")
    print("| case | dtype | ours | PEFT | time | peak memory ours | PEFT | memory |\n" + "|---" * 8 + "|")
    for case, (_, shape, dtypes) in CASES.items():
        for dtype in (arguments.dtype,) if arguments.dtype else dtypes:
            seconds = alternate(case, dtype, device, arguments.repeats)
            peaks = {system: peak_in_process(case, dtype, system, device) for system in SYSTEMS}
            times = f"{seconds['ours'] * 1e3:.0f} ms | {seconds['peft'] * 1e3:.0f} ms"
            memory = f"{peaks['ours'] / 1e6:.0f} MB | {peaks['peft'] / 1e6:.0f} MB"
            print(
                f"| {case}, hidden {shape.hidden}, width {shape.width} | {dtype} | {times} |"
                f" {seconds['ours'] / seconds['peft']:.2f}× | {memory} | {peaks['ours'] / peaks['peft']:.3f}× |",
                flush=True,
            )


def alternate(case: str, dtype: str, device: torch.device, repeats: int) -> dict[str, float]:
    """Median seconds of each system, in turn, after their results have been compared."""
    steps = {name: build(case, dtype, device) for name, build in SYSTEMS.items()}
    compare(steps, getattr(torch, dtype))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats):
        for name in list(steps) if repeat % 2 == 0 else reversed(list(steps)):
            seconds[name].append(timed(steps[name], device))
    return {name: median(times) for name, times in seconds.items()}


def peak_in_process(case: str, dtype: str, system: str, device: torch.device) -> int:
    command = [sys.executable, "-m", "benchmarks.lora", "--device", str(device), "--peak-of", case, dtype, system]
    return int(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def peak_of(case: str, dtype: str, system: str, device: torch.device) -> int:
    """Peak bytes of one step of one system above weights, adapters and inputs."""
    step = SYSTEMS[system](case, dtype, device)
    step()
    return peak_bytes(step, device)


def compare(steps: dict[str, Step], dtype: torch.dtype) -> None:
    """Leave with a sentence when an output or gradient of ours is not PEFT's."""
    ours, theirs = steps["ours"](), steps["peft"]()
    for place, (got, expected) in enumerate(zip(ours, theirs, strict=True)):
        error = float((got.float() - expected.float()).norm() / expected.float().norm())
        if not error <= TOLERANCE[dtype]:
            sys.exit(f"ours does not compute what PEFT does: result {place} is off by {error:.1e}")


def prepare(case: str, dtype: str, device: torch.device) -> tuple[Shape, Weights, Inputs, dict[str, torch.Tensor]]:
    """The same for every system: frozen weights, tokens, and adapters `[E, r, in]`, `[E, out, r]` in fp32."""
    tokens, shape, _ = CASES[case]
    weights = make_weights(shape, device, getattr(torch, dtype))
    for parameter in (weights.gate_up_EJH, weights.down_EHI):
        parameter.requires_grad_(False)
    inputs = make_inputs(shape, tokens, "real", device, getattr(torch, dtype))
    generator = torch.Generator(device).manual_seed(2)
    sizes = {"gate_up_proj": (shape.hidden, 2 * shape.width), "down_proj": (shape.width, shape.hidden)}
    adapters = {}
    for name, (inner, out) in sizes.items():
        for which, size in (("A", (shape.experts, R, inner)), ("B", (shape.experts, out, R))):
            values = torch.empty(size, device=device).normal_(0, 0.02, generator=generator)
            adapters[f"{name}_{which}"] = values.to(getattr(torch, dtype))
    return shape, weights, inputs, adapters


def ours(case: str, dtype: str, device: torch.device) -> Step:
    from expertmesh.anatomy import experts_spec
    from expertmesh.experts.adapted import AdapterState
    from expertmesh.experts.dispatch import LocalDispatcher
    from expertmesh.experts.layer import ExpertLayer, form_of

    shape, weights, inputs, adapters = prepare(case, dtype, device)
    experts: Any = qwen3_experts(shape, weights, "eager")
    trained = []
    for name in PROJECTIONS:
        for which in "AB":
            experts.register_parameter(f"{name}_lora_{which}", torch.nn.Parameter(adapters[f"{name}_{which}"]))
            trained.append(experts.get_parameter(f"{name}_lora_{which}"))
    experts._expertmesh_adapter = AdapterState(ALPHA / R)
    spec = experts_spec("experts", experts)
    layer = ExpertLayer(
        spec, LocalDispatcher(shape.experts), form_of(experts, spec, per_expert=False), trained[0].dtype
    )
    return partial(run, partial(layer.forward, experts), inputs, trained, lambda gradients: gradients)


def peft(case: str, dtype: str, device: torch.device) -> Step:
    from peft import LoraConfig, inject_adapter_in_model

    shape, weights, inputs, adapters = prepare(case, dtype, device)
    holder = torch.nn.Module()
    holder.experts = qwen3_experts(shape, weights, "grouped_mm")
    config = LoraConfig(
        r=R, lora_alpha=ALPHA, target_modules=[], target_parameters=[f"experts.{p}" for p in PROJECTIONS]
    )
    inject_adapter_in_model(config, holder)
    for parameter in holder.parameters():
        parameter.requires_grad_(False)
    trained = []
    wrappers: Any = {"gate_up_proj": holder.experts.base_layer, "down_proj": holder.experts}
    for name in PROJECTIONS:
        a, b = wrappers[name].lora_A["default"].weight, wrappers[name].lora_B["default"].weight
        a.data = adapters[f"{name}_A"].flatten(0, 1)
        b.data = adapters[f"{name}_B"].permute(1, 2, 0).flatten(1, 2).contiguous()
        trained += [a.requires_grad_(), b.requires_grad_()]

    def as_ours(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        experts = shape.experts
        return [
            gradient.view(experts, R, -1) if place % 2 == 0 else gradient.view(-1, R, experts).permute(2, 0, 1)
            for place, gradient in enumerate(gradients)
        ]

    return partial(run, holder.experts, inputs, trained, as_ours)


def run(
    experts: Callable[..., torch.Tensor],
    inputs: Inputs,
    trained: list[torch.Tensor],
    as_ours: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> list[torch.Tensor]:
    """Forward and backward; the output, the gradients of hidden states and routing weights, those of the adapters."""
    out_TH = experts(inputs.hidden_TH, inputs.index_TK, inputs.routing_TK)
    first, second, *gradients = torch.autograd.grad(
        out_TH, [inputs.hidden_TH, inputs.routing_TK, *trained], inputs.grad_TH
    )
    return [out_TH.detach(), first, second, *as_ours(gradients)]


SYSTEMS: dict[str, Callable[[str, str, torch.device], Step]] = {"ours": ours, "peft": peft}


if __name__ == "__main__":
    main()
