"""Set attributes on a sharded model that transformers, TRL and accelerate can only be given in this way.

A comment at each line names the code that needs it. Patches instances of models, never a class or a module
of a library. Only `Lockstep` communicates.
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
    """Give a sharded model the attributes and methods that the code of Trainers expects."""
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
    """A forward hook that numbers the rows of each training forward, from which adapters' dropout derives its masks.

    The numbers are equal in each run whose steps have the same micro-batches, whichever ranks compute them.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.step, self.rows = -1, 0  # rows of all ranks so far, in this step

    def __call__(self, model: PreTrainedModel, args: Any, kwargs: dict[str, Any]) -> Any:
        """Add `row_numbers` `[B]` to the arguments of a training forward."""
        if not model.training:
            return None
        step, ranks = self.trainer.state.global_step, dist.get_world_size()
        if step != self.step:
            self.step, self.rows = step, 0
        ids_BS = args[0] if args else kwargs.get("input_ids")
        ids_BS = kwargs["inputs_embeds"] if ids_BS is None else ids_BS
        rows = len(ids_BS)
        first = (step << _BITS_OF_ROWS) + self.rows + dist.get_rank() * rows
        if torch.is_grad_enabled():  # generation runs without gradients, and differs between ranks in its forwards
            self.rows += ranks * rows
        return args, {**kwargs, "row_numbers": torch.arange(first, first + rows, device=ids_BS.device)}


class Lockstep:
    """A wrapper of functions in which ranks call the model different numbers of times.

    GRPO's loop of tool calls is one: only completions that call a tool continue. While a wrapped function runs, each
    forward waits for one of every other rank; a rank that has finished joins the others' forwards with a dummy row
    until all have finished.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self.inside = False
        model.register_forward_pre_hook(self._before_forward, prepend=True)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function`.

        Collectives: every rank calls the wrapped function; one all-reduce of an integer on the default group for each
        round of forwards, and one more at the end.
        """

        @functools.wraps(function)
        def in_lockstep(*args: Any, **kwargs: Any) -> Any:
            self._enter(True)
            try:
                result = function(*args, **kwargs)
            finally:
                self._enter(False)
            # A forward has collectives of FSDP and of the experts: to skip one would hang the others.
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
        """Return whether any rank calls the model now.

        Collectives: one all-reduce on the default group. A rank calls it before each of its forwards, with `calls`, and
        after it has finished, without, until no rank calls the model.
        """
        number = torch.tensor(int(calls), device=self.model.device)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return bool(number)


def _is_own(kind: type) -> bool:
    return issubclass(kind, PreTrainedModel) and not issubclass(kind, FSDPModule)


def _pause(model: PreTrainedModel, paused: list[Any]) -> None:
    """Turn activation checkpointing off for a while: checkpointed blocks would keep no cache for generation."""
    paused += [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for module in paused:
        module.gradient_checkpointing = False


def _go_on(paused: list[Any]) -> None:
    """Turn activation checkpointing on again in the blocks in which `_pause` turned it off."""
    while paused:
        paused.pop().gradient_checkpointing = True


@contextmanager
def _no_sync(model: FSDPModule) -> Iterator[None]:
    """Defer the all-reduce over replicas. Shards are reduced each time, as unreduced gradients would be full ones."""
    model.set_requires_all_reduce(False)
    try:
        yield
    finally:
        model.set_requires_all_reduce(True)
