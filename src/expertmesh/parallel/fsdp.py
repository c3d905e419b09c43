"""Shard a Hugging Face MoE model: routed experts over ep and efsdp, everything else over fsdp, by FSDP2.

Every parameter becomes a DTensor with one global identity, so that no tool can take one rank's experts for all of
them. Works on a model on meta (the usual way: `load_model` then fills the shards) and on a model in memory. All
reductions are sums: the loss is divided by the target tokens of the whole step, so gradients are right for every
layout and every accumulation count by construction.
"""

import hashlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from expertmesh.anatomy import Anatomy, describe, is_adapter, is_inside
from expertmesh.config import MoeConfig, PrecisionConfig
from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.distributed.mesh import Mesh
from expertmesh.experts.balance import balance_of
from expertmesh.experts.install import install
from expertmesh.experts.lora_state import adapter_state
from expertmesh.introspection.compute_dtype import refuse_compute, uncast_modules
from expertmesh.parallel.context import refuse_context, split_attention
from expertmesh.parallel.pipeline import cut, pipeline_of
from expertmesh.parallel.refusals import expert_shard_dim, refuse_mixed_dtypes, refuse_model
from expertmesh.parallel.sequence import decoder_blocks, refuse_blocks, split_blocks
from expertmesh.parallel.tensor import split_parts
from expertmesh.parallel.tensor_plan import TensorPlan, tensor_plan
from expertmesh.state.sharded_model import attach


def shard(
    model: nn.Module, mesh: Mesh, precision: PrecisionConfig, moe: MoeConfig, *, kept_in_fp32: Callable[[str], bool]
) -> dict[str, str]:
    """Shard `model` in place over `mesh`. Every rank calls it with the same model.

    `kept_in_fp32` says by name which parameters the family computes with in fp32 whatever the compute dtype.

    A model in memory is first checked to be the same on every rank (one all-gather of a checksum per parameter);
    each rank then keeps its own slices. No weights travel. Returns how dispatch and compute were resolved.
    """
    anatomy = describe(model)
    master, compute, reduce = (getattr(torch, name) for name in (precision.params, precision.compute, precision.reduce))
    refuse_model(model, anatomy, moe)
    refuse_context(model, anatomy, mesh.layout)
    adapted = adapter_state(model) is not None
    refuse_mixed_dtypes(model, master, compute if adapted else master, kept_in_fp32)
    if compute != master:
        refuse_compute(model, anatomy, compute, kept_in_fp32)
    for spec in anatomy.experts:
        expert_shard_dim(spec, mesh.layout)
    refuse_blocks(model, anatomy, mesh.layout)
    tensor = tensor_plan(model, anatomy, mesh.layout.tp, kept_in_fp32)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if not on_meta:
        _check_equal_on_every_rank(model)
    if moe.router == "frozen":
        for name in anatomy.routers:
            model.get_submodule(name).requires_grad_(False)

    balance, whole = balance_of(model, anatomy, moe), anatomy
    if mesh.layout.pp > 1:
        anatomy = cut(model, anatomy, mesh, compute)
    resolved = install(model, anatomy, mesh, dispatch=moe.dispatch, compute=moe.compute, dtype=compute)
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute == master else compute,  # of masters; a frozen base is in it already
        reduce_dtype=None if reduce == compute else reduce,
        cast_forward_inputs=False,  # the model's own code decides what runs in fp32, as it does unsharded
    )
    exempt = uncast_modules(model, anatomy, kept_in_fp32) if policy.param_dtype is not None else []
    placed = _place_experts(model, anatomy, mesh, policy)
    _place_dense(model, anatomy, mesh, policy, placed, exempt, tensor.within(anatomy.blocks))
    attach(model, mesh=mesh, tensor_plan=tensor, balance=balance)
    split_blocks(model, whole, mesh)
    split_attention(model, [block for block in decoder_blocks(whole) if block in anatomy.blocks], mesh)
    return resolved


def _place_experts(model: nn.Module, anatomy: Anatomy, mesh: Mesh, policy: MixedPrecisionPolicy) -> set[nn.Parameter]:
    """Make each expert parameter a DTensor over ep; shard the slice over efsdp. Returns all expert parameters."""
    placed = set()
    for spec in anatomy.experts:
        experts = model.get_submodule(spec.name)
        adapters = [name for name, _ in experts.named_parameters(recurse=False) if is_adapter(name)]
        for name in (*spec.parameters, *adapters):
            whole = experts.get_parameter(name)
            local = nn.Parameter(_own_slice(whole, mesh), requires_grad=whole.requires_grad)
            parent, _, leaf = name.rpartition(".")
            setattr(experts.get_submodule(parent), leaf, local)
            placed.add(local)
        if spec.post_norm:
            # Shared by all experts, so dense: its gradient is summed over all ranks, not over efsdp alone.
            norm = experts.get_submodule("post_expert_norm")
            fully_shard(norm, mesh=mesh.dense_shard, mp_policy=policy)
            _sum_gradients(norm)
        if mesh.expert_shard.size() > 1:
            dims = {experts.get_parameter(name): expert_shard_dim(spec, mesh.layout) for name in spec.parameters}
            dims |= {experts.get_parameter(name): _adapter_shard_dim(experts, name, mesh) for name in adapters}
            fully_shard(experts, mesh=mesh.expert_shard, mp_policy=policy, shard_placement_fn=partial(_placement, dims))
            _sum_gradients(experts)
            placed |= set(experts.parameters())
        # With one rank there is nothing to gather or reduce; FSDP2 would copy parameters and gradients all the same.
    return placed


def _placement(dims: dict[nn.Parameter, int], parameter: nn.Parameter) -> Shard:
    return Shard(dims[parameter])


def _adapter_shard_dim(experts: nn.Module, name: str, mesh: Mesh) -> int:
    """Over which dim efsdp shards an adapter `[E, r, in]` or `[E, out, r]` of this rank's experts: never over r."""
    whole = experts.get_parameter(name)
    here, wide = whole.shape[0] // mesh.layout.ep, 2 if name.endswith("A") else 1
    for dim, size in ((0, here), (wide, whole.shape[wide])):
        if size % mesh.layout.efsdp == 0:
            return dim
    raise InputError(
        f"parallel: efsdp {mesh.layout.efsdp} divides neither the {here} experts a rank holds nor the "
        f"{whole.shape[wide]} elements of {name}; choose a larger ep so that efsdp becomes smaller"
    )


def _place_dense(
    model: nn.Module,
    anatomy: Anatomy,
    mesh: Mesh,
    policy: MixedPrecisionPolicy,
    experts: set[nn.Parameter],
    exempt: list[str],
    tensor: TensorPlan,
) -> None:
    """One FSDP2 group per block, one for each part of it that tp splits, one for the input embedding (unless tied),
    one for what is left at the root.

    The modules named in `exempt` are never cast; those of one block share a group.
    """
    split = split_parts(model, tensor, mesh)
    elsewhere = experts | split
    for _, names in itertools.groupby(
        exempt, key=lambda name: next((b for b in anatomy.blocks if is_inside(name, b)), name)
    ):
        group = [model.get_submodule(name) for name in names]
        uncast = MixedPrecisionPolicy(reduce_dtype=policy.reduce_dtype, cast_forward_inputs=False)
        fully_shard(group, mesh=mesh.dense_shard, mp_policy=uncast, ignored_params=elsewhere)
        _sum_gradients(group[0])
    blocks = [model.get_submodule(name) for name in anatomy.blocks]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    absent = next(embedding.parameters(), None) is None  # on another pipeline stage
    tied = head is not None and not absent and getattr(head, "weight", None) is embedding.weight
    for module in [*blocks, *([] if tied or absent else [embedding])]:
        fully_shard(module, mesh=mesh.dense_shard, mp_policy=policy, ignored_params=elsewhere)
        _sum_gradients(module)
    for part in tensor.parts:
        # After their blocks: those have the whole parameters of a part, and would not look into one with a group.
        if part.is_split:
            module = model.get_submodule(part.name)
            others = {parameter for parameter in module.parameters() if parameter not in split}
            fully_shard(module, mesh=mesh.dense_tp_shard, mp_policy=policy, ignored_params=others)
            _sum_gradients(module)
    fully_shard(model, mesh=mesh.dense_shard, mp_policy=policy, ignored_params=elsewhere)
    _sum_gradients(model)
    model.register_forward_hook(_reshard_without_backward)
    _prefetch(model, anatomy, tensor)


def _reshard_without_backward(model: nn.Module, args: Any, output: Any) -> None:
    """FSDP2 keeps the root's parameters gathered until backward. Without one (evaluation, generation) they would stay
    plain tensors in the compute dtype, and an optimizer built or stepped then would miss the head.
    """
    if not torch.is_grad_enabled():
        cast(FSDPModule, model).reshard()


def _prefetch(model: nn.Module, anatomy: Anatomy, tensor: TensorPlan) -> None:
    """Gather the next block while this one computes; the dispatch's host wait defeats FSDP2's implicit prefetch."""
    units = []
    for block in anatomy.blocks:
        inside = [part.name for part in tensor.parts if part.is_split and is_inside(part.name, block)]
        inside += [spec.name for spec in anatomy.experts if is_inside(spec.name, block)]
        modules = [model.get_submodule(name) for name in (block, *inside)]
        units.append([cast(FSDPModule, module) for module in modules if isinstance(module, FSDPModule)])
    pipeline = pipeline_of(model)
    for number, (unit, following) in enumerate(itertools.pairwise(units)):
        if pipeline is not None and pipeline.stage_starts(anatomy.blocks[number + 1]):
            continue  # what runs next is another stage
        unit[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(list(unit))


def _own_slice(whole: torch.Tensor, mesh: Mesh) -> DTensor:
    """This rank's experts of a full `[E, ...]` tensor, as the DTensor whose global value is `whole`."""
    ep = mesh.expert["ep"]
    per_rank = whole.shape[0] // ep.size()
    local = whole.detach()[ep.get_local_rank() * per_rank :][:per_rank].clone()
    # Only the slice goes to the device; FSDP2 moves the rest group by group.
    local = local if local.is_meta else local.to(mesh.device)
    return DTensor.from_local(local, ep, [Shard(0)], run_check=False)


def _sum_gradients(module: nn.Module) -> None:
    """Reduce by sums only. Factor 1 is safe on every backend: gloo has no PREMUL_SUM, NCCL zeroes bf16 with it
    (pytorch/pytorch#190747), and with a single rank any other factor is applied twice.
    """
    unit = cast(FSDPModule, module)
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)


def _check_equal_on_every_rank(model: nn.Module) -> None:
    """Sharding takes each slice from its own rank's copy, so the copies must agree: every byte, and what trains."""
    tensors = model.state_dict(keep_vars=True)
    digests = [(name, _digest(tensor), tensor.requires_grad) for name, tensor in tensors.items()]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, digests)
    for rank, others in enumerate(gathered):
        for own, other in zip(gathered[0], others, strict=True):
            if own != other:
                raise IntegrityError(
                    f"parallelize: {other[0]} on rank {rank} differs from rank 0's; every rank must hold the same "
                    "weights (same seed or same checkpoint) before sharding"
                )


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).hexdigest()
