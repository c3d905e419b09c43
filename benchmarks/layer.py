"""One MoE layer's experts, forward and backward, on one device: ours beside transformers' grouped_mm.

    python -m benchmarks.layer                          # Qwen3-30B-A3B's shape, bf16, on the accelerator
    OMP_NUM_THREADS=1 python -m benchmarks.layer --tiny # a shape for a laptop's CPU

Per routing: median time (systems alternate), TFLOP/s of the useful products, their share of the dense matmul rate
measured in the same run, peak memory above weights and inputs, and bytes saved for backward. Outputs and gradients of
all systems are compared with the first one's. Prints Markdown tables, writes JSON with --json.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.case import TINY_LAYER, LayerCase, Shape
from benchmarks.probes import alternating, median, peak_bytes, saved_bytes, seconds_of
from benchmarks.result import ResultsDiffer, markdown

TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
ROUTINGS = ("real", "skewed")
# Hidden states [T, H], expert indices [T, K] and routing weights [T, K] to the layer's output [T, H].
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# Forward and backward: the output and every gradient, by name.
Step = Callable[[], dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the router hands to the experts, and the gradient that comes back."""

    hidden_TH: torch.Tensor
    index_TK: torch.Tensor
    routing_TK: torch.Tensor
    grad_TH: torch.Tensor


def our_layer(experts: Any, *, per_expert: bool, triton: bool = False) -> Experts:
    """Return the expert layer as a single rank runs it: no communication, lean backward. `triton`: with Triton's
    kernels.
    """
    from expertmesh.anatomy import experts_spec
    from expertmesh.experts.dispatch import LocalDispatcher
    from expertmesh.experts.install import gate_of, mlp_spec_of
    from expertmesh.experts.layer import ExpertLayer

    spec = experts_spec("experts", experts)
    mlp = mlp_spec_of(experts, spec, per_expert=per_expert)
    mlp = dataclasses.replace(mlp, triton=triton, gate=gate_of(experts, spec) if triton else None)
    layer = ExpertLayer(
        spec, LocalDispatcher(spec.num_experts, triton), mlp, experts.down_proj.dtype, torch.arange(spec.num_experts)
    )
    return partial(layer.forward, experts)


def qwen3_experts(shape: Shape, weights: Mapping[str, torch.Tensor], implementation: str = "eager") -> Any:
    """transformers' experts with our weights."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=shape.hidden, moe_intermediate_size=shape.width, num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
    )  # fmt: skip
    config._experts_implementation = implementation
    with torch.device("meta"):
        module: Any = Qwen3MoeExperts(config)
    for name, weight in weights.items():
        setattr(module, name, weight)
    return module


# Ours with grouped products is what `moe.compute: auto` means on accelerators, the loop what it means on a CPU.
# Triton's kernels are what `moe.kernels: auto` means on GPUs.
TRITON = "expertmesh_triton"
SYSTEMS: dict[str, Callable[[Shape, Mapping[str, torch.Tensor]], Experts]] = {
    "transformers_grouped_mm": lambda shape, weights: qwen3_experts(shape, weights, "grouped_mm"),
    "expertmesh_grouped_mm": lambda shape, weights: our_layer(qwen3_experts(shape, weights), per_expert=False),
    "expertmesh_loop": lambda shape, weights: our_layer(qwen3_experts(shape, weights), per_expert=True),
    TRITON: lambda shape, weights: our_layer(qwen3_experts(shape, weights), per_expert=False, triton=True),
}


def systems_on(device: torch.device) -> tuple[str, ...]:
    """Return those that this device runs: Triton's kernels where they have been proven."""
    from expertmesh.experts.install import triton_refusal
    from expertmesh.experts.mlp_spec import Gate

    proven = device.type == "cuda" and triton_refusal(device, torch.bfloat16, frozenset({Gate()})) is None
    return tuple(name for name in SYSTEMS if proven or name != TRITON)


def measure(case: LayerCase, names: Sequence[str], device: torch.device, repeats: int) -> dict[str, Any]:
    """Figures of the systems `names`, with even and with skewed routing. `ResultsDiffer` where results differ."""
    shape, dtype = case.shape, getattr(torch, case.dtype)
    weights = make_weights(shape, device, dtype)
    systems = {name: SYSTEMS[name](shape, weights) for name in names}
    dense, rows = _dense_flops_per_second(shape, device, dtype), []
    for routing in ROUTINGS:
        inputs = make_inputs(shape, case.tokens, routing, device, dtype)
        steps = {name: partial(forward_backward, experts, inputs, weights) for name, experts in systems.items()}
        compare(steps, case.dtype)
        for name, seconds in median_seconds(steps, device, repeats).items():
            rate = shape.flops(case.tokens) / seconds
            forward = partial(systems[name], inputs.hidden_TH, inputs.index_TK, inputs.routing_TK)
            row = {"routing": routing, "system": name, "seconds": seconds, "flops_per_second": rate}
            row |= {"share_of_dense": rate / dense, "peak_bytes": peak_bytes(steps[name], device)}
            rows.append(row | {"saved_bytes": saved_bytes(forward, weights.values())})
    return {"case": dataclasses.asdict(case), "device": str(device), "dense_flops_per_second": dense, "rows": rows}


def table(report: dict[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    case, dense = report["case"], report["dense_flops_per_second"] / 1e12
    head = ("tokens", "routing", "system", "ms", "TFLOP/s", "of dense", "peak MB", "saved MB")
    rows = [
        (
            str(case["tokens"]), row["routing"], row["system"], f"{row['seconds'] * 1e3:.2f}",
            f"{row['flops_per_second'] / 1e12:.3f}", f"{row['share_of_dense']:.3f}", f"{row['peak_bytes'] / 1e6:.1f}",
            f"{row['saved_bytes'] / 1e6:.1f}",
        )
        for row in report["rows"]
    ]  # fmt: skip
    said = f"{Shape(**case['shape'])}, {case['dtype']} on {report['device']}; dense matmul: {dense:.3f} TFLOP/s"
    return f"{said}\n\n{markdown(head, rows)}"


def make_weights(shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random weights at the scale of a trained layer, gate rows first, under transformers' names."""
    generator, experts = torch.Generator(device).manual_seed(0), shape.experts
    sizes = {
        "gate_up_proj": (experts, 2 * shape.width, shape.hidden),
        "down_proj": (experts, shape.hidden, shape.width),
    }
    return {
        name: torch.nn.Parameter(torch.empty(size, device=device, dtype=dtype).normal_(0, 0.02, generator=generator))
        for name, size in sizes.items()
    }


def make_inputs(shape: Shape, tokens: int, routing: str, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Tokens with softmax top-k routing; `skewed` adds a Zipf-like bias: few experts get most tokens."""
    generator = torch.Generator(device).manual_seed(1)
    hidden_TH = torch.empty(tokens, shape.hidden, device=device, dtype=dtype).normal_(generator=generator)
    logits_TE = torch.empty(tokens, shape.experts, device=device).normal_(generator=generator)
    if routing == "skewed":
        logits_TE -= torch.arange(1, shape.experts + 1, device=device).log()
    routing_TK, index_TK = logits_TE.softmax(dim=-1).topk(shape.top_k, dim=-1)
    routing_TK = (routing_TK / routing_TK.sum(dim=-1, keepdim=True)).to(dtype)
    grad_TH = torch.empty_like(hidden_TH).normal_(generator=generator)
    return Inputs(hidden_TH.requires_grad_(), index_TK, routing_TK.requires_grad_(), grad_TH)


def forward_backward(experts: Experts, inputs: Inputs, trained: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the output, and the gradients of hidden states, routing weights and what is trained."""
    leaves = {"hidden": inputs.hidden_TH, "routing": inputs.routing_TK, **trained}
    out_TH = experts(inputs.hidden_TH, inputs.index_TK, inputs.routing_TK)
    gradients = torch.autograd.grad(out_TH, list(leaves.values()), inputs.grad_TH)
    return {"output": out_TH.detach()} | {
        f"{name} gradient": grad for name, grad in zip(leaves, gradients, strict=True)
    }


def compare(steps: Mapping[str, Step], dtype: str) -> None:
    """`ResultsDiffer` when a system's output or a gradient is not the first system's; also warms all of them up."""
    first, *_ = steps
    reference = steps[first]()
    for system, step in steps.items():
        for name, got in step().items():
            expected = reference[name].float()
            error = float((got.float() - expected).norm() / expected.norm())
            if not error <= TOLERANCE[dtype]:
                raise ResultsDiffer(f"{system} does not compute what {first} does: {name} is off by {error:.1e}")


def median_seconds(steps: Mapping[str, Step], device: torch.device, repeats: int) -> dict[str, float]:
    """Of each system; repetitions alternate."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for name in alternating(list(steps), repeats):
        seconds[name].append(seconds_of(steps[name], device))
    return {name: median(times) for name, times in seconds.items()}


def _dense_flops_per_second(shape: Shape, device: torch.device, dtype: torch.dtype) -> float:
    """Return the rate of a large plain matrix product in the same dtype: the ceiling of this device."""
    rows = 1024 if device.type == "cpu" else 16384
    left = torch.randn(rows, 2 * shape.hidden, device=device, dtype=dtype)
    right = torch.randn(2 * shape.hidden, 2 * shape.hidden, device=device, dtype=dtype)
    times = [seconds_of(lambda: left @ right, device) for _ in range(20)]
    return 2 * rows * (2 * shape.hidden) ** 2 / median(times[5:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default=accelerator.type if accelerator else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--systems", help=f"some of {', '.join(SYSTEMS)}; default: those that run on the device")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    shape = TINY_LAYER if arguments.tiny else Shape()
    tokens = arguments.tokens or ([512, 2048] if arguments.tiny else [8192, 16384, 32768, 65536])
    device = torch.device(arguments.device)
    names = arguments.systems.split(",") if arguments.systems else systems_on(device)
    cases = (LayerCase(count, shape, arguments.dtype) for count in tokens)
    reports = [measure(case, names, device, arguments.repeats) for case in cases]
    print(*map(table, reports), sep="\n\n")
    if arguments.json:
        found = json.dumps({"reports": reports, "torch": torch.__version__}, indent=1)
        Path(arguments.json).write_text(f"{found}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
