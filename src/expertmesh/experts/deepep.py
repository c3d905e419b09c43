"""Dispatch with DeepEP's high-throughput kernels (`moe.dispatch: deepep`): NVLink within nodes of 8 GPUs, RDMA between.

Written for the class `Buffer` of versions 1.2.1 (2025-09-15) and 2.1.0 (2026-07-14) of github.com/deepseek-ai/DeepEP;
`CALLS` lists what is used of it. It has never run here on a GPU. Its rows are bf16, summed in fp32 inside a node. The
order in which rows are received is not relied on.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import is_available as has_gpu

from expertmesh.anatomy import ExpertsSpec
from expertmesh.distributed.layout import Layout, node_crossing, nodes_of_ep
from expertmesh.experts.by_library import NUMBER_COLUMNS, Arrived

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
        said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return f"deep_ep.Buffer cannot be imported ({said}); {INSTALL}"
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


class Exchange:
    """DeepEP's `Buffer` for `group`, the EP group, with rows of at most `hidden` values.

    Collectives: every rank makes it; some small exchanges of objects over the group.
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

    def first(
        self, rows_TH: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor, num_experts: int
    ) -> Arrived:
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
        return Arrived(handle, rows_RH, index_RK, weight_RK, sum(pairs_L))

    def there(self, rows_TH: torch.Tensor, handle: Any) -> torch.Tensor:
        rows_RH: torch.Tensor = self._buffer.dispatch(rows_TH, handle=handle)[0]
        return rows_RH

    def back(
        self, rows_RH: torch.Tensor, handle: Any, weight_RK: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows_TH, weight_TK, _ = self._buffer.combine(rows_RH, handle, topk_weights=weight_RK)
        return rows_TH, weight_TK

    def close(self) -> None:
        self._buffer.destroy()
