"""Hold the (token, expert) pairs that a rank computes, and sum several of them into one row.

`embedding_bag` or a Triton kernel computes these sums: it reads each input row once, sums in fp32 for any dtype, has no
atomics (so results repeat bit for bit) and never forms a permuted copy.

    T tokens, K top-k, E experts, L experts of this rank, P items (pairs or rows), R rows, H hidden
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from expertmesh.experts import triton_ops


@dataclass(frozen=True, slots=True)
class Segments:
    """The items of each row, as a list of lists in compressed form."""

    item_P: torch.Tensor
    """Item numbers ordered by row, int64."""
    start_R1: torch.Tensor
    """Start of each row's items in `item_P`, then P; int64."""


@dataclass(frozen=True, slots=True)
class LocalPairs:
    """The pairs this rank computes, ordered by local expert."""

    row_P: torch.Tensor
    """The row of each pair, int64."""
    expert_end_L: torch.Tensor
    """End of each expert's pairs, int32 (grouped_mm's offsets)."""
    by_row: Segments
    """The same pairs grouped by row."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors for autograd to save; `of` rebuilds the object from them."""
        return self.row_P, self.expert_end_L, self.by_row.item_P, self.by_row.start_R1

    @classmethod
    def of(
        cls, row_P: torch.Tensor, expert_end_L: torch.Tensor, item_P: torch.Tensor, start_R1: torch.Tensor
    ) -> "LocalPairs":
        return cls(row_P, expert_end_L, Segments(item_P, start_R1))

    def expert_P(self) -> torch.Tensor:
        """Return the local expert of each pair, int64 `[P]`."""
        place_P = torch.arange(self.row_P.shape[0], device=self.row_P.device, dtype=torch.int32)
        return torch.searchsorted(self.expert_end_L, place_P, right=True)


def segments_of(row_P: torch.Tensor, num_rows: int) -> Segments:
    """Group items by `row_P` (int64 `[P]`, the row of each item, in `range(num_rows)`). No host synchronisation."""
    # Stable: sums add in the same order on every run.
    item_P = torch.argsort(row_P, stable=True)
    count_R = row_P.new_zeros(num_rows + 1).scatter_add_(0, row_P + 1, torch.ones_like(row_P))
    return Segments(item_P, count_R.cumsum(0))


def order_by_expert(expert_P: torch.Tensor, num_experts: int, triton: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pairs in the order of their experts `[P]`, and the place of each pair in it. No host
    synchronisation.
    """
    if triton:
        order_P, place_P = triton_ops.counting_sort(expert_P, num_experts)
        return order_P, place_P
    order_P = torch.argsort(expert_P, stable=True)
    return order_P, torch.empty_like(order_P).scatter_(0, order_P, torch.arange(len(order_P), device=order_P.device))


def sorted_choice(
    order_P: torch.Tensor, weight_P: torch.Tensor, counts: Sequence[int], tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts and weights of each token, `[T, K]`, in the router's own order, from pairs sorted by expert.

    `order_P`: the number of each pair, token by token; `counts`: how many pairs each expert has. Weights keep their
    gradients.
    """
    # Invert the router's permutation: a pair's place among the sorted ones.
    place_P = torch.arange(len(order_P), device=order_P.device)
    place_P = torch.empty_like(order_P).scatter_(0, order_P, place_P)
    count_E = torch.tensor(counts, device=order_P.device)
    expert_P = torch.arange(len(counts), device=order_P.device).repeat_interleave(count_E, output_size=len(order_P))
    return expert_P[place_P].view(tokens, -1), weight_P.gather(0, place_P).view(tokens, -1)


def segment_sum(values_PH: torch.Tensor, segments: Segments, triton: bool = False) -> torch.Tensor:
    """Sum `values_PH[p]` over the items p of each row r: `out_RH[r]`, zero where a row has none. Not differentiable."""
    if triton:
        out_RH: torch.Tensor = triton_ops.segment_sum(values_PH, segments.item_P, segments.start_R1)
        return out_RH
    # `embedding_bag` refuses an empty table.
    if values_PH.shape[0] == 0:
        return values_PH.new_zeros(segments.start_R1.shape[0] - 1, values_PH.shape[1])
    return F.embedding_bag(segments.item_P, values_PH, segments.start_R1, mode="sum", include_last_offset=True)


def count_pairs(index_TK: torch.Tensor, num_experts: int, real_T: torch.Tensor | None = None) -> torch.Tensor:
    """Count the tokens per expert on this rank, int64 `[E]`, without waiting for the device (as `bincount` would).

    With `real_T` (bool) only the real tokens count.
    """
    one_TK = torch.ones_like(index_TK) if real_T is None else real_T.to(index_TK.dtype)[:, None].expand_as(index_TK)
    return index_TK.new_zeros(num_experts).scatter_add_(0, index_TK.reshape(-1), one_TK.reshape(-1))


def count_together(index_TK: torch.Tensor, num_experts: int, real_T: torch.Tensor | None = None) -> torch.Tensor:
    """Count the tokens that chose both of two experts on this rank, int64 `[E, E]`, as `count_pairs` does."""
    # float32 sums of ones are exact up to 2^24 tokens of a call.
    chosen_TE = torch.zeros(len(index_TK), num_experts, device=index_TK.device).scatter_(1, index_TK, 1.0)
    if real_T is not None:
        chosen_TE = chosen_TE * real_T[:, None]
    return (chosen_TE.T @ chosen_TE).long()
