"""The optimizer and the learning rate over optimizer steps: torch's own, or one of this package, on DTensors."""

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from expertmesh.config import OptimConfig, ScheduleConfig
from expertmesh.state.stage_view import stage_parameters
from expertmesh.training.optimizers.adamw import AdamW


def build_optimizer(model: nn.Module, config: OptimConfig, seed: int) -> torch.optim.Optimizer:
    """What the configuration asks for, over the trainable parameters. `seed` is that of stochastic rounding.

    No communication: every rank updates its own shards.
    """
    trainable = {name: parameter for name, parameter in stage_parameters(model).items() if parameter.requires_grad}
    rate, decay = config.learning_rate, config.weight_decay
    if config.name == "sgd":
        return torch.optim.SGD(trainable.values(), lr=rate, weight_decay=decay)
    if config.stochastic_rounding:
        return AdamW(trainable.items(), lr=rate, betas=config.betas, eps=config.eps, weight_decay=decay, seed=seed)
    return torch.optim.AdamW(
        trainable.values(), lr=rate, betas=config.betas, eps=config.eps, weight_decay=decay, fused=True
    )


def build_schedule(
    optimizer: torch.optim.Optimizer, config: ScheduleConfig, total_steps: int, done: int = 0
) -> LambdaLR:
    """The schedule after `done` optimizer steps. Call `.step()` once per optimizer step, after it."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])  # what torch asks for when a schedule does not start at 0
    return LambdaLR(optimizer, lambda step: learning_rate_factor(config, step, total_steps), last_epoch=done - 1)


def learning_rate_factor(config: ScheduleConfig, step: int, total_steps: int) -> float:
    """The share of the peak learning rate at optimizer step `step`, counted from 0.

    Warm-up lasts `ceil(warmup_ratio * total_steps)` steps and rises linearly; its last step has the full rate, so the
    first step is never lost to a rate of zero.
    """
    warmup = math.ceil(config.warmup_ratio * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if config.name == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return 0.5 * (1 + math.cos(math.pi * progress)) if config.name == "cosine" else 1.0 - progress
