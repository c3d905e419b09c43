"""Load and save what a run trains and steps: weights, optimizer, schedule and counters."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from expertmesh.adapters.save import save_adapter
from expertmesh.adapters.start import start as start_adapters
from expertmesh.checkpoint.interface import load_directory
from expertmesh.model import load_weights
from expertmesh.training.optimizers.build import build_optimizer, build_schedule
from expertmesh.training.publish import check_hub, write_card
from expertmesh.training.reporting.weights import adapter_lines, dtype_text, report_loaded, report_resumed, saved_lines
from expertmesh.training.resume import Counters, read_counters
from expertmesh.training.startup.output_dir import ADAPTER, MODEL
from expertmesh.training.startup.prepare import Prepared, say
from expertmesh.weights.companions import CopiedFiles
from expertmesh.weights.meta_model import materialize
from expertmesh.weights.save import save_model

if TYPE_CHECKING:
    from expertmesh.training.control import Control

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunState:
    """The state beside the model, which is filled in place."""

    optimizer: Optimizer
    schedule: LRScheduler
    counters: Counters


def load_state(run: Prepared, control: "Control") -> RunState:
    """Fill the model from the checkpoint to go on from, or from the weights that training begins with.

    A frozen base always comes from its own files: checkpoints hold the adapters alone, and the base's hash. Every rank
    calls it.
    """
    config, is_main = run.config, run.mesh.rank == 0
    check_hub(config)
    if (run.start is None and run.weights is None) or config.lora is not None:
        seed = run.checked.weights_seed
        say(control, "loading weights" if seed is None else "drawing weights")
        loaded, audited = load_weights(run.model, run.checked.directory, run.mesh, control.audit, seed=seed)
        if is_main and audited is None:
            log.info(f"weights    random, drawn from train.seed {seed}; there are no files to audit them by")
        elif is_main and audited is not None:
            report_loaded(loaded, audited, run.checked.directory, Path(config.output_dir))
        start_adapters(run.model, config.train.seed)
    else:
        materialize(run.model, run.mesh.device)
    if run.weights is not None:
        say(control, "loading the weights of another run's checkpoint")
        step = load_directory(run.model, None, run.weights).step
        torch.manual_seed(config.train.seed + run.mesh.rank)  # generators come with a checkpoint
        if is_main:
            log.info(f"weights    {run.weights}, after step {step}; all else begins anew")
    if (teacher := run.checked.objective.teacher) is not None:
        say(control, "loading the teacher's weights")
        teacher.load(run.mesh, control.audit)
    if run.checked.objective.precomputes:
        say(control, "the reference: log-probabilities of all rows")
        run.checked.objective.give_reference(
            run.model, run.mesh, run.data.datasets, run.batch_layout, run.start, list(run.mismatched())
        )
    compute = getattr(torch, config.precision.compute)
    optimizer, counters = build_optimizer(run.model, config.optim, config.train.seed, compute), Counters()
    if run.start is not None:
        say(control, "loading the checkpoint")
        saved = load_directory(run.model, optimizer, run.start)
        counters = read_counters(run.start, saved.state["counters"], saved.step)
        if is_main:
            report_resumed(run.start, saved.step, run.changes, audit=control.audit == "full" and config.lora is None)
    return RunState(optimizer, build_schedule(optimizer, config.schedule, run.total_steps, counters.step), counters)


def save_result(run: Prepared, tokenizer: CopiedFiles) -> None:
    """Write the trained model, or its adapters alone, and print it. Every rank calls it; rank 0 prints.

    `tokenizer`: on rank 0, the files of the tokenizer, and of a whole model's processor.
    """
    config, directory = run.config, Path(run.config.output_dir)
    metrics = f"metrics in {directory / 'metrics.jsonl'}"
    if config.lora is not None:
        adapter = save_adapter(run.model, directory / ADAPTER, tokenizer=tokenizer)
        lines = [*adapter_lines(adapter), f"saved {directory / ADAPTER}; {metrics}"]
    else:
        saved = save_model(run.model, directory / MODEL, tokenizer=tokenizer, dtype=config.save.dtype)
        lines = [*saved_lines(saved), f"saved {directory / MODEL} in {dtype_text(saved)}; {metrics}"]
    if run.mesh.rank == 0:
        write_card(config, directory / (MODEL if config.lora is None else ADAPTER))
        log.info("\n".join(lines))
