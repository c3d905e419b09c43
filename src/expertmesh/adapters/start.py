"""How adapters start: A at random by PEFT's rules and B at zero, the same in every layout; or from a PEFT directory.

Every expert's A comes from a generator of its own, keyed on seed, name and expert, so that a rank makes exactly the
values of its own shards and no others have to agree with it. No communication.
"""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from expertmesh.adapters.base import base_of, check_base, read_base, remember_base
from expertmesh.adapters.peft_format import BASE_FILE, WEIGHTS_FILE, base_copies, model_tensors_from
from expertmesh.adapters.plan import AdapterPlan, plan_of
from expertmesh.adapters.targets import Target
from expertmesh.config import LoraConfig
from expertmesh.config.errors import IntegrityError
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.experts.lora_state import adapter_state
from expertmesh.io.boxes import Box, slices
from expertmesh.io.pieces import Leaf
from expertmesh.io.safetensors_reader import FileTensor, open_weight_files
from expertmesh.state.shards import local_box, local_tensor
from expertmesh.state.stage_view import is_on_other_stage, stage_names
from expertmesh.weights.lazy import LazyTensor
from expertmesh.weights.load import refuse_non_finite
from expertmesh.weights.mapping import adapter_tensors, model_tensors
from expertmesh.weights.reading import LeafReader, read_box


@torch.no_grad()
def start(model: nn.Module, seed: int) -> None:
    """Give every adapter of `model` (sharded, allocated) its first values: those of `seed`, or of a PEFT directory.

    Nothing without adapters. The frozen weights have to be there: their hash is remembered. Every rank calls it; raises
    on all ranks alike what reading the directory raises. Issues one or two small all-reduces.
    """
    plan, state = plan_of(model), adapter_state(model)
    if plan is None or state is None:
        return
    state.seed = seed
    remember_base(model)
    if plan.weights is None:
        _start_anew(model, plan.targets, plan.lora, seed)
        return
    with raise_on_all_ranks("reading the adapter"), open_weight_files(plan.weights, WEIGHTS_FILE) as checkpoint:
        _check_same_base(model, plan.weights / BASE_FILE)
        files = {name: LazyTensor.of(tensor) for name, tensor in checkpoint.tensors.items()}
        tensors = adapter_tensors(model)

        def fetch(leaf: Leaf, box: Box, out: torch.Tensor) -> None:
            assert isinstance(leaf, FileTensor)
            checkpoint.read(leaf, box, out)

        for name, lazy in model_tensors_from(files, plan.targets, plan.lora.r, plan.weights).items():
            box, local = local_box(tensors[name]), local_tensor(tensors[name])  # empty of another pipeline stage
            read_box(lazy, box, local, fetch)
            refuse_non_finite(name, lazy, box, local)
        for key, name in base_copies(files, plan.targets).items():
            if not is_on_other_stage(base := model_tensors(model)[name]):
                _check_copy(plan.weights, key, files[key], base, fetch)


def check_files(plan: AdapterPlan) -> None:
    """Raise what `start` would raise for weights that do not fit the plan, from the file's header. No communication."""
    if plan.weights is not None:
        with open_weight_files(plan.weights, WEIGHTS_FILE) as checkpoint:
            files = {name: LazyTensor.of(tensor) for name, tensor in checkpoint.tensors.items()}
            model_tensors_from(files, plan.targets, plan.lora.r, plan.weights)


def _check_same_base(model: nn.Module, path: Path) -> None:
    """Where the adapter says which base it was trained on, it has to be this one. PEFT's own do not say."""
    if path.exists():
        saved = read_base(path, path.read_bytes())
        check_base(path, saved, base_of(model), ", or remove this file to start from the adapter on this base instead")


def _check_copy(directory: Path, key: str, lazy: LazyTensor, base: torch.Tensor, fetch: LeafReader) -> None:
    """PEFT writes a head's frozen weight beside its adapter, and reads it back; ours has to be the same one."""
    local = local_tensor(base)
    stored = torch.empty(local.shape, dtype=lazy.dtype)
    if tuple(lazy.shape) == tuple(base.shape):
        read_box(lazy, local_box(base), stored, fetch)
    if tuple(lazy.shape) != tuple(base.shape) or not torch.equal(stored.to(local), local):
        raise IntegrityError(
            f"{directory}: {key} is not the weight of the model's; the adapter has another base",
            key="adapter.other-base",
        )


def _start_anew(model: nn.Module, targets: Sequence[Target], lora: LoraConfig, seed: int) -> None:
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
            local.copy_(_first_values(tuple(whole.shape), lora, seed, target.name)[slices(box)])
            continue
        for row, expert in enumerate(range(*box[0])):
            values = _first_values(tuple(whole.shape[1:]), lora, seed, f"{target.name}.{expert}")
            local[row].copy_(values[slices(box[1:])])


def _first_values(shape: tuple[int, ...], lora: LoraConfig, seed: int, name: str) -> torch.Tensor:
    """A `[r, in]` in fp32: uniform in ±1/sqrt(in) (Kaiming with a = sqrt(5)), or normal with deviation 1/r."""
    key = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
    values = torch.empty(shape)
    if lora.init == "gaussian":
        return values.normal_(0.0, 1.0 / lora.r, generator=generator)
    bound = 1.0 / math.sqrt(shape[-1])
    return values.uniform_(-bound, bound, generator=generator)
