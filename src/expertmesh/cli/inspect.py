"""`expertmesh inspect MODEL`: what a model is made of, before it is loaded: experts, routing, parameters, files.

Reads the configuration and the headers of weight files; never reads a weight and never starts a process group. Models
that expertmesh cannot shard are refused here, by name, as `train` would refuse them. `plan` says how one is laid out.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from expertmesh.adapters.targets import by_gradient, listed
from expertmesh.anatomy import Anatomy, ExpertsSpec, decoder_blocks, describe, is_inside, names_without_blocks
from expertmesh.cli.printing import Terminal, count_text, print_rows
from expertmesh.config import MoeConfig, PrecisionConfig
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout
from expertmesh.io.safetensors_reader import INDEX_FILE, SINGLE_FILE, open_weight_files, read_index
from expertmesh.io.terminal import bytes_text, plural
from expertmesh.model import ModelOptions, build_model, plan_model
from expertmesh.parallel.shard_plan import ShardOptions, quantised_formats
from expertmesh.weights.meta_model import kept_in_fp32, read_model_config
from expertmesh.weights.quantised.published import method_of, published_tensors, quantisation

# What forward and backward run in by default.
COMPUTE_BYTES = 2


def frozen_rows(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield what `precision.frozen` would hold of the whole base.

    Experts and linear layers are packed, all else is in bfloat16.
    """
    anatomy, sizes = describe(model), {name: parameter.numel() for name, parameter in model.named_parameters()}
    plain = COMPUTE_BYTES * sum(sizes.values())
    found = [f"bfloat16 {bytes_text(plain)}"]
    for frozen in ("float8", "nf4", "nvfp4", "mxfp4"):
        try:
            formats = quantised_formats(model, anatomy, frozen)
        except InputError:  # no format of theirs; `train` says why
            continue
        units = {name: model.get_parameter(name).shape[0] for name in formats}
        packed = sum(kind.bytes * units[name] for name, kind in formats.items())
        kept = plain - COMPUTE_BYTES * sum(sizes[name] for name in formats) + packed
        found.append(f"{frozen} {bytes_text(kept)}")
    yield "frozen base", ", ".join(found)


def disk_text(config: PreTrainedConfig, directory: Path) -> str:
    """Describe the size, number of files, dtypes and quantisation of a directory's weights, from headers alone.

    Some or all of the weight files may be missing. Raises `IntegrityError` for a damaged one.
    """
    expected = {SINGLE_FILE} if (directory / SINGLE_FILE).exists() else set[str]()
    if not expected and (directory / INDEX_FILE).exists():
        expected = set(read_index(directory / INDEX_FILE).values())
    missing = [name for name in expected if not (directory / name).exists()]
    if not expected or len(missing) == len(expected):
        return "no weight files here; counts are from the configuration"
    if missing:
        return f"{len(expected) - len(missing)} of {len(expected)} weight files, the others are not here"
    with open_weight_files(directory) as files:
        by_dtype = Counter[str]()
        for tensor in files.tensors.values():
            by_dtype[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
        total = bytes_text(files.total_bytes)
        published = published_tensors(quantisation(config), files).tensors.values()
        plain = sum(lazy.numel() * lazy.plain_dtype.itemsize for lazy in published)
    settings = quantisation(config)
    how = "" if settings is None else f"; quantised ({method_of(settings)}), {bytes_text(plain)} with bfloat16 instead"
    kinds = ", ".join(f"{dtype} {bytes_text(size)}" for dtype, size in by_dtype.most_common())
    return f"{total} in {plural(len(expected), 'file')} ({kinds}){how}"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The counts of a model that `inspect` prints. Sizes are parameters; tied parameters count once."""

    blocks: int
    """Blocks of the language model."""
    other_blocks: int
    """Blocks of other towers."""
    moe_blocks: int
    experts: ExpertsSpec
    """The first experts module of the model."""
    router: str
    """The rule by which tokens choose experts, in words."""
    shared_experts: int
    total: int
    expert: int
    """Parameters of all routed experts."""

    @property
    def dense(self) -> int:
        return self.total - self.expert

    @property
    def active(self) -> int | None:
        """Parameters that one token meets: everything but the routed experts it was not sent to."""
        experts, top_k = self.experts.num_experts, self.experts.top_k
        return None if top_k is None else self.dense + self.expert * top_k // experts


def run(model: str, trust_remote_code: bool = False) -> int:
    """Print what `model` (directory or hub id) is; return 0.

    Raises `InputError` for a model that cannot be found, read or sharded.
    """
    config, directory = read_model_config(model, trust_remote_code=trust_remote_code, weights=False)
    precision = PrecisionConfig(params="float32", compute="float32", reduce="float32")
    built = build_model(config, directory, ModelOptions(precision, trust_remote_code=trust_remote_code))
    # What settings could mend is not asked about here, so they are those that every family can have.
    plan_model(built, Layout(), ShardOptions(precision, MoeConfig(aux_loss_coef=0.0)))
    facts = examine(built)
    lines = [*describe_rows(built, facts), *frozen_rows(built), ("on disk", disk_text(config, directory))]
    print_rows(Terminal(), model, None, lines)
    return 0


def examine(model: nn.Module) -> ModelFacts:
    """Return the facts of a model on meta. Raises `InputError`, naming the module, when it cannot be sharded."""
    anatomy = describe(model)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    expert = {name: size for name, size in sizes.items() if anatomy.is_expert_parameter(name)}
    return ModelFacts(
        blocks=len(decoder_blocks(anatomy)),
        other_blocks=len(anatomy.blocks) - len(decoder_blocks(anatomy)),
        moe_blocks=sum(any(is_inside(spec.name, block) for spec in anatomy.experts) for block in anatomy.blocks),
        experts=anatomy.experts[0],
        router=describe_router(model, anatomy),
        shared_experts=len({name.rpartition(".")[0] for name in anatomy.shared_experts}),
        total=sum(sizes.values()),
        expert=sum(expert.values()),
    )


def describe_router(model: nn.Module, anatomy: Anatomy) -> str:
    """Describe how the first MoE layer routes, by the names of its settings and tensors; empty if none is known."""
    spec, config = anatomy.experts[0], model.config.get_text_config()  # type: ignore[union-attr, operator]
    called = spec.name if spec.router is None else spec.holders[0]
    parent = model.get_submodule(called.rpartition(".")[0])
    parts = [str(score)] if (score := getattr(config, "scoring_func", None)) else []
    if (groups := getattr(config, "n_group", None) or 1) > 1:
        parts.append(f"{getattr(config, 'topk_group', None)} of {groups} groups")
    tensors = [*parent.named_parameters(), *parent.named_buffers()]
    biases = [name for name, tensor in tensors if tensor.numel() == spec.num_experts]
    if any(word in name for name in biases for word in ("correction", "balance", "expert_bias")):
        parts.append("correction bias")
    if getattr(config, "norm_topk_prob", None):
        parts.append("weights renormalised")
    if (scaling := getattr(config, "routed_scaling_factor", None)) not in (None, 1.0):
        parts.append(f"scaled by {float(scaling):g}")
    return ", ".join(parts)


def describe_rows(model: nn.Module, facts: ModelFacts) -> Iterator[tuple[str, str]]:
    """Yield the model's facts as (label, text)."""
    config: Any = model.config
    spec, vocabulary = facts.experts, int(config.get_text_config().vocab_size)
    targets = listed(by_gradient(model, describe(model))[0])
    yield "family", f"{config.model_type} ({type(model).__name__})"
    yield "layers", f"{facts.blocks}: {facts.moe_blocks} MoE, {facts.blocks - facts.moe_blocks} dense"
    if facts.other_blocks:
        yield "  beside them", f"{facts.other_blocks} blocks outside of the language model, which text does not pass"
    yield "experts", f"{spec.num_experts} per layer, top-{spec.top_k or '?'}, width {spec.intermediate_size}"
    if facts.router:
        yield "router", facts.router
    yield "shared experts", f"in {facts.shared_experts} layers" if facts.shared_experts else "none"
    kept = kept_in_fp32(model, torch.bfloat16)  # type: ignore[arg-type]
    if names := [name for name, _ in model.named_parameters() if kept(name)]:
        yield "float32 under bfloat16", names_without_blocks(names)
    yield "hidden, vocabulary", f"{spec.hidden_size:,}, {vocabulary:,}"
    yield "parameters", count_text(facts.total)
    yield (
        "  active per token",
        count_text(facts.active) if facts.active is not None else "unknown: the config has no top-k",
    )
    yield "  dense", count_text(facts.dense)
    yield "  routed experts", f"{count_text(facts.expert)} ({100 * facts.expert / facts.total:.1f} %)"
    yield "lora targets", ", ".join(targets)
    yield from ((f"  {group}", ", ".join(endings)) for group, endings in targets.items() if group != "lm_head")
