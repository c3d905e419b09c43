"""Routing is decided once per token, also under activation checkpointing.

A checkpointed block runs its router a second time in backward. If a tie or a non-deterministic kernel then chose
other experts, counts would differ from the forward (a shape error at best, silent wrong gradients at worst). So the
first run records what every `topk` chose and the second run gathers at the recorded places: values, and so the
gradient, come from the recomputed scores, the choice does not. A router that decides by other means is held to its
first choice by `confirm_choice`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@dataclass(slots=True)
class _Choices:
    """What the first run of a block chose: by each `topk`, and finally for each experts module."""

    topk: list[torch.Tensor] = field(default_factory=list)
    experts: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True)
class _Run:
    """One run of a checkpointed block: the first one fills `choices`, the second one reads them in order."""

    choices: _Choices
    replays: bool
    topk_calls: int = 0
    experts_calls: int = 0


_run: ContextVar[_Run | None] = ContextVar("expertmesh_checkpointed_run", default=None)


def routing_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint`: one context for each run of a block."""
    choices = _Choices()
    return _during(choices, replays=False), _during(choices, replays=True)


def is_recomputing() -> bool:
    """Whether this forward is the second run of a checkpointed block (inside backward)."""
    run = _run.get()
    return run is not None and run.replays


def confirm_choice(index_TK: torch.Tensor) -> None:
    """Called with the experts chosen for each token: in a second run they must be those of the first.

    Raises where they are not (on an accelerator asynchronously, without waiting for it).
    """
    run = _run.get()
    if run is None:
        return
    if not run.replays:
        run.choices.experts.append(index_TK.detach().to(torch.int32))
        return
    same = (run.choices.experts[run.experts_calls] == index_TK).all()
    run.experts_calls += 1
    torch._assert_async(same, "activation checkpointing: the router chose other experts when it was run again")


@contextmanager
def _during(choices: _Choices, *, replays: bool) -> Iterator[None]:
    run = _Run(choices, replays)
    token = _run.set(run)
    try:
        with _TopkOnce(run):
            yield
    finally:
        _run.reset(token)
        if replays:
            # Now, not when Python finds the cycle that the exception makes by which torch ends a second run early.
            choices.topk.clear()
            choices.experts.clear()


class _TopkOnce(TorchFunctionMode):
    """Replaces `topk` by a choice without gradient and a gather with it, so that both runs build the same graph."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.topk and func is not torch.Tensor.topk:
            return func(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        if self.run.replays:
            index = self.run.choices.topk[self.run.topk_calls]
            self.run.topk_calls += 1
        else:
            with torch.no_grad():
                index = func(*args, **kwargs).indices
            self.run.choices.topk.append(index)
        # A copy: several families change their own in place.
        return torch.return_types.topk((torch.gather(scores, dim, index), index.clone()))
