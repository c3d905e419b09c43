"""What makes a merge trustworthy: which base it starts from, and whether what was written is base + adapter.

The base is known by the hash of its weights in the dtypes that training had them in (adapters/base.py). What was
written is compared by another way than it was computed: read through the safetensors library, multiplied in fp64, with
the adapter taken apart as PEFT's own code does it. Holds a block of the base, or one adapter's two matrices, at a time.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from expertmesh.adapters.base import element_sum, joined_hash
from expertmesh.adapters.peft_format import Part, base_copies, keys_in
from expertmesh.adapters.plan import Replaced
from expertmesh.adapters.targets import Target
from expertmesh.config.errors import IntegrityError
from expertmesh.export.deltas import Deltas
from expertmesh.io.boxes import Box, blocks, extents, full_box
from expertmesh.io.safetensors_reader import WeightFiles, open_weight_files
from expertmesh.state.model_view import ModelView
from expertmesh.weights.audit import LibraryFiles
from expertmesh.weights.lazy import LazyTensor, Rounded, read_box
from expertmesh.weights.load import differing_copies, named_source
from expertmesh.weights.mapping import FILE_LEAVES, LoadPlan, plan_load
from expertmesh.weights.quantised.tensor import QuantisedTensor

_BLOCK_ELEMENTS = 1 << 22
_SAMPLE_ELEMENTS = 1 << 18
_HALF_A_CODE = 0.2
# Of products and sums in fp32, against those in fp64.
_FP32_ERROR = 2.0**-20


@dataclass(frozen=True, slots=True)
class Compared:
    """The comparison of merged weights with their files."""

    matrices: int
    """Number of matrices compared."""
    experts: int
    """Number of them that are one expert's."""
    worst: float
    """The largest difference, as a share of what rounding allows."""
    left: float | None = None
    """Share of the adapter's change, along that change, that rounding to codes has left; None if nothing was written as
    codes."""


def base_hash(tensors: Mapping[str, Tensor], load: LoadPlan, files: WeightFiles) -> str:
    """Return the `content_hash` of a model of these `tensors` (on meta, of its dtypes), filled from `files`."""

    sums = {}
    for name, tensor in tensors.items():
        parts = _read_in_blocks(load.tensors[name], files, tensor.dtype)
        sums[name] = sum(element_sum(values, part, tensor.shape) for part, values in parts)
    return joined_hash(tensors, sums)


def check_copies(load: LoadPlan, files: WeightFiles) -> None:
    """Raise `IntegrityError` for tied tensors of which the files hold copies that differ: one of them would be lost."""
    for name, lazy in load.copies:
        first = load.tensors[name]
        dtype = torch.promote_types(lazy.dtype, first.dtype)
        pairs = zip(_read_in_blocks(lazy, files, dtype), _read_in_blocks(first, files, dtype), strict=True)
        if not all(torch.equal(copy, values) for (_, copy), (_, values) in pairs):
            raise differing_copies(lazy, first)


def check_adapter_copies(targets: Sequence[Target], factors: WeightFiles, load: LoadPlan, files: WeightFiles) -> None:
    """Raise `IntegrityError` for a base weight beside the adapter, which PEFT would read, that is not the base's."""
    stored = {key: LazyTensor.of(tensor) for key, tensor in factors.tensors.items()}
    for key, name in base_copies(stored, targets).items():
        copy, base = stored[key], load.tensors[name]
        dtype = min(copy.dtype, base.dtype, key=lambda dtype: dtype.itemsize)
        pairs = zip(_read_in_blocks(copy, factors, dtype), _read_in_blocks(base, files, dtype), strict=False)
        if copy.shape != base.shape or not all(torch.equal(values, other) for (_, values), (_, other) in pairs):
            raise IntegrityError(
                f"{factors.directory}: {key} is not the weight of {files.directory}; the adapter has another base",
                key="adapter.other-base",
            )


def compare_sample(
    model: PreTrainedModel, load: LoadPlan, deltas: Deltas, factors: WeightFiles, directory: Path
) -> Compared:
    """Compare a sample of every adapted weight in `directory`, of one expert where it has experts, with base + adapter.

    Raises `IntegrityError` naming what differs by more than rounding.
    """
    library = LibraryFiles()
    with open_weight_files(directory) as files:
        written = plan_load(ModelView(model), files)
    targets, worst, moved, wanted = list(deltas.targets.values()), 0.0, 0.0, 0.0
    for weight, target in deltas.targets.items():
        if target.name in deltas.parts:
            a_ErK, b_ENr = _of_parts(factors, deltas.parts[target.name], target.shapes)
        else:
            a_ErK, b_ENr = _as_peft_does(factors, keys_in(factors.tensors, target, targets), target.experts or 1)
        expert = _some_expert(weight, b_ENr)
        a_rK, b_Nr = a_ErK[expert].double(), b_ENr[expert].double()
        # PEFT's own file has A and B in each other's places where it takes outputs for inputs.
        flipped = target.transposed and (not target.swapped or target.name in deltas.parts)
        left, right = (a_rK.t(), b_Nr.t()) if flipped else (b_Nr, a_rK)
        first, last = _some_rows(weight, left.shape[0], right.shape[1])
        lead = () if target.experts is None else ((expert, expert + 1),)
        box = (*lead, (first, last), (0, right.shape[1]))
        base, got = (_read(plan.tensors[weight], box, library) for plan in (load, written))
        delta = target.scaling * left[first:last] @ right
        size = target.scaling * left[first:last].abs() @ right.abs()
        rounding = max(torch.finfo(tensor.dtype).eps for tensor in (base, got))
        expected = base.double() + delta
        allowed = rounding * expected.abs() + _FP32_ERROR * (base.double().abs() + size)
        if any(isinstance(leaf, QuantisedTensor) for leaf in written.tensors[weight].leaves()):
            # Two codes of 4 bits are at most a third of the largest value of a block apart.
            allowed = allowed + _HALF_A_CODE * expected.abs().max()
            moved += float(((got.double() - base.double()) * delta).sum())
            wanted += float(delta.square().sum())
        share = ((got.double() - expected).abs() / allowed.clamp_min(torch.finfo(got.dtype).tiny)).max()
        # Not `share > 1`, which holds for no NaN.
        if not bool(share <= 1):
            raise IntegrityError(
                f"{named_source(written.tensors[weight], [start for start, _ in box])} is not base + adapter "
                f"({weight}{'' if target.experts is None else f', expert {expert}'}); report this as a bug",
                key="adapter.merged-wrongly",
            )
        worst = max(worst, float(share))
    for weight, each in deltas.replaced.items():
        worst = max(worst, _compare_replaced(weight, each, written.tensors[weight], factors, library))
    of_experts = sum(target.experts is not None for target in targets)
    count = len(targets) + len(deltas.replaced)
    return Compared(count, of_experts, worst, moved / wanted if wanted else None)


def _compare_replaced(
    weight: str, each: Replaced, written: LazyTensor, factors: WeightFiles, library: LibraryFiles
) -> float:
    """Return the largest difference of a sample of a replaced weight's rows, as a share of what rounding allows.

    Raises `IntegrityError` if rounding does not allow it.
    """
    first, last = _some_rows(weight, each.shape[0], math.prod(each.shape[1:]))
    with safe_open(factors.tensors[each.key].path, framework="pt") as file:
        wanted = file.get_slice(each.key)[first:last].double()
    got = torch.empty(wanted.shape, dtype=written.dtype)
    others = full_box(each.shape)[1:]
    for number, row in enumerate(range(first, last) if each.rows is None else each.rows[first:last]):
        read_box(written, ((row, row + 1), *others), got[number : number + 1], library)
    allowed = torch.finfo(got.dtype).eps * wanted.abs()
    if any(isinstance(leaf, QuantisedTensor) for leaf in written.leaves()):
        allowed = allowed + _HALF_A_CODE * wanted.abs().max()
    share = ((got.double() - wanted).abs() / allowed.clamp_min(torch.finfo(got.dtype).tiny)).max()
    if not bool(share <= 1):
        raise IntegrityError(
            f"{weight} is not what the adapter holds as {each.key}; report this as a bug",
            key="adapter.merged-wrongly",
        )
    return float(share)


def _read_in_blocks(lazy: LazyTensor, files: WeightFiles, dtype: torch.dtype) -> Iterator[tuple[Box, Tensor]]:
    whole = full_box(lazy.shape)
    # What is computed from others would be computed anew for every block.
    computed = not all(isinstance(piece.leaf, (*FILE_LEAVES, Rounded)) for piece in lazy.pieces)
    for part in [whole] if computed else blocks(whole, _BLOCK_ELEMENTS):
        values = torch.empty(extents(part), dtype=dtype)
        read_box(lazy, part, values, files.read)
        yield part, values


def _read(lazy: LazyTensor, box: Box, library: LibraryFiles) -> Tensor:
    """Return the box as a matrix, in the files' dtype."""
    values = torch.empty(extents(box), dtype=lazy.dtype)
    read_box(lazy, box, values, library)
    return values.view(values.shape[-2:])


def _as_peft_does(factors: WeightFiles, keys: tuple[str, str], experts: int) -> tuple[Tensor, Tensor]:
    """Return A `[E, r, in]` and B `[E, out, r]`; E is 1 for a matrix."""
    path = factors.tensors[keys[0]].path
    with safe_open(path, framework="pt") as file:
        a, b = (file.get_tensor(key) for key in keys)
    return a.reshape(experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)


def _of_parts(
    factors: WeightFiles, parts: Sequence[Part], shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> tuple[Tensor, Tensor]:
    """Return the same of adapters on published matrices, each with columns of its own. `shapes`: those of the
    target.
    """
    a_ErK, b_ENr = (torch.zeros(shape if len(shape) == 3 else (1, *shape)) for shape in shapes)
    width = a_ErK.shape[1] * a_ErK.shape[0] // len(parts)
    with safe_open(factors.tensors[parts[0].keys[0]].path, framework="pt") as file:
        for part in parts:
            a, b = (file.get_tensor(key) for key in part.keys)
            first = width * (part.rows[0] // (part.rows[1] - part.rows[0]))
            a_ErK[part.expert or 0, first : first + width] = a
            b_ENr[part.expert or 0, slice(*part.rows), first : first + width] = b
    return a_ErK, b_ENr


def _some_expert(weight: str, b_ENr: Tensor) -> int:
    """Return an expert to which something was added, if there is one; a different one in each layer."""
    used = b_ENr.flatten(1).any(1).nonzero().flatten().tolist() or [0]
    chosen: int = used[_number_of(weight) % len(used)]
    return chosen


def _some_rows(weight: str, rows: int, columns: int) -> tuple[int, int]:
    count = min(rows, max(1, _SAMPLE_ELEMENTS // columns))
    first = _number_of(weight) % (rows - count + 1)
    return first, first + count


def _number_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
