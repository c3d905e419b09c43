"""Start adapters: A at random by PEFT's rules and B at zero, the same in every layout; or from a PEFT directory.

Each target's A, and each expert's, comes from a separate generator, seeded by seed, name and expert. So a rank makes
the values of its shards without communication, and they do not depend on the layout.
"""

import math
from collections.abc import Sequence

import torch
from torch import nn

from expertmesh.adapters.base import remember_base
from expertmesh.adapters.plan import plan_of
from expertmesh.adapters.read import read_adapter
from expertmesh.adapters.targets import Target
from expertmesh.config import LoraConfig
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.experts.lora_state import adapter_state
from expertmesh.io.boxes import slices
from expertmesh.state.model_view import stage_names
from expertmesh.state.shards import local_box, local_tensor
from expertmesh.weights.first_values import seed_of


@torch.no_grad()
def start(model: nn.Module, seed: int) -> None:
    """Give every adapter of `model` its first values: those of `seed`, or of the plan's PEFT directory.

    Does nothing for a model without adapters; those of a PeftModel have their values already. Also remembers the hash
    of the frozen weights.

    Args:
        model: Sharded and allocated, with its frozen weights loaded.

    Raises:
        InputError, SecurityError, IntegrityError: Reading the PEFT directory failed.

    Collectives: every rank calls it; one or two small all-reduces on the default group. Errors are raised on all ranks.
    """
    plan, state = plan_of(model), adapter_state(model)
    if plan is None or state is None:
        return
    state.seed = seed
    remember_base(model)
    if plan.in_memory:
        return
    if plan.weights is None:
        _start_anew(model, plan.targets, plan.lora, seed)
        return
    with raise_on_all_ranks("reading the adapter"):
        read_adapter(model, plan, plan.weights)


def _start_anew(model: nn.Module, targets: Sequence[Target], lora: LoraConfig, seed: int) -> None:
    """Fill the local shards of the adapters of this stage: A at random, B with zeros."""
    here = set(stage_names(model, [target.module for target in targets]))
    for target in targets:
        if target.module not in here:
            continue
        module = model.get_submodule(target.module)
        leaf_a, leaf_b = target.leaves
        whole = module.get_parameter(leaf_a)
        box, local = local_box(whole), local_tensor(whole)
        local_tensor(module.get_parameter(leaf_b)).zero_()
        if target.experts is None:
            local.copy_(_first_values(tuple(whole.shape), lora.init, seed, target.name)[slices(box)])
            continue
        for row, expert in enumerate(range(*box[0])):
            values = _first_values(tuple(whole.shape[1:]), lora.init, seed, f"{target.name}.{expert}")
            local[row].copy_(values[slices(box[1:])])


def _first_values(shape: tuple[int, ...], init: str, seed: int, name: str) -> torch.Tensor:
    """Return A `[r, in]` in fp32: uniform in ±1/sqrt(in) (Kaiming with a = sqrt(5)), or normal with deviation 1/r.

    Draws all of A on the CPU, so that a caller who takes its shard gets the same values in every layout.
    """
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    values = torch.empty(shape)
    if init == "gaussian":
        return values.normal_(0.0, 1.0 / shape[0], generator=generator)
    bound = 1.0 / math.sqrt(shape[-1])
    return values.uniform_(-bound, bound, generator=generator)
