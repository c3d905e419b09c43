"""How far two runs are from each other, and how far they may be.

The error of a tensor is the norm of the difference over the norm of what is expected, over all ranks together. In fp32
it must be at most 1e-5 (fp64: 1e-10): some forty times what sums of a few thousand terms lose to rounding, and a
thousand times less than the smallest known bug costs. Where a model's own arithmetic is worse conditioned than that,
and always in bf16, the unsharded model sets the limit: the job may be 1.5 times as far from the unsharded model in a
wider dtype as the unsharded model in the job's own dtype is, in its worst tensor of the same kind.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from expertmesh.state.model_view import is_adapter
from expertmesh.verification.result import Figure

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
OWN_ERRORS = 1.5
# A gradient whose mean element is this much smaller than the whole model's is nothing but the rounding of terms that
# cancel (a key bias under a softmax, for one); it is compared as if it were this large.
_LEAST_RMS = 1e-3
_FEW = 64
_BLOCK = 1 << 24
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Distance:
    """Over all ranks: squared norms of the difference and of what was expected, and elements."""

    difference: float
    expected: float
    elements: int

    def relative(self, least_rms: float = 0.0) -> float:
        size = max(math.sqrt(self.expected), least_rms * math.sqrt(self.elements))
        if size == 0.0:
            return 0.0 if self.difference == 0.0 else math.inf
        return math.sqrt(self.difference) / size


def distances(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], counted: Mapping[str, bool] | bool
) -> dict[str, Distance]:
    """Of each tensor; `counted` says whether this rank's part counts. One gathering of three numbers per tensor.

    What only one side has is compared with zeros.
    """
    mine: dict[str, tuple[float, float, int]] = {}
    for name in sorted(got.keys() | expected.keys()):
        if not (counted if isinstance(counted, bool) else counted[name]):
            continue
        like = got[name] if name in got else expected[name]
        mine[name] = squares(*(side[name] if name in side else torch.zeros_like(like) for side in (got, expected)))
    return {name: Distance(a, b, int(count)) for name, (a, b, count) in summed_over_ranks(mine).items()}


def differ(one_TK: Tensor, other_TK: Tensor) -> Tensor:
    """Tokens whose sets of experts are not the same."""
    return (one_TK.sort(-1).values != other_TK.sort(-1).values).any(-1)


def squares(got: Tensor, expected: Tensor) -> tuple[float, float, int]:
    """Of the difference and of what was expected, in fp64, with small temporaries and one wait for the device."""
    sums = torch.zeros(2, dtype=torch.float64, device=got.device)
    for a, b in zip(got.reshape(-1).split(_BLOCK), expected.to(got.device).reshape(-1).split(_BLOCK), strict=True):
        wide = b.double()
        sums += torch.stack([(a.double() - wide).square().sum(), wide.square().sum()])
    difference, size = sums.tolist()
    return difference, size, expected.numel()


def figures(
    found: Mapping[str, Distance],
    tolerance: float,
    own: Mapping[str, Distance] | None = None,
    *,
    floor: bool = False,
) -> Iterator[Figure]:
    """Each tensor's error beside its limit: `tolerance`, or what the unsharded model's `own` error allows if more.

    `floor`: count tensors that are next to nothing beside all others as a little larger, as gradients need it.
    """
    least = least_rms(found) if floor else 0.0
    allowed = {kind: OWN_ERRORS * error for kind, error in own_errors(own or {}, least).items()}
    worst = max(allowed.values(), default=0.0)
    for name, distance in found.items():
        limit = allowed.get(without_numbers(name), 0.0)
        if distance.elements < _FEW:
            # The own error of a few numbers may be small by luck: it is known to one part in the root of their number.
            limit = worst * math.sqrt(_FEW / max(1, distance.elements))
        yield Figure(name, distance.relative(least), max(tolerance, limit))


def own_errors(own: Mapping[str, Distance], least_rms: float = 0.0) -> dict[str, float]:
    """The largest error of each kind of tensor."""
    errors: dict[str, float] = {}
    for name, distance in own.items():
        kind = without_numbers(name)
        errors[kind] = max(errors.get(kind, 0.0), distance.relative(least_rms))
    return errors


def total(found: Mapping[str, Distance]) -> Distance:
    """All tensors as one."""
    parts = found.values()
    return Distance(
        sum(part.difference for part in parts),
        sum(part.expected for part in parts),
        sum(part.elements for part in parts),
    )


def least_rms(found: Mapping[str, Distance]) -> float:
    """The smallest gradient per element that is told from zero."""
    whole = total(found)
    return _LEAST_RMS * math.sqrt(whole.expected / max(1, whole.elements))


def scalar(name: str, got: float, expected: float, limit: float) -> Figure:
    """The relative error of one number."""
    size = abs(expected)
    error = abs(got - expected) / size if size else (0.0 if got == expected else math.inf)
    return Figure(name, error, limit)


def without_numbers(name: str) -> str:
    """A tensor's kind: its name without the numbers of layers and experts. All A of adapters are one kind, and all B.

    The reference adds adapters to the weights, so that rounding falls on other tensors than in the job.
    """
    if is_adapter(name):
        return name[-len("lora_A") :]
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def gather(mine: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """Every rank's `mine`, on every rank. One gathering of objects on `group`, the default group by default."""
    found: list[_T] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def summed_over_ranks(mine: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Numbers by name, added up over the ranks that have the name. One gathering."""
    totals: dict[str, list[float]] = {}
    for part in gather(mine):
        for name, values in part.items():
            totals[name] = [a + b for a, b in zip(totals.get(name, [0] * len(values)), values, strict=True)]
    return totals
