"""Save and load checkpoints from a user's training loop: `save_checkpoint` and `load_checkpoint`.

The trainer does not use `save_checkpoint`: it keeps a `CheckpointWriter`, so that a save can continue while it trains.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from expertmesh.checkpoint.directory import clean, locate
from expertmesh.checkpoint.read import check_fits, open_state
from expertmesh.checkpoint.restore import restore
from expertmesh.checkpoint.small_files import (
    STATE_FILE,
    check_adapter_base,
    companions,
    read_layout,
    read_state_file,
    state_bytes,
)
from expertmesh.checkpoint.state import model_state
from expertmesh.checkpoint.write import CheckpointWriter, SavedCheckpoint
from expertmesh.config.errors import InputError
from expertmesh.distributed.all_ranks import from_rank_0, raise_on_all_ranks
from expertmesh.weights.companions import Tokenizer
from expertmesh.weights.source import remember


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """The checkpoint that was loaded."""

    directory: Path
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
        if not dist.is_initialized() or dist.get_rank() == 0:
            files = {**companions(model, tokenizer), STATE_FILE: state_bytes(step, state or {}, optimizer)}
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
    before anything is changed.
    """
    with raise_on_all_ranks("looking for the checkpoint"):
        found, _ = locate(Path(path))
    return load_directory(model, optimizer, Path(from_rank_0(str(found))), weights=weights)


def load_directory(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer | None, directory: Path, *, weights: bool = True
) -> LoadedCheckpoint:
    """Do the work of `load_checkpoint` for the checkpoint `directory`, the same on all ranks."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with ExitStack() as stack:
        with raise_on_all_ranks("opening the checkpoint"):
            opened = stack.enter_context(open_state(directory, rank=rank, ranks=ranks))
        # From here on every path is known to be a regular file: opening a pipe would wait for ever.
        with raise_on_all_ranks("reading what belongs to the checkpoint"):
            manifest = opened.manifest
            if weights:
                check_fits(opened, model_state(model))
            saved = read_state_file(directory, manifest)
            _check_optimizer(directory, saved.optimizer, optimizer)
            layout = read_layout(model, directory, manifest)
            check_adapter_base(model, directory, manifest)
        restore(model, optimizer, opened, weights=weights)
    remember(model, *layout)
    return LoadedCheckpoint(directory, saved.step, saved.state)


def _check_optimizer(directory: Path, saved: str | None, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise `InputError` if another class of optimizer was saved: `optimizer` would silently start without moments."""
    name = type(optimizer).__name__
    if optimizer is not None and saved not in (None, name):
        raise InputError(
            f"{directory}: holds the state of {saved}, but the optimizer to load into is {name}; use {saved}, or give "
            "None for the optimizer and let it start anew",
            key="checkpoint.other-optimizer",
        )
