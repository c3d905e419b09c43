"""Bytes that a forward keeps for backward, per rank, against cp: exact counts, so any machine gives the same.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 -m benchmarks.context_memory

One row of 4,096 positions through a small Qwen3-MoE (4 layers, hidden 256, 8 query and 4 key heads, 16 experts,
top-2) on 4 ranks, ep 4, float32, sdpa; cp 1, 2 and 4, with and without activation checkpointing. Each storage that
the decoder's blocks save counts once; their parameters (gathered by FSDP2) do not. Also counted: all-to-all bytes of
a step. Losses must agree over all cp, or the run fails. Prints a Markdown table.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import expertmesh as em
from benchmarks.case import Case, random_model
from benchmarks.probes import count_collectives
from benchmarks.result import markdown
from expertmesh.distributed.mesh import start_process_group

RANKS, POSITIONS, CPS = 4, 4096, (1, 2, 4)
CASE = Case(
    tokens=POSITIONS, sequence=POSITIONS, compute="float32", layers=4, hidden=256, experts=16, top_k=2,
    expert_width=128, vocabulary=512, head_dim=32,
)  # fmt: skip


def main() -> None:
    start_process_group(torch.device("cpu"), 600)
    losses, table = list[float](), list[list[str]]()
    for mode in ("none", "full"):
        first = None
        for cp in CPS:
            saved, exchanged, loss = _measure(cp, mode == "full")
            first = first or saved
            share, positions = f"{saved / first:.3f}", f"{POSITIONS // cp:,}"
            table.append([mode, str(cp), positions, f"{saved / 1e6:.2f}", share, f"{exchanged / 1e6:.1f}"])
            losses.append(loss)
    assert max(losses) - min(losses) <= 1e-5, f"losses differ: {losses}"
    if dist.get_rank() == 0:
        head = ("activation checkpointing", "cp", "positions here", "saved MB", "of cp 1", "all-to-all MB")
        print(markdown(head, table))
    dist.barrier()


def _measure(cp: int, checkpointing: bool) -> tuple[float, float, float]:
    """Bytes saved and exchanged, means over ranks (experts get unequally many tokens), and the loss of one row."""
    model = random_model(CASE, torch.device("cpu"))
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=RANKS, cp=cp)), activation_checkpointing=checkpointing)
    generator = torch.Generator().manual_seed(1)  # the same row on all ranks
    ids = torch.randint(CASE.vocabulary, (1, POSITIONS), generator=generator)
    loss, saved = torch.zeros(()), 0

    def forward() -> None:
        nonlocal loss
        rows = RANKS // cp  # every data rank has the same row, so that the loss is that of one
        loss = em.causal_lm_loss(model, {"input_ids": ids, "labels": ids}, target_tokens=(POSITIONS - 1) * rows)

    def step() -> None:
        nonlocal saved
        saved = _saved_activations(model, forward)
        loss.backward()

    exchanged = count_collectives(step)["all_to_all"].bytes
    values = torch.tensor([saved / RANKS, exchanged / RANKS, loss.item()], dtype=torch.float64)
    dist.all_reduce(values)
    mean_saved, mean_exchanged, whole_loss = values.tolist()
    return mean_saved, mean_exchanged, whole_loss


def _saved_activations(model: Any, forward: Any) -> int:
    """Bytes that the decoder's blocks save for backward, without their parameters."""
    parameters: dict[int, int] = {}
    saved: dict[int, tuple[int, torch.Tensor]] = {}
    inside = 0

    def enter(module: Any, args: Any) -> None:
        for parameter in module.parameters(recurse=False):
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if pointer := local.untyped_storage().data_ptr():
                parameters[pointer] = parameters.get(pointer, 0) + 1

    def leave(module: Any, args: Any, output: Any) -> None:
        for parameter in module.parameters(recurse=False):
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            parameters.pop(local.untyped_storage().data_ptr(), None)

    def block(step: int) -> Any:
        def hook(*_: Any) -> None:
            nonlocal inside
            inside += step

        return hook

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if inside and storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes(), tensor  # kept alive, so that no address comes twice
        return tensor

    hooks = [module.register_forward_pre_hook(enter) for module in model.modules()]
    hooks += [module.register_forward_hook(leave) for module in model.modules()]
    for layer in model.model.layers:
        hooks += [layer.register_forward_pre_hook(block(1)), layer.register_forward_hook(block(-1))]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    for hook in hooks:
        hook.remove()
    return sum(size for size, _ in saved.values())


if __name__ == "__main__":
    main()
