"""Read a PEFT directory into the adapters of a model: each rank reads the parts that it holds.

For start.py, and for loading weights. The adapter has to fit the plan; if it has a hash of its base, that has to be the
hash of this base. Nothing here communicates.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from expertmesh.adapters.base import base_of, check_base, read_base
from expertmesh.adapters.peft_format import BASE_FILE, WEIGHTS_FILE, base_copies, model_tensors_from
from expertmesh.adapters.plan import AdapterPlan, plan_of
from expertmesh.config.errors import IntegrityError
from expertmesh.io.boxes import Box, full_box, slices
from expertmesh.io.safetensors_reader import WeightFiles, open_weight_files
from expertmesh.state.model_view import ModelView
from expertmesh.state.shards import is_on_other_stage, local_box, local_tensor
from expertmesh.weights.lazy import LazyTensor
from expertmesh.weights.load import refuse_non_finite
from expertmesh.weights.mapping import StateTensor
from expertmesh.weights.reading import LeafReader, read_box


def read_adapter(model: nn.Module, plan: AdapterPlan, directory: Path) -> None:
    """Fill the adapters that `model` has by `plan`. Call it under `torch.no_grad`, as it writes into parameters.

    Raises:
        IntegrityError: Files do not fit, values are not finite, or the adapter has another base.
    """
    with open_weight_files(directory, WEIGHTS_FILE) as checkpoint:
        _check_same_base(model, directory / BASE_FILE)
        files, view = _lazy(checkpoint), ModelView(model)
        tensors = view.adapters

        def fetch(leaf: Any, box: Box, out: torch.Tensor) -> None:
            checkpoint.read(leaf, box, out)

        for name, lazy in model_tensors_from(files, plan.targets, plan.parts, directory).items():
            box, local = local_box(tensors[name]), local_tensor(tensors[name])  # empty if on another pipeline stage
            read_box(lazy, box, local, fetch)
            refuse_non_finite(name, lazy, box, local)
        for key, name in base_copies(files, plan.targets).items():
            if not is_on_other_stage(base := view.tensors[name]):
                _check_copy(directory, key, files[key], base, fetch)


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
    local = local_tensor(base)
    stored = torch.empty(local.shape, dtype=lazy.dtype)
    if tuple(lazy.shape) == tuple(base.shape):
        read_box(lazy, local_box(base), stored, fetch)
    if tuple(lazy.shape) != tuple(base.shape) or not torch.equal(stored.to(local), local):
        raise IntegrityError(
            f"{directory}: {key} is not the weight of the model's; the adapter has another base",
            key="adapter.other-base",
        )
