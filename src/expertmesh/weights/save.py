"""Writes a model, sharded or not, as a plain Hugging Face directory: each rank writes only the bytes it owns.

The directory appears complete or not at all: everything goes to a temporary directory beside it, is synced
to disk, and one rename publishes it. Any error on any rank is raised on all of them, with the temporary
directory removed. No rank gathers a tensor, except where a family's own conversion computes across shards
(`Computed` and `Reshaped` in lazy.py): those tensors are gathered one at a time and written by rank 0.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from expertmesh.config.errors import IntegrityError
from expertmesh.distributed.all_ranks import collective_device, from_rank_0, raise_on_all_ranks
from expertmesh.io.boxes import Box, blocks, full_box, intersect, slices, volume
from expertmesh.io.directory import (
    check_target,
    create_files,
    io_errors,
    publish,
    temporary_directory,
    wait_until_visible,
)
from expertmesh.io.pieces import Leaf, Piece
from expertmesh.io.safetensors_reader import FileTensor
from expertmesh.io.safetensors_writer import FilesLayout, lay_out, write_box
from expertmesh.state.shards import local_box, local_tensor, owns_copy
from expertmesh.state.stage_view import full_model, placement_of
from expertmesh.weights.companions import Tokenizer, write_companions
from expertmesh.weights.lazy import LazyTensor
from expertmesh.weights.mapping import StateTensor, plan_save
from expertmesh.weights.meta_model import kept_in_fp32
from expertmesh.weights.reading import read_box
from expertmesh.weights.unmapped import UnmappedTensors, copy_tensor, in_short, remembered, still_readable

_BLOCK_ELEMENTS = 1 << 20

# The values of a box of one of the model's tensors, which lies in what this rank holds of it.
Values = Callable[[StateTensor, Box], Tensor]


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
    Raises on all ranks alike: `InputError` (target not empty, disk full, no shared file system),
    `IntegrityError` (values that `dtype` cannot hold). Issues a few small collectives on the default group;
    weights travel only where a conversion computes across shards, one tensor at a time.
    """
    return save_values(model, directory, live_values, tokenizer=tokenizer, dtype=dtype, max_shard_bytes=max_shard_bytes)


@torch.no_grad()
def save_values(
    model: PreTrainedModel,
    directory: str | Path,
    values: Values,
    *,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> SaveReport:
    """`save_model` of values that need not be the model's own: what is sharded is gathered from the model, everything
    else comes from `values`, so that a model on meta can be written.
    """
    started = time.monotonic()
    directory = Path(directory).absolute()
    with raise_on_all_ranks("planning what to save"):
        check_target(directory)
        lazies = plan_save(model)
        left_out = [tensor for tensor in remembered(model) if tensor.name not in lazies]
    kept = left_out if _all_ranks(still_readable(left_out)) else []
    with raise_on_all_ranks("planning what to save"):
        specs = _saved_specs(model, {**lazies, **{tensor.name: LazyTensor.of(tensor) for tensor in kept}}, dtype)
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
        kept=in_short(kept, lazies),
        dropped=() if kept else in_short(left_out, lazies),
    )


def write_directory(
    directory: Path,
    lazies: Mapping[str, LazyTensor],
    lay_out_in: Callable[[Path], FilesLayout],
    write_others: Callable[[Path, FilesLayout], None],
    values: Values,
    kept: Sequence[FileTensor] = (),
) -> tuple[FilesLayout, int]:
    """Write tensors, and what `write_others` adds on rank 0, into a directory that appears when it is complete.

    Every rank calls it. Returns the layout and the bytes that this rank wrote. `kept` are copied from their files.
    Raises and communicates as `save_model` does.
    """
    _check_ownership(lazies)
    temporary = directory.with_name(f"{directory.name}.tmp-{from_rank_0(f'{time.time_ns():x}')}")
    layout = lay_out_in(temporary)
    with temporary_directory(temporary, remove=_is_first()):
        with raise_on_all_ranks("creating the files"):
            if _is_first():
                create_files(layout, temporary)
        with raise_on_all_ranks("looking for the files that rank 0 created"):
            wait_until_visible(layout)
        with raise_on_all_ranks("writing weights"):
            written = _write_own(lazies, layout, values) + _copy_own(kept, layout)
        written += _write_gathered(lazies, layout, values)
        with raise_on_all_ranks("writing config and tokenizer"):
            if _is_first():
                write_others(temporary, layout)
        with raise_on_all_ranks("publishing the directory"):
            if _is_first():
                publish(layout, temporary, directory)
    return layout, written


def _saved_specs(
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


def _owned(lazy: LazyTensor) -> Iterator[Piece]:
    """The parts of a tensor of the files that this rank holds and is the one to write."""
    for piece in lazy.pieces:
        if isinstance(piece.leaf, StateTensor) and owns_copy(piece.leaf.tensor):
            held = intersect(piece.source, local_box(piece.leaf.tensor))
            if held is not None:
                yield piece.crop_source(held)


def _is_gathered(lazy: LazyTensor) -> bool:
    """Whether the tensor's values are computed from others rather than moved."""
    return not all(isinstance(piece.leaf, StateTensor) for piece in lazy.pieces)


def _check_ownership(lazies: Mapping[str, LazyTensor]) -> None:
    """All ranks together own each element once; anything else would leave holes in the files, or races.

    Issues one all-reduce of an integer per tensor of the files on the default group.
    """
    owned = [sum(volume(piece.dest) for piece in _owned(lazy)) for lazy in lazies.values()]
    counts = torch.tensor(owned, dtype=torch.int64, device=collective_device())
    if dist.is_initialized():
        dist.all_reduce(counts)
    for (name, lazy), count in zip(lazies.items(), counts.tolist(), strict=True):
        if not _is_gathered(lazy) and count != lazy.numel():
            raise IntegrityError(
                f"cannot save {name}: all ranks together own {count} of its {lazy.numel()} elements; "
                "the model is not sharded over all ranks as its DTensors say"
            )


def _write_own(lazies: Mapping[str, LazyTensor], layout: FilesLayout, values: Values) -> int:
    """Write this rank's parts of all tensors that only move values; bytes written. No collective."""
    tensors = layout.tensors
    written = 0
    with _descriptors(layout) as descriptor_of:
        for name, lazy in lazies.items():
            if _is_gathered(lazy):
                continue
            for piece in _owned(lazy):
                for part in blocks(piece.dest, _BLOCK_ELEMENTS):
                    written += _write_piece(piece.crop(part), tensors[name], descriptor_of(tensors[name].path), values)
    return written


def _copy_own(kept: Sequence[FileTensor], layout: FilesLayout) -> int:
    """Copy this rank's share, by tensors in turn, of what the model does not have; bytes written. No collective."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    tensors = layout.tensors
    with _descriptors(layout) as descriptor_of:
        return sum(
            copy_tensor(source, tensors[source.name], descriptor_of(tensors[source.name].path), _cast)
            for source in kept[rank::ranks]
        )


def _write_piece(piece: Piece, target: FileTensor, descriptor: int, values: Values) -> int:
    assert isinstance(piece.leaf, StateTensor)
    arranged = piece.arrange(values(piece.leaf, piece.source))
    return write_box(descriptor, target, piece.dest, _cast(arranged, target))


def live_values(leaf: StateTensor, box: Box) -> Tensor:
    return local_tensor(leaf.tensor)[slices(box, local_box(leaf.tensor))]


def _cast(values: Tensor, target: FileTensor) -> Tensor:
    """In the dtype of the file, contiguous, on the CPU; `IntegrityError` where that dtype has no such values."""
    cast = values.to(target.dtype)
    if cast.dtype != values.dtype and not torch.equal(cast.isfinite(), values.isfinite()):
        raise IntegrityError(
            f"{target.name}: has values that {target.dtype} cannot hold; save it in bfloat16 or float32"
        )
    return cast.cpu().contiguous()


def _write_gathered(lazies: Mapping[str, LazyTensor], layout: FilesLayout, values: Values) -> int:
    """Gather the inputs of each computed tensor, one at a time, and write it on rank 0; bytes written.

    Issues, for each of these tensors, the all-gathers of its sharded inputs and one small all-reduce.
    """
    tensors = layout.tensors
    written = 0
    for name, lazy in lazies.items():
        if not _is_gathered(lazy):
            continue
        gathered = _gather(lazy)

        def fetch(leaf: Leaf, box: Box, out: Tensor, gathered: dict[str, Tensor] = gathered) -> None:
            assert isinstance(leaf, StateTensor)
            out.copy_(gathered[leaf.name][slices(box)] if leaf.name in gathered else values(leaf, box))

        with raise_on_all_ranks(f"writing {name}"), _descriptors(layout) as descriptor_of:
            if _is_first():
                target, box = tensors[name], full_box(lazy.shape)
                computed = torch.empty(tuple(lazy.shape), dtype=lazy.dtype)
                read_box(lazy, box, computed, fetch)
                written += write_box(descriptor_of(target.path), target, box, _cast(computed, target))
    return written


def _gather(lazy: LazyTensor) -> dict[str, Tensor]:
    """The sharded tensors behind `lazy`, whole, by name; and those that only another pipeline stage has."""
    leaves = [leaf for leaf in lazy.leaves() if isinstance(leaf, StateTensor)]
    gathered = {leaf.name: leaf.tensor.full_tensor() for leaf in leaves if isinstance(leaf.tensor, DTensor)}
    for leaf in leaves:
        if placement_of(leaf.tensor) is not None:
            gathered[leaf.name] = _from_its_stage(leaf.tensor, gathered.get(leaf.name, leaf.tensor))
    return gathered


def _from_its_stage(tensor: Tensor, full: Tensor) -> Tensor:
    """`full` of the rank that answers for `tensor`, on all ranks. One all-reduce and one broadcast."""
    place, rank = placement_of(tensor), dist.get_rank()
    answers = place is not None and not place.on_other_stage and not place.is_tied_replica and place.is_first_rank
    source = torch.tensor([rank if answers else dist.get_world_size()], device=collective_device())
    dist.all_reduce(source, op=dist.ReduceOp.MIN)
    device = collective_device()
    values = full.detach().to(device) if answers else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    dist.broadcast(values, src=int(source.item()))
    return values


@contextmanager
def _descriptors(layout: FilesLayout) -> Iterator["_Opener"]:
    """Files of the layout, opened for writing when first asked for, synced and closed at the end."""
    opener = _Opener({})
    with io_errors(layout.files[0].path.parent, layout.size):
        try:
            yield opener
            for descriptor in opener.opened.values():
                os.fsync(descriptor)
        finally:
            for descriptor in opener.opened.values():
                os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Opener:
    opened: dict[Path, int]

    def __call__(self, path: Path) -> int:
        if path not in self.opened:
            self.opened[path] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        return self.opened[path]


def _all_ranks(holds: bool) -> bool:
    """Whether it holds on every rank. Issues one all-reduce of an integer on the default group."""
    held = torch.tensor([int(holds)], device=collective_device())
    if dist.is_initialized():
        dist.all_reduce(held, op=dist.ReduceOp.MIN)
    return bool(held.item())


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
