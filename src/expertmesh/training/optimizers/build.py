"""Build the optimizer and the learning rate schedule: torch's own optimizers, or those of this package, on DTensors."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from expertmesh.anatomy import describe
from expertmesh.compat import update_as
from expertmesh.config import OptimConfig, ScheduleConfig
from expertmesh.config.sections import OptimizerName
from expertmesh.state.model_view import ModelView
from expertmesh.state.shards import local_tensor
from expertmesh.training.optimizers.adamw import AdamW, AdamW8bit, is_quantised, scale_shape
from expertmesh.training.optimizers.muon import Muon, matrices_of


def build_optimizer(
    model: nn.Module, config: OptimConfig, seed: int, compute: torch.dtype = torch.float32
) -> torch.optim.Optimizer:
    """Return the configured optimizer over the trainable parameters.

    Every rank has to call its `step`; the optimizer's class says what it communicates.

    Args:
        seed: That of stochastic rounding.
        compute: The dtype of Muon's products.
    """
    view = ModelView(model)
    trainable = {name: parameter for name, parameter in view.parameters.items() if parameter.requires_grad}
    rate, decay = config.learning_rate, config.weight_decay
    if config.name == "sgd":
        return _on_shards(torch.optim.SGD(trainable.values(), lr=rate, weight_decay=decay))
    adamw: dict[str, Any] = {"lr": rate, "betas": config.betas, "eps": config.eps, "weight_decay": decay}
    if config.name == "adamw" and not config.stochastic_rounding:
        return _on_shards(torch.optim.AdamW(trainable.values(), **adamw, fused=True))
    adamw |= {"stochastic_rounding": config.stochastic_rounding, "seed": seed}
    if config.name == "muon":
        mesh = view.attached.mesh
        matrices, group = matrices_of(view.full, describe(view.full)), None if mesh is None else mesh.shard_group
        muon: dict[str, Any] = {"momentum": config.momentum, "compute": compute, "group": group}
        return Muon(trainable.items(), matrices, **muon, **adamw)
    return (AdamW if config.name == "adamw" else AdamW8bit)(trainable.items(), **adamw)


def _on_shards(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let an optimizer update each rank's shards as plain tensors; both are element by element.

    DTensor's dispatch of a list of 531 parameters takes six times the host time of the update itself.
    """
    update_as(optimizer, local_tensor)
    return optimizer


def moment_bytes(
    optimizer: OptimizerName,
    shape: Sequence[int],
    width: int,
    *,
    is_matrix: bool,
    here: float | None = None,
    cut: int = 1,
) -> float:
    """Return the bytes that an optimizer keeps of a parameter of `shape`, stored in `width` bytes an element, without
    counters.

    Args:
        is_matrix: Whether Muon updates it.
        here: Count only that many of its elements, in rows that are one of `cut` parts of the full rows.
    """
    here = math.prod(shape) if here is None else here
    if optimizer == "sgd":
        return 0.0
    if optimizer == "adamw_8bit" and is_quantised(shape):
        return 2 * (here + 4 * here * cut / shape[-1] * scale_shape(shape)[-1])
    return (1 if optimizer == "muon" and is_matrix else 2) * here * width


def build_schedule(
    optimizer: torch.optim.Optimizer, config: ScheduleConfig, total_steps: int, done: int = 0
) -> LambdaLR:
    """Return the schedule after `done` optimizer steps. Call `.step()` once per optimizer step, after it."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])  # what torch asks for when a schedule does not start at 0
    return LambdaLR(optimizer, lambda step: learning_rate_factor(config, step, total_steps), last_epoch=done - 1)


def warmup_steps(config: ScheduleConfig, total_steps: int) -> int:
    """Return the number of warm-up steps."""
    return math.ceil(config.warmup_ratio * total_steps) if config.warmup_steps is None else config.warmup_steps


def learning_rate_factor(config: ScheduleConfig, step: int, total_steps: int) -> float:
    """Return the share of the peak learning rate at optimizer step `step`, counted from 0.

    Warm-up lasts `warmup_steps`, or `ceil(warmup_ratio * total_steps)` steps, and rises linearly; its last step has the
    full rate, so the first step never has a rate of zero.
    """
    warmup = warmup_steps(config, total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if config.name == "constant":
        return 1.0
    if config.name == "inverse_sqrt":
        return math.sqrt(max(1, warmup) / (step + 1))
    falls_from = warmup
    if config.name == "wsd":
        falls_from = max(warmup, total_steps - math.ceil(config.decay_ratio * total_steps))
    progress = min(1.0, max(0, step - falls_from) / max(1, total_steps - falls_from))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if config.name == "cosine" else 1.0 - progress
    return config.min_ratio + (1 - config.min_ratio) * left
