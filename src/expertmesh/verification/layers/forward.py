"""Layer 2: the job's forward is the unsharded model's: experts chosen, every block's output, logits, losses.

Choices are compared token by token. Where they differ, the unsharded model says how near the choice was: by rounding
alone it is a tie, which is counted; else it is wrong. In bf16 choices differ from fp32's in the unsharded model as
well; there the job must not differ from it more often than the unsharded bf16 model does. Everything else is compared
with the unsharded model following the job's choices.
"""

import math
from contextlib import nullcontext

import torch

from expertmesh.adapters.attach import adapters_off
from expertmesh.training.objective import RunObjective
from expertmesh.verification.compare import (
    OWN_ERRORS,
    Distance,
    differ,
    figures,
    gather,
    scalar,
    squares,
    summed_over_ranks,
)
from expertmesh.verification.forward_record import record_forward
from expertmesh.verification.proof import PrecisionRun, Proof
from expertmesh.verification.reference.model import Expected
from expertmesh.verification.result import Check, Figure

# Chance at which counts of flips that differ are called different: once in a million verifications.
_CHANCE = 1e-6


def check_forward(proof: Proof) -> list[Check]:
    """Every rank calls it; runs the job and the reference on the first step."""
    checks = [check for run in proof.runs for check in _checks(run)]
    return checks if proof.setup.steps[0].beta is None else [*checks, _compare_reference(proof)]


def _checks(run: PrecisionRun) -> list[Check]:
    name, limit, own = run.name, run.limit, None
    choices = _compare_choices(run) if limit else _compare_flips(run)
    answers = run.job.answers_for_rows
    compared = run.compared(run.forward.tensors, lambda expected: expected.forward.tensors, answers)
    if not limit:
        own = run.expected(torch.bfloat16)
        limit = _own_limit(run, own, compared.expected)
    losses = _losses(run, compared.expected, limit, own)
    if run.may_ask_float64 and any(each.share > 1 for each in losses):
        own, exact = compared.expected, run.expected(torch.float64)
        losses = _losses(run, exact, max(limit, _own_limit(run, own, exact)), own)
    return [
        choices,
        Check.of(f"{name}: outputs of blocks", [each for each in compared.figures if each.tensor != "logits"]),
        Check.of(f"{name}: logits", [each for each in compared.figures if each.tensor == "logits"]),
        Check.of(f"{name}: losses", losses),
    ]


def _own_limit(run: PrecisionRun, own: Expected, exact: Expected) -> float:
    """How far off the loss may be because the unsharded model `own` is, as if the errors of all its tokens added up:
    where a loss is of differences (dpo), they count by more than their share of it. One gathering.
    """
    errors = sum(gather(float((own.token_losses - exact.token_losses).abs().sum())))
    return OWN_ERRORS * errors * run.proof.setup.steps[0].share / abs(exact.losses.loss)


def _compare_reference(proof: Proof) -> Check:
    """The first step's log-probabilities under the reference that a preference run would have. Every rank calls it: two
    forwards of the job, one of the unsharded model.
    """
    data, job, objective = proof.setup.steps[0], proof.exact.job, RunObjective.of(proof.setup.config)
    without, got = objective.adapters_off, job.reference_table(data, objective)
    with adapters_off(job.model) if without else nullcontext():
        chosen = record_forward(job, data).choices
    mine = proof.reference(proof.exact.judge).row_log_probabilities(data, chosen, adapters=not without)
    rows = {index: row for part in gather(mine if job.answers_for_rows else {}) for index, row in part.items()}
    wanted = torch.tensor([rows[index] for index in range(len(data.dataset))], dtype=torch.float64)
    distance = Distance(*squares(torch.from_numpy(got), wanted))
    name = f"{proof.exact.name}: log-probabilities of the reference"
    return Check.of(name, figures({"samples": distance}, proof.exact.limit), "adapters off" if without else "")


def _losses(run: PrecisionRun, expected: Expected, limit: float, own: Expected | None) -> list[Figure]:
    got, found = run.backward.losses, []
    for name in ("loss", "aux_loss", "z_loss"):
        value, wanted, allowed = getattr(got, name), getattr(expected.losses, name), limit
        if value is not None or wanted is not None:
            if own is not None and name != "loss":
                # A mean over tokens, whose own error is one number: it may be small by luck, hence the loss's too.
                allowed = max(limit, OWN_ERRORS * scalar(name, getattr(own.losses, name), wanted, 0.0).error)
            found.append(scalar(name, value or 0.0, wanted or 0.0, allowed))
    return found


def _compare_choices(run: PrecisionRun) -> Check:
    """Compare choices token by token, as sets. A difference is a tie where scores are within the tolerance."""
    name, choices, expected = f"{run.name}: experts chosen", run.forward.choices, run.expected(run.judge)
    mine: dict[str, tuple[int, int, int]] = {}
    for module, wanted in expected.forward.choices.items():
        if module in choices and run.job.answers_for_rows:
            differs = differ(choices[module], wanted)
            # A router without a choice among scores (by a hash of the token, for one) has no ties.
            tied = differs & (expected.margins.get(module, torch.full(differs.shape, math.inf)) <= run.limit)
            mine[module] = len(differs), int(tied.sum()), int((differs & ~tied).sum())
    totals = summed_over_ranks(mine)
    if not any(tokens for tokens, _, _ in totals.values()):
        return _no_choices(name)
    compared, ties, wrong = (int(sum(counts)) for counts in zip(*totals.values(), strict=True))
    note = "no ties" if not ties else f"{ties} tie{'s' if ties > 1 else ''}, followed"
    if wrong:
        first = next(module for module, counts in totals.items() if counts[-1])
        note = f"{wrong} differ without a tie, first in {first}; {note}"
    return Check.that(name, not wrong, compared, note)


def _compare_flips(run: PrecisionRun) -> Check:
    """Choices that differ from fp32's: in the job alone, and in the unsharded bf16 model alone. Equal chances would
    give equal counts; the check fails where the job has more than 1.5 times as many and chance does not explain it.
    Each token counts once: on the rank that answers for its row.
    """
    name, choices = f"{run.name}: experts chosen", run.forward.choices
    own, exact = (run.proof.expected(dtype).forward.choices for dtype in (torch.bfloat16, torch.float32))
    alone = theirs = both = tokens = 0
    for module, wanted in exact.items():
        if module in choices and run.job.answers_for_rows:
            job, unsharded = (differ(each[module], wanted) for each in (choices, own))
            tokens += len(job)
            alone, theirs = alone + int((job & ~unsharded).sum()), theirs + int((unsharded & ~job).sum())
            both += int((job & unsharded).sum())
    tokens, alone, theirs, both = (sum(part) for part in zip(*gather((tokens, alone, theirs, both)), strict=True))
    if not tokens:
        return _no_choices(name)
    more = alone > OWN_ERRORS * theirs and _chance(alone, alone + theirs) < _CHANCE
    note = f"not float32's: {alone + both} of the job's, {theirs + both} of the unsharded model's"
    return Check.that(name, not more, tokens, note)


def _no_choices(name: str) -> Check:
    return Check.not_run(name, "the blocks of this family do not show which experts they choose")


def _chance(heads: int, throws: int) -> float:
    """Of so many heads or more, of a fair coin."""
    log = [math.lgamma(throws + 1) - math.lgamma(k + 1) - math.lgamma(throws - k + 1) for k in range(heads, throws + 1)]
    return sum(math.exp(each - throws * math.log(2)) for each in log)
