"""One training run, from a configuration to `output_dir/model`: sets up what loop.py needs, prints the plan, saves.

Called in every rank, under torchrun or our own launcher, before the process group exists.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from expertmesh.config import Config, dump_config
from expertmesh.data import (
    DataReport,
    EvaluationBatches,
    TokenizedDataset,
    TrainingBatches,
    build_dataset,
    load_tokenizer,
    padding_token_id,
)
from expertmesh.mesh import Mesh, current_device, init_mesh, set_timeout, start_process_group
from expertmesh.model import load_weights, prepare_model
from expertmesh.training.loop import TrainingLoop
from expertmesh.training.metrics import open_reporter
from expertmesh.training.optimizer import build_optimizer, build_schedule
from expertmesh.training.plan import plan_lines
from expertmesh.training.preflight import Checked, preflight
from expertmesh.weights.agree import together
from expertmesh.weights.load import bytes_to_read
from expertmesh.weights.save import save_model


def train(config: Config) -> None:
    """Train as `config` says and save `output_dir/model`. Every rank calls it; raises the errors of config.errors."""
    device = current_device()
    start_process_group(device, config.distributed.first_step_timeout_seconds)
    with together("checking the configuration"):
        checked = preflight(config, dist.get_world_size())
    with together("reading the data"):
        tokenizer = load_tokenizer(config.model)
        pad_token_id = padding_token_id(tokenizer, checked.vocab_size)
        training = _dataset(config, "train", tokenizer, checked)
        evaluation = _dataset(config, "eval", tokenizer, checked) if config.data.eval else None

    mesh = init_mesh(config.parallel, num_experts=checked.anatomy.num_experts, device=device)
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

    torch.manual_seed(config.train.seed + mesh.rank)
    checkpointing = checkpoints_activations(config, mesh)
    model, resolved = prepare_model(
        checked.model_config,
        checked.directory,
        mesh,
        precision=config.precision,
        moe=config.moe,
        attention=config.model.attention,
        trust_remote_code=config.model.trust_remote_code,
        activation_checkpointing=checkpointing,
    )
    reports = [training[1], *([evaluation[1]] if evaluation else [])]
    directory = Path(config.output_dir)
    with together("reading the headers of the weights"):
        to_load = bytes_to_read(model, checked.directory)
    if mesh.rank == 0:
        if (directory / "metrics.jsonl").exists():
            print(f"{directory} holds an unfinished run of this configuration; it starts again from the beginning")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        for line in plan_lines(
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
        ):
            print(line, flush=True)
    load_weights(model, checked.directory, mesh)

    optimizer = build_optimizer(model, config.optim)
    reporter = open_reporter(config.log, directory, total_steps, is_main=mesh.rank == 0)
    loop = TrainingLoop(
        config=config,
        mesh=mesh,
        model=model,
        anatomy=checked.anatomy,
        optimizer=optimizer,
        schedule=build_schedule(optimizer, config.schedule, total_steps),
        train_batches=batches,
        eval_batches=EvaluationBatches(evaluation[0], **share) if evaluation else None,
        total_steps=total_steps,
        reporter=reporter,
    )
    try:
        loop.run()
    finally:
        reporter.close()
    save_model(model, directory / "model", tokenizer=tokenizer)
    if mesh.rank == 0:
        print(f"saved {directory / 'model'} in {config.precision.params}; metrics in {directory / 'metrics.jsonl'}")


def checkpoints_activations(config: Config, mesh: Mesh) -> bool:
    """`auto` recomputes on accelerators, where memory is what runs out, and keeps activations on a CPU."""
    mode = config.train.activation_checkpointing
    return mesh.device.type != "cpu" if mode == "auto" else mode == "full"


def _dataset(config: Config, part: str, tokenizer: Any, checked: Checked) -> tuple[TokenizedDataset, DataReport]:
    sources = config.data.train if part == "train" else config.data.eval
    return build_dataset(sources, config.data, tokenizer, model_vocab_size=checked.vocab_size)
