"""Exchange positions and features between the ranks of a tp group, with the gradients of the exchange.

The two functions of a pair are each other's transpose: one does in forward what the other does in backward. Gradients
are partial sums over the group everywhere (sequence.py), so the sum is taken exactly where a gather is undone.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from expertmesh.distributed import collectives

_Collective = Callable[[torch.Tensor, int, dist.ProcessGroup], torch.Tensor]


def gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate every rank's `x` (equal shapes) on `dim`; the result is contiguous.

    Collectives: every rank of the group calls it; an all-gather in forward, a reduce-scatter in backward.
    """
    result: torch.Tensor = _Transposed.apply(x, _gather, _reduce_scatter, dim, group)
    return result


def reduce_scatter(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum every rank's `x`; each rank keeps its part of `dim`. The result is contiguous.

    Collectives: every rank of the group calls it; a reduce-scatter in forward, an all-gather in backward.
    """
    result: torch.Tensor = _Transposed.apply(x, _reduce_scatter, _gather, dim, group)
    return result


def own_part(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a copy of this rank's part of `dim`, of a tensor that is full on every rank. No communication."""
    part = x.shape[dim] // group.size()
    assert part * group.size() == x.shape[dim], f"{x.shape[dim]} in {group.size()} parts"
    return x.narrow(dim, group.rank() * part, part).clone(memory_format=torch.contiguous_format)


class _Transposed(torch.autograd.Function):
    """Run `run` in forward, and in backward `transpose`, which is its transpose."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, run: _Collective, transpose: _Collective, dim: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.transpose, ctx.dim, ctx.group = transpose, dim, group
        return run(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.transpose(grad, ctx.dim, ctx.group), None, None, None, None


def _gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    return _exchange(collectives.all_gather, x, dim, x.shape[dim] * group.size(), group)


def _reduce_scatter(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    length = x.shape[dim] // group.size()  # torch.compile has no divmod of lengths that vary
    assert length * group.size() == x.shape[dim], f"{x.shape[dim]} in {group.size()} parts"
    return _exchange(collectives.reduce_scatter, x, dim, length, group)


def _exchange(
    collective: Callable[..., torch.Tensor], x: torch.Tensor, dim: int, length: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Run a collective along any dim; the collectives themselves know dim 0 alone.

    The result is never a view: FSDP2 hooks results, and a model may change them in place. torch.compile, which allows
    no write through a view, would make a view of what is written through one here.
    """
    result = x.new_empty(*x.shape[:dim], length, *x.shape[dim + 1 :])
    if math.prod(x.shape[:dim]) == 1 and not torch.compiler.is_compiling():
        collective(x.reshape(x.shape[dim:]), group, into=result.view(result.shape[dim:]))
        return result
    return result.copy_(collective(x.movedim(dim, 0), group).movedim(0, dim))
