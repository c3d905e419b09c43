"""Remember, write and compare a hash of the frozen base to which a model's adapters belong.

An adapter on another base is noise, and causes no error by itself: so resuming or merging it there is refused.

In the hash, the bits of each element are weighted by its place in the full tensor and summed, so that the sums of the
ranks add up in any layout. It distinguishes two sets of weights and does not protect against an adversary.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.config.errors import IntegrityError
from expertmesh.distributed.all_ranks import sum_over_ranks
from expertmesh.io.boxes import Box, blocks, extents, slices
from expertmesh.io.reading import parse_json, read_file
from expertmesh.io.safetensors_reader import open_weight_files
from expertmesh.state.model_view import ModelView, attach, sharded
from expertmesh.state.packed import values_at
from expertmesh.state.shards import held_parts, owns_copy
from expertmesh.weights.mapping import plan_load
from expertmesh.weights.quantised.resident import published_formats

_FROZEN = (None, "float8", "nf4", "mxfp4", "nvfp4")
_HASHED_ELEMENTS = 1 << 22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Base:
    """The frozen weights of a model with adapters."""

    sha256: str
    """`content_hash` of the frozen weights, in the dtypes that they have in training."""
    dtype: str
    """The dtype of most of them."""
    frozen: str | None = None
    """The format to which they were quantised for training; None if they were not."""

    def __str__(self) -> str:
        packed = "" if self.frozen is None else f", packed as {self.frozen}"
        return f"{self.sha256[:12]} in {self.dtype}{packed}"


def remember_base(model: nn.Module) -> None:
    """Hash the frozen weights of a model with adapters, and remember the hash on the model.

    Collectives: every rank calls it; one all-reduce of one integer per tensor on the default group.
    """
    frozen = (p for p in ModelView(model).full.parameters() if not p.requires_grad)
    dtypes = [str(p.dtype).removeprefix("torch.") for p in frozen]
    kinds = {kind.name for kind in (sharded(model).frozen_formats or {}).values() if not kind.published}
    base = Base(content_hash(model), max(set(dtypes), key=dtypes.count), next(iter(kinds), None))
    attach(model, lora_base=base)


def remember_formats(model: Any, directory: Path) -> None:
    """Find out from headers in which formats the files in `directory` hold those weights of `model` that stay packed.

    Remembers the formats on the model, which may be on meta. No communication.

    Raises:
        InputError: Codes of the files cannot stay as they are.
    """
    view = ModelView(model)
    with open_weight_files(directory, view.weights_file) as files:
        attach(model, frozen_formats=published_formats(model, plan_load(view, files, complete=False)))


def base_of(model: nn.Module) -> Base:
    base = sharded(model).lora_base
    assert isinstance(base, Base), "the adapters of this model were never started"
    return base


def base_bytes(model: nn.Module) -> bytes:
    """Return the content of the file that describes the base beside an adapter."""
    said = {key: value for key, value in asdict(base_of(model)).items() if value is not None}
    return json.dumps(said).encode() + b"\n"


def read_base(path: Path, content: bytes | None = None) -> Base:
    """Read the description that `base_bytes` made from `path`, or from its `content`. Raises `IntegrityError`."""
    try:
        base = Base(**parse_json(read_file(path) if content is None else content))
        if not isinstance(base.sha256, str) or not isinstance(base.dtype, str) or base.frozen not in _FROZEN:
            raise TypeError("not text")
    except (TypeError, ValueError) as error:
        raise IntegrityError(
            f"{path}: does not say which base the adapter belongs to ({error})", key="adapter.damaged"
        ) from error
    return base


def check_base(path: Path, saved: Base, here: Base, otherwise: str = "") -> None:
    """Raise `IntegrityError` if the base `here` is not the `saved` one of `path`.

    Args:
        otherwise: The end of the sentence, for another way to continue.
    """
    if saved != here:
        raise IntegrityError(
            f"{path}: the adapter was trained on another base (weights {saved}, here {here}); use the model, the "
            f"precision.compute and the precision.frozen it was trained with{otherwise}",
            key="adapter.other-base",
        )


@torch.no_grad()
def content_hash(model: nn.Module) -> str:
    """Return the hash of all parameters and persistent buffers except adapters.

    Collectives: every rank calls it. One all-reduce of one integer per tensor on the default group.
    """
    tensors = ModelView(model).unique
    sums = []
    for tensor in tensors.values():
        parts = held_parts(tensor) if owns_copy(tensor) else []
        # In int64, which wraps around as the sums over ranks do.
        sums.append(
            torch.tensor([element_sum(local, box, tensor.shape) for box, local in parts], dtype=torch.int64).sum()
        )
    joined = sum_over_ranks(torch.stack(sums))
    return joined_hash(tensors, dict(zip(tensors, joined.tolist(), strict=True)))


def element_sum(values: Tensor, box: Box, shape: torch.Size | tuple[int, ...]) -> int:
    """Return the weighted sum of the elements of `box` of a tensor of `shape`.

    Args:
        values: The elements of `box`, with its extents.

    Returns:
        The sum modulo 2**64, signed. The sums of disjoint boxes add up to the sum of the tensor.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for part in blocks(box, _HASHED_ELEMENTS):
        if any(size == 0 for size in extents(part)):
            continue
        bits = values_at(values, slices(part, box)).contiguous()
        bits = bits.view(_INTEGERS[bits.itemsize]).to(torch.int64)
        place = torch.zeros((), dtype=torch.int64, device=values.device)
        for (start, stop), size in zip(part, shape, strict=True):
            place = place.unsqueeze(-1) * size + torch.arange(start, stop, device=values.device)
        # Odd factors: a changed element always changes the sum.
        total += (bits * (2 * place + 1)).sum()
    return int(total)


def joined_hash(tensors: Mapping[str, Tensor], sums: Mapping[str, int]) -> str:
    """Return one hash of the sums of all tensors and of their names, dtypes and shapes."""
    content = [[name, str(t.dtype), list(t.shape), sums[name] % 2**64] for name, t in sorted(tensors.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
