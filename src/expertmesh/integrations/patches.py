"""What transformers, TRL and accelerate leave no other way than to set on the model itself.

Each line says which code asks for it. Nothing here communicates.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, Trainer

_BITS_OF_ROWS = 20  # a step has fewer rows


def prepare(model: Any) -> None:
    """Let a sharded model be what the code of Trainers expects to find."""
    # accelerate takes it as it is: it neither moves nor wraps it.
    model._is_accelerate_prepared = True
    # accelerate asks for it around all micro-batches but the last.
    model.no_sync = lambda: _no_sync(model)
    # transformers decides by the name of the class whether label smoothing shifts labels; FSDP2 renames classes.
    name = next(kind.__name__ for kind in type(model).__mro__ if _is_own(kind))
    model._get_name = lambda: name
    # transformers generates in lockstep then: a rank that is through goes on until all are.
    model._is_fsdp_managed_module = True
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
        self.rows += ranks * rows
        return args, {**kwargs, "row_numbers": torch.arange(first, first + rows, device=ids_BS.device)}


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
