"""Layer 6: check that the job saves what it trained: other tools read the files and compute the same logits.

After one optimizer step, plain transformers loads the saved model. In a run with adapters, stock PEFT loads the adapter
on its base, and plain transformers loads the merged model. Each time, the logits on rank 0's samples must agree with
the job's. A model that does not fit into one process is read one block at a time instead.
"""

import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils import logging as transformers_logging

from expertmesh.adapters.save import save_adapter
from expertmesh.config.errors import ExpertmeshError, IntegrityError
from expertmesh.distributed.all_ranks import gather_objects, raise_on_all_ranks
from expertmesh.verification.compare import OWN_ERRORS, Distance, distances, figures, squares
from expertmesh.verification.forward_record import kept_tokens, record_forward
from expertmesh.verification.job import ProvenJob, build
from expertmesh.verification.proof import Proof
from expertmesh.verification.reference import unsharded
from expertmesh.verification.reference.model import Reference
from expertmesh.verification.result import Check
from expertmesh.weights.load import read_whole
from expertmesh.weights.save import save_model

_OF_A_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SAVED = "saved model in plain transformers"
ADAPTER = "adapter in stock PEFT"
MERGED = "merged adapter in plain transformers"


def check_artifacts(proof: Proof, *, merges: bool = True) -> list[Check]:
    """Train one step, save, and compare the logits of the saved model with the job's.

    It saves into the scratch directory, and removes the files afterwards.

    Args:
        merges: If False, an adapter is merged only if PEFT is not installed.

    Collectives: every rank calls it; those of building a job, a training step, a recorded forward and saving, and a few
    all-gathers of objects.
    """
    proof.free_jobs()
    job = build(proof.setup, precision=proof.exact.precision)
    job.train_step(proof.setup.steps[0])
    logits = record_forward(job, proof.setup.steps[0]).tensors["logits"]
    if proof.setup.config.lora is None:
        why = "this run trains no adapters"
        return [_model(proof, job, logits), Check.not_run(ADAPTER, why), Check.not_run(MERGED, why)]
    return [Check.not_run(SAVED, "this run saves adapters"), *_adapters(proof, job, logits, merges)]


def _model(proof: Proof, job: ProvenJob, logits: Tensor) -> Check:
    with _saved(proof, job, "model") as directory:
        if proof.no_memory_for(2) is None:
            return _compared(proof, SAVED, job, logits, lambda: _plain_model(proof, directory))
        # Only one block at a time is in memory.
        saved = replace(job, setup=replace(proof.setup, directory=directory, dropped=None, weights_seed=None))
        read = Reference(saved, proof.exact.judge).run(proof.setup.steps[0]).forward.tensors["logits"]
        distance = distances({"logits": logits}, {"logits": read}, job.answers_for_rows)
        return Check.of(SAVED, figures(distance, _limit(proof)), "read one block at a time: too large for one process")


def _adapters(proof: Proof, job: ProvenJob, logits: Tensor, merges: bool) -> list[Check]:
    with _saved(proof, job, "adapter") as adapter:
        if proof.no_memory_for(2) is not None:
            why = "the unsharded model does not fit into one process"
            return [Check.not_run(ADAPTER, why), Check.not_run(MERGED, why)]
        if importlib.util.find_spec("peft") is None:
            read = Check.not_run(ADAPTER, "peft is not installed")
        else:
            read = _compared(proof, ADAPTER, job, logits, lambda: _with_peft(proof, job, adapter))
        if not merges and read.status != "not run":
            merged = Check.not_run(MERGED, "the adapter was read by PEFT")
        elif proof.setup.dropped is not None:
            merged = Check.not_run(MERGED, "merging needs the whole model; leave --layers out")
        elif job.precision.params == "float64":
            merged = Check.not_run(MERGED, "merging writes float32 at most")
        else:
            target = proof.scratch / "merged"
            merged = _compared(proof, MERGED, job, logits, lambda: _merged_adapter(proof, adapter, target))
        return [read, merged]


@contextmanager
def _saved(proof: Proof, job: ProvenJob, name: str) -> Iterator[Path]:
    """Save the trained model or its adapter, and remove the directory after the block.

    Collectives: every rank enters it; those of saving.
    """
    directory = proof.scratch / name
    if name == "adapter":
        save_adapter(job.model, directory)
    else:
        save_model(job.model, directory, dtype=None)
    if job.mesh.rank == 0:
        proof.hooks.saved(directory)
    yield directory
    if dist.get_rank() == 0:
        for path in (directory, proof.scratch / "merged"):
            shutil.rmtree(path, ignore_errors=True)


def _compared(proof: Proof, name: str, job: ProvenJob, logits: Tensor, load: Callable[[], Any]) -> Check:
    """Compare the logits of the model that rank 0 loads with `logits`, those of the job.

    Collectives: every rank calls it; one small all-reduce, and one all-gather of objects.
    """
    found: Distance | str = ""
    with raise_on_all_ranks("reading what was saved"):
        if job.mesh.rank == 0:
            try:
                loaded = load()
            except ExpertmeshError as error:
                found = str(error)
            else:
                data = proof.setup.steps[0]
                placed = data.placed(proof.setup.layout, 0)
                batch = unsharded.PaddedSamples.of([(each.input_ids, each.labels) for each in placed])
                batch = batch.with_images(data, placed)
                with torch.no_grad():
                    read = kept_tokens(batch.real_tokens(unsharded.forward(loaded.eval(), batch)[0]))
                found = Distance(*squares(read, logits))
                del loaded
                gc.collect()
    found = gather_objects(found)[0]
    if isinstance(found, str):
        return Check(name, "fail", note=found)
    return Check.of(name, figures({"logits": found}, _limit(proof)))


def _limit(proof: Proof) -> float:
    """Return the limit for two results in fp32, each of which has the error that the model's conditioning causes."""
    return max(proof.exact.limit, 2 * OWN_ERRORS * proof.own_error.get("logits", 0.0))


def _plain_model(proof: Proof, directory: Path, config: Any = None) -> Any:
    """Load a model with transformers' class and loader, with eager experts."""
    model_class = type(proof.setup.meta_model(torch.float32, fuse=False))
    options: dict[str, Any] = {} if config is None else {"config": config}
    with _quiet():
        loaded = model_class.from_pretrained(directory, dtype=proof.exact.judge, **options)
    if hasattr(loaded, "set_experts_implementation"):
        loaded.set_experts_implementation("eager")
    return loaded


def _with_peft(proof: Proof, job: ProvenJob, adapter: Path) -> Any:
    """Load the adapter with stock PEFT on the base that it was trained on, with the rounding of quantised experts."""
    with _quiet():
        peft: Any = importlib.import_module("peft")
    if hasattr(proof.setup.model_config, "quantization_config"):
        # transformers' loader keeps the values of codes quantised, or reads some formats wrong.
        base = proof.setup.meta_model(proof.exact.judge, fuse=False)
        read_whole(base, proof.setup.directory)
        if hasattr(base, "set_experts_implementation"):
            base.set_experts_implementation("eager")
    else:
        base = _plain_model(proof, proof.setup.directory, deepcopy(proof.setup.model_config))
    unsharded.round_frozen(base, job.model)
    with _quiet():
        return peft.PeftModel.from_pretrained(base, adapter)


def _merged_adapter(proof: Proof, adapter: Path, target: Path) -> Any:
    """Merge the adapter with the command that a user would run, and load the result.

    It runs in a separate process, because merging is for one process.

    Raises:
        IntegrityError: If the command fails.
    """
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
    merged = _plain_model(proof, target)
    if proof.setup.config.objective.facts.rewards:  # random data are padded otherwise than by the tokenizer
        merged.config.pad_token_id = proof.setup.model_config.get_text_config().pad_token_id
    return merged


@contextmanager
def _quiet() -> Iterator[None]:
    """Switch off the progress bars, reports and deprecation warnings of other libraries inside the block."""
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
