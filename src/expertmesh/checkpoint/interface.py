"""The Python interface: `save_checkpoint` and `load_checkpoint`. The trainer has a `CheckpointWriter` of its own."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from expertmesh.checkpoint.companions import check_adapter_base, companions, read_layout
from expertmesh.checkpoint.directory import clean, locate
from expertmesh.checkpoint.read import check_fits, open_state
from expertmesh.checkpoint.restore import restore
from expertmesh.checkpoint.small_files import STATE_FILE, read_state_file, state_bytes
from expertmesh.checkpoint.state import model_state
from expertmesh.checkpoint.write import CheckpointWriter, SavedCheckpoint
from expertmesh.config.errors import InputError
from expertmesh.distributed.all_ranks import from_rank_0, raise_on_all_ranks
from expertmesh.weights.companions import Tokenizer
from expertmesh.weights.source import remember


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """`state` is what the caller had given to `save_checkpoint` after step `step`."""

    directory: Path
    step: int
    state: dict[str, Any]


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
    """Write `directory/step-XXXXXXXX`: model, optimizer, torch's generators, and `state` (JSON: counters and the like).

    Every rank calls it with the same arguments, on a file system that all share; returns when the checkpoint is on
    the disk under its name. `keep_last` removes all but so many of the newest there; what interrupted saves have left
    is removed too, so only one job may save into a directory. Without `weights` the model's tensors are left out, for
    who has them in a directory of `save_model` or `save_adapter` beside it. Raises on all ranks alike `InputError`
    (this or a later step exists already, disk full, a `state` that is not JSON) and `IntegrityError` (replicas that
    differ). Issues a few small collectives on the default group, none of them weights.
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

    Every rank calls it, with a model that `load_model` or `parallelize` made and an optimizer over its parameters
    (None: the model alone). Without `weights` the model keeps its own (`load_weights` reads those that lie elsewhere).
    Learning rates and other settings of the optimizer stay the caller's. Raises on all ranks alike, before anything is
    changed: `InputError`, `SecurityError`, `IntegrityError`. Issues a few small collectives on the default group, none
    of them weights.
    """
    with raise_on_all_ranks("looking for the checkpoint"):
        found, _ = locate(Path(path))
    return load_directory(model, optimizer, Path(from_rank_0(str(found))), weights=weights)


def load_directory(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer | None, directory: Path, *, weights: bool = True
) -> LoadedCheckpoint:
    """`load_checkpoint` of the checkpoint `directory`, which all ranks name alike."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with ExitStack() as stack:
        with raise_on_all_ranks("opening the checkpoint"):
            opened = stack.enter_context(open_state(directory, rank=rank, ranks=ranks))
        # From here on every file is known to be one: to open a pipe would be to wait for ever.
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
    """Moments of one kind mean nothing to another; it would start without its own, and say nothing."""
    name = type(optimizer).__name__
    if optimizer is not None and saved not in (None, name):
        raise InputError(
            f"{directory}: holds the state of {saved}, but the optimizer to load into is {name}; use {saved}, or give "
            "None for the optimizer and let it start anew",
            key="checkpoint.other-optimizer",
        )
