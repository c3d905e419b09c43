"""Which part of a global tensor a rank holds: boxes of index ranges, and who writes which copy.

Everything that reads or writes tensors (weights, checkpoints, audits) asks here instead of knowing layouts.
A box is plain arithmetic over (start, stop) per dim of the *global* tensor; `local_box` finds the one that
a DTensor's local tensor is, for every placement that FSDP2 and expert parallelism produce: `Replicate`,
`Shard`, and the `_StridedShard` that FSDP2 makes of a tensor already sharded on the same dim (experts: ep
slice first, efsdp inside it). Nothing here communicates.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from expertmesh.compat import StridedShard
from expertmesh.io.boxes import Box, extents, full_box, slices
from expertmesh.state.packed import PackedTensor, stored, values_at
from expertmesh.state.sharded_model import sharded
from expertmesh.state.stage_view import is_on_other_stage, on_other_stage, placement_of


def local_box(tensor: Tensor) -> Box:
    """The box of the global tensor that this rank's local tensor is; the whole of it for a plain tensor.

    Empty shards have start == stop on the sharded dim. A rank outside the tensor's mesh holds an empty box, and so does
    one of another pipeline stage (but a scalar's box is never empty).
    """
    box = full_box(tensor.shape)
    if is_on_other_stage(tensor):
        return tuple((0, 0) for _ in box)
    if not isinstance(tensor, DTensor):
        return box
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return tuple((0, 0) for _ in box)
    box = box_at(tensor, coordinate)
    held = tuple(tensor.to_local().shape)
    where = f"{tuple(tensor.shape)} {tensor.placements}"
    assert held == extents(box), f"local tensor {held} is not box {box} of {where}"
    return box


def box_at(tensor: DTensor, coordinate: Sequence[int]) -> Box:
    """The box of `tensor` that the rank at `coordinate` of its mesh holds."""
    ranges = list(full_box(tensor.shape))
    for dim in range(tensor.dim()):
        start, stop = ranges[dim]
        for axis in _sharding_order(tensor, dim):
            # torch.chunk's rule: equal chunks rounded up, the last ones shorter or empty.
            chunk = -(-(stop - start) // tensor.device_mesh.size(axis))
            first = min(start + chunk * coordinate[axis], stop)
            start, stop = first, min(first + chunk, stop)
        ranges[dim] = (start, stop)
    return tuple(ranges)


def owns_copy(tensor: Tensor) -> bool:
    """Whether this rank is the one replica that writes its box of `tensor`.

    True where the coordinates on all `Replicate` axes are 0; for a plain tensor, on the first rank (of the stage that
    answers for it). The tensor's
    mesh has to contain every axis on which the tensor is replicated.
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
    return not dist.is_initialized() or dist.get_rank() == 0


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's own storage of `tensor`, detached: writing into it writes into the parameter.

    Of what another pipeline stage holds: an empty tensor on the CPU.
    """
    if is_on_other_stage(tensor):
        return torch.empty([0] * tensor.dim(), dtype=tensor.dtype)
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def local_values(tensor: Tensor, box: Box) -> Tensor:
    """The values of `box`, which is part of what this rank holds; of packed weights dequantised."""
    return values_at(local_tensor(tensor), slices(box, local_box(tensor)))


def full_values(tensor: DTensor) -> Tensor:
    """The whole tensor on every rank; of packed weights the values. Collective over the tensor's mesh."""
    local = local_tensor(tensor)
    if not isinstance(local, PackedTensor):
        return tensor.full_tensor()
    return DTensor.from_local(local.experts(0, len(local)), tensor.device_mesh, tensor.placements).full_tensor()


def as_stored(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """`tensor`, the one of `model` by this name; of packed experts their bytes `[E, bytes]`, in the same places."""
    kind = (sharded(model).frozen_formats or {}).get(name)
    if kind is None:
        return tensor
    if not isinstance(tensor, DTensor):
        return on_other_stage(torch.uint8, (tensor.shape[0], kind.bytes))
    return DTensor.from_local(stored(local_tensor(tensor)), tensor.device_mesh, tensor.placements, run_check=False)


def _sharding_order(tensor: DTensor, dim: int) -> list[int]:
    """The mesh axes that shard `dim`, outermost first: the order in which the dim is cut.

    Plain `Shard`s cut in mesh order. A `_StridedShard` on an axis left of them cuts after as many of them
    as multiply to its split factor.
    """
    order: list[int] = []
    for axis in reversed(range(len(tensor.placements))):
        placement = tensor.placements[axis]
        if shard_dim(placement) != dim:
            assert shard_dim(placement) is not None or isinstance(placement, Replicate), f"{placement}"
        elif isinstance(placement, StridedShard):
            inside = _prefix_of_size(tensor, order, int(placement.split_factor))
            order.insert(inside, axis)
        else:
            order.insert(0, axis)
    return order


def _prefix_of_size(tensor: DTensor, order: list[int], size: int) -> int:
    for length in range(len(order) + 1):
        if math.prod(tensor.device_mesh.size(axis) for axis in order[:length]) == size:
            return length
    raise AssertionError(f"no axes of {tensor.placements} multiply to split factor {size}")


def shard_dim(placement: Placement) -> int | None:
    """The dim that a placement cuts, or None."""
    # _StridedShard is a subclass of Shard in some torch versions and not in others.
    return placement.dim if isinstance(placement, (Shard, StridedShard)) else None
