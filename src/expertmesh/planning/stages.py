"""A training step as the planner sees it, and what each pipeline rank holds and runs of it.

`stage` is a pp rank throughout; its stages (one, or `pp_virtual_stages`) are its chunks, in the order of the model.
Which blocks are on a stage is asked of the code that cuts the model; the order of forwards and backwards is that of the
schedules which step/pipeline_schedule.py chooses from torch.distributed.pipelining. docs/formulas.md derives the state.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from expertmesh.config.sections import OptimizerName
from expertmesh.distributed.layout import Layout
from expertmesh.parallel.checkpointing import CheckpointingMode, checkpointed_layers
from expertmesh.parallel.refusals import expert_shard_dim
from expertmesh.planning.model_figures import (
    Block,
    Experts,
    ExpertWeight,
    ModelFigures,
    ParamGroup,
    group_bytes,
)
from expertmesh.training.optimizers.build import moment_bytes

CheckpointedLayers = Literal["all"] | int | tuple[int, ...]
Piece = tuple[Block, CheckpointingMode]


@dataclass(frozen=True, slots=True)
class Batch:
    """The division of an optimizer step: `accumulation` micro-batches of `rows` sequences."""

    rows: int
    accumulation: int


@dataclass(frozen=True, slots=True, eq=False)
class PipelineRank:
    """The blocks of one pp rank: `chunks` are the blocks of each of its stages with their modes, `pieces` and `blocks`
    the different ones among them and their number, `groups` the same for dense FSDP2 groups. The embedding is on the
    first rank; `has_root`: what is behind the blocks is here (tied: what is before them as well).
    """

    stage: int
    is_last: bool
    chunks: tuple[tuple[Piece, ...], ...]
    pieces: tuple[tuple[Piece, int], ...]
    blocks: tuple[tuple[Block, int], ...]
    groups: tuple[tuple[ParamGroup, int], ...]
    embedding: ParamGroup | None
    has_root: bool


@cache
def pipeline_rank(
    model: ModelFigures,
    pp: int = 1,
    virtual: int = 1,
    stage: int = 0,
    mode: CheckpointingMode = "none",
    layers: CheckpointedLayers = "all",
) -> PipelineRank:
    """Return the pp rank of number `stage`, of `pp` ranks with `virtual` stages each."""
    number = len(model.blocks)
    numbers = (range(number),) if pp * virtual == 1 else model.feasibility.stages(pp, virtual)[stage::pp]
    chosen = frozenset(checkpointed_layers(layers, number))
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


@dataclass(frozen=True, slots=True)
class Workload:
    """One optimizer step of a model in a layout. `layers`: train.checkpoint_layers; `imbalance`: what the busiest
    expert rank gets over the mean; `on_cpu`: gloo reduces, from a copy of its input; `ep_nodes`: to how many nodes an
    EP group sends rows before ranks (moe.dispatch: hierarchical).
    """

    model: ModelFigures
    layout: Layout
    batch: Batch
    mode: CheckpointingMode
    layers: CheckpointedLayers = "all"
    imbalance: float = 1.0
    on_cpu: bool = False
    optimizer: OptimizerName = "adamw"
    ep_nodes: int = 1

    def rank(self, stage: int) -> PipelineRank:
        layout = self.layout
        return pipeline_rank(self.model, layout.pp, layout.pp_virtual_stages, stage, self.mode, self.layers)

    def distinct_stages(self) -> tuple[int, ...]:
        """Return the pp ranks that can be the slowest or the fullest: the first, the last, and of those between that
        hold the same the first, which has most micro-batches in flight.
        """
        layout = self.layout
        return _distinct(self.model, layout.pp, layout.pp_virtual_stages, self.mode, self.layers)


def runs_shared_beside(layout: Layout, ep_nodes: int) -> bool:
    """Return whether shared experts run while rows travel, where a family lets them (`parallel.refusals`)."""
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
    """Bytes of one rank's shards: of what does not train, of what does, as which its gradients take as many, and of
    what the optimizer keeps.
    """

    frozen: float
    master: float
    moments: float


def resident_state(
    model: ModelFigures, layout: Layout, stage: int = 0, optimizer: OptimizerName = "adamw"
) -> ResidentState:
    """Return what rank 0 of a stage keeps of parameters; the largest shard of each, as FSDP2 gives the first ranks
    more.
    """
    ranks, rank = layout.fsdp * layout.cp, pipeline_rank(model, layout.pp, layout.pp_virtual_stages, stage)
    return _state(rank, ranks, layout.tp, layout.ep, optimizer, layout.offload)


@cache
def _state(rank: PipelineRank, ranks: int, tp: int, ep: int, optimizer: OptimizerName, offload: str) -> ResidentState:
    frozen = master = moments = 0.0
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
            frozen += 0 if weight.trains or on_host else here * weight.bytes
            if weight.trains:
                master += here * weight.bytes
                cut = parts_of_last_dim(experts, weight, layout)
                moments += moment_bytes(
                    optimizer, weight.shape, int(weight.bytes), is_matrix=weight.is_matrix, here=here, cut=cut
                )
    return ResidentState(frozen, master, moments)


def parts_of_last_dim(experts: Experts, weight: ExpertWeight, layout: Layout) -> int:
    """Return the number of parts that efsdp cuts the rows of an expert's matrix into."""
    if experts.spec.num_experts // layout.ep % layout.efsdp == 0:
        return 1
    on_last = weight.is_adapter_a if experts.rank else expert_shard_dim(experts.spec, layout) == 2
    return layout.efsdp if on_last else 1


class InFlight(NamedTuple):
    """A micro-batch of a rank's `chunk` runs backward while `saved[c]` micro-batches of each chunk have activations
    saved, this one included; `accumulated[c]`: gradients of chunk c are there from an earlier backward;
    `extra_gather`: FSDP2 prefetches a block of another micro-batch at its end.
    """

    chunk: int
    saved: tuple[int, ...]
    accumulated: tuple[bool, ...]
    extra_gather: bool


class Prefetches(NamedTuple):
    """Backwards of `chunk`, `times` of them, as FSDP2 prefetches in them: in the reverse order of the forwards recorded
    by then. `recorded`: any of this chunk are among them. `behind`: the chunk that ran right before the last of those,
    or None. `other`: the chunk that ran last of all, if it is another one.
    """

    chunk: int
    recorded: bool
    behind: int | None
    other: int | None
    times: int


@cache
def in_flight(layout: Layout, count: int, stage: int) -> tuple[InFlight, ...]:
    """Return every different situation of the backwards of a step's `count` micro-batches, on one pp rank."""
    pp, chunks = layout.pp, layout.pp_virtual_stages
    if chunks == 1:
        first = min(pp - stage, count) if layout.pp_schedule != "gpipe" and count >= pp else count
        first = 1 if pp == 1 else first
        later = min(first, count - 1)
        # From the second micro-batch on gradients are whole, but fewer may be in flight. Where as many are, the second
        # stands for the first as well.
        found = [InFlight(0, (first,), (False,), first > 1)] if later < first else []
        return (*found, InFlight(0, (later,), (True,), later == first > 1)) if later else tuple(found)
    saved, accumulated = [0] * chunks, [False] * chunks
    seen: dict[InFlight, None] = {}
    for chunk, forward in schedule_order(pp, chunks, count, stage):
        if forward:
            saved[chunk] += 1
            continue
        seen[InFlight(chunk, tuple(saved), tuple(accumulated), sum(saved) > 1 and not any(accumulated))] = None
        saved[chunk] -= 1
        accumulated[chunk] = True
    return tuple(seen)


@cache
def prefetches(layout: Layout, count: int, stage: int) -> tuple[Prefetches, ...]:
    """Return the different backwards of a step's `count` micro-batches, by what FSDP2 prefetches, on one pp rank.

    FSDP2 clears its record of forwards at the end of each backward, so only forwards since the previous one count.
    """
    pp, chunks = layout.pp, layout.pp_virtual_stages
    if chunks == 1:
        first = in_flight(layout, count, stage)[0].saved[0]
        found = [Prefetches(0, True, 0 if first > 1 else None, None, 1)]
        return (*found, Prefetches(0, True, None, None, count - first)) if count > first else tuple(found)
    recorded: list[int] = []
    seen: Counter[tuple[int, bool, int | None, int | None]] = Counter()
    for chunk, forward in schedule_order(pp, chunks, count, stage):
        if forward:
            recorded.append(chunk)
            continue
        there, behind = chunk in recorded, None
        if there:
            last = len(recorded) - 1 - recorded[::-1].index(chunk)
            behind = recorded[last - 1] if last else None
        seen[chunk, there, behind, recorded[-1] if recorded and recorded[-1] != chunk else None] += 1
        recorded.clear()
    return tuple(Prefetches(*key, times) for key, times in seen.items())


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
