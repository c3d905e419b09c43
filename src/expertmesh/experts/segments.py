"""Sums of scattered rows: each output row is the sum of a known, unordered set of input rows.

Used wherever several (token, expert) pairs meet again in one token. `embedding_bag` reads each input row once, sums
in fp32 whatever the dtype, has no atomics (so results repeat bit for bit) and never forms a permuted copy.

    P items (pairs or rows), R rows, H hidden
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Segments:
    """The items of each row, as a list of lists in compressed form.

    `item_P`: item numbers ordered by row, int64. `start_R1`: where each row's items start in it, then P, int64.
    """

    item_P: torch.Tensor
    start_R1: torch.Tensor


def segments_of(row_P: torch.Tensor, num_rows: int) -> Segments:
    """Group items by `row_P` (int64 `[P]`, the row of each item, in `range(num_rows)`). No host synchronisation."""
    item_P = torch.argsort(row_P, stable=True)
    count_R = row_P.new_zeros(num_rows + 1).scatter_add_(0, row_P + 1, torch.ones_like(row_P))
    return Segments(item_P, count_R.cumsum(0))


def segment_sum(values_PH: torch.Tensor, segments: Segments) -> torch.Tensor:
    """`out_RH[r]` = sum of `values_PH[p]` over the items p of row r, zero where there are none. Not differentiable."""
    if values_PH.shape[0] == 0:
        return values_PH.new_zeros(segments.start_R1.shape[0] - 1, values_PH.shape[1])
    return F.embedding_bag(segments.item_P, values_PH, segments.start_R1, mode="sum", include_last_offset=True)
