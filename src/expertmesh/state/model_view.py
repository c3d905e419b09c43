"""View a model as the full one, whatever of it this rank holds: its structure, tensors, ties, class and files.

A model may be plain, on meta, sharded by FSDP2, or one of several pipeline stages. Files, checkpoints, audits and
optimizers handle the full model and must not depend on the layout. So a function of the public interface makes one view
and hands it to the functions below it, and none of them derives it again.

A view answers at the first question and keeps the answer: after parameters were replaced (allocated, adapted, split
into stages) make a new one.

What outlives a view is one object on the model, `ShardedModel`, and one on a module, `ModuleState`; functions that get
only a model (loss, clipping) read it there. A field whose type belongs to a package above this one is imported for
type checkers alone. Nothing here communicates.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from expertmesh.config.errors import InputError
from expertmesh.distributed.mesh import Mesh
from expertmesh.io.safetensors_reader import FileTensor
from expertmesh.state.codes import PackedFormat
from expertmesh.state.packed import stored
from expertmesh.state.shards import (
    OTHER_STAGE,
    StagePlacement,
    local_tensor,
    mark_order,
    on_other_stage,
    place,
    placed_like,
)

if TYPE_CHECKING:
    from expertmesh.adapters.plan import AdapterPlan
    from expertmesh.adapters.start import Base
    from expertmesh.experts.layer import ExpertLayer
    from expertmesh.experts.lora_state import AdapterState
    from expertmesh.parallel.context import ContextAttention
    from expertmesh.parallel.pipeline import Layers, Pipeline
    from expertmesh.parallel.shard_plan import ShardPlan
    from expertmesh.parallel.tensor import RunningPart

_Module = TypeVar("_Module", bound=nn.Module)


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
    pipeline: "Pipeline | None" = None
    """The split into stages."""
    shard_plan: "ShardPlan | None" = None
    """The plan that it was sharded by."""
    layers: "Layers | None" = None
    """Its layers, once a step was accumulated by layer."""
    lora_state: "AdapterState | None" = None
    """The state that its adapters share while they run."""
    lora_plan: "AdapterPlan | None" = None
    """Its adapters."""
    lora_base: "Base | None" = None
    """Hash of the frozen weights."""
    router_logits: int | None = None
    """Number of router logits that a forward of the stages here records; None without stages or before the first."""
    frozen_formats: Mapping[str, PackedFormat] | None = None
    """Formats of the weights that stay packed, by parameter, or None: `parallel.shard_plan.plan_frozen`."""
    follows_routes: bool = False
    """True once its routers were shown to take the routes of a batch: parallel/routes.py."""
    averages_gradients: bool = False
    """True if gradients of its outputs are averaged over ranks: `state.other_code.like_ddp`."""
    source: Source = field(default_factory=Source)
    """The files it was loaded from; an empty one for a model made in memory."""
    base_files: Mapping[str, bytes] | None = None
    """The JSON files of the base that it was built from, as bytes by name: weights/sidecars.py."""


@dataclass(slots=True)
class ModuleState:
    """The code and state that run beside or instead of a module's own code."""

    expert_layer: "ExpertLayer | None" = None
    """The expert layer."""
    lora_state: "AdapterState | None" = None
    """The model's adapter state, if this module itself is adapted."""
    lora_scaling: Mapping[str, float] = field(default_factory=dict)
    """The factor of the adapter's product, by the name of the adapted parameter."""
    lora_rows: Tensor | None = None
    """The rows of its weight that training replaces, int64 `[n]`; None if it replaces the full weight, or none."""
    lora_name: str = ""
    """The adapted module's name in the model."""
    first_column: int = 0
    """The start of this rank's part of the inputs, if tensor parallelism splits them."""
    row_bias: Tensor | None = None
    """The bias of a linear layer whose inputs are split, added once to the sum of the ranks' outputs."""
    tensor_part: "RunningPart | None" = None
    """Its part in tensor parallelism."""
    context_attention: "ContextAttention | None" = None
    """Its attention under context parallelism."""


def sharded(model: nn.Module) -> ShardedModel:
    """Return the state attached to `model`; all fields are empty if nothing was attached."""
    found = getattr(model, "_expertmesh", None)
    return found if isinstance(found, ShardedModel) else ShardedModel()


def attach(model: nn.Module, **fields: Any) -> None:
    """Store `fields` of a `ShardedModel` on `model`."""
    model._expertmesh = replace(sharded(model), **fields)  # type: ignore[assignment]


def mark_expert_orders(model: nn.Module) -> None:
    """Mark the parameters of placed experts with the expert in each slot, as the shard plan has it."""
    plan = sharded(model).shard_plan
    orders = {} if plan is None else plan.expert_orders
    for name, parameter in model.named_parameters() if orders else ():
        if name in orders:
            mark_order(parameter, orders[name])


def mesh_of(model: nn.Module) -> Mesh:
    """Return the mesh that `model` is sharded over. Raises `InputError` for a model that was never parallelized."""
    mesh = sharded(model).mesh
    if mesh is None:
        raise InputError(
            f"{type(model).__name__} is not parallelized; call load_model or parallelize(model, mesh) first",
            key="model.not-parallelized",
        )
    return mesh


def shard_plan_of(model: nn.Module) -> "ShardPlan":
    """Return the plan that `model`, which is parallelized, was sharded by."""
    plan = sharded(model).shard_plan
    assert plan is not None, f"{type(model).__name__} is not parallelized"
    return plan


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


@dataclass(eq=False)
class ModelView:
    """A model as the full one."""

    module: Any
    """The model as this rank holds it, a `PreTrainedModel` wherever files are involved."""
    full: Any = field(init=False)
    """The full model: `module` itself, or on meta if `module` is a stage. Its structure may be used, never its
    values."""

    def __post_init__(self) -> None:
        stage = sharded(self.module).stage_view
        self.full = self.module if stage is None else stage.meta_model
        mark_expert_orders(self.module)  # allocating has replaced parameters

    @property
    def is_stage(self) -> bool:
        """True if this rank holds one of several pipeline stages."""
        return self.full is not self.module

    @property
    def attached(self) -> ShardedModel:
        """The state attached to the model: mesh, plans, source."""
        return sharded(self.module)

    @property
    def family(self) -> Any:
        """The model's class, without the subclass that FSDP2 puts in front of it."""
        return _published_class(type(self.module))

    @cached_property
    def state(self) -> dict[str, Tensor]:
        """The full model's state dict, in its order; tied tensors are one object under each of their names.

        Tensors of other stages have a name, a shape and a dtype, and this rank holds an empty part of them.
        """
        own = dict(self.module.state_dict(keep_vars=True))
        stage = self.attached.stage_view
        if stage is None:
            return own
        full, held = dict(stage.meta_model.state_dict(keep_vars=True)), {}
        for name, tensor in own.items():
            replica = name in stage.tied_replicas
            placement = StagePlacement(
                is_tied_replica=replica,
                has_tied_replica=replica or name in stage.tied_originals,
                is_first_rank=stage.is_first_rank,
            )
            # By identity on meta, so that each name of a tied tensor gets the same object.
            held[id(full[name])] = place(tensor, placement)
        return {name: held.get(id(meta), place(meta, OTHER_STAGE)) for name, meta in full.items()}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers by state-dict name, without adapters.

        Raises:
            InputError: An entry of the state dict is not a tensor.
        """
        tensors = {name: value for name, value in self.state.items() if not is_adapter(name)}
        for name, value in tensors.items():
            if not isinstance(value, Tensor):
                raise InputError(
                    f"{type(self.module).__name__}: state {name} is not a tensor, which is not supported",
                    key="model.state-not-tensor",
                )
        return tensors

    @cached_property
    def adapters(self) -> dict[str, Tensor]:
        """The adapters by name; empty for a model without adapters."""
        return {name: parameter for name, parameter in self.state.items() if is_adapter(name)}

    @cached_property
    def ties(self) -> list[list[str]]:
        """The names of each of `tensors`, in their order: one name, or several for a tied tensor."""
        return tied_names(self.tensors)

    @cached_property
    def unique(self) -> dict[str, Tensor]:
        """Each of `tensors` once, under the first of its names."""
        return {names[0]: self.tensors[names[0]] for names in self.ties}

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank's stage by their names in the full model; a tied one by its first name."""
        if not self.is_stage:
            return dict(self.module.named_parameters())
        held = {id(parameter) for parameter in self.module.parameters()}
        names = (name for name, _ in self.full.named_parameters())
        return {name: self.state[name] for name in names if id(self.state[name]) in held}  # type: ignore[misc]

    @cached_property
    def meta(self) -> Any:
        """A copy of `module` on meta. Code that runs or changes it must restore it."""
        return meta_copy(self.module)

    @property
    def weights_file(self) -> str | None:
        """The name of the weights file if the config names one instead of the usual file, else None."""
        name: str | None = getattr(self.module.config, "transformers_weights", None)
        return name

    @contextmanager
    def published_classes(self) -> Iterator[None]:
        """Give sharded modules their original classes back inside the `with` block.

        transformers finds conversion rules by class name and skips classes defined outside of transformers. FSDP2's
        `FSDPMixtralForCausalLM` fails both tests: without this, a sharded model would have no rules and would be saved
        in another layout.
        """
        modules = [(module, type(module)) for module in self.module.modules() if isinstance(module, FSDPModule)]
        try:
            for module, kind in modules:
                module.__class__ = _published_class(kind)
            yield
        finally:
            for module, kind in modules:
                module.__class__ = kind


# Parameters of a linear layer with a row for each output, those of adapters included.
OUTPUT_ROWS = ("weight", "bias", "lora_B", "weight_lora_W", "bias_lora_W")


def is_adapter(name: str) -> bool:
    """Return whether the name of a parameter is that of an adapter, which is beside what it adapts or replaces."""
    return name.endswith(("lora_A", "lora_B", "lora_W"))


def tied_names(state: dict[str, Tensor]) -> list[list[str]]:
    """Return the names of each tensor, in state-dict order: a list of one name, or of several for a tied tensor."""
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def _published_class(kind: type) -> type:
    return next(each for each in kind.__mro__ if issubclass(each, nn.Module) and not issubclass(each, FSDPModule))


def meta_copy(model: _Module) -> _Module:
    """Return a copy of `model` without values: parameters and buffers on meta, with the same ties."""
    memo: dict[int, object] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        # `deepcopy` treats entries of `memo` as already copied, so that it never copies a value.
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    return deepcopy(model, memo)


def stage_names(model: nn.Module, names: Collection[str]) -> Iterator[str]:
    """Yield those of `names`, names of modules of the full model, that this rank's stage has, in order."""
    held = {name for name, _ in model.named_modules()}
    return (name for name in names if name in held)


def as_stored(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return `tensor` of `model`, or for packed experts their bytes `[E, bytes]`, sharded in the same way."""
    kind = (sharded(model).frozen_formats or {}).get(name)
    if kind is None:
        return tensor
    if not isinstance(tensor, DTensor):
        return on_other_stage(torch.uint8, (tensor.shape[0], kind.bytes))
    # `run_check` would issue a collective.
    own = DTensor.from_local(stored(local_tensor(tensor)), tensor.device_mesh, tensor.placements, run_check=False)
    return placed_like(own, tensor)
