"""Saves a model, sharded or not, as a plain Hugging Face directory: what goes into it and in which dtype.

write.py does the writing, in which each rank writes only the bytes that it owns.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from expertmesh.distributed.all_ranks import raise_on_all_ranks, sum_over_ranks
from expertmesh.io.directory import check_target
from expertmesh.io.safetensors_writer import lay_out
from expertmesh.state.stage_view import full_model
from expertmesh.weights.companions import Tokenizer, write_companions
from expertmesh.weights.lazy import LazyTensor
from expertmesh.weights.mapping import plan_save
from expertmesh.weights.meta_model import kept_in_fp32, refuse_other_names
from expertmesh.weights.unmapped import UnmappedTensors, remembered, still_readable, summarize_unmapped
from expertmesh.weights.write import StateReader, live_values, write_directory


@dataclass(frozen=True, slots=True)
class SaveReport:
    """`total_bytes` are those of all weights files, `bytes_written` those of tensors that this rank wrote.

    `kept` are tensors that the model does not have, copied from the files that it was loaded from; `dropped` those
    that could not be, because these files are gone or have changed.
    """

    directory: Path
    files: tuple[str, ...]
    tensors: int
    total_bytes: int
    bytes_written: int
    seconds: float
    kept: tuple[UnmappedTensors, ...]
    dropped: tuple[UnmappedTensors, ...]


def save_model(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> SaveReport:
    """Write weights, index, config, generation config and tokenizer to `directory`.

    Every rank calls it, with the same arguments; all must see the same file system; `directory` must not
    exist or be empty. The layout on disk is the one that the weights were read from, or else the family's
    published one; what those files held beside the model (MTP layers) is copied from them. `dtype` casts
    floating-point tensors on the way (except what the family keeps in fp32); None saves them as trained, or as
    they were. Files hold at most `max_shard_bytes` of tensors, or one larger tensor.
    Raises on all ranks alike: `InputError` (target not empty, disk full, no shared file system, names that are not
    those of the model's class, so that `from_pretrained` would make weights up),
    `IntegrityError` (values that `dtype` cannot hold). Issues a few small collectives on the default group;
    weights travel only where a conversion computes across shards, one tensor at a time.
    """
    return save_values(model, directory, live_values, tokenizer=tokenizer, dtype=dtype, max_shard_bytes=max_shard_bytes)


@torch.no_grad()
def save_values(
    model: PreTrainedModel,
    directory: str | Path,
    values: StateReader,
    *,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> SaveReport:
    """`save_model` with values that `values` supplies, so that a model on meta can be written.

    Inputs of a computed conversion that are sharded still come from the model itself.
    """
    started = time.monotonic()
    directory = Path(directory).absolute()
    with raise_on_all_ranks("planning what to save"):
        check_target(directory)
        refuse_other_names(model)
        lazies = plan_save(model)
        unmapped = [tensor for tensor in remembered(model) if tensor.name not in lazies]
    unreadable = sum_over_ranks(torch.tensor([not still_readable(unmapped)], dtype=torch.int64))
    kept = [] if unreadable.any() else unmapped
    with raise_on_all_ranks("planning what to save"):
        specs = saved_specs(model, {**lazies, **{tensor.name: LazyTensor.of(tensor) for tensor in kept}}, dtype)
    main_dtype = dtype or next(lazy.dtype for lazy in lazies.values() if lazy.is_floating_point())
    whole_model: Any = full_model(model)
    layout, written = write_directory(
        directory,
        lazies,
        lambda temporary: lay_out(temporary, specs, max_shard_bytes, whole_model.num_parameters()),
        lambda temporary, layout: write_companions(model, temporary, layout, tokenizer, main_dtype),
        values,
        kept,
    )
    return SaveReport(
        directory=directory,
        files=tuple(file.path.name for file in layout.files),
        tensors=len(specs),
        total_bytes=layout.size,
        bytes_written=written,
        seconds=time.monotonic() - started,
        kept=summarize_unmapped(kept, lazies),
        dropped=() if kept else summarize_unmapped(unmapped, lazies),
    )


def saved_specs(
    model: PreTrainedModel, lazies: Mapping[str, LazyTensor], dtype: torch.dtype | None
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of every tensor of the files."""
    kept = kept_in_fp32(model, dtype) if dtype is not None else None
    specs = {}
    for name, lazy in lazies.items():
        target = lazy.dtype
        if dtype is not None and kept is not None and lazy.is_floating_point():
            target = torch.float32 if all(kept(leaf.name) for leaf in lazy.leaves()) else dtype
        specs[name] = (target, tuple(lazy.shape))
    return specs
