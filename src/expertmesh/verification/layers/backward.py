"""Layer 3: every gradient is the unsharded model's, and so are their norm and what clipping does with it.

Nothing is sampled: each rank compares the whole of what it holds with that part of the unsharded gradient. The norm is
computed from the unsharded gradients alone; clipping is made to clip by asking for half of it.
"""

import torch

from expertmesh.config import PrecisionConfig
from expertmesh.verification.compare import OWN_ERRORS, gather, scalar, total
from expertmesh.verification.proof import Proof, label
from expertmesh.verification.result import Check, Figure


def check_backward(proof: Proof) -> list[Check]:
    """Every rank calls it; uses the passes of `check_forward` where they were made."""
    return [check for precision in proof.precisions for check in _checks(proof, precision)]


def _checks(proof: Proof, precision: PrecisionConfig) -> list[Check]:
    name, limit, got = label(precision), proof.tolerance(precision), proof.backward(precision)
    compared = proof.compared(
        precision, got.gradients, lambda expected: expected.gradients, proof.job(precision).counted(), floor=True
    )
    whole = limit if compared.own is None else max(limit, OWN_ERRORS * total(compared.own).relative())
    together, wanted = Figure("all gradients together", total(compared.found).relative(), whole), compared.expected.norm
    norms = [scalar(f"rank {rank}", norm, wanted, whole) for rank, norm in enumerate(gather(got.norm))]
    return [
        Check.of(f"{name}: gradients", [*compared.figures, together]),
        Check.of(f"{name}: global norm", norms, f"{wanted:.6g} of the unsharded gradients"),
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
