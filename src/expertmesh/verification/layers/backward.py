"""Layer 3: every gradient is the unsharded model's, and so are their norm and what clipping does with it.

Nothing is sampled: each rank compares the whole of what it holds with that part of the unsharded gradient. The norm is
computed from the unsharded gradients alone; clipping is made to clip by asking for half of it.
"""

import torch

from expertmesh.config import PrecisionConfig
from expertmesh.verification.compare import (
    OWN_ERRORS,
    Distance,
    distances,
    figures,
    floor_of,
    gathered,
    joint,
    kind,
    scalar,
)
from expertmesh.verification.proof import Proof, label
from expertmesh.verification.result import Check, Figure
from expertmesh.verification.subject import owned


def check_backward(proof: Proof) -> list[Check]:
    """Every rank calls it; uses the passes of `check_forward` where they were made."""
    return [check for precision in proof.precisions for check in _checks(proof, precision)]


def _checks(proof: Proof, precision: PrecisionConfig) -> list[Check]:
    name, limit = label(precision), proof.tolerance(precision)
    counts = owned(proof.subject(precision))
    graded = proof.graded(precision)
    expected = proof.expected(proof.judge(precision)) if limit else proof.following(torch.float32, precision)
    found = distances(graded.gradients, expected.gradients, counts.__getitem__)
    own: dict[str, Distance] | None = None
    if not limit:
        own = distances(proof.following(torch.bfloat16, precision).gradients, expected.gradients, counts.__getitem__)
    compared = list(figures(found, limit, own, floor=True))
    if proof.escalates and limit and precision.compute == "float32" and any(figure.share > 1 for figure in compared):
        exact = proof.expected(torch.float64)
        own = distances(expected.gradients, exact.gradients, counts.__getitem__)
        found = distances(graded.gradients, exact.gradients, counts.__getitem__)
        least = floor_of(found)
        for key, distance in own.items():
            proof.noise[kind(key)] = max(proof.noise.get(kind(key), 0.0), distance.relative(least))
        compared = list(figures(found, limit, own, floor=True))
    whole = limit if own is None else max(limit, OWN_ERRORS * joint(own).relative())
    together = Figure("all gradients together", joint(found).relative(), whole)
    norms = [scalar(f"rank {rank}", norm, expected.norm, whole) for rank, norm in enumerate(gathered(graded.norm))]
    return [
        Check.of(f"{name}: gradients", [*compared, together]),
        Check.of(f"{name}: global norm", norms, f"{expected.norm:.6g} of the unsharded gradients"),
        _clipping(proof, precision),
    ]


def _clipping(proof: Proof, precision: PrecisionConfig) -> Check:
    """Each tensor must have been scaled by what the reported norm asks for, to the rounding of its dtype."""
    graded = proof.graded(precision)
    factor = graded.max_norm / (graded.norm + 1e-6)
    grain = max((torch.finfo(value.dtype).eps for value in graded.gradients.values()), default=0.0)
    worst = max(((abs(scale / factor - 1), name) for name, scale in graded.clipped.items()), default=(0.0, "nothing"))
    found = [Figure(name, error, max(1e-5, grain)) for error, name in gathered(worst)]
    return Check.of(f"{label(precision)}: clip factor", found, f"{factor:.6f} asked for")
