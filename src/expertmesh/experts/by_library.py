"""Dispatch and combine with a library that keeps a routing in a handle.

Such libraries send a token once to each rank that holds any of its experts, with its choices and weights, and on return
sum one row for each of these ranks: what `AllToAllDispatcher` does, in kernels of their own. Backward reuses the handle
of the first exchange: gradients of rows are combined, those of results dispatched. The second run of a checkpointed
block has the handle, and exchanges no counts.

    T tokens here, K top-k, H hidden, L experts here, R rows and P pairs received
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from expertmesh.experts.activation_checkpointing import exchanged_once
from expertmesh.experts.dispatch import Dispatched
from expertmesh.experts.pairs import LocalPairs, count_pairs, order_by_expert, segments_of

# Rows of numbers are this many bf16 wide: the narrowest that every library carries, within nodes and between them.
NUMBER_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class Arrived:
    """The result of a first exchange."""

    handle: Any
    """The library's record of the routing."""
    rows_RH: torch.Tensor
    """Received rows, in the library's order."""
    index_RK: torch.Tensor
    """This rank's choices of each row's token: ids from 0 to L, -1 for others."""
    weight_RK: torch.Tensor
    """Their routing weights, fp32."""
    pairs: int
    """Number of choices that are this rank's."""


class Library(Protocol):
    """A library's buffers for one EP group. All but `close` are collective over it, and run on the current stream."""

    def first(
        self, rows_TH: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor, num_experts: int
    ) -> Arrived:
        """Exchange counts and dispatch; the host waits. Expert id `num_experts` marks a padded routing entry. Weights
        are fp32.
        """
        ...

    def there(self, rows_TH: torch.Tensor, handle: Any) -> torch.Tensor:
        """Dispatch other rows by the same routing: `[R, H]`, in the same order, bit for bit. The host does not wait."""
        ...

    def back(
        self, rows_RH: torch.Tensor, handle: Any, weight_RK: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sum the rows of each token, `[T, H]`, and return `[T, K]` of `weight_RK` (fp32). The host does not wait."""
        ...

    def close(self) -> None:
        """Free the buffers, once, after the last exchange. Every rank of the group calls it."""
        ...


@dataclass(frozen=True, slots=True)
class _Route:
    """The routing of one dispatch, for combine, backward and recomputation."""

    handle: Any
    """The library's record of the routing."""
    top_k: int
    """K."""
    rows: int
    """Number of rows received."""
    place_P: torch.Tensor
    """Choice and row of each local pair, as row * K + k, in the order of experts; int32."""
    weight_P: torch.Tensor
    """The routing weight of each local pair."""
    expert_end_L: torch.Tensor
    """The end of each local expert's pairs."""


@dataclass(frozen=True, eq=False)
class LibraryDispatcher:
    """A dispatcher whose library sends the rows; pairs are sorted here."""

    num_experts: int
    """E."""
    ranks: int
    """Ranks of the EP group."""
    library: Library
    """The library's exchange, with its buffers."""
    triton: bool = False
    """True if Triton's kernels sort the pairs."""

    def dispatch(self, hidden_TH: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor) -> Dispatched:
        """Send rows and pairs with the library.

        Collectives: its dispatch in forward, with its count exchange and one wait for the host; its combine in
        backward, of rows and weights. A second run dispatches by the first one's handle and has its weights.
        """
        brought: list[torch.Tensor] = []
        route = exchanged_once(partial(self._first, hidden_TH, index_TK, weight_TK, brought))
        rows_RH, weight_P = _Dispatch.apply(hidden_TH, weight_TK, route, self.library, brought)
        row_P = route.place_P.long() // route.top_k
        pairs = LocalPairs(row_P, route.expert_end_L, segments_of(row_P, route.rows))
        return rows_RH, weight_P, pairs, route.handle

    def combine(self, rows_RH: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Return and sum the rows. Collectives: the library's combine in forward, its dispatch in backward."""
        out_TH: torch.Tensor = _Combine.apply(rows_RH, metadata, self.library)
        return out_TH

    def numbers(self, number_T: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Send one number for each row: its bits in a row of bf16. Collectives: one dispatch of 512 bytes a row."""
        wide_T = number_T.new_zeros(len(number_T), NUMBER_COLUMNS * 2 // number_T.itemsize)
        # The library sends rows of bf16 alone: an int64 travels as the bits of four of them.
        wide_T[:, 0] = number_T
        carried_R = self.library.there(wide_T.view(torch.bfloat16), metadata)
        return carried_R.view(number_T.dtype)[:, 0].contiguous()

    def _first(
        self,
        hidden_TH: torch.Tensor,
        index_TK: torch.Tensor,
        weight_TK: torch.Tensor,
        brought: list[torch.Tensor],
    ) -> _Route:
        with torch.no_grad():
            arrived = self.library.first(
                hidden_TH.contiguous(), index_TK, weight_TK.float().contiguous(), self.num_experts
            )
            index_RK, none = arrived.index_RK, self.num_experts // self.ranks
            # -1 marks an expert of another rank; as the last expert of all it sorts behind the pairs that are here.
            index = torch.where(index_RK < 0, none, index_RK).long()
            place_P, _ = order_by_expert(index.reshape(-1), none + 1, self.triton)
            place_P = place_P[: arrived.pairs]
            weight_P = arrived.weight_RK.reshape(-1).index_select(0, place_P)
            end_L = count_pairs(index, none + 1)[:-1].cumsum(0).to(torch.int32)
            brought.append(arrived.rows_RH)
            rows, top_k = len(arrived.rows_RH), index_TK.shape[1]
            return _Route(arrived.handle, top_k, rows, place_P.to(torch.int32), weight_P, end_L)


class _Dispatch(torch.autograd.Function):
    """Send (hidden_TH, weight_TK) -> (rows_RH, weight_P). The first exchange `brought` the rows; a second run
    has none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: torch.Tensor,
        weight_TK: torch.Tensor,
        route: _Route,
        library: Library,
        brought: list[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(route.place_P)
        ctx.handle, ctx.library = route.handle, library
        ctx.shape, ctx.dtype = (route.rows, route.top_k), weight_TK.dtype
        rows_RH = brought.pop() if brought else library.there(hidden_TH.contiguous(), route.handle)
        return rows_RH, route.weight_P.to(weight_TK.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad_rows_RH: torch.Tensor, grad_weight_P: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (place_P,) = ctx.saved_tensors
        rows, top_k = ctx.shape
        grad_weight = torch.zeros(rows * top_k, dtype=torch.float32, device=place_P.device)
        # Choices of other ranks' experts have no pair here: their ranks send the gradient.
        grad_weight.index_copy_(0, place_P.long(), grad_weight_P.float())
        grad_hidden_TH, grad_weight_TK = ctx.library.back(
            grad_rows_RH.contiguous(), ctx.handle, grad_weight.view(rows, top_k)
        )
        assert grad_weight_TK is not None
        return grad_hidden_TH, grad_weight_TK.to(ctx.dtype), None, None, None


class _Combine(torch.autograd.Function):
    """Return rows_RH -> out_TH. Saves no tensor: a checkpointed block would be recomputed up to here for it."""

    @staticmethod
    def forward(ctx: Any, rows_RH: torch.Tensor, handle: Any, library: Library) -> torch.Tensor:
        ctx.handle, ctx.library = handle, library
        out_TH, _ = library.back(rows_RH.contiguous(), handle)
        return out_TH

    @staticmethod
    def backward(ctx: Any, grad_out_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.library.there(grad_out_TH.contiguous(), ctx.handle), None, None
