"""Refuse what can be refused without ranks, weights or data: files, packages, output_dir, model, layout, disk,
tokenizer.

The launcher calls `preflight` once before it starts ranks, so that a mistake costs seconds and is reported once;
`train` calls it again in each rank (a job started by torchrun has no launcher of ours). `check` and `verify` refuse by
the same functions; `check` and `prepare` turn into notes what another machine or another `output_dir` mends. Reads
config.json and file headers at most.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from expertmesh.anatomy import describe
from expertmesh.config import Config
from expertmesh.config.errors import ExpertmeshError, InputError, MissingHereError
from expertmesh.data import load_tokenizer, refuse_source
from expertmesh.io.directory import nearest, require_space
from expertmesh.io.storage import is_url
from expertmesh.state.model_view import ModelView
from expertmesh.training.optimizers.build import moment_bytes
from expertmesh.training.optimizers.muon import matrices_of
from expertmesh.training.startup.model_check import Checked, check_model
from expertmesh.training.startup.output_dir import refuse_output_dir
from expertmesh.training.startup.packages import refuse_missing_packages
from expertmesh.weights.first_values import open_weights
from expertmesh.weights.mapping import plan_load
from expertmesh.weights.meta_model import read_model_config
from expertmesh.weights.quantised.encode import not_quantised
from expertmesh.weights.quantised.published import quantisation


def preflight(
    config: Config,
    world_size: int,
    ranks_per_node: int | None = None,
    *,
    weights: bool = True,
    notes: list[ExpertmeshError] | None = None,
) -> Checked:
    """Raise `InputError` for whatever cannot work on `world_size` ranks; no communication, no side effect.

    Args:
        ranks_per_node: For callers that are no rank of the job; None takes the launcher's.
        weights: Whether the weights of a hub repository are downloaded; else only config.json is read, and
            `refuse_weights` reads the weights' headers later.
        notes: Receives errors that another machine or `output_dir` mends, which are then not raised.
    """
    _refuse_output_url(config)
    _refuse_data(config)
    with _noted(notes):
        refuse_output_dir(config)
    here = config
    if config.model.attention == "flash_attention_2":
        # Without its package a model cannot be built with it, even on meta.
        here = config.model_copy(update={"model": config.model.model_copy(update={"attention": "auto"})})
    with _noted(notes):
        _refuse_machine(config)
        here = config
    model = config.model
    model_config, directory = read_model_config(
        model.name_or_path, model.revision, model.trust_remote_code, weights=weights, from_config=model.from_config
    )
    if config.save.dtype == "as_loaded" and quantisation(model_config) is None:
        raise not_quantised(f"{model.name_or_path} is not quantised")
    try:
        checked = check_model(here, model_config, directory, world_size, ranks_per_node, weights=weights)
    except MissingHereError as error:
        if notes is None:
            raise
        notes.append(error)
        moe = config.moe.model_copy(update={"dispatch": "auto", "kernels": "auto"})
        here = here.model_copy(update={"moe": moe})
        checked = check_model(here, model_config, directory, world_size, ranks_per_node, weights=weights)
    load_tokenizer(model, config.data.chat_template)
    with _noted(notes):
        checked = replace(checked, checkpoint_bytes=refuse_disk(config, checked.model))
    return checked


@contextmanager
def _noted(notes: list[ExpertmeshError] | None) -> Iterator[None]:
    """Put what is refused inside the block into `notes`, if there are any."""
    try:
        yield
    except ExpertmeshError as error:
        if notes is None:
            raise
        notes.append(error)


def refuse_weights(checked: Checked) -> None:
    """Refuse weights whose files are absent, or whose headers do not fit the model; no weight is read or drawn.

    For one process of the job: of a large model the headers take seconds, and each rank reads them when its shards are
    known (`bytes_to_read`). Raises what loading raises before it reads: also `IntegrityError` and `SecurityError`.
    """
    teacher = checked.objective.teacher
    models = [(checked.model, checked.directory, checked.weights_seed)]
    models += [] if teacher is None else [(teacher.model, teacher.directory, None)]
    for model, directory, seed in models:
        view = ModelView(model)
        with open_weights(view, directory, seed) as files:
            plan_load(view, files)


def refuse_config(config: Config, *, names_data: bool = True) -> None:
    """Refuse what the machine alone shows, without the model: missing files and packages."""
    _refuse_output_url(config)
    if names_data:
        _refuse_data(config)
    _refuse_machine(config)


def _refuse_machine(config: Config) -> None:
    refuse_missing_packages(config)
    if config.model.attention == "flex_attention" and not torch.accelerator.is_available():
        raise InputError(
            "model.attention: flex_attention has no backward on a CPU; set model.attention to sdpa",
            key="model.attention-unsupported",
        )


def refuse_disk(config: Config, model: nn.Module) -> int:
    """Refuse a disk without room for the result and, if the run saves some, for one checkpoint.

    Returns the bytes of one checkpoint, 0 without any.
    """
    width = getattr(torch, config.precision.params).itemsize
    trained = {name: parameter.shape for name, parameter in model.named_parameters() if parameter.requires_grad}
    size = sum(shape.numel() for shape in trained.values()) * width
    saves = config.checkpoint.every_steps is not None or config.checkpoint.every_minutes is not None
    matrices, optimizer = matrices_of(model, describe(model)), config.optim.name
    moments = sum(moment_bytes(optimizer, shape, width, is_matrix=name in matrices) for name, shape in trained.items())
    checkpoint = size + math.ceil(moments) if saves else 0
    require_space(nearest(Path(config.output_dir)), checkpoint + size)
    return checkpoint


def _refuse_output_url(config: Config) -> None:
    if is_url(config.output_dir):
        raise InputError(
            f"output_dir {config.output_dir}: a run lives on a disk; choose a directory, and set checkpoint.remote to "
            "the URL, which gets its checkpoints and its result",
            key="output.is-a-url",
        )


def _refuse_data(config: Config) -> None:
    for key, sources in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        for index, source in enumerate(sources):
            try:
                refuse_source(source.path)
            except InputError as error:
                raise InputError(f"{key}.{index}.path: {error}", key=error.key) from error
