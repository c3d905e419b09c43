"""One training run, from a configuration to `output_dir/model`: sets up what loop.py needs, prints the plan, saves.

Called in every rank, under torchrun or our own launcher, before the process group exists.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from expertmesh.adapters.save import save_adapter
from expertmesh.adapters.start import start as start_adapters
from expertmesh.checkpoint.interface import load_directory
from expertmesh.config import Config, ParallelConfig, dump_config
from expertmesh.data import (
    DataReport,
    EvaluationBatches,
    TokenizedDataset,
    TrainingBatches,
    build_dataset,
    load_tokenizer,
    padding_token_id,
)
from expertmesh.distributed.all_ranks import from_rank_0, raise_on_all_ranks
from expertmesh.distributed.layout import explicit
from expertmesh.distributed.mesh import Mesh, current_device, init_mesh, set_timeout, start_process_group
from expertmesh.io.directory import io_errors
from expertmesh.io.safetensors_writer import replace_synced
from expertmesh.model import load_weights, prepare_model
from expertmesh.parallel.checkpointing import CheckpointingMode
from expertmesh.training.checkpoints import open_checkpoints
from expertmesh.training.control import Control
from expertmesh.training.lock import RunLock
from expertmesh.training.loop import TrainingLoop
from expertmesh.training.metrics import ExpertLoad, open_reporter
from expertmesh.training.optimizer import build_optimizer, build_schedule
from expertmesh.training.plan import Prepared, plan_lines
from expertmesh.training.preflight import ADAPTER, MODEL, Checked, preflight
from expertmesh.training.record import Forecast
from expertmesh.training.recording import record_start
from expertmesh.training.resume import Counters, Identity, check_start, find_start
from expertmesh.training.weights_report import AUDIT_FILE, adapter_lines, loaded_lines, saved_lines
from expertmesh.weights.audit import write_audit
from expertmesh.weights.load import bytes_to_read
from expertmesh.weights.meta_model import materialize
from expertmesh.weights.save import save_model

Predict = Callable[[Config, Checked], Forecast]


def train(config: Config, control: Control | None = None, predict: Predict | None = None) -> None:
    """Train as `config` says and save `output_dir/model`, or `output_dir/adapter` with `lora`.

    Every rank calls it; `predict` says on rank 0 what a step will take, to be printed and recorded. Raises the errors
    of config.errors, and `Stopped` when the run was asked to stop and has saved.
    """
    control = control or Control()
    device = current_device()
    start_process_group(device, config.distributed.first_step_timeout_seconds)
    with raise_on_all_ranks("checking the configuration"):
        checked = preflight(config, dist.get_world_size())
    with ExitStack() as stack:
        lock = None
        with raise_on_all_ranks("locking output_dir"):
            if dist.get_rank() == 0:
                lock = stack.enter_context(RunLock(Path(config.output_dir), control.launch))
        _train(config, control, checked, device, lock, predict)


def _train(
    config: Config,
    control: Control,
    checked: Checked,
    device: torch.device,
    lock: RunLock | None,
    predict: Predict | None,
) -> None:
    """`lock` is rank 0's."""
    control.progress.at(0, "reading the data")
    with raise_on_all_ranks("reading the data"):
        tokenizer = load_tokenizer(config.model)
        pad_token_id = padding_token_id(tokenizer, checked.vocab_size)
        training = _dataset(config, "train", tokenizer, checked)
        evaluation = _dataset(config, "eval", tokenizer, checked) if config.data.eval else None

    # Every rank has come to the same layout by itself; should one ever not, rank 0's holds.
    parallel = ParallelConfig(**json.loads(from_rank_0(explicit(checked.layout).model_dump_json())))
    mesh = init_mesh(parallel, num_experts=checked.anatomy.num_experts, device=device)
    set_timeout(mesh, config.distributed.first_step_timeout_seconds)
    share: dict[str, Any] = {
        "micro_batch_size": config.train.micro_batch_size,
        "data_rank": mesh.data_rank,
        "data_ranks": mesh.layout.data_ranks,
        "packing": config.data.packing,
        "pad_token_id": pad_token_id,
        "max_length": config.data.max_length,
    }
    batches = TrainingBatches(
        training[0],
        global_batch_size=config.train.global_batch_size,
        shuffle=config.data.shuffle,
        seed=config.train.seed,
        **share,
    )
    total_steps = batches.total_steps(config.train.num_epochs)
    total_steps = min(total_steps, config.train.max_steps or total_steps)

    directory = Path(config.output_dir)
    with raise_on_all_ranks("comparing the data"):
        identity = Identity.of(config, checked.directory, training[0])
    identity.agree()
    found: Path | None = None
    changes: list[str] = []
    with raise_on_all_ranks("looking for a checkpoint"):
        if mesh.rank == 0 and (found := find_start(config)) is not None:
            changes = check_start(found, identity, total_steps, directory)
    start = Path(shared) if (shared := from_rank_0(str(found or ""))) else None

    torch.manual_seed(config.train.seed + mesh.rank)
    checkpointing = checkpointing_mode(config, mesh)
    model, resolved = prepare_model(
        checked.model_config,
        checked.directory,
        mesh,
        precision=config.precision,
        moe=config.moe,
        attention=config.model.attention,
        trust_remote_code=config.model.trust_remote_code,
        activation_checkpointing=checkpointing,
        checkpoint_layers=config.train.checkpoint_layers,
        compile=config.train.compile,
        lora=config.lora,
        name=config.model.name_or_path,
        revision=config.model.revision,
    )
    reports = [training[1], *([evaluation[1]] if evaluation else [])]
    with raise_on_all_ranks("reading the headers of the weights"):
        to_load = bytes_to_read(model, checked.directory)
    with raise_on_all_ranks("writing the configuration"):
        if mesh.rank == 0:
            _write_config(config, directory / "config.yaml")
    expected: Forecast | None = None
    with raise_on_all_ranks("predicting a step"):
        if mesh.rank == 0 and predict is not None:
            expected = predict(config, checked)
    run = Prepared(
        config,
        checked,
        mesh,
        model,
        resolved,
        reports,
        batches,
        total_steps=total_steps,
        bytes_to_load=to_load,
        checkpointing=checkpointing,
        forecast=expected,
    )
    printed: list[str] = []
    if mesh.rank == 0:
        if start is None and (directory / "metrics.jsonl").exists():
            print(f"{directory} holds an unfinished run without a checkpoint; it starts again from the beginning")
        printed = list(plan_lines(run))
        print("\n".join(printed), flush=True)
    optimizer, counters = _load(config, control, checked, mesh, model, start, changes)
    with raise_on_all_ranks("opening the metrics"):
        reporter = open_reporter(config.log, directory, total_steps, is_main=mesh.rank == 0, done=counters.step)
    record_start(run, after_step=counters.step, printed=printed)
    loop = TrainingLoop(
        config=config,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        schedule=build_schedule(optimizer, config.schedule, total_steps, counters.step),
        train_batches=batches,
        eval_batches=EvaluationBatches(evaluation[0], **share) if evaluation else None,
        total_steps=total_steps,
        reporter=reporter,
        expert_load=ExpertLoad(model, checked.anatomy, mesh),
        checkpoints=open_checkpoints(
            config, model, optimizer, tokenizer, identity, is_main=mesh.rank == 0, saved_step=counters.step, lock=lock
        ),
        control=control,
        counters=counters,
    )
    try:
        loop.run()
    finally:
        reporter.close()
    control.progress.at(counters.step, "saving the result")
    if lock is not None:
        lock.check()
    for line in _save(config, model, directory, tokenizer):
        if mesh.rank == 0:
            print(line, flush=True)


def _save(config: Config, model: PreTrainedModel, directory: Path, tokenizer: Any) -> list[str]:
    """Write the trained model, or its adapters alone; what there is to say about it."""
    metrics = f"metrics in {directory / 'metrics.jsonl'}"
    if config.lora is not None:
        adapter = save_adapter(model, directory / ADAPTER, tokenizer=tokenizer)
        return [*adapter_lines(adapter), f"saved {directory / ADAPTER}; {metrics}"]
    saved = save_model(model, directory / MODEL, tokenizer=tokenizer)
    return [*saved_lines(saved), f"saved {directory / MODEL} in {config.precision.params}; {metrics}"]


def _write_config(config: Config, path: Path) -> None:
    """Whole or not at all: a run that is killed here must find a configuration it can read."""
    content = dump_config(config).encode()
    with io_errors(path, len(content)):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_synced(path, content)


def _load(
    config: Config,
    control: Control,
    checked: Checked,
    mesh: Mesh,
    model: PreTrainedModel,
    start: Path | None,
    changes: Sequence[str],
) -> tuple[torch.optim.Optimizer, Counters]:
    """Fill the model from the checkpoint `start`, or from the weights that training begins with.

    A frozen base always comes from its own files: checkpoints hold the adapters alone, and the base's hash.
    """
    if start is None or config.lora is not None:
        control.progress.at(0, "loading weights")
        loaded, audited = load_weights(model, checked.directory, mesh, control.audit)
        if mesh.rank == 0:
            directory = Path(config.output_dir)
            if audited.mode == "full":
                write_audit(directory / AUDIT_FILE, audited, checked.directory)
            for line in loaded_lines(loaded, audited, directory):
                print(line, flush=True)
        start_adapters(model, config.train.seed)
    else:
        materialize(model, mesh.device)
    optimizer = build_optimizer(model, config.optim)
    if start is None:
        return optimizer, Counters()
    control.progress.at(0, "loading the checkpoint")
    saved = load_directory(model, optimizer, start)
    counters = Counters(**saved.state["counters"])
    if mesh.rank == 0:
        print(f"resume     {start.name}, after step {saved.step}; {'; '.join(changes)}", flush=True)
        if control.audit == "full" and config.lora is None:
            print("audit      nothing was read from the model's files; expertmesh verify checks the checkpoint")
    return optimizer, counters


def checkpointing_mode(config: Config, mesh: Mesh) -> CheckpointingMode:
    """`auto` recomputes whole blocks on accelerators, where memory is what runs out, and keeps activations on a CPU."""
    mode = config.train.activation_checkpointing
    if mode == "auto":
        return "none" if mesh.device.type == "cpu" else "full"
    return mode


def _dataset(config: Config, part: str, tokenizer: Any, checked: Checked) -> tuple[TokenizedDataset, DataReport]:
    sources = config.data.train if part == "train" else config.data.eval
    return build_dataset(sources, config.data, tokenizer, model_vocab_size=checked.vocab_size)
