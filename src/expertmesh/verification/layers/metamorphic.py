"""Layer 5: check that ep, accumulation, packing, activation checkpointing and resuming do not change the result.

Each relation runs the same step on the same data in two ways, in fp32, and compares the loss, the gradient norm and
every gradient. A relation that is impossible on these ranks, or with this model or run, is reported as not run. A run
that is saved and resumed in a new job, in the configured precision, must end with the same bits as without that.
"""

import gc
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor

from expertmesh.checkpoint.interface import load_checkpoint, save_checkpoint
from expertmesh.checkpoint.state import fingerprint
from expertmesh.config.errors import InputError
from expertmesh.data import Step
from expertmesh.distributed.all_ranks import gather_objects
from expertmesh.distributed.layout import resolve_layout
from expertmesh.experts.install import close_library
from expertmesh.experts.lora_state import adapter_state
from expertmesh.parallel.checkpointing import checkpointed_blocks, recompute_blocks
from expertmesh.parallel.pipeline import layers_of
from expertmesh.parallel.refusals import expert_shard_dim
from expertmesh.state.model_view import ModelView, stage_names
from expertmesh.state.shards import local_tensor
from expertmesh.step.forward_backward import Order
from expertmesh.verification.compare import OWN_ERRORS, distances, figures, scalar, without_numbers
from expertmesh.verification.job import Boxes, ProvenJob, build
from expertmesh.verification.proof import Proof, label
from expertmesh.verification.result import Check

EP_SIZES = (1, 2, 4)


def check_metamorphic(proof: Proof) -> list[Check]:
    """Run each relation in two ways and compare the results.

    Collectives: every rank calls it; those of building the job several times and of its steps.
    """
    proof.free_jobs()
    job = build(proof.setup, precision=proof.exact.precision, checkpointing=False)
    base = _run(job, job.batches(proof.setup.steps[0]))
    checks = [_checkpointing(proof, job, base), *_micro_batches(proof, job), _packing(proof, job)]
    boxes = job.boxes()
    del job
    gc.collect()
    return [*checks, *_expert_parallel(proof, base, boxes), *check_resume(proof)]


@dataclass(frozen=True, slots=True)
class _StepResult:
    """The results of one way to run a step."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    """The parts of the gradients for which this rank is responsible, on the host, by name."""


def _run(job: ProvenJob, step: Step, boxes: Boxes | None = None, order: Order | None = None) -> _StepResult:
    """Run forward and backward of a step and return its results.

    Args:
        boxes: The parts of the gradients to return, those of another layout; None: this rank's in the job's layout.
        order: The order of the micro-batches instead of the run's.

    Collectives: every rank calls it; those of the job's `backward`, `clip` and, with `boxes`, `parts`.
    """
    losses, gradients = job.backward(step, order), job.gradients()
    own = {name: gradients[name].cpu() for name in job.boxes()} if boxes is None else job.parts(gradients, boxes)
    norm = job.clip(None)
    job.model.zero_grad(set_to_none=True)
    return _StepResult(losses.loss, norm, own)


def _same(proof: Proof, name: str, one: _StepResult, other: _StepResult) -> Check:
    """Compare two runs, each of which may have the error that the model's conditioning causes.

    Collectives: every rank calls it; one all-gather of objects.
    """
    limit, compared = proof.exact.limit, []
    for figure in figures(distances(one.gradients, other.gradients, True), limit, floor=True):
        own_error = proof.own_error.get(without_numbers(figure.tensor), 0.0)
        compared.append(replace(figure, limit=max(figure.limit, 2 * OWN_ERRORS * own_error)))
    whole = max(limit, 2 * OWN_ERRORS * max(proof.own_error.values(), default=0.0))
    compared += [scalar("loss", one.loss, other.loss, whole), scalar("norm", one.norm, other.norm, whole)]
    return Check.of(name, compared)


def _checkpointing(proof: Proof, job: ProvenJob, base: _StepResult) -> Check:
    name = "activation checkpointing on = off"
    if not getattr(job.model, "supports_gradient_checkpointing", False):
        return Check.not_run(name, f"not supported by {proof.setup.model_config.model_type}")
    anatomy = proof.setup.anatomy
    blocks = checkpointed_blocks(ModelView(job.model).full, anatomy, "full", "all")
    here = list(stage_names(job.model, anatomy.blocks))
    recompute_blocks(job.model, "full", here, blocks, adapter_state(job.model))
    recomputed = _run(job, job.batches(proof.setup.steps[0]))
    disable = getattr(job.model, "activation_checkpointing_disable", None)
    (disable or job.model.gradient_checkpointing_disable)()
    return _same(proof, name, recomputed, base)


def _micro_batches(proof: Proof, job: ProvenJob) -> Iterator[Check]:
    """Compare one micro-batch with four of uneven targets, and these four one by one with block by block."""
    ranks = job.mesh.layout.data_ranks
    data = proof.setup.steps[0].repeated(4 * ranks).uneven()
    mine = len(data.rows) // ranks
    once, parts = (job.batches(data, micro_batch_size=size) for size in (mine, mine // 4))
    name = f"accumulation {len(once.micro_batches)} = {len(parts.micro_batches)}, uneven targets"
    yield _same(proof, name, _run(job, parts), _run(job, once))
    name = "by layer = by micro-batch"
    if proof.setup.steps[0].dataset.has_images:
        yield Check.not_run(name, "samples have images")
        return
    try:
        layers_of(job.model)
    except InputError as error:
        yield Check.not_run(name, str(error).split(";")[0])
    else:
        by_layer, one_by_one = (_run(job, parts, order=Order(by_layer)) for by_layer in (True, False))
        yield _same(proof, name, by_layer, one_by_one)


def _packing(proof: Proof, job: ProvenJob) -> Check:
    name = "packed = separate samples"
    if proof.setup.steps[0].minimised.of_responses:
        return Check.not_run(name, "responses are in rows of their own")
    if proof.setup.steps[0].dataset.has_images:
        return Check.not_run(name, "samples have images")
    if not proof.setup.packs:
        return Check.not_run(name, f"{proof.setup.model_config.model_type} cannot keep packed samples apart")
    data = proof.setup.steps[0]
    length = max(data.form.max_length, 2 * int(data.dataset.lengths.max()))
    steps = (job.batches(data, max_length=length, packing=packing) for packing in (True, False))
    packed, separate = (_run(job, step) for step in steps)
    return _same(proof, name, packed, separate)


def _expert_parallel(proof: Proof, base: _StepResult, boxes: Boxes) -> Iterator[Check]:
    """Yield a check for each other size of ep, with the same data ranks."""
    setup, layout = proof.setup, proof.setup.layout
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
        job = build(setup, precision=proof.exact.precision, parallel=parallel, checkpointing=False)
        yield _same(proof, name, base, _run(job, job.batches(setup.steps[0]), boxes))
        del job
        gc.collect()


def check_resume(proof: Proof) -> list[Check]:
    """Compare a resumed run with an uninterrupted one, bit for bit.

    Collectives: every rank calls it; those of building the job twice, of its steps and of a checkpoint, and two
    all-gathers of objects.
    """
    setup, precision, directory = proof.setup, proof.setup.config.precision, proof.scratch / "checkpoint"
    name = f"{label(precision)}: resumed = uninterrupted, bit for bit"
    *first, last = setup.steps
    proof.free_jobs()
    job = build(setup, precision=precision)
    for data in first:
        job.train_step(data)
    save_checkpoint(job.model, job.optimizer, directory, step=len(first))
    job.train_step(last)
    expected = _fingerprints(job)
    close_library(job.model)
    del job
    gc.collect()
    resumed = build(setup, precision=precision)
    load_checkpoint(resumed.model, resumed.optimizer, directory)
    proof.hooks.resumed(resumed)
    resumed.train_step(last)
    got = _fingerprints(resumed)
    close_library(resumed.model)
    different = sorted(key for key in expected.keys() | got.keys() if expected.get(key) != got.get(key))
    everyone = [key for part in gather_objects(different) for key in part]
    if dist.get_rank() == 0:
        shutil.rmtree(directory)
    note = "weights and moments" if not everyone else f"{everyone[0]} differs, and {len(everyone) - 1} more"
    return [Check.that(name, not everyone, sum(gather_objects(len(expected))), note)]


def _fingerprints(job: ProvenJob) -> dict[str, int]:
    """Return the fingerprint of each weight and each moment that this rank holds, by name."""
    tensors = {**job.tensors(), **job.optimizer_tensors()}
    held = {name: local_tensor(tensor) for name, tensor in tensors.items()}
    return {name: fingerprint(local) for name, local in held.items() if local.numel()}
