"""Layers 1 to 3: what the job holds, and what a step computes with it, against the files and the unsharded model.

1. Bytes: the ranks hold the bytes of the files, each expert the right number of times, with equal copies. The audit
   that every start of `train` runs on samples runs here on every byte, with a different reader from that of loading.
2. Forward: chosen experts, outputs of blocks, logits and losses. Chosen experts are compared token by token. If they
   differ, the unsharded model gives the gap between the scores: within the tolerance it is a tie, which is counted;
   else it is an error. In bf16 the unsharded model, too, chooses other experts than in fp32; the job must not differ
   from fp32 more often than the unsharded bf16 model. Everything else is compared with the unsharded model on the
   experts that the job chose.
3. Backward: all gradients, their norm and the effect of clipping. Nothing is sampled: each rank compares all of its
   shards with the same parts of the unsharded gradients. The expected norm is computed from the unsharded gradients
   alone. Half of it is the maximum norm, so that clipping has an effect.
"""

import hashlib
import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from expertmesh.adapters.plan import adapters_off
from expertmesh.checkpoint.state import fingerprint
from expertmesh.config.errors import IntegrityError
from expertmesh.distributed.all_ranks import gather_objects
from expertmesh.io.boxes import full_box, intersect, volume
from expertmesh.io.terminal import plural
from expertmesh.state.shards import held_boxes, local_tensor
from expertmesh.training.objective import RunObjective
from expertmesh.verification.compare import (
    OWN_ERRORS,
    Distance,
    differ,
    figures,
    scalar,
    squares,
    summed_over_ranks,
    total,
)
from expertmesh.verification.forward_record import TEACHER, record_forward
from expertmesh.verification.job import ProvenJob
from expertmesh.verification.proof import PrecisionRun, Proof
from expertmesh.verification.reference.model import Expected
from expertmesh.verification.result import Check, Figure
from expertmesh.weights.audit import audit_weights

# The probability of a false alarm by `_compare_flips`: once in a million verifications.
_CHANCE = 1e-6


def check_bytes(proof: Proof) -> list[Check]:
    """Compare the loaded weights of the configured precision with their files.

    Collectives: every rank calls it; those of one audit of all bytes, and a few all-reduces and all-gathers.
    """
    job = proof.runs[-1].job
    checks = _byte_checks(job)
    if (teacher := job.of_teacher) is not None:
        checks += [replace(check, name=f"{TEACHER}{check.name}") for check in _byte_checks(teacher)]
    return checks


def _byte_checks(job: ProvenJob) -> list[Check]:
    return [_audit(job), _owned(job), replicas(job, "copies equal")]


def _audit(job: ProvenJob) -> Check:
    seed = job.setup.weights_seed
    name = "every byte equals the files'" if seed is None else "every byte equals what is drawn"
    try:
        report = audit_weights(job.model, job.setup.directory, "full", seed=seed)
    except IntegrityError as error:
        return Check(name, "fail", note=str(error))
    experts = sum(len(module.sha256) for module in report.experts)
    note = f"{report.total_bytes:,} bytes on all ranks, {experts:,} experts hashed"
    return Check.that(name, True, report.tensors, note)


def _owned(job: ProvenJob) -> Check:
    """Check that every element of every expert is on exactly `replicate` ranks.

    Collectives: every rank calls it; two all-reduces of a number per expert.
    """
    state = job.tensors()
    names = [f"{spec.name}.{name}" for spec in job.setup.anatomy.experts for name in spec.parameters]
    count = job.setup.anatomy.num_experts
    held_NE, whole_NE = torch.zeros(2, len(names), count, dtype=torch.int64, device=job.mesh.device)
    for row, name in enumerate(names):
        if name not in state:
            continue
        tensor, share = state[name], state[name].shape[0] // count
        rest = full_box(tensor.shape)[1:]
        for number in range(count):
            whole = ((number * share, (number + 1) * share), *rest)
            parts = (intersect(whole, box) for box in held_boxes(tensor))
            held_NE[row, number] = sum(volume(part) for part in parts if part is not None)
        whole_NE[row] = tensor.numel() // count
    dist.all_reduce(held_NE)
    dist.all_reduce(whole_NE, dist.ReduceOp.MAX)
    replicate = job.mesh.layout.replicate
    times = plural(replicate, "time")
    note, wrong = f"each {times}", (held_NE != replicate * whole_NE).nonzero().tolist()
    if wrong:
        row, number = wrong[0]
        held = int(held_NE[row, number]) / max(1, int(whole_NE[row, number]))
        note = f"expert {number} of {names[row]} is held {held:g} times, not {times}"
    return Check.that("experts owned", not wrong, held_NE.numel(), note)


def replicas(job: ProvenJob, name: str, also: dict[str, Tensor] | None = None) -> Check:
    """Check that ranks which hold the same part of a tensor hold the same bytes.

    Collectives: every rank calls it; one all-gather of objects, 16 bytes per part, and one more if copies differ.
    """
    prints: dict[int, tuple[str, int]] = {}
    names: dict[int, int] = {}
    for key, tensor in {**job.tensors(), **(also or {})}.items():
        names[id(tensor)] = names.get(id(tensor), 0) + 1
        if sum(map(volume, boxes := held_boxes(tensor))):
            place = hashlib.blake2b(f"{key} {boxes}".encode(), digest_size=8).digest()
            prints[int.from_bytes(place, "little", signed=True)] = key, fingerprint(local_tensor(tensor))
    mine = torch.tensor([[place, value] for place, (_, value) in prints.items()], dtype=torch.int64).reshape(-1, 2)
    found: dict[int, set[int]] = {}
    times: Counter[int] = Counter()
    for rows in gather_objects(mine):
        for place, value in rows.tolist():
            found.setdefault(place, set()).add(value)
            times[place] += 1
    different = {place for place, values in found.items() if len(values) > 1}
    copied, tied = sum(count > 1 for count in times.values()), sum(count - 1 for count in names.values())
    note = f"of {len(found):,} parts" if copied else f"no rank holds a copy of any of {len(found):,} parts"
    note += f"; {tied} tied to another" if tied else ""
    if different:
        which = next(each for each in gather_objects([prints[p][0] for p in different if p in prints]) if each)
        note = f"{which[0]} differs between ranks that hold the same part of it"
    return Check.that(name, not different, copied, note)


def check_forward(proof: Proof) -> list[Check]:
    """Compare the forward of the first step with the unsharded model, in each precision.

    Collectives: every rank calls it; those of the passes of the job and of the reference, and a few all-gathers of
    objects.
    """
    checks = [check for run in proof.runs for check in _forward_checks(run)]
    return [*checks, _compare_reference(proof)] if proof.setup.steps[0].minimised.reference else checks


def _forward_checks(run: PrecisionRun) -> list[Check]:
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
    """Return the limit for the relative error of the loss that follows from the error of the unsharded model `own`.

    The errors of all its tokens are added without signs, each times its weight in the loss: in a loss of differences
    (of pairs) they count more than their share of the loss.

    Collectives: every rank calls it; one all-gather of objects.
    """
    error = (own.token_losses - exact.token_losses).abs() * exact.token_weights.abs()
    return OWN_ERRORS * sum(gather_objects(float(error.sum()))) / abs(exact.losses.loss)


def _compare_reference(proof: Proof) -> Check:
    """Compare the first step's log-probabilities under the reference of a preference run with the unsharded model.

    Collectives: every rank calls it; those of two forwards of the job, and one all-gather of objects.
    """
    data, job, objective = proof.setup.steps[0], proof.exact.job, RunObjective.of(proof.setup.config)
    without = objective.adapters_off
    found = {}
    for what, rows in {"samples": data, "mismatched samples": data.mismatched}.items():
        if rows is not None:
            got = job.reference_table(rows, objective)
            with adapters_off(job.model) if without else nullcontext():
                chosen = record_forward(job, rows).choices
            mine = proof.reference(proof.exact.judge).row_log_probabilities(rows, chosen, adapters=not without)
            parts = gather_objects(mine if job.answers_for_rows else {})
            by_index = {index: row for part in parts for index, row in part.items()}
            wanted = torch.tensor([by_index[index] for index in range(len(rows.dataset))], dtype=torch.float64)
            found[what] = Distance(*squares(torch.from_numpy(got), wanted))
    name = f"{proof.exact.name}: log-probabilities of the reference"
    return Check.of(name, figures(found, proof.exact.limit), "adapters off" if without else "")


def _losses(run: PrecisionRun, expected: Expected, limit: float, own: Expected | None) -> list[Figure]:
    got, found = run.backward.losses, []
    for name in ("loss", "aux_loss", "z_loss"):
        value, wanted, allowed = getattr(got, name), getattr(expected.losses, name), limit
        if value is not None or wanted is not None:
            if own is not None and name != "loss":
                # The error of this mean over tokens is one number, which may be small by chance: allow the loss's, too.
                allowed = max(limit, OWN_ERRORS * scalar(name, getattr(own.losses, name), wanted, 0.0).error)
            found.append(scalar(name, value or 0.0, wanted or 0.0, allowed))
    return found


def _compare_choices(run: PrecisionRun) -> Check:
    """Compare the chosen experts token by token, as sets. A difference is a tie if scores are within the tolerance.

    Collectives: every rank calls it; one all-gather of objects.
    """
    name, choices, expected = f"{run.name}: experts chosen", run.forward.choices, run.expected(run.judge)
    mine: dict[str, tuple[int, int, int]] = {}
    for module, wanted in expected.forward.choices.items():
        if module in choices and run.job.answers_for_rows:
            differs = differ(choices[module], wanted)
            # A router that does not compare scores (for example one that hashes the token) has no ties.
            tied = differs & (expected.margins.get(module, torch.full(differs.shape, math.inf)) <= run.limit)
            mine[module] = len(differs), int(tied.sum()), int((differs & ~tied).sum())
    totals = summed_over_ranks(mine)
    if not any(tokens for tokens, _, _ in totals.values()):
        return _no_choices(name)
    compared, ties, wrong = (int(sum(counts)) for counts in zip(*totals.values(), strict=True))
    note = "no ties" if not ties else f"{plural(ties, 'tie')}, followed"
    if wrong:
        first = next(module for module, counts in totals.items() if counts[-1])
        note = f"{wrong} differ without a tie, first in {first}; {note}"
    return Check.that(name, not wrong, compared, note)


def _compare_flips(run: PrecisionRun) -> Check:
    """Count the tokens whose experts differ from fp32's in the job alone, and in the unsharded bf16 model alone.

    With equal probabilities both counts would be about equal. The check fails if the job's count is more than 1.5 times
    as large and chance does not explain it. Each token counts once, on a rank with `answers_for_rows`.

    Collectives: every rank calls it; one all-gather of objects.
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
    of_ranks = gather_objects((tokens, alone, theirs, both))
    tokens, alone, theirs, both = (sum(part) for part in zip(*of_ranks, strict=True))
    if not tokens:
        return _no_choices(name)
    more = alone > OWN_ERRORS * theirs and _chance(alone, alone + theirs) < _CHANCE
    note = f"not float32's: {alone + both} of the job's, {theirs + both} of the unsharded model's"
    return Check.that(name, not more, tokens, note)


def _no_choices(name: str) -> Check:
    return Check.not_run(name, "the blocks of this family do not show which experts they choose")


def _chance(heads: int, throws: int) -> float:
    """Return the probability of at least `heads` heads in `throws` throws of a fair coin."""
    log = [math.lgamma(throws + 1) - math.lgamma(k + 1) - math.lgamma(throws - k + 1) for k in range(heads, throws + 1)]
    return sum(math.exp(each - throws * math.log(2)) for each in log)


def check_backward(proof: Proof) -> list[Check]:
    """Compare gradients, norm and clipping of the first step with the unsharded model, in each precision.

    It reuses the passes of `check_forward` if they were run.

    Collectives: every rank calls it; those of the passes, and a few all-gathers of objects.
    """
    return [check for run in proof.runs for check in _backward_checks(run)]


def _backward_checks(run: PrecisionRun) -> list[Check]:
    """Compare the gradients, their norm, and the factor by which clipping scaled each tensor, up to rounding."""
    got = run.backward
    compared = run.compared(got.gradients, lambda expected: expected.gradients, run.job.counted(), floor=True)
    whole = run.limit if compared.own is None else max(run.limit, OWN_ERRORS * total(compared.own).relative())
    together, wanted = Figure("all gradients together", total(compared.found).relative(), whole), compared.expected.norm
    norms = [scalar(f"rank {rank}", norm, wanted, whole) for rank, norm in enumerate(gather_objects(got.norm))]
    factor = got.max_norm / (got.norm + 1e-6)
    rounding = max((torch.finfo(value.dtype).eps for value in got.gradients.values()), default=0.0)
    worst = max(((abs(scale / factor - 1), name) for name, scale in got.scaled.items()), default=(0.0, "nothing"))
    clipped = [Figure(name, error, max(1e-5, rounding)) for error, name in gather_objects(worst)]
    return [
        Check.of(f"{run.name}: gradients", [*compared.figures, together]),
        Check.of(f"{run.name}: global norm", norms, f"{wanted:.6g} of the unsharded gradients"),
        Check.of(f"{run.name}: clip factor", clipped, f"{factor:.6f} asked for"),
    ]
