"""Dispatch with DeepEP's high-throughput kernels (`moe.dispatch: deepep`): NVLink within nodes of 8 GPUs, RDMA between.

`LibraryDispatcher` works with any library that keeps a routing in a handle. Such libraries send a token once to each
rank that holds any of its experts, with its choices and weights, and on return sum one row for each of these ranks:
what `AllToAllDispatcher` does, in kernels of their own. Backward uses the handle of the first exchange again: gradients
of rows are combined, those of results dispatched. The second run of a checkpointed block has the handle, and exchanges
no counts.

`Exchange` calls the class `Buffer` of versions 1.2.1 (2025-09-15) and 2.1.0 (2026-07-14) of
github.com/deepseek-ai/DeepEP; `CALLS` lists what is used of it. It has never run here on a GPU. Its rows are bf16,
summed in fp32 inside a node. The order in which rows are received is not relied on.

    T tokens here, K top-k, H hidden, D ranks of the EP group, L experts here, R rows and P pairs received
"""

import importlib
import importlib.util
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import is_available as has_gpu

from expertmesh.anatomy import ExpertsSpec
from expertmesh.distributed.layout import Layout, node_crossing, nodes_of_ep
from expertmesh.experts.activation_checkpointing import exchanged_once
from expertmesh.experts.dispatch import Dispatched
from expertmesh.experts.pairs import LocalPairs, count_pairs, order_by_expert, segments_of

# Rows of numbers are this many bf16 wide: the narrowest that every library carries, within nodes and between them.
NUMBER_COLUMNS = 256
# Methods of `Buffer`, and of their parameters those that are given.
CALLS = {
    "__init__": ("group", "num_nvl_bytes", "num_rdma_bytes", "explicitly_destroy"),
    "get_dispatch_config": ("num_ranks",),
    "get_combine_config": ("num_ranks",),
    "get_dispatch_layout": ("topk_idx", "num_experts"),
    "dispatch": (
        *("x", "handle", "num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank"),
        *("num_tokens_per_expert", "topk_idx", "topk_weights"),
    ),
    "combine": ("x", "handle", "topk_weights"),
    "destroy": (),
}
INSTALL = "build DeepEP 1.2.1 or newer from github.com/deepseek-ai/DeepEP"
# Ranks of a group that it has kernels and settings for; NVLink joins 8 of them.
RANKS, NODE = (2, 4, 8, 16, 24, 32, 64), 8
MOST_HIDDEN, MOST_TOP_K = 8000, 32


@dataclass(frozen=True, slots=True)
class Received:
    """The result of a first exchange."""

    handle: Any
    """The library's record of the routing, whose type only the library knows."""
    rows_RH: torch.Tensor
    """Received rows, in the library's order."""
    index_RK: torch.Tensor
    """This rank's choices of each row's token: ids from 0 to L, -1 for others."""
    weight_RK: torch.Tensor
    """Their routing weights, fp32."""
    pairs: int
    """Number of choices that are this rank's."""


class Exchange:
    """DeepEP's `Buffer` for `group`, the EP group, with rows of at most `hidden` values.

    Collectives: every rank makes it; some small exchanges of objects over the group. All methods are collective over
    it, and run on the current stream.
    """

    def __init__(self, group: dist.ProcessGroup, hidden: int) -> None:
        deep_ep = importlib.import_module("deep_ep")
        self._index_dtype = getattr(deep_ep, "topk_idx_t", torch.int64)
        ranks, row = group.size(), 2 * max(hidden, NUMBER_COLUMNS)
        configs = (deep_ep.Buffer.get_dispatch_config(ranks), deep_ep.Buffer.get_combine_config(ranks))
        near = max(config.get_nvl_buffer_size_hint(row, ranks) for config in configs)
        # A build without NVSHMEM does not answer, and needs none within a node.
        far = max(config.get_rdma_buffer_size_hint(row, ranks) for config in configs) if ranks > NODE else 0
        self._buffer: Any = deep_ep.Buffer(group, near, far, explicitly_destroy=True)

    def dispatch(
        self, rows_TH: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor, num_experts: int
    ) -> Received:
        """Exchange counts and dispatch; the host waits. Expert id `num_experts` marks a padded routing entry. Weights
        are fp32.
        """
        index_TK = index_TK.masked_fill(index_TK >= num_experts, -1).to(self._index_dtype)
        per_rank, per_node, per_expert, in_rank_TD, _ = self._buffer.get_dispatch_layout(index_TK, num_experts)
        rows_RH, index_RK, weight_RK, pairs_L, handle, _ = self._buffer.dispatch(
            rows_TH,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank_TD,
            num_tokens_per_expert=per_expert,
            topk_idx=index_TK,
            topk_weights=weight_TK,
        )
        return Received(handle, rows_RH, index_RK, weight_RK, sum(pairs_L))

    def dispatch_again(self, rows_TH: torch.Tensor, handle: Any) -> torch.Tensor:
        """Dispatch other rows by the same routing: `[R, H]`, in the same order, bit for bit. The host does not wait."""
        rows_RH: torch.Tensor = self._buffer.dispatch(rows_TH, handle=handle)[0]
        return rows_RH

    def combine(
        self, rows_RH: torch.Tensor, handle: Any, weight_RK: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sum the rows of each token, `[T, H]`, and return `[T, K]` of `weight_RK` (fp32). The host does not wait."""
        rows_TH, weight_TK, _ = self._buffer.combine(rows_RH, handle, topk_weights=weight_RK)
        return rows_TH, weight_TK

    def close(self) -> None:
        """Free the buffers, once, after the last exchange."""
        self._buffer.destroy()


@dataclass(frozen=True, slots=True)
class _LibraryPlan:
    """The routing of one dispatch, for combine, backward and recomputation."""

    handle: Any
    """The library's record of the routing, whose type only the library knows."""
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
    library: Exchange
    """The library's exchange, with its buffers."""
    triton: bool = False
    """True if Triton's kernels sort the pairs."""

    def dispatch(self, hidden_TH: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor) -> Dispatched:
        """Send rows and pairs with the library.

        Collectives: its dispatch in forward, with its count exchange and one wait for the device; its combine in
        backward, of rows and weights. A second run dispatches by the first one's handle and has its weights.
        """
        received: list[torch.Tensor] = []
        plan = exchanged_once(partial(self._plan, hidden_TH, index_TK, weight_TK, received))
        rows_RH, weight_P = _Dispatch.apply(hidden_TH, weight_TK, plan, self.library, received)
        row_P = plan.place_P.long() // plan.top_k
        pairs = LocalPairs(row_P, plan.expert_end_L, segments_of(row_P, plan.rows))
        return rows_RH, weight_P, pairs, plan.handle

    def combine(self, rows_RH: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Return and sum the rows. Collectives: the library's combine in forward, its dispatch in backward."""
        out_TH: torch.Tensor = _Combine.apply(rows_RH, metadata, self.library)
        return out_TH

    def send_token_numbers(self, token_number_T: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Send one number for each row: its bits in a row of bf16. Collectives: one dispatch of 512 bytes a row."""
        wide_T = token_number_T.new_zeros(len(token_number_T), NUMBER_COLUMNS * 2 // token_number_T.itemsize)
        # The library sends rows of bf16 alone: an int64 is sent as the bits of four of them.
        wide_T[:, 0] = token_number_T
        wide_R = self.library.dispatch_again(wide_T.view(torch.bfloat16), metadata)
        return wide_R.view(token_number_T.dtype)[:, 0].contiguous()

    def _plan(
        self, hidden_TH: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor, received: list[torch.Tensor]
    ) -> _LibraryPlan:
        """Exchange counts, weights and rows; append the rows to `received`."""
        with torch.no_grad():
            first = self.library.dispatch(
                hidden_TH.contiguous(), index_TK, weight_TK.float().contiguous(), self.num_experts
            )
            experts_here = self.num_experts // self.ranks
            # -1 marks an expert of another rank; as the last expert of all it sorts behind the pairs that are here.
            index = torch.where(first.index_RK < 0, experts_here, first.index_RK).long()
            place_P, _ = order_by_expert(index.reshape(-1), experts_here + 1, self.triton)
            place_P = place_P[: first.pairs]
            weight_P = first.weight_RK.reshape(-1).index_select(0, place_P)
            end_L = count_pairs(index, experts_here + 1)[:-1].cumsum(0).to(torch.int32)
            received.append(first.rows_RH)
            rows, top_k = len(first.rows_RH), index_TK.shape[1]
            return _LibraryPlan(first.handle, top_k, rows, place_P.to(torch.int32), weight_P, end_L)


class _Dispatch(torch.autograd.Function):
    """Send (hidden_TH, weight_TK) -> (rows_RH, weight_P). The first exchange has `received` the rows already; a second
    run has not.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: torch.Tensor,
        weight_TK: torch.Tensor,
        plan: _LibraryPlan,
        library: Exchange,
        received: list[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(plan.place_P)
        ctx.handle, ctx.library = plan.handle, library
        ctx.shape, ctx.dtype = (plan.rows, plan.top_k), weight_TK.dtype
        rows_RH = received.pop() if received else library.dispatch_again(hidden_TH.contiguous(), plan.handle)
        return rows_RH, plan.weight_P.to(weight_TK.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad_rows_RH: torch.Tensor, grad_weight_P: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (place_P,) = ctx.saved_tensors
        rows, top_k = ctx.shape
        grad_weight = torch.zeros(rows * top_k, dtype=torch.float32, device=place_P.device)
        # Choices of other ranks' experts have no pair here: their ranks send the gradient.
        grad_weight.index_copy_(0, place_P.long(), grad_weight_P.float())
        grad_hidden_TH, grad_weight_TK = ctx.library.combine(
            grad_rows_RH.contiguous(), ctx.handle, grad_weight.view(rows, top_k)
        )
        assert grad_weight_TK is not None
        return grad_hidden_TH, grad_weight_TK.to(ctx.dtype), None, None, None


class _Combine(torch.autograd.Function):
    """Return rows_RH -> out_TH. Saves no tensor: a checkpointed block would be recomputed up to here for it."""

    @staticmethod
    def forward(ctx: Any, rows_RH: torch.Tensor, handle: Any, library: Exchange) -> torch.Tensor:
        ctx.handle, ctx.library = handle, library
        out_TH, _ = library.combine(rows_RH.contiguous(), handle)
        return out_TH

    @staticmethod
    def backward(ctx: Any, grad_out_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.library.dispatch_again(grad_out_TH.contiguous(), ctx.handle), None, None


def refusal(layout: Layout, specs: Sequence[ExpertsSpec], dtype: torch.dtype) -> str | None:
    """Return why it cannot send the rows of `specs` in `dtype` here, or None. No communication.

    Ranks import it; a launcher or a planner, which does not touch devices, checks whether it is installed.
    """
    if (refused := without_kernels(layout, specs, dtype)) is not None:
        return refused
    if not has_gpu():
        return "there is no GPU"
    if dist.is_initialized() and dist.get_backend() == "fake":
        return "its kernels cannot be simulated"
    if importlib.util.find_spec("deep_ep") is None:
        return f"deep_ep is not installed; {INSTALL}"
    if not dist.is_initialized():
        return None
    try:
        buffer = importlib.import_module("deep_ep").Buffer
    except Exception as error:  # a build for another CUDA, torch or NCCL fails in many ways; what it was is printed
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return f"deep_ep.Buffer cannot be imported ({why}); {INSTALL}"
    for method, given in CALLS.items():
        known = inspect.signature(getattr(buffer, method)).parameters if hasattr(buffer, method) else ()
        if not known or not set(given) <= set(known):
            return f"the deep_ep that is installed has another Buffer.{method}; {INSTALL}"
    return None


def without_kernels(layout: Layout, specs: Sequence[ExpertsSpec], dtype: torch.dtype) -> str | None:
    """Return what it has no kernels for, whatever is installed."""
    if dtype != torch.bfloat16:
        return f"its rows are bfloat16, and precision.compute is {str(dtype).removeprefix('torch.')}"
    if layout.ep not in RANKS:
        return f"it has kernels for ep {', '.join(str(ranks) for ranks in RANKS)}, and parallel.ep is {layout.ep}"
    nodes = max(1, layout.ep // NODE)
    if nodes_of_ep(layout) != nodes or (nodes == 1 and node_crossing(layout)):
        where = f"{nodes} whole nodes of {NODE} ranks" if nodes > 1 else "one node"
        return f"the {layout.ep} ranks of an EP group have to be {where}"
    multiple, experts = (256, 64) if nodes > 1 else (16, 128)
    for spec in specs:
        if spec.hidden_size % multiple or spec.hidden_size > MOST_HIDDEN:
            return (
                f"its rows have a multiple of {multiple} values and at most {MOST_HIDDEN}, and those of {spec.name} "
                f"have {spec.hidden_size}"
            )
        if spec.num_experts // layout.ep > experts or (spec.top_k or 1) > MOST_TOP_K:
            return (
                f"at ep {layout.ep} it takes {experts} experts a rank and top-{MOST_TOP_K}, which {spec.name} is over"
            )
    return None


def buffer_bytes(layout: Layout, hidden: int) -> int:
    """Return the bytes that `Exchange` holds on each device, by the arithmetic and the settings of 1.2.1.

    Queues of 256 or 288 rows for each peer on NVLink, of 140 for each node in both directions, for each of 10 channels,
    and 32 MiB beside them. Between nodes NVSHMEM takes 512 MiB at a time.
    """
    row, channels, nodes = 2 * max(hidden, NUMBER_COLUMNS) + 2056, 10, max(1, layout.ep // NODE)
    near = channels * min(layout.ep, NODE) * (256 if nodes == 1 else 288) * row
    far = 0 if nodes == 1 else -(-channels * nodes * 140 * 2 * (row + 16) // (1 << 29)) << 29
    return near + far + (32 << 20)
