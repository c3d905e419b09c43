"""What others make of the files that a job saved: plain transformers, stock PEFT, and PEFT's adapter once it is merged.

In one process, without the job's ranks, but for models that do not fit into one.
"""

import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from expertmesh.config.errors import IntegrityError
from expertmesh.verification.forward_record import kept_tokens
from expertmesh.verification.job import Job
from expertmesh.verification.proof import Proof
from expertmesh.verification.reference import unsharded
from expertmesh.verification.reference.model import Reference

_OF_A_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@torch.no_grad()
def logits_of(proof: Proof, model: Any) -> Tensor:
    """On rank 0's samples of the first step."""
    samples = [(placed.input_ids, placed.labels) for placed in proof.setup.steps[0].placed(proof.setup.layout, 0)]
    batch = unsharded.Batch.of(samples)
    return kept_tokens(batch.real_tokens(unsharded.forward(model.eval(), batch)[0]))


def logits_by_block(proof: Proof, job: Job, directory: Path) -> Tensor:
    """Of a saved model that fits no process: on this data rank's samples, every rank calls it."""
    saved = replace(job, setup=replace(proof.setup, directory=directory, dropped=None))
    return Reference(saved, proof.judge(job.precision)).run(proof.setup.steps[0]).forward.tensors["logits"]


def plain_model(proof: Proof, directory: Path, config: Any = None) -> Any:
    """transformers' own class and loading, with its eager experts."""
    model_class = type(proof.setup.meta_model(torch.float32, fuse=False))
    options: dict[str, Any] = {} if config is None else {"config": config}
    with _quiet():
        loaded = model_class.from_pretrained(directory, dtype=proof.judge(proof.precisions[0]), **options)
    if hasattr(loaded, "set_experts_implementation"):
        loaded.set_experts_implementation("eager")
    return loaded


def with_peft(proof: Proof, adapter: Path) -> Any:
    with _quiet():
        peft: Any = importlib.import_module("peft")
    base = plain_model(proof, proof.setup.directory, deepcopy(proof.setup.model_config))
    with _quiet():
        return peft.PeftModel.from_pretrained(base, adapter)


def merged_adapter(proof: Proof, adapter: Path, target: Path) -> Any:
    """By the command that a user would give, in a process of its own: merging is for one process."""
    config = proof.setup.config.model
    command = [sys.executable, "-m", "expertmesh", "merge", str(adapter), "--output", str(target)]
    command += ["--base", str(proof.setup.directory), "--dtype", "float32"]
    command += ["--trust-remote-code"] if config.trust_remote_code else []
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_JOB}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise IntegrityError(
            f"expertmesh merge ended with {done.returncode}: {done.stderr.strip()[-500:]}", key="verify.merge-failed"
        )
    return plain_model(proof, target)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars, reports and deprecations of other libraries."""
    shown, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # layers that --layers leaves out would be reported as unexpected
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT's, of names that transformers has renamed
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()
