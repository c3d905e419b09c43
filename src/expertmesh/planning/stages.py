"""A training step as the planner sees it, and what each pipeline rank holds and runs of it.

`stage` is a pp rank throughout; its stages (one, or `pp_virtual_stages`) are its chunks, in the order of the model.
The code that cuts the model decides which blocks are on a stage; the order of forwards and backwards is that of the
schedules which step/pipeline_schedule.py chooses from torch.distributed.pipelining. docs/formulas.md derives the state.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple

from expertmesh.config.sections import OptimizerName
from expertmesh.distributed.layout import Layout
from expertmesh.parallel.checkpointing import CheckpointingMode, checkpointed_layers
from expertmesh.parallel.refusals import expert_shard_dim
from expertmesh.planning.model_figures import Block, Experts, ExpertWeight, ModelFigures, ParamGroup, group_bytes
from expertmesh.step.forward_backward import Order
from expertmesh.training.optimizers.build import moment_bytes

CheckpointedLayers = Literal["all"] | int | tuple[int, ...]
Piece = tuple[Block, CheckpointingMode]


@dataclass(frozen=True, slots=True)
class Batch:
    """The division of an optimizer step on one data rank."""

    rows: int
    """Sequences of a micro-batch."""
    accumulation: int
    """Micro-batches of a step."""
    order: Order = field(default_factory=Order)
    """Order of the micro-batches; that by layer needs several."""

    @property
    def together(self) -> int:
        """Micro-batches of the largest round by layer, which go through a block together; 0 by micro-batch."""
        if not self.order.by_layer or self.accumulation == 1:
            return 0
        return -(-self.accumulation // self.order.rounds(self.accumulation))

    @property
    def passes(self) -> int:
        """Forwards, each with its backward, for which FSDP2 gathers every block: of micro-batches, or of rounds."""
        return self.order.rounds(self.accumulation) if self.together else self.accumulation


@dataclass(frozen=True, slots=True, eq=False)
class PipelineRank:
    """The blocks and dense FSDP2 groups of one pp rank."""

    stage: int
    is_last: bool
    chunks: tuple[tuple[Piece, ...], ...]
    """Blocks and checkpointing modes of each of its stages, in order."""
    pieces: tuple[tuple[Piece, int], ...]
    """Different blocks with their modes, and how often each occurs."""
    blocks: tuple[tuple[Block, int], ...]
    """Different blocks, and how often each occurs."""
    groups: tuple[tuple[ParamGroup, int], ...]
    """Different dense FSDP2 groups, and how often each occurs."""
    embedding: ParamGroup | None
    """None unless it is the first pp rank and the embedding is not tied."""
    has_root: bool
    """True if head and final norm are here; if the embedding is tied, the first pp rank has them as well."""


@cache
def pipeline_rank(
    model: ModelFigures,
    pp: int = 1,
    virtual: int = 1,
    stage: int = 0,
    mode: CheckpointingMode = "none",
    layers: CheckpointedLayers = "all",
) -> PipelineRank:
    """Return the pp rank of number `stage`, of `pp` ranks with `virtual` stages each.

    Args:
        mode: Activation checkpointing of the blocks that `layers` (train.checkpoint_layers) names.
    """
    numbers = pipeline_numbers(model, pp, virtual, stage)
    chosen = frozenset(checkpointed_layers(layers, len(model.blocks)))
    chunks = tuple(tuple((model.blocks[n], mode if n in chosen else "none") for n in chunk) for chunk in numbers)
    blocks = tuple(Counter(block for chunk in chunks for block, _ in chunk).items())
    embedding = model.embedding if stage == 0 else None
    is_last = stage == pp - 1
    has_root = is_last or (stage == 0 and model.embedding is None)
    groups = [(group, times) for block, times in blocks for group in block.groups]
    groups += [(embedding, 1)] if embedding is not None else []
    groups += [(model.root, 1)] if has_root else []
    pieces = Counter(piece for chunk in chunks for piece in chunk)
    return PipelineRank(stage, is_last, chunks, tuple(pieces.items()), blocks, tuple(groups), embedding, has_root)


def pipeline_numbers(model: ModelFigures, pp: int, virtual: int, stage: int) -> Sequence[Sequence[int]]:
    """Return the numbers of the blocks of each stage of pp rank `stage`."""
    return (range(len(model.blocks)),) if pp * virtual == 1 else model.feasibility.stages(pp, virtual)[stage::pp]


@dataclass(frozen=True, slots=True)
class Workload:
    """One optimizer step of a model in a layout."""

    model: ModelFigures
    layout: Layout
    batch: Batch
    mode: CheckpointingMode
    """Activation checkpointing of the blocks that `layers` names."""
    layers: CheckpointedLayers = "all"
    """train.checkpoint_layers."""
    imbalance: float = 1.0
    """Rows of the busiest rank of an EP group over their mean; of the worst layer, if they are measured."""
    on_cpu: bool = False
    """True if gloo reduces, from a copy of its input."""
    optimizer: OptimizerName = "adamw"
    ep_nodes: int = 1
    """Nodes that an EP group sends rows to before ranks (moe.dispatch: hierarchical); 1 sends to ranks."""
    teacher: ModelFigures | None = None
    """The frozen model that the objective learns from."""
    by_block: tuple[float, ...] = ()
    """The imbalance of each block, if it is measured."""

    def rank(self, stage: int) -> PipelineRank:
        layout = self.layout
        return pipeline_rank(self.model, layout.pp, layout.pp_virtual_stages, stage, self.mode, self.layers)

    def mean_imbalance(self, stage: int) -> float:
        """Return the mean imbalance of the layers of pp rank `stage`; in each layer all wait for its busiest rank."""
        if not self.by_block:
            return self.imbalance
        numbers = pipeline_numbers(self.model, self.layout.pp, self.layout.pp_virtual_stages, stage)
        found = [self.by_block[n] for chunk in numbers for n in chunk if self.model.blocks[n].experts is not None]
        return sum(found) / len(found) if found else 1.0

    def distinct_stages(self) -> tuple[int, ...]:
        """Return the pp ranks that can be the slowest or the fullest.

        They are the first, the last, and of equal ones between the first, which has most micro-batches in flight.
        """
        layout = self.layout
        if self.by_block:
            return tuple(range(layout.pp))
        return _distinct(self.model, layout.pp, layout.pp_virtual_stages, self.mode, self.layers)


def inputs_that_wait(workload: Workload) -> int:
    """Return the layers whose inputs wait in host memory: all but the first, which has none, and the last."""
    return max(0, len(workload.model.feasibility.layers) - 2) if workload.batch.order.inputs_on_host else 0


def runs_shared_beside(layout: Layout, ep_nodes: int) -> bool:
    """Return whether shared experts run while rows are in flight, if a family lets them (`parallel.refusals`).

    `ep_nodes` as in `Workload`.
    """
    return layout.ep > 1 and layout.tp == 1 and ep_nodes == 1


@cache
def _distinct(
    model: ModelFigures, pp: int, virtual: int, mode: CheckpointingMode, layers: CheckpointedLayers
) -> tuple[int, ...]:
    between: dict[object, int] = {}
    for stage in range(1, pp - 1):
        between.setdefault(pipeline_rank(model, pp, virtual, stage, mode, layers).chunks, stage)
    return tuple(sorted({0, *between.values(), pp - 1}))


@dataclass(frozen=True, slots=True)
class ResidentState:
    """Bytes of one rank's shards."""

    frozen: float
    """Parameters that do not train, those in host memory left out."""
    master: float
    """Parameters that train; their gradients take as many."""
    moments: float
    copies: float
    """Adapters of copied experts, with their gradients; only during a step."""


def resident_state(
    model: ModelFigures, layout: Layout, stage: int = 0, optimizer: OptimizerName = "adamw"
) -> ResidentState:
    """Return the bytes of parameters and optimizer state on rank 0 of pp rank `stage`.

    FSDP2 gives the first ranks the largest shards.
    """
    ranks, rank = layout.fsdp * layout.cp, pipeline_rank(model, layout.pp, layout.pp_virtual_stages, stage)
    return _state(rank, ranks, layout.tp, layout.ep, optimizer, layout.offload, model.replicas)


@cache
def _state(
    rank: PipelineRank, ranks: int, tp: int, ep: int, optimizer: OptimizerName, offload: str, replicas: int
) -> ResidentState:
    frozen = master = moments = copies = 0.0
    for group, times in rank.groups:
        sizes = group_bytes(group, ranks, tp, optimizer)
        frozen += times * sizes.frozen
        master += times * sizes.master
        moments += times * sizes.moments
    layout = Layout(fsdp=ranks, tp=tp, ep=ep)
    for block, times in rank.blocks:
        if (experts := block.experts) is None:
            continue
        for weight in experts.matrices:
            here = times * weight.elements * experts.spec.num_experts / ep / layout.efsdp
            on_host = offload == "experts" and weight.packed
            copied = times * weight.elements * replicas
            frozen += 0 if weight.trains or on_host else (here + copied) * weight.bytes
            if weight.trains:
                copies += 2 * copied * weight.bytes
                master += here * weight.bytes
                cut = parts_of_last_dim(experts, weight, layout)
                moments += moment_bytes(
                    optimizer, weight.shape, int(weight.bytes), is_matrix=weight.is_matrix, here=here, cut=cut
                )
    return ResidentState(frozen, master, moments, copies)


def parts_of_last_dim(experts: Experts, weight: ExpertWeight, layout: Layout) -> int:
    """Return the number of parts that efsdp cuts the rows of an expert's matrix into."""
    if experts.spec.num_experts // layout.ep % layout.efsdp == 0:
        return 1
    on_last = weight.is_adapter_a if experts.rank else expert_shard_dim(experts.spec, layout) == 2
    return layout.efsdp if on_last else 1


class InFlight(NamedTuple):
    """One situation of a pp rank: a micro-batch runs backward while others have activations saved."""

    chunk: int
    """The local stage that runs backward."""
    saved: tuple[int, ...]
    """Micro-batches that have activations saved, by chunk; this one included."""
    accumulated: tuple[bool, ...]
    """True if an earlier backward has left gradients, by chunk."""


@cache
def in_flight(layout: Layout, count: int, stage: int) -> tuple[InFlight, ...]:
    """Return the different situations in which a step's `count` micro-batches run backward on pp rank `stage`."""
    pp, chunks = layout.pp, layout.pp_virtual_stages
    if chunks == 1:
        first = min(pp - stage, count) if layout.pp_schedule != "gpipe" and count >= pp else count
        first = 1 if pp == 1 else first
        later = min(first, count - 1)
        # From the second micro-batch on gradients are whole, but fewer may be in flight. Where as many are, the second
        # stands for the first as well.
        found = [InFlight(0, (first,), (False,))] if later < first else []
        return (*found, InFlight(0, (later,), (True,))) if later else tuple(found)
    saved, accumulated = [0] * chunks, [False] * chunks
    seen: dict[InFlight, None] = {}
    for chunk, forward in schedule_order(pp, chunks, count, stage):
        if forward:
            saved[chunk] += 1
            continue
        seen[InFlight(chunk, tuple(saved), tuple(accumulated))] = None
        saved[chunk] -= 1
        accumulated[chunk] = True
    return tuple(seen)


@cache
def prefetches_in_vain(layout: Layout, count: int, stage: int) -> Mapping[int, int]:
    """Return how often a step's backwards on one pp rank prefetch the last block of another chunk, by that chunk.

    The root ends every forward, so that its own backward prefetches what ran before the latest. FSDP2 clears its record
    of forwards at the end of each backward: only those since the previous one count.
    """
    found: Counter[int] = Counter()
    latest = None
    for chunk, forward in schedule_order(layout.pp, layout.pp_virtual_stages, count, stage):
        if forward:
            latest = chunk
            continue
        if latest not in (None, chunk):
            found[latest] += 1
        latest = None
    return found


def schedule_order(pp: int, chunks: int, count: int, stage: int) -> Iterator[tuple[int, bool]]:
    """Yield (chunk, whether forward) in the order of interleaved 1F1B; looped breadth-first if rounds are unequal.

    `chunks` are the stages of each of `pp` ranks; `count` micro-batches run on pp rank `stage`.
    """
    rounds = max(1, count // pp)
    if count % rounds:
        yield from ((chunk, True) for chunk in range(chunks) for _ in range(count))
        yield from ((chunk, False) for chunk in reversed(range(chunks)) for _ in range(count))
        return
    each = count // rounds
    warm = min((chunks - 1) * each + 2 * (pp - 1 - stage), chunks * count)
    forwards = (step // each % chunks for step in range(chunks * count))
    behind = (chunks - 1 - step // each % chunks for step in range(chunks * count))
    for _ in range(warm):
        yield next(forwards), True
    for chunk in behind:
        if (following := next(forwards, None)) is not None:
            yield following, True
        yield chunk, False
