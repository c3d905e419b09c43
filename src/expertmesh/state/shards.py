"""Compute which part of a global tensor a rank holds, as a box of index ranges, and which rank writes which replica.

Code that reads or writes tensors (weights, checkpoints, audits) calls this file and never sees a parallel layout. A box
is (start, stop) for each dim of the *global* tensor. `stored_box` returns the box of a DTensor's local tensor, for
every placement that FSDP2 and expert parallelism produce: `Replicate`, `Shard`, and the `_StridedShard` that FSDP2
makes of a tensor already sharded on the same dim (experts: ep slice first, efsdp inside it).

A DTensor knows ranges alone, and `moe.placement` may give a rank any experts. Then dim 0 of the DTensor is in the order
of slots, and the tensor is marked with the expert of each slot. In the numbers of the model, which files, checkpoints,
hashes and comparisons use, a rank then holds several boxes, whose values lie one after the other along dim 0:

    held_boxes(tensor)       the boxes of the global tensor that this rank holds
    held_parts(tensor)       the same boxes, each with a view of its values in memory
    cut_local(tensor, full)  what the local tensor would hold if the global one were `full`
    stored_box(tensor)       the single box in the order of slots, for code that counts elements
    local_tensor(tensor)     the local storage, detached, to read and to write; empty on another stage
    to_local(tensor)         the local tensor with its gradient, to compute with

Tensors of a model that was split into pipeline stages are marked with their placement. Tensors of other stages are on
meta: they have a name, a shape and a dtype, and this rank holds an empty part of them. Nothing here communicates except
`full_values` and `full_tensors`.
"""

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from expertmesh.compat import StridedShard
from expertmesh.distributed.all_ranks import collective_device, rank_and_ranks
from expertmesh.io.boxes import Box, extents, full_box, intersect, inverse, moved_parts, slices, volume
from expertmesh.state.packed import PackedTensor, values_at


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """The location of a tensor of a model that was split into stages."""

    on_other_stage: bool = False
    """Only other stages hold it."""
    is_tied_replica: bool = False
    """Another stage also holds it, and owns it."""
    has_tied_replica: bool = False
    """This tensor, or one on another stage that is tied to it, is a tied replica."""
    is_first_rank: bool = False
    """This rank is the first of the ranks that hold the stage."""


OTHER_STAGE = StagePlacement(on_other_stage=True)
"""The placement of a tensor that this rank has no part of."""


def held_parts(tensor: Tensor, local: Tensor | None = None) -> list[tuple[Box, Tensor]]:
    """Return the boxes of the global tensor that this rank holds, with views of their values, in the order of storage.

    There is one box unless experts are placed. Boxes differ in dim 0 alone. A rank without elements has one empty box.

    Args:
        local: Values with the shape of the rank's own, such as a gradient's, to view in their place.
    """
    box, local = stored_box(tensor), local_tensor(tensor) if local is None else local
    parts = _parts(tensor, box)
    return [(part, local if stored is box else local[slices(stored[:1], box[:1])]) for stored, part in parts]


def held_boxes(tensor: Tensor) -> list[Box]:
    """Return the boxes of `held_parts`."""
    return [part for _, part in _parts(tensor, stored_box(tensor))]


def _parts(tensor: Tensor, box: Box) -> list[tuple[Box, Box]]:
    """Return the stored `box` in parts that are boxes of the global tensor: (as stored, in the global tensor)."""
    if (order := expert_order(tensor)) is None or volume(box) == 0:
        return [(box, box)]
    return list(moved_parts(box, tensor.shape[0], order))


def cut_local(tensor: Tensor, full: Tensor) -> Tensor:
    """Return this rank's part of `full`, which has the shape of the global `tensor`, as its local tensor holds it."""
    parts = [full[slices(box)] for box in held_boxes(tensor)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def expert_order(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the expert in each slot along dim 0 of `tensor`; None if slots have the numbers of their experts."""
    order: tuple[int, ...] | None = getattr(tensor, "_expertmesh_expert_order", None)
    return order


def mark_order(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Mark `tensor` as one whose slots along dim 0 hold the experts of `order`, and return it."""
    tensor._expertmesh_expert_order = order  # type: ignore[attr-defined]
    return tensor


def stored_box(tensor: Tensor) -> Box:
    """Return the box that this rank holds of the tensor as it is stored; the full box for a plain tensor.

    An empty shard has start == stop on the sharded dim. The box is empty on a rank outside the tensor's mesh, and for a
    tensor of another pipeline stage (but a scalar's box is never empty).
    """
    coordinate = tensor.device_mesh.get_coordinate() if isinstance(tensor, DTensor) else ()
    if coordinate is None or is_on_other_stage(tensor):
        return ((0, 0),) * tensor.dim()
    held = tuple(local_tensor(tensor).shape)
    box = box_at(tensor, coordinate) if isinstance(tensor, DTensor) else full_box(tensor.shape)
    assert held == extents(box), f"local tensor {held} is not box {box} of a tensor {tuple(tensor.shape)}"
    return box


def box_at(tensor: DTensor, coordinate: Sequence[int]) -> Box:
    """Return the box of `tensor` that the rank at `coordinate` of its mesh holds."""
    ranges = []
    for dim, size in enumerate(tensor.shape):
        start, stop = 0, size
        for axis in _sharding_order(tensor, dim):
            # The rule of torch.chunk: equal chunks, rounded up; the last ones are shorter or empty.
            chunk = -(-(stop - start) // tensor.device_mesh.size(axis))
            first = min(start + chunk * coordinate[axis], stop)
            start, stop = first, min(first + chunk, stop)
        ranges.append((start, stop))
    return tuple(ranges)


def owns_copy(tensor: Tensor) -> bool:
    """Return whether this rank is the one replica that writes its box of `tensor`.

    It is if its coordinates on all `Replicate` axes are 0; for a plain tensor, if it is the first rank (of the stage
    that owns the tensor). The tensor's mesh has to contain every axis on which the tensor is replicated.
    """
    placement = placement_of(tensor)
    if placement is not None and (placement.on_other_stage or placement.is_tied_replica):
        return False
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None:
            return False
        replicated = (axis for axis, kind in enumerate(tensor.placements) if isinstance(kind, Replicate))
        return all(coordinate[axis] == 0 for axis in replicated)
    if placement is not None:
        return placement.is_first_rank
    return rank_and_ranks()[0] == 0


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's storage of `tensor`, detached: writing into it writes into the parameter.

    For a tensor on another pipeline stage, an empty tensor on the CPU.
    """
    if is_on_other_stage(tensor):
        return torch.empty([0] * tensor.dim(), dtype=tensor.dtype)
    return to_local(tensor).detach()


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, with its gradient; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_values(tensor: Tensor, box: Box) -> Tensor:
    """Return the values of `box`, which lies inside one of this rank's parts; packed weights are dequantised."""
    held, local = next((held, local) for held, local in held_parts(tensor) if intersect(held, box) == box)
    return values_at(local, slices(box, held))


def full_values(tensor: DTensor) -> Tensor:
    """Return the full tensor on every rank; packed weights as values.

    Collectives: every rank of the tensor's mesh calls it; the all-gathers of `DTensor.full_tensor` on that mesh.
    """
    local, order = local_tensor(tensor), expert_order(tensor)
    if isinstance(local, PackedTensor):
        # Packed units cannot be gathered by a DTensor; their values can, at the cost of more bytes.
        values = DTensor.from_local(local.experts(0, len(local)), tensor.device_mesh, tensor.placements)
        full = values.full_tensor()
    else:
        full = tensor.full_tensor()
    return full if order is None else full[rows_of_experts(inverse(order), full.shape[0])]


def rows_of_experts(order: Sequence[int], rows: int) -> Tensor:
    """Return the index that brings dim 0 of a tensor with `rows` rows into `order`, int64 on the CPU."""
    each = rows // len(order)
    return (torch.tensor(order).unsqueeze(1) * each + torch.arange(each)).flatten()


def full_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the full values of the sharded ones of `tensors`, by name, and of those on another pipeline stage.

    Collectives: every rank calls it. The all-gathers of each sharded tensor; for each tensor of a pipelined model, one
    all-reduce and one broadcast on the default group.
    """
    gathered = {name: full_values(tensor) for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    for name, tensor in tensors.items():
        if (place := placement_of(tensor)) is None:
            continue
        device = collective_device()
        answers = place.is_first_rank and not place.on_other_stage and not place.is_tied_replica
        source = torch.tensor([dist.get_rank() if answers else dist.get_world_size()], device=device)
        # The minimum is the rank that owns the values, because all other ranks enter the world size.
        dist.all_reduce(source, op=dist.ReduceOp.MIN)
        full = gathered.get(name, tensor)
        values = full.detach().to(device) if answers else torch.empty(full.shape, dtype=full.dtype, device=device)
        dist.broadcast(values, src=int(source.item()))
        gathered[name] = values
    return gathered


def _sharding_order(tensor: DTensor, dim: int) -> list[int]:
    """Return the mesh axes that shard `dim`, outermost first: the order in which the dim is split.

    Plain `Shard`s split in mesh order. A `_StridedShard` on an axis left of them splits after as many of them as
    multiply to its split factor.
    """
    order: list[int] = []
    for axis in reversed(range(len(tensor.placements))):
        placement = tensor.placements[axis]
        if shard_dim(placement) != dim:
            assert shard_dim(placement) is not None or isinstance(placement, Replicate), f"{placement}"
        elif isinstance(placement, StridedShard):
            # The axes outside of it are the first ones whose sizes multiply to its split factor.
            sizes = [tensor.device_mesh.size(other) for other in order]
            products = list(itertools.accumulate(sizes, operator.mul, initial=1))
            assert placement.split_factor in products, f"no axes of {tensor.placements} multiply to its split factor"
            order.insert(products.index(int(placement.split_factor)), axis)
        else:
            order.insert(0, axis)
    return order


def shard_dim(placement: Placement) -> int | None:
    """Return the dim that a placement splits, or None."""
    # _StridedShard is a subclass of Shard in some torch versions and not in others.
    return placement.dim if isinstance(placement, (Shard, StridedShard)) else None


def placement_of(tensor: Tensor) -> StagePlacement | None:
    """Return where `tensor` is; None for a tensor of a model that was never split."""
    placement = getattr(tensor, "_expertmesh_stage_placement", None)
    return placement if isinstance(placement, StagePlacement) else None


def is_on_other_stage(tensor: Tensor) -> bool:
    """Return whether only other stages hold `tensor`."""
    placement = placement_of(tensor)
    return placement is not None and placement.on_other_stage


def on_other_stage(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a placeholder on meta for a tensor that only other stages hold."""
    return place(torch.empty(shape, dtype=dtype, device="meta"), OTHER_STAGE)


def is_tied_replica(tensor: Tensor) -> bool:
    """Return whether another stage also holds `tensor`, and owns it."""
    placement = placement_of(tensor)
    return placement is not None and placement.is_tied_replica


def placed_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Mark `tensor` (an optimizer's state, for example) as located where `other` is, and return it."""
    if (order := expert_order(other)) is not None and tensor.dim():
        mark_order(tensor, order)
    placement = placement_of(other)
    return tensor if placement is None else place(tensor, placement)


def place(tensor: Tensor, placement: StagePlacement) -> Tensor:
    """Mark `tensor` with its placement, and return it."""
    tensor._expertmesh_stage_placement = placement  # type: ignore[attr-defined]
    return tensor
