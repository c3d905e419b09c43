"""Build the sharded job under proof with the calls that training makes, or a variant that must give the same result.

For `proof` and the layers. It never trains: the job is loaded and not yet stepped.
"""

from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from expertmesh.adapters.start import start as start_adapters
from expertmesh.config import Config, ParallelConfig, PrecisionConfig
from expertmesh.distributed.mesh import Mesh, init_mesh, set_timeout
from expertmesh.experts.placement import Placement, balanced
from expertmesh.model import ModelOptions, prepare_model
from expertmesh.parallel.checkpointing import checkpointing_mode
from expertmesh.training.objective import RunObjective
from expertmesh.training.optimizers.build import build_optimizer
from expertmesh.training.startup.model_check import shard_options
from expertmesh.training.teacher import Teacher
from expertmesh.verification.job import ProvenJob
from expertmesh.verification.reference.streaming import set_adapters
from expertmesh.verification.setup import Setup
from expertmesh.weights.load import fill, read_whole


def build(
    setup: Setup,
    *,
    precision: PrecisionConfig | None = None,
    parallel: ParallelConfig | None = None,
    checkpointing: bool | None = None,
) -> ProvenJob:
    """Build and load the job of the configuration, or a variant of it.

    Adapters get values that follow from their names instead of zeros (see `adapter_value`). FlashAttention 2 and DeepEP
    work in bf16 alone: in other precisions sdpa and `dispatch: auto` replace them. DeepEP is also replaced in a variant
    with another layout.

    Args:
        precision: Instead of the configuration's.
        parallel: The layout, instead of the configuration's.
        checkpointing: Activation checkpointing of all blocks on or off; None: as configured.

    Collectives: every rank calls it; those of loading, and of `reference_table` with an objective that has a reference.
    """
    config = setup.config
    precision = precision or config.precision
    mesh = init_mesh(parallel or config.parallel, num_experts=setup.anatomy.num_experts)
    set_timeout(mesh, config.distributed.first_step_timeout_seconds)
    if config.model.attention == "flash_attention_2" and precision.compute != "bfloat16":
        config = config.model_copy(update={"model": config.model.model_copy(update={"attention": "sdpa"})})
    config = config.model_copy(update={"precision": precision})
    options, shards = ModelOptions.of(config), shard_options(config)
    if config.moe.dispatch == "deepep" and (precision.compute != "bfloat16" or parallel is not None):
        shards = replace(shards, moe=config.moe.model_copy(update={"dispatch": "auto"}))
    if config.moe.placement != "contiguous" and (config.moe.placement == "balanced" or parallel is not None):
        # Any placement gives the same results: one that the data decide, or one for another ep, is drawn.
        replicas = config.moe.replicas if parallel is None else 0
        shards = replace(shards, placement=_drawn_placement(setup, mesh.layout.ep, replicas))
    if checkpointing is not None:
        shards = replace(shards, activation_checkpointing=checkpointing_mode(checkpointing), checkpoint_layers="all")
    model, _ = prepare_model(setup.model_config, setup.directory, mesh, options, shards)
    setup.forget_layers(model)
    fill(model, setup.directory, allocate_on=mesh.device, seed=setup.weights_seed)
    start_adapters(model, config.train.seed)
    set_adapters(model)
    optimizer = build_optimizer(model, config.optim, config.train.seed, getattr(torch, precision.compute))
    job = ProvenJob(setup, mesh, model, optimizer, precision, _load_teacher(setup, config, mesh))
    if setup.steps[0].minimised.reference and setup.steps[0].dataset.reference is None:
        _make_up_reference(job)
    return job


def _drawn_placement(setup: Setup, ep: int, replicas: int) -> Placement:
    """Return that of random loads; the model's order without EP."""
    random, experts = np.random.default_rng(0), setup.anatomy.experts if ep > 1 else ()
    loads = {spec.name: random.zipf(2.0, spec.num_experts).clip(max=1 << 20).tolist() for spec in experts}
    return balanced(loads, ep, replicas)


def _load_teacher(setup: Setup, config: Config, mesh: Mesh) -> Teacher | None:
    """Return the job's teacher, if it has one. Collectives: every rank calls it; those of loading."""
    if setup.teacher is None:
        return None
    teacher = Teacher.planned(config, setup.teacher.model_config, setup.teacher.directory, mesh.layout)
    teacher.shard(mesh)
    fill(teacher.model, teacher.directory, allocate_on=mesh.device)
    return teacher


def _make_up_reference(job: ProvenJob) -> None:
    """Set made-up reference log-probabilities for the steps: the model's, up to 1 / beta more or less.

    Before its first update a model equals its reference, so every pair would have the same weight and a bug in these
    weights would not show. Mismatched rows are up to 1 / beta likelier than under the reference: their mean, 0 if it is
    less, has to matter.

    Collectives: every rank calls it; `reference_table` for each step, for kto twice.
    """
    for number, data in enumerate(job.setup.steps):
        objective, random = RunObjective(data.minimised), np.random.default_rng(number)
        away = random.uniform(-1, 1, len(data.dataset)) / data.minimised.beta
        data.dataset.reference = job.reference_table(data, objective) + away
        if (mismatched := data.mismatched) is not None:
            away = random.uniform(-1, 0, len(data.dataset)) / data.minimised.beta
            data.dataset.mismatched_reference = job.reference_table(mismatched, objective) + away


def dequantised_base(setup: Setup, dtype: torch.dtype) -> PreTrainedModel:
    """Return the unsharded model in one process, with the dequantised values of its files.

    transformers' loader keeps them quantised, or reads some formats wrong. Collectives: none.
    """
    model = setup.meta_model(dtype, fuse=False)
    read_whole(model, setup.directory)
    return model
