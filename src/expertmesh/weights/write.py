"""Write lazy tensors as the safetensors files of a new directory. Each rank writes only the bytes that it owns.

The directory appears complete or not at all: everything goes to a temporary directory beside it, is synced to disk, and
one rename publishes it. An error on any rank is raised on all of them, and the temporary directory is removed. No rank
gathers a tensor, except where a family's conversion computes across shards (`Computed` and `Reshaped` in lazy.py):
these tensors are gathered one at a time and written by rank 0.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from expertmesh.config.errors import IntegrityError
from expertmesh.distributed.all_ranks import (
    collective_device,
    from_rank_0,
    raise_on_all_ranks,
    rank_and_ranks,
    sum_over_ranks,
)
from expertmesh.io.boxes import Box, Piece, blocks, full_box, intersect, slices, volume
from expertmesh.io.directory import check_target, io_errors, rename_synced, temporary_directory, wait_until_seen
from expertmesh.io.safetensors_reader import WeightFiles
from expertmesh.io.safetensors_writer import FilesLayout, OpenFiles, create_files
from expertmesh.io.terminal import tracked
from expertmesh.state.shards import full_tensors, held_boxes, local_values, owns_copy
from expertmesh.weights.lazy import LazyTensor, read_values
from expertmesh.weights.mapping import StateTensor

_BLOCK_ELEMENTS, _COPIED_ELEMENTS = 1 << 20, 1 << 24

# Returns the values of a box of one of the model's tensors. The box lies inside this rank's shard of it.
StateReader = Callable[[StateTensor, Box], Tensor]


def write_directory(
    directory: Path,
    lazies: Mapping[str, LazyTensor],
    layout: FilesLayout,
    write_small_files: Callable[[Path], None],
    values: StateReader,
    copied: Mapping[str, LazyTensor] | None = None,
    write_codes: Callable[[OpenFiles], None] | None = None,
) -> int:
    """Write tensors, and the files of `write_small_files`, into a directory that appears when it is complete.

    Args:
        layout: The files in `directory`.
        write_small_files: Called on rank 0 only, after the weights, with the temporary directory.
        copied: Further tensors of the layout, by name: file tensors to copy, or codes to write as their values.
        write_codes: Called on every rank; writes the remaining tensors of the layout.

    Returns:
        The bytes that this rank wrote.

    Raises:
        InputError, IntegrityError: As `save_model` does.

    Collectives: every rank calls it; those of `save_model`.
    """
    check_ownership(lazies)
    # A rename cannot put a directory in the place of a symbolic link, so the link's target is written.
    directory = directory.resolve() if directory.is_symlink() else directory
    stamp = from_rank_0(f"{time.time_ns():x}")  # one name on all ranks
    temporary = directory.with_name(f"{directory.name}.tmp-{stamp}")
    layout, is_first = layout.moved_to(temporary), rank_and_ranks()[0] == 0
    with temporary_directory(temporary, remove=is_first):
        with raise_on_all_ranks("creating the files"):
            if is_first:
                create_files(layout, temporary)
        with raise_on_all_ranks("looking for the files that rank 0 created"):
            for file in layout.files:
                wait_until_seen(file.path, file.size)
        files = OpenFiles(layout)
        with raise_on_all_ranks("writing weights"), files.synced():
            for name, lazy in tracked(lazies.items(), len(lazies), "writing weights", "tensors"):
                for box, part in owned_values(lazy, values, _BLOCK_ELEMENTS) if not is_computed(lazy) else ():
                    files.write(name, box, part)
            _copy_own(copied or {}, files)
        _write_gathered(lazies, files, values)
        if write_codes is not None:
            write_codes(files)
        with raise_on_all_ranks("writing config and tokenizer"):
            if is_first:
                write_small_files(temporary)
        with raise_on_all_ranks("publishing the directory"):
            if is_first:
                check_target(directory)  # another job may have written there meanwhile
                with io_errors(directory, layout.size):
                    rename_synced(temporary, directory)  # an empty directory of that name is replaced
    return files.written


def check_ownership(lazies: Mapping[str, LazyTensor]) -> None:
    """Check that all ranks together own each element exactly once; else the files would have holes, or races.

    Raises:
        IntegrityError: The ranks own more or fewer elements than a tensor has.

    Collectives: every rank calls it. One all-reduce of one integer per file tensor on the default group.
    """
    # One all-reduce for all tensors: one for each would cost a round trip per expert of every layer.
    owned = [sum(volume(piece.dest) for piece in _owned_pieces(lazy)) for lazy in lazies.values()]
    counts = sum_over_ranks(torch.tensor(owned, dtype=torch.int64))
    for (name, lazy), count in zip(lazies.items(), counts.tolist(), strict=True):
        if not is_computed(lazy) and count != lazy.numel():
            raise not_as_declared(name, f"all ranks together own {count} of its {lazy.numel()} elements")


def not_as_declared(name: str, why: str) -> IntegrityError:
    """Return the error for a tensor of which the ranks do not hold the parts that its DTensor declares."""
    return IntegrityError(
        f"cannot save {name}: {why}; the model is not sharded over all ranks as its DTensors say",
        key="model.not-sharded-as-declared",
    )


def _owned_pieces(lazy: LazyTensor) -> Iterator[Piece]:
    """Yield the parts of a file tensor that this rank holds and has to write."""
    for piece in lazy.pieces:
        if isinstance(piece.leaf, StateTensor) and owns_copy(piece.leaf.tensor):
            for held in held_boxes(piece.leaf.tensor):
                if (part := intersect(piece.source, held)) is not None:
                    yield piece.crop_source(part)


def is_computed(lazy: LazyTensor) -> bool:
    """Return whether the tensor's values are computed from others rather than only moved."""
    return not all(isinstance(piece.leaf, StateTensor) for piece in lazy.pieces)


def owned_values(lazy: LazyTensor, values: StateReader, max_elements: int) -> Iterator[tuple[Box, Tensor]]:
    """Yield box and values of the parts that this rank has to write, of at most `max_elements` each."""
    for piece in _owned_pieces(lazy):
        for box in blocks(piece.dest, max_elements):
            part = piece.crop(box)
            assert isinstance(part.leaf, StateTensor)
            yield box, part.arrange(values(part.leaf, part.source))


def live_values(leaf: StateTensor, box: Box) -> Tensor:
    """Return the values of `box` from the model's own tensor on this rank."""
    return local_values(leaf.tensor, box)


def _copy_own(copied: Mapping[str, LazyTensor], files: OpenFiles) -> None:
    """Copy this rank's share of the tensors that the model does not have; ranks take turns by tensor. No collective."""
    rank, ranks = rank_and_ranks()
    for name, lazy in list(copied.items())[rank::ranks]:
        with WeightFiles(Path(), {}) as sources:
            for part in blocks(full_box(lazy.shape), _COPIED_ELEMENTS):
                files.write(name, part, read_values(lazy, sources.read, part))


def _write_gathered(lazies: Mapping[str, LazyTensor], files: OpenFiles, values: StateReader) -> None:
    """Gather the inputs of each computed tensor, one at a time, and write it on rank 0.

    Collectives: every rank calls it. For each of these tensors, the all-gathers of its sharded inputs and one small
    all-reduce.
    """
    for name, lazy in lazies.items():
        if not is_computed(lazy):
            continue
        # Every rank gathers, although only rank 0 writes: a skipped collective would hang the others.
        gathered = gather(lazy)
        with raise_on_all_ranks(f"writing {name}"), files.synced():
            if rank_and_ranks()[0] == 0:
                files.write(name, full_box(lazy.shape), compute_full(lazy, gathered, values))


def gather(lazy: LazyTensor) -> dict[str, Tensor]:
    """Return the full values of the sharded tensors behind `lazy`, by name, and of those on another pipeline stage.

    Collectives: every rank calls it; those of `full_tensors`.
    """
    return full_tensors({leaf.name: leaf.tensor for leaf in lazy.leaves() if isinstance(leaf, StateTensor)})


def compute_full(lazy: LazyTensor, gathered: Mapping[str, Tensor], values: StateReader) -> Tensor:
    """Return a full tensor that a conversion computes, from the inputs in `gathered`, others from `values`."""

    def fetch(leaf: StateTensor, box: Box, out: Tensor) -> None:
        out.copy_(gathered[leaf.name][slices(box)] if leaf.name in gathered else values(leaf, box))

    return read_values(lazy, fetch)


def assemble(lazy: LazyTensor, values: StateReader, rank: int) -> Tensor | None:
    """Return the full tensor on `rank`, None on the other ranks.

    Collectives: every rank calls it. One reduction of the tensor's bytes to `rank`, or the collectives of `gather`.
    """
    here, several = rank_and_ranks()[0], dist.is_initialized()
    if is_computed(lazy):
        gathered = gather(lazy)
        return compute_full(lazy, gathered, values) if here == rank else None
    size = lazy.numel() * lazy.dtype.itemsize
    stored = torch.zeros(size, dtype=torch.uint8, device=collective_device() if several else "cpu")
    tensor = stored.view(lazy.dtype).view(tuple(lazy.shape))
    for box, part in owned_values(lazy, values, _COPIED_ELEMENTS):
        tensor[slices(box)].copy_(part)
    if several:
        # Each byte is nonzero on at most one rank, so MAX over uint8 copies it exactly; a sum of floats would round,
        # and would lose the sign of a zero.
        dist.reduce(stored, rank, dist.ReduceOp.MAX)
    return tensor if here == rank else None
