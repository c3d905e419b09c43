"""Make all decisions about a model in a layout, the shard plan, from the model on meta, before any weight is read.

`plan_shards` decides and refuses; `fsdp.shard` carries a plan out and decides nothing. All commands that need to know
whether a model can be trained (check, inspect, plan, train, verify, parallelize) use this file. Nothing communicates,
and the model does not change: trials run on its meta copy.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from expertmesh.anatomy import Anatomy, ExpertsSpec, decoder_blocks, describe, is_inside
from expertmesh.config import MoeConfig, PrecisionConfig
from expertmesh.config.errors import InputError
from expertmesh.config.sections import BYTES_OF
from expertmesh.distributed.expert_traffic import ExpertTraffic, TopKRouter
from expertmesh.distributed.layout import Layout
from expertmesh.experts.dispatchers import deepep
from expertmesh.experts.install import Kernels, choose_backend, choose_kernels
from expertmesh.introspection.stage_probe import Decoder
from expertmesh.parallel.checkpointing import (
    CheckpointedLayers,
    CheckpointingMode,
    checkpointed_blocks,
    checkpointing_mode,
)
from expertmesh.parallel.compiling import compiled_parts, refuse_compile
from expertmesh.parallel.context import ContextPlan, context_plan
from expertmesh.parallel.groups import Group, Split, packed_formats, plan_expert_dims, plan_frozen, plan_groups
from expertmesh.parallel.refusals import (
    choose_dispatch,
    refuse_axes,
    refuse_dispatch,
    refuse_dtypes,
    refuse_model,
    shared_beside_rows,
)
from expertmesh.parallel.stages import Cut, find_decoder, plan_cut
from expertmesh.parallel.tensor_plan import TensorPlan, tensor_plan
from expertmesh.state.model_view import ModelView

if TYPE_CHECKING:
    from expertmesh.experts.balance import Balance
    from expertmesh.state.packed_format import PackedFormat

KeptInFp32 = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """The user's settings for sharding, other than the layout."""

    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """The section `precision`."""
    moe: MoeConfig = field(default_factory=MoeConfig)
    """The section `moe`; the only one that may still contain `auto`."""
    activation_checkpointing: CheckpointingMode = "none"
    """Part of a block that backward recomputes."""
    checkpoint_layers: CheckpointedLayers = "all"
    """The blocks that are recomputed."""
    compile: bool = False
    """True to compile the dense parts of each block."""

    @classmethod
    def of(
        cls,
        precision: PrecisionConfig,
        moe: MoeConfig | None,
        activation_checkpointing: CheckpointingMode | bool,
        checkpoint_layers: CheckpointedLayers,
        compile: bool,
    ) -> "ShardOptions":
        """Build options from the arguments of the Python interface, where True means "full" and False "none"."""
        mode = checkpointing_mode(activation_checkpointing)
        return cls(precision, moe or MoeConfig(), mode, checkpoint_layers, compile)


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """The sharding of one model in one layout. All names are those of the full model, with all pipeline stages."""

    layout: Layout
    """The sizes of the mesh axes."""
    options: ShardOptions
    """The user's settings."""
    anatomy: Anatomy
    """The anatomy of the full model."""
    balance: "Balance"
    """Balancing of the routing, in words."""
    dispatch: str
    """The dispatcher that `moe.dispatch` resolved to."""
    compute: Mapping[str, str]
    """The compute backend of each experts module."""
    kernels: Kernels
    """The kernels that `moe.kernels` resolved to."""
    shared_beside: Mapping[str, str]
    """By experts module, the shared expert that computes during its dispatch."""
    frozen: tuple[str, ...]
    """The routers that are not trained."""
    tensor: TensorPlan
    """The work of tp."""
    context: ContextPlan
    """The work of cp."""
    cut: Cut | None
    """The pipeline stages; None if pp is 1."""
    splits: Mapping[str, Split]
    """The split of each parameter that ep or tp splits."""
    groups: tuple[Group, ...]
    """The FSDP2 groups in the order of their `fully_shard` calls, the root last."""
    cast_buffers: tuple[str, ...]
    """The modules whose buffers are in the compute dtype while they run."""
    wide_routers: tuple[str, ...]
    """The routers whose inputs are cast to fp32."""
    packed: "Mapping[str, PackedFormat]"
    """The format of each frozen parameter that stays in 8 or 4 bits."""
    checkpointed: tuple[str, ...]
    """The blocks that are recomputed in backward."""
    compiled: tuple[str, ...]
    """The parts that are compiled."""
    view: ModelView = field(repr=False)
    """The meta copy of the full model."""

    @cached_property
    def decoder(self) -> Decoder:
        """The values that blocks pass on, proven on meta at the first access. Raises `CannotCut`."""
        return find_decoder(self.view.meta, self.anatomy, decoder_blocks(self.anatomy), self.view.meta)

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """The dtypes (of master parameters, of compute, of gradient reduction)."""
        precision = self.options.precision
        return getattr(torch, precision.params), getattr(torch, precision.compute), getattr(torch, precision.reduce)

    @property
    def uncast(self) -> frozenset[str]:
        """The parameters that forward and backward use in float32 under a narrower compute dtype."""
        return frozenset(name for group in self.groups if not group.casts for name in group.parameters)

    @property
    def resolved(self) -> dict[str, str]:
        """The resolved moe.dispatch, moe.compute, moe.kernels and moe.router_dtype, as printed."""
        backends = Counter(self.compute.values())
        dispatch = f"{self.dispatch} beside shared experts" if self.shared_beside else self.dispatch
        layers = ", ".join(f"{name} ({count} layers)" for name, count in backends.items())
        router_dtype = self._router_dtype()
        return {
            "dispatch": dispatch,
            "compute": layers,
            "kernels": self.kernels.said,
            "router_dtype": router_dtype,
        }

    def _router_dtype(self) -> str:
        compute, routers = self.options.precision.compute, self.anatomy.routers
        cast = [name for group in self.groups if group.casts for name in group.parameters]
        if routers and self.uncast and not any(is_inside(name, router) for name in cast for router in routers):
            return "float32"
        if compute in ("float32", "float64"):
            return compute
        if self.options.moe.router_dtype == "float32":
            return f"{compute} (the family's code does not run with a float32 router)"
        return compute


def plan_shards(model: nn.Module, layout: Layout, options: ShardOptions, *, kept_in_fp32: KeptInFp32) -> ShardPlan:
    """Decide how `model` is sharded; every rank makes the same plan.

    Args:
        model: with its adapters, on meta or in memory.
        kept_in_fp32: returns by name whether the family computes with a parameter in fp32 under any compute dtype.

    Raises:
        InputError: a setting or a model that cannot be trained exactly; names the module or the key.

    Collectives: none.
    """
    anatomy, view, precision = describe(model), ModelView(model), options.precision
    compute = getattr(torch, precision.compute)
    asked, ep = options.moe.compute, layout.ep
    backends = {spec.name: choose_backend(spec, asked, compute, spec.num_experts // ep) for spec in anatomy.experts}
    expert_dims = plan_expert_dims(model, anatomy, layout)
    frozen = anatomy.routers if options.moe.router == "frozen" else ()
    tensor, context, cut = plan_axes(model, anatomy, layout, view, kept_in_fp32=kept_in_fp32, frozen=frozen)
    balance = refuse_model(model, anatomy, options.moe)
    refuse_dispatch(options.moe, layout, anatomy, compute)
    casts = refuse_dtypes(model, anatomy, precision, kept_in_fp32, view, options.moe.router_dtype)
    checkpointed = checkpointed_blocks(model, anatomy, options.activation_checkpointing, options.checkpoint_layers)
    if options.compile:
        refuse_compile(model, precision.frozen)
    splits, groups = plan_groups(model, anatomy, layout, tensor, expert_dims, casts.kept)
    # Under selective checkpointing a block's second run has the routed experts' result but not the shared expert's.
    overlaps = not options.compile and options.activation_checkpointing != "selective"
    gathered = [module for group in groups for module in group.modules]
    shared = shared_beside_rows(view, anatomy, layout, options.moe, gathered) if overlaps else {}
    return ShardPlan(
        layout=layout,
        options=options,
        anatomy=anatomy,
        balance=balance,
        dispatch=choose_dispatch(options.moe, layout),
        compute=backends,
        kernels=choose_kernels(model, anatomy, options.moe.kernels, compute),
        shared_beside=shared,
        frozen=frozen,
        tensor=tensor,
        context=context,
        cut=cut,
        splits=splits,
        groups=groups,
        cast_buffers=casts.buffers,
        wide_routers=casts.routers,
        packed=plan_frozen(model, anatomy, layout, splits, expert_dims, precision.frozen),
        checkpointed=checkpointed,
        compiled=tuple(compiled_parts(model, anatomy)) if options.compile else (),
        view=view,
    )


def plan_axes(
    model: nn.Module,
    anatomy: Anatomy,
    layout: Layout,
    view: ModelView,
    *,
    kept_in_fp32: KeptInFp32,
    frozen: Sequence[str] = (),
) -> tuple[TensorPlan, ContextPlan, Cut | None]:
    """Plan tp, cp and pp.

    Raises:
        InputError: the model does not support tp, cp or pp of this size.
    """
    refuse_axes(model, anatomy, layout)
    context = context_plan(model, anatomy, layout)
    tensor = tensor_plan(model, anatomy, layout.tp, kept_in_fp32)
    return tensor, context, plan_cut(model, anatomy, layout, view.meta, frozen) if layout.pp > 1 else None


def expert_traffic(model: nn.Module, options: ShardOptions, tokens: int) -> ExpertTraffic | None:
    """Estimate the traffic of the first experts layer, from which `ep: auto` is chosen.

    Args:
        model: with its adapters, on meta or in memory.
        tokens: the number of tokens in a micro-batch.

    Returns:
        The traffic; None if the model does not declare how many experts a token is sent to.

    Raises:
        InputError: experts that `precision.frozen` cannot keep packed.
    """
    anatomy, precision = describe(model), options.precision
    spec, formats = anatomy.experts[0], packed_formats(model, anatomy, precision.frozen)
    router = top_k_router(model, spec)
    if router is None:
        return None
    compute, reduce = BYTES_OF[precision.compute], max(BYTES_OF[precision.reduce], BYTES_OF[precision.compute])
    expert = 0.0
    for name in plan_expert_dims(model, anatomy, Layout()):
        if is_inside(name, spec.name):
            parameter, kind = model.get_parameter(name), formats.get(name)
            elements = parameter.numel() // spec.num_experts
            # Gathered in forward and again in backward; gradients are reduced once.
            expert += 2 * (elements * compute if kind is None else kind.bytes)
            expert += elements * reduce if parameter.requires_grad else 0

    moe = options.moe

    def can_have(layout: Layout) -> bool:
        try:
            dims, dispatch = plan_expert_dims(model, anatomy, layout), choose_dispatch(moe, layout)
        except InputError:
            return False
        # A dispatcher that the user has set needs ep > 1, and DeepEP has kernels for some numbers of ranks alone.
        asked = (layout.ep > 1 or moe.dispatch == "auto") and (dispatch != "deepep" or layout.ep in deepep.RANKS)
        return asked and all(dims.get(name, 0) == 0 for name in formats)

    # Forward and backward send each row twice; full recomputation repeats the dispatch.
    trips = 5 if options.activation_checkpointing == "full" else 4
    return ExpertTraffic(router, expert, spec.hidden_size * compute, tokens, trips, can_have)


def top_k_router(model: nn.Module, spec: ExpertsSpec) -> TopKRouter | None:
    """Return how many experts a token is sent to, and from how many groups; None if the model does not declare it."""
    text: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    groups, best = (getattr(text, key, None) for key in ("n_group", "topk_group"))
    limited = isinstance(groups, int) and isinstance(best, int) and 1 <= best < groups
    return (
        None if spec.top_k is None else TopKRouter(spec.num_experts, spec.top_k, *((groups, best) if limited else ()))
    )
