"""The shard plan: all that is decided about a model in a layout, from the model on meta, before any weight is read.

`plan_shards` decides and refuses; `fsdp.shard` carries a plan out and decides nothing. Whoever asks whether a model can
be trained so (check, inspect, plan, train, verify, parallelize) asks here. Nothing communicates, and the model stays as
it is: what has to be tried runs on its meta twin.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from expertmesh.anatomy import Anatomy, ExpertsSpec, describe, is_inside
from expertmesh.config import MoeConfig, PrecisionConfig
from expertmesh.config.errors import InputError
from expertmesh.config.sections import BYTES_OF
from expertmesh.distributed.expert_traffic import ExpertTraffic, TopKRouter
from expertmesh.distributed.layout import Layout
from expertmesh.experts.dispatchers import deepep
from expertmesh.experts.install import Kernels, choose_backend, choose_kernels
from expertmesh.parallel.checkpointing import (
    CheckpointedLayers,
    CheckpointingMode,
    checkpointed_blocks,
    checkpointing_mode,
)
from expertmesh.parallel.compiling import compiled_parts, refuse_compile
from expertmesh.parallel.context.plan import ContextPlan, context_plan
from expertmesh.parallel.groups import Group, Split, packed_formats, plan_expert_dims, plan_frozen, plan_groups
from expertmesh.parallel.pipeline import Cut, plan_cut
from expertmesh.parallel.refusals import (
    choose_dispatch,
    refuse_axes,
    refuse_dispatch,
    refuse_dtypes,
    refuse_model,
    shared_beside_rows,
)
from expertmesh.parallel.tensor_plan import TensorPlan, tensor_plan
from expertmesh.state.stage_view import MetaTwin

if TYPE_CHECKING:
    from expertmesh.experts.balance import Balance
    from expertmesh.state.packed_format import PackedFormat

KeptInFp32 = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """What a user says about sharding, beside the layout. `auto` is left in `moe` alone."""

    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    activation_checkpointing: CheckpointingMode = "none"
    checkpoint_layers: CheckpointedLayers = "all"
    compile: bool = False

    @classmethod
    def of(
        cls,
        precision: PrecisionConfig,
        moe: MoeConfig | None,
        activation_checkpointing: CheckpointingMode | bool,
        checkpoint_layers: CheckpointedLayers,
        compile: bool,
    ) -> "ShardOptions":
        """As the Python interface has them: True stands for "full", False for "none"."""
        mode = checkpointing_mode(activation_checkpointing)
        return cls(precision, moe or MoeConfig(), mode, checkpoint_layers, compile)


@dataclass(frozen=True, slots=True, eq=False)
class ShardPlan:
    """How one model is sharded in one layout. All names are of the whole model, of all pipeline stages.

    `compute`: the backend of each experts module, `shared_beside` a shared expert that computes while its rows travel.
    `frozen` are the routers that are not trained, `checkpointed` the blocks that are recomputed in backward, `compiled`
    the parts that are compiled. `splits` are those parameters that ep or tp splits. `groups` are in the order of their
    `fully_shard` calls, the root last. `cast_buffers` are modules whose buffers are in the compute dtype while they
    run, `wide_routers` routers whose inputs are cast to fp32.
    `packed` are the frozen parameters that stay in 8 or 4 bits.
    """

    layout: Layout
    options: ShardOptions
    anatomy: Anatomy
    balance: "Balance"
    dispatch: str
    compute: Mapping[str, str]
    kernels: Kernels
    shared_beside: Mapping[str, str]
    frozen: tuple[str, ...]
    tensor: TensorPlan
    context: ContextPlan
    cut: Cut | None
    splits: Mapping[str, Split]
    groups: tuple[Group, ...]
    cast_buffers: tuple[str, ...]
    wide_routers: tuple[str, ...]
    packed: "Mapping[str, PackedFormat]"
    checkpointed: tuple[str, ...]
    compiled: tuple[str, ...]
    twin: MetaTwin = field(repr=False)

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """(of masters, of compute, of gradient reduction)."""
        precision = self.options.precision
        return getattr(torch, precision.params), getattr(torch, precision.compute), getattr(torch, precision.reduce)

    @property
    def uncast(self) -> frozenset[str]:
        """The parameters that forward and backward use in float32 under a narrower compute dtype."""
        return frozenset(name for group in self.groups if not group.casts for name in group.parameters)

    @property
    def resolved(self) -> dict[str, str]:
        """What moe.dispatch, moe.compute, moe.kernels and moe.router_dtype became, to be printed."""
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
    """Decide how `model` (with its adapters; on meta or in memory) is sharded. Every rank comes to the same plan.

    `kept_in_fp32` says by name which parameters the family computes with in fp32 whatever the compute dtype. Raises
    `InputError`, naming the module or the key, for whatever cannot be trained exactly.
    """
    anatomy, twin, precision = describe(model), MetaTwin(model), options.precision
    compute = getattr(torch, precision.compute)
    asked, ep = options.moe.compute, layout.ep
    backends = {spec.name: choose_backend(spec, asked, compute, spec.num_experts // ep) for spec in anatomy.experts}
    expert_dims = plan_expert_dims(model, anatomy, layout)
    frozen = anatomy.routers if options.moe.router == "frozen" else ()
    tensor, context, cut = plan_axes(model, anatomy, layout, twin, kept_in_fp32=kept_in_fp32, frozen=frozen)
    balance = refuse_model(model, anatomy, options.moe)
    refuse_dispatch(options.moe, layout, anatomy, compute)
    casts = refuse_dtypes(model, anatomy, precision, kept_in_fp32, twin, options.moe.router_dtype)
    checkpointed = checkpointed_blocks(model, anatomy, options.activation_checkpointing, options.checkpoint_layers)
    if options.compile:
        refuse_compile(model, precision.frozen)
    splits, groups = plan_groups(model, anatomy, layout, tensor, expert_dims, casts.kept)
    overlaps = not options.compile and options.activation_checkpointing != "selective"
    gathered = [module for group in groups for module in group.modules]
    shared = shared_beside_rows(twin, anatomy, layout, options.moe, gathered) if overlaps else {}
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
        twin=twin,
    )


def plan_axes(
    model: nn.Module,
    anatomy: Anatomy,
    layout: Layout,
    twin: MetaTwin,
    *,
    kept_in_fp32: KeptInFp32,
    frozen: Sequence[str] = (),
) -> tuple[TensorPlan, ContextPlan, Cut | None]:
    """What tp and cp split, and where pp cuts. Raises `InputError` for tp, cp or pp that the model cannot have."""
    refuse_axes(model, anatomy, layout)
    context = context_plan(model, anatomy, layout)
    tensor = tensor_plan(model, anatomy, layout.tp, kept_in_fp32)
    return tensor, context, plan_cut(model, anatomy, layout, twin.module, frozen) if layout.pp > 1 else None


def expert_traffic(model: nn.Module, options: ShardOptions, tokens: int) -> ExpertTraffic | None:
    """What `ep: auto` weighs for `model` (with its adapters; on meta or in memory) and micro-batches of `tokens`.

    By its first layer of experts; None where the model does not say how many experts a token is sent to. `InputError`
    for experts that `precision.frozen` cannot keep packed.
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
            expert += 2 * (elements * compute if kind is None else kind.bytes)
            expert += elements * reduce if parameter.requires_grad else 0

    moe = options.moe

    def can_have(layout: Layout) -> bool:
        try:
            dims, dispatch = plan_expert_dims(model, anatomy, layout), choose_dispatch(moe, layout)
        except InputError:
            return False
        # What the user has asked for needs rows that are sent, some of it a kernel.
        asked = (layout.ep > 1 or moe.dispatch == "auto") and (dispatch != "deepep" or layout.ep in deepep.RANKS)
        return asked and all(dims.get(name, 0) == 0 for name in formats)

    trips = 5 if options.activation_checkpointing == "full" else 4
    return ExpertTraffic(router, expert, spec.hidden_size * compute, tokens, trips, can_have)


def top_k_router(model: nn.Module, spec: ExpertsSpec) -> TopKRouter | None:
    """How many experts a token takes, and of how many groups; None where the model does not say."""
    text: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    groups, best = (getattr(text, key, None) for key in ("n_group", "topk_group"))
    limited = isinstance(groups, int) and isinstance(best, int) and 1 <= best < groups
    return (
        None if spec.top_k is None else TopKRouter(spec.num_experts, spec.top_k, *((groups, best) if limited else ()))
    )
