"""Layer 3: every gradient is the unsharded model's, and so are their norm and what clipping does with it.

Nothing is sampled: each rank compares the whole of what it holds with that part of the unsharded gradient. The norm is
computed from the unsharded gradients alone; clipping is made to clip by asking for half of it.
"""

import torch

from expertmesh.verification.compare import OWN_ERRORS, gather, scalar, total
from expertmesh.verification.proof import PrecisionRun, Proof
from expertmesh.verification.result import Check, Figure


def check_backward(proof: Proof) -> list[Check]:
    """Every rank calls it; uses the passes of `check_forward` where they were made."""
    return [check for run in proof.runs for check in _checks(run)]


def _checks(run: PrecisionRun) -> list[Check]:
    got = run.backward
    compared = run.compared(got.gradients, lambda expected: expected.gradients, run.job.counted(), floor=True)
    whole = run.limit if compared.own is None else max(run.limit, OWN_ERRORS * total(compared.own).relative())
    together, wanted = Figure("all gradients together", total(compared.found).relative(), whole), compared.expected.norm
    norms = [scalar(f"rank {rank}", norm, wanted, whole) for rank, norm in enumerate(gather(got.norm))]
    return [
        Check.of(f"{run.name}: gradients", [*compared.figures, together]),
        Check.of(f"{run.name}: global norm", norms, f"{wanted:.6g} of the unsharded gradients"),
        _clipping(run),
    ]


def _clipping(run: PrecisionRun) -> Check:
    """Each tensor must have been scaled by what the reported norm asks for, to the rounding of its dtype."""
    got = run.backward
    factor = got.max_norm / (got.norm + 1e-6)
    rounding = max((torch.finfo(value.dtype).eps for value in got.gradients.values()), default=0.0)
    worst = max(((abs(scale / factor - 1), name) for name, scale in got.scaled.items()), default=(0.0, "nothing"))
    found = [Figure(name, error, max(1e-5, rounding)) for error, name in gather(worst)]
    return Check.of(f"{run.name}: clip factor", found, f"{factor:.6f} asked for")
