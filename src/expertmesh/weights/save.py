"""Writes a model, sharded or not, as a plain Hugging Face directory: each rank writes only the bytes it owns.

The directory appears complete or not at all: everything goes to a temporary directory beside it, is synced
to disk, and one rename publishes it. Any error on any rank is raised on all of them, with the temporary
directory removed. No rank gathers a tensor, except where a family's own conversion computes across shards
(`Computed` and `Reshaped` in lazy.py): those tensors are gathered one at a time and written by rank 0.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from expertmesh.config.errors import IntegrityError
from expertmesh.shards import (
    Box,
    blocks,
    full_box,
    intersect,
    local_box,
    local_tensor,
    owns_copy,
    slices,
    volume,
)
from expertmesh.weights.agree import collective_device, together
from expertmesh.weights.directory import (
    Tokenizer,
    check_target,
    create_files,
    io_errors,
    publish,
    temporary_directory,
    wait_until_visible,
    write_companions,
)
from expertmesh.weights.files import FileTensor
from expertmesh.weights.lazy import LazyTensor
from expertmesh.weights.mapping import StateTensor, plan_save
from expertmesh.weights.pieces import Leaf, Piece
from expertmesh.weights.reading import read_box
from expertmesh.weights.skeleton import kept_in_fp32
from expertmesh.weights.writing import Layout, lay_out, write_box

_BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class SaveReport:
    """`total_bytes` are those of all weights files, `bytes_written` those of tensors that this rank wrote."""

    directory: Path
    files: tuple[str, ...]
    tensors: int
    total_bytes: int
    bytes_written: int
    seconds: float


@torch.no_grad()
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
    published one. `dtype` casts floating-point tensors on the way (but for what the family keeps in fp32);
    None saves them as trained. Files hold at most `max_shard_bytes` of tensors, or one larger tensor.
    Raises on all ranks alike: `InputError` (target not empty, disk full, no shared file system),
    `IntegrityError` (values that `dtype` cannot hold). Issues a few small collectives on the default group,
    none of them weights but for the exception above.
    """
    started = time.monotonic()
    directory = Path(directory).absolute()
    with together("planning what to save"):
        check_target(directory)
        lazies = plan_save(model)
        specs = _saved_specs(model, lazies, dtype)
    _check_ownership(lazies)
    temporary = directory.with_name(f"{directory.name}.tmp-{_agreed_token()}")
    layout = lay_out(temporary, specs, max_shard_bytes, model.num_parameters())
    with temporary_directory(temporary, remove=_is_first()):
        with together("creating the files"):
            if _is_first():
                create_files(layout, temporary)
        with together("looking for the files that rank 0 created"):
            wait_until_visible(layout)
        with together("writing weights"):
            written = _write_own(lazies, layout)
        written += _write_gathered(lazies, layout)
        with together("writing config and tokenizer"):
            if _is_first():
                main_dtype = dtype or next(t for t, _ in specs.values() if t.is_floating_point)
                write_companions(model, temporary, layout, tokenizer, main_dtype)
        with together("publishing the directory"):
            if _is_first():
                publish(layout, temporary, directory)
    return SaveReport(
        directory=directory,
        files=tuple(file.path.name for file in layout.files),
        tensors=len(specs),
        total_bytes=layout.size,
        bytes_written=written,
        seconds=time.monotonic() - started,
    )


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


def _write_own(lazies: Mapping[str, LazyTensor], layout: Layout) -> int:
    """Write this rank's parts of all tensors that only move values; bytes written. No collective."""
    tensors = layout.tensors
    written = 0
    with _descriptors(layout) as descriptor_of:
        for name, lazy in lazies.items():
            if _is_gathered(lazy):
                continue
            for piece in _owned(lazy):
                for part in blocks(piece.dest, _BLOCK_ELEMENTS):
                    written += _write_piece(piece.crop(part), tensors[name], descriptor_of(tensors[name].path))
    return written


def _write_piece(piece: Piece, target: FileTensor, descriptor: int) -> int:
    assert isinstance(piece.leaf, StateTensor)
    tensor = piece.leaf.tensor
    values = piece.arrange(local_tensor(tensor)[slices(piece.source, local_box(tensor))])
    return write_box(descriptor, target, piece.dest, _cast(values, target))


def _cast(values: Tensor, target: FileTensor) -> Tensor:
    """In the dtype of the file, contiguous, on the CPU; `IntegrityError` where that dtype has no such values."""
    cast = values.to(target.dtype)
    if cast.dtype != values.dtype and not torch.equal(cast.isfinite(), values.isfinite()):
        raise IntegrityError(
            f"{target.name}: has values that {target.dtype} cannot hold; save it in bfloat16 or float32"
        )
    return cast.cpu().contiguous()


def _write_gathered(lazies: Mapping[str, LazyTensor], layout: Layout) -> int:
    """Gather the inputs of each computed tensor, one at a time, and write it on rank 0; bytes written.

    Issues, for each of these tensors, the all-gathers of its inputs and one small all-reduce.
    """
    tensors = layout.tensors
    written = 0
    for name, lazy in lazies.items():
        if not _is_gathered(lazy):
            continue
        whole = {leaf.name: _gather(leaf) for leaf in lazy.leaves()}

        def fetch(leaf: Leaf, box: Box, out: Tensor, whole: dict[str, Tensor] = whole) -> None:
            out.copy_(whole[leaf.name][slices(box)])

        with together(f"writing {name}"), _descriptors(layout) as descriptor_of:
            if _is_first():
                target, box = tensors[name], full_box(lazy.shape)
                values = torch.empty(tuple(lazy.shape), dtype=lazy.dtype)
                read_box(lazy, box, values, fetch)
                written += write_box(descriptor_of(target.path), target, box, _cast(values, target))
    return written


def _gather(leaf: Leaf) -> Tensor:
    assert isinstance(leaf, StateTensor)
    return leaf.tensor.full_tensor() if isinstance(leaf.tensor, DTensor) else leaf.tensor


@contextmanager
def _descriptors(layout: Layout) -> Iterator["_Opener"]:
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


def _agreed_token() -> str:
    """A name for the temporary directory, chosen by rank 0. Issues one broadcast of an integer."""
    token = torch.tensor([time.time_ns()], dtype=torch.int64, device=collective_device())
    if dist.is_initialized():
        dist.broadcast(token, src=0)
    return f"{int(token.item()):x}"


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
