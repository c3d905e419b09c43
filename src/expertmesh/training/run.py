"""Run one training, from a configuration to `output_dir/model`: check, prepare, load, train, save.

Every rank calls it, under torchrun or our own launcher, before the process group exists. For an elastic start rank 0
chooses the layout of ranks, and all get the same.
"""

import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from expertmesh.config import Config, ParallelConfig
from expertmesh.distributed.all_ranks import from_rank_0, object_from_rank_0, raise_on_all_ranks
from expertmesh.io.terminal import plural
from expertmesh.training.checkpoints import open_checkpoints
from expertmesh.training.control import Control
from expertmesh.training.evaluation import Evaluation
from expertmesh.training.lock import RunLock, wait_until_held
from expertmesh.training.loop import TrainingLoop
from expertmesh.training.publish import push_result
from expertmesh.training.reporting.plan_lines import Predict, out_of_memory, print_plan
from expertmesh.training.reporting.record import Arrangement
from expertmesh.training.reporting.reporter import open_reporter, start_reports
from expertmesh.training.run_state import load_state, save_result
from expertmesh.training.startup.model_check import Checked
from expertmesh.training.startup.preflight import preflight, refuse_weights
from expertmesh.training.startup.prepare import begin, prepare

if TYPE_CHECKING:
    from expertmesh.config import Config
    from expertmesh.training.startup.model_check import Checked

log = logging.getLogger(__name__)
Arrange = Callable[[Config, int, Callable[[Config, int], Checked]], Arrangement]


def train(
    config: "Config",
    control: Control | None = None,
    predict: Predict | None = None,
    arrange: Arrange | None = None,
) -> None:
    """Train as `config` says and save `output_dir/model`, or `output_dir/adapter` with `lora`.

    Args:
        predict: Predicts on rank 0 what a step will take; printed and recorded.
        arrange: Chooses the layout of ranks for which `config` may not be written.

    Raises:
        ExpertmeshError: Those of config.errors.
        Stopped: The run was asked to stop, and has saved.

    Collectives: every rank calls it.
    """
    control = control or Control()
    begin(config, control)
    if arrange is not None:
        config = arranged(config, arrange)
    with raise_on_all_ranks("checking the configuration"):
        checked = check(config)
    try:
        _train(config, control, checked, predict)
        push_result(config)
    except torch.OutOfMemoryError as error:
        # Planned anew: what is sharded already cannot be planned with.
        forecast = None if predict is None else predict(config, check(config))
        raise out_of_memory(error, control.progress.status(), forecast) from error


def _train(config: "Config", control: Control, checked: "Checked", predict: Predict | None) -> None:
    is_main = dist.get_rank() == 0
    with ExitStack() as stack:
        with raise_on_all_ranks("locking output_dir"):
            if is_main:
                stack.enter_context(RunLock(Path(config.output_dir), control.launch))
        with raise_on_all_ranks("predicting a step"):
            wait_until_held(Path(config.output_dir))
            forecast = predict(config, checked) if is_main and predict is not None else None
        checked = checked.in_order(object_from_rank_0(None if forecast is None else forecast.order))
        run = prepare(config, control, checked)
        if is_main:
            print_plan(run, forecast)
        reporter = stack.enter_context(open_reporter(run))
        state = load_state(run, control)
        expert_load = start_reports(reporter, run, forecast, state.counters, control.began)
        checkpoints = open_checkpoints(run, state)
        loop = TrainingLoop(
            config=config,
            mesh=run.mesh,
            model=run.model,
            objective=run.checked.objective,
            order=run.checked.order,
            optimizer=state.optimizer,
            schedule=state.schedule,
            train_batches=run.batches,
            evaluation=Evaluation.of(run),
            total_steps=run.total_steps,
            reporter=reporter,
            expert_load=expert_load,
            checkpoints=checkpoints,
            control=control,
            counters=state.counters,
        )
        loop.run()
        control.progress.at(state.counters.step, "saving the result")
        run.close()
        save_result(run, checkpoints.beside_weights)
        if checkpoints.uploads is not None:
            checkpoints.uploads.finish_with_result()


def check(config: Config) -> Checked:
    """Run `preflight` for this job's ranks; rank 0 checks the weights' files as well, before data are tokenized."""
    checked = preflight(config, dist.get_world_size())
    if dist.get_rank() == 0:
        refuse_weights(checked)
    return checked


def arranged(config: Config, arrange: Arrange) -> Config:
    """Return `config` with the layout that `arrange` chooses on rank 0 for this number of ranks.

    Collectives: every rank calls it; one broadcast and one small all-reduce.
    """
    said = ""
    with raise_on_all_ranks("choosing a layout"):
        if dist.get_rank() == 0:
            found = arrange(config, dist.get_world_size(), preflight)
            log.info(f"elastic    {plural(dist.get_world_size(), 'rank')}: {found.reason}")
            batch: dict[str, object] = {"micro_batch_size": found.micro_batch_size}
            batch |= {"activation_checkpointing": found.activation_checkpointing}
            said = json.dumps({"parallel": found.parallel.model_dump(mode="json"), "train": batch})
    changes = json.loads(from_rank_0(said))
    train = config.train.model_copy(update=changes["train"])
    return config.model_copy(update={"parallel": ParallelConfig(**changes["parallel"]), "train": train})
