"""What a block keeps under selective checkpointing, so that its second run does not compute it again.

The expert layer: its result, and whatever autograd saves inside of it (rows received, grouped products, routing
weights, indices), so that no token travels twice and no expert is run twice. Fused attention: its result and
normaliser, by torch's own selective policy; queries, keys and values are recomputed. All else in a block is recomputed.

    T tokens here, H hidden
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

_ATTENTION: list[Any] = [
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
]


@dataclass(slots=True)
class _Kept:
    """In the order of the calls: results of expert layers, and the contexts in which attention is run again."""

    results: list[torch.Tensor] = field(default_factory=list)
    attention: list[AbstractContextManager[Any]] = field(default_factory=list)


@dataclass(slots=True)
class _Run:
    """One run of a block: the first one fills `kept`, the second one uses it up from the front."""

    kept: _Kept
    again: bool


_run: ContextVar[_Run | None] = ContextVar("expertmesh_selective_run", default=None)


def keeping_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """One context for each run of a block, to be used beside `routing_contexts`."""
    kept = _Kept()
    return _during(_Run(kept, again=False)), _during(_Run(kept, again=True))


def computed_once(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """`compute()` `[T, H]`, in the second run of a block its result from the first; elsewhere simply `compute()`.

    The graph of the first run is the one that backward takes, so what is saved in it is kept there, past the
    checkpoint's own hooks. `compute` must draw no random numbers: the second run would not draw them.
    """
    run = _run.get()
    if run is None:
        return compute()
    if run.again:
        # A copy, since a model may change its own in place, which autograd forbids for leaves.
        return run.kept.results.pop(0).requires_grad_().clone()
    with saved_tensors_hooks(_pack, _unpack):
        result = compute()
    run.kept.results.append(result.detach().clone())
    return result


def _pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    # Without its history: a node that held its own output would never be freed.
    return tensor.detach(), tensor._version


def _unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    """As autograd does where there are no hooks: a tensor that was changed since raises."""
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            "activation checkpointing: a tensor that the expert layer kept for backward has been changed in place, by "
            "the model or by a first backward through the same graph"
        )
    return tensor


@contextmanager
def _during(run: _Run) -> Iterator[None]:
    token = _run.set(run)
    try:
        with _AttentionOnce(run):
            yield
    finally:
        _run.reset(token)
        if run.again:
            # Now, not when Python finds the cycle that the exception makes by which torch ends a second run early.
            run.kept.results.clear()
            run.kept.attention.clear()


class _AttentionOnce(TorchFunctionMode):
    """Runs fused attention under torch's selective policy: the first run keeps its results, the second takes them."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or torch.compiler.is_compiling() or _drops(args, kwargs):
            return func(*args, **kwargs)
        if self.run.again:
            context = self.run.kept.attention.pop(0)
        else:
            context, again = create_selective_checkpoint_contexts(_ATTENTION)
            self.run.kept.attention.append(again)
        with context:
            return func(*args, **kwargs)


def _drops(args: Any, kwargs: Any) -> bool:
    """Attention with dropout has to run again: whatever draws random numbers after it would else get other ones."""
    probability: float = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    return probability > 0.0
