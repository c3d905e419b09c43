"""What the planner knows of a model: its parameters as FSDP2 groups them, its experts, and what its blocks save.

Plain data, read from config.json by read_model.py; all that follows (stages, blocks, memory, traffic, speed) is
arithmetic on it.
"""

from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import NamedTuple

from expertmesh.anatomy import Anatomy, ExpertsSpec
from expertmesh.config import PrecisionConfig
from expertmesh.config.sections import BYTES_OF, OptimizerName
from expertmesh.distributed.expert_traffic import ExpertTraffic, TopKRouter
from expertmesh.planning.feasibility import Feasibility
from expertmesh.training.optimizers.build import moment_bytes


@dataclass(slots=True)
class BlockFigures:
    """The figures of one block without its routed experts, for one sequence on one rank (no tp, no cp); bytes and
    FLOPs.

    `saved` stays from forward to backward, `backward` comes on top while that runs; `gradients` is the part of it that
    is parameters' gradients and does not grow with the micro-batch. `choices` is what checkpointing keeps of the
    router's choice, `attended` what attention gives and `normalisers` its number per row, `mask` the part of `saved`
    that is masks, for all pairs of positions on every rank, `latents` the part that tp does not split. `queries` are
    bytes of all queries and of what attention gives for them, `keys` of a key and value head, `heads` how many queries
    have. `products` are FLOPs of matrix products in forward, `attention` those of attention for all pairs of positions,
    and `hidden` what a causal kernel would not compute of them but this one does. `moved`: bytes that other operations
    read and write in forward and in backward; `operations`: how many all are. `whole`: products, attention, and bytes
    moved in forward, of the parts that every rank of cp computes for whole rows. `behind`: how many tensors are saved
    behind the routed experts, `behind_shared` those of their shared expert, which are not among them.
    """

    saved: int = 0
    backward: int = 0
    gradients: int = 0
    choices: int = 0
    attended: int = 0
    normalisers: int = 0
    mask: int = 0
    latents: int = 0
    queries: int = 0
    keys: int = 0
    heads: int = 0
    products: int = 0
    attention: int = 0
    hidden: int = 0
    whole: list[int] = field(default_factory=lambda: [0, 0, 0])
    moved: list[int] = field(default_factory=lambda: [0, 0])
    operations: list[int] = field(default_factory=lambda: [0, 0])
    behind: int = 0
    behind_shared: int = 0


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter that is not a routed expert's. `bytes` per element as stored, `compute` as gathered; `split`: the
    dim that tp splits, or None; `is_matrix`: whether Muon is for it; `packed`: it is dequantised for each use.
    """

    shape: tuple[int, ...]
    trains: bool
    bytes: float
    compute: float
    split: int | None
    is_matrix: bool
    packed: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_muons(self) -> bool:
        """True if Muon updates it, if that is the optimizer."""
        return self.trains and self.is_matrix

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
    """The bytes of a group on one rank: shards that do not train and that do, what the optimizer keeps; then, in the
    compute dtype, gathered parameters, their flat buffer and gradients. `reduced`: elements of the buffer that is
    reduced.
    """

    frozen: float
    master: float
    moments: float
    gathered: float
    flat: float
    gradients: float
    reduced: float


@cache
def group_bytes(group: ParamGroup | None, ranks: int, tp: int, optimizer: OptimizerName = "adamw") -> GroupBytes:
    """Return the bytes of a group for `ranks` of fsdp and cp together."""
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


class ExpertWeight(NamedTuple):
    """One parameter of routed experts, of all of them together; `elements` are of one expert, `bytes` per element as
    stored; `is_matrix`: whether Muon is for each expert's; `packed`: it is gathered as it is stored, too.
    """

    shape: tuple[int, ...]
    elements: int
    trains: bool
    bytes: float
    is_adapter_a: bool
    is_matrix: bool
    packed: bool = False

    @property
    def is_muons(self) -> bool:
        """True if Muon updates it, if that is the optimizer."""
        return self.trains and self.is_matrix

    @property
    def one(self) -> tuple[int, int]:
        """The shape of one expert's matrix."""
        return self.elements // self.shape[-1], self.shape[-1]


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """The routed experts of one block, `rank` that of their adapters, 0 without. `last`: elements of one expert that
    are multiplied when all that its backward reads has been saved: of the down projection, and of its adapter's B.
    """

    spec: ExpertsSpec
    router: TopKRouter
    matrices: tuple[ExpertWeight, ...]
    looped: bool
    rank: int
    last: int

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
    """The number of parts of a block that gather positions under tp: `split` ones, the last of which may be the block's
    `last` module, and those that each rank computes `whole`, counted once for each hidden states that it gets.
    `features`: of outputs that are put together again. Under cp those that gather whole rows, and are computed by
    heads, or whole on each rank.
    """

    split: int = 0
    last: bool = False
    whole: int = 0
    features: int = 0
    rows_by_heads: int = 0
    rows_whole: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One kind of decoder block. `own` is what FSDP2 groups at the block, `uncast` what it must not cast, and `split`
    what tp splits (a group for each such part under tp, otherwise part of the block's own).
    """

    own: ParamGroup
    uncast: ParamGroup | None
    split: ParamGroup | None
    experts: Experts | None
    figures: BlockFigures
    parts: TensorParallelParts

    @property
    def groups(self) -> tuple[ParamGroup, ...]:
        return tuple(group for group in (self.own, self.split, self.uncast) if group is not None)

    def ends_in_experts(self, mode: str, *, shared_beside: bool) -> bool:
        """Return whether a second run ends before the experts' down projection, as nothing is saved behind it.
        `shared_beside`: a shared expert is not behind it either.
        """
        if mode != "full" or self.experts is None or self.experts.spec.call == "dense":
            return False
        return not self.figures.behind and (shared_beside or not self.figures.behind_shared)


@dataclass(frozen=True, slots=True, eq=False)
class ModelFigures:
    """A model, a precision and a sequence length. Blocks in order; equal ones are the same object."""

    family: str
    blocks: tuple[Block, ...]
    embedding: ParamGroup | None
    root: ParamGroup
    head: int
    head_trains: bool
    vocabulary: int
    hidden: int
    heads: int
    key_value_heads: int
    length: int
    packed: bool
    outside: int
    tables: int
    first_saves_less: int
    precision: PrecisionConfig
    adapted: bool
    checkpointable: bool
    anatomy: Anatomy
    feasibility: Feasibility
    traffic: ExpertTraffic

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
