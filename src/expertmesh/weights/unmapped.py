"""What the files hold and the model does not, such as next-token-prediction (MTP) layers: named in short, and kept.

transformers families declare such tensors unused. They are never dropped in silence: loading remembers where they
are, and saving copies their bytes from the files they came from, spread over the ranks, a block at a time. They are
never trained. Nothing here communicates.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from expertmesh.config.errors import ExpertmeshError
from expertmesh.io.boxes import blocks, extents, full_box
from expertmesh.io.safetensors_reader import FileTensor, WeightFiles, read_header
from expertmesh.io.safetensors_writer import write_box
from expertmesh.state.sharded_model import attach, sharded

_BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class UnmappedTensors:
    """Tensors of the files whose names begin alike; `pattern` is `model.layers.61.*`, or a name."""

    pattern: str
    tensors: int
    bytes: int


def remember(model: nn.Module, tensors: Sequence[FileTensor]) -> None:
    """Note on the model what its files hold beside it, for `remembered` when it is saved."""
    attach(model, unmapped=tuple(tensors))


def remembered(model: nn.Module) -> tuple[FileTensor, ...]:
    return sharded(model).unmapped


def in_short(left_out: Sequence[FileTensor], used: Collection[str]) -> tuple[UnmappedTensors, ...]:
    """`left_out` by the shortest beginnings of names, in whole components, that no name in `used` shares."""
    taken = {beginning for name in used for beginning in _beginnings(name)}
    groups: dict[str, list[FileTensor]] = {}
    for tensor in left_out:
        free = next((start for start in _beginnings(tensor.name) if start not in taken), tensor.name)
        groups.setdefault(free, []).append(tensor)
    return tuple(
        UnmappedTensors(
            start if tensors[0].name == start else f"{start}.*", len(tensors), sum(t.nbytes for t in tensors)
        )
        for start, tensors in groups.items()
    )


def still_readable(tensors: Sequence[FileTensor]) -> bool:
    """Whether the files still hold `tensors` where they were when the model was loaded."""
    headers: dict[Path, dict[str, FileTensor]] = {}
    try:
        for path in {tensor.path for tensor in tensors}:
            headers[path] = read_header(path)
    except ExpertmeshError:
        return False
    return all(headers[tensor.path].get(tensor.name) == tensor for tensor in tensors)


def copy_tensor(
    source: FileTensor, target: FileTensor, descriptor: int, cast: Callable[[Tensor, FileTensor], Tensor]
) -> int:
    """Write all of `source` to `target`, by blocks that `cast` brings to its dtype; bytes written."""
    written = 0
    with WeightFiles(source.path.parent, {source.name: source}) as files:
        for part in blocks(full_box(source.shape), _BLOCK_ELEMENTS):
            values = torch.empty(extents(part), dtype=source.dtype)
            files.read(source, part, values)
            written += write_box(descriptor, target, part, cast(values, target))
    return written


def _beginnings(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
