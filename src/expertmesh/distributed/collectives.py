"""Issue the collectives of the expert layer. A dispatch waits for the device in `to_host`; behind it only experts that
run one after the other do, and a dense mixture for its rows.
"""

from typing import Any

import torch
import torch.distributed as dist

from expertmesh.compat import all_gather_into, reduce_scatter_into


def all_to_all(
    rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup, *, wait: bool = True
) -> tuple[torch.Tensor, dist.Work | None]:
    """Send `send[r]` consecutive rows of `rows` to rank r of `group` and receive `receive[r]` from it.

    Every rank of `group` calls it; splits must match (gloo does not notice when a receiver expects too many rows),
    which the count exchange before it guarantees. With `wait=False` the result is valid after `work.wait()`.
    """
    assert sum(send) == rows.shape[0], f"splits {send} do not cover {rows.shape[0]} rows"
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    work = dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group, async_op=not wait)
    return received, work


def all_to_all_even(blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange `blocks[r]` (one block for each rank of `group`) for the block that rank r has for this rank."""
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=group)
    return received


def all_gather(block: torch.Tensor, group: dist.ProcessGroup, into: torch.Tensor | None = None) -> torch.Tensor:
    """Concatenate every rank's `block` (same shape on each) on dim 0, in a new tensor or in `into`."""
    gathered = block.new_empty(block.shape[0] * group.size(), *block.shape[1:]) if into is None else into
    all_gather_into(gathered, block.contiguous(), group=group)
    return gathered


def reduce_scatter(blocks: torch.Tensor, group: dist.ProcessGroup, into: torch.Tensor | None = None) -> torch.Tensor:
    """Sum `blocks` over the ranks; this rank keeps its part of dim 0, in a new tensor or in `into`."""
    own = blocks.new_empty(blocks.shape[0] // group.size(), *blocks.shape[1:]) if into is None else into
    reduce_scatter_into(own, blocks.contiguous(), group=group)
    return own


def to_host(counts: torch.Tensor) -> list[Any]:
    """Read small integer counts on the host: waits for the device. The expert layer calls it once per forward."""
    values: list[Any] = counts.tolist()
    return values


def exact(weight: torch.Tensor) -> torch.Tensor:
    """Return routing weights in at least fp32, in which they are sent: it holds bf16 and fp16 exactly."""
    return weight if weight.dtype == torch.float64 else weight.float()
