"""Adapters on one MoE layer's experts, forward and backward, on one device: ours beside stock PEFT.

    OMP_NUM_THREADS=1 python -m benchmarks.lora            # the shapes of RESULTS.md, on a CPU
    python -m benchmarks.lora --device cuda --dtype bfloat16

Both hold the same frozen weights and the same adapters (rank 16 on both projections), get the same tokens, and their
outputs and gradients are compared first. Times are medians of alternating repetitions; peak memory is that of tensors
above weights and adapters.
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.case import LORA, LayerCase, Shape
from benchmarks.layer import (
    Inputs,
    Step,
    compare,
    forward_backward,
    make_inputs,
    make_weights,
    median_seconds,
    our_layer,
    qwen3_experts,
)
from benchmarks.probes import peak_bytes
from benchmarks.result import markdown
from expertmesh.training.reporting.start import device_name

R, ALPHA = 16, 32
PROJECTIONS = ("gate_up_proj", "down_proj")
Tensors = Mapping[str, torch.Tensor]


def measure(case: LayerCase, systems: Sequence[str], device: torch.device, repeats: int) -> dict[str, Any]:
    """Median seconds and peak bytes of each of the `systems`. `ResultsDiffer` if their results differ."""
    steps = {name: build(name, case, device) for name in systems}
    compare(steps, case.dtype)
    seconds = median_seconds(steps, device, repeats)
    peaks = {name: peak_bytes(step, device) for name, step in steps.items()}
    return {"case": dataclasses.asdict(case), "seconds": seconds, "peak_bytes": peaks}


def table(reports: Sequence[dict[str, Any]]) -> str:
    """Return the figures as a Markdown table; what was not measured is a dash."""
    rows = []
    for report in reports:
        case, seconds, peaks = report["case"], report["seconds"], report["peak_bytes"]
        row = [
            f"{case['tokens']} tokens, hidden {case['shape']['hidden']}, width {case['shape']['width']}",
            case["dtype"],
        ]
        row += [f"{seconds[name] * 1e3:.0f} ms" if name in seconds else "-" for name in ("ours", "PEFT")]
        row += [f"{seconds['ours'] / seconds['PEFT']:.2f}×" if "PEFT" in seconds else "-"]
        row += [f"{peaks[name] / 1e6:.0f} MB" if name in peaks else "-" for name in ("ours", "PEFT")]
        row += [f"{peaks['ours'] / peaks['PEFT']:.3f}×" if "PEFT" in peaks else "-"]
        rows.append(row)
    return markdown(("case", "dtype", "ours", "PEFT", "time", "peak memory ours", "PEFT", "memory"), rows)


def build(name: str, case: LayerCase, device: torch.device) -> Step:
    """Forward and backward of one system, with weights, tokens and adapters of its own, the same for all."""
    shape, dtype = case.shape, getattr(torch, case.dtype)
    weights = {name: weight.requires_grad_(False) for name, weight in make_weights(shape, device, dtype).items()}
    generator, adapters = torch.Generator(device).manual_seed(2), {}
    for projection, weight in weights.items():
        experts, out, inner = weight.shape
        for which, size in (("A", (experts, R, inner)), ("B", (experts, out, R))):
            values = torch.empty(size, device=device).normal_(0, 0.02, generator=generator)
            adapters[f"{projection}_lora_{which}"] = values.to(dtype)
    return SYSTEMS[name](shape, weights, adapters, make_inputs(shape, case.tokens, "real", device, dtype))


def ours(shape: Shape, weights: Tensors, adapters: Tensors, inputs: Inputs) -> Step:
    from expertmesh.experts.lora_state import AdapterState
    from expertmesh.state.model_view import attach_to_module

    experts = qwen3_experts(shape, weights)
    trained = {name: torch.nn.Parameter(adapter) for name, adapter in adapters.items()}
    for name, adapter in trained.items():
        experts.register_parameter(name, adapter)
    attach_to_module(experts, lora_state=AdapterState(), lora_scaling=dict.fromkeys(PROJECTIONS, ALPHA / R))
    return partial(forward_backward, our_layer(experts, per_expert=False), inputs, trained)


def peft(shape: Shape, weights: Tensors, adapters: Tensors, inputs: Inputs) -> Step:
    from peft import LoraConfig, inject_adapter_in_model

    holder: Any = torch.nn.Module()
    holder.experts = qwen3_experts(shape, weights, "grouped_mm")
    targets = [f"experts.{projection}" for projection in PROJECTIONS]
    inject_adapter_in_model(LoraConfig(r=R, lora_alpha=ALPHA, target_modules=[], target_parameters=targets), holder)
    trained: dict[str, torch.Tensor] = {}
    for projection, wrapper in zip(PROJECTIONS, (holder.experts.base_layer, holder.experts), strict=True):
        a, b = wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight
        a.data = adapters[f"{projection}_lora_A"].flatten(0, 1)
        b.data = adapters[f"{projection}_lora_B"].permute(1, 2, 0).flatten(1, 2).contiguous()
        trained |= {f"{projection}_lora_A": a, f"{projection}_lora_B": b}
    for name, parameter in holder.named_parameters():
        parameter.requires_grad_("lora_" in name)

    def step() -> dict[str, torch.Tensor]:
        """Gradients in our layout."""
        results = forward_backward(holder.experts, inputs, trained)
        for name, result in results.items():
            if "lora_A" in name:
                results[name] = result.view(shape.experts, R, -1)
            elif "lora_B" in name:
                results[name] = result.view(-1, R, shape.experts).permute(2, 0, 1)
        return results

    return step


SYSTEMS: dict[str, Callable[[Shape, Tensors, Tensors, Inputs], Step]] = {"PEFT": peft, "ours": ours}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("--device", default=accelerator.type if accelerator else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="instead of that of each case")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    cases = dict.fromkeys(dataclasses.replace(case, dtype=arguments.dtype or case.dtype) for case in LORA)
    print(f"rank {R}, {device_name(device)}, torch {torch.__version__}\n")
    print(table([measure(case, tuple(SYSTEMS), device, arguments.repeats) for case in cases]))


if __name__ == "__main__":
    main()
