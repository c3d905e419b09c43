"""The Python interface: `save_checkpoint` and `load_checkpoint`, and the small files that go with every checkpoint.

A checkpoint can be exported without the model that training started from: it brings config, tokenizer, code and the
layout of the weights files along. The trainer uses the same files with a `CheckpointWriter` of its own.
"""

import json
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from expertmesh.adapters.base import base_of, check_base, read_base
from expertmesh.adapters.peft_format import BASE_FILE
from expertmesh.adapters.plan import plan_of
from expertmesh.adapters.save import small_files
from expertmesh.checkpoint.directory import clean, locate
from expertmesh.checkpoint.manifest import Manifest
from expertmesh.checkpoint.read import check_fits, open_state, restore
from expertmesh.checkpoint.small_files import STATE_FILE, read_small, read_state_file, state_bytes
from expertmesh.checkpoint.state import model_state
from expertmesh.checkpoint.write import CheckpointWriter, SavedCheckpoint
from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.distributed.all_ranks import from_rank_0, raise_on_all_ranks
from expertmesh.io.safetensors_reader import DTYPES, FileTensor, WeightFiles
from expertmesh.io.safetensors_writer import CODES
from expertmesh.weights.companions import Tokenizer, write_config
from expertmesh.weights.mapping import plan_load, plan_save
from expertmesh.weights.unmapped import remember, remembered

LAYOUT_FILE = "layout.json"
HUGGINGFACE = "huggingface"
# Of a run with adapters: PEFT's config and the hash of the base.
ADAPTER = "adapter"


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
) -> SavedCheckpoint:
    """Write `directory/step-XXXXXXXX`: model, optimizer, torch's generators, and `state` (JSON: counters and the like).

    Every rank calls it with the same arguments, on a file system that all share; returns when the checkpoint is on
    the disk under its name. `keep_last` removes all but so many of the newest there; what interrupted saves have left
    is removed too, so only one job may save into a directory. Raises on all ranks alike `InputError` (this or a later
    step exists already, disk full, a `state` that is not JSON) and `IntegrityError` (replicas that differ). Issues a
    few small collectives on the default group, none of them weights.
    """
    writer = CheckpointWriter(Path(directory), keep_last=keep_last)
    files: dict[str, bytes] = {}
    with raise_on_all_ranks("preparing the checkpoint"):
        if step < 0:
            raise InputError(f"step {step}: must be the number of optimizer steps done, 0 or more")
        if not dist.is_initialized() or dist.get_rank() == 0:
            files = {**companions(model, tokenizer), STATE_FILE: state_bytes(step, state or {}, optimizer)}
            clean(Path(directory))
    saved = writer.save(model, optimizer, step, files)
    writer.close()
    assert saved is not None
    return saved


def load_checkpoint(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer | None, path: str | Path
) -> LoadedCheckpoint:
    """Load the checkpoint `path`, or the newest one of the directory or the run `path`, into any layout.

    Every rank calls it, with a model that `load_model` or `parallelize` made and an optimizer over its parameters
    (None: the model alone). Learning rates and other settings of the optimizer stay the caller's. Raises on all ranks
    alike, before anything is changed: `InputError`, `SecurityError`, `IntegrityError`. Issues a few small collectives
    on the default group, none of them weights.
    """
    with raise_on_all_ranks("looking for the checkpoint"):
        found, _ = locate(Path(path))
    return load_directory(model, optimizer, Path(from_rank_0(str(found))))


def load_directory(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer | None, directory: Path
) -> LoadedCheckpoint:
    """`load_checkpoint` of the checkpoint `directory`, which all ranks name alike."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with ExitStack() as stack:
        with raise_on_all_ranks("opening the checkpoint"):
            opened = stack.enter_context(open_state(directory, rank=rank, ranks=ranks))
            manifest = opened.manifest
            check_fits(opened, model_state(model))
            saved = read_state_file(directory, manifest)
            _check_optimizer(directory, saved.optimizer, optimizer)
            layout = read_layout(model, directory, manifest)
            if plan_of(model) is not None:
                base = directory / ADAPTER / BASE_FILE
                saved_base = read_base(base, read_small(directory, manifest, f"{ADAPTER}/{BASE_FILE}"))
                check_base(base, saved_base, base_of(model))
        restore(model, optimizer, opened)
    layout.give_to(model)
    return LoadedCheckpoint(directory, saved.step, saved.state)


def _check_optimizer(directory: Path, saved: str | None, optimizer: torch.optim.Optimizer | None) -> None:
    """Moments of one kind mean nothing to another; it would start without its own, and say nothing."""
    name = type(optimizer).__name__
    if optimizer is not None and saved not in (None, name):
        raise InputError(
            f"{directory}: holds the state of {saved}, but the optimizer to load into is {name}; use {saved}, or give "
            "None for the optimizer and let it start anew"
        )


def companions(model: PreTrainedModel, tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """The files that stay the same from one checkpoint of a run to the next, by path. No communication."""
    tensors = plan_save(model).items()
    layout = {
        "tensors": {name: {"dtype": CODES[lazy.dtype], "shape": list(lazy.shape)} for name, lazy in tensors},
        "left_out": [_described(tensor) for tensor in remembered(model)],
    }
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    with tempfile.TemporaryDirectory(prefix="expertmesh-") as scratch:
        write_config(model, Path(scratch), tokenizer, dtype)
        paths = [path for path in sorted(Path(scratch).rglob("*")) if path.is_file()]
        files = {f"{HUGGINGFACE}/{path.relative_to(scratch).as_posix()}": path.read_bytes() for path in paths}
    if (plan := plan_of(model)) is not None:
        files |= {f"{ADAPTER}/{name}": content for name, content in small_files(model, plan).items()}
    return {**files, LAYOUT_FILE: json.dumps(layout).encode()}


@dataclass(frozen=True, slots=True)
class SavedLayout:
    """The layout of the weights files that training started from, as a model remembers it for being saved."""

    conversions: tuple[Any, ...]
    left_out: tuple[FileTensor, ...]

    def give_to(self, model: PreTrainedModel) -> None:
        model._weight_conversions = list(self.conversions)  # type: ignore[assignment]
        remember(model, list(self.left_out))


def read_layout(model: PreTrainedModel, directory: Path, manifest: Manifest) -> SavedLayout:
    """What `layout.json` says, for a model of its checkpoint. Raises `IntegrityError`."""
    try:
        layout = json.loads(read_small(directory, manifest, LAYOUT_FILE))
        tensors = {name: _tensor(name, entry, directory / LAYOUT_FILE) for name, entry in layout["tensors"].items()}
        left_out = [_tensor(entry["name"], entry, Path(entry["path"])) for entry in layout["left_out"]]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"{directory / LAYOUT_FILE}: is not a layout of weights files ({error})") from error
    plan = plan_load(model, WeightFiles(directory, tensors))
    return SavedLayout(tuple(plan.conversions), tuple(left_out))


def _described(tensor: FileTensor) -> dict[str, Any]:
    """A tensor of the files that the model does not have: saving copies it from there."""
    shape, path = list(tensor.shape), str(tensor.path.absolute())
    return {"name": tensor.name, "dtype": CODES[tensor.dtype], "shape": shape, "path": path, "offset": tensor.offset}


def _tensor(name: str, entry: Mapping[str, Any], path: Path) -> FileTensor:
    return FileTensor(name, DTYPES[entry["dtype"]], tuple(entry["shape"]), path, entry.get("offset", 0))
