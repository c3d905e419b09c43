"""Make a sharded model from a name or from a model in memory, for the trainer and the Python interface.

`load_model` builds the model on meta, plans, shards it, then lets each rank read its own byte ranges. `parallelize`
plans and shards a model that is already in memory. Neither ever gathers a full model.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from expertmesh.adapters.peft_model import PeftAdapters, peft_adapters
from expertmesh.adapters.plan import adapt, remember_formats
from expertmesh.adapters.start import start_adapters
from expertmesh.anatomy import describe, head_of
from expertmesh.config import Config, LoraConfig, MoeConfig, PrecisionConfig
from expertmesh.config.errors import InputError
from expertmesh.config.root import problems_of_frozen, problems_of_random_base
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.introspection.attention import decoder_of
from expertmesh.parallel.apply import shard_model
from expertmesh.parallel.pipeline import refuse_by_layer
from expertmesh.parallel.shard_plan import ShardOptions, ShardPlan, plan_shards
from expertmesh.state.model_view import meta_copy
from expertmesh.state.other_code import BeforeSharding, refuse_sharded
from expertmesh.weights.audit import AuditMode, AuditReport, audit_weights
from expertmesh.weights.first_values import start_head
from expertmesh.weights.load import LoadReport, fill
from expertmesh.weights.meta_model import build_meta_model, kept_in_fp32, read_model_config
from expertmesh.weights.module_list import fuse_lists_of_experts

if TYPE_CHECKING:
    from expertmesh.distributed.layout import Layout
    from expertmesh.distributed.mesh import Mesh
    from expertmesh.parallel.checkpointing import CheckpointedLayers, CheckpointingMode

Task = Literal["reward", "classification"]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The user's options for the model itself: how it is built, and which adapters it gets."""

    precision: PrecisionConfig
    """The dtypes of parameters, compute and reductions."""
    lora: LoraConfig | None = None
    """The adapters, or None."""
    attention: str = "auto"
    """transformers' `attn_implementation`; "auto" leaves the choice to transformers."""
    trust_remote_code: bool = False
    """Allow code that comes with the model to run."""
    name: str | None = None
    """The model's name in the config of an adapter; None for the directory."""
    revision: str | None = None
    """The revision of `name`, for the config of an adapter."""
    num_labels: int | None = None
    """The number of labels of a sequence classifier; None for a language model."""
    trains_vision: bool = False
    """Train what is outside of the text model as well."""
    frozen: bool = False
    """Freeze the weights, in precision.compute and precision.frozen, as under adapters; the model never trains."""

    @classmethod
    def of(cls, config: Config) -> "ModelOptions":
        """Take the options from a training config."""
        model = config.model
        return cls(
            precision=config.trained_precision,
            lora=config.lora,
            attention=model.attention,
            trust_remote_code=model.trust_remote_code,
            name=model.name_or_path,
            revision=model.revision,
            num_labels=1 if config.objective.facts.rewards else None,
            trains_vision=model.vision == "train",
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
    by_layer: bool = False,
    lora: LoraConfig | None = None,
    seed: int = 42,
) -> PreTrainedModel:
    """Shard a model that is in memory, in place, and return it.

    For a PeftModel it returns the model inside, with adapters of expertmesh that start from PEFT's values. Experts that
    are a list of MLPs are fused first. Each rank keeps only its own slices, so that memory falls to one share.

    Parameters are replaced, as by `fully_shard`: make the optimizer afterwards. One that was made before raises
    `InputError` at its first use, and so does other code that reads a replaced gradient. Hooks of modules stay.

    Args:
        model: Every rank must hold the same weights.
        precision: None keeps the dtype of the parameters, and everything runs in it.
        activation_checkpointing: The key of `train` (docs/training.md); True and False stand for "full" and "none".
        checkpoint_layers: The key of `train`.
        compile: The key of `train`.
        by_layer: Refuse a model that cannot accumulate by layer.
        lora: Freeze the model and add adapters.
        seed: The first values of adapters depend on it alone.

    Raises:
        InputError: The model is already sharded, or cannot be trained exactly.
        IntegrityError: The weights differ between ranks.

    Collectives: every rank calls it. One all-gather of a checksum per parameter checks that the weights are equal.
    Small all-reduces report errors of planning, of compiling and of starting adapters on all ranks.
    """
    # Together: a rank that is refused alone would leave the others waiting in the first collective.
    with raise_on_all_ranks("planning the shards"):
        refuse_sharded(model)
        before = BeforeSharding.of(model)
        peft = peft_adapters(model, lora)
        if precision is None:
            # Of a PeftModel the frozen base has the compute dtype, and its adapters that of the masters.
            dtype = _name(next(p for p in model.parameters() if peft is None or not p.requires_grad).dtype)
            master = dtype if peft is None else _name(peft.dtype)
            precision = PrecisionConfig(params=master, compute=dtype, reduce=master)  # type: ignore[arg-type]
        options = ShardOptions.of(precision, moe, activation_checkpointing, checkpoint_layers, compile, by_layer)
        if peft is not None:
            # First a copy on meta, so that a refusal leaves the PeftModel with its adapters.
            copy = meta_copy(model)
            _plan_in_memory(copy, BeforeSharding.of(copy), replace(peft, model=copy), None, options, mesh)
    with raise_on_all_ranks("planning the shards"):
        model, plan = _plan_in_memory(model, before, peft, lora, options, mesh)
    shard_model(model, plan, mesh)
    start_adapters(model, seed)
    before.retire_parameters(model)
    return model


def _plan_in_memory(
    model: PreTrainedModel,
    before: BeforeSharding,
    peft: PeftAdapters | None,
    lora: LoraConfig | None,
    options: ShardOptions,
    mesh: "Mesh",
) -> tuple[PreTrainedModel, ShardPlan]:
    """Make a model in memory, in place, one that can be sharded, and plan how; for a PeftModel the model inside.

    Raises:
        InputError: It cannot be trained exactly. No communication.
    """
    masters = getattr(torch, options.precision.params)
    if peft is not None:
        model = peft.become_ours(masters)
    fuse_lists_of_experts(model)
    before.refuse_lost_hooks(model)
    if lora is not None:
        adapt(model, lora, masters, model.config.name_or_path or None)
    return model, plan_model(model, mesh.layout, options)


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
    from_config: bool = False,
    trust_remote_code: bool = False,
    attention: str = "auto",
    activation_checkpointing: "CheckpointingMode | bool" = "none",
    checkpoint_layers: "CheckpointedLayers" = "all",
    compile: bool = False,
    by_layer: bool = False,
    audit: AuditMode = "sampled",
    task: Task | None = None,
    num_labels: int | None = None,
    seed: int = 42,
) -> PreTrainedModel:
    """Load a Hugging Face MoE checkpoint sharded over `mesh`; each rank reads only the bytes it owns.

    Args:
        from_config: Draw the weights from `seed` as transformers initialises the class, the same in every layout, for a
            model that has a config and no weights.
        audit: Compare samples of each expert and each shard with the files, or with "full" every byte.
        lora: Freeze the weights, in precision.compute, and add adapters.
        task: "reward" (one label) or "classification": the family's sequence classifier, whose head is drawn from
            `seed` if the files hold a language model. None: a language model, unless `num_labels` is given.
        num_labels: The labels of a classifier; None for those of its config.
        seed: The first values of adapters, of a new head, and of weights `from_config`, depend on it alone.

    The other options are those of `parallelize`.

    Returns:
        The family's own `transformers` model class with FSDP2 applied, in training mode.

    Raises:
        InputError: Something is not supported; raised before any weight is read.
        IntegrityError: The files do not fill the model exactly once, or the audit finds a value in memory that differs
            from the files.

    Collectives: every rank calls it.
    """
    name, precision = str(name_or_path), precision or PrecisionConfig()
    with raise_on_all_ranks("reading the model's config"):
        for problem in (*problems_of_random_base(from_config, lora), *problems_of_frozen(precision, lora)):
            raise InputError(problem, key="config.combination")
        config, directory = read_model_config(name, revision, trust_remote_code, from_config=from_config)
        labels = _labels(task, num_labels, config)
    options = ModelOptions(
        precision, lora, attention, trust_remote_code, name, revision, num_labels=labels, trains_vision=True
    )
    shards = ShardOptions.of(precision, moe, activation_checkpointing, checkpoint_layers, compile, by_layer)
    model, _ = prepare_model(config, directory, mesh, options, shards)
    fill_and_audit(model, directory, mesh, audit, seed, from_config=from_config)
    start_adapters(model, seed)
    return model


def _labels(task: Task | None, given: int | None, config: PreTrainedConfig) -> int | None:
    """Return how many labels `load_model` means; None for a language model. Raises `InputError` for a contradiction."""
    if task not in (None, *get_args(Task)):
        problem = f"task is {task!r}; give reward or classification, or leave it out for a language model"
        raise InputError(f"load_model: {problem}", key="config.wrong-value")
    if given is not None and given < 1:
        raise InputError(f"load_model: num_labels is {given}; give 1 or more", key="config.wrong-value")
    if task == "reward" and given not in (None, 1):
        problem = f"task is reward, which has one label, but num_labels is {given}; leave num_labels out"
        raise InputError(f"load_model: {problem}", key="config.combination")
    if task == "classification":
        return config.num_labels if given is None else given
    return 1 if task == "reward" else given


def prepare_model(
    config: PreTrainedConfig, directory: Path, mesh: "Mesh", options: ModelOptions, shards: ShardOptions
) -> tuple[PreTrainedModel, ShardPlan]:
    """Build the model on meta and shard it. Nothing is allocated, and no weights are read.

    An error on one rank is raised on all.

    Collectives: every rank calls it. One small all-reduce on the default group, one more if parts are compiled, and
    those of `install` if the dispatcher is a library's.
    """
    with raise_on_all_ranks("planning the shards"):
        model = build_model(config, directory, options)
        plan = plan_model(model, mesh.layout, shards)
    shard_model(model, plan, mesh)
    return model, plan


def build_model(config: PreTrainedConfig, directory: Path, options: ModelOptions) -> PreTrainedModel:
    """Return the model on meta, with its adapters, in training mode. No communication.

    Only the headers of weights files are read, and only for weights that stay `as_published`.
    """
    precision, lora = options.precision, options.lora
    trains = lora is None and not options.frozen
    model = build_meta_model(
        config,
        getattr(torch, precision.params if trains else precision.compute),
        directory=directory,
        attention=None if options.attention == "auto" else options.attention,
        trust_remote_code=options.trust_remote_code,
        num_labels=options.num_labels,
    )
    published_from = directory if precision.frozen == "as_published" else None
    if lora is not None:
        base = options.name or config.name_or_path or None
        adapt(model, lora, getattr(torch, precision.params), base, options.revision, published_from)
    if lora is None and not options.trains_vision:
        for name in vision_parameters(model):
            model.get_parameter(name).requires_grad_(False)
    if options.frozen:
        model.requires_grad_(False)
        if published_from is not None:
            remember_formats(model, published_from)
    model.train(not options.frozen)
    return model


def vision_parameters(model: PreTrainedModel) -> list[str]:
    """Return the names of the parameters outside of the text model and its head, those of towers and projectors."""
    config: Any = model.config
    if config.get_text_config() is config:
        return []
    head = head_of(model)
    parts = [decoder_of(model, describe(model)), *([] if head is None else [head])]
    text = {id(parameter) for part in parts for parameter in part.parameters()}
    return [name for name, parameter in model.named_parameters() if id(parameter) not in text]


def plan_model(model: PreTrainedModel, layout: "Layout", options: ShardOptions) -> ShardPlan:
    """Decide how `model` is sharded. Raises `InputError` if it cannot be trained exactly. No communication."""
    kept = kept_in_fp32(model, getattr(torch, options.precision.compute))
    plan = plan_shards(model, layout, options, kept_in_fp32=kept)
    if options.by_layer:
        refuse_by_layer(plan, layout.pp)
    return plan


def fill_and_audit(
    model: PreTrainedModel,
    directory: Path,
    mesh: "Mesh",
    audit: AuditMode = "sampled",
    seed: int = 42,
    *,
    from_config: bool = False,
) -> tuple[LoadReport, AuditReport | None]:
    """Allocate the shards of a prepared model, fill them from `directory`, and audit them.

    The audit comes last, because it cannot find a later write to the weights.

    Args:
        seed: The first values of a new head are drawn from it.
        from_config: Draw all first values instead, which no file can be compared with.

    Collectives: every rank calls it; those of `fill` and `audit_weights`.
    """
    loaded = fill(model, directory, allocate_on=mesh.device, seed=seed if from_config else None)
    start_head(model, loaded.new, seed)
    return loaded, None if from_config else audit_weights(model, directory, audit)
