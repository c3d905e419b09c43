"""Layer 1: what the ranks hold is what the files hold, each expert as often as it should be, copies equal.

The audit that every `train` start runs on samples runs here on every byte, with another reader than loading uses.
"""

from collections import Counter

from torch import Tensor

from expertmesh.checkpoint.state import fingerprint
from expertmesh.config.errors import IntegrityError
from expertmesh.shards import intersect, local_box, local_tensor, volume
from expertmesh.verification.compare import gathered
from expertmesh.verification.proof import Proof
from expertmesh.verification.result import Check
from expertmesh.verification.subject import Subject, all_tensors
from expertmesh.weights.audit import audit_weights
from expertmesh.weights.load import expert_tensors


def check_bytes(proof: Proof) -> list[Check]:
    """Every rank calls it. One audit of all bytes and a few gatherings."""
    subject = proof.subject(proof.setup.config.precision)
    return [_audit(subject), _owned(subject), replicas(subject, "copies equal")]


def _audit(subject: Subject) -> Check:
    try:
        report = audit_weights(subject.model, subject.setup.directory, "full")
    except IntegrityError as error:
        return Check("every byte equals the files'", "fail", note=str(error))
    experts = sum(len(module.sha256) for module in report.experts)
    note = f"{report.total_bytes:,} bytes on all ranks, {experts:,} experts hashed"
    return Check.that("every byte equals the files'", True, report.tensors, note)


def _owned(subject: Subject) -> Check:
    """Every element of every expert is on exactly `replicate` ranks."""
    held: dict[tuple[str, int], int] = {}
    sizes: dict[tuple[str, int], int] = {}
    state = all_tensors(subject)
    for experts in expert_tensors(subject.model):
        for name in experts.names:
            tensor: Tensor = state[name]
            box = local_box(tensor)
            for number in range(experts.count):
                rows = experts.rows(tensor, number)
                own = intersect(((rows[0], rows[1]), *((0, size) for size in tensor.shape[1:])), box)
                key = name, number
                held[key] = volume(own) if own is not None else 0
                sizes[key] = tensor.numel() // experts.count
    copies: Counter[tuple[str, int]] = Counter()
    whole: dict[tuple[str, int], int] = {}
    for part, size in gathered((held, sizes)):
        copies.update(part)
        whole |= size
    replicate = subject.mesh.layout.replicate
    wrong = [key for key, size in whole.items() if copies[key] != replicate * size]
    times = f"{replicate} time{'s' if replicate > 1 else ''}"
    note = f"each {times}"
    if wrong:
        name, number = wrong[0]
        note = f"expert {number} of {name} is held {copies[wrong[0]] / whole[wrong[0]]:g} times, not {times}"
    return Check.that("experts owned", not wrong, len(whole), note)


def replicas(subject: Subject, name: str, also: dict[str, Tensor] | None = None) -> Check:
    """Ranks that hold the same part of a tensor hold the same bytes: parameters, buffers, and what `also` adds."""
    prints: dict[tuple[str, str], int] = {}
    ties: dict[int, list[str]] = {}
    for key, tensor in {**all_tensors(subject), **(also or {})}.items():
        box = local_box(tensor)
        if volume(box):
            prints[key, str(box)] = fingerprint(local_tensor(tensor))
        ties.setdefault(id(tensor), []).append(key)
    found: dict[tuple[str, str], set[int]] = {}
    count: Counter[tuple[str, str]] = Counter()
    for part in gathered(prints):
        for place, value in part.items():
            found.setdefault(place, set()).add(value)
            count[place] += 1
    different = [place for place, values in found.items() if len(values) > 1]
    copied = sum(1 for times in count.values() if times > 1)
    tied = sum(len(names) - 1 for names in ties.values())
    note = f"of {len(found):,} parts" + (f"; {tied} tied to another" if tied else "")
    if different:
        note = f"{different[0][0]} differs between ranks that hold the same part of it"
    return Check.that(name, not different, copied, note)

