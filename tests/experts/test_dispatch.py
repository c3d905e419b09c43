"""Dispatch and combine on real ranks: the result, the gradients, and exactly what is sent."""

import functools
import math
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from expertmesh.distributed import collectives
from expertmesh.distributed.layout import TopKRouter, rows_per_token
from expertmesh.experts import dispatch
from expertmesh.experts.dispatch import AllToAllDispatcher, Dispatcher, HierarchicalDispatcher, LocalDispatcher
from expertmesh.experts.pairs import LocalPairs, segments_of
from expertmesh.planning.traffic import _of_dispatch
from tests.support.all_gather_dispatch import AllGatherDispatcher
from tests.support.one_launch import Launched, one_launch
from tests.support.ranks import shared_ranks

EXPERTS, HIDDEN, TOP_K = 8, 6, 3
Routing = Callable[[int, int], torch.Tensor]


def _spread(tokens: int, rank: int) -> torch.Tensor:
    return torch.rand(tokens, EXPERTS).topk(TOP_K).indices


def _to_first_experts(tokens: int, rank: int) -> torch.Tensor:
    """Every token wants experts 0, 1, 2: with 4 ranks of 2 experts, ranks 2 and 3 receive nothing."""
    return torch.arange(TOP_K).expand(tokens, TOP_K).contiguous()


ROUTINGS = {"spread": _spread, "two ranks without a token": _to_first_experts}
TOKENS = [7, 0, 5, 12]  # on rank 1 no token at all


def routed_inputs(rank: int, routing: Routing) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rank)
    tokens = TOKENS[rank]
    index = routing(tokens, rank)
    return torch.randn(tokens, HIDDEN), index, torch.rand(tokens, TOP_K)


def _experts_on(rows: torch.Tensor, weight_P: torch.Tensor, pairs: Any, first: int) -> torch.Tensor:
    """Expert e multiplies by e + 1; plain autograd, so that only the dispatcher is under test."""
    ends = pairs.expert_end_L.tolist()
    expert_P = torch.tensor([sum(place >= end for end in ends) for place in range(len(weight_P))])
    out_PH = rows[pairs.row_P] * (weight_P * (expert_P + first + 1)).unsqueeze(1)
    return torch.zeros(len(rows), HIDDEN).index_add(0, pairs.row_P, out_PH)


def sent_through(dispatcher: Dispatcher, inputs: tuple[torch.Tensor, ...], first: int) -> list[torch.Tensor]:
    hidden, index, weight = inputs[0].clone().requires_grad_(), inputs[1], inputs[2].clone().requires_grad_()
    rows, weight_P, pairs, metadata = dispatcher.dispatch(hidden, index, weight)
    out = dispatcher.combine(_experts_on(rows, weight_P, pairs, first), metadata)
    weighting = torch.arange(out.numel(), dtype=torch.float32).view_as(out) / 10
    return [out.detach(), *torch.autograd.grad((out * weighting).sum(), [hidden, weight])]


def _hierarchical(experts: int, group: dist.ProcessGroup) -> HierarchicalDispatcher:
    """Over nodes of two ranks each."""
    mesh = DeviceMesh("cpu", torch.arange(group.size()).view(-1, 2), mesh_dim_names=("across", "inside"))
    return HierarchicalDispatcher(experts, mesh.get_group("across"), mesh.get_group("inside"))


def _compare_with_local(kind: Callable[..., Dispatcher], routing: Routing) -> float:
    group, rank = dist.group.WORLD, dist.get_rank()
    inputs = routed_inputs(rank, routing)
    got = sent_through(kind(EXPERTS, group), inputs, rank * EXPERTS // group.size())
    expected = sent_through(LocalDispatcher(EXPERTS), inputs, 0)
    return max([float((a - b).abs().max()) for a, b in zip(got, expected, strict=True) if a.numel()], default=0.0)


@pytest.mark.parametrize("kind", [AllToAllDispatcher, AllGatherDispatcher, _hierarchical])
@pytest.mark.parametrize("routing", ROUTINGS)
@one_launch(lambda kind, routing: (4, functools.partial(_compare_with_local, kind, ROUTINGS[routing])))
def test_results_and_gradients_equal_a_single_process(
    launched: Launched, kind: Callable[..., Dispatcher], routing: str
) -> None:
    assert max(launched()) <= 1e-5


class _Traffic(TorchDispatchMode):
    """Rows and dtypes of each all-to-all, and operations whose result size waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == "c10d::alltoall_base_":
            self.sent.append((tuple(args[1].shape), args[1].dtype))
        if name in ("aten::nonzero", "aten::_local_scalar_dense", "aten::masked_select", "aten::unique_dim"):
            self.waits.append(name)
        return func(*args, **(kwargs or {}))


def _count_traffic(routing: Routing) -> dict[str, Any]:
    group, rank = dist.group.WORLD, dist.get_rank()
    hidden, index, weight = routed_inputs(rank, routing)
    hidden.requires_grad_(), weight.requires_grad_()
    dispatcher = AllToAllDispatcher(EXPERTS, group)
    with mock.patch.object(dispatch, "to_host", wraps=collectives.to_host) as to_host:
        with _Traffic() as forward:
            rows, weight_P, _, route = dispatcher.dispatch(hidden, index, weight)
            out = dispatcher.combine(rows * 1, route)
        in_forward = to_host.call_count
        with _Traffic() as backward:
            (out.sum() + weight_P.sum()).backward()
    owner = index // (EXPERTS // group.size())
    distinct = sum(len(set(row)) for row in owner.tolist())
    return {
        "distinct": distinct,
        "pairs": index.numel(),
        "received": len(rows),
        "computed": len(weight_P),
        "forward": forward.sent,
        "backward": backward.sent,
        "host": (in_forward, to_host.call_count - in_forward),
        "waits": forward.waits + backward.waits,
    }


@pytest.mark.parametrize("routing", ROUTINGS)
@one_launch(lambda routing: (4, functools.partial(_count_traffic, ROUTINGS[routing])))
def test_each_token_travels_once_to_each_rank_that_holds_its_experts(launched: Launched, routing: str) -> None:
    for counts in launched():
        _, (pairs, _), (rows, _), (returned, _) = counts["forward"]
        assert rows == (counts["distinct"], HIDDEN)
        assert pairs == (counts["pairs"], 2)
        assert returned == (counts["received"], HIDDEN)
        # Backward travels the same ways in reverse, with one number for each pair computed here.
        sizes = sorted(shape for shape, _ in counts["backward"])
        assert sizes == sorted([(counts["distinct"], HIDDEN), (counts["received"], HIDDEN), (counts["computed"],)])


def test_one_wait_for_the_host_in_forward_and_none_in_backward() -> None:
    for counts in shared_ranks(_count_traffic, 4, _spread):
        assert counts["host"] == (1, 0)
        assert counts["waits"] == []


def test_rows_sent_follow_the_formula_for_uniform_routing() -> None:
    """E[D] = R (1 - C(E - E/R, K) / C(E, K)): 3.66 of 8 rows a token for 64 experts on 4 ranks, top-8."""
    torch.manual_seed(0)
    index = torch.rand(4000, 64).topk(8).indices
    rows = sum(len(set(row)) for row in (index // 16).tolist()) / len(index)
    assert rows == pytest.approx(4 * (1 - math.comb(48, 8) / math.comb(64, 8)), rel=0.01)


class _RowForEachPair:
    """A dispatcher as someone else would write it, from the protocol alone: one process, a row for each pair."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def dispatch(
        self, hidden_TH: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, LocalPairs, Any]:
        expert_P, pair_P = torch.sort(index_TK.reshape(-1), stable=True)
        token_P = pair_P // index_TK.shape[1]
        row_P, end_E = torch.arange(len(pair_P)), torch.arange(1, self.num_experts + 1)
        expert_end_E = torch.searchsorted(expert_P, end_E).to(torch.int32)
        pairs = LocalPairs(row_P, expert_end_E, segments_of(row_P, len(row_P)))
        return hidden_TH[token_P], weight_TK.reshape(-1)[pair_P], pairs, (token_P, len(hidden_TH))

    def combine(self, rows_RH: torch.Tensor, metadata: tuple[torch.Tensor, int]) -> torch.Tensor:
        token_P, tokens = metadata
        return rows_RH.new_zeros(tokens, rows_RH.shape[1]).index_add(0, token_P, rows_RH)

    def send_token_numbers(self, token_number_T: torch.Tensor, metadata: tuple[torch.Tensor, int]) -> torch.Tensor:
        return token_number_T[metadata[0]]


def test_a_dispatcher_written_from_the_protocol_alone_gives_the_same() -> None:
    """CONTRIBUTING.md, "How to add a dispatcher"."""
    own: Dispatcher = _RowForEachPair(EXPERTS)
    inputs = routed_inputs(0, _spread)
    for got, expected in zip(
        sent_through(own, inputs, 0), sent_through(LocalDispatcher(EXPERTS), inputs, 0), strict=True
    ):
        torch.testing.assert_close(got, expected)


NODE = 4


def _between_nodes(kind: Callable[..., Dispatcher], experts: int, top_k: int) -> dict[str, Any]:
    """Rows that this rank sends to other nodes of `NODE` ranks, there and back, and what comes of it in fp64."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    mesh = DeviceMesh("cpu", torch.arange(group.size()).view(-1, NODE), mesh_dim_names=("across", "inside"))
    flat = kind is AllToAllDispatcher
    across = group if flat else mesh.get_group("across")
    dispatcher = kind(experts, group) if flat else kind(experts, across, mesh.get_group("inside"))
    here = slice(rank // NODE * NODE, (rank // NODE + 1) * NODE) if flat else slice(rank // NODE, rank // NODE + 1)
    sent, waits = 0, 0

    def all_to_all(rows: torch.Tensor, send: list[int], receive: list[int], way: Any, **options: Any) -> Any:
        nonlocal sent
        if way is across and rows.dtype == torch.float64 and rows.dim() == 2 and rows.shape[1] == HIDDEN:
            sent += sum(send) - sum(send[here])
        return collectives.all_to_all(rows, send, receive, way, **options)

    def to_host(counts: torch.Tensor) -> list[Any]:
        nonlocal waits
        waits += 1
        return collectives.to_host(counts)

    torch.manual_seed(rank)
    tokens = 0 if rank == 1 else 60
    index = torch.rand(tokens, experts).topk(top_k).indices
    hidden, weight = torch.randn(tokens, HIDDEN, dtype=torch.float64), torch.rand(tokens, top_k, dtype=torch.float64)
    number = torch.arange(tokens) + 1000 * rank
    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(dispatch, "all_to_all", all_to_all))
        patched.enter_context(mock.patch.object(dispatch, "to_host", to_host))
        traffic = patched.enter_context(_Traffic())
        results = _through_wide(dispatcher, hidden, index, weight, rank * experts // group.size())
    rows, _, _, metadata = dispatcher.dispatch(hidden + number[:, None], index, weight)
    numbers = dispatcher.send_token_numbers(number, metadata)
    fits = bool(((rows - numbers[:, None]).abs() < 10).all()) and len(numbers) == len(rows)
    others = [
        {each for each in row if each // NODE != rank // NODE} for row in (index * group.size() // experts).tolist()
    ]
    expected = [len(row if flat else {each // NODE for each in row}) for row in others]
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in traffic.sent)
    return {
        "results": results,
        "sent": sent,
        "waits": waits,
        "fits": fits,
        "expected": sum(expected),
        "bytes": size,
        "calls": len(traffic.sent),
    }


def _through_wide(
    dispatcher: Dispatcher, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor, first: int
) -> list[torch.Tensor]:
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    rows, weight_P, pairs, metadata = dispatcher.dispatch(leaves[0], index, leaves[1])
    expert_P = pairs.expert_P() + first + 1
    out_PH = rows[pairs.row_P] * (weight_P * expert_P).unsqueeze(1)
    out = dispatcher.combine(torch.zeros_like(rows).index_add(0, pairs.row_P, out_PH), metadata)
    weighting = torch.arange(out.numel(), dtype=torch.float64).view_as(out) / 10
    return [out.detach(), *torch.autograd.grad((out * weighting).sum(), leaves)]


def test_between_nodes_a_row_travels_once_to_each_and_the_result_is_that_of_the_flat_dispatch() -> None:
    experts, top_k = 32, 4
    flat, tiered = (
        shared_ranks(_between_nodes, 8, kind, experts, top_k) for kind in (AllToAllDispatcher, HierarchicalDispatcher)
    )
    for one, other in zip(flat, tiered, strict=True):
        for got, want in zip(other["results"], one["results"], strict=True):
            assert got.shape == want.shape
            assert (got - want).norm() <= 1e-12 * want.norm()
        assert one["waits"] == other["waits"] == 1
        assert one["fits"]
        assert other["fits"]
    # Rows go and come back in forward and in backward.
    for way in (flat, tiered):
        assert sum(each["sent"] for each in way) == 4 * sum(each["expected"] for each in way)
    # The planner's expectation, for the mean of a rank's tokens.
    router = TopKRouter(experts, top_k)
    figures: Any = SimpleNamespace(router=router, spec=SimpleNamespace(hidden_size=HIDDEN, num_experts=experts))
    for way, nodes in ((flat, 1), (tiered, 2)):
        predicted = list(_of_dispatch(figures, 8, router.routed(60 * 7 / 8, 8), (1, 1), (8, nodes)))
        assert {each["calls"] for each in way} == {sum(each.calls for each in predicted)}
        assert sum(each["bytes"] for each in way) / 8 == pytest.approx(sum(each.bytes for each in predicted), rel=0.02)


@pytest.mark.parametrize(("ranks", "share"), [(16, 0.30), (32, 0.49), (64, 0.69)])
def test_rows_between_nodes_of_eight_ranks_for_top_8_of_128(ranks: int, share: float) -> None:
    torch.manual_seed(0)
    owner = torch.rand(4000, 128).topk(8).indices // (128 // ranks)  # as seen from rank 0
    flat = sum(len({rank for rank in row if rank >= 8}) for row in owner.tolist())
    tiered = sum(len({rank // 8 for rank in row if rank >= 8}) for row in owner.tolist())
    router = TopKRouter(128, 8)
    predicted = [rows_per_token(router, parts) * (1 - 8 / ranks) for parts in (ranks // 8, ranks)]
    assert tiered / flat == pytest.approx(predicted[0] / predicted[1], rel=0.02)
    assert tiered / flat == pytest.approx(share, abs=0.01)
