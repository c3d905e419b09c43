"""A LoRA step with frozen experts in 8 and 4 bits, beside the same step with experts in the compute dtype.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 1 -m benchmarks.frozen

The 212 M-parameter Qwen3-MoE of `benchmarks.step` in bf16, one process: forward, backward, clipping, AdamW, whole
blocks recomputed. Peaks are of all tensors (weights, adapters, moments, gathered, activations), counted; seconds are
those of its first layers, medians of alternating repetitions. bitsandbytes quantises no fused experts of transformers
5, so there is no peer.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import expertmesh as em
from benchmarks.case import Case, input_ids, random_model
from benchmarks.probes import alternating, median, seconds_of
from benchmarks.result import markdown
from benchmarks.systems import SETTINGS
from expertmesh.distributed.mesh import Mesh, current_device, start_process_group
from expertmesh.planning.probe import UsageTracker
from expertmesh.state.packed import stored

FORMATS = (None, "float8", "nvfp4", "nf4", "mxfp4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--targets", default="attention")
    parser.add_argument("--layers", type=int, default=8, help="of the model whose peaks are counted")
    parser.add_argument("--timed-layers", type=int, default=2, help="of the model whose steps are timed")
    arguments = parser.parse_args()
    case = dataclasses.replace(
        SETTINGS["fp32-512"], tokens=arguments.tokens, compute="bfloat16", layers=arguments.layers
    )
    lora = em.LoraConfig(r=arguments.rank, targets=tuple(arguments.targets.split(",")))
    device = current_device()
    start_process_group(device, 600)
    mesh = em.init_mesh(em.ParallelConfig(ep=1), device=device)
    print(f"{case.tokens} tokens, {case.layers} layers, adapters of rank {lora.r} on {', '.join(lora.targets)}\n")
    peaks = {frozen: _peak(case, mesh, lora, frozen) for frozen in FORMATS}
    seconds = _seconds(dataclasses.replace(case, layers=arguments.timed_layers), mesh, lora, arguments.repeats)
    table = []
    for frozen in FORMATS:
        (held, peak), took = peaks[frozen], seconds[frozen]
        ratios = f"{peak / peaks[None][1]:.2f}×", f"{took:.2f}", f"{took / seconds[None]:.2f}×"
        table.append((frozen or "bfloat16", _mb(held), _mb(peak), *ratios))
    timed = f"s a step, {arguments.timed_layers} layers"
    print(markdown(("frozen experts", "parameters", "peak of a step", "of bfloat16's", timed, "ratio"), table))


def _peak(case: Case, mesh: Mesh, lora: em.LoraConfig, frozen: str | None) -> tuple[int, int]:
    """Bytes of parameters and buffers, and the most bytes of tensors in two steps, the optimizer's moments included."""
    step, model = build(case, mesh, lora, frozen)
    tracker = UsageTracker()
    held = (*model.parameters(), *model.buffers())
    tracker.include(stored(each.to_local()) if isinstance(each, DTensor) else each for each in held)
    parameters = tracker.live
    del held
    with tracker:
        step()
        step()
    gc.collect()
    return parameters, tracker.peak


def _seconds(case: Case, mesh: Mesh, lora: em.LoraConfig, repeats: int) -> dict[str | None, float]:
    """Medians; what slows the machine down slows all formats alike."""
    steps = {frozen: build(case, mesh, lora, frozen)[0] for frozen in FORMATS}
    names = {str(frozen): frozen for frozen in FORMATS}
    found: dict[str | None, list[float]] = {frozen: [] for frozen in FORMATS}
    for name in (*names, *alternating(list(names), repeats)):
        found[names[name]].append(seconds_of(steps[names[name]], mesh.device))
    return {frozen: median(times[1:]) for frozen, times in found.items()}


def build(case: Case, mesh: Mesh, lora: em.LoraConfig, frozen: str | None) -> tuple[Callable[[], None], Any]:
    """Return an optimizer step of a random model with adapters, and the model."""
    torch.manual_seed(0)
    model = random_model(dataclasses.replace(case, params="bfloat16"), mesh.device)
    em.parallelize(
        model,
        mesh,
        lora=lora,
        precision=em.PrecisionConfig(frozen=frozen),  # type: ignore[arg-type]
        activation_checkpointing="full",
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    ids = input_ids(case, 0).to(mesh.device)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    def step() -> None:
        em.causal_lm_loss(model, batch, target_tokens=ids.numel()).backward()
        em.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, model


def _mb(size: float) -> str:
    return f"{size / 1e6:.0f} MB"


if __name__ == "__main__":
    main()
