"""Give adapters their first values: A at random by PEFT's rules and B at zero, or those of a PEFT directory.

Each target's A, and each expert's, comes from a separate generator, seeded by seed, name and expert. So a rank makes
the values of its shards without communication, and they do not depend on the layout. From a directory, each rank reads
the parts that it holds. The adapter has to fit the plan; if it has a hash of its base, that has to be the hash of this
base.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from expertmesh.adapters.base import base_of, check_base, read_base, remember_base
from expertmesh.adapters.peft_format import BASE_FILE, WEIGHTS_FILE, base_copies, model_tensors_from
from expertmesh.adapters.plan import AdapterPlan, plan_of
from expertmesh.adapters.targets import Target
from expertmesh.config import LoraConfig
from expertmesh.config.errors import IntegrityError
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.experts.install import fetch_copies
from expertmesh.experts.lora_state import adapter_state
from expertmesh.io.boxes import Box, full_box, slices
from expertmesh.io.safetensors_reader import WeightFiles, open_weight_files
from expertmesh.state.model_view import ModelView, stage_names
from expertmesh.state.shards import held_parts, is_on_other_stage, local_tensor
from expertmesh.weights.first_values import seed_of
from expertmesh.weights.lazy import LazyTensor, LeafReader, read_box
from expertmesh.weights.load import refuse_non_finite
from expertmesh.weights.mapping import StateTensor


@torch.no_grad()
def start(model: nn.Module, seed: int) -> None:
    """Give every adapter of `model` its first values: those of `seed`, or of the plan's PEFT directory.

    Does nothing for a model without adapters; those of a PeftModel have their values already. Also remembers the hash
    of the frozen weights, and fetches those of experts that this rank copies.

    Args:
        model: Sharded and allocated, with its frozen weights loaded.

    Raises:
        InputError, SecurityError, IntegrityError: Reading the PEFT directory failed.

    Collectives: every rank calls it; one or two small all-reduces on the default group, and those of `fetch_copies`.
    Errors are raised on all ranks.
    """
    plan, state = plan_of(model), adapter_state(model)
    if plan is None or state is None:
        return
    state.seed = seed
    remember_base(model)
    fetch_copies(model)
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
        local_tensor(module.get_parameter(leaf_b)).zero_()
        for box, local in held_parts(whole):
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


def read_adapter(model: nn.Module, plan: AdapterPlan, directory: Path) -> None:
    """Fill the adapters that `model` has by `plan`. Call it under `torch.no_grad`, as it writes into parameters.

    Raises:
        IntegrityError: Files do not fit, values are not finite, or the adapter has another base.
    """
    with open_weight_files(directory, WEIGHTS_FILE) as checkpoint:
        _check_same_base(model, directory / BASE_FILE)
        files, view = _lazy(checkpoint), ModelView(model)
        tensors = view.adapters
        for name, lazy in model_tensors_from(files, plan.targets, plan.parts, directory).items():
            for box, local in held_parts(tensors[name]):  # empty if on another pipeline stage
                read_box(lazy, box, local, checkpoint.read)
                refuse_non_finite(name, lazy, box, local)
        for key, name in base_copies(files, plan.targets).items():
            if not is_on_other_stage(base := view.tensors[name]):
                _check_copy(directory, key, files[key], base, checkpoint.read)


def copy_adapter(model: nn.Module, plan: AdapterPlan, values: Mapping[str, torch.Tensor], where: Path) -> None:
    """Fill the adapters of a model in memory, not yet sharded, from PEFT's tensors. Call it under `torch.no_grad`.

    Args:
        values: By the keys of PEFT's file.
        where: Stands for the file's directory in messages.

    Raises:
        IntegrityError: Tensors do not fit.
    """
    files = {key: LazyTensor.of(StateTensor(key, tensor)) for key, tensor in values.items()}

    def fetch(leaf: Any, box: Box, out: torch.Tensor) -> None:
        out.copy_(leaf.tensor[slices(box)])

    for name, lazy in model_tensors_from(files, plan.targets, plan.parts, where).items():
        read_box(lazy, full_box(lazy.shape), local_tensor(model.get_parameter(name)), fetch)


def check_adapter(model: nn.Module) -> None:
    """Raise the error of `read_adapter` for files that do not fit the model's plan, from their header alone."""
    plan = plan_of(model)
    if plan is not None and plan.weights is not None:
        with open_weight_files(plan.weights, WEIGHTS_FILE) as checkpoint:
            model_tensors_from(_lazy(checkpoint), plan.targets, plan.parts, plan.weights)


def _lazy(checkpoint: WeightFiles) -> dict[str, LazyTensor]:
    return {name: LazyTensor.of(tensor) for name, tensor in checkpoint.tensors.items()}


def _check_same_base(model: nn.Module, path: Path) -> None:
    """Raise `IntegrityError` if the adapter has the hash of another base; an adapter that PEFT wrote has no hash."""
    if path.exists():
        saved = read_base(path)
        check_base(path, saved, base_of(model), ", or remove this file to start from the adapter on this base instead")


def _check_copy(directory: Path, key: str, lazy: LazyTensor, base: torch.Tensor, fetch: LeafReader) -> None:
    """Raise `IntegrityError` if a frozen weight of the model differs from its copy in the file.

    PEFT writes a head's frozen weight beside its adapter, and loads it again.
    """
    fits = tuple(lazy.shape) == tuple(base.shape)
    for box, local in held_parts(base) if fits else ():
        stored = torch.empty(local.shape, dtype=lazy.dtype)
        read_box(lazy, box, stored, fetch)
        fits = fits and torch.equal(stored.to(local), local)
    if not fits:
        raise IntegrityError(
            f"{directory}: {key} is not the weight of the model's; the adapter has another base",
            key="adapter.other-base",
        )
