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
    gather,
    least_rms,
    scalar,
    total,
    without_numbers,
)
from expertmesh.verification.proof import Proof, label
from expertmesh.verification.result import Check, Figure


def check_backward(proof: Proof) -> list[Check]:
    """Every rank calls it; uses the passes of `check_forward` where they were made."""
    return [check for precision in proof.precisions for check in _checks(proof, precision)]


def _checks(proof: Proof, precision: PrecisionConfig) -> list[Check]:
    name, limit = label(precision), proof.tolerance(precision)
    counted, got = proof.job(precision).counted(), proof.backward(precision)
    own: dict[str, Distance] | None = None
    if limit:
        expected = proof.expected(proof.judge(precision))
    else:
        expected = proof.expected_with_job_choices(torch.float32, precision)
        rounded = proof.expected_with_job_choices(torch.bfloat16, precision)
        own = distances(rounded.gradients, expected.gradients, counted)
    found = distances(got.gradients, expected.gradients, counted)
    compared = list(figures(found, limit, own, floor=True))
    in_fp32 = limit and precision.compute == "float32"
    if proof.uses_float64 and in_fp32 and any(figure.share > 1 for figure in compared):
        exact = proof.expected(torch.float64)
        own = distances(expected.gradients, exact.gradients, counted)
        found = distances(got.gradients, exact.gradients, counted)
        least = least_rms(found)
        for tensor, distance in own.items():
            kind = without_numbers(tensor)
            proof.own_error[kind] = max(proof.own_error.get(kind, 0.0), distance.relative(least))
        compared = list(figures(found, limit, own, floor=True))
    whole = limit if own is None else max(limit, OWN_ERRORS * total(own).relative())
    together = Figure("all gradients together", total(found).relative(), whole)
    norms = [scalar(f"rank {rank}", norm, expected.norm, whole) for rank, norm in enumerate(gather(got.norm))]
    return [
        Check.of(f"{name}: gradients", [*compared, together]),
        Check.of(f"{name}: global norm", norms, f"{expected.norm:.6g} of the unsharded gradients"),
        _clipping(proof, precision),
    ]


def _clipping(proof: Proof, precision: PrecisionConfig) -> Check:
    """Each tensor must have been scaled by what the reported norm asks for, to the rounding of its dtype."""
    got = proof.backward(precision)
    factor = got.max_norm / (got.norm + 1e-6)
    rounding = max((torch.finfo(value.dtype).eps for value in got.gradients.values()), default=0.0)
    worst = max(((abs(scale / factor - 1), name) for name, scale in got.scaled.items()), default=(0.0, "nothing"))
    found = [Figure(name, error, max(1e-5, rounding)) for error, name in gather(worst)]
    return Check.of(f"{label(precision)}: clip factor", found, f"{factor:.6f} asked for")
