"""Make the optimizer of the reference: torch's if it has it, one tensor at a time; else expertmesh's on full tensors.

tests/training/test_optimizers.py compares expertmesh's optimizers with torch's. Nothing here communicates.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from expertmesh.config import OptimConfig
from expertmesh.state.model_view import ModelView
from expertmesh.training.optimizers.adamw import AdamW8bit
from expertmesh.training.optimizers.matrices import matrices_of
from expertmesh.training.optimizers.muon import Muon
from expertmesh.verification.job import ProvenJob


def plain_optimizer(
    parameters: Mapping[str, nn.Parameter], config: OptimConfig, job: ProvenJob
) -> torch.optim.Optimizer:
    """Return the configured optimizer on plain tensors, which have the names of the job's parameters."""
    learning_rate, decay = config.learning_rate, config.weight_decay
    if config.name == "sgd":
        return torch.optim.SGD(parameters.values(), lr=learning_rate, weight_decay=decay, foreach=False, fused=False)
    adamw: dict[str, Any] = {"lr": learning_rate, "betas": config.betas, "eps": config.eps, "weight_decay": decay}
    if config.name == "adamw":
        return torch.optim.AdamW(parameters.values(), **adamw, foreach=False, fused=False)
    adamw |= {"stochastic_rounding": False, "seed": 0}
    if config.name == "adamw_8bit":
        return AdamW8bit(parameters.items(), **adamw)
    matrices = matrices_of(ModelView(job.model).full, job.setup.anatomy)
    compute = next(iter(parameters.values())).dtype
    return Muon(parameters.items(), matrices, momentum=config.momentum, compute=compute, group=None, **adamw)
