"""Compute one gradient norm over dense and expert parameters, and clip by it.

Dense and expert parameters live on different meshes, so `torch.nn.utils.clip_grad_norm_` refuses them or sees only the
local shards. Here every rank sums its own shards of both kinds. The ranks of one shard group together hold every
parameter exactly once, so one all-reduce gives the norm of the full model, equal on every rank.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from expertmesh.compat import norms_of_all, scale_all_
from expertmesh.state.model_view import ModelView, mesh_of
from expertmesh.state.shards import is_tied_replica, to_local


def clip_grad_norm_(model: nn.Module, max_norm: float | None, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm`; return the norm before clipping.

    A norm that is not finite is returned as it is and scales nothing, so that the caller can skip the step.

    Args:
        model: A parallelized model. Its gradients must be complete: after the last backward of the step.
        max_norm: The largest norm allowed; None only measures.
        norm_type: Any p > 0, or infinity.

    Returns:
        A 0-dim fp32 tensor (fp64 for fp64 gradients), equal on every rank.

    Collectives: every rank calls it; one all-reduce of a number or two over the shard group, with pp one more over the
    stages.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward without backward leaves the root's parameters gathered, and without gradients
    parameters = ModelView(model).parameters.values()
    gradients = [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    # Count a weight that two pipeline stages share once.
    counted = [to_local(p.grad) for p in parameters if p.grad is not None and not is_tied_replica(p)]
    total = global_norm(counted, norm_type, model)
    if max_norm is not None and gradients:
        # The rule of torch.nn.utils.clip_grad_norm_, decided on the device: an `if` would wait for it.
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        scale = torch.where(total.isfinite(), scale, torch.ones_like(scale))
        scale_all_(gradients, scale)
    return total


def global_norm(gradients: list[torch.Tensor], norm_type: float, model: nn.Module) -> torch.Tensor:
    """Return the p-norm of the shards of all ranks together.

    Collectives: one all-reduce over the shard group, then one over pp.
    """
    mesh = mesh_of(model)
    groups = [mesh.shard_group, *([mesh.pp_group] if mesh.layout.pp > 1 else [])]
    dtype = torch.float64 if any(gradient.dtype == torch.float64 for gradient in gradients) else torch.float32
    # Shards of few rows are empty on some ranks, and the norm of none is undefined for infinity.
    filled = [gradient for gradient in gradients if gradient.numel()]
    # In fp32 torch's CPU kernel adds one after the other: 3.6e-4 off at 20 M elements. Accelerators add in a tree.
    wide = torch.float64 if mesh.device.type == "cpu" else dtype
    norms = [norm.to(dtype) for norm in norms_of_all(filled, norm_type, wide)] if filled else []
    local = torch.stack(norms) if norms else torch.zeros(1, dtype=dtype, device=mesh.device)
    if math.isinf(norm_type):
        # A maximum over ranks may lose NaN, as in gloo: whether there is one is a number of its own.
        ends = torch.stack([local.nan_to_num(0.0, math.inf).max(), local.isnan().any()])
        for group in groups:
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
        return torch.where(ends[1] > 0, math.nan, ends[0])
    total = local.pow(norm_type).sum()
    for group in groups:
        dist.all_reduce(total, dist.ReduceOp.SUM, group=group)
    return total.pow(1.0 / norm_type)
