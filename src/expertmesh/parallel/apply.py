"""Carry out a shard plan: compare the ranks' copies, shard, set up recomputation in backward, compile, install guards.

`shard_model` is the entry point. This file decides nothing; all decisions are in the `ShardPlan`.

Every parameter becomes a DTensor with one global identity, so no tool can mistake the experts of one rank for all
experts. It works on a model on meta (the usual way: `load_model` then fills the shards) and on a model in memory. All
reductions are sums: the loss is divided by the target tokens of the full step. Frozen weights that stay packed are
quantised here, linear layers before tp cuts them, experts after ep has left this rank its part.
"""

import hashlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from expertmesh.anatomy import Anatomy, decoder_blocks, is_inside
from expertmesh.config.errors import IntegrityError
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.distributed.mesh import Mesh
from expertmesh.experts.install import ExpertsPlan, install
from expertmesh.introspection.compute_dtype import cast_in_forward
from expertmesh.parallel.checkpointing import recompute_blocks
from expertmesh.parallel.compiling import compile_parts
from expertmesh.parallel.context import split_attention
from expertmesh.parallel.packing import separate_samples
from expertmesh.parallel.pipeline import cut
from expertmesh.parallel.routes import install_routes
from expertmesh.parallel.sequence import split_blocks
from expertmesh.parallel.shard_plan import Group, ShardPlan, view_of
from expertmesh.parallel.tensor import split_parts
from expertmesh.state.codes import PackedFormat
from expertmesh.state.model_view import attach, mark_expert_orders
from expertmesh.state.other_code import guard
from expertmesh.state.packed import HostCopies, PackedTensor
from expertmesh.state.shards import rows_of_experts


@dataclass(frozen=True, slots=True)
class _Held:
    """The part of a model that this rank's pipeline stages hold: all of it without pp."""

    gone: Sequence[str] = ()
    """The parts that only other pp ranks hold."""
    starts: Collection[str] = ()
    """The first block of each stage, before which another stage runs."""

    @classmethod
    def of(cls, plan: ShardPlan, mesh: Mesh) -> "_Held":
        return cls() if plan.cut is None else cls(plan.cut.gone(mesh.coordinate("pp")), plan.cut.starts)

    def has(self, name: str) -> bool:
        """Return whether a module or parameter is held."""
        return not any(name == part or is_inside(name, part) for part in self.gone)


def shard_model(model: nn.Module, plan: ShardPlan, mesh: Mesh) -> None:
    """Shard `model` in place as `plan` says, and set up its recomputation and compilation.

    Args:
        model: the unsharded model, on meta or in memory.
        plan: the shard plan, made for the layout of `mesh`.

    Raises:
        IntegrityError: a model in memory differs between ranks.

    Collectives: every rank calls it; a model in memory issues one all-gather of a checksum per tensor of its state.
    """
    # A model on meta has no values to compare.
    if not any(parameter.is_meta for parameter in model.parameters()):
        _check_equal_on_every_rank(model)
    held = _Held.of(plan, mesh)
    _shard(model, plan, mesh, held)
    blocks = list(filter(held.has, plan.anatomy.blocks))
    recompute_blocks(model, plan.options.activation_checkpointing, blocks, plan.checkpointed, plan.adapters)
    if plan.options.compile:
        # A compiler may be absent on one node only; then all ranks must raise, or the others hang.
        with raise_on_all_ranks("trying torch.compile"):
            compile_parts(model, filter(held.has, plan.compiled), mesh.device)
    mark_expert_orders(model)
    # Last, because it guards the modules as they are after sharding.
    guard(model, plan.layout)


def _shard(model: nn.Module, plan: ShardPlan, mesh: Mesh, held: _Held) -> None:
    """Shard `model` in place over `mesh` as `plan` says.

    Args:
        model: on meta or in memory; of a model in memory each rank keeps its local slices.
        plan: the plan of this model for the layout of `mesh`.

    Collectives: every rank calls it; no weights are sent.
    """
    assert plan.layout == mesh.layout, (plan.layout, mesh.layout)
    for name in plan.frozen:
        model.get_submodule(name).requires_grad_(False)
    anatomy, compute = plan.anatomy, plan.dtypes[1]
    # The view makes its meta copy at the first use, and modules of FSDP2 cannot be copied.
    meta_model = plan.view.meta
    if plan.cut is not None:
        # The meta copy answers for the other stages, so the same routers are frozen there.
        for name in plan.frozen:
            meta_model.get_submodule(name).requires_grad_(False)
        anatomy = cut(model, plan, plan.cut, held.gone, mesh)
    tensor, context = plan.tensor.within(anatomy.blocks), plan.context.within(anatomy.blocks)
    layers = ExpertsPlan(plan.dispatch, plan.compute, plan.kernels, plan.shared_beside, plan.placement)
    install(model, anatomy, mesh, layers, compute)
    packed = {name: kind for name, kind in plan.packed.items() if held.has(name)}
    _pack_linears(model, packed, mesh.device)
    _split_parameters(model, plan, mesh, held)
    _pack_experts(model, packed, on_host=plan.layout.offload == "experts")
    # Before split_parts, whose mixins go in front of BySamples and check for it.
    separate_samples(model, plan.anatomy, mesh.device, compute)
    split_parts(model, tensor.parts, context.whole, mesh)
    buffers, routers = (list(filter(held.has, names)) for names in (plan.cast_buffers, plan.wide_routers))
    cast_in_forward(model, buffers, routers, compute)
    _shard_groups(model, plan, mesh, held)
    model.register_forward_hook(_reshard_without_backward)
    _prefetch(model, anatomy, [part.name for part in tensor.parts if part.is_split], held.starts)
    # With more efsdp ranks, FSDP2 gathers experts and prefetches them itself.
    if mesh.layout.efsdp == 1:
        _link_copies(model, anatomy, held.starts)
    attach(model, mesh=mesh, shard_plan=plan, frozen_formats=plan.packed)
    split_blocks(model, plan.anatomy, mesh, context.gathers)
    split_attention(model, context, [block for block in decoder_blocks(plan.anatomy) if block in anatomy.blocks], mesh)
    install_routes(model, plan.anatomy, held.has)


def _split_parameters(model: nn.Module, plan: ShardPlan, mesh: Mesh, held: _Held) -> None:
    """Replace each parameter that ep or tp splits, adapters included, by a DTensor of this rank's slice."""
    axes = {"ep": mesh.expert, "tp": mesh.dense_tp_mesh}
    for name, split in plan.splits.items():
        if not held.has(name):
            continue
        parent, _, leaf = name.rpartition(".")
        module, axis = model.get_submodule(parent), axes[split.axis][split.axis]
        whole = module.get_parameter(leaf)
        # A copy, so that the full tensor can be freed.
        if (order := plan.expert_orders.get(name)) is None:
            local = whole.detach().chunk(axis.size(), split.dim)[axis.get_local_rank()].clone()
        else:
            rows = rows_of_experts(order, whole.shape[0]).chunk(axis.size())[axis.get_local_rank()]
            local = whole.detach()[rows.to(whole.device)]
        # Copy only the slice to the device; FSDP2 moves the remaining parameters group by group.
        local = local if local.is_meta else local.to(mesh.device)
        # Without run_check, which would communicate for every parameter.
        own = DTensor.from_local(local, axis, [Shard(split.dim)], run_check=False)
        setattr(module, leaf, nn.Parameter(own, requires_grad=whole.requires_grad))


def _shard_groups(model: nn.Module, plan: ShardPlan, mesh: Mesh, held: _Held) -> None:
    """Call `fully_shard` for each group of this rank's stages, in the order of the plan."""
    views = {"dense": mesh.dense_shard, "dense_tp": mesh.dense_tp_shard, "expert": mesh.expert_shard}
    for group in plan.groups:
        if not all(map(held.has, group.modules)):
            continue
        modules = [model.get_submodule(name) for name in group.modules]
        dims = {model.get_parameter(name): dim for name, dim in group.dims.items()}
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=views[group.view],
            mp_policy=_policy(plan, group),
            shard_placement_fn=partial(_placement, dims) if dims else None,
            # FSDP2 would manage all parameters in the modules, also those with another mesh or dtype policy.
            ignored_params=_of_other_groups(model, plan, group),
        )
        _sum_gradients(modules[0])


def _of_other_groups(model: nn.Module, plan: ShardPlan, group: Group) -> set[nn.Parameter]:
    """Return the parameters in the modules of a group with another mesh or dtype policy than the group."""
    uncast = {name for other in plan.groups if not other.casts for name in other.parameters}
    return {
        parameter
        for prefix in group.modules
        for name, parameter in model.get_submodule(prefix).named_parameters(prefix=prefix)
        if view_of(plan.splits.get(name)) != group.view or (name in uncast) is group.casts
    }


def _policy(plan: ShardPlan, group: Group) -> MixedPrecisionPolicy:
    master, compute, reduce = plan.dtypes
    narrow = compute if compute != master else None  # a frozen base is in the compute dtype already
    return MixedPrecisionPolicy(
        param_dtype=narrow if group.casts else torch.float32,
        reduce_dtype=None if reduce == compute else reduce,
        cast_forward_inputs=False,  # the model's code decides what runs in fp32, as in an unsharded model
    )


def _placement(dims: dict[nn.Parameter, int], parameter: nn.Parameter) -> Shard:
    return Shard(dims[parameter])


def _reshard_without_backward(model: nn.Module, args: Any, output: Any) -> None:
    """Reshard the root after a forward without gradients (evaluation, generation); a forward hook."""
    # FSDP2 keeps the root's parameters gathered until backward. Without one they would stay plain tensors in the
    # compute dtype, and an optimizer built or stepped then would miss the head.
    if not torch.is_grad_enabled():
        cast(FSDPModule, model).reshard()


def _prefetch(model: nn.Module, anatomy: Anatomy, split_names: Sequence[str], starts: Collection[str]) -> None:
    """Make FSDP2 gather the next block while this one computes, in forward and in backward."""
    # The host wait in dispatch defeats FSDP2's implicit prefetch, so it is set explicitly.
    units = []
    for block in anatomy.blocks:
        inside = [name for name in split_names if is_inside(name, block)]
        inside += [spec.name for spec in anatomy.experts if is_inside(spec.name, block)]
        modules = [model.get_submodule(name) for name in (block, *inside)]
        units.append([cast(FSDPModule, module) for module in modules if isinstance(module, FSDPModule)])
    # By default FSDP2 gathers in backward what ran before a unit in forward. By layer that may be the root, for another
    # micro-batch, and the head would be gathered again in every layer. Units beside blocks gather themselves alone.
    for module in model.modules():
        if isinstance(module, FSDPModule) and module is not model:
            module.set_modules_to_backward_prefetch([module])
    for number, (unit, following) in enumerate(itertools.pairwise(units)):
        if anatomy.blocks[number + 1] in starts:
            continue  # what runs next is another stage
        unit[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(list(unit))


def _sum_gradients(module: nn.Module) -> None:
    """Make a group reduce its gradients by sums only."""
    # Factor 1 is safe on every backend: gloo has no PREMUL_SUM, NCCL zeroes bf16 with it (pytorch/pytorch#190747), and
    # with a single rank any other factor is applied twice.
    unit = cast(FSDPModule, module)
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)


def _check_equal_on_every_rank(model: nn.Module) -> None:
    """Raise `IntegrityError` unless all ranks hold the same bytes and train the same parameters.

    Collectives: every rank calls it; one all-gather of objects on the default group.
    """
    # Each rank cuts its slices from its local copy, so copies that differ would silently mix two models.
    if dist.get_world_size() == 1:
        return
    tensors = model.state_dict(keep_vars=True)
    digests = [(name, _digest(tensor), tensor.requires_grad) for name, tensor in tensors.items()]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, digests)
    # Every rank checks all ranks against rank 0, so all of them raise together.
    for rank, others in enumerate(gathered):
        for own, other in zip(gathered[0], others, strict=True):
            if own != other:
                raise IntegrityError(
                    f"parallelize: {other[0]} on rank {rank} differs from rank 0's; every rank must hold the same "
                    "weights (same seed or same checkpoint) before sharding",
                    key="model.replicas-differ",
                )


def _digest(tensor: torch.Tensor) -> str:
    # Bytes, not values: NaN and signed zeros are compared too, and numpy has no bfloat16.
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).hexdigest()


def _pack_linears(model: nn.Module, formats: Mapping[str, PackedFormat], device: torch.device) -> None:
    """Replace the parameters in `formats` whose units are rows by packed tensors on `device`.

    Values are quantised before tp splits them; nothing is computed on meta.
    """
    for name, kind in formats.items():
        if kind.by_rows:
            whole = model.get_parameter(name).detach()
            packed = PackedTensor.of(whole, kind, whole.dtype)
            _replace(model, name, packed if packed.is_meta else packed.to(device))


def _pack_experts(model: nn.Module, formats: Mapping[str, PackedFormat], on_host: bool) -> None:
    """Replace the local experts in `formats` by packed tensors, after ep has split them.

    Values are quantised expert by expert; nothing is computed on meta.

    Args:
        on_host: True stores the packed tensors in host memory.
    """
    for name, kind in formats.items():
        if not kind.by_rows:
            whole = model.get_parameter(name).data
            assert isinstance(whole, DTensor)
            with torch.no_grad():
                packed = PackedTensor.of(whole.to_local(), kind, whole.dtype, HostCopies() if on_host else None)
                own = DTensor.from_local(packed, whole.device_mesh, whole.placements, run_check=False)
            _replace(model, name, own)


def _link_copies(model: nn.Module, anatomy: Anatomy, starts: Collection[str]) -> None:
    """Link the host copies of consecutive layers, so that experts are copied from host memory one layer ahead.

    This is for experts that FSDP2 does not prefetch: a group of one rank gathers nothing.

    Args:
        anatomy: the anatomy of this rank's blocks.
        starts: the blocks that begin a pipeline stage; they are not linked to the block before.
    """
    before: dict[str, HostCopies] = {}
    for block in anatomy.blocks:
        before = {} if block in starts else before
        for spec in anatomy.experts:
            if is_inside(spec.name, block):
                for role, leaf in (("up", spec.up), ("down", spec.down)):
                    whole: Any = model.get_submodule(spec.name).get_parameter(leaf)
                    local = whole.to_local() if isinstance(whole, DTensor) else whole
                    if isinstance(local, PackedTensor) and local.host is not None:
                        if (previous := before.get(role)) is not None:
                            previous.following, local.host.preceding = local.host, previous
                        before[role] = local.host


def _replace(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, nn.Parameter(tensor, requires_grad=False))
