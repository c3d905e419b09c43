"""Activation checkpointing of whole blocks, with routing decided once and dropout repeated.

Uses transformers' own hook (`gradient_checkpointing_enable`, non-reentrant), so every family that declares itself
checkpointable works. `routing_contexts` makes the second run choose the same experts as the first; adapters' dropout
gets the token numbers of the first run back, since other micro-batches may have come in between.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from expertmesh.config.errors import InputError
from expertmesh.experts.adapted import AdapterState, adapter_state
from expertmesh.experts.routing import routing_contexts


def checkpoint_blocks(model: nn.Module) -> None:
    """Recompute each block in backward instead of keeping its activations (`activation_checkpointing: full`).

    Every rank calls it alike: a recomputed block repeats its dispatch, which is collective.
    """
    state = adapter_state(model)
    contexts = routing_contexts if state is None or state.dropout == 0.0 else partial(_numbered_contexts, state)
    options = {"use_reentrant": False, "context_fn": contexts}
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


def _numbered_contexts(state: AdapterState) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    first, second = routing_contexts()
    return first, _renumbered(second, state, state.number_T)


@contextmanager
def _renumbered(run: AbstractContextManager[Any], state: AdapterState, number_T: torch.Tensor | None) -> Iterator[None]:
    """`run`, while the adapters see the tokens that they saw when its block ran first."""
    now, state.number_T = state.number_T, number_T
    try:
        with run:
            yield
    finally:
        state.number_T = now
