"""What transformers, TRL and accelerate leave no other way than to set on the model itself.

Each line says which code asks for it. `Lockstep` alone communicates.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, Trainer

from expertmesh.compat import generate_in_lockstep, present_as_fsdp

_BITS_OF_ROWS = 20  # a step has fewer rows


def prepare(model: Any) -> None:
    """Let a sharded model be what the code of Trainers expects to find."""
    # accelerate asks for it around all micro-batches but the last.
    model.no_sync = lambda: _no_sync(model)
    # FSDP2 renames classes.
    present_as_fsdp(model, next(kind.__name__ for kind in type(model).__mro__ if _is_own(kind)))
    # Activation checkpointing was applied while sharding. `Trainer.train` would put transformers' own around it, and
    # TRL takes it off and puts transformers' own on again around generation and references.
    paused: list[Any] = []
    for which in ("activation_checkpointing", "gradient_checkpointing"):
        setattr(model, f"{which}_enable", lambda *args, **kwargs: _go_on(paused))
        setattr(model, f"{which}_disable", lambda: _pause(model, paused))


class RowNumbers:
    """Numbers the rows of each training forward, which adapters' dropout takes its masks from: equal in each run that
    takes the same micro-batches in its steps, whichever ranks compute them.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.step, self.rows = -1, 0  # rows of all ranks so far, in this step

    def __call__(self, model: PreTrainedModel, args: Any, kwargs: dict[str, Any]) -> Any:
        """A hook before the model's forward."""
        if not model.training:
            return None
        step, ranks = self.trainer.state.global_step, dist.get_world_size()
        if step != self.step:
            self.step, self.rows = step, 0
        ids_BS = args[0] if args else kwargs.get("input_ids")
        ids_BS = kwargs["inputs_embeds"] if ids_BS is None else ids_BS
        rows = len(ids_BS)
        first = (step << _BITS_OF_ROWS) + self.rows + dist.get_rank() * rows
        if torch.is_grad_enabled():  # generation has forwards of its own on each rank, and a different number of them
            self.rows += ranks * rows
        return args, {**kwargs, "row_numbers": torch.arange(first, first + rows, device=ids_BS.device)}


class Lockstep:
    """Lets ranks call the model in different numbers: where only some completions call a tool, only those go on.

    While a function that was wrapped runs, each forward waits for the others', and a rank that is through takes part
    in theirs with a row of its own until all are through.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self.inside = False
        model.register_forward_pre_hook(self._before_forward, prepend=True)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which every rank calls. One all-reduce of a number for each forward of any rank, and one more."""

        @functools.wraps(function)
        def in_lockstep(*args: Any, **kwargs: Any) -> Any:
            self._enter(True)
            try:
                result = function(*args, **kwargs)
            finally:
                self._enter(False)
            while self._anyone(False):
                with torch.no_grad():
                    self.model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.model.device), use_cache=False)
            return result

        return in_lockstep

    def _before_forward(self, *args: Any) -> None:
        if self.inside:
            self._anyone(True)

    def _enter(self, inside: bool) -> None:
        self.inside = inside
        # Or transformers would let each call of `generate` wait for one of every other rank.
        generate_in_lockstep(self.model, not inside)

    def _anyone(self, calls: bool) -> bool:
        """Whether a rank calls the model now. One all-reduce, whose ranks each say so or are through."""
        number = torch.tensor(int(calls), device=self.model.device)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return bool(number)


def _is_own(kind: type) -> bool:
    return issubclass(kind, PreTrainedModel) and not issubclass(kind, FSDPModule)


def _pause(model: PreTrainedModel, paused: list[Any]) -> None:
    """Blocks run as if they were not checkpointed; else they would keep nothing for generation."""
    paused += [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for module in paused:
        module.gradient_checkpointing = False


def _go_on(paused: list[Any]) -> None:
    while paused:
        paused.pop().gradient_checkpointing = True


@contextmanager
def _no_sync(model: FSDPModule) -> Iterator[None]:
    """Replicas wait with their all-reduce. Shards are reduced each time, as unreduced gradients would be whole ones."""
    model.set_requires_all_reduce(False)
    try:
        yield
    finally:
        model.set_requires_all_reduce(True)
