"""Save a model, sharded or not, as a plain Hugging Face directory. Each rank writes only the bytes that it owns.

A tensor from shard to file, as `save_model` takes it; load.py tells the way in:

1. `plan_save` (mapping.py) runs transformers' rules backwards on tensors without values. Its result says which boxes
   of which model tensors make each tensor of the files, in the layout of the files that were read.
2. `plan_packing` (quantised/encode.py) says which of them are written as codes and scales. `tensors_beside` says which
   unmapped tensors are copied, and whether as values; `still_readable`, whether the old files still hold them.
3. `saved_specs` gives each tensor of the files its dtype and shape, and `lay_out` (io/safetensors_writer.py) its file
   and offset: every rank computes the same layout, so nothing is sent.
4. `write_directory` (write.py) lets rank 0 create the files at full size in a temporary directory. Each rank crops
   the plan to the boxes that it owns, casts them and writes them into their place. A tensor that is computed across
   shards is gathered and written by rank 0; a tensor of codes is assembled on one rank, encoded and written there.
5. Rank 0 writes config, tokenizer and index (sidecars.py), and one rename publishes the directory.
"""

import functools
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.initialization import meta_device_safe_creation_ops

from expertmesh.config.errors import ExpertmeshError, InputError
from expertmesh.distributed.all_ranks import raise_on_all_ranks, sum_over_ranks
from expertmesh.experts.module_list import FusedExperts
from expertmesh.io.directory import check_target
from expertmesh.io.safetensors_reader import FileTensor, WeightFiles, read_header
from expertmesh.io.safetensors_writer import OpenFiles, lay_out
from expertmesh.state.model_view import ModelView, Source
from expertmesh.weights.lazy import LazyTensor, lazy_tensors
from expertmesh.weights.load import UnmappedTensors, summarize_unmapped
from expertmesh.weights.mapping import plan_save
from expertmesh.weights.meta_model import kept_in_fp32
from expertmesh.weights.quantised.encode import AS_LOADED, PACKED, RoundingError, plan_packing, write_packed
from expertmesh.weights.quantised.published import published_tensors
from expertmesh.weights.sidecars import Tokenizer, write_sidecars
from expertmesh.weights.write import StateReader, live_values, write_directory

# Floating-point dtypes that hold a weight without a scale.
_PLAIN: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
SavedDtype = torch.dtype | str | None
"""The dtype to save in.

"auto": the dtypes of the files that the model was loaded from, bfloat16 where these are quantised; the dtypes of its
parameters if it was made in memory. None: the dtypes of its parameters. A name of `PACKED`: codes with scales, other
tensors as in "auto".
"""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The result of saving."""

    directory: Path
    """The directory that was written."""
    files: tuple[str, ...]
    """The names of the weights files."""
    tensors: int
    """The number of tensors in them."""
    dtype: torch.dtype
    """The dtype of most floating-point elements."""
    total_bytes: int
    """Bytes of all weights files."""
    bytes_written: int
    """Bytes of the tensors that this rank wrote."""
    seconds: float
    """Wall-clock time in seconds."""
    kept: tuple[UnmappedTensors, ...]
    """Tensors that the model does not have, copied from the files that it was loaded from; codes as their values,
    except "as_loaded"."""
    dropped: tuple[UnmappedTensors, ...]
    """Tensors that could not be copied, because those files are absent or have changed."""
    rounded: tuple[RoundingError, ...] = ()
    """The rounding error of quantised formats."""
    unread: tuple[str, ...] = ()
    """Sentences about what inference engines cannot read of an adapter."""


def save_model(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    dtype: SavedDtype = "auto",
    max_shard_bytes: int = 5_000_000_000,
) -> SaveReport:
    """Write weights, index, config, generation config and tokenizer to `directory`.

    The layout on disk is the one of the files that the weights were read from, or else the family's published one.
    Tensors of those files that the model does not have (MTP layers) are copied from them; their codes become values
    unless they are saved "as_loaded", because no other config describes them. Where the model and the
    tokenizer have a base, the other files are the base's own, with the changed values.

    Args:
        directory: Must not exist, or be empty. All ranks must see the same file system.
        dtype: The dtype of floating-point tensors (except those that the family keeps in fp32). "auto": the dtype of
            each tensor in the files it was loaded from, bfloat16 where these are quantised, or its current dtype if
            there were no files. None: no cast. "as_loaded": the quantised format of the files; unchanged blocks byte
            for byte, the others rounded again. "fp8", "int4", "mxfp4" and "nvfp4" quantise.
        max_shard_bytes: The most bytes of tensors in one file; a single larger tensor gets a file of its own.

    Raises:
        InputError: On all ranks: target not empty, disk full, no shared file system, adapters, or tensor names that are
            not those of the model's class, so that `from_pretrained` would initialise weights at random.
        IntegrityError: On all ranks: values that `dtype` cannot hold.

    Collectives: every rank calls it, with the same arguments. A few small collectives on the default group. Weights are
    sent only where a conversion computes across shards or codes are written, one tensor at a time.
    """
    view = ModelView(model)
    if view.attached.lora_plan is not None:
        raise InputError(
            f"save_model: this {view.family.__name__} has adapters, which would be lost: its own weights are frozen; "
            "call em.save_adapter, and expertmesh merge to have one model of both",
            key="model.has-adapters",
        )
    return save_values(view, directory, live_values, tokenizer=tokenizer, dtype=dtype, max_shard_bytes=max_shard_bytes)


@torch.no_grad()
def save_values(
    view: ModelView,
    directory: str | Path,
    values: StateReader,
    *,
    tokenizer: Tokenizer | None,
    dtype: SavedDtype,
    max_shard_bytes: int,
) -> SaveReport:
    """Save a model with values from `values`, so that a model on meta can be written; see `save_model`.

    Sharded inputs of a computed conversion still come from the model itself.
    """
    started, directory = time.monotonic(), Path(directory).absolute()
    with raise_on_all_ranks("planning what to save"):
        check_target(directory)
        refuse_other_names(view)
        lazies = plan_save(view)
        beside = tensors_beside(view.attached.source, lazies, dtype)
        packing = plan_packing(view, lazies, dtype, beside)
        unmapped = [tensor for tensor in view.attached.source.unmapped if tensor.name not in lazies]
    # All ranks must decide the same: a file that one rank cannot read would give that rank another layout.
    readable = not sum_over_ranks(torch.tensor([not still_readable([*unmapped, *packing.sources])]).long()).any()
    summary = summarize_unmapped(unmapped if readable else [*unmapped, *packing.copied], lazies)  # kept, or lost
    copies = {**beside, **lazy_tensors({part.name: part for part in packing.copied})} if readable else {}
    plain = {name: lazy for name, lazy in lazies.items() if name not in packing.packed}
    with raise_on_all_ranks("planning what to save"):
        specs = saved_specs(view, {**plain, **copies}, "auto" if dtype in PACKED else dtype)
    elements: Counter[torch.dtype] = Counter()
    for cast, shape in (specs[name] for name in plain):
        elements[cast] += math.prod(shape) if cast.is_floating_point else 0
    main_dtype = elements.most_common(1)[0][0]
    specs |= {part.name: (part.dtype, part.shape) for part in packing.parts}
    rounded: list[RoundingError] = []

    def write_codes(files: OpenFiles) -> None:
        rounded.extend(write_packed(packing, files, values, from_source=readable and bool(packing.sources)))

    layout = lay_out(directory, specs, max_shard_bytes, view.full.num_parameters())
    written = write_directory(
        directory,
        plain,
        layout,
        lambda temporary: write_sidecars(view, temporary, layout, tokenizer, main_dtype, packing.settings),
        values,
        copies,
        write_codes if packing.packed else None,
    )
    return SaveReport(
        directory=directory,
        files=tuple(file.path.name for file in layout.files),
        tensors=len(specs),
        dtype=main_dtype,
        total_bytes=layout.size,
        bytes_written=written,
        seconds=time.monotonic() - started,
        kept=summary if readable else (),
        dropped=() if readable else summary,
        rounded=tuple(rounded),
    )


def refuse_other_names(view: ModelView) -> None:
    """Raise `InputError` if the model's tensors have other names than its class gives them.

    In the saved files such tensors would be unexpected, and `from_pretrained` would initialise the missing ones at
    random, with at most a warning.
    """
    kind = view.family
    if not issubclass(kind, PreTrainedModel):
        raise InputError(
            f"save_model takes a model of transformers, not a {kind.__name__}; a PeftModel is saved by its own "
            "save_pretrained, and em.save_adapter saves the adapters of a parallelized one",
            key="model.names-differ-from-class",
        )
    with torch.device("meta"), meta_device_safe_creation_ops():
        new: PreTrainedModel = kind(deepcopy(view.module.config))
    # Experts that were a list are fused in memory under other names; loading has already compared them.
    fused = [f"{name}." for name, module in view.full.named_modules() if isinstance(module, FusedExperts)]
    here, there = (
        {name for name in names if not any(name.startswith(prefix) for prefix in fused)}
        for names in (view.tensors, new.state_dict(keep_vars=True))
    )
    if here != there:
        lacking, more = sorted(there - here)[:1], sorted(here - there)[:1]
        found = [f"lacks {name}" for name in lacking] + [f"has {name}" for name in more]
        raise InputError(
            f"save_model: this {kind.__name__} {' and '.join(found)}, unlike its class with its config, so that "
            "from_pretrained would make weights up; take out what was put around its modules",
            key="model.names-differ-from-class",
        )


def tensors_beside(source: Source, saved: Collection[str], dtype: SavedDtype) -> dict[str, LazyTensor]:
    """Return the unmapped tensors by the names that they are written under, without those in `saved`.

    Codes and scales stay as they are only "as_loaded": the config of any other format, or of none, would let an engine
    read codes as values.
    """
    files = WeightFiles(Path(), {tensor.name: tensor for tensor in source.unmapped})
    settings = None if dtype == AS_LOADED else source.quantisation
    tensors = published_tensors(settings, files).tensors
    return {name: lazy for name, lazy in tensors.items() if name not in saved}


def still_readable(tensors: Sequence[FileTensor]) -> bool:
    """Return whether the files still hold `tensors` where they were when the model was loaded."""
    try:
        headers = {path: read_header(path) for path in {tensor.path for tensor in tensors}}
    except ExpertmeshError:
        return False
    return all(headers[tensor.path].get(tensor.name) == tensor for tensor in tensors)


def saved_specs(
    view: ModelView, lazies: Mapping[str, LazyTensor], dtype: SavedDtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the dtype and shape of every tensor of the files."""
    source, cast = view.attached.source, dtype_of(dtype)
    kept = kept_in_fp32(view.module, cast) if cast is not None else None
    specs = {}
    for name, lazy in lazies.items():
        target = lazy.plain_dtype
        if dtype == "auto" and lazy.is_floating_point() and not lazy.holds_codes:
            # A tensor of the model that was not loaded from files counts with its current dtype.
            dtypes = [source.dtypes.get(leaf.name, leaf.dtype) for leaf in lazy.leaves()]
            target = functools.reduce(torch.promote_types, [each for each in dtypes if each.is_floating_point])
        elif cast is not None and kept is not None and lazy.is_floating_point():
            target = torch.float32 if all(kept(leaf.name) for leaf in lazy.leaves()) else cast
        specs[name] = (target, tuple(lazy.shape))
    return specs


def dtype_of(dtype: SavedDtype) -> torch.dtype | None:
    """Return the dtype that all tensors are cast to, or None if they are not cast to one dtype.

    Raises:
        InputError: The name is not a dtype or a format.
    """
    if dtype in (None, "auto", *PACKED):
        return None
    found = _PLAIN.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise InputError(
            f"dtype {str(dtype)!r}: is none to save in; give one of auto, {', '.join((*_PLAIN, *PACKED))}",
            key="config.wrong-value",
        )
    return found
