"""Bytes that a forward keeps for backward, per rank, against cp: exact counts, so any machine gives the same.

    OMP_NUM_THREADS=1 python -m benchmarks.context_memory

One row of 4,096 positions through a small Qwen3-MoE (4 layers, hidden 256, 8 query and 4 key heads, 16 experts,
top-2) on 4 ranks, ep 4, float32, sdpa; cp 1, 2 and 4, with and without activation checkpointing. Each storage that
the decoder's blocks save counts once; their parameters (gathered by FSDP2) do not. Also counted: all-to-all bytes of
a step. Losses must agree over all cp, or the run fails. Prints a Markdown table.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.probes import count_collectives

RANKS, POSITIONS, VOCABULARY = 4, 4096, 512
CPS = (1, 2, 4)


def main() -> None:
    with tempfile.NamedTemporaryFile() as store, tempfile.NamedTemporaryFile() as result:
        mp.start_processes(_rank, (store.name, result.name), nprocs=RANKS, start_method="spawn")  # type: ignore[no-untyped-call]
        rows = torch.load(result.name, weights_only=True)
    assert max(row[-1] for row in rows) - min(row[-1] for row in rows) <= 1e-5, "losses differ"
    print("| activation checkpointing | cp | positions here | saved MB | of cp 1 | all-to-all MB |")
    print("|---|---|---|---|---|---|")
    first: dict[str, float] = {}
    for mode, cp, saved, exchanged, _ in rows:
        share = saved / first.setdefault(mode, saved)
        print(f"| {mode} | {cp} | {POSITIONS // cp:,} | {saved / 1e6:.2f} | {share:.3f} | {exchanged / 1e6:.1f} |")


def _rank(rank: int, store: str, result: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    rows = [
        ("full" if checkpointing else "none", cp, *_measure(cp, checkpointing))
        for checkpointing in (False, True)
        for cp in CPS
    ]
    dist.barrier()
    if rank == 0:
        torch.save(rows, result)
    dist.barrier()


def _measure(cp: int, checkpointing: bool) -> tuple[float, float, float]:
    """Bytes saved and exchanged, means over ranks (experts get unequally many tokens), and the loss of one row."""
    import expertmesh as em

    torch.manual_seed(0)
    model: Any = _model()
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=RANKS, cp=cp)), activation_checkpointing=checkpointing)
    ids = torch.randint(VOCABULARY, (1, POSITIONS), generator=torch.Generator().manual_seed(1))  # the same on all ranks
    loss, saved = torch.zeros(()), 0

    def forward() -> None:
        nonlocal loss
        rows = RANKS // cp  # every data rank has the same row, so that the loss is that of one
        loss = em.causal_lm_loss(model, {"input_ids": ids, "labels": ids}, target_tokens=(POSITIONS - 1) * rows)

    def step() -> None:
        nonlocal saved
        saved = _saved_activations(model, forward)
        loss.backward()  # type: ignore[no-untyped-call]

    exchanged = count_collectives(step)["all_to_all"].bytes
    values = torch.tensor([saved / RANKS, exchanged / RANKS, loss.item()], dtype=torch.float64)
    dist.all_reduce(values)
    mean_saved, mean_exchanged, whole_loss = values.tolist()
    return mean_saved, mean_exchanged, whole_loss


def _model() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=2,
        max_position_embeddings=POSITIONS,
    )
    return Qwen3MoeForCausalLM(config).train()


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
