"""Activation checkpointing of whole blocks: `full` recomputes all of a block in backward, `selective` all but what is
dear: dispatch, experts, combine and fused attention (experts/kept.py).

Uses transformers' own hook (`gradient_checkpointing_enable`, non-reentrant), so every family that declares itself
checkpointable works. `routing_contexts` makes the second run choose the same experts as the first; adapters' dropout
gets the token numbers of the first run back, since other micro-batches may have come in between.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from expertmesh.anatomy import describe
from expertmesh.config.errors import InputError
from expertmesh.experts.adapted import AdapterState, adapter_state
from expertmesh.experts.kept import keeping_contexts
from expertmesh.experts.routing import routing_contexts

CheckpointingMode = Literal["none", "selective", "full"]
CheckpointedLayers = Literal["all"] | int | Sequence[int]
_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpoint_blocks(
    model: nn.Module, mode: CheckpointingMode | bool = "full", layers: CheckpointedLayers = "all"
) -> None:
    """Recompute blocks in backward instead of keeping their activations. `True` is "full" and `False` "none".

    `layers` says which blocks, numbered from 0 as they run: "all", N for every Nth from the first on, or their numbers.
    Every rank calls it alike: a block that is recomputed in full repeats its dispatch, which is collective. Raises
    `InputError` for a model that cannot do it.
    """
    mode = mode if isinstance(mode, str) else ("full" if mode else "none")
    if mode == "none":
        if layers != "all":
            raise InputError(f"train.checkpoint_layers is {layers}, but train.activation_checkpointing is none")
        return
    state = adapter_state(model)
    makers: list[Callable[[], _Contexts]] = [routing_contexts]
    if mode == "selective":
        makers.append(keeping_contexts)
    if state is not None and state.dropout > 0.0:
        makers.append(partial(_numbering_contexts, state))
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise InputError(
            f"train.activation_checkpointing: {mode} is not supported by {type(model).__name__}; set it to none"
        )
    blocks = [model.get_submodule(name) for name in describe(model).blocks]
    chosen = checkpointed_layers(layers, len(blocks))
    # transformers renamed its hook and deprecated the old name in 5.23; 5.17 has only that.
    options = {"use_reentrant": False, "context_fn": partial(_together, makers)}
    enable: Any = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:
        enable(activation_checkpointing_kwargs=options)
    else:
        enable = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs=options)
    for number, block in enumerate(blocks):
        if number not in chosen:
            _leave_out(block, number)


def checkpointed_layers(layers: CheckpointedLayers, blocks: int) -> list[int]:
    """The numbers of the blocks that `layers` means in a model of `blocks` blocks, or `InputError`."""
    if layers == "all":
        return list(range(blocks))
    if isinstance(layers, int):
        return list(range(0, blocks, layers))
    missing = [number for number in layers if not 0 <= number < blocks]
    if missing:
        raise InputError(
            f"train.checkpoint_layers names block {missing[0]}, but the model has blocks 0 to {blocks - 1}; remove it"
        )
    return sorted(set(layers))


def _leave_out(block: nn.Module, number: int) -> None:
    """Keep the activations of one block, by the switch that transformers gives each of them."""
    if not isinstance(getattr(block, "gradient_checkpointing", None), bool):
        raise InputError(
            f"train.checkpoint_layers leaves out block {number}, but {type(block).__name__} has no switch of its own; "
            "set train.checkpoint_layers to all"
        )
    block.gradient_checkpointing = False  # type: ignore[assignment]


def _together(makers: Sequence[Callable[[], _Contexts]]) -> _Contexts:
    """torch's `context_fn`: for each run of a block all contexts in one."""
    pairs = [make() for make in makers]
    return _stacked([first for first, _ in pairs]), _stacked([second for _, second in pairs])


@contextmanager
def _stacked(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _numbering_contexts(state: AdapterState) -> _Contexts:
    return ExitStack(), _renumbered(state, state.number_T)


@contextmanager
def _renumbered(state: AdapterState, number_T: torch.Tensor | None) -> Iterator[None]:
    """The adapters see the tokens that they saw when their block ran first."""
    now, state.number_T = state.number_T, number_T
    try:
        yield
    finally:
        state.number_T = now
