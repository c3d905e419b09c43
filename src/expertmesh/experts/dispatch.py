"""Send tokens to the ranks that hold their experts, and return the results. Communication only, no maths on tokens.

A token is sent **once** to each rank that holds any of its experts (de-duplicated dispatch), with its pairs: which row,
which weight, ordered by expert. The expert's rank sums a token's pairs before it returns one row (pre-reduced combine).
Over uniform routing this sends R(1 - C(E-E/R, K)/C(E, K)) rows per token instead of K. `HierarchicalDispatcher` sends a
row once to each node, and inside the node once to each rank; on return rows are summed inside the node. Between N nodes
that is N(1 - C(E-E/N, K)/C(E, K)) rows a token (docs/formulas.md).

A rank without tokens takes part in every collective. Each dispatch waits for the device once, in forward; neither
backward nor the second run of a checkpointed block waits. deepep.py has a dispatcher with another library's kernels.

    T tokens here, H hidden, K top-k, E experts, D ranks of the EP group, L = E / D experts here
    Q rows and S = T * K pairs sent, R rows and P pairs received; N nodes of the EP group, G ranks of each, D = N * G
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from expertmesh.distributed.collectives import all_to_all, all_to_all_even, exact, to_host
from expertmesh.experts.activation_checkpointing import exchanged_once
from expertmesh.experts.pairs import LocalPairs, Segments, count_pairs, order_by_expert, segment_sum, segments_of

# `rows_RH`, the weight of each local pair `weight_P`, pairs, and metadata of the dispatcher's own type for `combine`.
Dispatched = tuple[torch.Tensor, torch.Tensor, LocalPairs, Any]
# Gradients in flight to the ranks of their tokens, each with the work to wait for: of weights, then of rows.
_GradientsInFlight = tuple[torch.Tensor, dist.Work | None, torch.Tensor, dist.Work | None]


class Dispatcher(Protocol):
    """Send tokens to expert ranks and return the results; both calls are differentiable and collective over the EP
    group.
    """

    def dispatch(self, hidden_TH: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor) -> Dispatched:
        """Send tokens to the ranks of their experts.

        Args:
            hidden_TH: hidden states in the compute dtype.
            index_TK: the experts of each token, int64, as numbers of slots.
            weight_TK: their routing weights, in any float dtype.

        Returns:
            (`rows_RH`, `weight_P`, pairs by local expert, metadata for the other methods).
        """
        ...

    def combine(self, rows_RH: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Return `out_TH`: for each token the sum of its rows from all ranks."""
        ...

    def send_token_numbers(self, token_number_T: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Return `token_number_R`: for each row its token's entry of `token_number_T` (int64). Collective as well."""
        ...


@dataclass(frozen=True, eq=False)
class LocalDispatcher:
    """All experts are on this rank: the rows are the tokens, and nothing is sent."""

    num_experts: int
    """E."""
    triton: bool = False
    """True if Triton's kernels sort the pairs."""

    def dispatch(self, hidden_TH: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor) -> Dispatched:
        tokens, top_k = index_TK.shape
        order_P, place_P = order_by_expert(index_TK.reshape(-1), self.num_experts, self.triton)
        row_P = order_P // top_k
        end_E = count_pairs(index_TK, self.num_experts).cumsum(0).to(torch.int32)
        # A token's K pairs are neighbours before the sort, so each segment starts at a multiple of K.
        by_row = Segments(place_P, torch.arange(0, tokens * top_k + 1, top_k, device=place_P.device))
        pairs = LocalPairs(row_P, end_E, by_row)
        return hidden_TH, weight_TK.reshape(-1).index_select(0, order_P), pairs, None

    def combine(self, rows_RH: torch.Tensor, metadata: Any) -> torch.Tensor:
        return rows_RH

    def send_token_numbers(self, token_number_T: torch.Tensor, metadata: Any) -> torch.Tensor:
        return token_number_T


@dataclass(frozen=True, slots=True)
class Splits:
    """Numbers of rows and pairs exchanged with each rank of the group, on the host; each list is by rank."""

    rows_sent: list[int]
    """Rows sent to each rank."""
    rows_received: list[int]
    """Rows received from each rank."""
    pairs_sent: list[int]
    """Pairs sent to each rank."""
    pairs_received: list[int]
    """Pairs received from each rank."""


# Rows and pairs of each expert, received from each rank: int64 `[D, 1 + L]`, and their totals.
Counts = tuple[torch.Tensor, Splits]


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """The splits and indices of one all-to-all dispatch; combine and backward use them again.

    Rows are sent ordered by rank, then token; pairs ordered by expert (so by rank too).
    """

    token_Q: torch.Tensor
    """The token of each row that is sent."""
    rows_of_token: Segments
    """The rows that each token is sent as."""
    pair_S: torch.Tensor
    """The pair sent in each place, as token * K + k."""
    row_in_block_S: torch.Tensor
    """Its row, counted within the block of its rank."""
    received_P: torch.Tensor
    """The place at which each local pair, ordered by expert, is received."""
    block_start_P: torch.Tensor
    """The first row of the block that the received pair belongs to."""
    expert_end_L: torch.Tensor
    """End of each local expert's pairs."""
    splits: Splits
    """Rows and pairs sent to and received from each rank."""


@dataclass(frozen=True, eq=False)
class AllToAllDispatcher:
    """De-duplicated all-to-all dispatch with pre-reduced combine."""

    num_experts: int
    """E."""
    group: dist.ProcessGroup
    """The EP group."""
    triton: bool = False
    """True if Triton's kernels sort the pairs and sum the rows."""

    def dispatch(
        self,
        hidden_TH: torch.Tensor,
        index_TK: torch.Tensor,
        weight_TK: torch.Tensor,
        counts: Counts | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Dispatched:
        """Send rows and pairs. Expert id `num_experts` marks a padded routing entry; it is not sent.

        `meanwhile` runs while rows are in flight, and its backward runs while their gradients are.

        Collectives: three all-to-alls in forward (counts, pairs, rows), two in backward (pair weights, rows). The
        second run of a checkpointed block has the counts already, and so may the caller.
        """
        plan = self._plan(index_TK, counts)
        in_flight = None if meanwhile is None else _InFlight()
        rows_RH, weight_P, row_P = _AllToAllDispatch.apply(hidden_TH, weight_TK, plan, self, in_flight)
        if meanwhile is not None:
            meanwhile()
            rows_RH, weight_P = _Receive.apply(rows_RH, weight_P, plan, self, in_flight)
        by_row = segments_of(row_P, rows_RH.shape[0])
        return rows_RH, weight_P, LocalPairs(row_P, plan.expert_end_L, by_row), plan

    def combine(self, rows_RH: torch.Tensor, metadata: DispatchPlan) -> torch.Tensor:
        """Return and sum the rows. Collectives: one all-to-all in forward, one in backward."""
        out_TH: torch.Tensor = SumRows.apply(rows_RH, metadata, self)
        return out_TH

    def send_token_numbers(self, token_number_T: torch.Tensor, metadata: DispatchPlan) -> torch.Tensor:
        """Send one number for each row. Collectives: one all-to-all of 8 bytes a row."""
        splits, token_number_Q = metadata.splits, token_number_T.index_select(0, metadata.token_Q)
        token_number_R, _ = all_to_all(token_number_Q, splits.rows_sent, splits.rows_received, self.group)
        return token_number_R

    def _plan(self, index_TK: torch.Tensor, counts: Counts | None) -> DispatchPlan:
        """Plan one dispatch.

        Issues the count exchange and the layer's one host synchronisation, unless `counts` are given or activation
        checkpointing runs this again.
        """
        ranks, tokens, top_k = self.group.size(), *index_TK.shape
        experts_here = self.num_experts // ranks
        # One expert more than there are: padded routing entries, which are ordered last.
        pair_S, _ = order_by_expert(index_TK.reshape(-1), self.num_experts + 1, self.triton)
        token_S, rank_S = pair_S // top_k, index_TK.reshape(-1).index_select(0, pair_S) // experts_here
        # A cell is (rank, token). The used cells, in order, are the rows to send: each token once to each rank. Padded
        # routing entries use the cells of one rank more; their pairs are last, and are cut off once their number is
        # known.
        cell_S = rank_S * tokens + token_S
        used = cell_S.new_zeros((ranks + 1) * tokens).scatter_(0, cell_S, 1)
        rows_D = used.view(ranks + 1, tokens).sum(1)
        row_S = used.cumsum(0).index_select(0, cell_S) - 1
        row_in_block_S = row_S - (rows_D.cumsum(0) - rows_D).index_select(0, rank_S)

        received, splits = counts or exchanged_once(partial(self._exchange_counts, index_TK, rows_D[:-1]))

        pair_S, token_S, row_S, row_in_block_S = (
            each[: sum(splits.pairs_sent)] for each in (pair_S, token_S, row_S, row_in_block_S)
        )
        # All pairs of a row write the same token, so the order of the writes is no matter.
        token_Q = token_S.new_empty(sum(splits.rows_sent)).scatter_(0, row_S, token_S)
        received_P, source_P = _order_received(received[:, 1:], sum(splits.pairs_received))
        block_start_D = received[:, 0].cumsum(0) - received[:, 0]
        return DispatchPlan(
            token_Q=token_Q,
            rows_of_token=segments_of(token_Q, tokens),
            pair_S=pair_S,
            row_in_block_S=row_in_block_S,
            received_P=received_P,
            block_start_P=block_start_D.index_select(0, source_P),
            # int32, as torch's grouped product takes ends.
            expert_end_L=received[:, 1:].sum(0).cumsum(0).to(torch.int32),
            splits=splits,
        )

    def _exchange_counts(self, index_TK: torch.Tensor, rows_D: torch.Tensor) -> Counts:
        """Return rows and pairs of each expert from each rank, int64 `[D, 1 + L]`, and their totals on the host."""
        pairs_DL = count_pairs(index_TK, self.num_experts + 1)[:-1].view(len(rows_D), -1)
        sent = torch.cat([rows_D.unsqueeze(1), pairs_DL], dim=1)
        received = all_to_all_even(sent, self.group)
        # Both directions' totals in one copy: the host waits for the device once.
        return received, Splits(*to_host(_totals_of(sent, received)))


def _order_received(pairs_DL: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Order received pairs by (expert, source rank); they are received by (source rank, expert).

    Args:
        pairs_DL: Pairs from each rank for each local expert.
        total: Their sum.

    Returns:
        For each pair in the new order its place as received, and its source rank. Blocks move as a whole, so no sort is
        needed.
    """
    ranks, experts_here = pairs_DL.shape
    # Where each block starts as received, and where it shall start; all its pairs move by the difference.
    received_DL = (pairs_DL.reshape(-1).cumsum(0)).view(ranks, experts_here) - pairs_DL
    pairs_LD = pairs_DL.t().reshape(-1)
    wanted_LD = pairs_LD.cumsum(0) - pairs_LD
    shift_LD = received_DL.t().reshape(-1) - wanted_LD
    block_P = torch.repeat_interleave(pairs_LD, output_size=total)
    received_P = torch.arange(total, device=pairs_DL.device) + shift_LD.index_select(0, block_P)
    return received_P, block_P % ranks


def _totals_of(sent: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Return the numbers of `Splits`, `[4, D]`, from counts `[D, 1 + L]`."""
    return torch.stack([sent[:, 0], received[:, 0], sent[:, 1:].sum(1), received[:, 1:].sum(1)])


@dataclass(slots=True)
class _InFlight:
    """The communication that `_AllToAllDispatch` and `_Receive` leave open between them."""

    rows: dist.Work | None = None
    """In forward, from `_AllToAllDispatch` to `_Receive`."""
    gradients: _GradientsInFlight | None = None
    """In backward, the other way round."""


class _AllToAllDispatch(torch.autograd.Function):
    """(hidden_TH, weight_TK) -> (rows_RH, weight_P, row_P), pairs by expert.

    With `in_flight` the rows may not be here yet: nothing may read them before `_Receive`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: torch.Tensor,
        weight_TK: torch.Tensor,
        plan: DispatchPlan,
        dispatcher: AllToAllDispatcher,
        in_flight: _InFlight | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # Save index tensors like any other: as attributes of ctx they would outlive a checkpointed block's first run.
        ctx.save_for_backward(plan.received_P, plan.pair_S, plan.rows_of_token.item_P, plan.rows_of_token.start_R1)
        ctx.splits, ctx.dispatcher, ctx.weights = plan.splits, dispatcher, (weight_TK.shape, weight_TK.dtype)
        ctx.in_flight = in_flight
        splits, group = plan.splits, dispatcher.group
        # Send the pairs in one message, weight bits beside row numbers, and before the rows: NCCL sends one message
        # after the other, so the pairs are sorted while the rows are in flight.
        weight_S = exact(weight_TK.reshape(-1).index_select(0, plan.pair_S))
        bits = torch.int64 if weight_S.dtype == torch.float64 else torch.int32
        pair_S2 = torch.stack([plan.row_in_block_S.to(bits), weight_S.view(bits)], dim=1)
        pair_P2, pairs_work = all_to_all(pair_S2, splits.pairs_sent, splits.pairs_received, group, wait=False)
        rows_QH = hidden_TH.index_select(0, plan.token_Q)
        rows_RH, rows_work = all_to_all(rows_QH, splits.rows_sent, splits.rows_received, group, wait=False)
        wait(pairs_work)
        pair_P2 = pair_P2.index_select(0, plan.received_P)
        row_P = pair_P2[:, 0].long() + plan.block_start_P
        weight_P = pair_P2[:, 1].contiguous().view(weight_S.dtype).to(weight_TK.dtype)
        ctx.mark_non_differentiable(row_P)
        if in_flight is None:
            wait(rows_work)
        else:
            in_flight.rows = rows_work
        return rows_RH, weight_P, row_P

    @staticmethod
    def backward(
        ctx: Any, grad_rows_RH: torch.Tensor, grad_weight_P: torch.Tensor, grad_row_P: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        received_P, pair_S, *rows_of_token = ctx.saved_tensors
        if ctx.in_flight is None:
            sent = _send_gradients(grad_weight_P, grad_rows_RH, received_P, ctx.splits, ctx.dispatcher.group)
        else:
            sent, ctx.in_flight.gradients = ctx.in_flight.gradients, None
        grad_weight_S, pairs_work, grad_rows_QH, rows_work = sent
        # Pairs came first, so their gradients are put in place while the rows are in flight.
        wait(pairs_work)
        shape, dtype = ctx.weights
        # Padded routing entries were never sent: their weights get zeros.
        grad_weight = grad_weight_S.new_zeros(shape.numel()).index_copy_(0, pair_S, grad_weight_S)
        wait(rows_work)
        grad_hidden_TH = segment_sum(grad_rows_QH, Segments(*rows_of_token), ctx.dispatcher.triton)
        return grad_hidden_TH, grad_weight.view(shape).to(dtype), None, None, None


def _send_gradients(
    grad_weight_P: torch.Tensor,
    grad_rows_RH: torch.Tensor,
    received_P: torch.Tensor,
    splits: Splits,
    group: dist.ProcessGroup,
) -> _GradientsInFlight:
    """Issue both backward all-to-alls, on every rank, even without local tokens: skipping one would hang the others."""
    grad_received_P = exact(torch.empty_like(grad_weight_P).index_copy_(0, received_P, grad_weight_P))
    grad_weight_S = all_to_all(grad_received_P, splits.pairs_received, splits.pairs_sent, group, wait=False)
    return *grad_weight_S, *all_to_all(grad_rows_RH, splits.rows_received, splits.rows_sent, group, wait=False)


class _Receive(torch.autograd.Function):
    """Wait for the rows of `_AllToAllDispatch` and return them.

    In backward it issues the all-to-alls of their gradients, for which `_AllToAllDispatch` waits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows_RH: torch.Tensor,
        weight_P: torch.Tensor,
        plan: DispatchPlan,
        dispatcher: AllToAllDispatcher,
        in_flight: _InFlight,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(plan.received_P)
        ctx.splits, ctx.group, ctx.in_flight = plan.splits, dispatcher.group, in_flight
        wait(in_flight.rows)
        in_flight.rows = None
        # An autograd function that returns its inputs themselves would be no node between them and what reads them.
        return rows_RH.view_as(rows_RH), weight_P.view_as(weight_P)

    @staticmethod
    def backward(ctx: Any, grad_rows_RH: torch.Tensor, grad_weight_P: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sent = _send_gradients(grad_weight_P, grad_rows_RH, ctx.saved_tensors[0], ctx.splits, ctx.group)
        ctx.in_flight.gradients = sent
        # The gradient that autograd passes here has a shape and no values; the values are in flight.
        placeholders = (each.new_zeros(()).expand_as(each) for each in (grad_rows_RH, grad_weight_P))
        return *placeholders, None, None, None


class SumRows(torch.autograd.Function):
    """Return rows_RH to the ranks of their tokens, and sum what each token receives: out_TH."""

    @staticmethod
    def forward(
        ctx: Any, rows_RH: torch.Tensor, plan: "DispatchPlan | NodePlan", dispatcher: AllToAllDispatcher
    ) -> torch.Tensor:
        # Do not save through autograd: a checkpointed block would be recomputed up to here for this tensor alone.
        ctx.token_Q, ctx.splits, ctx.group = plan.token_Q, plan.splits, dispatcher.group
        rows_QH, _ = all_to_all(rows_RH, plan.splits.rows_received, plan.splits.rows_sent, dispatcher.group)
        return segment_sum(rows_QH, plan.rows_of_token, dispatcher.triton)

    @staticmethod
    def backward(ctx: Any, grad_out_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Forward sums a token's rows, so each of them has the token's gradient.
        grad_rows_QH = grad_out_TH.index_select(0, ctx.token_Q)
        grad_rows_RH, _ = all_to_all(grad_rows_QH, ctx.splits.rows_sent, ctx.splits.rows_received, ctx.group)
        return grad_rows_RH, None, None


def wait(work: dist.Work | None) -> None:
    """Wait for the work: on an accelerator its stream waits, not the host."""
    if work is not None:
        work.wait()


@dataclass(frozen=True, slots=True)
class NodePlan:
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
    """E."""
    across: dist.ProcessGroup
    """The ranks of the EP group with this rank's place in their nodes, in the order of nodes."""
    inside: dist.ProcessGroup
    """The ranks of this node."""
    triton: bool = False
    """True if Triton's kernels sort the pairs and sum the rows."""

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
        # Unused cells write to one place behind the rows, which is cut off: a mask would wait for the device.
        place = torch.where(used == 1, used.cumsum(0) - 1, rows)
        cell_Q = used.new_empty(rows + 1).scatter_(0, place, torch.arange(len(used), device=used.device))[:rows]
        token_Q, node_Q1 = cell_Q % max(tokens, 1), (cell_Q // max(tokens, 1)).unsqueeze(1)
        plan = NodePlan(token_Q, segments_of(token_Q, tokens), splits)

        index_QK = index_TK.index_select(0, token_Q) - node_Q1 * here
        # Experts of other nodes become `here`, a padded routing entry inside the node. int32 halves the bytes.
        index_QK = torch.where((index_QK >= 0) & (index_QK < here), index_QK, here).to(torch.int32)
        index_RK, _ = all_to_all(index_QK, splits.rows_sent, splits.rows_received, self.across)
        weight_RK = _SendRows.apply(exact(weight_TK), plan, self._across()).to(weight_TK.dtype)
        rows_RH = _SendRows.apply(hidden_TH, plan, self._across())
        inside = self._inside().dispatch(rows_RH, index_RK.long(), weight_RK, inside_counts)
        return (*inside[:3], (plan, inside[3]))

    def combine(self, rows_RH: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Return and sum the rows. Collectives: two all-to-alls in forward, inside and across, and two in backward."""
        plan, inside = metadata
        out_TH: torch.Tensor = SumRows.apply(self._inside().combine(rows_RH, inside), plan, self._across())
        return out_TH

    def send_token_numbers(self, token_number_T: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Send one number for each row. Collectives: two all-to-alls of 8 bytes a row."""
        plan, inside = metadata
        token_number_Q = token_number_T.index_select(0, plan.token_Q)
        token_number_R, _ = all_to_all(token_number_Q, plan.splits.rows_sent, plan.splits.rows_received, self.across)
        return self._inside().send_token_numbers(token_number_R, inside)

    def _across(self) -> AllToAllDispatcher:
        return AllToAllDispatcher(self.across.size(), self.across, self.triton)

    def _inside(self) -> AllToAllDispatcher:
        return AllToAllDispatcher(self.num_experts // self.across.size(), self.inside, self.triton)

    def _exchange_counts(self, index_TK: torch.Tensor, rows_N: torch.Tensor) -> tuple[Splits, Counts]:
        """Return the rows sent across, and the counts of the dispatch inside. Two all-to-alls; the host waits once.

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
        totals = _totals_of(sent_inside, received_inside).reshape(-1)
        numbers = to_host(torch.cat([sent[:, 0], received[:, 0], totals]))
        across, inside = numbers[: 2 * nodes], numbers[2 * nodes :]
        splits_inside = Splits(*(inside[first : first + ranks] for first in range(0, 4 * ranks, ranks)))
        return Splits(across[:nodes], across[nodes:], [], []), (received_inside, splits_inside)


class _SendRows(torch.autograd.Function):
    """Send each token's values to its nodes, values_TX -> values_RX: the opposite direction of `SumRows`."""

    @staticmethod
    def forward(ctx: Any, values_TX: torch.Tensor, plan: NodePlan, dispatcher: AllToAllDispatcher) -> torch.Tensor:
        ctx.save_for_backward(plan.rows_of_token.item_P, plan.rows_of_token.start_R1)
        ctx.splits, ctx.dispatcher = plan.splits, dispatcher
        values_QX = values_TX.index_select(0, plan.token_Q)
        values_RX, _ = all_to_all(values_QX, plan.splits.rows_sent, plan.splits.rows_received, dispatcher.group)
        return values_RX

    @staticmethod
    def backward(ctx: Any, grad_RX: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_QX, _ = all_to_all(grad_RX, ctx.splits.rows_received, ctx.splits.rows_sent, ctx.dispatcher.group)
        return segment_sum(grad_QX, Segments(*ctx.saved_tensors), ctx.dispatcher.triton), None, None
