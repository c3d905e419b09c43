"""Save a model, sharded or not, as a plain Hugging Face directory.

This file decides which tensors go into it and in which dtype. `write.py` does the writing; there each rank writes only
the bytes that it owns.

Tensors that are written as codes and scales get the format of the files that the model was loaded from, or one of
`FORMATS`. They are assembled one after the other, each on one rank, in turns, which encodes and writes it. So a rank
holds its shards and one full tensor.
"""

import functools
import math
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from expertmesh.anatomy import dense_linears, describe
from expertmesh.config.errors import InputError
from expertmesh.distributed.all_ranks import raise_on_all_ranks, sum_over_ranks
from expertmesh.io.directory import check_target
from expertmesh.io.safetensors_reader import FileTensor, WeightFiles
from expertmesh.io.safetensors_writer import lay_out
from expertmesh.state.model_view import ModelView, Source
from expertmesh.weights.companions import Tokenizer, write_companions
from expertmesh.weights.lazy import LazyTensor
from expertmesh.weights.load import UnmappedTensors, still_readable, summarize_unmapped
from expertmesh.weights.mapping import plan_save
from expertmesh.weights.meta_model import kept_in_fp32, refuse_other_names
from expertmesh.weights.quantised.encode import FORMATS, Rounding, encode, multiple_of, settings_of, stored_matrix
from expertmesh.weights.quantised.published import published_tensors
from expertmesh.weights.quantised.tensor import QuantisedTensor
from expertmesh.weights.write import OpenFiles, StateReader, assemble, check_ownership, live_values, write_directory

AS_LOADED = "as_loaded"
PACKED = (AS_LOADED, *FORMATS)
# "auto": the dtypes of the files that the model was loaded from, bfloat16 where these are quantised; the dtypes of its
# parameters if it was made in memory. None: the dtypes of its parameters. A name of `PACKED`: codes with scales, other
# tensors as in "auto".
SavedDtype = torch.dtype | str | None


@dataclass(frozen=True, slots=True)
class Rounded:
    """The rounding error that a format adds to the tensors whose names differ only in numbers."""

    pattern: str
    """Their name with `*` for each number."""
    tensors: int
    """The number of these tensors."""
    error: float
    """The norm of all differences divided by the norm of all values."""
    kept: float
    """The fraction of blocks that were written with the codes that had been read."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor of values and the parts that it is written as."""

    lazy: LazyTensor
    """The values, with the dims in the order of the codes."""
    leaf: QuantisedTensor
    """The codes, scales and further parts."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The tensors to be written as codes."""

    packed: Mapping[str, Packed] = field(default_factory=dict)
    """The tensors by the names of their values."""
    settings: Mapping[str, Any] | None = None
    """The `quantization_config` to write."""
    sources: tuple[FileTensor, ...] = ()
    """The codes and scales in the files that the model was loaded from, if those hold the same format."""
    copied: tuple[FileTensor, ...] = ()
    """The tensors of `sources` that are copied without decoding."""

    @property
    def parts(self) -> list[FileTensor]:
        """The file tensors that are written for the packed tensors."""
        return [part for packed in self.packed.values() for part in packed.leaf.parts]


def plan_packing(view: ModelView, lazies: Mapping[str, LazyTensor], form: object) -> Packing:
    """Plan the tensors of `lazies`, which saving `model` writes, that are written as codes.

    Args:
        form: One of `PACKED`; anything else packs no tensor.

    Raises:
        InputError: A tensor cannot be written in this format.
    """
    if form == AS_LOADED:
        return _as_loaded(view.attached.source, lazies)
    return _in_format(view.module, lazies, str(form)) if form in FORMATS else Packing()


def _as_loaded(source: Source, lazies: Mapping[str, LazyTensor]) -> Packing:
    if source.quantisation is None:
        raise InputError(
            "as_loaded: the model was not loaded from quantised files; give auto",
            key="weights.not-quantised",
        )
    files = WeightFiles(Path(), {tensor.name: tensor for tensor in source.packed})
    published = published_tensors(source.quantisation, files)
    packed: dict[str, Packed] = {}
    used: set[str] = set()
    for name in published.quantised:
        (piece,) = published.tensors[name].pieces
        if name not in lazies:
            raise InputError(
                f"as_loaded: {name} of the files is not among the tensors that are saved, so that it cannot be written "
                "as it was; give auto",
                key="weights.not-quantised",
            )
        assert isinstance(piece.leaf, QuantisedTensor)
        order = [piece.dims.index(dim) for dim in range(len(piece.dims))]
        packed[name] = Packed(_lazy(lazies[name].permute(order)), piece.leaf)
        used.update(part.name for part in piece.leaf.parts)
    copied = tuple(tensor for tensor in source.packed if tensor.name not in used)
    return Packing(packed, source.quantisation, source.packed, copied)


def _in_format(model: PreTrainedModel, lazies: Mapping[str, LazyTensor], form: str) -> Packing:
    """Plan a format of `FORMATS`.

    4-bit formats are for routed experts, fp8 for all linear layers of the blocks except routers.
    """
    stacks = form == "mxfp4" and model.config.model_type == "gpt_oss"
    chosen = _chosen(model, experts_only=form != "fp8")
    packed: dict[str, Packed] = {}
    for name, lazy in lazies.items():
        if lazy.dim() < 2 or not all(leaf.name in chosen for leaf in lazy.leaves()):
            continue
        if not stacks and (lazy.dim() > 2 or not name.endswith(".weight")):
            raise InputError(
                f"{form}: {name} holds all experts in one tensor, which transformers reads quantised of GPT-OSS "
                "in mxfp4 alone; give a plain dtype",
                key="weights.format-unsuited",
            )
        oriented = _lazy(lazy.transpose(-1, -2)) if stacks else lazy
        if oriented.shape[-1] % multiple_of(form):
            raise InputError(
                f"{form}: {name} has {oriented.shape[-1]} columns, no multiple of {multiple_of(form)}; give fp8",
                key="weights.format-unsuited",
            )
        packed[name] = Packed(oriented, stored_matrix(form, name, tuple(oriented.shape)))
    plain = [name for name, lazy in lazies.items() if name not in packed and lazy.dim() == 2]
    skipped = sorted(name.removesuffix(".weight") for name in plain if name.endswith(".weight"))
    return Packing(packed, settings_of(form, skipped, stacks=stacks))


def _chosen(model: PreTrainedModel, *, experts_only: bool) -> set[str]:
    """Return the names of the parameters to be quantised."""
    anatomy = describe(model)
    matrices = {
        f"{spec.name}.{name}" for spec in anatomy.experts for name in spec.parameters if not name.endswith("_bias")
    }
    if experts_only:
        return matrices
    return matrices | {f"{name}.weight" for name in dense_linears(model, anatomy)}


def _lazy(tensor: Tensor) -> LazyTensor:
    assert isinstance(tensor, LazyTensor)
    return tensor


def write_packed(packing: Packing, files: OpenFiles, values: StateReader, *, from_source: bool) -> tuple[Rounded, ...]:
    """Encode and write the packed tensors, each on one rank, in turns.

    Args:
        from_source: Write unchanged blocks with the codes and scales of the files that the model was loaded from.

    Returns:
        The rounding error of each group of tensors.

    Collectives: every rank calls it, on the default group. For each tensor, a reduction of its bytes to one rank, or
    the all-gathers of its inputs if it is computed; for each round of as many tensors as ranks, one small all-reduce.
    Before them the all-reduce of `check_ownership`, and after them one small all-reduce.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    items = list(packing.packed.items())
    found: dict[str, Rounding] = {_pattern(name): Rounding() for name, _ in items}
    sources = WeightFiles(Path(), {})
    check_ownership({name: packed.lazy for name, packed in items})
    with files.synced(), sources:
        for first in range(0, len(items), ranks):
            own: list[tuple[str, Packed, Tensor]] = []
            for writer, (name, packed) in enumerate(items[first : first + ranks]):
                # Every rank assembles every tensor, also those that another rank writes: it is a collective.
                whole = assemble(packed.lazy, values, writer)
                if writer == rank:
                    assert whole is not None
                    own.append((name, packed, whole))
            with raise_on_all_ranks("writing quantised weights"):
                for name, packed, whole in own:
                    before = sources.read if from_source else None
                    for part, box, stored in encode(packed.leaf, whole, found[_pattern(name)], before):
                        files.write(part.name, box, stored)
    return _joined(found, [name for name, _ in items])


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _joined(found: Mapping[str, Rounding], names: list[str]) -> tuple[Rounded, ...]:
    """Combine the rounding errors of all ranks. One all-reduce."""
    numbers = torch.tensor(
        [[each.error, each.size, each.kept, each.blocks] for each in found.values()], dtype=torch.float64
    ).reshape(-1, 4)
    tensors = [_pattern(name) for name in names]
    return tuple(
        Rounded(pattern, tensors.count(pattern), (error / size) ** 0.5 if size else 0.0, kept / max(blocks, 1))
        for pattern, (error, size, kept, blocks) in zip(found, sum_over_ranks(numbers).tolist(), strict=True)
    )


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
    """Tensors that the model does not have, copied from the files that it was loaded from."""
    dropped: tuple[UnmappedTensors, ...]
    """Tensors that could not be copied, because those files are absent or have changed."""
    rounded: tuple[Rounded, ...] = ()
    """The rounding error of quantised formats."""
    unread: tuple[str, ...] = ()
    """Sentences about what inference engines cannot read of an adapter."""


def dtype_of(dtype: SavedDtype) -> torch.dtype | None:
    """Return the dtype that all tensors are cast to, or None if they are not cast to one dtype.

    Raises:
        InputError: The name is not a dtype or a format.
    """
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

    The layout on disk is the one of the files that the weights were read from, or else the family's published one.
    Tensors of those files that the model does not have (MTP layers) are copied from them. Where the model and the
    tokenizer have a base, the other files are the base's own, with the changed values.

    Args:
        directory: Must not exist, or be empty. All ranks must see the same file system.
        dtype: The dtype of floating-point tensors (except those that the family keeps in fp32). "auto": the dtype of
            each tensor in the files it was loaded from, bfloat16 where these are quantised, or its current dtype if
            there were no files. None: no cast. "as_loaded": the quantised format of the files; unchanged blocks byte
            for byte, the others rounded again. "fp8", "int4", "mxfp4" and "nvfp4" quantise.
        max_shard_bytes: The most bytes of tensors in one file; a single larger tensor gets a file of its own.

    Raises:
        InputError: On all ranks: target not empty, disk full, no shared file system, or tensor names that are not those
            of the model's class, so that `from_pretrained` would initialise weights at random.
        IntegrityError: On all ranks: values that `dtype` cannot hold.

    Collectives: every rank calls it, with the same arguments. A few small collectives on the default group. Weights are
    sent only where a conversion computes across shards or codes are written, one tensor at a time.
    """
    view = ModelView(model)
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
    started = time.monotonic()
    directory = Path(directory).absolute()
    with raise_on_all_ranks("planning what to save"):
        check_target(directory)
        refuse_other_names(view)
        lazies = plan_save(view)
        packing = plan_packing(view, lazies, dtype)
        unmapped = [tensor for tensor in view.attached.source.unmapped if tensor.name not in lazies]
    # All ranks must decide the same: a file that one rank cannot read would give that rank another layout.
    lost = [not still_readable([*unmapped, *packing.sources])]
    readable = not sum_over_ranks(torch.tensor(lost, dtype=torch.int64)).any()
    copied = [*unmapped, *packing.copied] if readable else []
    plain = {name: lazy for name, lazy in lazies.items() if name not in packing.packed}
    with raise_on_all_ranks("planning what to save"):
        copies = {tensor.name: LazyTensor.of(tensor) for tensor in copied}
        specs = saved_specs(view, {**plain, **copies}, "auto" if packing.packed else dtype)
    main_dtype = _main_dtype({name: specs[name] for name in plain})
    specs |= {part.name: (part.dtype, part.shape) for part in packing.parts}
    rounded: tuple[Rounded, ...] = ()

    def write_rest(files: OpenFiles) -> None:
        nonlocal rounded
        if packing.packed:
            rounded = write_packed(packing, files, values, from_source=readable and bool(packing.sources))

    layout, written = write_directory(
        directory,
        plain,
        lambda temporary: lay_out(temporary, specs, max_shard_bytes, view.full.num_parameters()),
        lambda temporary, layout: write_companions(view, temporary, layout, tokenizer, main_dtype, packing.settings),
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
    view: ModelView, lazies: Mapping[str, LazyTensor], dtype: SavedDtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the dtype and shape of every tensor of the files."""
    source = view.attached.source
    cast = dtype_of(dtype)
    kept = kept_in_fp32(view.module, cast) if cast is not None else None
    # Unmapped tensors of quantised files are codes and scales; a cast would destroy their meaning.
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
    """Return the dtype to write a file tensor in: that in which the model tensors behind it were loaded.

    A model tensor that was not loaded from files counts with its current dtype.
    """
    dtypes = [source.dtypes.get(leaf.name, leaf.dtype) for leaf in lazy.leaves()]
    return functools.reduce(torch.promote_types, [dtype for dtype in dtypes if dtype.is_floating_point])


def _main_dtype(specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> torch.dtype:
    """Return the dtype of most floating-point elements."""
    elements: Counter[torch.dtype] = Counter()
    for dtype, shape in specs.values():
        elements[dtype] += math.prod(shape) if dtype.is_floating_point else 0
    return elements.most_common(1)[0][0]
