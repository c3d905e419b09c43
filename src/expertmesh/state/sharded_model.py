"""Store the state of a sharded model as one object on the model, and the state of one module as another.

Functions that get only a model (loss, clipping, saving) read it here. A field is `Any` if its type belongs to a package
that imports this one; the accessor named beside the field returns it with its type. Nothing here communicates.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from expertmesh.config.errors import InputError
from expertmesh.distributed.mesh import Mesh
from expertmesh.io.safetensors_reader import FileTensor


@dataclass(frozen=True, slots=True)
class StageView:
    """The full model, as a model that was split into pipeline stages remembers it."""

    meta_model: nn.Module
    """The full model on meta."""
    tied_replicas: frozenset[str]
    """Names of this stage's tensors that an earlier stage also holds and owns."""
    tied_originals: frozenset[str]
    """Names of this stage's tensors that a later stage also holds."""
    is_first_rank: bool
    """True if this rank is the first of its stage."""


@dataclass(frozen=True, slots=True)
class Source:
    """The files that a model was loaded from."""

    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """The dtypes in the files by state-dict name, bfloat16 where they hold codes; empty for a model made in memory."""
    unmapped: tuple[FileTensor, ...] = ()
    """The tensors that the files hold and the model does not."""
    quantisation: Mapping[str, Any] | None = None
    """The `quantization_config` of the files."""
    packed: tuple[FileTensor, ...] = ()
    """The codes, scales and further parts of the tensors that the model has."""
    bare: bool = False
    """The files name the tensors inside the base model without its prefix."""


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """The state of one model; `attach` replaces fields, nothing changes in place."""

    mesh: Mesh | None = None
    """The ranks that the model is sharded over: `mesh_of`."""
    stage_view: StageView | None = None
    """Only for a model that was split into stages."""
    pipeline: Any = None
    """The split into stages: `parallel.pipeline.pipeline_of`."""
    shard_plan: Any = None
    """The plan that it was sharded by, a `parallel.shard_plan.ShardPlan`; of its parts
    `parallel.tensor_plan.attached_plan` and `experts.balance.attached_balance`."""
    layers: Any = None
    """Its layers, once a step was accumulated by layer: `parallel.layers.layers_of`."""
    lora_state: Any = None
    """The state that its adapters share while they run: `experts.lora_state.adapter_state`."""
    lora_plan: Any = None
    """Its adapters: `adapters.plan.plan_of`."""
    lora_base: Any = None
    """Hash of the frozen weights: `adapters.base.base_of`."""
    frozen_formats: Any = None
    """Formats of the weights that stay packed, by parameter, or None: `parallel.groups.plan_frozen`."""
    averages_gradients: bool = False
    """True if gradients of its outputs are averaged over ranks: `state.other_code.like_ddp`."""
    source: Source = field(default_factory=Source)
    """The files it was loaded from; an empty one for a model made in memory."""
    base_files: Any = None
    """The JSON files of the base that it was built from, as bytes by name: weights/companions.py."""


@dataclass(slots=True)
class ModuleState:
    """The code and state that run beside or instead of a module's own code."""

    expert_layer: Any = None
    """The expert layer: `experts.layer.layer_of`."""
    lora_state: Any = None
    """The model's adapter state, if this module itself is adapted: `experts.lora_state.adapter_state_of`."""
    lora_scaling: Any = None
    """The factor of the adapter's product, by the name of the adapted parameter."""
    lora_name: str = ""
    """The adapted module's name in the model."""
    first_column: int = 0
    """The start of this rank's part of the inputs, if tensor parallelism splits them."""
    row_bias: Any = None
    """The bias of a linear layer whose inputs are split, added once to the sum of the ranks' outputs."""
    tensor_part: Any = None
    """Its part in tensor parallelism: parallel/tensor.py."""
    context_attention: Any = None
    """Its attention under context parallelism: parallel/context/exchange.py."""


def sharded(model: nn.Module) -> ShardedModel:
    """Return the state attached to `model`; all fields are empty if nothing was attached."""
    found = getattr(model, "_expertmesh", None)
    return found if isinstance(found, ShardedModel) else ShardedModel()


def attach(model: nn.Module, **fields: Any) -> None:
    """Store `fields` of a `ShardedModel` on `model`."""
    model._expertmesh = replace(sharded(model), **fields)  # type: ignore[assignment]


def mesh_of(model: nn.Module) -> Mesh:
    """Return the mesh that `model` is sharded over. Raises `InputError` for a model that was never parallelized."""
    mesh = sharded(model).mesh
    if mesh is None:
        raise InputError(
            f"{type(model).__name__} is not parallelized; call load_model or parallelize(model, mesh) first",
            key="model.not-parallelized",
        )
    return mesh


def module_state(module: nn.Module) -> ModuleState:
    """Return the state attached to this module itself; all fields are empty if nothing was attached."""
    found = getattr(module, "_expertmesh_module", None)
    return found if isinstance(found, ModuleState) else ModuleState()


def attach_to_module(module: nn.Module, **fields: Any) -> None:
    """Set `fields` of the module's `ModuleState`."""
    state = module_state(module)
    for name, value in fields.items():
        setattr(state, name, value)
    module._expertmesh_module = state  # type: ignore[assignment]
