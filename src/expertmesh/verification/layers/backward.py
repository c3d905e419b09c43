"""Layer 3: compare all gradients, their norm and the effect of clipping with the unsharded model.

Nothing is sampled: each rank compares all of its shards with the same parts of the unsharded gradients. The expected
norm is computed from the unsharded gradients alone. Half of it is the maximum norm, so that clipping has an effect.
"""

import torch

from expertmesh.verification.compare import OWN_ERRORS, gather, scalar, total
from expertmesh.verification.proof import PrecisionRun, Proof
from expertmesh.verification.result import Check, Figure


def check_backward(proof: Proof) -> list[Check]:
    """Compare gradients, norm and clipping of the first step with the unsharded model, in each precision.

    It reuses the passes of `check_forward` if they were run.

    Collectives: every rank calls it; those of the passes, and a few all-gathers of objects.
    """
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
    """Check that clipping scaled each tensor by the factor that follows from the reported norm, up to rounding."""
    got = run.backward
    factor = got.max_norm / (got.norm + 1e-6)
    rounding = max((torch.finfo(value.dtype).eps for value in got.gradients.values()), default=0.0)
    worst = max(((abs(scale / factor - 1), name) for name, scale in got.scaled.items()), default=(0.0, "nothing"))
    found = [Figure(name, error, max(1e-5, rounding)) for error, name in gather(worst)]
    return Check.of(f"{run.name}: clip factor", found, f"{factor:.6f} asked for")
