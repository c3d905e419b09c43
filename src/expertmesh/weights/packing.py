"""Choose the tensors of a model that are written as codes and scales, and write them.

The format is that of the files that the model was loaded from, or one of `FORMATS`. The tensors are assembled one after
the other: each on one rank, in turns, which encodes and writes it (quantised/encode.py). So a rank holds its shards and
one full tensor.
"""

import re
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
from expertmesh.io.safetensors_reader import FileTensor, WeightFiles
from expertmesh.state.model_view import ModelView, Source
from expertmesh.weights.lazy import LazyTensor
from expertmesh.weights.quantised.encode import Rounding, encode
from expertmesh.weights.quantised.layouts import FORMATS, multiple_of, settings_of, stored_matrix
from expertmesh.weights.quantised.published import published_tensors
from expertmesh.weights.quantised.tensor import QuantisedTensor
from expertmesh.weights.write import OpenFiles, StateReader, assemble, check_ownership

AS_LOADED = "as_loaded"
PACKED = (AS_LOADED, *FORMATS)


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
