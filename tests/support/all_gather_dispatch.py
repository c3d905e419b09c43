"""The plainest dispatcher: an independent check of those that training has.

T tokens here, H hidden, K top-k, E experts, D ranks of the EP group, L = E / D experts here
N = D * (T + padding) tokens of all ranks, R rows and P pairs received
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from expertmesh.distributed.collectives import all_gather, exact, reduce_scatter, to_host
from expertmesh.experts.activation_checkpointing import exchanged_once
from expertmesh.experts.dispatch import Dispatched
from expertmesh.experts.pairs import LocalPairs, count_pairs, segments_of


@dataclass(frozen=True, eq=False)
class AllGatherDispatcher:
    """Every rank of `group` receives every token and computes the pairs of its own experts."""

    num_experts: int
    group: dist.ProcessGroup

    def dispatch(self, hidden_TH: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor) -> Dispatched:
        """All-gathers in forward: counts, expert ids, weights, rows; reduce-scatters in backward: weights, rows."""
        group, (tokens, top_k) = self.group, index_TK.shape
        experts_here = self.num_experts // group.size()
        first = group.rank() * experts_here
        pairs_L, tokens_D, total = exchanged_once(partial(self._exchange_counts, index_TK))

        padding = max(tokens_D) - tokens
        # A padded token chooses expert E, which no rank holds.
        index_NK = all_gather(_padded(index_TK, padding, self.num_experts), group)
        weight_NK = _AllGather.apply(_padded(weight_TK, padding), group)
        rows_RH = _AllGather.apply(_padded(hidden_TH, padding), group)
        local = index_NK.reshape(-1) - first
        local = torch.where((local >= 0) & (local < experts_here), local, experts_here)
        pair_P = torch.argsort(local, stable=True)[:total]
        row_P = pair_P // top_k
        pairs = LocalPairs(row_P, pairs_L.cumsum(0).to(torch.int32), segments_of(row_P, len(rows_RH)))
        return rows_RH, weight_NK.reshape(-1).index_select(0, pair_P), pairs, (tokens, padding)

    def _exchange_counts(self, index_TK: torch.Tensor) -> tuple[torch.Tensor, list[int], int]:
        """Pairs of each expert here, int64 `[L]`; tokens of each rank, and those pairs' sum, on the host."""
        counts = torch.cat([index_TK.new_full((1,), len(index_TK)), count_pairs(index_TK, self.num_experts)])
        counts_DE = all_gather(counts.unsqueeze(0), self.group)
        pairs_L = counts_DE[:, 1:].unflatten(1, (self.group.size(), -1))[:, self.group.rank()].sum(0)
        *tokens_D, total = to_host(torch.cat([counts_DE[:, 0], pairs_L.sum().unsqueeze(0)]))
        return pairs_L, tokens_D, total

    def combine(self, rows_RH: torch.Tensor, metadata: tuple[int, int]) -> torch.Tensor:
        """Issue one reduce-scatter in forward, one all-gather in backward."""
        own: torch.Tensor = _ReduceScatter.apply(rows_RH, self.group)
        return own[: metadata[0]]

    def send_token_numbers(self, token_number_T: torch.Tensor, metadata: tuple[int, int]) -> torch.Tensor:
        """Issue one more all-gather, of 8 bytes a row."""
        return all_gather(_padded(token_number_T.unsqueeze(1), metadata[1]), self.group).squeeze(1)


def _padded(tensor: torch.Tensor, rows: int, value: int = 0) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, 0, 0, rows), value=value)


class _AllGather(torch.autograd.Function):
    """block -> every rank's. One reduce-scatter in backward, in at least fp32."""

    @staticmethod
    def forward(ctx: Any, block: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return all_gather(block, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return reduce_scatter(exact(grad), ctx.group).to(grad.dtype), None


class _ReduceScatter(torch.autograd.Function):
    """blocks -> this rank's part of their sum, taken in at least fp32. One all-gather in backward."""

    @staticmethod
    def forward(ctx: Any, blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return reduce_scatter(exact(blocks), group).to(blocks.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return all_gather(grad, ctx.group), None
