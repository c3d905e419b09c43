"""What a pipeline rank holds of a model's parameters, and what each FSDP2 group of it is in bytes.

`stage` is a pp rank throughout, `cut` the number of pp ranks and how many stages each has. Which blocks are on a stage
is asked of the code that cuts them (asked.py); how a group is sharded follows parallel/fsdp.py. State is exact;
docs/planning.md derives it.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Literal

from expertmesh.distributed.layout import Layout
from expertmesh.parallel.checkpointing import checkpointed_layers
from expertmesh.planning.facts import Block, Facts, Unit

Mode = Literal["none", "selective", "full"]
CheckpointedLayers = Literal["all"] | int | tuple[int, ...]
Cut = tuple[int, int]
Piece = tuple[Block, Mode]


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of one rank's shards: of what does not train, of what does, and of one gradient for each of those."""

    frozen: float
    master: float
    gradients: float


def state_of(facts: Facts, layout: Layout, stage: int = 0) -> State:
    """What rank 0 of a stage keeps of parameters; the largest share of each, as FSDP2 gives the first ranks more."""
    return _state(facts, cut_of(layout), stage, layout.fsdp * layout.cp, layout.tp, layout.ep)


@cache
def _state(facts: Facts, cut: Cut, stage: int, ranks: int, tp: int, ep: int) -> State:
    frozen = master = 0.0
    for unit, times in stage_units(facts, cut, stage):
        sizes = sizes_over(unit, ranks, tp)
        frozen += times * sizes.frozen
        master += times * sizes.master
    efsdp = ranks * tp // ep
    for block, times in stage_kinds(facts, cut, stage):
        if block.experts is not None:
            for elements, trains, width in block.experts.matrices:
                size = times * elements * block.experts.spec.num_experts / ep / efsdp * width
                frozen += 0 if trains else size
                master += size if trains else 0
    return State(frozen, master, master)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one dense FSDP2 group under one layout. Bytes of a rank's shards that do not train and that do; of gathered
    parameters, their flat buffer and their gradients, as computed with; elements of the buffer that is reduced.
    """

    frozen: float
    master: float
    gathered: float
    flat: float
    gradients: float
    reduced: float


def sizes_of(unit: Unit | None, layout: Layout) -> Sizes:
    """What tp has split is sharded over fsdp and cp, everything else over tp as well."""
    return sizes_over(unit, layout.fsdp * layout.cp, layout.tp)


@cache
def sizes_over(unit: Unit | None, ranks: int, tp: int) -> Sizes:
    """The same for `ranks` of fsdp and cp together."""
    totals = [0.0] * 6
    for weight in () if unit is None else unit.weights:
        over, gathered = (ranks * tp, weight.numel) if weight.split is None else (ranks, weight.numel // tp)
        shard = weight.shard(ranks, tp)
        padded = shard * over
        trains = weight.trains
        totals[0] += 0 if trains else shard * weight.bytes
        totals[1] += shard * weight.bytes if trains else 0
        totals[2] += gathered * weight.compute
        totals[3] += padded * weight.compute if over > 1 else 0
        totals[4] += gathered * weight.compute if trains else 0
        totals[5] += padded if trains else 0
    return Sizes(*totals)


def cut_of(layout: Layout) -> Cut:
    return layout.pp, layout.pp_virtual_stages


@cache
def chunks_of(facts: Facts, cut: Cut, stage: int) -> tuple[tuple[int, ...], ...]:
    """The numbers of the blocks of each of a rank's stages, as training will cut them."""
    if cut == (1, 1):
        return (tuple(range(len(facts.blocks))),)
    return facts.asked.stages(*cut)[stage :: cut[0]]


@cache
def chunk_pieces(
    facts: Facts, cut: Cut, stage: int, mode: Mode, layers: CheckpointedLayers
) -> tuple[tuple[Piece, ...], ...]:
    """For each of a rank's stages its blocks, each with what is kept of it. `layers`: train.checkpoint_layers."""
    chosen = frozenset(checkpointed_layers(layers, len(facts.blocks)))
    kept: dict[bool, Mode] = {True: mode, False: "none"}
    return tuple(
        tuple((facts.blocks[number], kept[number in chosen]) for number in numbers)
        for numbers in chunks_of(facts, cut, stage)
    )


@cache
def stage_pieces(
    facts: Facts, cut: Cut, stage: int, mode: Mode, layers: CheckpointedLayers
) -> tuple[tuple[Piece, int], ...]:
    """The kinds of blocks of a rank, with what is kept of them, and how many there are of each."""
    return tuple(Counter(piece for chunk in chunk_pieces(facts, cut, stage, mode, layers) for piece in chunk).items())


@cache
def distinct_stages(facts: Facts, cut: Cut, mode: Mode, layers: CheckpointedLayers) -> tuple[int, ...]:
    """The pp ranks that can be the slowest or the fullest: the first, the last, and of those between that hold the same
    the first, which has most micro-batches in flight.
    """
    between: dict[object, int] = {}
    for stage in range(1, cut[0] - 1):
        between.setdefault(chunk_pieces(facts, cut, stage, mode, layers), stage)
    return tuple(sorted({0, *between.values(), cut[0] - 1}))


@cache
def chunk_blocks(facts: Facts, cut: Cut, stage: int) -> tuple[tuple[Block, ...], ...]:
    """The blocks of each of a rank's stages."""
    return tuple(tuple(facts.blocks[number] for number in numbers) for numbers in chunks_of(facts, cut, stage))


def stage_blocks(facts: Facts, cut: Cut, stage: int) -> tuple[Block, ...]:
    """Of all of them."""
    return tuple(block for blocks in chunk_blocks(facts, cut, stage) for block in blocks)


@cache
def stage_kinds(facts: Facts, cut: Cut, stage: int) -> tuple[tuple[Block, int], ...]:
    """The kinds of blocks of a rank, and how many there are of each."""
    return tuple(Counter(stage_blocks(facts, cut, stage)).items())


@cache
def stage_units(facts: Facts, cut: Cut, stage: int) -> tuple[tuple[Unit, int], ...]:
    """The same for dense FSDP2 groups; the embedding is on the first stage, the head on the last, both if tied."""
    units = [(unit, times) for block, times in stage_kinds(facts, cut, stage) for unit in block.units]
    units += [(facts.embedding, 1)] if stage == 0 and facts.embedding is not None else []
    units += [(facts.root, 1)] if has_root(facts, cut[0], stage) else []
    return tuple(units)


def has_root(facts: Facts, pp: int, stage: int) -> bool:
    """Whether a rank has what is around the blocks behind them (tied: before them as well)."""
    return stage == pp - 1 or (stage == 0 and facts.embedding is None)
