"""Refuse callbacks of a Trainer that would compute wrong results on a sharded model.

A callback finds DTensors in the model. Elementwise results, an average of weights for example, are right on shards.
Callbacks of transformers and TRL that need full weights are refused by name before training. A callback that reads a
number of one rank's shards alone gets an `InputError` at that place.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from expertmesh.compat import READS_A_VALUE, TorchDispatchMode, logs_the_model, pytree
from expertmesh.config.errors import InputError

# Callbacks of transformers and TRL that cannot work on shards, whatever their options; also classes derived from them.
REFUSED = {
    "BEMACallback": "it copies the whole model to every rank; average model.parameters() in a callback of your "
    "own, each rank its shards",
    "SyncRefModelCallback": "the reference is a model in shards of its own; leave it out",
    "JITCheckpointCallback": "it saves on one rank when that gets its signal; leave it out",
}
# Environment variables by which other callbacks save or watch weights, on rank 0 alone.
_VARIABLES = {
    "WandbCallback": ("WANDB_LOG_MODEL", "WANDB_WATCH"),
    "DVCLiveCallback": ("HF_DVCLIVE_LOG_MODEL",),
}
_OFF = ("", "false", "0", "no", "n", "off", "f")
_GENERATING = ("LogCompletionsCallback", "WeaveCallback")


def refuse_callbacks(callbacks: Iterable[Any], ranks: int) -> None:
    """Raise `InputError` for a callback, an instance or a class, that cannot work on shards. No communication."""
    for callback in callbacks:
        kind = callback if isinstance(callback, type) else type(callback)
        for base in kind.__mro__:
            if base.__module__.partition(".")[0] in ("transformers", "trl") and (
                why := _why(base.__name__, callback, ranks)
            ):
                raise InputError(f"the callback {kind.__name__} is given: {why}", key="trainer.unsupported-callback")


def _why(name: str, callback: Any, ranks: int) -> str | None:
    """Return why a callback of the class `name` cannot work on shards, or None."""
    if name in REFUSED:
        return REFUSED[name]
    for variable in _VARIABLES.get(name, ()):
        value = os.environ.get(variable, "")
        sends_directories = (name, value.lower()) == ("DVCLiveCallback", "all")  # checkpoints: full weights
        if value.lower() not in _OFF and not sends_directories:
            return f"{variable} is {value!r}, by which rank 0 alone would read weights that are in shards; unset it"
    if name == "DVCLiveCallback" and logs_the_model(callback):
        return (
            'log_model is True, by which rank 0 alone would save weights that are in shards; set it to "all" or False'
        )
    if name in _GENERATING and (prompts := len(getattr(callback, "eval_dataset", ()))) % ranks:
        return (
            f"its {prompts} prompts cannot be shared out evenly over {ranks} ranks, which generate together; set "
            f"num_prompts to a multiple of {ranks}"
        )
    return None


def on_shards(call_event: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `CallbackHandler.call_event` so that reading a number of one rank's shards raises `InputError`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _Shards():
            return call_event(*args, **kwargs)

    return call


class _Shards(TorchDispatchMode):
    """A dispatch mode that checks operations on DTensors.

    torch computes `weight.norm().item()` without the other ranks' shards, and raises no error.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        shards = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        if func is READS_A_VALUE and any(placement.is_partial() for shard in shards for placement in shard.placements):
            raise _in_shards("reads a number that is of this rank's shards alone")
        try:
            return func(*args, **(kwargs or {}))
        except (RuntimeError, NotImplementedError) as error:
            meshes = {shard.device_mesh for shard in shards}
            if shards and (
                len(meshes) > 1 or any(tensor.dim() for tensor in tensors if not isinstance(tensor, DTensor))
            ):
                raise _in_shards(f"calls {func} of shards together with whole tensors, or shards of experts") from error
            raise


def _in_shards(what: str) -> InputError:
    return InputError(
        f"a callback {what}; call .full_tensor() of the parameter, or of its norm or sum, on every rank",
        key="trainer.unsupported-callback",
    )
