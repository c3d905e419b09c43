"""Layer 6: what the job saves is what it trained: other tools read the files and give its logits.

After one optimizer step the model is saved and read by plain transformers; of a run with adapters the adapter is read
by stock PEFT on its base, and merged and read by plain transformers. Each time the logits on rank 0's samples must be
the job's. A model that does not fit into one process is read back one block at a time instead.
"""

import gc
import importlib.util
import os
import shutil
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
import torch.distributed as dist
from torch import Tensor
from transformers.utils import logging as transformers_logging

from expertmesh.adapters.save import save_adapter
from expertmesh.config.errors import ExpertmeshError, IntegrityError
from expertmesh.distributed.all_ranks import from_rank_0, raise_on_all_ranks
from expertmesh.state.stage_view import full_model
from expertmesh.verification import subject as job
from expertmesh.verification.compare import OWN_ERRORS, Distance, distances, figures, gathered
from expertmesh.verification.layers.update import free_memory
from expertmesh.verification.proof import Proof
from expertmesh.verification.reference.model import Batch, Reference
from expertmesh.verification.result import Check
from expertmesh.verification.seen import Places, forward
from expertmesh.verification.subject import Subject
from expertmesh.weights.save import save_model

_SHARE_OF_MEMORY = 0.5
SAVED = "saved model in plain transformers"
ADAPTER = "adapter in stock PEFT"
MERGED = "merged adapter in plain transformers"
_OF_A_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check_artifacts(proof: Proof, scratch: Path, *, merges: bool = True) -> list[Check]:
    """Every rank calls it. Saves into `scratch`, which all ranks see, and removes it again.

    Without `merges` an adapter is merged only if stock PEFT is not there to read it.
    """
    proof.forget()
    gc.collect()
    setup, precision = proof.setup, proof.precisions[0]
    subject = job.build(setup, precision=precision)
    data = setup.steps[0]
    job.backward(subject, subject.batches(data))
    job.clip(subject, setup.config.optim.max_grad_norm)
    job.update(subject)
    logits = forward(subject, data, Places(0)).tensors["logits"]
    if setup.config.lora is None:
        why = "this run trains no adapters"
        return [
            _model(proof, subject, logits, scratch),
            Check.not_run(ADAPTER, why),
            Check.not_run(MERGED, why),
        ]
    return [Check.not_run(SAVED, "this run saves adapters"), *_adapters(proof, subject, logits, scratch, merges)]


def _model(proof: Proof, subject: Subject, logits: Tensor, scratch: Path) -> Check:
    directory = scratch / "model"
    save_model(subject.model, directory)
    if proof.tamper_files is not None and subject.mesh.rank == 0:
        proof.tamper_files(directory)
    if _fits(subject):
        found = _compared(proof, subject, logits, lambda: _plain(proof, directory))
        check = _check(proof, SAVED, found)
    else:
        setup = replace(proof.setup, directory=directory, dropped=None)
        expected = Reference(setup, subject, proof.judge(subject.precision)).run(proof.setup.steps[0])
        distance = distances(
            {"logits": logits}, {"logits": expected.seen.tensors["logits"]}, lambda name: subject.speaks
        )
        check = Check.of(SAVED, figures(distance, _limit(proof)), "read one block at a time, as it fits no process")
    _remove(directory)
    return check


def _adapters(proof: Proof, subject: Subject, logits: Tensor, scratch: Path, merges: bool) -> list[Check]:
    adapter, merged = scratch / "adapter", scratch / "merged"
    save_adapter(subject.model, adapter)
    if proof.tamper_files is not None and subject.mesh.rank == 0:
        proof.tamper_files(adapter)
    checks = []
    setup = proof.setup
    if not _fits(subject):
        why = "the unsharded model does not fit into one process"
        checks += [Check.not_run(ADAPTER, why), Check.not_run(MERGED, why)]
    else:
        if importlib.util.find_spec("peft") is None:
            checks.append(Check.not_run(ADAPTER, "peft is not installed"))
        else:
            found = _compared(proof, subject, logits, lambda: _with_peft(proof, adapter))
            checks.append(_check(proof, ADAPTER, found))
        if not merges and checks[0].status != "not run":
            checks.append(Check.not_run(MERGED, "the adapter was read by PEFT"))
        elif setup.dropped is not None:
            checks.append(Check.not_run(MERGED, "merging needs the whole model; leave --layers out"))
        elif subject.precision.params == "float64":
            checks.append(Check.not_run(MERGED, "merging writes float32 at most"))
        else:
            found = _compared(proof, subject, logits, lambda: _merged(proof, adapter, merged))
            checks.append(_check(proof, MERGED, found))
    _remove(adapter)
    _remove(merged)
    return checks


def _compared(proof: Proof, subject: Subject, logits: Tensor, load: Any) -> tuple[float, float, int] | str:
    """On rank 0: squared differences of logits, squared expected ones, elements; or why it cannot be loaded."""
    result: tuple[float, float, int] | str | None = None
    with raise_on_all_ranks("reading what was saved"):
        if subject.mesh.rank == 0:
            try:
                with _quiet():
                    model = load()
            except ExpertmeshError as error:
                result = str(error)
            else:
                result = _distance(proof, subject, model, logits)
                del model
                gc.collect()
    first: tuple[float, float, int] | str = gathered(result)[0]
    return first


@torch.no_grad()
def _distance(proof: Proof, subject: Subject, model: Any, logits: Tensor) -> tuple[float, float, int]:
    placed = proof.setup.steps[0].placed(subject.mesh.layout, 0)
    batch = Batch.of(placed, torch.device("cpu"))
    output = model.eval()(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits
    theirs = Places(0).pick("logits", batch.own(output)).double()
    ours = logits.double()
    return float((ours - theirs).square().sum()), float(ours.square().sum()), ours.numel()


def _check(proof: Proof, name: str, found: tuple[float, float, int] | str) -> Check:
    if isinstance(found, str):
        return Check(name, "fail", note=found)
    return Check.of(name, figures({"logits": Distance(*found)}, _limit(proof)))


def _limit(proof: Proof) -> float:
    """Two ways of computing fp32 logits, each as far from the truth as the model's conditioning makes it."""
    return max(proof.tolerance(proof.precisions[0]), 2 * OWN_ERRORS * proof.noise.get("logits", 0.0))


def _plain(proof: Proof, directory: Path, config: Any = None) -> Any:
    """transformers' own class and loading, with its eager experts."""
    kind = type(proof.setup.meta_model(torch.float32, fuse=False))
    options: dict[str, Any] = {} if config is None else {"config": config}
    model = kind.from_pretrained(directory, dtype=proof.judge(proof.precisions[0]), **options)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def _with_peft(proof: Proof, adapter: Path) -> Any:
    peft: Any = importlib.import_module("peft")
    base = _plain(proof, proof.setup.directory, deepcopy(proof.setup.model_config))
    return peft.PeftModel.from_pretrained(base, adapter)


def _merged(proof: Proof, adapter: Path, target: Path) -> Any:
    """By the command that a user would give, in a process of its own: merging is for one process."""
    config = proof.setup.config.model
    command = [sys.executable, "-m", "expertmesh", "merge", str(adapter), "--output", str(target)]
    command += ["--base", str(proof.setup.directory), "--dtype", "float32"]
    command += ["--trust-remote-code"] if config.trust_remote_code else []
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_JOB}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise IntegrityError(f"expertmesh merge ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return _plain(proof, target)


def _fits(subject: Subject) -> bool:
    """Whether rank 0 can hold the whole model, as it says on all ranks."""
    elements = sum(parameter.numel() for parameter in full_model(subject.model).parameters())
    size = 8 if subject.precision.params == "float64" else 4
    return int(from_rank_0(str(free_memory()))) * _SHARE_OF_MEMORY > 2 * elements * size


def _remove(directory: Path) -> None:
    if dist.get_rank() == 0:
        shutil.rmtree(directory, ignore_errors=True)


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
