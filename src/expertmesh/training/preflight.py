"""What can be refused without ranks, weights or data: model, layout, batches, tokenizer, output directory.

The launcher calls it once before it starts ranks, so that a mistake costs seconds and is said once; `train` calls it
again in each rank (a job started by torchrun has no launcher of ours). Reads config.json and file headers at most.
"""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig

from expertmesh.adapters.plan import adapt
from expertmesh.adapters.start import check_files
from expertmesh.anatomy import Anatomy, describe
from expertmesh.config import Config, load_config
from expertmesh.config.errors import InputError
from expertmesh.data import load_tokenizer
from expertmesh.data.loader import accumulation_of
from expertmesh.distributed.layout import Layout
from expertmesh.experts.install import choose_backend
from expertmesh.introspection.attention import packing_refusal
from expertmesh.introspection.compute_dtype import refuse_compute
from expertmesh.parallel.checkpointing import refuse_checkpointing
from expertmesh.parallel.compiling import refuse_compile
from expertmesh.parallel.context import refuse_context
from expertmesh.parallel.pipeline import plan_cut
from expertmesh.parallel.refusals import expert_shard_dim, refuse_model
from expertmesh.parallel.sequence import refuse_blocks
from expertmesh.parallel.tensor_plan import tensor_plan
from expertmesh.planning.choose import choose_layout
from expertmesh.step.pipeline_schedule import interleaves
from expertmesh.training.resume import config_differences, find_start, flat
from expertmesh.weights.meta_model import build_meta_model, kept_in_fp32, read_model_config

MODEL, ADAPTER = "model", "adapter"
# What a run that was killed before it had written config.yaml may have left behind, none of it worth keeping, and what
# `verify` writes before there is a run.
_LEFT_BY_A_START = re.compile(r"lock\.json(\..+)?|config\.yaml\.tmp|verification\.json")


@dataclass(frozen=True, slots=True)
class Checked:
    """What preflight found out, for whoever goes on."""

    model_config: PreTrainedConfig
    directory: Path
    anatomy: Anatomy
    layout: Layout
    layout_reason: str | None

    @property
    def vocab_size(self) -> int:
        """Embeddings of the model."""
        return int(self.model_config.get_text_config().vocab_size)


def preflight(config: Config, world_size: int) -> Checked:
    """Raise `InputError` for whatever cannot work; no communication, no side effect."""
    refuse_output_dir(config)
    _refuse_local_paths(config)
    model_config, directory = read_model_config(
        config.model.name_or_path, revision=config.model.revision, trust_remote_code=config.model.trust_remote_code
    )
    _refuse_attention(config)
    master, compute = getattr(torch, config.precision.params), getattr(torch, config.precision.compute)
    model = build_meta_model(
        model_config,
        master if config.lora is None else compute,
        attention=None if config.model.attention == "auto" else config.model.attention,
        trust_remote_code=config.model.trust_remote_code,
    )
    anatomy = describe(model)
    chosen = choose_layout(config, model_config, world_size, anatomy.num_experts)
    layout = chosen.layout
    for spec in anatomy.experts:
        expert_shard_dim(spec, layout)
        choose_backend(spec, config.moe.compute, compute)
    refuse_blocks(model, anatomy, layout)
    kept = kept_in_fp32(model, compute)
    tensor_plan(model, anatomy, layout.tp, kept)
    accumulation_of(config.train.global_batch_size, config.train.micro_batch_size, layout.data_ranks)
    if config.data.packing:
        _refuse_packing(config, model)
    if config.lora is not None:
        check_files(adapt(model, config.lora, master, config.model.name_or_path))
    refuse_model(model, anatomy, config.moe)
    refuse_context(model, anatomy, layout)
    if compute != master:
        refuse_compute(model, anatomy, compute, kept)
    if config.train.activation_checkpointing in ("selective", "full"):
        refuse_checkpointing(model, anatomy, config.train.checkpoint_layers)
    if config.train.compile:
        refuse_compile(model, layout)
    if layout.pp > 1:
        plan_cut(model, anatomy, layout)
        accumulation = accumulation_of(config.train.global_batch_size, config.train.micro_batch_size, layout.data_ranks)
        refuse_interleaving(layout, accumulation)
    load_tokenizer(config.model)
    return Checked(model_config, directory, anatomy, layout, chosen.reason)


def refuse_interleaving(layout: Layout, accumulation: int) -> None:
    """A schedule that only some steps could run is refused, rather than replaced in all of them."""
    if layout.pp_virtual_stages > 1 and not interleaves(accumulation, layout.pp):
        rounds = accumulation // layout.pp
        raise InputError(
            f"parallel.pp_schedule: interleaved_1f1b runs micro-batches in {rounds} equal rounds, and the "
            f"{accumulation} of a step (train.global_batch_size over data ranks and train.micro_batch_size) are no "
            f"multiple of {rounds}; change train.global_batch_size so that they are a multiple of {layout.pp}, or set "
            "parallel.pp_virtual_stages to 1"
        )


def refuse_output_dir(config: Config) -> None:
    """A directory that holds another run, or anything else, is never written into.

    The same run may go on in it, from its newest checkpoint; what may differ is in resume.py.
    """
    directory = Path(config.output_dir)
    if directory.exists() and not directory.is_dir():
        raise InputError(f"output_dir {directory} is a file; choose another directory")
    if not directory.exists() or all(_LEFT_BY_A_START.fullmatch(path.name) for path in directory.iterdir()):
        return
    written = directory / "config.yaml"
    if not written.is_file():
        raise InputError(f"output_dir {directory} is not empty and holds no run of ours; choose another directory")
    old, new = (flat(each.model_dump(mode="json")) for each in (load_config(written), config))
    forbidden, _ = config_differences(old, new)
    if forbidden:
        raise InputError(
            f"output_dir {directory} holds a run with another configuration: {'; '.join(forbidden)}; put it back to "
            "continue that run, or choose another directory"
        )
    result = directory / (MODEL if config.lora is None else ADAPTER)
    if result.exists():
        raise InputError(
            f"output_dir {directory} holds this run already, finished; choose another directory, or move {result} away "
            "to go on from the last checkpoint with more steps"
        )
    find_start(config)


def _refuse_packing(config: Config, model: nn.Module) -> None:
    if reason := packing_refusal(model):
        raise InputError(f"data.packing: {reason}; set data.packing to false")
    if config.model.attention == "flash_attention_2" and config.train.micro_batch_size > 1:
        # transformers derives sample borders from position ids only for a batch of one row.
        raise InputError(
            f"train.micro_batch_size {config.train.micro_batch_size}: flash_attention_2 separates packed samples only "
            "at train.micro_batch_size 1; set that, or model.attention to sdpa"
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
                raise InputError(f"{key}.{index}.path: {source.path} does not exist; correct the path")


def _refuse_attention(config: Config) -> None:
    if config.model.attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise InputError("model.attention: flash_attention_2 needs the flash-attn package; install it or use sdpa")
