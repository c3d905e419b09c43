"""The expert layer of two halves: tokens are sent when a half calls its experts, and both halves computed in one call.

`send` is that half's part as far as its rows are under way. `compute` is called by the experts module, once, with both:
it waits for a half's rows, computes them and sends the results, which `Call.arrive` waits for in the half that asked.
So the second half's rows travel while the first is computed, the first one's results while the second is. Each of these
is a node of its own, and autograd takes nodes from the last to the first: in backward the same overlaps with the roles
of both ways exchanged. What may still travel is never read, values and gradients alike.

    T tokens of a half, H hidden, K top-k, Q rows sent, R rows and P pairs received
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from expertmesh.distributed.collectives import all_to_all
from expertmesh.experts.activation_checkpointing import is_recomputing, keep_result, kept
from expertmesh.experts.dispatch import AllToAllDispatcher, Journey, Route, wait
from expertmesh.experts.layer import ExpertLayer, layer_of, span
from expertmesh.experts.lora_state import Dropout
from expertmesh.experts.pairs import segment_sum


@dataclass(slots=True)
class _WayBack:
    """Results that travel to the ranks of their tokens: what to wait for, and in backward their gradients."""

    rows: dist.Work | None = None
    gradients: tuple[torch.Tensor, dist.Work | None] | None = None


@dataclass(slots=True, eq=False)
class Call:
    """One half's call of an experts module, whose rows are under way."""

    layer: ExpertLayer
    dtype: torch.dtype
    index_TK: torch.Tensor
    row_P: torch.Tensor
    route: Route
    journey: Journey
    dropout: Dropout | None
    under_way: list[torch.Tensor]
    """`rows_RH` and `weight_P`, until they are computed."""
    way_back: _WayBack = field(default_factory=_WayBack)

    def begin(self, experts: nn.Module, rows_RH: torch.Tensor, weight_P: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Wait for the rows, and compute them as far as backward needs; what is returned gives their results."""
        rows_RH, weight_P, pairs, _ = self._dispatcher.receive(rows_RH, weight_P, self.row_P, self.route, self.journey)
        return self.layer.begin_mlp(experts, rows_RH, weight_P, pairs, self.dropout)

    def send_back(self, out_RH: torch.Tensor) -> torch.Tensor:
        """The results, under way. One all-to-all."""
        rows_QH: torch.Tensor = _SendBack.apply(out_RH, self.route, self._dispatcher, self.way_back)
        return rows_QH

    def arrive(self, rows_QH: torch.Tensor) -> torch.Tensor:
        """The experts' result for this half's tokens `[T, H]`, when it is here. One all-to-all in backward."""
        with span("combine"):
            out_TH: torch.Tensor = _SumArrived.apply(rows_QH, self.route, self._dispatcher, self.way_back)
            return out_TH.to(self.dtype)

    @property
    def _dispatcher(self) -> AllToAllDispatcher:
        assert isinstance(self.layer.dispatcher, AllToAllDispatcher)
        return self.layer.dispatcher


class Calls:
    """Of both halves; no container that FSDP2 would look into for tensors."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self.calls = list(calls)


def send(experts: nn.Module, hidden: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor) -> Call:
    """Send the tokens of one half. Collective: two all-to-alls of the EP group, with one for their counts before them,
    and one for adapters' dropout.
    """
    layer, journey = layer_of(experts), Journey()
    dispatcher = layer.dispatcher
    assert isinstance(dispatcher, AllToAllDispatcher)
    hidden_TH = hidden.reshape(-1, hidden.shape[-1]).to(layer.dtype)
    with span("dispatch"), kept():
        *under_way, row_P, route = dispatcher.send(hidden_TH, index_TK, weight_TK, journey)
        dropout = layer.dropout_here(experts, len(hidden_TH))
        if dropout is not None:
            dropout = replace(dropout, number_P=dispatcher.numbers(dropout.number_P, route, journey))
    return Call(layer, hidden.dtype, index_TK, row_P, route, journey, dropout, under_way)


def compute_both(experts: nn.Module, calls: Calls) -> tuple[torch.Tensor, ...]:
    """Call the experts module for both halves at once, so that FSDP2 gathers its parameters and reduces their gradients
    once. Returns what travels back to each. Two all-to-alls.
    """
    rows_and_weights = [tensor for call in calls.calls for tensor in call.under_way]
    for call in calls.calls:
        call.under_way.clear()
    # The choices of all rows come first, where who watches an experts module looks for them.
    index_TK = torch.cat([call.index_TK for call in calls.calls])
    back: tuple[torch.Tensor, ...] = experts(index_TK, calls, *rows_and_weights)
    return back


def compute(experts: nn.Module, calls: Calls, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The experts module's forward for both halves, inside of FSDP2's hooks. `tensors`: rows and weights of each."""
    with span("experts"), kept():
        begun: Iterable[Callable[[], torch.Tensor]] = (
            call.begin(experts, rows_RH, weight_P)
            for call, rows_RH, weight_P in zip(calls.calls, tensors[::2], tensors[1::2], strict=True)
        )
        if is_recomputing():
            # What backward needs of both halves comes first: mostly the second run ends with it.
            begun = list(begun)
        return tuple(call.send_back(finish()) for call, finish in zip(calls.calls, begun, strict=True))


def result_of(calls: list[Call], rows: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """What the model gets from its experts, in the shape that it gave; waits for it."""
    with kept():
        parts = [call.arrive(rows_QH) for call, rows_QH in zip(calls, rows, strict=True)]
        out_TH = parts[0] if len(parts) == 1 else torch.cat(parts)
    keep_result(out_TH)
    return out_TH.view(shape)


class _SendBack(torch.autograd.Function):
    """rows_RH -> rows_QH that may still travel. Saves nothing: a checkpointed block would be run again for it."""

    @staticmethod
    def forward(
        ctx: Any, rows_RH: torch.Tensor, route: Any, by: AllToAllDispatcher, way_back: _WayBack
    ) -> torch.Tensor:
        splits, ctx.way_back = route.splits, way_back
        rows_QH, way_back.rows = all_to_all(rows_RH, splits.rows_received, splits.rows_sent, by.group, wait=False)
        return rows_QH

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        assert ctx.way_back.gradients is not None
        (grad_rows_RH, work), ctx.way_back.gradients = ctx.way_back.gradients, None
        wait(work)
        return grad_rows_RH, None, None, None


class _SumArrived(torch.autograd.Function):
    """rows_QH that may still travel -> out_TH, the sum of each token's rows. In backward their gradients leave here."""

    @staticmethod
    def forward(
        ctx: Any, rows_QH: torch.Tensor, route: Any, by: AllToAllDispatcher, way_back: _WayBack
    ) -> torch.Tensor:
        ctx.token_Q, ctx.splits, ctx.group, ctx.way_back = route.token_Q, route.splits, by.group, way_back
        wait(way_back.rows)
        way_back.rows = None
        return segment_sum(rows_QH, route.rows_of_token, by.triton)

    @staticmethod
    def backward(ctx: Any, grad_out_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        splits, grad_rows_QH = ctx.splits, grad_out_TH.index_select(0, ctx.token_Q)
        ctx.way_back.gradients = all_to_all(grad_rows_QH, splits.rows_sent, splits.rows_received, ctx.group, wait=False)
        # What autograd hands on has a shape alone.
        return grad_rows_QH.new_zeros(()).expand_as(grad_rows_QH), None, None, None
