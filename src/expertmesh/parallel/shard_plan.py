"""Make all decisions about a model in a layout, the shard plan, from the model on meta, before any weight is read.

`plan_shards` decides and refuses; apply.py carries a plan out and decides nothing. All commands that need to know
whether a model can be trained (check, inspect, plan, train, verify, parallelize) use this file. Nothing communicates,
and the model does not change: trials run on its meta copy.

A parameter may be split over ep or tp, belongs to at most one FSDP2 group, and, if frozen, may stay packed in 8 or
4 bits (`precision.frozen`).
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from expertmesh.anatomy import Anatomy, ExpertsSpec, decoder_blocks, describe, head_of, is_inside, packable_linears
from expertmesh.config import MoeConfig, PrecisionConfig
from expertmesh.config.errors import InputError
from expertmesh.config.sections import BYTES_OF, TrainConfig
from expertmesh.distributed.layout import ExpertTraffic, Layout, TopKRouter
from expertmesh.experts import deepep
from expertmesh.experts.balance import Balance
from expertmesh.experts.install import ExpertsPlan, choose_backend, choose_kernels
from expertmesh.experts.lora_state import AdapterState, adapter_state
from expertmesh.experts.module_list import FusedExperts
from expertmesh.experts.placement import Placement
from expertmesh.introspection.stage_probe import Decoder
from expertmesh.parallel.checkpointing import (
    CheckpointedLayers,
    CheckpointingMode,
    checkpointed_blocks,
    checkpointing_mode,
)
from expertmesh.parallel.compiling import compiled_parts, refuse_compile
from expertmesh.parallel.context import ContextPlan, context_plan
from expertmesh.parallel.refusals import (
    choose_dispatch,
    choose_placement,
    plan_expert_dims,
    refuse_dispatch,
    refuse_dtypes,
    refuse_model,
    shared_beside_rows,
)
from expertmesh.parallel.sequence import refuse_blocks
from expertmesh.parallel.stages import Cut, find_decoder, plan_cut
from expertmesh.parallel.tensor_plan import TensorPlan, tensor_plan
from expertmesh.state.codes import PackedFormat, not_packed, quantised_format
from expertmesh.state.model_view import ModelView

KeptInFp32 = Callable[[str], bool]
View = Literal["dense", "dense_tp", "expert"]


@dataclass(frozen=True, slots=True)
class Split:
    """The split of a parameter before FSDP2 shards it."""

    axis: Literal["ep", "tp"]
    """The mesh axis over which it is split."""
    dim: int
    """The dim that is split into equal parts."""


@dataclass(frozen=True, slots=True)
class Group:
    """One FSDP2 group: the modules of one `fully_shard` call and the parameters that it manages."""

    modules: tuple[str, ...]
    """Names of the modules; "" is the root."""
    view: View
    """The mesh that it is sharded over, of `Mesh.sharding`."""
    casts_parameters: bool = True
    """True if its parameters are cast to the compute dtype, False if they are used in float32."""
    dims: Mapping[str, int] = field(default_factory=dict)
    """The dim that is sharded, by parameter; dim 0 for parameters that are not listed."""
    parameters: tuple[str, ...] = ()
    """Names of the parameters that it manages."""


class Dtypes(NamedTuple):
    """The dtypes of a sharded model."""

    master: torch.dtype
    """The parameters that the optimizer updates."""
    compute: torch.dtype
    """Gathered parameters in forward and backward."""
    reduce: torch.dtype
    """Gradients while ranks sum them."""


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
    placement: Placement | None = None
    """The places of experts instead of what `moe.placement` names."""
    by_layer: bool = False
    """True to refuse a model whose blocks cannot run one by one."""

    @classmethod
    def of(
        cls,
        precision: PrecisionConfig,
        moe: MoeConfig | None,
        activation_checkpointing: CheckpointingMode | bool,
        checkpoint_layers: CheckpointedLayers,
        compile: bool,
        by_layer: bool = False,
    ) -> "ShardOptions":
        """Build options from the arguments of the Python interface, where True means "full" and False "none"."""
        mode, moe = checkpointing_mode(activation_checkpointing), moe or MoeConfig()
        layers = checkpoint_layers if isinstance(checkpoint_layers, str | int) else list(checkpoint_layers)
        # Values are refused as those of a file are.
        TrainConfig(activation_checkpointing=mode, checkpoint_layers=layers)  # type: ignore[arg-type]
        if moe.placement == "balanced":
            raise InputError(
                "moe.placement: balanced looks at the data of a run, which `expertmesh train` has; give a file that "
                "`expertmesh plan --placement` has written",
                key="moe.balanced-placement-of-a-run",
            )
        return cls(precision, moe, mode, layers, compile, by_layer=by_layer)


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """The sharding of one model in one layout. All names are those of the full model, with all pipeline stages."""

    layout: Layout
    """The sizes of the mesh axes."""
    options: ShardOptions
    """The user's settings."""
    anatomy: Anatomy
    """The anatomy of the full model."""
    balance: Balance
    """Balancing of the routing, in words."""
    experts: ExpertsPlan
    """The work of expert layers."""
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
    packed: Mapping[str, PackedFormat]
    """The format of each frozen parameter that stays in 8 or 4 bits."""
    checkpointed: tuple[str, ...]
    """The blocks that are recomputed in backward."""
    compiled: tuple[str, ...]
    """The parts that are compiled."""
    adapters: AdapterState | None = field(repr=False)
    """The state that its adapters share."""
    view: ModelView = field(repr=False)
    """The view that planning used. Only its `meta` may be read: `tensors` would keep what sharding replaces alive."""

    @cached_property
    def decoder(self) -> Decoder:
        """The values that blocks pass on, proven on meta at the first access. Raises `CannotCut`."""
        return find_decoder(self.view.meta, self.anatomy, decoder_blocks(self.anatomy))

    @cached_property
    def expert_orders(self) -> dict[str, tuple[int, ...]]:
        """The experts' placement by parameter, adapters included."""
        split = [name for name, split in self.splits.items() if split.axis == "ep"]
        orders = self.experts.placement.orders
        return {name: order for module, order in orders.items() for name in split if is_inside(name, module)}

    @property
    def dtypes(self) -> Dtypes:
        """The dtypes of the section `precision`."""
        precision = self.options.precision
        return Dtypes(*(getattr(torch, name) for name in (precision.params, precision.compute, precision.reduce)))

    @property
    def uncast(self) -> frozenset[str]:
        """The parameters that forward and backward use in float32 under a narrower compute dtype."""
        return frozenset(name for group in self.groups if not group.casts_parameters for name in group.parameters)

    @property
    def resolved(self) -> dict[str, str]:
        """The resolved moe.dispatch, moe.compute, moe.kernels and moe.router_dtype, as printed."""
        layers = ", ".join(f"{name} ({count} layers)" for name, count in Counter(self.experts.compute.values()).items())
        compute, routers = self.options.precision.compute, self.anatomy.routers
        cast = [name for group in self.groups if group.casts_parameters for name in group.parameters]
        router_dtype: str = compute
        if routers and self.uncast and not any(is_inside(name, *routers) for name in cast):
            router_dtype = "float32"
        elif compute not in ("float32", "float64") and self.options.moe.router_dtype == "float32":
            router_dtype = f"{compute} (the family's code does not run with a float32 router)"
        return {
            "dispatch": f"{self.experts.dispatch}{' beside shared experts' if self.experts.shared else ''}",
            "compute": layers,
            "kernels": self.experts.kernels.text,
            "router_dtype": router_dtype,
        }


def plan_shards(model: nn.Module, layout: Layout, options: ShardOptions, *, kept_in_fp32: KeptInFp32) -> ShardPlan:
    """Decide how `model` is sharded; every rank makes the same plan.

    Args:
        model: with its adapters, on meta or in memory.
        kept_in_fp32: returns by name whether the family computes with a parameter in fp32 under any compute dtype.

    Raises:
        InputError: a setting or a model that cannot be trained exactly; names the module or the key.
    """
    anatomy, view, precision, moe = describe(model), ModelView(model), options.precision, options.moe
    compute = getattr(torch, precision.compute)
    # 1. What the model and the settings alone refuse; dtypes, and the dims that efsdp shards.
    balance = refuse_model(model, anatomy, moe)
    refuse_dispatch(moe, layout, anatomy, compute)
    expert_dims = plan_expert_dims(model, anatomy, layout)
    policy = refuse_dtypes(view, anatomy, precision, kept_in_fp32, moe.router_dtype)
    # 2. tp, cp and pp; then what ep and tp split, and the groups of FSDP2.
    frozen = anatomy.routers if moe.router == "frozen" else ()
    tensor, context, cut = plan_axes(view, anatomy, layout, kept_in_fp32=kept_in_fp32, frozen=frozen)
    splits, groups = plan_groups(model, anatomy, layout, tensor, expert_dims, policy.in_fp32)
    packed = plan_frozen(view, anatomy, layout, splits, expert_dims, precision.frozen)
    # 3. Expert layers. A shared expert must not be gathered separately; under selective checkpointing a block's second
    # run has the routed experts' result but not the shared expert's.
    overlaps = not options.compile and options.activation_checkpointing != "selective"
    gathered = [module for group in groups for module in group.modules]
    experts = ExpertsPlan(
        dispatch=choose_dispatch(moe, layout),
        shared=shared_beside_rows(view, anatomy, layout, moe, gathered) if overlaps else {},
        placement=options.placement or choose_placement(model, moe, layout, anatomy),
        compute={
            spec.name: choose_backend(spec, moe.compute, compute, spec.num_experts // layout.ep + moe.replicas)
            for spec in anatomy.experts
        },
        kernels=choose_kernels(model, anatomy, moe.kernels, compute),
    )
    # 4. Recomputation and compilation.
    adapters = adapter_state(model)
    if options.compile:
        refuse_compile(adapters, precision.frozen)
    return ShardPlan(
        layout=layout,
        options=options,
        anatomy=anatomy,
        balance=balance,
        experts=experts,
        frozen=frozen,
        tensor=tensor,
        context=context,
        cut=cut,
        splits=splits,
        groups=groups,
        cast_buffers=policy.buffers,
        wide_routers=policy.routers,
        packed=packed,
        checkpointed=checkpointed_blocks(model, anatomy, options.activation_checkpointing, options.checkpoint_layers),
        compiled=tuple(compiled_parts(model, anatomy)) if options.compile else (),
        adapters=adapters,
        view=view,
    )


def plan_axes(
    view: ModelView, anatomy: Anatomy, layout: Layout, *, kept_in_fp32: KeptInFp32, frozen: Sequence[str] = ()
) -> tuple[TensorPlan, ContextPlan, Cut | None]:
    """Plan tp, cp and pp.

    Raises:
        InputError: the model does not support tp, cp or pp of this size.
    """
    model = view.module
    refuse_blocks(model, anatomy, layout)
    context = context_plan(model, anatomy, layout)
    tensor = tensor_plan(model, anatomy, layout.tp, kept_in_fp32)
    return tensor, context, plan_cut(view.meta, anatomy, layout, frozen) if layout.pp > 1 else None


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
    spec, formats = anatomy.experts[0], packed_formats(ModelView(model), anatomy, precision.frozen)
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
        runs = (layout.ep > 1 or moe.dispatch == "auto") and (dispatch != "deepep" or layout.ep in deepep.RANKS)
        return runs and all(dims.get(name, 0) == 0 for name in formats)

    # Forward and backward send each row twice; full recomputation repeats the dispatch.
    trips = 5 if options.activation_checkpointing == "full" else 4
    return ExpertTraffic(router, expert, spec.hidden_size * compute, tokens, trips, can_have)


def top_k_router(model: nn.Module, spec: ExpertsSpec) -> TopKRouter | None:
    """Return how many experts a token is sent to, and from how many groups; None if the model does not declare it."""
    text: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    groups, best = (getattr(text, key, None) for key in ("n_group", "topk_group"))
    limited = isinstance(groups, int) and isinstance(best, int) and 1 <= best < groups
    if spec.top_k is None:
        return None
    return TopKRouter(spec.num_experts, spec.top_k, *((groups, best) if limited else ()))


def plan_groups(
    model: nn.Module,
    anatomy: Anatomy,
    layout: Layout,
    tensor: TensorPlan,
    expert_dims: Mapping[str, int],
    uncast: Mapping[str, Sequence[str]],
) -> tuple[dict[str, Split], tuple[Group, ...]]:
    """Plan the splits over ep and tp, and the FSDP2 groups.

    Args:
        expert_dims: the result of `plan_expert_dims`.
        uncast: the parameters that are never cast, by the module whose call gathers them.

    Returns:
        (the split by parameter, the groups in the order of their `fully_shard` calls, the root last).
    """
    splits = dict.fromkeys(expert_dims, Split("ep", 0))
    for part in tensor.parts:
        if part.is_split:
            dims = part.parameter_dims(model.get_submodule(part.name))
            splits |= {f"{part.name}.{leaf}": Split("tp", dim) for leaf, dim in dims.items()}
    groups = list(_groups(model, anatomy, layout, tensor, expert_dims, tuple(uncast)))
    # Each parameter belongs to the innermost group with its view and dtype policy.
    in_fp32 = {name for names in uncast.values() for name in names}
    kinds = [(group.view, group.casts_parameters) for group in groups]
    places = {(kinds[number], module): number for number, group in enumerate(groups) for module in group.modules}
    members: list[list[str]] = [[] for _ in groups]
    # List a tied parameter under both of its names: a pipeline stage may hold only one of the two.
    for name, _ in model.named_parameters(remove_duplicate=False):
        kind, module = (view_of(splits.get(name)), name not in in_fp32), name
        while module and (kind, module) not in places:
            module = module.rpartition(".")[0]
        if (kind, module) in places:
            members[places[kind, module]].append(name)
    return splits, tuple(replace(each, parameters=tuple(names)) for each, names in zip(groups, members, strict=True))


def view_of(split: Split | None) -> View:
    """Return the mesh over which FSDP2 shards a parameter with this split; None is a parameter that is not split."""
    if split is None:
        return "dense"
    return "expert" if split.axis == "ep" else "dense_tp"


def _groups(
    model: nn.Module,
    anatomy: Anatomy,
    layout: Layout,
    tensor: TensorPlan,
    expert_dims: Mapping[str, int],
    uncast: Sequence[str],
) -> Iterator[Group]:
    """Yield the groups in the order of their `fully_shard` calls, without their parameters.

    The order is: experts; each block; the input embedding; the parts that tp splits; parameters that are never cast, by
    block; the remainder. Parts that tp splits, mixtures that contain their routers, and modules with parameters that
    are not cast come after their blocks: those modules also hold other parameters, which belong to the group of the
    block, and FSDP2 does not look into a module that has a group already.
    """
    for spec in anatomy.experts:
        if spec.post_norm:
            # Shared by all experts, so dense: its gradient is summed over all ranks, not over efsdp alone.
            yield Group((f"{spec.name}.post_expert_norm",), "dense")
        if spec.call != "sorted":
            yield from _expert_groups(spec, layout, expert_dims)
    yield from (Group((block,), "dense") for block in anatomy.blocks)
    for spec in anatomy.experts:
        if spec.call == "sorted":
            yield from _expert_groups(spec, layout, expert_dims)
    names = {module: name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), head_of(model)  # type: ignore[operator]
    tied = head is not None and getattr(head, "weight", None) is embedding.weight
    if not tied or layout.pp > 1:  # stages have one of the two
        yield Group((names[embedding],), "dense")
    yield from (Group((part.name,), "dense_tp") for part in tensor.parts if part.is_split)
    # The loss calls the head while the root is gathered, so a head that is not cast makes the root's group one.
    casts_root = head is None or names[head] not in uncast
    others = [name for name in uncast if casts_root or name != names[head]]
    for _, inside in itertools.groupby(
        others, key=lambda name: next((block for block in anatomy.blocks if is_inside(name, block)), name)
    ):
        yield Group(tuple(inside), "dense", casts_parameters=False)
    if not casts_root:
        grouped = (*anatomy.blocks, *uncast, names[embedding])
        others = [name for name, _ in model.named_parameters() if not is_inside(name, *grouped)]
        yield from (Group((module,), "dense") for module in dict.fromkeys(name.rpartition(".")[0] for name in others))
    yield Group(("",), "dense", casts_parameters=casts_root)


def _expert_groups(spec: ExpertsSpec, layout: Layout, expert_dims: Mapping[str, int]) -> Iterator[Group]:
    """Yield the group of one experts module, if it needs one."""
    # With one rank there is nothing to gather or reduce, but FSDP2 would still copy parameters and gradients. Weights
    # in host memory need the copy.
    if layout.replicate * layout.efsdp > 1 or layout.offload == "experts":
        dims = {name: dim for name, dim in expert_dims.items() if is_inside(name, spec.name)}
        yield Group((spec.name,), "expert", dims=dims)


def plan_frozen(
    view: ModelView,
    anatomy: Anatomy,
    layout: Layout,
    splits: Mapping[str, Split],
    expert_dims: Mapping[str, int],
    frozen: str | None,
) -> dict[str, PackedFormat]:
    """Return the format of each parameter that stays packed, by name.

    Args:
        expert_dims: the dim that efsdp shards, by parameter.
        frozen: the value of `precision.frozen`. Formats for `as_published` were read from the headers of the files
            before (weights/quantised/published.py).

    Raises:
        InputError: a parameter cannot stay packed, or `parallel.offload` is set without packed experts.
    """
    if frozen is None:
        if layout.offload != "none":
            raise InputError(
                f"parallel.offload: {layout.offload}: no experts stay packed; give precision.frozen, with lora",
                key="layout.offload-needs-frozen",
            )
        return {}
    formats = packed_formats(view, anatomy, frozen)
    for name, kind in formats.items():
        parameter = view.module.get_parameter(name)
        if parameter.requires_grad:
            raise not_packed(frozen, f"{name} trains; add lora, or set precision.frozen to null")
        if kind.by_rows:
            _refuse_cut_rows(frozen, name, parameter.shape, kind, layout, splits.get(name))
        elif expert_dims[name] != 0:
            raise not_packed(
                frozen,
                f"efsdp cuts {name} inside its experts, which stay whole when they are packed; choose parallel sizes "
                "at which ep * efsdp divides the number of experts",
            )
    return formats


def _refuse_cut_rows(
    frozen: str, name: str, shape: torch.Size, kind: PackedFormat, layout: Layout, split: Split | None
) -> None:
    """Raise `InputError` unless all ranks get equally many complete rows, and tp cuts no quantisation block."""
    rows, columns = shape
    rows = rows // layout.tp if split is not None and split.dim == 0 else rows
    # FSDP2 shards parameters that tp does not split over the tp ranks too.
    ranks = layout.fsdp * layout.cp * (1 if split is not None else layout.tp)
    if rows % ranks:
        raise not_packed(frozen, f"{ranks} ranks cannot share the {rows} rows of {name} evenly; choose other sizes")
    part = columns // layout.tp
    if split is not None and split.dim == 1 and (part % 2 or (kind.grid[1] > 1 and part % kind.block[1])):
        raise not_packed(
            frozen,
            f"tp {layout.tp} cuts {name} inside its blocks of {kind.block[1]} columns, of which it has {columns}; "
            "choose a smaller tp",
        )


def packed_formats(view: ModelView, anatomy: Anatomy, frozen: str | None) -> dict[str, PackedFormat]:
    """Return the format of each weight that `precision.frozen` keeps packed, by name.

    Raises:
        InputError: the experts of the model cannot be packed.
    """
    if frozen is None:
        return {}
    if frozen != "as_published":
        return quantised_formats(view.module, anatomy, frozen)
    formats: Mapping[str, PackedFormat] | None = view.attached.frozen_formats
    if formats is None:
        raise not_packed(frozen, "a model in memory has no files with codes; choose nf4, mxfp4, nvfp4 or float8")
    return dict(formats)


def quantised_formats(model: nn.Module, anatomy: Anatomy, frozen: str) -> dict[str, PackedFormat]:
    """Return the format of each weight that is quantised to `frozen`: routed experts, and linear layers of the blocks.

    Raises:
        InputError: experts that cannot be quantised.
    """
    formats = {}
    for spec in anatomy.experts:
        if spec.flat_gate is not None or isinstance(model.get_submodule(spec.name), FusedExperts):
            raise not_packed(frozen, f"{spec.name} does not hold its experts as one stack of matrices")
        for name in (f"{spec.name}.{spec.up}", f"{spec.name}.{spec.down}"):
            rows, columns = model.get_parameter(name).shape[1:]
            if spec.transposed:
                rows, columns = columns, rows
            if columns % 2:
                raise not_packed(
                    frozen, f"{name} has {columns} columns, and a byte holds the codes of two; choose float8"
                )
            formats[name] = quantised_format(frozen, rows, columns, transposed=spec.transposed)
    for layer in packable_linears(model, anatomy):
        rows, columns = model.get_parameter(f"{layer}.weight").shape
        # In 4-bit formats a byte holds two columns; a linear layer with an odd number of columns stays unpacked.
        if columns % 2 == 0:
            formats[f"{layer}.weight"] = quantised_format(frozen, rows, columns, by_rows=True)
    return formats
