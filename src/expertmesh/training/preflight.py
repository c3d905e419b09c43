"""What can be refused without ranks, weights or data: model, layout, batches, packages, tokenizer, disk, output_dir.

The launcher calls `preflight` once before it starts ranks, so that a mistake costs seconds and is said once; `train`
calls it again in each rank (a job started by torchrun has no launcher of ours). `check` and `verify` refuse by the same
functions. Reads config.json and file headers at most.
"""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from expertmesh.adapters.plan import plan_of
from expertmesh.adapters.start import check_files
from expertmesh.anatomy import Anatomy, describe
from expertmesh.config import Config, load_config
from expertmesh.config.errors import InputError
from expertmesh.data import load_tokenizer
from expertmesh.data.loader import accumulation_of
from expertmesh.distributed.layout import Layout, ep_reason, resolve_layout
from expertmesh.introspection.attention import packing_refusal
from expertmesh.io.directory import require_space
from expertmesh.model import ModelOptions, build_model, plan_model
from expertmesh.parallel.checkpointing import CheckpointingMode
from expertmesh.parallel.shard_plan import ShardOptions, ShardPlan
from expertmesh.step.pipeline_schedule import interleaves
from expertmesh.training.resume import config_differences, find_start, flat
from expertmesh.weights.mapping import refuse_quantised
from expertmesh.weights.meta_model import read_model_config

MODEL, ADAPTER = "model", "adapter"
# What a run that was killed before it had written config.yaml may have left behind, none of it worth keeping, and what
# `verify` writes before there is a run.
_LEFT_BY_A_START = re.compile(r"lock\.json(\..+)?|config\.yaml\.tmp|verification\.json")


@dataclass(frozen=True, slots=True)
class Checked:
    """A model on meta with its adapters, and how it will be sharded: what training goes on with."""

    model_config: PreTrainedConfig
    directory: Path
    model: PreTrainedModel
    plan: ShardPlan
    layout_reason: str | None

    @property
    def anatomy(self) -> Anatomy:
        return self.plan.anatomy

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def vocab_size(self) -> int:
        """Embeddings of the model."""
        return vocabulary(self.model_config)


def preflight(config: Config, world_size: int, ranks_per_node: int | None = None, *, weights: bool = True) -> Checked:
    """Raise `InputError` for whatever cannot work on `world_size` ranks; no communication, no side effect.

    `ranks_per_node` is for who is no rank of the job: the ranks know it from the launcher. Without `weights` those of a
    hub repository are not downloaded.
    """
    refuse_output_dir(config)
    refuse_config(config)
    model = config.model
    model_config, directory = read_model_config(
        model.name_or_path, model.revision, model.trust_remote_code, weights=weights
    )
    checked = check_model(config, model_config, directory, world_size, ranks_per_node)
    refuse_disk(config, checked.model)
    load_tokenizer(model)
    return checked


def refuse_config(config: Config) -> None:
    """Refuse what a look at the machine tells, without the model: files and packages that are not there."""
    _refuse_local_paths(config)
    _refuse_missing_packages(config)


def check_model(
    config: Config,
    model_config: PreTrainedConfig,
    directory: Path,
    world_size: int,
    ranks_per_node: int | None = None,
) -> Checked:
    """Build the model on meta and plan its shards. Raises `InputError` for what `config` cannot do with it."""
    refuse_quantised(model_config, directory)
    refuse_length("data.max_length", config.data.max_length, model_config)
    model = build_model(model_config, directory, ModelOptions.of(config))
    experts = describe(model).num_experts
    layout = resolve_layout(config.parallel, world_size, experts, ranks_per_node)
    accumulation = accumulation_of(config.train.global_batch_size, config.train.micro_batch_size, layout.data_ranks)
    _refuse_interleaving(layout, accumulation)
    if config.data.packing:
        _refuse_packing(config, model)
    if (adapters := plan_of(model)) is not None:
        check_files(adapters)
    plan = plan_model(model, layout, shard_options(config))
    return Checked(model_config, directory, model, plan, ep_reason(config.parallel, layout, experts, ranks_per_node))


def shard_options(config: Config) -> ShardOptions:
    """What `config` says about sharding, beside the layout."""
    train = config.train
    return ShardOptions(
        config.precision, config.moe, checkpointing_mode(config), train.checkpoint_layers, train.compile
    )


def checkpointing_mode(config: Config) -> CheckpointingMode:
    """`auto` recomputes whole blocks on accelerators, where memory is what runs out, and keeps activations on a CPU."""
    mode = config.train.activation_checkpointing
    if mode == "auto":
        return "full" if torch.accelerator.is_available() else "none"
    return mode


def vocabulary(model_config: PreTrainedConfig) -> int:
    """Embeddings of a model."""
    return int(model_config.get_text_config().vocab_size)


def _refuse_interleaving(layout: Layout, accumulation: int) -> None:
    """A schedule that only some steps could run is refused, rather than replaced in all of them."""
    if layout.pp_virtual_stages > 1 and not interleaves(accumulation, layout.pp):
        rounds = accumulation // layout.pp
        raise InputError(
            f"parallel.pp_schedule: interleaved_1f1b runs micro-batches in {rounds} equal rounds, and the "
            f"{accumulation} of a step (train.global_batch_size over data ranks and train.micro_batch_size) are no "
            f"multiple of {rounds}; change train.global_batch_size so that they are a multiple of {layout.pp}, or set "
            "parallel.pp_virtual_stages to 1",
            key="layout.pp-interleaving-rounds",
        )


def refuse_output_dir(config: Config) -> None:
    """A directory that holds another run, or anything else, is never written into.

    The same run may go on in it, from its newest checkpoint; what may differ is in resume.py.
    """
    directory = Path(config.output_dir)
    if directory.exists() and not directory.is_dir():
        raise InputError(f"output_dir {directory} is a file; choose another directory", key="output.is-a-file")
    if not directory.exists() or all(_LEFT_BY_A_START.fullmatch(path.name) for path in directory.iterdir()):
        return
    written = directory / "config.yaml"
    if not written.is_file():
        raise InputError(
            f"output_dir {directory} is not empty and holds no run of ours; choose another directory",
            key="output.not-empty",
        )
    old, new = (flat(each.model_dump(mode="json")) for each in (load_config(written), config))
    forbidden, _ = config_differences(old, new)
    if forbidden:
        raise InputError(
            f"output_dir {directory} holds a run with another configuration: {'; '.join(forbidden)}; put it back to "
            "continue that run, or choose another directory",
            key="run.other-configuration",
        )
    result = directory / (MODEL if config.lora is None else ADAPTER)
    if result.exists():
        raise InputError(
            f"output_dir {directory} holds this run already, finished; choose another directory, or move {result} away "
            "to go on from the last checkpoint with more steps",
            key="run.finished",
        )
    find_start(config)


def _refuse_packing(config: Config, model: nn.Module) -> None:
    if reason := packing_refusal(model):
        raise InputError(f"data.packing: {reason}; set data.packing to false", key="data.packing-unsupported")
    if config.model.attention == "flash_attention_2" and config.train.micro_batch_size > 1:
        # transformers derives sample borders from position ids only for a batch of one row.
        raise InputError(
            f"train.micro_batch_size {config.train.micro_batch_size}: flash_attention_2 separates packed samples only "
            "at train.micro_batch_size 1; set that, or model.attention to sdpa",
            key="data.packing-micro-batch",
        )


def _refuse_local_paths(config: Config) -> None:
    for key, sources in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        for index, source in enumerate(sources):
            looks_local = source.path.startswith((".", "/", "~")) or Path(source.path).suffix in (
                ".json",
                ".jsonl",
                ".parquet",
            )
            if looks_local and not Path(source.path).exists():
                raise InputError(
                    f"{key}.{index}.path: {source.path} does not exist; correct the path", key="data.not-found"
                )


def _refuse_missing_packages(config: Config) -> None:
    if config.model.attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise InputError(
            "model.attention: flash_attention_2 needs the flash-attn package; install it or use sdpa",
            key="install.missing-package",
        )
    for tracker in config.log.report_to:
        if tracker != "jsonl" and importlib.util.find_spec(tracker) is None:
            raise InputError(
                f"log.report_to: {tracker} needs the {tracker} package; install it (pip install {tracker}), or leave "
                f"{tracker} out",
                key="install.missing-package",
            )


def longest(model_config: PreTrainedConfig) -> int | None:
    """How many positions a model is made for, where its config says it."""
    most = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return most if isinstance(most, int) else None


def refuse_length(key: str, length: int, model_config: PreTrainedConfig) -> None:
    """Refuse rows that are longer than what the model's positions are made for."""
    most = longest(model_config)
    if most is not None and length > most:
        raise InputError(
            f"{key} {length}: {model_config.model_type} has max_position_embeddings {most}; set {key} to at most "
            f"{most}, or extend the model's positions in its config.json first",
            key="model.max-positions",
        )


def refuse_disk(config: Config, model: nn.Module) -> None:
    """Refuse a disk that has no room for the result and, where the run saves some, for one checkpoint."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    size = trained * getattr(torch, config.precision.params).itemsize
    saves = config.checkpoint.every_steps is not None or config.checkpoint.every_minutes is not None
    moments = 2 if config.optim.name == "adamw" else 0
    directory = Path(config.output_dir).absolute()
    while not directory.exists():
        directory = directory.parent
    require_space(directory, size * (2 + moments if saves else 1))
