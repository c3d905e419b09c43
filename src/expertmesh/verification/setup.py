"""What is verified: the run's model (all of its layers or the first few), its layout, and a few steps of its data.

Made by every rank alike before anything is loaded, and without communication, so that what cannot work is refused on
all ranks with one sentence. What would make two equal runs differ (dropout, jitter) is switched off and said.
"""

import importlib.util
import re
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from expertmesh.adapters.plan import adapt
from expertmesh.anatomy import Anatomy, describe
from expertmesh.config import Config, PrecisionConfig
from expertmesh.config.errors import InputError
from expertmesh.data import build_dataset, load_tokenizer, padding_token_id
from expertmesh.data.loader import accumulation_of
from expertmesh.distributed.layout import Layout
from expertmesh.experts.install import choose_backend
from expertmesh.introspection.attention import packing_refusal
from expertmesh.parallel.pipeline import plan_cut
from expertmesh.parallel.refusals import expert_shard_dim, refuse_model
from expertmesh.planning.choose import choose_layout
from expertmesh.planning.search import explicit
from expertmesh.training.preflight import refuse_interleaving
from expertmesh.verification.options import VerifyOptions
from expertmesh.verification.samples import StepData, random_dataset, steps_of
from expertmesh.weights.meta_model import build_meta_model, read_model_config

STEPS = 3
_RANDOM = re.compile(r"(dropout|jitter|_pdrop$)")


@dataclass(frozen=True, slots=True)
class Setup:
    """`config` is the run's without what is random, its layout explicit; `steps` are those to compute; `notes` what the
    report has to say.

    `dropped` matches the file tensors of layers that were left out (None: none were). `packs`: whether the model can
    keep packed samples apart.
    """

    config: Config
    model_config: PreTrainedConfig
    directory: Path
    anatomy: Anatomy
    layout: Layout
    steps: tuple[StepData, ...]
    notes: tuple[str, ...]
    layers: tuple[int, int]
    dropped: str | None
    packs: bool

    def meta_model(self, dtype: torch.dtype, *, fuse: bool = True) -> PreTrainedModel:
        """The model on meta, unsharded, knowing which tensors of the files it has not."""
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
        """Let `model` be filled from files that hold more layers than it has."""
        if self.dropped is not None:
            known = set(model._keys_to_ignore_on_load_unexpected or ())
            model._keys_to_ignore_on_load_unexpected = known | {self.dropped}


def set_up(config: Config, options: VerifyOptions, world_size: int) -> Setup:
    """Read config.json, headers, tokenizer and data, and decide. Raises `InputError` for whatever cannot work."""
    config, notes = _without_chance(config)
    model_config, directory = read_model_config(
        config.model.name_or_path, revision=config.model.revision, trust_remote_code=config.model.trust_remote_code
    )
    _silence(model_config, notes)
    if config.model.attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise InputError("model.attention: flash_attention_2 needs the flash-attn package; install it or use sdpa")
    whole = _built(config, model_config)
    every = len(describe(whole).blocks)
    # That of the whole model also where some layers are left out: what `train` would choose.
    layout = choose_layout(config, model_config, world_size, describe(whole).num_experts).layout
    config = config.model_copy(update={"parallel": explicit(layout)})
    kept = every if options.layers is None else min(options.layers, every)
    dropped = None
    if kept < every:
        dropped = _dropped(describe(whole), kept)
        model_config = _first_layers(model_config, kept, every)
    model = _built(config, model_config)
    anatomy = _checked_anatomy(model, kept)
    for spec in anatomy.experts:
        expert_shard_dim(spec, layout)
        choose_backend(spec, config.moe.compute, getattr(torch, config.precision.compute))
    accumulation = accumulation_of(config.train.global_batch_size, config.train.micro_batch_size, layout.data_ranks)
    refusal = packing_refusal(model)
    if config.data.packing and refusal is not None:
        raise InputError(f"data.packing: {refusal}; set data.packing to false")
    if config.lora is not None:
        adapt(model, config.lora, getattr(torch, config.precision.params), config.model.name_or_path)
    refuse_model(model, anatomy, config.moe)
    if layout.pp > 1:
        plan_cut(model, anatomy, layout)
        refuse_interleaving(layout, accumulation)
    vocabulary = int(model_config.get_text_config().vocab_size)
    if options.random_data:
        dataset, pad = random_dataset(vocabulary, config.data.max_length, 64, config.train.seed), 0
        notes.append("token ids are random: no data was named")
    else:
        tokenizer = load_tokenizer(config.model)
        dataset, _ = build_dataset(config.data.train, config.data, tokenizer, model_vocab_size=vocabulary)
        pad = padding_token_id(tokenizer, vocabulary)
    steps = steps_of(dataset, config, layout, tokens=options.tokens, steps=STEPS, pad_token_id=pad)
    return Setup(
        config,
        model_config,
        directory,
        anatomy,
        layout,
        tuple(steps),
        tuple(notes),
        (kept, every),
        dropped,
        refusal is None,
    )


def in_float32(precision: PrecisionConfig) -> PrecisionConfig:
    """The precision of comparisons that are about what is computed, not how finely; fp64 stays."""
    if precision.params == "float64":
        return precision
    return PrecisionConfig(params="float32", compute="float32", reduce="float32")


def _built(config: Config, model_config: PreTrainedConfig) -> PreTrainedModel:
    return build_meta_model(
        model_config,
        getattr(torch, config.precision.params),
        attention=None if config.model.attention == "auto" else config.model.attention,
        trust_remote_code=config.model.trust_remote_code,
    )


def _without_chance(config: Config) -> tuple[Config, list[str]]:
    if config.lora is None or config.lora.dropout == 0.0:
        return config, []
    lora = config.lora.model_copy(update={"dropout": 0.0})
    return config.model_copy(update={"lora": lora}), [f"lora.dropout {config.lora.dropout:g} is off"]


def _silence(config: PreTrainedConfig, notes: list[str]) -> None:
    """Switch off what is random in training, in the config and in those inside it."""
    for key, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _silence(value, notes)
        elif isinstance(value, float) and value and _RANDOM.search(key):
            setattr(config, key, 0.0)
            notes.append(f"the model's {key} {value:g} is off")


def _dropped(anatomy: Anatomy, kept: int) -> str:
    """A pattern for file tensors of the blocks from `kept` on; refused where blocks are in several lists."""
    lists = {name.rpartition(".")[0] for name in anatomy.blocks}
    if len(lists) > 1:
        raise InputError(f"--layers: this model has blocks in {', '.join(sorted(lists))}; leave --layers out")
    numbers = "|".join(name.rpartition(".")[2] for name in anatomy.blocks[kept:])
    return rf"(^|\.){re.escape(lists.pop().rpartition('.')[2])}\.({numbers})\."


def _first_layers(config: PreTrainedConfig, kept: int, every: int) -> PreTrainedConfig:
    """The same model with its first `kept` blocks: every list in its config with an entry per layer is cut too."""
    cut = deepcopy(config)
    text: Any = cut.get_text_config()
    for key, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == every:
            vars(text)[key] = type(value)(value[:kept])
    vars(text)["num_hidden_layers"] = kept
    return cut


def _checked_anatomy(model: PreTrainedModel, kept: int) -> Anatomy:
    try:
        anatomy = describe(model)
    except InputError as error:
        raise InputError(f"--layers {kept}: {error}; keep more layers") from error
    if len(anatomy.blocks) != kept:
        raise InputError(f"--layers {kept}: {model.config.model_type} cannot be cut to its first layers; leave it out")
    return anatomy
