"""Layer 5: what must not change the result does not: ep, accumulation, packing, checkpointing, stopping and resuming.

Each relation runs the same step of the same data in two ways, in fp32, and compares the loss, the gradient norm and
every gradient. Resuming is run in the run's own precision and must be equal bit for bit. A relation that the ranks, the
model or the run leave no room for is reported as not run.
"""

import gc
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from expertmesh.checkpoint.interface import load_checkpoint, save_checkpoint
from expertmesh.checkpoint.state import fingerprint
from expertmesh.config.errors import InputError
from expertmesh.data import Step
from expertmesh.distributed.layout import resolve_layout
from expertmesh.parallel.checkpointing import checkpoint_blocks
from expertmesh.parallel.refusals import expert_shard_dim
from expertmesh.state.shards import local_tensor
from expertmesh.verification import subject as job
from expertmesh.verification.compare import OWN_ERRORS, figures, gathered, kind, scalar
from expertmesh.verification.proof import Proof, label
from expertmesh.verification.result import Check, Figure
from expertmesh.verification.samples import StepData
from expertmesh.verification.sketch import apart, sketch
from expertmesh.verification.subject import Subject, all_tensors

EP_SIZES = (1, 2, 4)


def check_metamorphic(proof: Proof, scratch: Path) -> list[Check]:
    """Every rank calls it. Builds the job several times; `scratch` is a directory that all ranks see."""
    proof.forget()
    gc.collect()
    checks = []
    exact = proof.precisions[0]
    subject = job.build(proof.setup, precision=exact, checkpointing=False)
    data = proof.setup.steps[0]
    base = _taken(subject, subject.batches(data))
    checks.append(_checkpointing(proof, subject, base))
    checks.append(_accumulation(proof, subject))
    checks.append(_packing(proof, subject))
    elements = _elements(subject)
    del subject
    gc.collect()
    checks += _expert_parallel(proof, base, elements)
    checks.append(check_resume(proof, scratch))
    return checks


@dataclass(frozen=True, slots=True)
class _Taken:
    """What one way of running a step gave."""

    loss: float
    norm: float
    gradients: dict[str, list[float]]


def _taken(subject: Subject, step: Step) -> _Taken:
    outcome = job.backward(subject, step)
    gradients = job.gradients(subject)
    norm = job.clip(subject, None)
    subject.model.zero_grad(set_to_none=True)
    return _Taken(outcome.loss, norm, sketch(subject, gradients))


def _same(proof: Proof, name: str, one: _Taken, other: _Taken, elements: dict[str, int]) -> Check:
    """Two runs, each as far from the truth as the model's own conditioning makes it."""
    limit = proof.tolerance(proof.precisions[0])
    found = apart(one.gradients, other.gradients, elements)
    compared = [
        Figure(
            figure.tensor, figure.error, max(figure.limit, 2 * OWN_ERRORS * proof.noise.get(kind(figure.tensor), 0.0))
        )
        for figure in figures(found, limit, floor=True)
    ]
    whole = max(limit, 2 * OWN_ERRORS * max(proof.noise.values(), default=0.0))
    compared.append(scalar("loss", one.loss, other.loss, whole))
    compared.append(scalar("norm", one.norm, other.norm, whole))
    return Check.of(name, compared)


def _elements(subject: Subject) -> dict[str, int]:
    """Of each trained tensor of all stages. One gathering."""
    mine = {name: parameter.numel() for name, parameter in subject.parameters().items()}
    return {name: count for part in gathered(mine) for name, count in part.items()}


def _checkpointing(proof: Proof, subject: Subject, base: _Taken) -> Check:
    name = "activation checkpointing on = off"
    if not getattr(subject.model, "supports_gradient_checkpointing", False):
        return Check.not_run(name, f"not supported by {proof.setup.model_config.model_type}")
    checkpoint_blocks(subject.model)
    recomputed = _taken(subject, subject.batches(proof.setup.steps[0]))
    disable = getattr(subject.model, "activation_checkpointing_disable", None)
    (disable or subject.model.gradient_checkpointing_disable)()
    return _same(proof, name, recomputed, base, _elements(subject))


def _accumulation(proof: Proof, subject: Subject) -> Check:
    """All rows of a rank at once, and in four parts, with very uneven numbers of targets."""
    ranks = subject.mesh.layout.data_ranks
    data = proof.setup.steps[0].repeated(4 * ranks).uneven()
    mine = data.rows() // ranks
    once, parts = subject.batches(data, micro=mine), subject.batches(data, micro=mine // 4)
    name = f"accumulation {len(once.micro_batches)} = {len(parts.micro_batches)}, uneven targets"
    return _same(proof, name, _taken(subject, parts), _taken(subject, once), _elements(subject))


def _packing(proof: Proof, subject: Subject) -> Check:
    name = "packed = separate samples"
    if not proof.setup.packs:
        return Check.not_run(name, f"{proof.setup.model_config.model_type} cannot keep packed samples apart")
    data = proof.setup.steps[0]
    data = data.with_length(max(data.max_length, 2 * int(data.dataset.lengths.max())))
    packed = _taken(subject, subject.batches(data, packing=True))
    separate = _taken(subject, subject.batches(data, packing=False))
    return _same(proof, name, packed, separate, _elements(subject))


def _expert_parallel(proof: Proof, base: _Taken, elements: dict[str, int]) -> Iterator[Check]:
    """Other sizes of ep, with the same data ranks."""
    setup = proof.setup
    layout = setup.layout
    for size in EP_SIZES:
        name = f"ep {layout.ep} = ep {size}"
        if size == layout.ep:
            continue
        sizes = {axis: layout.size(axis) for axis in ("pp", "replicate", "fsdp", "cp", "tp")}
        try:
            parallel = setup.config.parallel.model_copy(update={"ep": size, **sizes})
            variant = resolve_layout(parallel, layout.world_size, setup.anatomy.num_experts)
            for spec in setup.anatomy.experts:
                expert_shard_dim(spec, variant)
        except InputError as error:
            yield Check.not_run(name, str(error).split(";")[0])
            continue
        subject = job.build(setup, precision=proof.precisions[0], parallel=parallel, checkpointing=False)
        yield _same(proof, name, base, _taken(subject, subject.batches(setup.steps[0])), elements)
        del subject
        gc.collect()


def check_resume(proof: Proof, scratch: Path) -> Check:
    """A run that stops, saves and goes on in a new job ends with the bits of one that does not stop."""
    setup, precision = proof.setup, proof.setup.config.precision
    name = f"{label(precision)}: resumed = uninterrupted, bit for bit"
    subject = job.build(setup, precision=precision)
    half = len(setup.steps) - 1
    for data in setup.steps[:half]:
        _step(subject, data)
    save_checkpoint(subject.model, subject.optimizer, scratch / "checkpoint", step=half)
    _step(subject, setup.steps[half])
    whole = _prints(subject)
    del subject
    gc.collect()
    resumed = job.build(setup, precision=precision)
    load_checkpoint(resumed.model, resumed.optimizer, scratch / "checkpoint")
    if proof.tamper_resumed is not None:
        proof.tamper_resumed(resumed)
    _step(resumed, setup.steps[half])
    mine = _prints(resumed)
    different = sorted(key for key in whole.keys() | mine.keys() if whole.get(key) != mine.get(key))
    everyone = [key for part in gathered(different) for key in part]
    if dist.get_rank() == 0:
        shutil.rmtree(scratch / "checkpoint")
    note = "weights and moments" if not everyone else f"{everyone[0]} differs, and {len(everyone) - 1} more"
    return Check.that(name, not everyone, sum(gathered(len(whole))), note)


def _step(subject: Subject, data: StepData) -> None:
    job.backward(subject, subject.batches(data))
    job.clip(subject, subject.setup.config.optim.max_grad_norm)
    job.update(subject)


def _prints(subject: Subject) -> dict[str, int]:
    """A fingerprint of each weight and each moment that this rank holds."""
    tensors = dict(all_tensors(subject))
    for name, parameter in subject.parameters().items():
        for slot, value in subject.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{slot} of {name}"] = value
    held = ((name, local_tensor(tensor)) for name, tensor in tensors.items())
    return {name: fingerprint(local) for name, local in held if local.numel()}
