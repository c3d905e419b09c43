"""Carry out a shard plan. `shard_model` is the entry point; it reads in the order of execution:

    1  compare the ranks' copies of a model in memory
    2  freeze routers, and put placeholders for the parts of other pipeline stages
    3  install expert layers, and replace parameters by this rank's slices (ep, tp) or packed codes
    4  change forwards: packed samples, parts of tp and cp, dtypes
    5  call `fully_shard` for each group, and link what is gathered or copied ahead
    6  split positions between ranks (cp, tp), and let forwards take routes
    7  recompute in backward, compile, guard

This file decides nothing; all decisions are in the `ShardPlan`.

Every parameter becomes a DTensor with one global identity, so no tool can mistake the experts of one rank for all
experts. It works on a model on meta (the usual way: `load_model` then fills the shards) and on a model in memory. All
reductions are sums: the loss is divided by the target tokens of the full step. Frozen weights that stay packed are
quantised here, linear layers before tp cuts them, experts after ep has left this rank its part.
"""

import hashlib
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from expertmesh.anatomy import Anatomy, decoder_blocks, is_inside, is_within
from expertmesh.config.errors import IntegrityError
from expertmesh.distributed.all_ranks import gather_objects, raise_on_all_ranks
from expertmesh.distributed.mesh import Mesh
from expertmesh.experts.balance import count_for_biases
from expertmesh.experts.install import install
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
from expertmesh.state.model_view import attach, mark_expert_orders
from expertmesh.state.other_code import guard
from expertmesh.state.packed import HostCopies, PackedTensor
from expertmesh.state.patching import set_at
from expertmesh.state.shards import rows_of_experts, to_local


@dataclass(frozen=True, slots=True)
class _Local:
    """The part of a model that this rank's pipeline stages hold: all of it without pp."""

    absent: Sequence[str] = ()
    """The parts that only other pp ranks hold."""
    starts: Collection[str] = ()
    """The first block of each stage, before which another stage runs."""

    def has(self, name: str) -> bool:
        """Return whether a module or parameter is held."""
        return not is_within(name, *self.absent)


def shard_model(model: nn.Module, plan: ShardPlan, mesh: Mesh) -> None:
    """Shard `model` in place as `plan` says, and set up its recomputation and compilation.

    Args:
        model: the unsharded model, on meta or in memory; of a model in memory each rank keeps its local slices.
        plan: the shard plan, made for the layout of `mesh`.

    Raises:
        IntegrityError: a model in memory differs between ranks.

    Collectives: every rank calls it; a model in memory issues one all-gather of a checksum per tensor of its state, and
    a library's dispatcher those that open its buffers (`install`). No weights are sent.
    """
    assert plan.layout == mesh.layout, (plan.layout, mesh.layout)
    # 1. A model on meta has no values to compare.
    if not any(parameter.is_meta for parameter in model.parameters()):
        _check_equal_on_every_rank(model)
    local = _Local() if plan.cut is None else _Local(plan.cut.absent(mesh.coordinate("pp")), plan.cut.starts)
    _shard(model, plan, mesh, local)
    blocks = list(filter(local.has, plan.anatomy.blocks))
    # 7.
    recompute_blocks(model, plan.options.activation_checkpointing, blocks, plan.checkpointed, plan.adapters)
    if plan.options.compile:
        # A compiler may be absent on one node only; then all ranks must raise, or the others hang.
        with raise_on_all_ranks("trying torch.compile"):
            compile_parts(model, filter(local.has, plan.compiled), mesh.device)
    mark_expert_orders(model)
    # Last, because it guards the modules as they are after sharding.
    guard(model, plan.layout)


def _check_equal_on_every_rank(model: nn.Module) -> None:
    """Raise `IntegrityError` unless all ranks hold the same bytes and train the same parameters.

    Collectives: every rank calls it; one all-gather of objects on the default group.
    """
    # Each rank cuts its slices from its local copy, so copies that differ would silently mix two models.
    if dist.get_world_size() == 1:
        return
    tensors = model.state_dict(keep_vars=True)
    digests = []
    for name, tensor in tensors.items():
        # Bytes, not values: NaN and signed zeros are compared too, and numpy has no bfloat16.
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest = hashlib.blake2b(flat.numpy().data, digest_size=16).hexdigest()
        digests.append((name, digest, tensor.requires_grad))
    gathered = gather_objects(digests)
    # Every rank checks all ranks against rank 0, so all of them raise together.
    for rank, others in enumerate(gathered):
        for expected, other in itertools.zip_longest(gathered[0], others, fillvalue=("what is absent",)):
            if expected != other:
                raise IntegrityError(
                    f"parallelize: {other[0]} on rank {rank} differs from rank 0's; every rank must hold the same "
                    "weights (same seed or same checkpoint) before sharding",
                    key="model.replicas-differ",
                )


def _shard(model: nn.Module, plan: ShardPlan, mesh: Mesh, local: _Local) -> None:
    """Do steps 2 to 6 of this module's docstring."""
    anatomy, compute = plan.anatomy, plan.dtypes.compute
    # 2. Routers are frozen on the meta copy too, which with pp stands for the stages of other ranks. The copy was made
    # while planning; modules of FSDP2 cannot be copied.
    meta_model = plan.view.meta
    for each in (model,) if plan.cut is None else (model, meta_model):
        for name in plan.frozen:
            each.get_submodule(name).requires_grad_(False)
    if plan.cut is not None:
        anatomy = cut(model, plan, plan.cut, local.absent, mesh)
    tensor, context = plan.tensor.within(anatomy.blocks), plan.context.within(anatomy.blocks)
    # 3.
    install(model, anatomy, mesh, plan.experts, compute)
    count_for_biases(model, plan.balance)
    _replace_parameters(model, plan, mesh, local)
    # 4. Packed samples come before split_parts, whose mixins go in front of BySamples and check for it.
    separate_samples(model, plan.anatomy, mesh.device, compute)
    split_parts(model, tensor.parts, context.gathered, mesh)
    buffers, routers = (list(filter(local.has, names)) for names in (plan.cast_buffers, plan.wide_routers))
    cast_in_forward(model, buffers, routers, compute)
    # 5.
    _shard_groups(model, plan, mesh, local)
    model.register_forward_hook(_reshard_without_backward)
    _prefetch(model, anatomy, [part.name for part in tensor.parts if part.is_split], local.starts)
    # With more efsdp ranks, FSDP2 gathers experts and prefetches them itself.
    if mesh.layout.efsdp == 1:
        _link_copies(model, anatomy, local.starts)
    attach(model, mesh=mesh, shard_plan=plan, frozen_formats=plan.packed)
    # 6.
    split_blocks(model, plan.anatomy, mesh, context.gathers)
    split_attention(model, context, [block for block in decoder_blocks(plan.anatomy) if block in anatomy.blocks], mesh)
    install_routes(model, plan.anatomy, local.has)


def _replace_parameters(model: nn.Module, plan: ShardPlan, mesh: Mesh, local: _Local) -> None:
    """Replace each parameter that ep or tp splits by a DTensor of this rank's slice, and each that stays packed by its
    codes. Nothing is computed on meta.
    """
    packed = {name: kind for name, kind in plan.packed.items() if local.has(name)}
    frozen = partial(nn.Parameter, requires_grad=False)
    # Linear layers before tp splits them, whole: a quantisation block may not end where a slice does.
    for name, kind in packed.items():
        if kind.by_rows:
            full = model.get_parameter(name).detach()
            codes = PackedTensor.of(full, kind, full.dtype)
            set_at(model, name, frozen(codes if codes.is_meta else codes.to(mesh.device)))
    views = {"ep": mesh.expert, "tp": mesh.dense_tp_mesh}
    for name, split in plan.splits.items():
        if not local.has(name):
            continue
        axis, full = views[split.axis][split.axis], model.get_parameter(name)
        if (order := plan.expert_orders.get(name)) is None:
            # A copy, so that the full tensor can be freed.
            part = full.detach().chunk(axis.size(), split.dim)[axis.get_local_rank()].clone()
        else:
            rows = rows_of_experts(order, full.shape[0]).chunk(axis.size())[axis.get_local_rank()]
            part = full.detach()[rows.to(full.device)]
        # Copy only the slice to the device; FSDP2 moves the remaining parameters group by group.
        part = part if part.is_meta else part.to(mesh.device)
        # Without run_check, which would communicate for every parameter.
        sliced = DTensor.from_local(part, axis, [Shard(split.dim)], run_check=False)
        set_at(model, name, nn.Parameter(sliced, requires_grad=full.requires_grad))
    # Experts after ep has left this rank its part: quantising all of them on each rank would take ep times as long.
    offloads = plan.layout.offload == "experts"
    for name, kind in packed.items():
        if not kind.by_rows:
            shard = model.get_parameter(name).data
            assert isinstance(shard, DTensor)
            with torch.no_grad():
                codes = PackedTensor.of(shard.to_local(), kind, shard.dtype, HostCopies() if offloads else None)
            packed_shard = DTensor.from_local(codes, shard.device_mesh, shard.placements, run_check=False)
            set_at(model, name, frozen(packed_shard))


def _shard_groups(model: nn.Module, plan: ShardPlan, mesh: Mesh, local: _Local) -> None:
    """Call `fully_shard` for each group of this rank's stages, in the order of the plan."""
    master, compute, reduce = plan.dtypes
    narrow = compute if compute != master else None  # a frozen base is in the compute dtype already
    for group in plan.groups:
        if not all(map(local.has, group.modules)):
            continue
        modules = [model.get_submodule(name) for name in group.modules]
        placements = {model.get_parameter(name): Shard(dim) for name, dim in group.dims.items()}
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=mesh.sharding(group.view),
            mp_policy=MixedPrecisionPolicy(
                param_dtype=narrow if group.casts_parameters else torch.float32,
                reduce_dtype=None if reduce == compute else reduce,
                cast_forward_inputs=False,  # the model's code decides what runs in fp32, as in an unsharded model
            ),
            shard_placement_fn=placements.get if placements else None,
            # FSDP2 would manage all parameters in the modules, also those with another mesh or dtype policy.
            ignored_params=_of_other_groups(model, plan, group),
        )
        unit = cast(FSDPModule, modules[0])
        # Gradients are summed: the loss is divided by the tokens of the whole step. Factor 1 is safe on every backend:
        # gloo has no PREMUL_SUM, NCCL zeroes bf16 with it (pytorch/pytorch#190747), and with a single rank any other
        # factor is applied twice.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _of_other_groups(model: nn.Module, plan: ShardPlan, group: Group) -> set[nn.Parameter]:
    """Return the parameters in the modules of a group with another mesh or dtype policy than the group."""
    uncast = plan.uncast
    return {
        parameter
        for prefix in group.modules
        for name, parameter in model.get_submodule(prefix).named_parameters(prefix=prefix)
        if view_of(plan.splits.get(name)) != group.view or (name in uncast) is group.casts_parameters
    }


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
    # micro-batch, and the head would be gathered again in every layer. By default let every unit prefetch only itself.
    for module in model.modules():
        if isinstance(module, FSDPModule) and module is not model:
            module.set_modules_to_backward_prefetch([module])
    for number, (unit, following) in enumerate(itertools.pairwise(units)):
        if anatomy.blocks[number + 1] in starts:
            continue  # what runs next is another stage
        unit[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(list(unit))


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
                    codes = to_local(model.get_submodule(spec.name).get_parameter(leaf))
                    if isinstance(codes, PackedTensor) and codes.host is not None:
                        if (previous := before.get(role)) is not None:
                            previous.following, codes.host.preceding = codes.host, previous
                        before[role] = codes.host
