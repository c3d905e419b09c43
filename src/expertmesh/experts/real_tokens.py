"""Which tokens of the micro-batch being computed count: padding does not, nor a row that only keeps a rank busy.

Padding is routed and computed like any token, as in the unsharded model; only what is counted of routing (load, router
losses, balancing) leaves it out. Lives below the expert layer, which is called with tokens alone.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_real_T: ContextVar[torch.Tensor | None] = ContextVar("expertmesh_real_tokens", default=None)


def real_tokens_of(batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Bool `[B, S]`: `real_tokens` of the batch, else its `attention_mask` if that is `[B, S]`; None: all are real."""
    mask = batch.get("real_tokens", batch.get("attention_mask"))
    return mask.bool() if mask is not None and mask.shape == batch["input_ids"].shape else None


@contextmanager
def counting(real_BS: torch.Tensor | None) -> Iterator[None]:
    """While the model runs on these tokens: expert layers count the real ones only."""
    token = _real_T.set(None if real_BS is None else real_BS.reshape(-1))
    try:
        yield
    finally:
        _real_T.reset(token)


def real_tokens(tokens: int) -> torch.Tensor | None:
    """Bool `[T]` for the `tokens` that an expert layer is called with, or None when all are real."""
    real_T = _real_T.get()
    if real_T is not None and real_T.numel() != tokens:
        raise AssertionError(f"an expert layer is called with {tokens} tokens of a micro-batch of {real_T.numel()}")
    return real_T
