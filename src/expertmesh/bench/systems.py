"""The systems that are measured against each other: one builder function each, all loading one checkpoint.

A builder is called as `builder(case, size)` on every rank with the default process group up, and returns a
`System`, or None on a rank that has nothing to do. To add a system, write a builder and enter it in
`BUILDERS`; its name on the command line is the entry followed by its expert- or data-parallel size, e.g.
`transformers_ep4`.

What each system stores and computes in is written in its `note`, which is printed beside its figures.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from expertmesh.bench.case import Case, input_ids
from expertmesh.distributed.mesh import current_device


@dataclasses.dataclass(frozen=True, slots=True)
class System:
    """One built system on one rank.

    `step()` runs forward and backward over this rank's tokens and returns this rank's share of the global
    mean loss: the sum of it over ranks is the mean over all target tokens of the step. `module` owns the
    parameters. `trains_all` is False where gradients are of adapters alone, or used up in the step.
    """

    module: nn.Module
    step: Callable[[], torch.Tensor]
    note: str
    trains_all: bool = True


Builder = Callable[[Case, int], System | None]


def build(name: str, case: Case) -> System | None:
    """Build the system called `name` (an entry of `BUILDERS` and a size) on this rank; collective."""
    match = re.fullmatch(r"([a-z0-9_]+?)(\d*)", name)
    if match is None or match[1] not in BUILDERS:
        raise ValueError(f"unknown system {name!r}; known: {', '.join(sorted(BUILDERS))}, each followed by a size")
    return BUILDERS[match[1]](case, int(match[2] or 1))


def _transformers_step(model: nn.Module, ids_BS: torch.Tensor, share: float) -> Callable[[], torch.Tensor]:
    """transformers' own loss, a mean over this rank's targets; all ranks have equally many."""

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids_BS, labels=ids_BS, use_cache=False).loss
        loss.backward()
        return loss.detach() * share

    return step


def _transformers_sharded(case: Case, ep: int) -> System:
    """transformers' native parallelism: `DistributedConfig(fsdp_size=world, ep_size=ep)`, grouped_mm."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    world = dist.get_world_size()
    mixed = case.compute != case.params
    model = AutoModelForCausalLM.from_pretrained(
        case.checkpoint,
        dtype=getattr(torch, case.params),
        distributed_config=DistributedConfig(fsdp_size=world, ep_size=ep, fsdp_mixed_precision=mixed),
        experts_implementation="grouped_mm",
        attn_implementation="sdpa",
    )
    model.train()
    note = f"{case.params} parameters, " + (
        f"fsdp_mixed_precision: {case.compute} compute, float32 reduce" if mixed else "the same compute and reduce"
    )
    ids_BS = input_ids(case, dist.get_rank()).to(current_device())
    return System(model, _transformers_step(model, ids_BS, 1 / world), note)


def transformers_ep(case: Case, ep: int) -> System:
    """transformers' native EP x FSDP2: K rows per token through the all-to-all."""
    return _transformers_sharded(case, ep)


def transformers_fsdp(case: Case, fsdp: int) -> System:
    """transformers' native FSDP2 without expert parallelism: all experts gathered layer by layer."""
    if fsdp != dist.get_world_size():
        raise ValueError(f"transformers_fsdp{fsdp} needs {fsdp} ranks, there are {dist.get_world_size()}")
    return _transformers_sharded(case, 1)


def unsharded(case: Case, size: int) -> System | None:
    """One process (rank 0) with the whole model and the batches of all ranks, one after the other."""
    from transformers import AutoModelForCausalLM

    if size != 1:
        raise ValueError("`unsharded` takes no size")
    if dist.get_rank() != 0:
        return None
    model: Any = AutoModelForCausalLM.from_pretrained(
        case.checkpoint, dtype=case.dtype, experts_implementation="grouped_mm", attn_implementation="sdpa"
    )
    device = current_device()
    model.to(device).train()
    batches = [input_ids(case, rank).to(device) for rank in range(case.ranks)]

    def step() -> torch.Tensor:
        total = torch.zeros(())
        for ids_BS in batches:
            loss = model(input_ids=ids_BS, labels=ids_BS, use_cache=False).loss / len(batches)
            loss.backward()
            total += loss.detach().float().cpu()
        return total

    return System(model, step, f"{case.compute} parameters, gradients and compute; all ranks' tokens in one process")


def expertmesh_ep(case: Case, ep: int) -> System:
    """Ours: de-duplicated dispatch, lean backward, FSDP2 over all ranks. `expertmesh_ep1` is pure FSDP2."""
    return _expertmesh(case, ep, "auto")


def expertmesh_loop_ep(case: Case, ep: int) -> System:
    """The same with `moe.compute: loop`, one expert after the other."""
    return _expertmesh(case, ep, "loop")


def expertmesh_lora_ep(case: Case, ep: int) -> System:
    """Adapters of rank 16 on attention and experts, the rest frozen; they start at zero, so the loss is the same."""
    return _expertmesh(case, ep, "auto", lora=True)


def expertmesh_update_ep(case: Case, ep: int) -> System:
    """A whole optimizer step: with clipping and AdamW's update."""
    return _expertmesh(case, ep, "auto", update=True)


def expertmesh_lora_update_ep(case: Case, ep: int) -> System:
    """The same with adapters."""
    return _expertmesh(case, ep, "auto", lora=True, update=True)


def _expertmesh(case: Case, ep: int, compute: str, *, lora: bool = False, update: bool = False) -> System:
    import expertmesh as em

    mesh = em.init_mesh(em.ParallelConfig(ep=ep))
    precision = em.PrecisionConfig(params=case.params, compute=case.compute, reduce="float32")  # type: ignore[arg-type]
    moe = em.MoeConfig(compute=compute)  # type: ignore[arg-type]
    adapters = em.LoraConfig(r=16) if lora else None
    model = em.load_model(case.checkpoint, mesh, precision=precision, moe=moe, attention="sdpa", lora=adapters)
    ids_BS = input_ids(case, dist.get_rank()).to(mesh.device)
    batch = {"input_ids": ids_BS, "labels": ids_BS}
    targets = em.count_targets(ids_BS) * dist.get_world_size()

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-5, fused=True) if update else None

    def step() -> torch.Tensor:
        loss = em.causal_lm_loss(model, batch, target_tokens=targets)
        loss.backward()
        if optimizer is not None:
            em.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    trained = "adapters of rank 16 on attention and experts" if lora else "parameters"
    return System(
        model, step, f"{case.params} {trained}, {case.compute} compute, float32 reduce", not lora and not update
    )


BUILDERS: dict[str, Builder] = {
    "expertmesh_ep": expertmesh_ep,
    "expertmesh_lora_ep": expertmesh_lora_ep,
    "expertmesh_lora_update_ep": expertmesh_lora_update_ep,
    "expertmesh_loop_ep": expertmesh_loop_ep,
    "transformers_ep": transformers_ep,
    "transformers_fsdp": transformers_fsdp,
    "expertmesh_update_ep": expertmesh_update_ep,
    "unsharded": unsharded,
}
