"""Routing is decided once per token, also under activation checkpointing.

A checkpointed block runs its router a second time in backward. If a tie or a non-deterministic kernel then chose
other experts, counts would differ from the forward (a shape error at best, silent wrong gradients at worst). So the
first run records what every `topk` chose and the second run gathers at the recorded places: values, and so the
gradient, come from the recomputed scores, the choice does not.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_recomputing: ContextVar[bool] = ContextVar("expertmesh_recomputing", default=False)


def is_recomputing() -> bool:
    """Whether this forward is the second run of a checkpointed block (inside backward)."""
    return _recomputing.get()


def routing_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint`: one context for each run of a block."""
    choices: list[torch.Tensor] = []
    return _Record(choices), _recompute(choices)


@contextmanager
def _recompute(choices: list[torch.Tensor]) -> Iterator[None]:
    token = _recomputing.set(True)
    try:
        with _Replay(choices):
            yield
    finally:
        _recomputing.reset(token)


class _Record(TorchDispatchMode):
    def __init__(self, choices: list[torch.Tensor]) -> None:
        super().__init__()
        self.choices = choices

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default:
            self.choices.append(out[1].clone())  # a model may change its own copy in place
        return out


class _Replay(TorchDispatchMode):
    def __init__(self, choices: list[torch.Tensor]) -> None:
        super().__init__()
        self.choices = iter(choices)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.topk.default:
            return func(*args, **(kwargs or {}))
        scores, dim = args[0], args[2] if len(args) > 2 else -1
        index = next(self.choices)
        return torch.gather(scores, dim, index), index.clone()
