"""The steps of a simulation: forward, backward, clipping and AdamW as they are, on fake tensors, and counted."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from expertmesh.planning.stages import Batch
from expertmesh.planning.trackers import UsageTracker
from expertmesh.state.packed import stored
from expertmesh.step.forward_backward import minimise
from expertmesh.step.grad_norm import clip_grad_norm_
from expertmesh.step.objective import CrossEntropy


def counted_steps(model: nn.Module, batch: Batch, length: int, packed: bool) -> tuple[UsageTracker, int]:
    """Run a first step, in which FSDP2 and the optimizer allocate what stays, and a second one that is counted.

    Returns:
        The tracker of the second step, and the bytes of parameters and optimizer before it. `model` has fake tensors.
    """
    fake_buffers(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    tokens = torch.zeros(batch.rows, length, dtype=torch.int64)
    micro = {"input_ids": tokens, "labels": tokens}
    if packed:
        micro["attention_mask"] = torch.zeros(batch.rows, 1, length, length, dtype=torch.bool)
    batches = [micro] * batch.accumulation

    def step() -> None:
        minimise(model, batches, CrossEntropy(batch.rows * (length - 1)))
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    tracker = UsageTracker()
    moments = (tensor for state in optimizer.state.values() for tensor in state.values())
    with tracker:
        tracker.include(_local(tensor) for tensor in (*model.parameters(), *moments))
        state = tracker.live
        tracker.reset_peak()
        step()
    return tracker, state


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return stored(tensor.to_local()) if isinstance(tensor, DTensor) else tensor


def fake_buffers(model: nn.Module) -> None:
    """Rotary frequencies and the like have values, which a fake step must not meet."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, torch.empty_like(buffer), persistent=name in module.state_dict())
