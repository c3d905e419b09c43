"""Layer 2: the job's forward is the unsharded model's: experts chosen, every block's output, logits, losses.

Choices are compared token by token. Where they differ, the unsharded model says how near the choice was: by rounding
alone it is a tie, which is counted and followed; else it is wrong. In bf16 choices differ from fp32's in the unsharded
model as well; there the job must not differ from it more often than the unsharded bf16 model does, and everything else
is compared with the unsharded model following the job's choices.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.config import PrecisionConfig
from expertmesh.verification.compare import OWN_ERRORS, Distance, distances, figures, gathered, kind, scalar
from expertmesh.verification.proof import Proof, label
from expertmesh.verification.reference.model import Expected
from expertmesh.verification.result import Check, Figure
from expertmesh.verification.seen import Seen

# Chance at which counts of flips that differ are called different: once in a million verifications.
_CHANCE = 1e-6


def check_forward(proof: Proof) -> list[Check]:
    """Every rank calls it; runs the job and the reference on the first step."""
    checks = []
    for precision in proof.precisions:
        checks += _in_fp32(proof, precision) if proof.tolerance(precision) else _in_bf16(proof, precision)
    return checks


def _in_fp32(proof: Proof, precision: PrecisionConfig) -> list[Check]:
    name, dtype, limit = label(precision), proof.judge(precision), proof.tolerance(precision)
    seen = proof.seen(precision)
    choices = _follow_ties(proof, seen, dtype, limit)
    expected = proof.expected(dtype)
    found = list(figures(_distances(proof, seen, expected), limit))
    if proof.escalates and dtype == torch.float32 and any(figure.share > 1 for figure in found):
        # fp32 cannot tell by itself whether the job or the model's conditioning is to blame.
        exact = proof.expected(torch.float64)
        own = _distances(proof, expected.seen, exact)
        proof.noise |= {kind(key): distance.relative() for key, distance in own.items()}
        found = list(figures(_distances(proof, seen, exact), limit, own))
    blocks = [figure for figure in found if figure.tensor != "logits"]
    logits = [figure for figure in found if figure.tensor == "logits"]
    return [
        choices.check(name),
        Check.of(f"{name}: outputs of blocks", blocks),
        Check.of(f"{name}: logits", logits),
        Check.of(f"{name}: losses", _losses(proof, precision, expected, limit)),
    ]


def _in_bf16(proof: Proof, precision: PrecisionConfig) -> list[Check]:
    """fp32 is the truth, the unsharded bf16 model the yardstick."""
    name = label(precision)
    seen = proof.seen(precision)
    speaks = proof.subject(proof.precisions[0]).speaks
    flips = _flips(seen, proof.expected(torch.bfloat16).seen, proof.expected(torch.float32).seen, name, speaks)
    exact, own = (proof.following(dtype, precision) for dtype in (torch.float32, torch.bfloat16))
    found = list(figures(_distances(proof, seen, exact), 0.0, _distances(proof, own.seen, exact)))
    mean_error = sum(gathered(float((own.token_losses - exact.token_losses).abs().sum()))) / exact.targets
    limit = OWN_ERRORS * mean_error / abs(exact.loss)
    return [
        flips,
        Check.of(f"{name}: outputs of blocks", [figure for figure in found if figure.tensor != "logits"]),
        Check.of(f"{name}: logits", [figure for figure in found if figure.tensor == "logits"]),
        Check.of(f"{name}: losses", _losses(proof, precision, exact, limit, own)),
    ]


def _distances(proof: Proof, got: Seen, expected: Expected | Seen) -> dict[str, Distance]:
    speaks = proof.subject(proof.precisions[0]).speaks
    values = expected.tensors if isinstance(expected, Seen) else expected.seen.tensors
    return distances(got.tensors, values, lambda name: speaks)


def _losses(
    proof: Proof, precision: PrecisionConfig, expected: Expected, limit: float, own: Expected | None = None
) -> list[Figure]:
    got = proof.graded(precision).outcome
    found = [scalar("loss", got.loss, expected.loss, limit)]
    for name in ("aux_loss", "z_loss"):
        value, wanted = getattr(got, name), getattr(expected, name)
        if value is not None or wanted is not None:
            allowed = limit
            if own is not None:
                # A mean over tokens, whose own error is one number: it may be small by luck, hence the loss's too.
                allowed = max(limit, OWN_ERRORS * scalar(name, getattr(own, name), wanted, 0.0).error)
            found.append(scalar(name, value or 0.0, wanted or 0.0, allowed))
    return found


@dataclass(frozen=True, slots=True)
class _Choices:
    """Over all ranks: choices compared, ties followed, and the first layer with choices that are wrong."""

    compared: int
    ties: int
    wrong: int
    where: str

    def check(self, precision: str) -> Check:
        name = f"{precision}: experts chosen"
        if not self.compared:
            return Check.not_run(name, "the family's blocks do not say whom they choose")
        ties = "no ties" if not self.ties else f"{self.ties} tie{'s' if self.ties > 1 else ''}, followed"
        note = ties if not self.wrong else f"{self.wrong} differ without a tie, first in {self.where}; {ties}"
        return Check.that(name, not self.wrong, self.compared, note)


def _follow_ties(proof: Proof, seen: Seen, dtype: torch.dtype, limit: float) -> _Choices:
    """Compare choices token by token, as sets, layer after layer. A difference is a tie where scores are within
    `limit`; the reference then runs again and takes the job's side, since everything after a tie may differ.
    """
    forced: dict[str, tuple[Tensor, Tensor]] = {}
    speaks, ties = proof.subject(proof.precisions[0]).speaks, 0
    while True:
        expected = proof.expected(dtype)
        mine: dict[str, tuple[int, int, int]] = {}
        tied: dict[str, Tensor] = {}
        for module, wanted in expected.seen.choices.items():
            if module in seen.choices:
                differs = _differ(seen.choices[module], wanted)
                # A router without a choice among scores (by a hash of the token, for one) has no ties.
                margin_T = expected.margins.get(module, torch.full(differs.shape, math.inf))
                tied[module] = differs & (margin_T[: len(differs)] <= limit)
                if speaks:  # others that share its rows have the same
                    mine[module] = len(differs), int(differs.sum()), int(tied[module].sum())
        totals: dict[str, list[int]] = {}
        for part in gathered(mine):
            for module, counts in part.items():
                totals[module] = [old + new for old, new in zip(totals.get(module, (0, 0, 0)), counts, strict=True)]
        compared = sum(counts[0] for counts in totals.values())
        first = next((module for module, counts in totals.items() if counts[1]), None)
        if first is None:
            return _Choices(compared, ties, 0, "")
        if totals[first][2] == 0 or first in forced:
            return _Choices(compared, ties, totals[first][1] - totals[first][2], first)
        ties += totals[first][2]
        flags = tied.get(first, torch.zeros(0, dtype=torch.bool))
        forced[first] = flags, seen.choices.get(first, torch.zeros(0, 1, dtype=torch.int64))
        proof.follow(forced)


def _flips(seen: Seen, own: Seen, exact: Seen, precision: str, speaks: bool) -> Check:
    """Choices that differ from fp32's: in the job alone, and in the unsharded bf16 model alone. Equal chances would
    give equal counts; the check fails where the job has more than 1.5 times as many and chance does not explain it.
    Each token counts once: on the rank that `speaks` for it.
    """
    alone = theirs = both = tokens = 0
    for module, wanted in exact.choices.items():
        if speaks and module in seen.choices:
            job, unsharded = (_differ(each.choices[module], wanted) for each in (seen, own))
            tokens += len(job)
            alone, theirs = alone + int((job & ~unsharded).sum()), theirs + int((unsharded & ~job).sum())
            both += int((job & unsharded).sum())
    tokens, alone, theirs, both = (sum(part) for part in zip(*gathered((tokens, alone, theirs, both)), strict=True))
    name = f"{precision}: experts chosen"
    if not tokens:
        return Check.not_run(name, "the family's blocks do not say whom they choose")
    more = alone > OWN_ERRORS * theirs and _chance(alone, alone + theirs) < _CHANCE
    note = f"other than in float32: {alone + both} of the job's, {theirs + both} of the unsharded model's"
    return Check.that(name, not more, tokens, note)


def _chance(heads: int, throws: int) -> float:
    """Of so many heads or more, of a fair coin."""
    log = [math.lgamma(throws + 1) - math.lgamma(k + 1) - math.lgamma(throws - k + 1) for k in range(heads, throws + 1)]
    return sum(math.exp(each - throws * math.log(2)) for each in log)


def _differ(one_TK: Tensor, other_TK: Tensor) -> Tensor:
    """Tokens whose sets of experts are not the same."""
    return (one_TK.sort(-1).values != other_TK.sort(-1).values).any(-1)
