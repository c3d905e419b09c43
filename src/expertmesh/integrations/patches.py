"""What transformers, TRL and accelerate leave no other way than to replace, on our own objects and nowhere else.

Each function says which code asks for it. Nothing here communicates, but for what `ShardedAccelerator` says.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel


class ShardedAccelerator(Accelerator):  # type: ignore[misc]
    """accelerate for a model whose ranks reduce its gradients by sums: it wraps nothing and scales nothing else.

    Trainers make their `Accelerator` themselves, so that its class is exchanged (`take_over`).
    """

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """A sharded model as it is, neither moved nor wrapped; any other as accelerate does it."""
        if not isinstance(model, FSDPModule):
            return cast(nn.Module, super().prepare_model(model, device_placement, evaluation_mode))
        if not any(model is known for known in self._models):
            self._models.append(model)
        return model

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Trainers scale their loss for DDP, which averages gradients over ranks; here they are summed."""
        super().backward(loss / dist.get_world_size(), **kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """For all micro-batches but the last: replicas wait with their all-reduce. Shards are reduced each time, as
        unreduced gradients would be whole ones.
        """
        if not isinstance(model, FSDPModule):
            with super().no_sync(model):
                yield
            return
        model.set_requires_all_reduce(False)
        try:
            yield
        finally:
            model.set_requires_all_reduce(True)


def take_over(accelerator: Accelerator) -> None:
    """Make a Trainer's own accelerator one for sharded models."""
    accelerator.__class__ = ShardedAccelerator


def keep_class_name(model: PreTrainedModel, name: str) -> None:
    """transformers decides by the name of the class whether label smoothing shifts labels; FSDP2 renames classes."""
    model._get_name = lambda: name  # type: ignore[method-assign]


def keep_checkpointing(model: PreTrainedModel) -> None:
    """Activation checkpointing is applied while sharding. `Trainer.train` would put transformers' own around it, and
    TRL takes it off and puts transformers' own on again around forwards without gradients.
    """

    def nothing(*args: Any, **kwargs: Any) -> None:
        """It is as it was set when the model was sharded."""

    for which in ("activation_checkpointing", "gradient_checkpointing"):
        setattr(model, f"{which}_enable", nothing)
        setattr(model, f"{which}_disable", nothing)
