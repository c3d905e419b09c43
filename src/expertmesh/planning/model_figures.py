"""What the planner knows of a model: its parameters as FSDP2 groups them, its experts, and what its blocks save.

Plain data, read from config.json by read_model.py; all that follows (stages, blocks, memory, traffic, speed) is
arithmetic on it. `Feasibility` is a cached view of the shard plan for thousands of layouts: which are refused, what tp
splits, where stages are cut. The answers are those of `plan_axes`, which decides for `train` as well, each computed
once: tp for every size; cp and pp with the smallest size that could do, because the remaining conditions are arithmetic
(heads, blocks).
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import prod
from typing import Any

from expertmesh.anatomy import Anatomy, ExpertsSpec, decoder_blocks
from expertmesh.config import PrecisionConfig
from expertmesh.config.errors import InputError
from expertmesh.config.sections import BYTES_OF, OptimizerName
from expertmesh.distributed.layout import ExpertTraffic, Layout, TopKRouter
from expertmesh.parallel.context import ContextPlan
from expertmesh.parallel.pipeline import refuse_by_layer
from expertmesh.parallel.shard_plan import KeptInFp32, ShardPlan, plan_axes
from expertmesh.parallel.stages import plan_stages, refuse_few_blocks
from expertmesh.parallel.tensor_plan import TensorPlan
from expertmesh.state.model_view import ModelView
from expertmesh.training.optimizers.build import moment_bytes

_SMALL = (2, 3, 5, 7)


class Feasibility:
    """The layouts that one model on meta can have. Nothing communicates, the model stays as it is."""

    def __init__(self, model: Any, plan: ShardPlan, heads: int, kept_in_fp32: KeptInFp32) -> None:
        """Keep the model on meta and its shard plan, of any layout."""
        anatomy = plan.anatomy
        self._shards, self._cut = plan, plan.cut
        self._model, self._anatomy, self._heads, self._kept = model, anatomy, heads, kept_in_fp32
        self._blocks = decoder_blocks(anatomy)
        self._view = ModelView(model)

    def refusal(self, layout: Layout) -> str | None:
        """Return why `train` would not split this model so, or None."""
        one_axis = [Layout(tp=layout.tp)] if layout.tp > 1 else []
        if layout.cp > 1:
            one_axis.append(Layout(cp=next((size for size in _SMALL if self._heads % size == 0), layout.cp)))
        if layout.pp > 1:
            one_axis.append(Layout(pp=2))
            try:
                self.stages(layout.pp, layout.pp_virtual_stages)
            except InputError as error:
                return str(error)
        return next((str(found) for found in map(self._plan, one_axis) if isinstance(found, InputError)), None)

    def refuse_by_layer(self, layout: Layout) -> None:
        """Raise `InputError` if the model cannot be trained layer by layer in `layout`."""
        if (refusal := self._by_layer_refusal(layout.pp)) is not None:
            raise refusal

    @cache  # noqa: B019
    def _by_layer_refusal(self, pp: int) -> InputError | None:
        try:
            refuse_by_layer(self._shards, pp)
        except InputError as error:
            return error
        return None

    def smallest(self, *, tp: bool = False) -> tuple[TensorPlan, ContextPlan]:
        """Return the plans of the fewest ranks that can share this model, by tp or cp; of one rank where none can."""
        layouts = (Layout(tp=size) if tp else Layout(cp=size) for size in (*_SMALL, 1))
        return next(plan for plan in map(self._plan, layouts) if not isinstance(plan, InputError))

    @cache  # noqa: B019
    def stages(self, pp: int, virtual: int = 1) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of the blocks of each stage, `virtual` stages on each of `pp` ranks.

        Raises:
            InputError: There are too few blocks, or places to cut.
        """
        layout = Layout(pp=pp, pp_virtual_stages=virtual)
        refuse_few_blocks(len(self._blocks), layout)
        ranges = plan_stages(self._model, self._anatomy, self._blocks, layout, self._joined)
        place = {name: number for number, name in enumerate(self._anatomy.blocks)}
        return tuple(tuple(place[self._blocks[n]] for n in numbers) for numbers in ranges)

    @cached_property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """The numbers, among all of the model's blocks, of those of each layer of accumulation by layer."""
        place = {name: number for number, name in enumerate(self._anatomy.blocks)}
        starts = [number for number in range(len(self._blocks)) if number not in self._joined]
        bounds = itertools.pairwise([*starts, len(self._blocks)])
        return tuple(tuple(place[self._blocks[n]] for n in range(*each)) for each in bounds)

    @cached_property
    def _joined(self) -> Mapping[int, str]:
        if self._cut is not None:
            return self._cut.joined
        return self._shards.decoder.joined

    @cache  # noqa: B019
    def _plan(self, layout: Layout) -> tuple[TensorPlan, ContextPlan] | InputError:
        """Return what tp and cp split, or why the axes of `layout` are refused."""
        try:
            return plan_axes(self._view, self._anatomy, layout, kept_in_fp32=self._kept)[:2]
        except InputError as error:
            return error


@dataclass(slots=True)
class BlockFigures:
    """The figures of one block without its routed experts, for one sequence on one rank (no tp, no cp)."""

    saved: int = 0
    """Bytes that stay from forward to backward."""
    backward: int = 0
    """Bytes on top of `saved` while backward runs; they grow with the micro-batch."""
    gradients: int = 0
    """Bytes of parameters' gradients on top of those; they do not grow with the micro-batch."""
    choices: int = 0
    """Bytes of the router's top-k indices, which checkpointing saves."""
    attended: int = 0
    """Bytes of attention's output."""
    normalisers: int = 0
    """Bytes of attention's fp32 number per head and query."""
    mask: int = 0
    """The part of `saved` that is attention masks: all pairs of positions, on every rank of cp and tp."""
    latents: int = 0
    """The part of `saved` that tp does not split (latents of all heads)."""
    queries: int = 0
    """Bytes of all queries and of attention's output for them."""
    keys: int = 0
    """Bytes of keys and values of one key-value head."""
    heads: int = 0
    products: int = 0
    """FLOPs of matrix products in forward, attention left out."""
    attention: int = 0
    """FLOPs of attention in forward, for all pairs of positions."""
    hidden: int = 0
    """FLOPs that this attention computes beyond a causal kernel's: all pairs under a mask, padded values."""
    whole: list[int] = field(default_factory=lambda: [0, 0, 0])
    """FLOPs of products, FLOPs of attention and bytes moved, in forward, of what every cp rank computes for full
    rows."""
    moved: list[int] = field(default_factory=lambda: [0, 0])
    """Bytes that operations other than products read and write, in forward and in backward."""
    operations: list[int] = field(default_factory=lambda: [0, 0])
    """Operations launched in forward and in backward."""
    behind: int = 0
    """Tensors saved after the routed experts, those of shared experts left out."""
    behind_shared: int = 0
    """Tensors that shared experts save after the routed experts."""

    @property
    def behind_experts(self) -> int:
        return self.behind + self.behind_shared


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One parameter as it is stored."""

    shape: tuple[int, ...]
    """Shape of the full parameter."""
    trains: bool
    """True if it requires a gradient."""
    bytes: float
    """Bytes per element, as stored."""
    is_matrix: bool
    """True if Muon can update it, or each expert's."""
    packed: bool
    """True if it is stored in packed codes and dequantised for each use."""

    @property
    def is_muons(self) -> bool:
        """True if Muon updates it, if that is the optimizer."""
        return self.trains and self.is_matrix


@dataclass(frozen=True, slots=True)
class Weight(StoredWeight):
    """One parameter that is not a routed expert's."""

    compute: float
    """Bytes per element, as gathered."""
    split: int | None
    """The dim that tp splits, or None."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_split_on_last(self) -> bool:
        """True if tp cuts its rows."""
        return self.split is not None and self.split == len(self.shape) - 1


@dataclass(frozen=True, slots=True, eq=False)
class ParamGroup:
    """Dense parameters that FSDP2 gathers and reduces together."""

    weights: tuple[Weight, ...]

    @property
    def numel(self) -> int:
        return sum(weight.numel for weight in self.weights)

    @property
    def packed(self) -> list[int]:
        """Elements of each weight that is dequantised for each use."""
        return [weight.numel for weight in self.weights if weight.packed]

    def sharded_over(self, ranks: int, tp: int) -> int:
        """Return how many ranks share the group: `ranks` of fsdp and cp, times tp for what tp does not split."""
        return ranks if self.weights and self.weights[0].split is not None else ranks * tp


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """The bytes of a dense FSDP2 group on one rank."""

    frozen: float
    """Shards that do not train."""
    master: float
    """Shards that train."""
    moments: float
    """Optimizer state of the shards."""
    gathered: float
    """Unsharded parameters, in the compute dtype."""
    flat: float
    """The flat buffer of the all-gather, dim 0 padded over the ranks; 0 on one rank."""
    gradients: float
    """Unsharded gradients, in the compute dtype."""
    reduced: float
    """Elements, not bytes, of the buffer that gradients are reduced from."""


@cache
def group_bytes(group: ParamGroup | None, ranks: int, tp: int, optimizer: OptimizerName = "adamw") -> GroupBytes:
    """Return the bytes of a dense group on rank 0, which has the largest shards; zeros for None.

    Args:
        ranks: Ranks of fsdp and cp together.
    """
    totals = [0.0] * 7
    for weight in () if group is None else group.weights:
        # FSDP2 pads dim 0, of which tp may have taken its part, over the ranks; what tp does not split is over its too.
        split = 1 if weight.split is None else tp
        over, gathered = ranks * tp // split, weight.numel // split
        first, *others = weight.shape or (1,)
        rows = first // split if weight.split == 0 else first
        shard = -(-rows // over) * prod(others) / (split if weight.split else 1)
        totals[1 if weight.trains else 0] += shard * weight.bytes
        totals[3] += gathered * weight.compute
        totals[4] += shard * over * weight.compute if over > 1 else 0
        if weight.trains:
            cut = tp if weight.is_split_on_last else 1
            totals[2] += moment_bytes(
                optimizer, weight.shape, int(weight.bytes), is_matrix=weight.is_matrix, here=shard, cut=cut
            )
            totals[5] += gathered * weight.compute
            totals[6] += shard * over
    return GroupBytes(*totals)


@dataclass(frozen=True, slots=True)
class ExpertWeight(StoredWeight):
    """One parameter of routed experts, all of them together; gathered in its codes if it is packed."""

    elements: int
    """Elements of one expert."""
    is_adapter_a: bool
    """True if it is LoRA's A."""

    @property
    def one(self) -> tuple[int, int]:
        """The shape of one expert's matrix."""
        return self.elements // self.shape[-1], self.shape[-1]


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """The routed experts of one block."""

    spec: ExpertsSpec
    router: TopKRouter
    matrices: tuple[ExpertWeight, ...]
    """Their parameters, adapters included."""
    looped: bool
    """True if the backend computes one expert after another."""
    rank: int
    """LoRA rank of their adapters, 0 without."""
    last: int
    """Elements of one expert multiplied after the last tensor that backward reads is saved: down projection, its B."""

    def elements(self, trains: bool | None = None) -> int:
        """Return the elements of one expert; if `trains` is given, of those that train or do not."""
        return sum(each.elements for each in self.matrices if trains in (None, each.trains))

    def gathered(self, compute: int) -> float:
        """Return the bytes of one gathered expert: `compute` bytes an element; a packed weight stays packed."""
        return sum(each.elements * (each.bytes if each.packed else compute) for each in self.matrices)

    @property
    def packed(self) -> int:
        """Elements of one expert that are dequantised for each use."""
        return sum(each.elements for each in self.matrices if each.packed)

    @property
    def width(self) -> int:
        """Columns of the up projection."""
        return self.spec.intermediate_size * (2 if self.spec.gated else 1)


@dataclass(frozen=True, slots=True)
class TensorParallelParts:
    """The parts of a block that gather positions, under tp and under cp."""

    split: int = 0
    """Parts that tp splits."""
    last: bool = False
    """True if the last of them does not mix positions (an MLP); recomputation ends before its sum."""
    whole: int = 0
    """Hidden states that tp gathers for parts computed in full on each rank."""
    gathered: int = 0
    """Outputs of split linear layers that tp gathers again, and inputs of norms over all heads."""
    features: int = 0
    """Features of all of these."""
    rows_by_heads: int = 0
    """Parts for which cp gathers full rows and ranks share the heads."""
    rows_whole: int = 0
    """Hidden states that cp gathers for parts computed in full on each rank."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One kind of decoder block."""

    own: ParamGroup
    """Weights that FSDP2 groups at the block."""
    uncast: ParamGroup | None
    """Parameters that FSDP2 must not cast, a group of their own."""
    split: ParamGroup | None
    """Parameters that tp splits: under tp a group for each part, otherwise in the block's own group."""
    experts: Experts | None
    """None for a dense block."""
    figures: BlockFigures
    parts: TensorParallelParts

    @property
    def groups(self) -> tuple[ParamGroup, ...]:
        return tuple(group for group in (self.own, self.split, self.uncast) if group is not None)

    def ends_in_experts(self, mode: str, *, shared_beside: bool) -> bool:
        """Return whether a second run ends before the experts' down projection, as nothing is saved after it.

        `shared_beside`: shared experts run while rows are in flight, not after the routed experts.
        """
        if mode != "full" or self.experts is None or self.experts.spec.call == "dense":
            return False
        return not self.figures.behind and (shared_beside or not self.figures.behind_shared)


@dataclass(frozen=True, slots=True, eq=False)
class ModelFigures:
    """The figures of a model, a precision and a sequence length."""

    family: str
    """`model_type` of its configuration."""
    blocks: tuple[Block, ...]
    """The blocks in order; equal blocks are the same object."""
    embedding: ParamGroup | None
    """None if it is tied to the head, and then in `root`."""
    root: ParamGroup
    """Parameters outside of the blocks: head, final norm and others."""
    head: int
    """Elements of the head's weight, 0 without one."""
    head_trains: bool
    vocabulary: int
    """Columns of the logits."""
    hidden: int
    heads: int
    key_value_heads: int
    length: int
    packed: bool
    """True if the figures include masks, or attention by samples, of packed rows."""
    outside: int
    """Bytes that stay of one sequence from what is around the blocks, `tables` included."""
    tables: int
    """The part of `outside` made before the first block (rotary tables), of full rows on every rank."""
    first_saves_less: int
    """Bytes of one sequence that the first block saves less if nothing before it trains."""
    precision: PrecisionConfig
    adapted: bool
    """True if it has LoRA adapters."""
    checkpointable: bool
    """True if transformers can recompute its blocks."""
    anatomy: Anatomy
    feasibility: Feasibility
    """Answers which layouts it can have."""
    traffic: ExpertTraffic
    """Costs by which `ep: auto` chooses."""
    replicas: int = 0
    """Copies of frozen experts that each EP rank holds in a layer."""

    @property
    def experts(self) -> Experts:
        """The experts of the first block that has any."""
        return next(block.experts for block in self.blocks if block.experts is not None)

    @property
    def embeds_trained(self) -> bool:
        """True if the embedding trains, so that the first block's input has a gradient."""
        return any(weight.trains for weight in (self.root if self.embedding is None else self.embedding).weights)

    @property
    def dense(self) -> int:
        groups = [group for block in self.blocks for group in block.groups]
        return sum(group.numel for group in (*groups, self.embedding, self.root) if group is not None)

    @property
    def expert(self) -> int:
        found = (block.experts for block in self.blocks if block.experts is not None)
        return sum(experts.spec.num_experts * experts.elements() for experts in found)

    @property
    def total(self) -> int:
        return self.dense + self.expert

    @property
    def compute_bytes(self) -> int:
        return BYTES_OF[self.precision.compute]

    @property
    def reduce_bytes(self) -> int:
        """The bytes of an element of the buffers that gradients are reduced from."""
        return max(BYTES_OF[self.precision.reduce], self.compute_bytes)
