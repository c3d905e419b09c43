"""One training run, from a configuration to `output_dir/model`: check, prepare, load, train, save.

Called in every rank, under torchrun or our own launcher, before the process group exists.
"""

from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist
from torch.optim import Optimizer

from expertmesh.checkpoint.interface import load_directory
from expertmesh.config import Config
from expertmesh.data import EvaluationBatches
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.distributed.mesh import current_device, start_process_group
from expertmesh.training.checkpoints import open_checkpoints
from expertmesh.training.control import Control
from expertmesh.training.lock import RunLock
from expertmesh.training.loop import TrainingLoop
from expertmesh.training.metrics import ExpertLoad, open_reporter
from expertmesh.training.optimizer import build_optimizer, build_schedule
from expertmesh.training.plan import Predict, Prepared
from expertmesh.training.preflight import Checked, preflight
from expertmesh.training.prepare import prepare, say
from expertmesh.training.recording import record_start
from expertmesh.training.resume import Counters
from expertmesh.training.weights import allocate_weights, load_base, save_result


def train(config: Config, control: Control | None = None, predict: Predict | None = None) -> None:
    """Train as `config` says and save `output_dir/model`, or `output_dir/adapter` with `lora`.

    Every rank calls it; `predict` says on rank 0 what a step will take, to be printed and recorded. Raises the errors
    of config.errors, and `Stopped` when the run was asked to stop and has saved.
    """
    control = control or Control()
    start_process_group(current_device(), config.distributed.first_step_timeout_seconds)
    say(control, "building the model on meta and planning its shards")
    with raise_on_all_ranks("checking the configuration"):
        checked = preflight(config, dist.get_world_size())
    with ExitStack() as stack:
        lock = None
        with raise_on_all_ranks("locking output_dir"):
            if dist.get_rank() == 0:
                lock = stack.enter_context(RunLock(Path(config.output_dir), control.launch))
        _train(config, control, checked, lock, predict)


def _train(config: Config, control: Control, checked: Checked, lock: RunLock | None, predict: Predict | None) -> None:
    """`lock` is rank 0's."""
    run = prepare(config, control, checked, predict)
    optimizer, counters = _load(run, control)
    loop = _loop(run, control, optimizer, counters, lock)
    try:
        loop.run()
    finally:
        loop.reporter.close()
    control.progress.at(counters.step, "saving the result")
    if lock is not None:
        lock.check()
    for line in save_result(run):
        if run.mesh.rank == 0:
            print(line, flush=True)


def _load(run: Prepared, control: Control) -> tuple[Optimizer, Counters]:
    """Fill the model from the checkpoint to go on from, or from the weights that training begins with.

    A frozen base always comes from its own files: checkpoints hold the adapters alone, and the base's hash.
    """
    if run.start is None or run.config.lora is not None:
        say(control, "loading weights")
        load_base(run, control.audit)
    else:
        allocate_weights(run)
    optimizer = build_optimizer(run.model, run.config.optim)
    if run.start is None:
        return optimizer, Counters()
    say(control, "loading the checkpoint")
    saved = load_directory(run.model, optimizer, run.start)
    if run.mesh.rank == 0:
        print(f"resume     {run.start.name}, after step {saved.step}; {'; '.join(run.changes)}", flush=True)
        if control.audit == "full" and run.config.lora is None:
            print("audit      nothing was read from the model's files; expertmesh verify checks the checkpoint")
    return optimizer, Counters(**saved.state["counters"])


def _loop(
    run: Prepared, control: Control, optimizer: Optimizer, counters: Counters, lock: RunLock | None
) -> TrainingLoop:
    """What the loop needs, opened in `output_dir`; this start is recorded there. Every rank calls it."""
    config, mesh, model, data = run.config, run.mesh, run.model, run.data
    is_main, directory = mesh.rank == 0, Path(config.output_dir)
    with raise_on_all_ranks("opening the metrics"):
        reporter = open_reporter(config.log, directory, run.total_steps, is_main=is_main, done=counters.step)
    record_start(run, after_step=counters.step)
    return TrainingLoop(
        config=config,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        schedule=build_schedule(optimizer, config.schedule, run.total_steps, counters.step),
        train_batches=run.batches,
        eval_batches=EvaluationBatches(data.evaluation, run.batch_layout) if data.evaluation is not None else None,
        total_steps=run.total_steps,
        reporter=reporter,
        expert_load=ExpertLoad(model, run.checked.anatomy, mesh),
        checkpoints=open_checkpoints(
            config,
            model,
            optimizer,
            data.tokenizer,
            run.identity,
            is_main=is_main,
            saved_step=counters.step,
            lock=lock,
        ),
        control=control,
        counters=counters,
    )
