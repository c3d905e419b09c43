"""Run one training, from a configuration to `output_dir/model`: check, prepare, load, train, save.

Every rank calls it, under torchrun or our own launcher, before the process group exists. For an elastic start rank 0
chooses the layout of ranks, and all get the same.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from expertmesh.config import Config
from expertmesh.distributed.all_ranks import from_rank_0, raise_on_all_ranks
from expertmesh.experts.install import close_library
from expertmesh.io.directory import wait_until_seen
from expertmesh.io.terminal import plural
from expertmesh.training.control import Control
from expertmesh.training.lock import NAME, RunLock
from expertmesh.training.loop import TrainingLoop
from expertmesh.training.reporting.record import ChosenLayout
from expertmesh.training.reporting.reporter import open_reporter, start_reports
from expertmesh.training.reporting.start import Predict, out_of_memory, print_plan
from expertmesh.training.run_state import load_state, open_checkpoints, push_result, save_result
from expertmesh.training.startup.model_check import Checked
from expertmesh.training.startup.preflight import preflight, refuse_weights
from expertmesh.training.startup.prepare import begin, prepare

log = logging.getLogger(__name__)
ChooseLayout = Callable[[Config, int, Callable[[Config, int], Checked]], ChosenLayout]


def train(
    config: Config,
    control: Control | None = None,
    predict: Predict | None = None,
    arrange: ChooseLayout | None = None,
) -> None:
    """Train as `config` says and save `output_dir/model`, or `output_dir/adapter` with `lora`.

    Args:
        predict: Predicts on rank 0 what a step will take; printed and recorded.
        arrange: Chooses the layout of ranks for which `config` may not be written.

    Raises:
        ExpertmeshError: Those of config.errors.
        Stopped: The run was requested to stop, and has saved.

    Collectives: every rank calls it.
    """
    control = control or Control()
    begin(config, control)
    if arrange is not None:
        config = with_chosen_layout(config, arrange)
    with raise_on_all_ranks("checking the configuration"):
        checked = check(config)
    try:
        _train(config, control, checked, predict)
        push_result(config)
    except torch.OutOfMemoryError as error:
        # Planned anew: a model that is sharded already cannot be planned.
        forecast = None if predict is None else predict(config, check(config))
        raise out_of_memory(error, control.progress.status(), forecast) from error


def _train(config: Config, control: Control, checked: Checked, predict: Predict | None) -> None:
    is_main = dist.get_rank() == 0
    with ExitStack() as stack:
        # 1. Own output_dir, and predict a step, which may change the order of its micro-batches.
        with raise_on_all_ranks("locking output_dir"):
            if is_main:
                stack.enter_context(RunLock(Path(config.output_dir), control.launch))
        with raise_on_all_ranks("predicting a step"):
            wait_until_seen(Path(config.output_dir, NAME))  # else it is not shared
            forecast = predict(config, checked) if is_main and predict is not None else None
        checked = checked.in_order(from_rank_0(None if forecast is None else forecast.order))
        # 2. Data, mesh, the step to go on from, and the sharded model: all that may refuse before weights are read.
        run = prepare(config, control, checked)
        if is_main:
            print_plan(run, forecast)
        reporter = stack.enter_context(open_reporter(run))
        # 3. Weights, optimizer and counters, from the model's files or a checkpoint; the records of this start.
        state = load_state(run, control)
        expert_load = start_reports(reporter, run, forecast, state.counters, control.began)
        checkpoints = open_checkpoints(run, state)
        # 4. All steps.
        TrainingLoop(run, state, reporter, expert_load, checkpoints, control).train()
        # 5. The result, on the disk and in object storage.
        control.progress.at(state.counters.step, "saving the result")
        close_library(run.model)
        save_result(run, checkpoints.beside_weights)
        if checkpoints.uploads is not None:
            checkpoints.uploads.finish_with_result()


def check(config: Config) -> Checked:
    """Run `preflight` for this job's ranks; rank 0 checks the weights' files as well, before data are tokenized."""
    checked = preflight(config, dist.get_world_size())
    if dist.get_rank() == 0:
        refuse_weights(checked)
    return checked


def with_chosen_layout(config: Config, arrange: ChooseLayout) -> Config:
    """Return `config` with the layout that `arrange` chooses on rank 0 for this number of ranks.

    Collectives: every rank calls it; one broadcast of an object and one small all-reduce.
    """
    own: ChosenLayout | None = None
    with raise_on_all_ranks("choosing a layout"):
        if dist.get_rank() == 0:
            own = arrange(config, dist.get_world_size(), preflight)
            log.info(f"elastic    {plural(dist.get_world_size(), 'rank')}: {own.reason}")
    found = from_rank_0(own)
    assert found is not None
    mode = found.activation_checkpointing
    batch = {"micro_batch_size": found.micro_batch_size, "activation_checkpointing": mode}
    if mode == "none":
        batch["checkpoint_layers"] = "all"  # another value is refused beside it, also where the run goes on
    return config.model_copy(update={"parallel": found.parallel, "train": config.train.model_copy(update=batch)})
