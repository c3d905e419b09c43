"""Dispatch for EP groups of several nodes: a row is sent once to each node, and inside it once to each rank.

Between nodes a token's row goes to one rank of each node with any of its experts: the rank with the sender's place in
its node. That rank dispatches it inside the node as `AllToAllDispatcher` does. On return rows are summed inside the
node before one of them leaves it. Over uniform routing that is N(1 - C(E-E/N, K)/C(E, K)) rows a token for N nodes
instead of as many for all ranks: between nodes 0.30 of them for 2 nodes of 8 ranks, top-8 of 128 (docs/formulas.md).

    T tokens here, H hidden, K top-k, E experts, N nodes of the EP group, G ranks of each
    D = N * G, L = E / D experts of this rank, Q rows sent to nodes, R rows received from them
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from expertmesh.distributed.collectives import all_to_all, all_to_all_even, exact, to_host
from expertmesh.experts.activation_checkpointing import exchanged_once
from expertmesh.experts.dispatch import AllToAllDispatcher, Dispatched, SumRows
from expertmesh.experts.pairs import Counts, Segments, Splits, count_pairs, segment_sum, segments_of, totals_of


@dataclass(frozen=True, slots=True)
class _Route:
    """The rows sent to nodes, ordered by node, then token."""

    token_Q: torch.Tensor
    """The token of each row that is sent."""
    rows_of_token: Segments
    """The rows that each token is sent as."""
    splits: Splits
    """Rows sent to and received from each node; no pairs."""


@dataclass(frozen=True, eq=False)
class HierarchicalDispatcher:
    """A dispatcher in two steps: across nodes, then inside them. The EP group's ranks are contiguous by node."""

    num_experts: int
    across: dist.ProcessGroup
    """The ranks of the EP group with this rank's place in their nodes, in the order of nodes."""
    inside: dist.ProcessGroup
    """The ranks of this node."""
    triton: bool = False
    """True if Triton's kernels sort the routes and sum the rows."""

    def dispatch(self, hidden_TH: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor) -> Dispatched:
        """Send rows and pairs.

        Collectives: seven all-to-alls in forward: counts across and inside, choices, weights and rows across, pairs and
        rows inside; four in backward, of weights and rows. The second run of a checkpointed block has the counts.
        """
        nodes, tokens = self.across.size(), len(index_TK)
        here = self.num_experts // nodes
        # A cell is (node, token), as in AllToAllDispatcher with nodes for ranks.
        used_NT = index_TK.new_zeros(nodes, tokens).scatter_(0, index_TK.t() // here, 1)
        splits, inside_counts = exchanged_once(partial(self._exchange_counts, index_TK, used_NT.sum(1)))

        rows, used = sum(splits.rows_sent), used_NT.reshape(-1)
        place = torch.where(used == 1, used.cumsum(0) - 1, rows)
        cell_Q = used.new_empty(rows + 1).scatter_(0, place, torch.arange(len(used), device=used.device))[:rows]
        token_Q, node_Q1 = cell_Q % max(tokens, 1), (cell_Q // max(tokens, 1)).unsqueeze(1)
        route = _Route(token_Q, segments_of(token_Q, tokens), splits)

        index_QK = index_TK.index_select(0, token_Q) - node_Q1 * here
        index_QK = torch.where((index_QK >= 0) & (index_QK < here), index_QK, here).to(torch.int32)
        index_RK, _ = all_to_all(index_QK, splits.rows_sent, splits.rows_received, self.across)
        weight_RK = _SendRows.apply(exact(weight_TK), route, self._across()).to(weight_TK.dtype)
        rows_RH = _SendRows.apply(hidden_TH, route, self._across())
        inside = self._inside().dispatch(rows_RH, index_RK.long(), weight_RK, inside_counts)
        return (*inside[:3], (route, inside[3]))

    def combine(self, rows_RH: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Return and sum the rows. Collectives: two all-to-alls in forward, inside and across, and two in backward."""
        route, inside = metadata
        out_TH: torch.Tensor = SumRows.apply(self._inside().combine(rows_RH, inside), route, self._across())
        return out_TH

    def numbers(self, number_T: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Send one number for each row. Collectives: two all-to-alls of 8 bytes a row."""
        route, inside = metadata
        number_Q = number_T.index_select(0, route.token_Q)
        number_R, _ = all_to_all(number_Q, route.splits.rows_sent, route.splits.rows_received, self.across)
        return self._inside().numbers(number_R, inside)

    def _across(self) -> AllToAllDispatcher:
        return AllToAllDispatcher(self.across.size(), self.across, self.triton)

    def _inside(self) -> AllToAllDispatcher:
        return AllToAllDispatcher(self.num_experts // self.across.size(), self.inside, self.triton)

    def _exchange_counts(self, index_TK: torch.Tensor, rows_N: torch.Tensor) -> tuple[Splits, Counts]:
        """Return the rows sent across, and the counts of the dispatch inside. Two all-to-alls; waits for the host once.

        A sender also announces how many of its rows each rank of the other node will get, and how many pairs each
        expert: their sums over senders are what a rank will send inside, so that nobody waits twice.
        """
        nodes, ranks = self.across.size(), self.inside.size()
        here = self.num_experts // (nodes * ranks)
        used_DT = index_TK.new_zeros(nodes * ranks, len(index_TK)).scatter_(0, index_TK.t() // here, 1)
        pairs_DL = count_pairs(index_TK, self.num_experts).view(-1, here)
        for_ranks_DL = torch.cat([used_DT.sum(1, keepdim=True), pairs_DL], dim=1)
        sent = torch.cat([rows_N.unsqueeze(1), for_ranks_DL.view(nodes, -1)], dim=1)
        received = all_to_all_even(sent, self.across)
        sent_inside = received[:, 1:].sum(0).view(ranks, -1)
        received_inside = all_to_all_even(sent_inside, self.inside)
        totals = totals_of(sent_inside, received_inside).reshape(-1)
        numbers = to_host(torch.cat([sent[:, 0], received[:, 0], totals]))
        across, inside = numbers[: 2 * nodes], numbers[2 * nodes :]
        splits = Splits(across[:nodes], across[nodes:], [], [])
        return splits, (
            received_inside,
            Splits(*(inside[first : first + ranks] for first in range(0, 4 * ranks, ranks))),
        )


class _SendRows(torch.autograd.Function):
    """Send each token's values to its nodes, values_TX -> values_RX: the opposite direction of `SumRows`."""

    @staticmethod
    def forward(ctx: Any, values_TX: torch.Tensor, route: _Route, by: AllToAllDispatcher) -> torch.Tensor:
        ctx.save_for_backward(route.rows_of_token.item_P, route.rows_of_token.start_R1)
        ctx.splits, ctx.by = route.splits, by
        values_QX = values_TX.index_select(0, route.token_Q)
        values_RX, _ = all_to_all(values_QX, route.splits.rows_sent, route.splits.rows_received, by.group)
        return values_RX

    @staticmethod
    def backward(ctx: Any, grad_RX: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_QX, _ = all_to_all(grad_RX, ctx.splits.rows_received, ctx.splits.rows_sent, ctx.by.group)
        return segment_sum(grad_QX, Segments(*ctx.saved_tensors), ctx.by.triton), None, None
