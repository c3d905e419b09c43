"""Layer 1: check that the ranks hold the bytes of the files, each expert the right number of times, with equal copies.

The audit that every start of `train` runs on samples runs here on every byte, with a different reader from that of
loading.
"""

import hashlib
from collections import Counter
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from expertmesh.checkpoint.state import fingerprint
from expertmesh.config.errors import IntegrityError
from expertmesh.io.boxes import full_box, intersect, volume
from expertmesh.io.terminal import plural
from expertmesh.state.shards import held_boxes, local_tensor
from expertmesh.verification.compare import gather
from expertmesh.verification.forward_record import TEACHER
from expertmesh.verification.job import ProvenJob
from expertmesh.verification.proof import Proof
from expertmesh.verification.result import Check
from expertmesh.weights.audit import audit_weights


def check_bytes(proof: Proof) -> list[Check]:
    """Compare the loaded weights of the configured precision with their files.

    Collectives: every rank calls it; those of one audit of all bytes, and a few all-reduces and all-gathers.
    """
    job = proof.runs[-1].job
    checks = _checks(job)
    if (teacher := job.of_teacher) is not None:
        checks += [replace(check, name=f"{TEACHER}{check.name}") for check in _checks(teacher)]
    return checks


def _checks(job: ProvenJob) -> list[Check]:
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

    Args:
        job: Its parameters and buffers are compared.
        name: The name of the check.
        also: Further tensors, by name.

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
    for rows in gather(mine):
        for place, value in rows.tolist():
            found.setdefault(place, set()).add(value)
            times[place] += 1
    different = {place for place, values in found.items() if len(values) > 1}
    copied, tied = sum(count > 1 for count in times.values()), sum(count - 1 for count in names.values())
    note = f"of {len(found):,} parts" if copied else f"no rank holds a copy of any of {len(found):,} parts"
    note += f"; {tied} tied to another" if tied else ""
    if different:
        which = next(each for each in gather([prints[p][0] for p in different if p in prints]) if each)
        note = f"{which[0]} differs between ranks that hold the same part of it"
    return Check.that(name, not different, copied, note)
