"""Restore model, optimizer and random generators, in any layout: each rank reads only the parts that it holds now.

No weights are sent between ranks. All ranks know that no file is damaged before anything is changed.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from expertmesh.adapters.plan import plan_of
from expertmesh.adapters.read import read_adapter
from expertmesh.checkpoint.read import SavedState, check_hashes
from expertmesh.checkpoint.small_files import read_generators, set_rng_state
from expertmesh.checkpoint.state import allocate_optimizer_state, held_part, model_state
from expertmesh.compat import weight_conversions
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.io.safetensors_reader import DTYPES
from expertmesh.state.model_view import mesh_of, sharded
from expertmesh.state.shards import is_on_other_stage
from expertmesh.weights.load import fill
from expertmesh.weights.source import remember


@torch.no_grad()
def restore(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer | None, state: SavedState, *, weights: bool = True
) -> None:
    """Fill a sharded model, its optimizer and torch's generators from an opened checkpoint that fits.

    Generators are restored on the ranks whose number the saved job had too.

    Args:
        model: Its shards have to be allocated.
        optimizer: None ignores the saved moments.
        weights: False leaves the model's tensors as they are.

    Raises:
        IntegrityError: The checkpoint is damaged.

    Collectives: every rank calls it with the same checkpoint; a few small all-reduces on the default group, no weights.
    Errors are raised on all ranks, before anything is changed.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    # Each rank hashes a part of the files, and all wait: nothing is changed until every file is known to be intact.
    with raise_on_all_ranks("comparing the checkpoint with its hashes"):
        check_hashes(state, rank=rank, ranks=ranks)
    with raise_on_all_ranks("reading the random generators"):
        generators = read_generators(state.directory, state.manifest, [rank])
    with raise_on_all_ranks("loading the checkpoint"):
        targets = model_state(model) if weights else {}
        if optimizer is not None:
            saved = state.manifest.optimizer.items()
            shapes = {name: (DTYPES[entry.dtype], tuple(entry.shape)) for name, entry in saved}
            targets |= allocate_optimizer_state(model, optimizer, shapes)
        read_state(state, {name: tensor for name, tensor in targets.items() if not is_on_other_stage(tensor)})
        for states in generators:
            set_rng_state(states, mesh_of(model).device)


def read_state(state: SavedState, targets: Mapping[str, Tensor]) -> None:
    """Fill the local parts of `targets` (DTensors or plain tensors, by saved name). No collective."""
    for name, tensor in targets.items():
        box, held = held_part(tensor)
        state.read_into(name, box, held)
        state.check_finite(name, box, held)


@torch.no_grad()
def load_weights(model: PreTrainedModel, directory: str | Path) -> None:
    """Give a sharded model the weights that `save_model` wrote to `directory`; with adapters, those of `save_adapter`.

    Works in any layout; each rank reads the bytes of its shards. Values are cast to the model's dtypes. An optimizer
    over the model's parameters stays valid.

    Args:
        model: Made by `load_model` or `parallelize`.

    Raises:
        InputError, SecurityError: The files cannot be read, or are unsafe.
        IntegrityError: Files do not fill the model exactly once, values are not finite, or the adapter has another
            base.

    Collectives: every rank calls it; one small all-reduce on the default group. Errors are raised on all ranks.
    """
    plan = plan_of(model)
    if plan is not None:
        with raise_on_all_ranks("reading the adapter"):
            read_adapter(model, plan, Path(directory))
        return
    # Saving restores layout, dtypes and other tensors of the files that training started from, if it did, not of these.
    before = weight_conversions(model)
    source = sharded(model).source
    fill(model, directory)
    here = weight_conversions(model)
    remember(model, here if before is None else before, source)
