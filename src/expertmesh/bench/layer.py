"""One MoE layer's experts, forward and backward, on one device: ours beside transformers' grouped_mm.

    python -m benchmarks.layer                          # Qwen3-30B-A3B's shape, bf16, on the accelerator
    OMP_NUM_THREADS=1 python -m benchmarks.layer --tiny # a shape for a laptop's CPU

Per number of tokens and routing: median time (systems alternate), TFLOP/s of the useful products, their share
of the dense matmul rate measured in the same run, peak memory above weights and inputs, and bytes saved for
backward. Outputs and gradients of all systems are compared with the first one's, and the run fails where they
differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from expertmesh.bench import probes
from expertmesh.bench.worker import median
from expertmesh.config.errors import ExpertmeshError, IntegrityError

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
SKEW = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one MoE layer: H hidden, I expert width, E experts, K experts per token."""

    hidden: int = 2048
    width: int = 768
    experts: int = 128
    top_k: int = 8

    def flops(self, tokens: int) -> int:
        """Operations of forward and backward: three products of 2·H·I per pair, each with two gradients."""
        return 18 * tokens * self.top_k * self.hidden * self.width


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """Expert weights as transformers holds them (J = 2·I, gate rows first); shared by all systems."""

    gate_up_EJH: torch.nn.Parameter
    down_EHI: torch.nn.Parameter


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """What the router hands to the experts."""

    hidden_TH: torch.Tensor
    index_TK: torch.Tensor
    routing_TK: torch.Tensor
    grad_TH: torch.Tensor


Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Builder = Callable[[Shape, Weights], Experts]


def transformers_grouped_mm(shape: Shape, weights: Weights) -> Experts:
    """transformers' own experts module on its `grouped_mm` path."""
    return qwen3_experts(shape, weights, "grouped_mm")


def expertmesh_grouped_mm(shape: Shape, weights: Weights) -> Experts:
    """Ours with grouped products, what `moe.compute: auto` means on accelerators."""
    return _expertmesh(shape, weights, per_expert=False)


def expertmesh_loop(shape: Shape, weights: Weights) -> Experts:
    """Ours with one expert after the other, what `moe.compute: auto` means on a CPU."""
    return _expertmesh(shape, weights, per_expert=True)


def _expertmesh(shape: Shape, weights: Weights, per_expert: bool) -> Experts:
    """The expert layer as a single rank runs it: no communication, lean backward."""
    from expertmesh.anatomy import ExpertsSpec
    from expertmesh.experts.dispatch import LocalDispatcher
    from expertmesh.experts.layer import ExpertLayer
    from expertmesh.experts.mlp_spec import ExpertMlpSpec

    module: Any = qwen3_experts(shape, weights, "eager")
    spec = ExpertsSpec(
        name="experts",
        num_experts=shape.experts,
        hidden_size=shape.hidden,
        intermediate_size=shape.width,
        gated=True,
        transposed=False,
        biased=False,
        up="gate_up_proj",
        down="down_proj",
        top_k=shape.top_k,
    )
    mlp = ExpertMlpSpec(activation=module._apply_gate, silu_gated=True, transposed=False, per_expert=per_expert)
    layer = ExpertLayer(spec, LocalDispatcher(shape.experts), mlp, weights.down_EHI.dtype)
    return partial(layer.forward, module)


def qwen3_experts(shape: Shape, weights: Weights, implementation: str) -> torch.nn.Module:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.width,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        module: torch.nn.Module = Qwen3MoeExperts(config)
    module.gate_up_proj, module.down_proj = weights.gate_up_EJH, weights.down_EHI
    return module


BUILDERS: dict[str, Builder] = {
    "transformers_grouped_mm": transformers_grouped_mm,
    "expertmesh_grouped_mm": expertmesh_grouped_mm,
    "expertmesh_loop": expertmesh_loop,
}


def main() -> None:
    arguments = parse_arguments()
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    shape = Shape(hidden=256, width=128, experts=16, top_k=4) if arguments.tiny else Shape()
    names = arguments.systems.split(",")
    try:
        report = measure(names, shape, device, dtype, arguments.tokens, arguments.repeats)
    except ExpertmeshError as error:
        sys.exit(str(error))
    print(table(report))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report | {"torch": torch.__version__}, indent=1) + "\n")


def measure(
    names: Sequence[str], shape: Shape, device: torch.device, dtype: torch.dtype, tokens: Sequence[int], repeats: int
) -> dict[str, Any]:
    """Figures of the systems `names` for each number of tokens, with even and with skewed routing.

    Raises `IntegrityError` when they do not compute the same.
    """
    weights = make_weights(shape, device, dtype)
    systems = {name: BUILDERS[name](shape, weights) for name in names}
    dense = dense_flops_per_second(shape, device, dtype)
    rows = []
    for count in tokens:
        for routing in ("real", "skewed"):
            inputs = make_inputs(shape, count, routing, device, dtype)
            compare(systems, weights, inputs)
            for row in alternate(systems, shape, weights, inputs, repeats, dense):
                rows.append({"tokens": count, "routing": routing} | row)
    report = {"shape": dataclasses.asdict(shape), "dtype": str(dtype).removeprefix("torch.")}
    return report | {"device": str(device), "dense_flops_per_second": dense, "rows": rows}


def table(report: dict[str, Any]) -> str:
    """The figures as a Markdown table."""
    dense = report["dense_flops_per_second"] / 1e12
    lines = [
        f"{Shape(**report['shape'])}, {report['dtype']} on {report['device']}; dense matmul: {dense:.3f} TFLOP/s",
        "",
        "| tokens | routing | system | ms | TFLOP/s | of dense | peak MB | saved MB |",
        "|" + "---|" * 8,
    ]
    for row in report["rows"]:
        lines.append(
            f"| {row['tokens']} | {row['routing']} | {row['system']} | {row['seconds'] * 1e3:.2f} |"
            f" {row['flops_per_second'] / 1e12:.3f} | {row['share_of_dense']:.3f} |"
            f" {row['peak_bytes'] / 1e6:.1f} | {row['saved_bytes'] / 1e6:.1f} |"
        )
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """The command line; sizes that are not given depend on `--tiny`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    accelerator = torch.accelerator.current_accelerator()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default=accelerator.type if accelerator else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--systems", default=",".join(BUILDERS))
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    arguments.tokens = arguments.tokens or ([512, 2048] if arguments.tiny else [8192, 16384, 32768, 65536])
    return arguments


def make_weights(shape: Shape, device: torch.device, dtype: torch.dtype) -> Weights:
    """Random weights at the scale of a trained layer, as leaves that collect gradients."""
    generator = torch.Generator(device).manual_seed(0)

    def tensor(*size: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.empty(size, device=device, dtype=dtype).normal_(0, 0.02, generator=generator))

    return Weights(
        tensor(shape.experts, 2 * shape.width, shape.hidden), tensor(shape.experts, shape.hidden, shape.width)
    )


def make_inputs(shape: Shape, tokens: int, routing: str, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Tokens with softmax top-k routing; `skewed` adds a Zipf-like bias: few experts get most tokens."""
    generator = torch.Generator(device).manual_seed(1)
    hidden_TH = torch.empty(tokens, shape.hidden, device=device, dtype=dtype).normal_(generator=generator)
    logits_TE = torch.empty(tokens, shape.experts, device=device).normal_(generator=generator)
    if routing == "skewed":
        logits_TE -= SKEW * torch.arange(1, shape.experts + 1, device=device).log()
    routing_TK, index_TK = logits_TE.softmax(dim=-1).topk(shape.top_k, dim=-1)
    routing_TK = (routing_TK / routing_TK.sum(dim=-1, keepdim=True)).to(dtype)
    grad_TH = torch.empty_like(hidden_TH).normal_(generator=generator)
    return Inputs(hidden_TH.requires_grad_(), index_TK, routing_TK.requires_grad_(), grad_TH)


def leaves(weights: Weights, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """The tensors that collect gradients."""
    return weights.gate_up_EJH, weights.down_EHI, inputs.hidden_TH, inputs.routing_TK


def forward(experts: Experts, inputs: Inputs) -> torch.Tensor:
    """The layer's output [T, H]."""
    return experts(inputs.hidden_TH, inputs.index_TK, inputs.routing_TK)


def step(experts: Experts, inputs: Inputs) -> torch.Tensor:
    """Forward and backward with a fixed output gradient; returns the output [T, H]."""
    out_TH = forward(experts, inputs)
    out_TH.backward(inputs.grad_TH)
    return out_TH.detach()


def forget_gradients(weights: Weights, inputs: Inputs) -> None:
    for leaf in leaves(weights, inputs):
        leaf.grad = None


def compare(systems: dict[str, Experts], weights: Weights, inputs: Inputs) -> None:
    """Raise `IntegrityError` when a system's output or a gradient is not the first system's."""
    names = ("output", "gate_up gradient", "down gradient", "hidden gradient", "routing gradient")
    reference: list[torch.Tensor] = []
    for system, experts in systems.items():
        out_TH = step(experts, inputs)
        values = [out_TH, *(leaf.grad for leaf in leaves(weights, inputs) if leaf.grad is not None)]
        assert len(values) == len(names), f"{system} left a gradient out"
        reference = reference or values
        for name, expected, got in zip(names, reference, values, strict=True):
            error = ((got.float() - expected.float()).norm() / expected.float().norm()).item()
            if not error <= TOLERANCE[expected.dtype]:
                raise IntegrityError(
                    f"{system} does not compute what {next(iter(systems))} does: {name} is off by {error:.1e}"
                )
        forget_gradients(weights, inputs)


def alternate(
    systems: dict[str, Experts], shape: Shape, weights: Weights, inputs: Inputs, repeats: int, dense: float
) -> list[dict[str, Any]]:
    """One row of figures per system; repetitions alternate between the systems."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    device = inputs.hidden_TH.device
    for repeat in range(repeats):
        for name in list(systems) if repeat % 2 == 0 else reversed(list(systems)):
            seconds[name].append(timed(partial(step, systems[name], inputs), device))
            forget_gradients(weights, inputs)
    rows = []
    for name, experts in systems.items():
        peak = peak_bytes(partial(step, experts, inputs), device)
        forget_gradients(weights, inputs)
        saved = probes.saved_bytes(partial(forward, experts, inputs), leaves(weights, inputs)[:2])
        time_s = median(seconds[name])
        rate = shape.flops(inputs.hidden_TH.shape[0]) / time_s
        rows.append({"system": name, "seconds": time_s, "flops_per_second": rate, "share_of_dense": rate / dense})
        rows[-1] |= {"peak_bytes": peak, "saved_bytes": saved}
    return rows


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Wall seconds of `run` between two synchronisations."""
    probes.synchronize(device)
    start = time.perf_counter()
    run()
    probes.synchronize(device)
    return time.perf_counter() - start


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Peak tensor memory of `run` above what was allocated before it."""
    gc.collect()
    if device.type == "cpu":
        return probes.peak_allocated_bytes(run)
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    run()
    return torch.accelerator.max_memory_allocated(device) - before


def dense_flops_per_second(shape: Shape, device: torch.device, dtype: torch.dtype) -> float:
    """The rate of a large plain matrix product in the same dtype: the ceiling of this device."""
    rows = 1024 if device.type == "cpu" else 16384
    left = torch.randn(rows, 2 * shape.hidden, device=device, dtype=dtype)
    right = torch.randn(2 * shape.hidden, 2 * shape.hidden, device=device, dtype=dtype)
    times = [timed(lambda: left @ right, device) for _ in range(20)]
    return 2 * rows * (2 * shape.hidden) ** 2 / median(times[5:])


def device_name(device: torch.device) -> str:
    """The accelerator's name, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


if __name__ == "__main__":
    main()
