"""From a name or a model in memory to a sharded model: what the trainer and the Python interface both call.

`load_model` builds the model on meta, plans, shards it, then lets each rank read its own byte ranges; `parallelize`
plans and shards a model that is already in memory. Neither ever gathers a whole model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from expertmesh.adapters.peft_model import peft_adapters
from expertmesh.adapters.plan import adapt
from expertmesh.adapters.start import start
from expertmesh.config import Config, LoraConfig, MoeConfig, PrecisionConfig
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.parallel.apply import shard_model
from expertmesh.parallel.shard_plan import ShardOptions, ShardPlan, plan_shards
from expertmesh.state.other_code import BeforeSharding, refuse_sharded
from expertmesh.weights.audit import AuditMode, AuditReport, audit_weights
from expertmesh.weights.load import LoadReport, fill, head_names, start_head
from expertmesh.weights.meta_model import build_meta_model, kept_in_fp32, read_model_config
from expertmesh.weights.module_list import fuse_lists_of_experts

if TYPE_CHECKING:
    from expertmesh.distributed.layout import Layout
    from expertmesh.distributed.mesh import Mesh
    from expertmesh.parallel.checkpointing import CheckpointedLayers, CheckpointingMode


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What a user says about the model itself: how it is built, and which adapters it gets.

    `name` is what an adapter's config will call the model (the directory, if None), `revision` which one of it;
    `num_labels` are those of a sequence classifier.
    """

    precision: PrecisionConfig
    lora: LoraConfig | None = None
    attention: str = "auto"
    trust_remote_code: bool = False
    name: str | None = None
    revision: str | None = None
    num_labels: int | None = None

    @classmethod
    def of(cls, config: Config) -> "ModelOptions":
        model = config.model
        return cls(
            config.precision,
            config.lora,
            model.attention,
            model.trust_remote_code,
            model.name_or_path,
            model.revision,
        )


def parallelize(
    model: PreTrainedModel,
    mesh: "Mesh",
    *,
    precision: PrecisionConfig | None = None,
    moe: MoeConfig | None = None,
    activation_checkpointing: "CheckpointingMode | bool" = "none",
    checkpoint_layers: "CheckpointedLayers" = "all",
    compile: bool = False,
    lora: LoraConfig | None = None,
    seed: int = 42,
) -> PreTrainedModel:
    """Shard a model that is in memory, in place, and return it. Of a PeftModel it is the model inside, with adapters of
    ours that start from PEFT's values.

    Every rank must hold the same weights and call it; a difference raises `IntegrityError` (checked by one all-gather
    of a checksum per parameter). Each rank keeps its own slices, so memory falls to one share. Without `precision`,
    parameters keep their dtype and everything runs in it. With `lora` the model is frozen and gets adapters, whose
    first values depend on `seed` alone. Experts that are a list of MLPs are fused first.

    Parameters are replaced, as by `fully_shard`: make the optimizer of `model.parameters()` afterwards. One made before
    stops at its first `zero_grad` or `step` with `InputError`, and so does whatever else asks a parameter from before
    for its gradient. Hooks of modules stay; docs/other-loops.md has the rest (averages, hooks of parameters).

    `activation_checkpointing`, `checkpoint_layers` and `compile` are the keys of `train` (docs/training.md); True and
    False stand for "full" and "none".
    """
    refuse_sharded(model)
    before = BeforeSharding.of(model)
    peft = peft_adapters(model, lora)
    if precision is None:
        dtype = _name(next(p for p in model.parameters() if peft is None or not p.requires_grad).dtype)
        master = dtype if peft is None else _name(peft.dtype)
        precision = PrecisionConfig(params=master, compute=dtype, reduce=master)  # type: ignore[arg-type]
    if peft is not None:
        model = peft.become_ours(getattr(torch, precision.params))
    fuse_lists_of_experts(model)
    before.refuse_lost_hooks(model)
    if lora is not None:
        adapt(model, lora, getattr(torch, precision.params), model.config.name_or_path or None)
    options = ShardOptions.of(precision, moe, activation_checkpointing, checkpoint_layers, compile)
    with raise_on_all_ranks("planning the shards"):
        plan = plan_model(model, mesh.layout, options)
    shard_model(model, plan, mesh)
    start(model, seed)
    before.retire_parameters(model)
    return model


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_model(
    name_or_path: str | Path,
    mesh: "Mesh",
    *,
    precision: PrecisionConfig | None = None,
    moe: MoeConfig | None = None,
    lora: LoraConfig | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    attention: str = "auto",
    activation_checkpointing: "CheckpointingMode | bool" = "none",
    checkpoint_layers: "CheckpointedLayers" = "all",
    compile: bool = False,
    audit: AuditMode = "sampled",
    num_labels: int | None = None,
    seed: int = 42,
) -> PreTrainedModel:
    """Load a Hugging Face MoE checkpoint sharded over `mesh`; each rank reads only the bytes it owns.

    Every rank calls it. Returns the family's own `transformers` model class with FSDP2 applied, in training mode.
    Raises `InputError` before any weight is read for what is not supported, `IntegrityError` when the files do not
    fill the model exactly once, or when the `audit` finds a value in memory that is not the files': it compares samples
    of each expert and each shard, or, "full", every byte. With `lora` the weights are frozen, in precision.compute, and
    get adapters, whose first values depend on `seed` alone. With `num_labels` it is the family's sequence classifier
    (a reward model has one label), whose head comes from `seed` where the files are of a language model. The other
    options are those of `parallelize`.
    """
    with raise_on_all_ranks("reading the model's config"):
        config, directory = read_model_config(str(name_or_path), revision=revision, trust_remote_code=trust_remote_code)
    precision = precision or PrecisionConfig()
    model, _ = prepare_model(
        config,
        directory,
        mesh,
        ModelOptions(precision, lora, attention, trust_remote_code, str(name_or_path), revision, num_labels),
        ShardOptions.of(precision, moe, activation_checkpointing, checkpoint_layers, compile),
    )
    loaded, _ = load_weights(model, directory, mesh, audit, () if num_labels is None else head_names(model))
    start_head(model, loaded.new, seed)
    start(model, seed)
    return model


def prepare_model(
    config: PreTrainedConfig, directory: Path, mesh: "Mesh", options: ModelOptions, shards: ShardOptions
) -> tuple[PreTrainedModel, ShardPlan]:
    """Build the model on meta and shard it: everything about it is known, nothing is allocated, no file is read.

    Every rank calls it; issues one small all-reduce. What one rank refuses is raised on all.
    """
    with raise_on_all_ranks("planning the shards"):
        model = build_model(config, directory, options)
        plan = plan_model(model, mesh.layout, shards)
    shard_model(model, plan, mesh)
    return model, plan


def build_model(config: PreTrainedConfig, directory: Path, options: ModelOptions) -> PreTrainedModel:
    """The model on meta, with its adapters, in training mode. No communication.

    Of files only headers are read, and these only for weights that stay `as_published`.
    """
    precision, lora = options.precision, options.lora
    model = build_meta_model(
        config,
        getattr(torch, precision.params if lora is None else precision.compute),
        directory=directory,
        attention=None if options.attention == "auto" else options.attention,
        trust_remote_code=options.trust_remote_code,
        num_labels=options.num_labels,
    )
    if lora is not None:
        base = options.name or config.name_or_path or None
        keeps = directory if precision.frozen == "as_published" else None
        adapt(model, lora, getattr(torch, precision.params), base, options.revision, keeps)
    model.train()
    return model


def plan_model(model: PreTrainedModel, layout: "Layout", options: ShardOptions) -> ShardPlan:
    """Decide how `model` is sharded. Raises `InputError` for what cannot be trained exactly. No communication."""
    kept = kept_in_fp32(model, getattr(torch, options.precision.compute))
    return plan_shards(model, layout, options, kept_in_fp32=kept)


def load_weights(
    model: PreTrainedModel, directory: Path, mesh: "Mesh", audit: AuditMode = "sampled", new: Sequence[str] = ()
) -> tuple[LoadReport, AuditReport]:
    """Allocate the shards of a prepared model, fill them from `directory`, and audit them. Every rank calls it.

    Of `new` tensors the files may lack some. Whatever else is to write to the weights belongs before the audit.
    """
    loaded = fill(model, directory, allocate_on=mesh.device, new=new)
    return loaded, audit_weights(model, directory, audit, new)
