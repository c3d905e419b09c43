"""DeepEP's `Buffer` over gloo: what its callers see of it, and what it demands of them, on CPUs.

Written from deep_ep/buffer.py, csrc/deep_ep.cpp and csrc/kernels/intranode.cu of 1.2.1 (2025-09-15); signatures also
from deep_ep/buffers/legacy.py of 2.1.0 (2026-07-14). What travels is decided by the tensors of the handle alone, as it
is there. The order of received rows is some order that belongs to the handle, as between nodes nobody says which.
Stands in for a GPU where tests put it into `sys.modules` as deep_ep.
"""

from typing import Any

import torch
import torch.distributed as dist

topk_idx_t = torch.int64
# Dtypes of rows. The real one has bf16 alone; tests of exactness add more.
CARRIED = [torch.bfloat16]
# Every buffer that was made, with the calls that it saw.
OPENED: list["Buffer"] = []


class Config:
    """Chunks of a queue; sizes of buffers are csrc/config.hpp's."""

    def __init__(self, num_sms: int, nvl_send: int, nvl_recv: int, rdma_send: int, rdma_recv: int) -> None:
        self.channels, self.nvl_recv = num_sms // 2, nvl_recv
        self.rdma_recv = -(-rdma_recv // rdma_send) * rdma_send

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        assert num_ranks < 8 or num_ranks % 8 == 0
        near, nodes = min(num_ranks, 8), max(num_ranks // 8, 1)
        size = self.channels * near * (2 * nodes + 3) * 4
        size += self.channels * near * self.nvl_recv * (hidden_bytes + 8 + 128 * 8 + 128 * 4 + 128 * 4)
        return -(-size // 128) * 128

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        assert num_ranks > 8, "NVSHMEM is disabled during compilation"
        nodes = num_ranks // 8
        size = self.channels * nodes * 18 * 2 * 4
        size += self.channels * nodes * self.rdma_recv * 2 * (hidden_bytes + 8 + 128 * 8 + 128 * 4 + 128 * 4 + 16)
        return -(-size // 128) * 128


class EventOverlap:
    """None is asked for where `async_finish` is not."""

    event = None


class Buffer:
    num_sms: int = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
    ) -> None:
        assert num_nvl_bytes % 128 == num_rdma_bytes % 128 == 0
        assert num_rdma_bytes == 0 or group.size() > 8
        self.group, self.ranks, self.num_nvl_bytes = group, group.size(), num_nvl_bytes
        self.explicitly_destroy, self.alive = explicitly_destroy, True
        self.calls: list[str] = []
        OPENED.append(self)
        self._all("open")

    def destroy(self) -> None:
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        assert self.alive
        self._all("destroy")
        self.alive = False

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        chunks = {2: (24, 256, 6, 128), 4: (6, 256, 6, 128), 8: (6, 256, 6, 128), 16: (36, 288, 20, 128)}
        chunks |= {24: (8, 288, 32, 128), 32: (32, 288, 32, 128), 64: (20, 288, 28, 128)}
        assert num_ranks in chunks, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, *chunks[num_ranks])

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        chunks = {2: (10, 256, 6, 128), 4: (9, 256, 6, 128), 8: (4, 256, 6, 128), 16: (4, 288, 12, 128)}
        chunks |= {24: (1, 288, 8, 128), 32: (1, 288, 8, 128), 64: (1, 288, 20, 128)}
        assert num_ranks in chunks, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, *chunks[num_ranks])

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        assert topk_idx.dim() == 2
        assert topk_idx.is_contiguous()
        assert topk_idx.dtype == topk_idx_t
        chosen = topk_idx[(topk_idx >= 0) & (topk_idx < num_experts)]
        per_expert = torch.bincount(chosen, minlength=num_experts).int()
        owner = torch.where(topk_idx >= 0, topk_idx // (num_experts // self.ranks), self.ranks)
        in_rank = torch.stack([(owner == rank).any(1) for rank in range(self.ranks)], 1)
        return in_rank.sum(0).int(), None, per_expert, in_rank, EventOverlap()

    def dispatch(
        self,
        x: torch.Tensor,
        handle: tuple[torch.Tensor, ...] | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        self._check(x)
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            self._all("cached dispatch")
            prefix_DD, *_, in_rank_TD, _ = handle
            assert in_rank_TD.shape == (len(x), self.ranks)
            return self._send(x, in_rank_TD, prefix_DD), None, None, None, None, EventOverlap()

        assert num_tokens_per_rank is not None
        assert num_tokens_per_expert is not None
        assert is_token_in_rank is not None
        assert topk_idx is not None
        assert topk_weights is not None
        assert is_token_in_rank.shape == (len(x), self.ranks)
        assert num_tokens_per_expert.dtype == num_tokens_per_rank.dtype == torch.int32
        assert topk_idx.shape == topk_weights.shape
        assert len(topk_idx) == len(x)
        assert topk_idx.shape[1] <= 32
        assert topk_idx.is_contiguous()
        assert topk_weights.is_contiguous()
        assert topk_weights.dtype == torch.float32
        self._all("dispatch")  # the host waits for the counts
        told = torch.cat([num_tokens_per_rank, num_tokens_per_expert])
        gathered = [torch.empty_like(told) for _ in range(self.ranks)]
        dist.all_gather(gathered, told, group=self.group)
        prefix_DD = torch.stack([each[: self.ranks] for each in gathered]).cumsum(0).int()
        experts = len(num_tokens_per_expert) // self.ranks
        first = self.group.rank() * experts
        counts_L = torch.stack([each[self.ranks :] for each in gathered]).sum(0)[first : first + experts]
        aligned = [-(-count // expert_alignment) * expert_alignment for count in counts_L.tolist()]

        rows = self._send(x, is_token_in_rank, prefix_DD)
        index = self._send(topk_idx, is_token_in_rank, prefix_DD) - first
        here = (index >= 0) & (index < experts)
        weights = self._send(topk_weights, is_token_in_rank, prefix_DD)
        tokens = torch.arange(len(x), dtype=torch.int32).unsqueeze(1)
        source = self._send(tokens, is_token_in_rank, prefix_DD)[:, 0].contiguous()
        head_TD = torch.where(is_token_in_rank, is_token_in_rank.cumsum(0) - 1, -1).int()
        channels = torch.zeros(self.ranks, self.num_sms // 2, dtype=torch.int32)
        handle = (prefix_DD, channels, channels.clone(), source, is_token_in_rank, head_TD)
        return rows, index.where(here, -1), weights.where(here, 0.0), aligned, handle, EventOverlap()

    def combine(
        self,
        x: torch.Tensor,
        handle: tuple[torch.Tensor, ...],
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        self._check(x)
        self._all("combine")
        prefix_DD, _, _, source, _, head_TD = handle
        assert source.shape == (len(x),)
        rows = self._reduce(x, prefix_DD, head_TD)
        if topk_weights is None:
            return rows, None, EventOverlap()
        assert topk_weights.dtype == torch.float32
        assert topk_weights.is_contiguous()
        assert len(topk_weights) == len(x)
        return rows, self._reduce(topk_weights, prefix_DD, head_TD), EventOverlap()

    def _check(self, x: torch.Tensor) -> None:
        assert self.alive
        assert x.dim() == 2
        assert x.is_contiguous()
        assert x.dtype in CARRIED
        assert x.shape[1] * x.element_size() % 32 == 0, "hidden_int4 % 2 == 0"
        queues = 10 * self.ranks * 256 * x.shape[1] * 2
        assert queues <= self.num_nvl_bytes, "rows are wider than those that the buffer was made for"

    def _all(self, what: str) -> None:
        """Every rank is in the same call, or they would wait for one another."""
        said: list[Any] = [None] * self.ranks
        dist.all_gather_object(said, what, group=self.group)
        assert said == [what] * self.ranks, said
        self.calls.append(what)

    def _order(self, prefix_DD: torch.Tensor) -> torch.Tensor:
        rows = int(prefix_DD[-1, self.group.rank()])
        return torch.randperm(rows, generator=torch.Generator().manual_seed(rows))

    def _splits(self, prefix_DD: torch.Tensor) -> tuple[list[int], list[int]]:
        counts_DD = torch.diff(prefix_DD, dim=0, prepend=torch.zeros_like(prefix_DD[:1]))
        return counts_DD[self.group.rank()].tolist(), counts_DD[:, self.group.rank()].tolist()

    def _send(self, x: torch.Tensor, in_rank_TD: torch.Tensor, prefix_DD: torch.Tensor) -> torch.Tensor:
        sent, received = self._splits(prefix_DD)
        blocks = torch.cat([x[in_rank_TD[:, rank]] for rank in range(self.ranks)])
        rows = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(_bytes(rows), _bytes(blocks), received, sent, group=self.group)
        return rows[self._order(prefix_DD)]

    def _reduce(self, x: torch.Tensor, prefix_DD: torch.Tensor, head_TD: torch.Tensor) -> torch.Tensor:
        """In fp32 (or wider), rounded once."""
        sent, received = self._splits(prefix_DD)
        blocks = torch.empty_like(x)
        blocks[self._order(prefix_DD)] = x
        rows = x.new_empty(sum(sent), x.shape[1])
        dist.all_to_all_single(_bytes(rows), _bytes(blocks), sent, received, group=self.group)
        total = torch.zeros(len(head_TD), x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
        for rank, block in enumerate(rows.split(sent)):
            tokens = head_TD[:, rank] >= 0
            total[tokens] += block[head_TD[tokens, rank].long()]
        return total.to(x.dtype)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)
