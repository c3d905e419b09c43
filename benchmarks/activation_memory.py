"""What a forward leaves behind for backward by `activation_checkpointing`, and what a step then sends.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 -m benchmarks.activation_memory

The 212 M-parameter Qwen3-MoE of `benchmarks.step`, expert parallel over all ranks. Bytes are those of torch's allocator
on rank 0 after the forward, above what was there before it, so activations and the loss alone; all-to-alls and their
input bytes are those of forward and backward. Nothing is timed. The gradient norm must be the same in every mode.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import expertmesh as em
from benchmarks.case import Case, qwen3_moe_config
from benchmarks.probes import count_collectives, held_bytes
from benchmarks.systems import SETTINGS
from expertmesh.distributed.mesh import Mesh, current_device, start_process_group
from expertmesh.planning.probe import CollectiveCount

# Two modes apart, and selective for every second block.
MODES: tuple[tuple[str, str | int], ...] = (("none", "all"), ("selective", 2), ("selective", "all"), ("full", "all"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=sorted(SETTINGS), default="fp32-512")
    arguments = parser.parse_args()
    case = SETTINGS[arguments.setting]
    device = current_device()
    start_process_group(device, 600)
    mesh = em.init_mesh(em.ParallelConfig(ep=dist.get_world_size()), device=device)
    if mesh.rank == 0:
        print(f"{case.tokens} tokens per rank, {case.compute}, ep {mesh.layout.ep}, {case.layers} layers\n")
        print(
            "| checkpointing | blocks | left by the forward, MB | all-to-alls per layer | MB per step |\n"
            + "|---" * 5
            + "|"
        )
    norms = [_measure(case, mesh, mode, layers) for mode, layers in MODES]
    assert max(norms) - min(norms) <= 1e-6 * max(norms), norms
    dist.barrier()


def _measure(case: Case, mesh: Mesh, mode: str, layers: str | int) -> float:
    """Print one row on rank 0; return the gradient norm."""
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(qwen3_moe_config(case), dtype=torch.float32).train()
    precision = em.PrecisionConfig(params="float32", compute=case.compute)  # type: ignore[arg-type]
    options: dict[str, Any] = {"activation_checkpointing": mode, "checkpoint_layers": layers, "precision": precision}
    em.parallelize(model, mesh, **options)
    generator = torch.Generator().manual_seed(mesh.rank)
    ids = torch.randint(case.vocabulary, (case.tokens // case.sequence, case.sequence), generator=generator)
    batch = {"input_ids": ids.to(mesh.device), "labels": ids.to(mesh.device)}
    losses: list[torch.Tensor] = []

    def forward() -> None:
        losses.append(em.causal_lm_loss(model, batch, target_tokens=case.tokens * dist.get_world_size()))

    def step() -> None:
        forward()
        losses.pop().backward()

    step()  # what is made once: FSDP2's buffers, rotary tables
    model.zero_grad()
    left = sorted(_left_by(forward, losses, mesh.device) for _ in range(3))[1]
    model.zero_grad()
    traffic = count_collectives(step).get("all_to_all", CollectiveCount())
    norm = float(em.clip_grad_norm_(model, None))
    if mesh.rank == 0:
        blocks = "all" if layers == "all" else f"every {layers}nd"
        row = (mode, "" if mode == "none" else blocks, f"{left / 1e6:.1f}", f"{traffic.calls / case.layers:g}")
        print(f"| {' | '.join(row)} | {traffic.bytes / 1e6:.1f} |", flush=True)
    return norm


def _left_by(forward: Callable[[], None], losses: list[torch.Tensor], device: torch.device) -> int:
    gc.collect()
    dist.barrier()
    if device.type == "cpu":
        left = held_bytes(forward)
    else:
        before = torch.accelerator.memory_allocated()
        forward()
        left = torch.accelerator.memory_allocated() - before
    losses.pop().backward()
    return left


if __name__ == "__main__":
    main()
