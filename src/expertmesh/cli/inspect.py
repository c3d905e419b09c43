"""`expertmesh inspect MODEL`: what a model is made of and how it can be laid out, before it is loaded.

For someone who has a model and some GPUs: experts, routing, parameters, and for each world size the possible
layouts with bytes per rank. Reads the configuration and the headers of weight files; never reads a weight and
never starts a process group. Models that expertmesh cannot shard are refused here, by name, as `train` would
refuse them.
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
from expertmesh.cli.printing import Terminal, bytes_text, count_text, print_rows
from expertmesh.compat import TorchDispatchMode
from expertmesh.config import MoeConfig, ParallelConfig, PrecisionConfig
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout, divisors, resolve_layout
from expertmesh.introspection.meta_run import EvenCounts
from expertmesh.io.safetensors_reader import INDEX_FILE, SINGLE_FILE, open_weight_files, read_index
from expertmesh.io.terminal import plural
from expertmesh.model import ModelOptions, build_model, plan_model
from expertmesh.parallel.refusals import expert_shard_dim
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


DEFAULT_WORLD_SIZES = (1, 2, 4, 8)
# What training keeps of each parameter: float32 weight, gradient and the two moments of AdamW.
STATE_BYTES = 16
LEGEND = f"""\
state: {STATE_BYTES} bytes per parameter (float32 weight, gradient and two AdamW moments)
experts here: how many a rank computes; of these kept: its share, the rest is gathered for each use
one block: parameters of the largest block as a rank computes with them, in bfloat16
activations come on top"""


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
    largest_block_dense: int
    """Parameters of a block without its routed experts, at most."""
    largest_block_expert: int
    """Parameters of a block's routed experts, at most."""

    @property
    def dense(self) -> int:
        return self.total - self.expert

    @property
    def active(self) -> int | None:
        """Parameters that one token meets: everything but the routed experts it was not sent to."""
        experts, top_k = self.experts.num_experts, self.experts.top_k
        return None if top_k is None else self.dense + self.expert * top_k // experts


def run(model: str, world_size: int | None = None, trust_remote_code: bool = False) -> int:
    """Print what `model` (directory or hub id) is, and its layouts for `world_size` (or 1, 2, 4, 8) ranks.

    Returns 0. Raises `InputError` for a model that cannot be found, read or sharded, and for a world size
    below 1.
    """
    if world_size is not None and world_size < 1:
        raise InputError(f"--world-size {world_size}: a job has at least 1 rank", key="cli.usage")
    config, directory = read_model_config(model, trust_remote_code=trust_remote_code, weights=False)
    precision = PrecisionConfig(params="float32", compute="float32", reduce="float32")
    built = build_model(config, directory, ModelOptions(precision, trust_remote_code=trust_remote_code))
    # What settings could mend is not asked about here, so they are those that every family can have.
    plan_model(built, Layout(), ShardOptions(precision, MoeConfig(aux_loss_coef=0.0)))
    facts = examine(built)
    console = Terminal()
    lines = [*describe_rows(built, facts), *frozen_rows(built), ("on disk", disk_text(config, directory))]
    print_rows(console, model, None, lines)
    for size in (world_size,) if world_size else DEFAULT_WORLD_SIZES:
        rows = [layout_row(facts, layout) for layout in layouts(facts, size)]
        if rows:
            print_rows(console, rank_text(facts, size), LAYOUT_COLUMNS, rows)
        else:
            console.print(f"{plural(size, 'rank')}: no layout, the experts cannot be sharded evenly over them\n")
    console.print(LEGEND, soft_wrap=True)
    return 0


def examine(model: nn.Module) -> ModelFacts:
    """Return the facts of a model on meta. Raises `InputError`, naming the module, when it cannot be sharded."""
    anatomy = describe(model)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    expert = {name: size for name, size in sizes.items() if anatomy.is_expert_parameter(name)}
    in_block, experts_in_block = (
        [sum(size for name, size in found.items() if is_inside(name, block)) for block in anatomy.blocks]
        for found in (sizes, expert)
    )
    return ModelFacts(
        blocks=len(decoder_blocks(anatomy)),
        other_blocks=len(anatomy.blocks) - len(decoder_blocks(anatomy)),
        moe_blocks=sum(any(is_inside(spec.name, block) for spec in anatomy.experts) for block in anatomy.blocks),
        experts=anatomy.experts[0],
        router=describe_router(model, anatomy),
        shared_experts=len({name.rpartition(".")[0] for name in anatomy.shared_experts}),
        total=sum(sizes.values()),
        expert=sum(expert.values()),
        largest_block_dense=max(a - b for a, b in zip(in_block, experts_in_block, strict=True)),
        largest_block_expert=max(experts_in_block),
    )


def describe_router(model: nn.Module, anatomy: Anatomy) -> str:
    """Describe how the first MoE layer routes: the score function from the operations it runs, the rest from names."""
    spec, config = anatomy.experts[0], model.config.get_text_config()  # type: ignore[union-attr, operator]
    called = spec.name if spec.router is None else spec.holders[0]
    parent = model.get_submodule(called.rpartition(".")[0])
    score = _score_function(parent, model.get_submodule(called), spec)
    parts = [score or "not recognised (runs the model's own code all the same)"]
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


class _ReachedExperts(Exception):
    """The MoE layer came to its experts: all routing is done."""


class _Operations(TorchDispatchMode):
    """Records the names of the operations that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


def _score_function(layer: nn.Module, experts: nn.Module, spec: ExpertsSpec) -> str | None:
    """Return `softmax` or `sigmoid`, whichever the layer applies between its input and its experts.

    Return None for a layer that cannot be called with hidden states alone: nothing but the printed word depends on it.
    """

    def stop(*_: object) -> None:
        raise _ReachedExperts

    handle = experts.register_forward_pre_hook(stop)
    dtype = next(experts.parameters()).dtype
    hidden_BTH = torch.empty(1, 2, spec.hidden_size, device="meta", dtype=dtype)
    try:
        with torch.no_grad(), EvenCounts(), _Operations() as operations:
            layer(hidden_BTH)
        return None
    except _ReachedExperts:
        scores = [name.strip("_") for name in operations.names if "softmax" in name or "sigmoid" in name]
        return scores[0] if scores else None
    except (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError):
        return None
    finally:
        handle.remove()


def layouts(facts: ModelFacts, world_size: int) -> list[Layout]:
    """Return every ep that divides both ranks and experts and leaves a slice that efsdp can shard; no other axes."""
    experts = facts.experts.num_experts
    sizes = [ep for ep in divisors(experts) if world_size % ep == 0]
    found = [resolve_layout(ParallelConfig(ep=ep), world_size, experts) for ep in sizes]
    return [layout for layout in found if _shard_text(facts.experts, layout)]


def _shard_text(experts: ExpertsSpec, layout: Layout) -> str:
    """Describe how efsdp shards a rank's experts; empty when their sizes do not allow it."""
    if layout.efsdp == 1:
        return "all"
    try:
        dim = expert_shard_dim(experts, layout)
    except InputError:
        return ""
    return f"1/{layout.efsdp} of each" if dim else str(experts.num_experts // layout.world_size)


LAYOUT_COLUMNS = ("ep", "efsdp", "experts here", "of these kept", "one block")


def layout_row(facts: ModelFacts, layout: Layout) -> tuple[str, ...]:
    """Return one layout as text, in the order of `LAYOUT_COLUMNS`; figures of one rank."""
    block = COMPUTE_BYTES * (facts.largest_block_dense + facts.largest_block_expert // layout.ep)
    here = facts.experts.num_experts // layout.ep
    return str(layout.ep), str(layout.efsdp), str(here), _shard_text(facts.experts, layout), bytes_text(block)


def rank_text(facts: ModelFacts, world_size: int) -> str:
    """Describe what each of `world_size` ranks keeps in every layout: parameters are sharded over all of them."""
    dense, expert = -(-facts.dense // world_size), -(-facts.expert // world_size)
    state = [bytes_text(STATE_BYTES * count) for count in (dense, expert, dense + expert)]
    return (
        f"{plural(world_size, 'rank')}: {count_text(dense)} dense + {count_text(expert)} "
        f"expert parameters each, state {state[0]} + {state[1]} = {state[2]}"
    )


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
