"""The last relation of layer 5: a run that is saved and resumed in a new job ends with the same bits as without that.

It runs in the configured precision and compares weights and moments bit for bit.
"""

import gc
import shutil

import torch.distributed as dist

from expertmesh.checkpoint.interface import load_checkpoint, save_checkpoint
from expertmesh.checkpoint.state import fingerprint
from expertmesh.experts.install import close_library
from expertmesh.state.shards import local_tensor
from expertmesh.verification.build import build
from expertmesh.verification.compare import gather
from expertmesh.verification.job import ProvenJob
from expertmesh.verification.proof import Proof, label
from expertmesh.verification.result import Check


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
    everyone = [key for part in gather(different) for key in part]
    if dist.get_rank() == 0:
        shutil.rmtree(directory)
    note = "weights and moments" if not everyone else f"{everyone[0]} differs, and {len(everyone) - 1} more"
    return [Check.that(name, not everyone, sum(gather(len(expected))), note)]


def _fingerprints(job: ProvenJob) -> dict[str, int]:
    """Return the fingerprint of each weight and each moment that this rank holds, by name."""
    tensors = {**job.tensors(), **job.optimizer_tensors()}
    held = {name: local_tensor(tensor) for name, tensor in tensors.items()}
    return {name: fingerprint(local) for name, local in held.items() if local.numel()}
