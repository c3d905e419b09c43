"""Systems that `benchmarks.step` can measure beside transformers' expert parallelism and ours, and its ranks.

To add one, write a builder and enter it in `BUILDERS`; its name on the command line is the entry followed by its
expert- or data-parallel size, e.g. `transformers_fsdp4`. `profile` prints where one system's CPU time goes on rank 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import expertmesh as em
from benchmarks import worker
from benchmarks.case import LOAD, STEP, Case, micro_batches
from benchmarks.worker import System, build, expertmesh_ep, first_step, meet, transformers_ep
from expertmesh.distributed.mesh import current_device

# The settings whose figures are published.
SETTINGS = {"fp32-512": STEP, "bf16-2048": Case(tokens=2048, compute="bfloat16"), "load-2gb": LOAD}
# What these leave in the gradients is of adapters alone, or used up in the step: their losses are compared.
TRAIN_LESS = ("expertmesh_lora", "expertmesh_update")


def transformers_fsdp(case: Case, fsdp: int, **options: Any) -> System:
    """transformers' native FSDP2 without expert parallelism: all experts gathered layer by layer."""
    if fsdp != dist.get_world_size():
        raise ValueError(f"transformers_fsdp{fsdp} needs {fsdp} ranks, there are {dist.get_world_size()}")
    return transformers_ep(case, 1, **options)


def unsharded(case: Case, size: int) -> System:
    """Run one process (rank 0) with the whole model and the batches of all ranks, one after the other."""
    from transformers import AutoModelForCausalLM

    if size != 1:
        raise ValueError("`unsharded` takes no size")
    note = f"{case.compute} parameters, gradients and compute; all ranks' tokens in one process"
    if dist.get_rank() != 0:
        return System(nn.Module(), lambda: torch.zeros(()), note)
    model: Any = AutoModelForCausalLM.from_pretrained(
        case.checkpoint,
        dtype=getattr(torch, case.compute),
        experts_implementation="grouped_mm",
        attn_implementation="sdpa",
    )
    device = current_device()
    model.to(device).train()
    batches = [ids_BS for rank in range(case.ranks) for ids_BS in micro_batches(case, rank, device)]

    def step() -> torch.Tensor:
        total = torch.zeros(())
        for ids_BS in batches:
            loss = model(input_ids=ids_BS, labels=ids_BS, use_cache=False).loss / len(batches)
            loss.backward()
            total += loss.detach().float().cpu()
        return total

    return System(model, step, note)


def expertmesh_loop_ep(case: Case, ep: int) -> System:
    """Ours with `moe.compute: loop`, one expert after the other."""
    return expertmesh_ep(case, ep, moe=em.MoeConfig(compute="loop"))


def expertmesh_lora_ep(case: Case, ep: int) -> System:
    """Adapters of rank 16 on attention and experts, the rest frozen; they start at zero, so the loss is the same."""
    system = expertmesh_ep(case, ep, lora=em.LoraConfig(r=16))
    return dataclasses.replace(system, note=f"{system.note}; adapters of rank 16 on attention and experts")


def with_update(builder: Callable[[Case, int], System]) -> Callable[[Case, int], System]:
    """Run a whole optimizer step of a system: with clipping and AdamW's update."""

    def build_with_update(case: Case, ep: int) -> System:
        system = builder(case, ep)
        trainable = [parameter for parameter in system.module.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=1e-5, fused=True)

        def step() -> torch.Tensor:
            loss = system.step()
            em.clip_grad_norm_(system.module, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return dataclasses.replace(system, step=step)

    return build_with_update


worker.BUILDERS.update({
    "transformers_fsdp": transformers_fsdp,
    "transformers_no_sync_fsdp": partial(transformers_fsdp, no_sync=True),
    "unsharded": unsharded,
    "expertmesh_full_ep": partial(expertmesh_ep, activation_checkpointing="full"),
    "expertmesh_by_layer_ep": partial(expertmesh_ep, accumulate="by_layer"),
    "expertmesh_by_layer_full_ep": partial(expertmesh_ep, accumulate="by_layer", activation_checkpointing="full"),
    "expertmesh_loop_ep": expertmesh_loop_ep,
    "expertmesh_lora_ep": expertmesh_lora_ep,
    "expertmesh_update_ep": with_update(expertmesh_ep),
    "expertmesh_lora_update_ep": with_update(expertmesh_lora_ep),
})  # fmt: skip


def profile(case: Case, names: Sequence[str], repeats: int) -> dict[str, Any]:
    """torch's own table of where rank 0's CPU time goes in `repeats` steps of one system; collective."""
    system = build(names[0], case)
    first_step(system)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(repeats):
            system.step()
            system.module.zero_grad()
            meet()
    averages = profiler.key_averages()
    return {"profile": str(averages.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60))}


if __name__ == "__main__":
    worker.main({**worker.MODES, "profile": profile})
