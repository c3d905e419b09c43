"""Saves a model, sharded or not, as a plain Hugging Face directory: what goes into it and in which dtype.

write.py does the writing, in which each rank writes only the bytes that it owns.
"""

import functools
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from expertmesh.config.errors import InputError
from expertmesh.distributed.all_ranks import raise_on_all_ranks, sum_over_ranks
from expertmesh.io.directory import check_target
from expertmesh.io.safetensors_writer import lay_out
from expertmesh.state.stage_view import full_model
from expertmesh.weights.companions import Tokenizer, write_companions
from expertmesh.weights.lazy import LazyTensor
from expertmesh.weights.mapping import plan_save
from expertmesh.weights.meta_model import kept_in_fp32, refuse_other_names
from expertmesh.weights.packing import PACKED, Rounded, plan_packing, write_packed
from expertmesh.weights.source import Source, UnmappedTensors, source_of, still_readable, summarize_unmapped
from expertmesh.weights.write import OpenFiles, StateReader, live_values, write_directory

# "auto": the dtypes of the files that the model was loaded from, bfloat16 where these are quantised, and those of its
# parameters if it was made in memory. None: those of its parameters. A name of `PACKED`: codes with scales, the rest as
# in "auto".
SavedDtype = torch.dtype | str | None


@dataclass(frozen=True, slots=True)
class SaveReport:
    """`total_bytes` are those of all weights files, `bytes_written` those of tensors that this rank wrote, `dtype` that
    of most of them.

    `kept` are tensors that the model does not have, copied from the files that it was loaded from; `dropped` those
    that could not be, because these files are gone or have changed. `rounded`: what writing codes has added.
    """

    directory: Path
    files: tuple[str, ...]
    tensors: int
    dtype: torch.dtype
    total_bytes: int
    bytes_written: int
    seconds: float
    kept: tuple[UnmappedTensors, ...]
    dropped: tuple[UnmappedTensors, ...]
    rounded: tuple[Rounded, ...] = ()


def dtype_of(dtype: SavedDtype) -> torch.dtype | None:
    """The one that all tensors are cast to; None where they are not. Raises `InputError` for a name that is none."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype in (None, "auto", *PACKED):
        return None
    found = getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype):
        raise InputError(
            f"dtype {dtype!r}: is none to save in; give auto, bfloat16, float16, float32 or one of {', '.join(PACKED)}",
            key="config.wrong-value",
        )
    return found


def save_model(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    dtype: SavedDtype = "auto",
    max_shard_bytes: int = 5_000_000_000,
) -> SaveReport:
    """Write weights, index, config, generation config and tokenizer to `directory`.

    Every rank calls it, with the same arguments; all must see the same file system; `directory` must not exist or be
    empty. The layout on disk is the one that the weights were read from, or else the family's published one; what those
    files held beside the model (MTP layers) is copied from them. The other files are the base's own, with what has
    changed in them, where the model and the tokenizer have one. `dtype` casts floating-point tensors on the way
    (except what the family keeps in fp32); "auto" gives each the dtype that it had in the files it was loaded from,
    bfloat16 where these are quantised, or its own if there were none; None leaves all as trained. "as_loaded" writes
    quantised files as they were: blocks that have not changed byte for byte, the others rounded anew; "fp8", "int4",
    "mxfp4" and "nvfp4" quantise. Files hold at most `max_shard_bytes` of tensors, or one larger tensor. Raises on all
    ranks alike: `InputError` (target not empty, disk full, no shared file system, names that are not those of the
    model's class, so that `from_pretrained` would make weights up), `IntegrityError` (values that `dtype` cannot hold).
    Issues a few small collectives on the default group; weights travel only where a conversion computes across shards
    or codes are written, one tensor at a time.
    """
    return save_values(model, directory, live_values, tokenizer=tokenizer, dtype=dtype, max_shard_bytes=max_shard_bytes)


@torch.no_grad()
def save_values(
    model: PreTrainedModel,
    directory: str | Path,
    values: StateReader,
    *,
    tokenizer: Tokenizer | None,
    dtype: SavedDtype,
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
        packing = plan_packing(model, lazies, dtype)
        unmapped = [tensor for tensor in source_of(model).unmapped if tensor.name not in lazies]
    lost = [not still_readable([*unmapped, *packing.sources])]
    readable = not sum_over_ranks(torch.tensor(lost, dtype=torch.int64)).any()
    copied = [*unmapped, *packing.copied] if readable else []
    plain = {name: lazy for name, lazy in lazies.items() if name not in packing.packed}
    with raise_on_all_ranks("planning what to save"):
        copies = {tensor.name: LazyTensor.of(tensor) for tensor in copied}
        specs = saved_specs(model, {**plain, **copies}, "auto" if packing.packed else dtype)
    main_dtype = _main_dtype({name: specs[name] for name in plain})
    specs |= {part.name: (part.dtype, part.shape) for part in packing.parts}
    whole_model: Any = full_model(model)
    rounded: tuple[Rounded, ...] = ()

    def write_rest(files: OpenFiles) -> None:
        nonlocal rounded
        if packing.packed:
            rounded = write_packed(packing, files, values, from_source=readable and bool(packing.sources))

    layout, written = write_directory(
        directory,
        plain,
        lambda temporary: lay_out(temporary, specs, max_shard_bytes, whole_model.num_parameters()),
        lambda temporary, layout: write_companions(model, temporary, layout, tokenizer, main_dtype, packing.settings),
        values,
        copied,
        write_rest,
    )
    return SaveReport(
        directory=directory,
        files=tuple(file.path.name for file in layout.files),
        tensors=len(specs),
        dtype=main_dtype,
        total_bytes=layout.size,
        bytes_written=written,
        seconds=time.monotonic() - started,
        kept=summarize_unmapped(unmapped if readable else (), lazies),
        dropped=() if readable else summarize_unmapped([*unmapped, *packing.copied], lazies),
        rounded=rounded,
    )


def saved_specs(
    model: PreTrainedModel, lazies: Mapping[str, LazyTensor], dtype: SavedDtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of every tensor of the files."""
    source = source_of(model)
    cast = dtype_of(dtype)
    kept = kept_in_fp32(model, cast) if cast is not None else None
    # Codes and scales that the model does not have mean nothing in another dtype.
    fixed = {tensor.name for tensor in source.unmapped} if source.quantisation is not None else set()
    specs = {}
    for name, lazy in lazies.items():
        target = lazy.dtype
        if dtype == "auto" and lazy.is_floating_point():
            target = _source_dtype(lazy, source)
        elif cast is not None and kept is not None and lazy.is_floating_point() and name not in fixed:
            target = torch.float32 if all(kept(leaf.name) for leaf in lazy.leaves()) else cast
        specs[name] = (target, tuple(lazy.shape))
    return specs


def _source_dtype(lazy: LazyTensor, source: Source) -> torch.dtype:
    """The one in which the model's tensors behind a tensor of the files were loaded, or are where they were not."""
    dtypes = [source.dtypes.get(leaf.name, leaf.dtype) for leaf in lazy.leaves()]
    return functools.reduce(torch.promote_types, [dtype for dtype in dtypes if dtype.is_floating_point])


def _main_dtype(specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> torch.dtype:
    """That of most floating-point elements."""
    elements: Counter[torch.dtype] = Counter()
    for dtype, shape in specs.values():
        elements[dtype] += math.prod(shape) if dtype.is_floating_point else 0
    return elements.most_common(1)[0][0]
