"""Builds the sharded job under proof by the calls that training makes, and a variant of it for what must not matter."""

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from expertmesh.adapters.start import start as start_adapters
from expertmesh.config import ParallelConfig, PrecisionConfig
from expertmesh.distributed.mesh import init_mesh, set_timeout
from expertmesh.model import ModelOptions, prepare_model
from expertmesh.parallel.checkpointing import checkpointing_mode
from expertmesh.training.optimizers.build import build_optimizer
from expertmesh.training.startup.model_check import shard_options
from expertmesh.verification.job import Job
from expertmesh.verification.reference.weights import set_adapters
from expertmesh.verification.setup import Setup
from expertmesh.weights.load import fill, read_whole


def build(
    setup: Setup,
    *,
    precision: PrecisionConfig | None = None,
    parallel: ParallelConfig | None = None,
    checkpointing: bool | None = None,
) -> Job:
    """The job of the configuration, or a variant of it, loaded. Adapters get values by their names instead of zeros.

    Every rank calls it; issues the collectives of loading.
    """
    config = setup.config
    precision = precision or config.precision
    mesh = init_mesh(parallel or config.parallel, num_experts=setup.anatomy.num_experts)
    set_timeout(mesh, config.distributed.first_step_timeout_seconds)
    options = replace(ModelOptions.of(config), precision=precision)
    if options.attention == "flash_attention_2" and precision.compute != "bfloat16":
        options = replace(options, attention="sdpa")
    shards = replace(shard_options(config), precision=precision)
    if checkpointing is not None:
        shards = replace(shards, activation_checkpointing=checkpointing_mode(checkpointing), checkpoint_layers="all")
    model, _ = prepare_model(setup.model_config, setup.directory, mesh, options, shards)
    setup.forget_layers(model)
    fill(model, setup.directory, allocate_on=mesh.device)
    start_adapters(model, config.train.seed)
    set_adapters(model)
    return Job(setup, mesh, model, build_optimizer(model, config.optim, config.train.seed), precision)


def dequantised_base(setup: Setup, dtype: torch.dtype) -> PreTrainedModel:
    """The unsharded model in one process with what the codes of its files stand for, which transformers' own reading
    keeps quantised, or gets wrong for some formats. No communication.
    """
    model = setup.meta_model(dtype, fuse=False)
    read_whole(model, setup.directory)
    return model
