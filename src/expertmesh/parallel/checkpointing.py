"""Checkpoint the activations of complete blocks, which are then recomputed in backward.

`full` recomputes all of a block, `selective` all but dispatch, experts, combine and fused attention. It uses
transformers' hook (`gradient_checkpointing_enable`, non-reentrant), so every family that declares itself checkpointable
works. The data that both runs of a block share is in experts/activation_checkpointing.py.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import nn

from expertmesh.anatomy import Anatomy
from expertmesh.compat import checkpointing_takes_value, enable_checkpointing
from expertmesh.config.errors import InputError
from expertmesh.experts.activation_checkpointing import block_contexts
from expertmesh.experts.lora_state import AdapterState

CheckpointingMode = Literal["none", "selective", "full"]
CheckpointedLayers = Literal["all"] | int | Sequence[int]


def checkpointing_mode(mode: CheckpointingMode | Literal["auto"] | bool) -> CheckpointingMode:
    """Return the mode: `True` is "full", `False` "none"; auto is "full" on accelerators, whose memory is scarce."""
    if isinstance(mode, bool) or mode == "auto":
        return "full" if mode is True or (mode and torch.accelerator.is_available()) else "none"
    return mode


def checkpointed_blocks(
    model: nn.Module, anatomy: Anatomy, mode: CheckpointingMode, layers: CheckpointedLayers
) -> tuple[str, ...]:
    """Return the names of the blocks that are recomputed in backward.

    Args:
        layers: the blocks, numbered from 0 in execution order: "all", N for every Nth block from the first on, or a
            list of numbers.

    Raises:
        InputError: a model whose blocks cannot be recomputed, or without one of `layers`.
    """
    if mode == "none":
        return ()
    refuse_checkpointing(model, anatomy, layers)
    return tuple(anatomy.blocks[number] for number in checkpointed_layers(layers, len(anatomy.blocks)))


def recompute_blocks(
    model: nn.Module, mode: CheckpointingMode, here: Sequence[str], blocks: Sequence[str], adapters: AdapterState | None
) -> None:
    """Enable recomputation of `blocks`, the result of `checkpointed_blocks`.

    Args:
        here: the blocks of this rank's pipeline stages.
        adapters: the state that the adapters share.

    Collectives: every rank calls it with equal arguments and it issues none, but a block that is recomputed in full
    repeats its dispatch in backward, which is collective.
    """
    if mode == "none":
        return
    # The second run needs the state of the adapters only to draw the same dropout masks.
    dropping = adapters if adapters is not None and adapters.dropout > 0.0 else None
    context_fn = partial(block_contexts, selective=mode == "selective", adapters=dropping)
    enable_checkpointing(model, {"use_reentrant": False, "context_fn": context_fn})
    # The hook enables every block; the others keep their activations.
    for name in here:
        if name not in blocks:
            model.get_submodule(name).gradient_checkpointing = False  # type: ignore[assignment]


def checkpointed_layers(layers: CheckpointedLayers, blocks: int) -> list[int]:
    """Return the block numbers that `layers` means in a model of `blocks` blocks.

    Raises:
        InputError: a block does not exist.
    """
    if layers == "all":
        return list(range(blocks))
    if isinstance(layers, int):
        return list(range(0, blocks, layers))
    missing = [number for number in layers if not 0 <= number < blocks]
    if missing:
        raise InputError(
            f"train.checkpoint_layers names block {missing[0]}, but the model has blocks 0 to {blocks - 1}; remove it",
            key="train.checkpoint-layers-no-such-block",
        )
    return sorted(set(layers))


def refuse_checkpointing(model: nn.Module, anatomy: Anatomy, layers: CheckpointedLayers) -> None:
    """Raise `InputError` for a model whose blocks cannot be recomputed, or not one by one if `layers` requires it."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise InputError(
            f"train.activation_checkpointing is not supported by {type(model).__name__}; set it to none",
            key="train.activation-checkpointing-unsupported",
        )
    if checkpointing_takes_value(model):
        # transformers drops the options then, and with them the context that reuses the routing of the first run.
        raise InputError(
            f"train.activation_checkpointing: the code of {type(model).__name__} has the switch in an old form, which "
            "takes no options; set it to none",
            key="train.activation-checkpointing-unsupported",
        )
    blocks = (model.get_submodule(name) for name in anatomy.blocks)
    fixed = [block for block in blocks if not isinstance(getattr(block, "gradient_checkpointing", None), bool)]
    if layers != "all" and fixed:
        raise InputError(
            f"train.checkpoint_layers is {layers}, but transformers has no switch for each {type(fixed[0]).__name__} "
            f"of {model.config.model_type}; set train.checkpoint_layers to all",  # type: ignore[union-attr]
            key="train.checkpoint-layers-unsupported",
        )
