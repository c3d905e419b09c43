"""What belongs to a sharded model, as one object on the model, and what belongs to one of its modules, as another.

Whatever takes a model alone (loss, clipping, saving) asks here. Fields whose types stand above this package are `Any`;
the accessor that is named beside each gives it its type. Nothing here communicates.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from expertmesh.config.errors import InputError
from expertmesh.distributed.mesh import Mesh


@dataclass(frozen=True, slots=True)
class StageView:
    """What a model that was cut into pipeline stages remembers of the full one (stage_view.py)."""

    meta_model: nn.Module
    """The full model on meta."""
    tied_replicas: frozenset[str]
    """Names of this stage's tensors that an earlier stage holds as well, and answers for."""
    tied_originals: frozenset[str]
    """Names of this stage's tensors that a later stage holds as well."""
    is_first_rank: bool
    """Whether this rank is the first of its stage."""


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """Everything that is remembered about one model; `attach` replaces fields, nothing changes in place."""

    mesh: Mesh | None = None
    """The ranks it is sharded over: `mesh_of`."""
    stage_view: StageView | None = None
    """Of a model that was cut into stages: state/stage_view.py."""
    pipeline: Any = None
    """How it was cut: `parallel.pipeline.pipeline_of`."""
    tensor_plan: Any = None
    """What tp does with each part: `parallel.tensor_plan.attached_plan`."""
    balance: Any = None
    """Router losses and biases: `experts.balance.attached_balance`."""
    lora_state: Any = None
    """What its adapters share while they run: `experts.lora_state.adapter_state`."""
    lora_plan: Any = None
    """Which adapters it has: `adapters.plan.plan_of`."""
    lora_base: Any = None
    """Hash of the frozen weights: `adapters.base.base_of`."""
    frozen_formats: Any = None
    """Formats of the weights that stay packed, by parameter, or None: `parallel.groups.plan_frozen`."""
    averages_gradients: bool = False
    """Whether gradients of its outputs are averaged over ranks: `state.other_code.like_ddp`."""
    source: Any = None
    """What is remembered of its files: `weights.source.source_of`."""
    base_files: Any = None
    """The JSON files of the base it was built of, as bytes by name: weights/companions.py."""


@dataclass(slots=True)
class ModuleState:
    """What runs beside or instead of a module's own code."""

    expert_layer: Any = None
    """`experts.layer.layer_of`."""
    lora_state: Any = None
    """The model's, if this very module is adapted: `experts.lora_state.adapter_state_of`."""
    lora_scaling: Any = None
    """What the product of the adapter is multiplied by, by the name of the adapted parameter."""
    lora_name: str = ""
    """The adapted module's name in the model."""
    first_column: int = 0
    """Where this rank's part of the inputs starts, if tp splits them."""
    row_bias: Any = None
    """Of a linear layer whose inputs tp splits: what is added once to the sum of its outputs."""
    tensor_part: Any = None
    """What tp does here: parallel/tensor.py."""
    context_attention: Any = None
    """What cp does here: parallel/context.py."""


def sharded(model: nn.Module) -> ShardedModel:
    """What was attached to `model`; all fields empty where nothing was."""
    found = getattr(model, "_expertmesh", None)
    return found if isinstance(found, ShardedModel) else ShardedModel()


def attach(model: nn.Module, **fields: Any) -> None:
    """Remember `fields` of a `ShardedModel` on `model`."""
    model._expertmesh = replace(sharded(model), **fields)  # type: ignore[assignment]


def mesh_of(model: nn.Module) -> Mesh:
    """The mesh that `model` is sharded over; `InputError` for a model that was never parallelized."""
    mesh = sharded(model).mesh
    if mesh is None:
        raise InputError(
            f"{type(model).__name__} is not parallelized; call load_model or parallelize(model, mesh) first",
            key="model.not-parallelized",
        )
    return mesh


def module_state(module: nn.Module) -> ModuleState:
    """What was attached to this very module; all fields empty where nothing was."""
    found = getattr(module, "_expertmesh_module", None)
    return found if isinstance(found, ModuleState) else ModuleState()


def attach_to_module(module: nn.Module, **fields: Any) -> None:
    """Set `fields` of the module's `ModuleState`."""
    state = module_state(module)
    for name, value in fields.items():
        setattr(state, name, value)
    module._expertmesh_module = state  # type: ignore[assignment]
