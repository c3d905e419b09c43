"""The shard plan: all that is decided about a model in a layout, from the model on meta, before any weight is read.

`plan_shards` decides and refuses; `fsdp.shard` carries a plan out and decides nothing. Whoever asks whether a model can
be trained so (check, inspect, plan, train, verify, parallelize) asks here. Nothing communicates, and the model stays as
it is: what has to be tried runs on its meta twin.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import nn

from expertmesh.anatomy import Anatomy, describe, is_adapter, is_inside
from expertmesh.config import MoeConfig, PrecisionConfig
from expertmesh.distributed.layout import Layout
from expertmesh.experts.balance import Balance
from expertmesh.experts.install import choose_backend
from expertmesh.experts.lora_state import adapter_state
from expertmesh.introspection.compute_dtype import refuse_compute, uncast_modules
from expertmesh.parallel.checkpointing import CheckpointedLayers, CheckpointingMode, checkpointed_blocks
from expertmesh.parallel.compiling import compiled_parts, refuse_compile
from expertmesh.parallel.context import refuse_context
from expertmesh.parallel.pipeline import Cut, plan_cut
from expertmesh.parallel.refusals import adapter_shard_dim, expert_shard_dim, refuse_mixed_dtypes, refuse_model
from expertmesh.parallel.sequence import refuse_blocks
from expertmesh.parallel.tensor_plan import TensorPlan, tensor_plan
from expertmesh.state.stage_view import meta_twin

KeptInFp32 = Callable[[str], bool]
View = Literal["dense", "dense_tp", "expert"]


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """What a user says about sharding, beside the layout. `auto` is left in `moe` alone."""

    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    activation_checkpointing: CheckpointingMode = "none"
    checkpoint_layers: CheckpointedLayers = "all"
    compile: bool = False


@dataclass(frozen=True, slots=True)
class Split:
    """How a parameter is split before FSDP2 shards it: into equal parts of `dim` over `axis`."""

    axis: Literal["ep", "tp"]
    dim: int


@dataclass(frozen=True, slots=True)
class Group:
    """One FSDP2 group: the modules of one `fully_shard` call and the parameters that it manages, by name.

    `view` is the mesh that it is sharded over (`Mesh.dense_shard` and so on); `casts`: whether parameters are cast to
    the compute dtype; `dims`: what is not sharded on dim 0, by parameter.
    """

    modules: tuple[str, ...]
    view: View
    casts: bool = True
    dims: Mapping[str, int] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()


class MetaTwin:
    """The twin on meta of a model, made when it is first needed. Whoever runs or changes it puts it back."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @cached_property
    def module(self) -> nn.Module:
        return meta_twin(self._model)


@dataclass(frozen=True, slots=True, eq=False)
class ShardPlan:
    """How one model is sharded in one layout. All names are of the whole model, of all pipeline stages.

    `compute`: the backend of each experts module. `frozen` are the routers that are not trained, `checkpointed` the
    blocks that are recomputed in backward, `compiled` the parts that are compiled. `splits` are those parameters that
    ep or tp splits. `groups` are in the order of their `fully_shard` calls, the root last.
    """

    layout: Layout
    options: ShardOptions
    anatomy: Anatomy
    balance: Balance
    dispatch: str
    compute: Mapping[str, str]
    frozen: tuple[str, ...]
    tensor: TensorPlan
    cut: Cut | None
    splits: Mapping[str, Split]
    groups: tuple[Group, ...]
    checkpointed: tuple[str, ...]
    compiled: tuple[str, ...]
    twin: MetaTwin = field(repr=False)

    def view_of(self, parameter: str) -> View:
        """Over which mesh a parameter is sharded by FSDP2."""
        return _view(self.splits.get(parameter))

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """(of masters, of compute, of gradient reduction)."""
        precision = self.options.precision
        return getattr(torch, precision.params), getattr(torch, precision.compute), getattr(torch, precision.reduce)

    @property
    def resolved(self) -> dict[str, str]:
        """What `auto` of moe.dispatch and moe.compute became, to be printed."""
        backends = Counter(self.compute.values())
        layers = ", ".join(f"{name} ({count} layers)" for name, count in backends.items())
        return {"dispatch": self.dispatch, "compute": layers}


def plan_shards(model: nn.Module, layout: Layout, options: ShardOptions, *, kept_in_fp32: KeptInFp32) -> ShardPlan:
    """Decide how `model` (with its adapters; on meta or in memory) is sharded. Every rank comes to the same plan.

    `kept_in_fp32` says by name which parameters the family computes with in fp32 whatever the compute dtype. Raises
    `InputError`, naming the module or the key, for whatever cannot be trained exactly.
    """
    anatomy, twin, precision = describe(model), MetaTwin(model), options.precision
    master, compute = (getattr(torch, name) for name in (precision.params, precision.compute))
    backends = {spec.name: choose_backend(spec, options.moe.compute, compute) for spec in anatomy.experts}
    dims = dict(_expert_dims(model, anatomy, layout))
    frozen = anatomy.routers if options.moe.router == "frozen" else ()
    tensor, cut = plan_axes(model, anatomy, layout, twin, kept_in_fp32=kept_in_fp32, frozen=frozen)
    balance = refuse_model(model, anatomy, options.moe)
    adapted = adapter_state(model) is not None
    refuse_mixed_dtypes(model, master, compute if adapted else master, kept_in_fp32)
    uncast: list[str] = []
    if compute != master:
        uncast = uncast_modules(model, anatomy, kept_in_fp32)
        refuse_compute(model, anatomy, compute, kept_in_fp32, twin.module)
    checkpointed = checkpointed_blocks(model, anatomy, options.activation_checkpointing, options.checkpoint_layers)
    if options.compile:
        refuse_compile(model, layout)
    splits = _splits(model, anatomy, tensor)
    groups = list(_groups(model, anatomy, layout, tensor, dims, uncast))
    dispatch = "all_to_all" if options.moe.dispatch == "auto" else options.moe.dispatch
    return ShardPlan(
        layout=layout,
        options=options,
        anatomy=anatomy,
        balance=balance,
        dispatch="local" if layout.ep == 1 else dispatch,
        compute=backends,
        frozen=frozen,
        tensor=tensor,
        cut=cut,
        splits=splits,
        groups=tuple(_with_parameters(model, groups, splits)),
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
) -> tuple[TensorPlan, Cut | None]:
    """What tp splits and where pp cuts, if it does. Raises `InputError` for tp, cp or pp that the model cannot have."""
    refuse_blocks(model, anatomy, layout)
    tensor = tensor_plan(model, anatomy, layout.tp, kept_in_fp32)
    refuse_context(model, anatomy, layout)
    return tensor, plan_cut(model, anatomy, layout, twin.module, frozen) if layout.pp > 1 else None


def _expert_dims(model: nn.Module, anatomy: Anatomy, layout: Layout) -> Iterator[tuple[str, int]]:
    """The dim of each expert parameter, adapters' too, that efsdp shards. Raises `InputError` where there is none."""
    for spec in anatomy.experts:
        dim = expert_shard_dim(spec, layout)
        yield from ((f"{spec.name}.{name}", dim) for name in spec.parameters)
        for name, parameter in model.get_submodule(spec.name).named_parameters(recurse=False):
            if is_adapter(name):
                yield f"{spec.name}.{name}", adapter_shard_dim(name, parameter, layout)


def _splits(model: nn.Module, anatomy: Anatomy, tensor: TensorPlan) -> dict[str, Split]:
    splits: dict[str, Split] = {}
    for spec in anatomy.experts:
        own = model.get_submodule(spec.name).named_parameters(recurse=False)
        leaves = [*spec.parameters, *(name for name, _ in own if is_adapter(name))]
        splits |= {f"{spec.name}.{leaf}": Split("ep", 0) for leaf in leaves}
    for part in tensor.parts:
        if part.is_split:
            dims = part.parameter_dims(model.get_submodule(part.name))
            splits |= {f"{part.name}.{leaf}": Split("tp", dim) for leaf, dim in dims.items()}
    return splits


def _groups(
    model: nn.Module,
    anatomy: Anatomy,
    layout: Layout,
    tensor: TensorPlan,
    expert_dims: Mapping[str, int],
    uncast: Sequence[str],
) -> Iterator[Group]:
    """Experts; what is never cast, by block; each block; the input embedding; parts that tp splits; what is left.

    Parts that tp splits come behind their blocks: those have the whole parameters of a part, and FSDP2 would not look
    into a module that has a group.
    """
    for spec in anatomy.experts:
        if spec.post_norm:
            # Shared by all experts, so dense: its gradient is summed over all ranks, not over efsdp alone.
            yield Group((f"{spec.name}.post_expert_norm",), "dense")
        # With one rank there is nothing to gather or reduce; FSDP2 would copy parameters and gradients all the same.
        if layout.replicate * layout.efsdp > 1:
            dims = {name: dim for name, dim in expert_dims.items() if is_inside(name, spec.name)}
            yield Group((spec.name,), "expert", dims=dims)
    for _, names in itertools.groupby(
        uncast, key=lambda name: next((block for block in anatomy.blocks if is_inside(name, block)), name)
    ):
        yield Group(tuple(names), "dense", casts=False)
    yield from (Group((block,), "dense") for block in anatomy.blocks)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    tied = head is not None and getattr(head, "weight", None) is embedding.weight
    if not tied or layout.pp > 1:  # stages have one of the two
        yield Group((next(name for name, module in model.named_modules() if module is embedding),), "dense")
    yield from (Group((part.name,), "dense_tp") for part in tensor.parts if part.is_split)
    yield Group(("",), "dense")


def _with_parameters(model: nn.Module, groups: Sequence[Group], splits: Mapping[str, Split]) -> Iterator[Group]:
    """Each parameter belongs to the innermost group of its view around it."""
    by_place = {(group.view, module): number for number, group in enumerate(groups) for module in group.modules}
    members: list[list[str]] = [[] for _ in groups]
    # A tied parameter under both of its names: pipeline stages have one of the two.
    for name, _ in model.named_parameters(remove_duplicate=False):
        view, module = _view(splits.get(name)), name
        while module and (view, module) not in by_place:
            module = module.rpartition(".")[0]
        if (view, module) in by_place:
            members[by_place[view, module]].append(name)
    for group, names in zip(groups, members, strict=True):
        yield Group(group.modules, group.view, group.casts, group.dims, tuple(names))


def _view(split: Split | None) -> View:
    if split is None:
        return "dense"
    return "expert" if split.axis == "ep" else "dense_tp"
