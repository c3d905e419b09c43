"""Save and load checkpoints from a user's training loop: `save_checkpoint` and `load_checkpoint`.

The trainer does not use `save_checkpoint`: it keeps a `CheckpointWriter`, so that a save can continue while it trains.
Model, optimizer and random generators are restored in any layout: each rank reads only the parts that it holds now. No
weights are sent between ranks. All ranks know that no file is damaged before anything is changed.

A tensor from the shards of one layout to those of another:

1. `take_part` (state.py) lists this rank's local tensors with their boxes of the full ones. Of several replicas one is
   written (`owns_copy`); all of them are compared by a fingerprint.
2. `write_part` (state.py) writes `model-RANK-of-RANKS.safetensors`, the same for the optimizer, and a summary.
3. `publish` (write.py) runs on rank 0. It compares the fingerprints, joins the summaries to manifest.json (which says
   how each tensor is cut, and which rank wrote each part), and renames the directory.
4. `open_state` and `check_hashes` (read.py) check manifest, headers and hashes, before anything is changed.
5. `held_parts` (state/shards.py) gives the boxes of this rank in the new layout. `OpenCheckpoint.read_into` finds the
   saved parts that share elements with a box, and `read_box` copies these elements alone.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertmesh.adapters.peft_config import read_config
from expertmesh.adapters.peft_format import CONFIG_FILE
from expertmesh.adapters.start import check_scaling, read_adapter
from expertmesh.checkpoint.directory import clean, locate
from expertmesh.checkpoint.read import OpenCheckpoint, check_fits, check_hashes, open_state
from expertmesh.checkpoint.small_files import (
    STATE_FILE,
    check_saved_adapter,
    read_generators,
    read_layout,
    read_state_file,
    set_rng_state,
    sidecar_files,
    state_bytes,
)
from expertmesh.checkpoint.state import allocate_optimizer_state, model_state
from expertmesh.checkpoint.write import CheckpointWriter, SavedCheckpoint
from expertmesh.compat import weight_conversions
from expertmesh.config.errors import InputError
from expertmesh.distributed.all_ranks import from_rank_0, raise_on_all_ranks, rank_and_ranks
from expertmesh.io.safetensors_reader import DTYPES
from expertmesh.state.model_view import mesh_of, sharded
from expertmesh.state.shards import held_parts, is_on_other_stage
from expertmesh.weights.load import fill, remember
from expertmesh.weights.sidecars import Tokenizer


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """The result of loading a checkpoint."""

    directory: Path
    """The checkpoint that was loaded."""
    step: int
    """The number of optimizer steps after which it was saved."""
    state: dict[str, Any]
    """The `state` that the caller gave to `save_checkpoint`."""


def save_checkpoint(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer | None,
    directory: str | Path,
    *,
    step: int,
    state: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    keep_last: int | None = None,
    weights: bool = True,
) -> SavedCheckpoint:
    """Write `directory/step-XXXXXXXX`: model, optimizer, torch's generators and `state`.

    Returns when the checkpoint is on the disk under its name. Also removes what interrupted saves have left in
    `directory`, so only one job may save there.

    Args:
        directory: On a file system that all ranks share.
        state: JSON, counters for example.
        keep_last: Remove all but this many of the newest checkpoints there.
        weights: False leaves the model's tensors out, if `save_model` or `save_adapter` writes them beside it.

    Raises:
        InputError: This or a later step exists already, the disk is full, or `state` is not JSON.
        IntegrityError: Replicas differ.

    Collectives: every rank calls it with the same arguments; a few small ones on the default group, no weights. Errors
    are raised on all ranks.
    """
    writer = CheckpointWriter(Path(directory), keep_last=keep_last)
    files: dict[str, bytes] = {}
    with raise_on_all_ranks("preparing the checkpoint"):
        if step < 0:
            raise InputError(
                f"step {step}: must be the number of optimizer steps done, 0 or more", key="checkpoint.invalid-step"
            )
        if keep_last is not None and keep_last < 1:
            raise InputError(f"keep_last {keep_last}: must be at least 1, or None for all", key="config.wrong-value")
        if rank_and_ranks()[0] == 0:
            files = {**sidecar_files(model, tokenizer), STATE_FILE: state_bytes(step, state or {}, optimizer)}
            clean(Path(directory))
    saved = writer.save(model, optimizer, step, files, weights=weights)
    writer.close()
    assert saved is not None
    return saved


def load_checkpoint(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer | None, path: str | Path, *, weights: bool = True
) -> LoadedCheckpoint:
    """Load the checkpoint `path`, or the newest one of the directory or the run `path`, into any layout.

    Learning rates and other settings of the optimizer stay the caller's.

    Args:
        model: Made by `load_model` or `parallelize`.
        optimizer: Over the model's parameters; None loads the model alone.
        weights: False leaves the model's weights as they are (`load_weights` reads weights of another directory).

    Raises:
        InputError, SecurityError, IntegrityError: The checkpoint is missing, unsafe, damaged, or does not fit.

    Collectives: every rank calls it; a few small ones on the default group, no weights. Errors are raised on all ranks,
    those of damaged files and of a model that does not fit before anything is changed.
    """
    with raise_on_all_ranks("looking for the checkpoint"):
        found, _ = locate(Path(path))
    return load_directory(model, optimizer, from_rank_0(found), weights=weights)


@torch.no_grad()
def load_directory(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer | None, directory: Path, *, weights: bool = True
) -> LoadedCheckpoint:
    """Do the work of `load_checkpoint` for the checkpoint `directory`, the same on all ranks.

    Torch's generators are restored on the ranks whose number the saved job had too.

    Raises and collectives: as `load_checkpoint`, without the search.
    """
    rank, ranks = rank_and_ranks()
    with ExitStack() as stack:
        with raise_on_all_ranks("opening the checkpoint"):
            opened = stack.enter_context(open_state(directory, rank=rank, ranks=ranks))
        # From here on every path is known to be a regular file: opening a pipe would wait for ever.
        with raise_on_all_ranks("reading what belongs to the checkpoint"):
            manifest = opened.manifest
            if weights:
                check_fits(opened, model_state(model))
            saved = read_state_file(directory, manifest)
            name = type(optimizer).__name__
            if optimizer is not None and saved.optimizer != name:  # it would start without moments
                use = "" if saved.optimizer is None else f"use {saved.optimizer}, or "
                raise InputError(
                    f"{directory}: holds the state of {saved.optimizer or 'no optimizer'}, but the optimizer to load "
                    f"into is {name}; {use}give None for the optimizer and let it start anew",
                    key="checkpoint.other-optimizer",
                )
            layout = read_layout(model, directory, manifest)
            check_saved_adapter(model, directory, manifest)
        # Each rank hashes a part of the files, and all wait: nothing is changed until every file is known to be intact.
        with raise_on_all_ranks("comparing the checkpoint with its hashes"):
            check_hashes(opened, rank=rank, ranks=ranks)
        with raise_on_all_ranks("reading the random generators"):
            generators = read_generators(directory, manifest, [rank])
        with raise_on_all_ranks("loading the checkpoint"):
            targets = model_state(model) if weights else {}
            if optimizer is not None:
                shapes = {name: (DTYPES[each.dtype], tuple(each.shape)) for name, each in manifest.optimizer.items()}
                targets |= allocate_optimizer_state(model, optimizer, shapes)
            read_state(opened, {name: tensor for name, tensor in targets.items() if not is_on_other_stage(tensor)})
            for states in generators:
                set_rng_state(states, mesh_of(model).device)
    remember(model, *layout)
    return LoadedCheckpoint(directory, saved.step, saved.state)


def read_state(state: OpenCheckpoint, targets: Mapping[str, Tensor]) -> None:
    """Fill the local parts of `targets` (DTensors or plain tensors, by saved name). No collective."""
    for name, tensor in targets.items():
        for box, held in held_parts(tensor):
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
            base or scaling.

    Collectives: every rank calls it; one small all-reduce on the default group. Errors are raised on all ranks.
    """
    plan = sharded(model).lora_plan
    if plan is not None:
        with raise_on_all_ranks("reading the adapter"):
            config = Path(directory) / CONFIG_FILE
            check_scaling(config, read_config(Path(directory)), model, plan)
            read_adapter(model, plan, Path(directory))
        return
    # Saving restores layout, dtypes and other tensors of the files that training started from, if it did, not of these.
    before = weight_conversions(model)
    source = sharded(model).source
    fill(model, directory)
    here = weight_conversions(model)
    remember(model, here if before is None else before, source)
