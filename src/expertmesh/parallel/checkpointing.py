"""Activation checkpointing of whole blocks, with routing decided once.

Uses transformers' own hook (`gradient_checkpointing_enable`, non-reentrant), so every family that declares itself
checkpointable works. `routing_contexts` makes the second run choose the same experts as the first.
"""

from typing import Any

from torch import nn

from expertmesh.config.errors import InputError
from expertmesh.experts.routing import routing_contexts


def checkpoint_blocks(model: nn.Module) -> None:
    """Recompute each block in backward instead of keeping its activations (`activation_checkpointing: full`).

    Every rank calls it alike: a recomputed block repeats its dispatch, which is collective.
    """
    options = {"use_reentrant": False, "context_fn": routing_contexts}
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise InputError(
            f"train.activation_checkpointing: full is not supported by {type(model).__name__}; set it to none"
        )
    # transformers renamed its hook and deprecated the old name in 5.23; 5.17 has only that.
    enable: Any = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:
        enable(activation_checkpointing_kwargs=options)
    else:
        enable = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs=options)
