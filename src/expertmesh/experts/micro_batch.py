"""Carry what a micro-batch's forward knows beside its tokens: samples of packed rows, real tokens, routes.

An expert layer is called with tokens alone, so context variables hold these while the model runs.

Padding is routed and computed like any token, as in the unsharded model; only the counts (load, router losses,
balancing) leave it out.

    B rows, S positions, T tokens, L MoE layers of the full model, K top-k
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

Borders = list[tuple[int, int]]
_Made = TypeVar("_Made")


@dataclass(eq=False, slots=True)
class PackedSamples:
    """The samples of packed rows; the rows are concatenated."""

    borders: Borders
    """Start and end of each sample, in tokens."""
    _made: dict[Hashable, Any] = field(default_factory=dict)  # each key has a type of its own

    def once(self, key: Hashable, make: Callable[[Borders], _Made]) -> _Made:
        """Return `make` of the boundaries, computed once for all layers."""
        if key not in self._made:
            self._made[key] = make(self.borders)
        made: _Made = self._made[key]
        return made

    def cu_seqlens(self, device: torch.device) -> torch.Tensor:
        """Return int32 `[samples + 1]`, copied to `device` once for all layers."""

        def make(borders: Borders) -> torch.Tensor:
            ends = torch.tensor([0, *(end for _, end in borders)], dtype=torch.int32)
            # Asynchronous: a copy from the host that waited would stall each micro-batch.
            return ends.to(device, non_blocking=True)

        return self.once(("cu_seqlens", device), make)


packed_samples: ContextVar[PackedSamples | None] = ContextVar("expertmesh_packed_samples", default=None)
"""Samples of the packed rows that run now."""
_real_T: ContextVar[torch.Tensor | None] = ContextVar("expertmesh_real_tokens", default=None)


@dataclass(eq=False, slots=True)
class Routing:
    """The routes of one forward; a recomputed block gets them again."""

    rows: int
    """Rows of the micro-batch."""
    routes_TLK: torch.Tensor | None
    """Experts to replay, on the device of the model; -1 where the router chooses. None: it chooses everywhere."""
    recorded: list[torch.Tensor] | None = None
    """The place for what the forward chooses; None if nobody records it."""
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)
    """The experts chosen, `[T, K]` int32 by number of the MoE layer."""


routing: ContextVar[Routing | None] = ContextVar("expertmesh_routing", default=None)
"""The routes that forwards replay or record now."""


def real_tokens_of(batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return `real_tokens` of the batch, else its `attention_mask` if that is `[B, S]` (bool); None: all are real."""
    mask = batch.get("real_tokens", batch.get("attention_mask"))
    return mask.bool() if mask is not None and mask.shape == batch["input_ids"].shape else None


@contextmanager
def counting(real_BS: torch.Tensor | None) -> Iterator[None]:
    """Let expert layers count only the real tokens while the model runs on these."""
    token = _real_T.set(None if real_BS is None else real_BS.reshape(-1))
    try:
        yield
    finally:
        _real_T.reset(token)


def real_tokens(tokens: int) -> torch.Tensor | None:
    """Return bool `[T]` for the `tokens` of an expert layer's call, or None if all are real."""
    real_T = _real_T.get()
    if real_T is not None and real_T.numel() != tokens:
        raise AssertionError(f"an expert layer is called with {tokens} tokens of a micro-batch of {real_T.numel()}")
    return real_T
