"""Prepare a verification: the run's model (all of its layers or the first few), its layout and a few steps of its data.

Every rank makes the same setup before any weights are loaded. It never communicates, so all ranks refuse a
configuration that cannot work with the same sentence. Random parts (dropout, jitter) would make two equal runs differ:
they are switched off, and the report has a note about it.
"""

import re
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from expertmesh.anatomy import Anatomy
from expertmesh.compat import ignore_when_loading
from expertmesh.config import Config, PrecisionConfig
from expertmesh.config.errors import InputError
from expertmesh.data import Recipe, found_or_built, load_tokenizer, padding_token_id
from expertmesh.distributed.layout import Layout, explicit
from expertmesh.introspection.attention import packing_refusal
from expertmesh.planning.forecast import forecast
from expertmesh.step.forward_backward import Order
from expertmesh.training.startup.model_check import Checked, check_model, longest
from expertmesh.training.startup.preflight import refuse_config, refuse_disk
from expertmesh.training.teacher import Teacher
from expertmesh.verification.options import VerifyOptions
from expertmesh.verification.samples import StepData, random_dataset, steps_of
from expertmesh.weights.meta_model import build_meta_model, read_model_config

STEPS = 3
_RANDOM = re.compile(r"(dropout|jitter|_pdrop$)")


@dataclass(frozen=True, slots=True)
class Setup:
    """The model, the layout and the data of one verification."""

    config: Config
    """The run's configuration with an explicit layout and without dropout."""
    model_config: PreTrainedConfig
    """The model's config, without random parts and cut to the verified layers."""
    directory: Path
    """The directory of the model's files."""
    anatomy: Anatomy
    """The anatomy of the verified layers."""
    layout: Layout
    """The sizes of the mesh axes."""
    order: Order
    """The order of the micro-batches of a step."""
    steps: tuple[StepData, ...]
    """The optimizer steps to compute."""
    notes: tuple[str, ...]
    """Sentences for the report."""
    layers: tuple[int, int]
    """The number of verified layers, and of all layers of the model."""
    dropped: str | None
    """A pattern for the file tensors of layers that are left out; None if none are."""
    packs: bool
    """True if the model can keep packed samples apart."""
    weights_seed: int | None
    """The seed of random first weights; None if they are read from `directory`."""
    teacher: "Setup | None" = None
    """The same with the model, all of it, that the objective learns from; None without one."""

    def meta_model(self, dtype: torch.dtype, *, fuse: bool = True) -> PreTrainedModel:
        """Return the unsharded model on meta; it ignores file tensors of layers that are left out.

        Args:
            dtype: The dtype of its parameters.
            fuse: Fuse experts that are a list of MLPs.
        """
        model = build_meta_model(
            self.model_config,
            dtype,
            directory=self.directory,
            attention=None if self.config.model.attention == "auto" else self.config.model.attention,
            trust_remote_code=self.config.model.trust_remote_code,
            fuse=fuse,
        )
        self.forget_layers(model)
        return model

    def forget_layers(self, model: PreTrainedModel) -> None:
        """Let `model` load from files that contain more layers than it has."""
        if self.dropped is not None:
            ignore_when_loading(model, self.dropped)


def set_up(config: Config, options: VerifyOptions, world_size: int) -> Setup:
    """Read config.json, headers, tokenizer and data, and decide what to verify.

    Raises:
        InputError: If the configuration, the model or the data cannot work.

    Collectives: none.
    """
    config, notes = _without_chance(config)
    refuse_config(config, names_data=not options.random_data)
    model = config.model
    model_config, directory = read_model_config(
        model.name_or_path, model.revision, model.trust_remote_code, from_config=model.from_config
    )
    _silence(model_config, notes)
    if config.moe.dispatch == "deepep":
        notes.append("moe.dispatch deepep carries bfloat16 alone: it is auto in what is compared in other precisions")
    if options.random_data and (most := longest(model_config)) is not None:
        length = min(config.data.max_length, most)
        config = config.model_copy(update={"data": config.data.model_copy(update={"max_length": length})})
    # Check the full model even if layers are left out: `train` would refuse the same, and choose the same layout.
    checked = check_model(config, model_config, directory, world_size)
    layout, every = checked.layout, len(checked.anatomy.blocks)
    config = config.model_copy(update={"parallel": explicit(layout)})
    kept = every if options.layers is None else min(options.layers, every)
    dropped = None
    if kept < every:
        dropped = _dropped(checked.anatomy, kept)
        model_config = _first_layers(model_config, kept, every)
        config = _without_layers(config)
        checked = _checked_layers(config, model_config, directory, kept, world_size)
    if not options.random_data:
        refuse_disk(config, checked.model)
    if warning := forecast(config, checked).warning:
        notes.append(warning)
    vocabulary = checked.vocab_size
    if options.random_data:
        dataset, pad = random_dataset(vocabulary, config.data.max_length, 64, config.train.seed), 0
        notes.append("token ids are random: no data was named")
    else:
        tokenizer = load_tokenizer(config.model, config.data.chat_template)
        dataset, _ = found_or_built(config, Recipe.of(config, config.data.train, tokenizer, vocabulary))
        pad = padding_token_id(tokenizer, vocabulary)
    steps = steps_of(dataset, config, layout, tokens=options.tokens, steps=STEPS, pad_token_id=pad)
    setup = Setup(
        config,
        model_config,
        directory,
        checked.anatomy,
        layout,
        checked.order,
        tuple(steps),
        tuple(notes),
        (kept, every),
        dropped,
        packing_refusal(checked.model) is None,
        config.weights_seed,
    )
    return replace(setup, teacher=_of_teacher(setup, checked.objective.teacher))


def _of_teacher(setup: Setup, teacher: Teacher | None) -> Setup | None:
    if teacher is None:
        return None
    anatomy, config = teacher.plan.anatomy, setup.config
    every = len(anatomy.blocks)
    return replace(
        setup,
        config=config.model_copy(update={"train": config.train.model_copy(update={"compile": False})}),
        model_config=teacher.model_config,
        directory=teacher.directory,
        anatomy=anatomy,
        layers=(every, every),
        dropped=None,
        weights_seed=None,
    )


def in_float32(precision: PrecisionConfig) -> PrecisionConfig:
    """Return the precision with fp32 everywhere but in `frozen`, for comparisons with a tolerance; fp64 stays fp64."""
    if precision.params == "float64":
        return precision
    return PrecisionConfig(params="float32", compute="float32", reduce="float32", frozen=precision.frozen)


def _without_chance(config: Config) -> tuple[Config, list[str]]:
    if config.model.from_config:
        return config, [f"the weights are random, drawn from train.seed {config.train.seed}"]
    if config.lora is None or config.lora.dropout == 0.0:
        return config, []
    lora = config.lora.model_copy(update={"dropout": 0.0})
    return config.model_copy(update={"lora": lora}), [f"lora.dropout {config.lora.dropout:g} is off"]


def _silence(config: PreTrainedConfig, notes: list[str]) -> None:
    """Set dropout and jitter to 0 in the config and its nested configs, and add a note for each."""
    for key, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _silence(value, notes)
        elif isinstance(value, float) and value and _RANDOM.search(key):
            setattr(config, key, 0.0)
            notes.append(f"the model's {key} {value:g} is off")


def _dropped(anatomy: Anatomy, kept: int) -> str:
    """Return a pattern for the file tensors of the blocks from `kept` on.

    Raises:
        InputError: If the model has its blocks in several lists.
    """
    lists = {name.rpartition(".")[0] for name in anatomy.blocks}
    if len(lists) > 1:
        raise InputError(
            f"--layers: this model has blocks in {', '.join(sorted(lists))}; leave --layers out",
            key="verify.layers-unsupported",
        )
    numbers = "|".join(name.rpartition(".")[2] for name in anatomy.blocks[kept:])
    return rf"(^|\.){re.escape(lists.pop().rpartition('.')[2])}\.({numbers})\."


def _first_layers(config: PreTrainedConfig, kept: int, every: int) -> PreTrainedConfig:
    """Return the config of the model's first `kept` blocks, with each list of one entry per layer cut as well."""
    cut = deepcopy(config)
    text: Any = cut.get_text_config()
    for key, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == every:
            vars(text)[key] = type(value)(value[:kept])
    vars(text)["num_hidden_layers"] = kept
    return cut


def _without_layers(config: Config) -> Config:
    """Return `config` without names of layers, which may be left out: any checkpointing and any placement will do."""
    moe, train = config.moe, config.train.model_copy(update={"checkpoint_layers": "all"})
    if moe.placement != "contiguous":
        moe = moe.model_copy(update={"placement": "balanced"})
    return config.model_copy(update={"train": train, "moe": moe})


def _checked_layers(
    config: Config, model_config: PreTrainedConfig, directory: Path, kept: int, world_size: int
) -> Checked:
    try:
        checked = check_model(config, model_config, directory, world_size)
    except InputError as error:
        raise InputError(f"--layers {kept}: {error}; keep more layers", key=error.key) from error
    if len(checked.anatomy.blocks) != kept:
        raise InputError(
            f"--layers {kept}: {model_config.model_type} cannot be cut to its first layers; leave it out",
            key="verify.layers-unsupported",
        )
    return checked
