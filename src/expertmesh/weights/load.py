"""Fill an already sharded model from a Hugging Face directory, or with first values. A rank reads only its shards.

A tensor from file to shard, as `fill` takes it; save.py tells the way back:

1. `open_weights` reads and checks the headers of the files (io/safetensors_reader.py). With a seed there are no files,
   and first_values.py draws what they would hold.
2. `plan_load` (mapping.py) runs transformers' own rules on tensors without values (lazy.py). Its result says which
   boxes of which file tensors make each tensor of the model; codes with their scales count as one tensor of values
   (quantised/). Everything that does not fit is refused here, before a weight is read.
3. `materialize` (meta_model.py) allocates the shards of this rank. Each parameter is a DTensor on meta until then:
   `shard_model` (parallel/apply.py) has split it.
4. `held_parts` (state/shards.py) says which boxes of a tensor this rank holds, and gives the memory of each.
5. `read_box` (lazy.py) crops the plan to each box, reads exactly those bytes and casts them into the shard. Tensors go
   in the order of the files, while the system already reads the next ones: so the ranks of a node read the same part
   of a file at about the same time. Beside the shards a rank holds at most one block of one tensor in host memory,
   except where a conversion computes, tied copies are compared, or values are drawn.
6. A value that is not finite, and two different copies of a tied tensor, are errors.
7. The model remembers its files (`Source`), so that saving restores their layout and dtypes. That includes unmapped
   tensors, which the files hold and the model does not, such as next-token-prediction (MTP) layers: transformers
   families declare them unused, they are never trained, and saving copies them.

For example `model.layers.0.mlp.experts.gate_up_proj` `[128, 1536, 2048]` of Qwen3-30B-A3B, on rank 1 of ep 2:

    files   model.layers.0.mlp.experts.0.gate_proj.weight to ...experts.127.up_proj.weight: 256 tensors `[768, 2048]`
    plan    256 pieces: experts.64.gate_proj.weight goes to the box ((64, 65), (0, 768), (0, 2048)),
            experts.64.up_proj.weight to ((64, 65), (768, 1536), (0, 2048))
    shard   box ((64, 128), (0, 1536), (0, 2048)), local tensor `[64, 1536, 2048]`: filled by 128 reads of 3 MiB

Errors are raised on every rank with the same sentence. Weights are never gathered or broadcast, so that no rank can
overwrite the experts of another.
"""

import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform

from expertmesh.compat import set_weight_conversions
from expertmesh.config.errors import IntegrityError
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.io.boxes import Box
from expertmesh.io.safetensors_reader import FileTensor, WeightFiles
from expertmesh.io.terminal import tracked
from expertmesh.state.model_view import ModelView, Source, attach
from expertmesh.state.packed import PackedTensor
from expertmesh.state.shards import held_boxes, held_parts
from expertmesh.weights.first_values import FirstValues, open_weights, refuse_other_draws
from expertmesh.weights.lazy import LazyTensor, bytes_needed, read_box
from expertmesh.weights.mapping import FILE_LEAVES, LoadPlan, new_head, plan_load, plan_save
from expertmesh.weights.meta_model import materialize

# How many elements are checked at once for values that are not finite.
_CHECKED_ELEMENTS = 1 << 22
# How many bytes ahead of the reads the system is advised to read (`posix_fadvise`).
_AHEAD_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class UnmappedTensors:
    """Tensors of the files whose names begin with the same components."""

    pattern: str
    """For example `model.layers.61.*`, or the name of a single tensor."""
    tensors: int
    """The number of tensors."""
    bytes: int
    """Their bytes in the files."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of loading on this rank. Byte counts are of tensor data."""

    tensors: int
    """The number of tensors that were filled."""
    bytes_read: int
    """Bytes that this rank read from the files."""
    local_bytes: int
    """Bytes of this rank's shards, in the model's dtypes."""
    ignored: tuple[str, ...]
    """The file tensors that the model's family declares unused. `save_model` copies them from these files."""
    unmapped: tuple[UnmappedTensors, ...]
    """A summary of `ignored`."""
    new: tuple[str, ...] = ()
    """Tensors of a classifier's `new_head` that the files lack; they are as in memory."""


def fill(
    model: PreTrainedModel,
    directory: str | Path,
    allocate_on: torch.device | str | None = None,
    seed: int | None = None,
) -> LoadReport:
    """Give each parameter and persistent buffer of `model` its value from the safetensors files of `directory`.

    Tied tensors are read once. The model remembers the layout and dtypes of the files and the unmapped tensors, so that
    saving restores them.

    Args:
        model: Plain or parallelised (FSDP2, expert-parallel DTensors). Its local shards must be allocated, unless
            `allocate_on` is given.
        allocate_on: The device to allocate the local shards on, after the files' headers were found to fit the model.
        seed: Draw the values from it instead, as the model's class initialises them; then there are no files, and
            saving writes the family's published layout in the parameters' dtypes.

    Raises:
        InputError, SecurityError, IntegrityError: On all ranks with the same sentence; see `open_weight_files` and
            `plan_load`. `IntegrityError` also for values that are not finite.

    Collectives: every rank calls it. One small all-reduce on the default group; with a seed, those of
    `refuse_other_draws`.
    """
    view = ModelView(model)
    if seed is not None:
        refuse_other_draws(seed)
    with raise_on_all_ranks("loading weights"), open_weights(view, directory, seed) as files:
        plan = plan_load(view, files)
        if allocate_on is not None:
            materialize(model, allocate_on)
        # A new view: allocating has replaced the parameters. It also marks the new ones with their experts.
        report = fill_planned(ModelView(model), files, plan)
    return replace(report, new=tuple(name for name in new_head(view) if name not in plan.tensors))


def read_whole(model: PreTrainedModel, directory: str | Path) -> None:
    """Fill an unsharded model on meta in a single process, on the CPU. No communication."""
    view = ModelView(model)
    with open_weights(view, directory) as files:
        plan = plan_load(view, files)
        materialize(model, "cpu")
        fill_planned(ModelView(model), files, plan)


def bytes_to_read(model: PreTrainedModel, directory: str | Path) -> int:
    """Return the bytes of tensor data that `fill` will read on this rank; it reads only headers.

    Args:
        model: May be on meta.

    Raises:
        InputError, SecurityError, IntegrityError: As `fill` does before it reads a weight.

    Collectives: none, so call it on every rank or inside `raise_on_all_ranks`.
    """
    view = ModelView(model)
    with open_weights(view, directory) as files:
        plan = plan_load(view, files)
    sources = [*plan.tensors.items(), *plan.copies]
    return sum(bytes_needed(lazy, box) for name, lazy in sources for box in held_boxes(view.tensors[name]))


@torch.no_grad()
def fill_planned(view: ModelView, files: WeightFiles | FirstValues, plan: LoadPlan) -> LoadReport:
    """Execute `plan` on this rank. Raises `IntegrityError`; issues no collective."""
    shards = {name: held_parts(view.tensors[name]) for name in plan.tensors}
    boxes = {name: [box for box, _ in parts] for name, parts in shards.items()}
    announced = _announced(files, plan, boxes)
    for name, lazy in tracked(announced, len(plan.tensors), "loading weights", "tensors"):
        for box, local in shards[name]:
            assert not local.is_meta, f"{name} is still on meta; allocate the model's shards before filling them"
            read_box(lazy, box, local, files.read)
            refuse_non_finite(name, lazy, box, local)
    # Tied tensors are filled from one of their copies; another value in the others would be lost when saving.
    for name, lazy in plan.copies:
        for box, local in shards[name]:
            copy = torch.empty_like(local)
            read_box(lazy, box, copy, files.read)
            if not torch.equal(copy, local):
                raise differing_copies(lazy, plan.tensors[name])
    unmapped = [tensor for name in plan.ignored if isinstance(tensor := files.tensors[name], FileTensor)]
    report = LoadReport(
        tensors=len(plan.tensors),
        bytes_read=files.bytes_read,
        local_bytes=sum(local.nbytes for parts in shards.values() for _, local in parts),
        ignored=plan.ignored,
        unmapped=summarize_unmapped(unmapped, files.tensors.keys() - set(plan.ignored)),
    )
    if isinstance(files, WeightFiles):
        remember_files(view, plan, files)
    return report


def _announced(
    files: WeightFiles | FirstValues, plan: LoadPlan, boxes: dict[str, list[Box]]
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the tensors in the order of the files, while the system prefetches the bytes of the next ones."""

    def first_bytes(item: tuple[str, LazyTensor]) -> tuple[str, int]:
        leaves = (leaf for leaf in item[1].leaves() if isinstance(leaf, FILE_LEAVES))
        return min(((leaf.path.name, leaf.offset) for leaf in leaves), default=("", 0))

    items = sorted(plan.tensors.items(), key=first_bytes)
    sizes = [sum(bytes_needed(lazy, box) for box in boxes[name]) for name, lazy in items]
    ahead_bytes, following = 0, 0 if hasattr(os, "posix_fadvise") else len(items)  # macOS has no such call
    for number, item in enumerate(items):
        while following < len(items) and (following <= number or ahead_bytes < _AHEAD_BYTES):
            name, lazy = items[following]
            for piece in (piece for box in boxes[name] for piece in lazy.pieces_in(box)):
                if isinstance(files, WeightFiles) and isinstance(leaf := piece.leaf, FILE_LEAVES):
                    parts = [(leaf, piece.source)] if isinstance(leaf, FileTensor) else leaf.needed(piece.source)
                    for part, needed in parts:
                        files.announce(part, needed)
            ahead_bytes += sizes[following]
            following += 1
        yield item
        ahead_bytes -= sizes[number]


def refuse_non_finite(name: str, lazy: LazyTensor, box: Box, local: Tensor) -> None:
    """Raise `IntegrityError` if `local`, the values of `box` of tensor `name`, holds a value that is not finite."""
    if not local.is_floating_point() or local.numel() == 0:
        return
    if isinstance(local, PackedTensor):
        if (unit := local.not_finite()) is None:
            return
        index = [box[0][0] + unit, *(start for start, _ in box[1:])]
        what = f"{'row' if local.kind.by_rows else 'expert'} {index[0]} of {name}"
        raise not_finite(f"{named_source(lazy, index)}: {what}", "; the checkpoint is damaged")
    if (first := first_not_finite(local)) is not None:
        offsets = torch.unravel_index(torch.tensor(first), local.shape)
        index = [int(offset) + start for offset, (start, _) in zip(offsets, box, strict=True)]
        cause = "the checkpoint is damaged or needs a wider dtype"
        raise not_finite(named_source(lazy, index), f" in {local.dtype} (parameter {name} at {index}); {cause}")


def not_finite(where: str, details: str) -> IntegrityError:
    return IntegrityError(f"{where} holds a value that is not finite{details}", key="weights.not-finite")


def first_not_finite(values: Tensor) -> int | None:
    """Return the place, in row-major order, of the first floating-point value that is not finite, or None."""
    # A sum is finite only if every term is: one pass, one device synchronisation. A sum may also overflow, so a sum
    # that is not finite is checked element by element, in blocks, so that the masks stay small.
    parts = torch.split(values.reshape(-1), _CHECKED_ELEMENTS)
    wide = torch.promote_types(values.dtype, torch.float32)
    if bool(torch.stack([part.sum(dtype=wide) for part in parts]).sum().isfinite()):
        return None
    for number, part in enumerate(parts):
        if not bool(part.isfinite().all()):
            return number * _CHECKED_ELEMENTS + int(part.isfinite().logical_not().nonzero()[0])
    return None


def differing_copies(lazy: LazyTensor, other: LazyTensor) -> IntegrityError:
    """Return the error for files that hold two different versions of one tensor of the model."""
    return IntegrityError(
        f"{named_source(lazy)} differs from {named_source(other)}, but the config ties them; "
        "set tie_word_embeddings to false in config.json if they are meant to differ",
        key="weights.tied-copies-differ",
    )


def named_source(lazy: LazyTensor, index: list[int] | None = None) -> str:
    """Return, as text, the file and the file tensor of element `index` of `lazy`, or of its first element."""
    index = index or [start for start, _ in lazy.pieces[0].dest]
    for piece in lazy.pieces:
        if all(start <= at < stop for at, (start, stop) in zip(index, piece.dest, strict=True)):
            leaf = piece.leaf
            return f"{leaf.path}: tensor {leaf.name}" if isinstance(leaf, FILE_LEAVES) else leaf.name
    raise AssertionError(f"no piece of {lazy!r} holds {index}")


def summarize_unmapped(tensors: Sequence[FileTensor], used: Collection[str]) -> tuple[UnmappedTensors, ...]:
    """Group `tensors` by the shortest prefixes of full name components that no name in `used` shares."""
    taken = {prefix for name in used for prefix in _prefixes(name)}
    groups: dict[str, list[FileTensor]] = {}
    for tensor in tensors:
        free = next((prefix for prefix in _prefixes(tensor.name) if prefix not in taken), tensor.name)
        groups.setdefault(free if free == tensor.name else f"{free}.*", []).append(tensor)
    return tuple(
        UnmappedTensors(pattern, len(group), sum(tensor.nbytes for tensor in group))
        for pattern, group in groups.items()
    )


def _prefixes(name: str) -> list[str]:
    return list(itertools.accumulate(name.split("."), "{}.{}".format))


def remember_files(view: ModelView, plan: LoadPlan, files: WeightFiles) -> None:
    """Remember on the model the layout and dtypes of `files`, from which `plan` fills it."""
    # A new head is not in the files, so that no dtype of the files is recorded for it.
    tied = [names for names in view.ties if names[0] in plan.tensors]
    dtypes = {name: plan.tensors[names[0]].plain_dtype for names in tied for name in names}
    unmapped, published = set(plan.ignored), plan.published
    packed = [part for name in published.quantised for part in published.stored[name] if part not in unmapped]
    # Before `plan_save`, which runs them backwards.
    set_weight_conversions(view.module, list(plan.conversions))
    bare = not any(name.startswith(f"{view.module.base_model_prefix}.") for name in published.tensors)
    # Without the prefix, all names that are saved have to be the files': a rename of the family may take it off, too.
    bare = bare and plan_save(view, bare=True).keys() <= published.tensors.keys()
    copied, codes = (tuple(_with_full_path(files.tensors[name]) for name in names) for names in (plan.ignored, packed))
    attach(view.module, source=Source(dtypes, copied, published.settings, codes, bare))


def _with_full_path(tensor: FileTensor) -> FileTensor:
    """Return `tensor` as it is found from any working directory, so also after a change of it."""
    return tensor if tensor.path.is_absolute() else replace(tensor, path=tensor.path.absolute())


def remember(model: nn.Module, conversions: Iterable[WeightTransform], source: Source) -> None:
    """Attach `source` to the model, and the conversion rules that loading applied, where transformers stores them."""
    set_weight_conversions(model, list(conversions))
    attach(model, source=source)
