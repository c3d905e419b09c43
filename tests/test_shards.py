"""`stored_box` against DTensor's own gathering, on real ranks, for the placements that this project makes."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from expertmesh.io.boxes import Box, blocks, extents, intersect, slices, volume
from expertmesh.state.shards import local_tensor, owns_copy, stored_box
from tests.support.one_launch import Launched, one_launch


class _Holder(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        numbers = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32)
        self.weight = nn.Parameter(numbers.reshape(shape))


def _compare(tensor: torch.Tensor) -> dict[str, Any]:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    box = stored_box(tensor)
    return {
        "box": box,
        "equal": torch.equal(whole[slices(box)], local_tensor(tensor)),
        "owns": owns_copy(tensor),
    }


def _dense(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> dict[str, Any]:
    holder = _Holder(shape)
    axes = ("replicate", "fsdp") if len(mesh_shape) == 2 else ("fsdp",)
    fully_shard(holder, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=axes))
    return _compare(holder.weight)


def _expert(shape: tuple[int, ...], replicate: int, efsdp: int, ep: int, dim: int) -> dict[str, Any]:
    sizes = {"replicate": replicate, "efsdp": efsdp, "ep": ep}
    kept = {name: size for name, size in sizes.items() if size > 1 or name != "replicate"}
    mesh = init_device_mesh("cpu", tuple(kept.values()), mesh_dim_names=tuple(kept))
    holder = _Holder(shape)
    size = shape[0] // ep
    local = holder.weight.detach()[mesh["ep"].get_local_rank() * size :][:size].clone()
    holder.weight = nn.Parameter(DTensor.from_local(local, mesh["ep"], [Shard(0)]))
    data: DeviceMesh = mesh["replicate", "efsdp"] if replicate > 1 else mesh["efsdp"]
    fully_shard(holder, mesh=data, shard_placement_fn=lambda _: Shard(dim))
    return _compare(holder.weight)


def _check(results: list[dict[str, Any]], shape: tuple[int, ...]) -> None:
    """Every local tensor is its box of the whole, and the owners' boxes cover each element once."""
    assert all(result["equal"] for result in results)
    counted = torch.zeros(shape, dtype=torch.int64)
    for result in results:
        if result["owns"]:
            counted[slices(result["box"])] += 1
    assert torch.equal(counted, torch.ones_like(counted))


@pytest.mark.parametrize(
    ("shape", "mesh_shape"),
    [((8, 3), (2,)), ((7, 3), (4,)), ((2, 3), (4,)), ((5,), (2,)), ((8, 3), (2, 2)), ((3, 2), (2, 2))],
)
@one_launch(lambda shape, mesh_shape: (math.prod(mesh_shape), lambda: _dense(shape, mesh_shape)))
def test_boxes_of_dense_shards_are_where_fsdp_put_them(
    launched: Launched, shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> None:
    _check(launched(), shape)


@pytest.mark.parametrize(
    ("shape", "replicate", "efsdp", "ep", "dim"),
    [
        ((8, 2, 3), 1, 2, 2, 0),
        ((6, 2, 3), 1, 2, 2, 0),  # three experts over two: uneven
        ((2, 2, 3), 1, 2, 2, 0),  # one expert over two: an empty shard
        ((4, 4, 3), 1, 2, 2, 1),
        ((4, 3, 4), 1, 2, 2, 2),
        ((4, 4, 3), 1, 1, 2, 0),
        ((4, 4, 3), 2, 2, 1, 0),
        ((4, 2, 3), 2, 1, 2, 0),
    ],
)
@one_launch(
    lambda shape, replicate, efsdp, ep, dim: (
        replicate * efsdp * ep,
        lambda: _expert(shape, replicate, efsdp, ep, dim),
    )
)
def test_boxes_of_expert_shards_cut_ep_first_and_efsdp_inside(
    launched: Launched, shape: tuple[int, ...], replicate: int, efsdp: int, ep: int, dim: int
) -> None:
    _check(launched(), shape)


@one_launch(lambda: (4, lambda: _expert((8, 2, 3), 1, 2, 2, 0)))
def test_a_rank_of_the_second_efsdp_half_holds_the_second_half_of_its_own_ep_slice(launched: Launched) -> None:
    # Ranks 0..3 are (efsdp, ep) = (0,0), (0,1), (1,0), (1,1); experts 0..3 belong to ep 0.
    results = launched()
    assert [result["box"][0] for result in results] == [(0, 2), (4, 6), (2, 4), (6, 8)]


def _plain() -> tuple[Box, bool]:
    tensor = torch.zeros(3, 2)
    return stored_box(tensor), owns_copy(tensor)


@one_launch(lambda: (2, _plain))
def test_a_plain_tensor_is_whole_everywhere_and_owned_by_rank_0(launched: Launched) -> None:
    assert launched() == [(((0, 3), (0, 2)), True), (((0, 3), (0, 2)), False)]
    assert _plain() == (((0, 3), (0, 2)), True)


def _distributed() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(60, dtype=torch.float32).reshape(10, 6)
    return _compare(distribute_tensor(whole, mesh, [Shard(0), Shard(0)]))


@one_launch(lambda: (4, _distributed))
def test_two_plain_shards_of_one_dim_cut_in_mesh_order(launched: Launched) -> None:
    _check(launched(), (10, 6))


def test_blocks_cover_a_box_once_and_stay_below_the_limit() -> None:
    box = ((2, 7), (1, 2), (3, 14))
    parts = list(blocks(box, 13))
    assert sum(volume(part) for part in parts) == volume(box)
    assert all(volume(part) <= 13 for part in parts)
    assert all(intersect(one, other) is None for one in parts for other in parts if one != other)
    assert list(blocks((), 1)) == [()]
    assert extents(box) == (5, 1, 11)
