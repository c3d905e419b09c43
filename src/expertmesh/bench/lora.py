"""Adapters on one MoE layer's experts, forward and backward, on one device: ours beside stock PEFT.

    OMP_NUM_THREADS=1 python -m benchmarks.lora            # two shapes on a CPU, as in RESULTS.md
    python -m benchmarks.lora --device cuda --dtype bfloat16

Both systems hold the same frozen weights and the same adapters (rank 16 on both projections), get the same tokens,
and their outputs and gradients are compared first. Times are medians of alternating repetitions in one process; the
peak of each system's tensors above weights and adapters is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from expertmesh.bench.layer import (
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
from expertmesh.bench.worker import median
from expertmesh.config.errors import DistributedFailure, ExpertmeshError, IntegrityError

R, ALPHA = 16, 32
PROJECTIONS = ("gate_up_proj", "down_proj")
Step = Callable[[], list[torch.Tensor]]


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterCase:
    """One layer, and how many tokens of which dtype go through it."""

    tokens: int
    shape: Shape
    dtype: str

    @classmethod
    def from_json(cls, text: str) -> AdapterCase:
        fields = json.loads(text)
        return cls(fields["tokens"], Shape(**fields["shape"]), fields["dtype"])

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


_LARGE, _SMALL = (Shape(hidden=2 * width, width=width, experts=64, top_k=8) for width in (512, 256))
CASES = (
    AdapterCase(512, _LARGE, "float32"),
    AdapterCase(512, _LARGE, "bfloat16"),
    AdapterCase(4096, _SMALL, "float32"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    accelerator = torch.accelerator.current_accelerator()
    parser.add_argument("--device", default=accelerator.type if accelerator else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="instead of that of each case")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--peak-of", nargs=2, metavar=("CASE", "SYSTEM"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.peak_of:
        case, system = arguments.peak_of
        print(json.dumps(peak_of(AdapterCase.from_json(case), system, device)))
        return
    cases = [dataclasses.replace(case, dtype=arguments.dtype or case.dtype) for case in CASES]
    print(f"rank {R}, {device_name(device)}, torch {torch.__version__}\n")
    try:
        print(table([measure(case, tuple(SYSTEMS), device, arguments.repeats) for case in dict.fromkeys(cases)]))
    except ExpertmeshError as error:
        sys.exit(str(error))


def measure(case: AdapterCase, systems: Sequence[str], device: torch.device, repeats: int) -> dict[str, Any]:
    """Median seconds and peak bytes of each of the `systems`. Raises `IntegrityError` if their results differ."""
    seconds = alternate(case, systems, device, repeats)
    peaks = {system: peak_in_process(case, system, device) for system in systems}
    return {"case": dataclasses.asdict(case), "seconds": seconds, "peak_bytes": peaks}


def table(reports: Sequence[dict[str, Any]]) -> str:
    """The figures as a Markdown table; what was not measured is a dash."""
    lines = ["| case | dtype | ours | PEFT | time | peak memory ours | PEFT | memory |", "|" + "---|" * 8]
    for report in reports:
        case, seconds, peaks = report["case"], report["seconds"], report["peak_bytes"]
        sizes = f"{case['tokens']} tokens, hidden {case['shape']['hidden']}, width {case['shape']['width']}"
        times = [f"{seconds[name] * 1e3:.0f} ms" if name in seconds else "-" for name in SYSTEMS]
        memory = [f"{peaks[name] / 1e6:.0f} MB" if name in peaks else "-" for name in SYSTEMS]
        times.append(f"{seconds['ours'] / seconds['peft']:.2f}×" if "peft" in seconds else "-")
        memory.append(f"{peaks['ours'] / peaks['peft']:.3f}×" if "peft" in peaks else "-")
        lines.append("| " + " | ".join([sizes, case["dtype"], *times, *memory]) + " |")
    return "\n".join(lines)


def alternate(case: AdapterCase, systems: Sequence[str], device: torch.device, repeats: int) -> dict[str, float]:
    """Median seconds of each system, in turn, after their results have been compared."""
    steps = {name: SYSTEMS[name](case, device) for name in systems}
    compare(steps, case.torch_dtype)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats):
        for name in list(steps) if repeat % 2 == 0 else reversed(list(steps)):
            seconds[name].append(timed(steps[name], device))
    return {name: median(times) for name, times in seconds.items()}


def peak_in_process(case: AdapterCase, system: str, device: torch.device) -> int:
    command = [sys.executable, "-W", "ignore", "-m", "expertmesh.bench.lora", "--device", str(device)]
    command += ["--peak-of", case.to_json(), system]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise DistributedFailure(f"the process that measures the memory of {system} failed; its output is above")
    return int(json.loads(done.stdout.splitlines()[-1]))


def peak_of(case: AdapterCase, system: str, device: torch.device) -> int:
    """Peak bytes of one step of one system above weights, adapters and inputs."""
    step = SYSTEMS[system](case, device)
    step()
    return peak_bytes(step, device)


def compare(steps: dict[str, Step], dtype: torch.dtype) -> None:
    """Raise `IntegrityError` when an output or gradient of ours is not PEFT's; also warms all of them up."""
    results = {name: step() for name, step in steps.items()}
    for place, (got, expected) in enumerate(zip(results["ours"], results.get("peft", results["ours"]), strict=True)):
        error = float((got.float() - expected.float()).norm() / expected.float().norm())
        if not error <= TOLERANCE[dtype]:
            raise IntegrityError(f"ours does not compute what PEFT does: result {place} is off by {error:.1e}")


def prepare(case: AdapterCase, device: torch.device) -> tuple[Shape, Weights, Inputs, dict[str, torch.Tensor]]:
    """The same for every system: frozen weights, tokens, and adapters `[E, r, in]`, `[E, out, r]` in fp32."""
    shape, dtype = case.shape, case.torch_dtype
    weights = make_weights(shape, device, dtype)
    for parameter in (weights.gate_up_EJH, weights.down_EHI):
        parameter.requires_grad_(False)
    inputs = make_inputs(shape, case.tokens, "real", device, dtype)
    generator = torch.Generator(device).manual_seed(2)
    sizes = {"gate_up_proj": (shape.hidden, 2 * shape.width), "down_proj": (shape.width, shape.hidden)}
    adapters = {}
    for name, (inner, out) in sizes.items():
        for which, size in (("A", (shape.experts, R, inner)), ("B", (shape.experts, out, R))):
            values = torch.empty(size, device=device).normal_(0, 0.02, generator=generator)
            adapters[f"{name}_{which}"] = values.to(dtype)
    return shape, weights, inputs, adapters


def ours(case: AdapterCase, device: torch.device) -> Step:
    from expertmesh.anatomy import experts_spec
    from expertmesh.experts.dispatch import LocalDispatcher
    from expertmesh.experts.install import mlp_spec_of
    from expertmesh.experts.layer import ExpertLayer
    from expertmesh.experts.lora_state import AdapterState
    from expertmesh.state.sharded_model import attach_to_module

    shape, weights, inputs, adapters = prepare(case, device)
    experts: Any = qwen3_experts(shape, weights, "eager")
    trained = []
    for name in PROJECTIONS:
        for which in "AB":
            experts.register_parameter(f"{name}_lora_{which}", torch.nn.Parameter(adapters[f"{name}_{which}"]))
            trained.append(experts.get_parameter(f"{name}_lora_{which}"))
    attach_to_module(experts, lora_state=AdapterState(ALPHA / R))
    spec = experts_spec("experts", experts)
    layer = ExpertLayer(
        spec, LocalDispatcher(shape.experts), mlp_spec_of(experts, spec, per_expert=False), trained[0].dtype
    )
    return partial(run, partial(layer.forward, experts), inputs, trained, lambda gradients: gradients)


def peft(case: AdapterCase, device: torch.device) -> Step:
    from peft import LoraConfig, inject_adapter_in_model

    shape, weights, inputs, adapters = prepare(case, device)
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


SYSTEMS: dict[str, Callable[[AdapterCase, torch.device], Step]] = {"ours": ours, "peft": peft}


if __name__ == "__main__":
    main()
