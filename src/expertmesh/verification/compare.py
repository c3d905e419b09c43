"""Measure the distance between two runs, and set its limit.

The error of a tensor is the norm of the difference over the norm of the expected tensor, over all ranks together. In
fp32 it must be at most 1e-5 (fp64: 1e-10): about forty times the rounding error of sums of a few thousand terms, and a
thousand times less than the effect of the smallest known bug. If a model is worse conditioned than that, and always in
bf16, the unsharded model sets the limit. Take its distance in the job's dtype from itself in a wider dtype, for the
worst tensor of the same kind: the job may be 1.5 times as far from the unsharded model in the wider dtype.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.distributed.all_ranks import gather_objects
from expertmesh.state.model_view import is_adapter
from expertmesh.verification.result import Figure

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
OWN_ERRORS = 1.5
# If a gradient's RMS is this much smaller than the full model's, it is only the rounding of terms that cancel (for
# example a key bias under a softmax); it is compared as if it were this large.
_LEAST_RMS = 1e-3
_FEW = 64
_BLOCK = 1 << 24


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance of a tensor from the expected one, over all ranks."""

    difference: float
    """The squared norm of the difference."""
    expected: float
    """The squared norm of the expected tensor."""
    elements: int

    def relative(self, least_rms: float = 0.0) -> float:
        """Return the relative error, as if the expected tensor had at least the RMS `least_rms`."""
        size = max(math.sqrt(self.expected), least_rms * math.sqrt(self.elements))
        if size == 0.0:
            return 0.0 if self.difference == 0.0 else math.inf
        return math.sqrt(self.difference) / size


def distances(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], counted: Mapping[str, bool] | bool
) -> dict[str, Distance]:
    """Return the distance of each tensor over all ranks; a tensor that only one side has is compared with zeros.

    Args:
        got: This rank's parts of the job's tensors, by name.
        expected: The same parts of the unsharded model's tensors.
        counted: Whether this rank's part counts, by name or for all.

    Collectives: every rank calls it; one all-gather of objects, three numbers per tensor.
    """
    mine: dict[str, tuple[float, float, int]] = {}
    for name in sorted(got.keys() | expected.keys()):
        if not (counted if isinstance(counted, bool) else counted[name]):
            continue
        like = got[name] if name in got else expected[name]
        mine[name] = squares(*(side[name] if name in side else torch.zeros_like(like) for side in (got, expected)))
    return {name: Distance(a, b, int(count)) for name, (a, b, count) in summed_over_ranks(mine).items()}


def differ(one_TK: Tensor, other_TK: Tensor) -> Tensor:
    """Return for each token whether its two sets of experts differ, `[T]` bool."""
    return (one_TK.sort(-1).values != other_TK.sort(-1).values).any(-1)


def squares(got: Tensor, expected: Tensor) -> tuple[float, float, int]:
    """Return the squared norms of the difference and of `expected`, and the number of elements.

    Sums are in fp64, block by block to keep temporaries small, with one wait for the device.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=got.device)
    for a, b in zip(got.reshape(-1).split(_BLOCK), expected.to(got.device).reshape(-1).split(_BLOCK), strict=True):
        wide = b.double()
        sums += torch.stack([(a.double() - wide).square().sum(), wide.square().sum()])
    difference, size = sums.tolist()
    return difference, size, expected.numel()


def figures(
    found: Mapping[str, Distance], tolerance: float, own: Mapping[str, Distance] | None = None, *, floor: bool = False
) -> Iterator[Figure]:
    """Yield each tensor's relative error with its limit.

    Args:
        tolerance: The limit, unless the unsharded model's error allows more.
        own: The distances of the unsharded model in the job's dtype from a wider one.
        floor: Compare tensors that are nearly zero beside all others as if they were larger; gradients need it.
    """
    least = least_rms(found) if floor else 0.0
    allowed = {kind: OWN_ERRORS * error for kind, error in own_errors(own or {}, least).items()}
    worst = max(allowed.values(), default=0.0)
    for name, distance in found.items():
        limit = allowed.get(without_numbers(name), 0.0)
        if distance.elements < _FEW:
            # The measured error of a few numbers may be small by chance: it is known to one part in the root of their
            # number only.
            limit = worst * math.sqrt(_FEW / max(1, distance.elements))
        yield Figure(name, distance.relative(least), max(tolerance, limit))


def own_errors(own: Mapping[str, Distance], least_rms: float = 0.0) -> dict[str, float]:
    """Return the largest relative error of each kind of tensor."""
    errors: dict[str, float] = {}
    for name, distance in own.items():
        kind = without_numbers(name)
        errors[kind] = max(errors.get(kind, 0.0), distance.relative(least_rms))
    return errors


def total(found: Mapping[str, Distance]) -> Distance:
    """Return the distance of all tensors together."""
    parts = found.values()
    return Distance(
        sum(part.difference for part in parts),
        sum(part.expected for part in parts),
        sum(part.elements for part in parts),
    )


def least_rms(found: Mapping[str, Distance]) -> float:
    """Return the RMS below which a gradient counts as nearly zero."""
    whole = total(found)
    return _LEAST_RMS * math.sqrt(whole.expected / max(1, whole.elements))


def scalar(name: str, got: float, expected: float, limit: float) -> Figure:
    """Return the relative error of one number."""
    size = abs(expected)
    error = abs(got - expected) / size if size else (0.0 if got == expected else math.inf)
    return Figure(name, error, limit)


def without_numbers(name: str) -> str:
    """Return a tensor's kind: its name without the numbers of layers and experts.

    All adapter matrices A are one kind, and all B: the reference adds adapters to the weights, so other tensors are
    rounded than in the job.
    """
    if is_adapter(name):
        return name[-len("lora_A") :]
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def summed_over_ranks(mine: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return the numbers of each name, summed over the ranks that have the name.

    Collectives: every rank calls it; one all-gather of objects on the default group.
    """
    totals: dict[str, list[float]] = {}
    for part in gather_objects(mine):
        for name, values in part.items():
            totals[name] = [a + b for a, b in zip(totals.get(name, [0] * len(values)), values, strict=True)]
    return totals
