"""What a pipeline stage holds of a model's parameters, and what each FSDP2 group of it is in bytes.

Which blocks are on a stage is asked of the code that cuts them (asked.py); how a group is sharded follows
parallel/fsdp.py. State is exact; docs/planning.md derives it.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache

from expertmesh.mesh import Layout
from expertmesh.planning.facts import Block, Facts, Unit


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of one rank's shards: of what does not train, of what does, and of one gradient for each of those."""

    frozen: float
    master: float
    gradients: float


def state_of(facts: Facts, layout: Layout, stage: int = 0) -> State:
    """What rank 0 of a stage keeps of parameters; the largest share of each, as FSDP2 gives the first ranks more."""
    frozen = master = gradients = 0.0
    for unit, times in stage_units(facts, layout.pp, stage):
        sizes = sizes_of(unit, layout)
        frozen += times * sizes.frozen
        master += times * sizes.master
        gradients += times * sizes.master
    for block, times in stage_kinds(facts, layout.pp, stage):
        if block.experts is not None:
            for elements, trains, width in block.experts.matrices:
                size = times * elements * block.experts.spec.num_experts / layout.ep / layout.efsdp * width
                frozen += 0 if trains else size
                master += size if trains else 0
                gradients += size if trains else 0
    return State(frozen, master, gradients)


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
    return _sizes(unit, layout.fsdp * layout.cp, layout.tp)


@cache
def _sizes(unit: Unit | None, ranks: int, tp: int) -> Sizes:
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


@cache
def stage_blocks(facts: Facts, stages: int, stage: int) -> tuple[Block, ...]:
    """The blocks of a pipeline stage, as training will cut them."""
    if stages == 1:
        return facts.blocks
    return tuple(facts.blocks[number] for number in facts.asked.stages(stages)[stage])


@cache
def stage_kinds(facts: Facts, stages: int, stage: int) -> tuple[tuple[Block, int], ...]:
    """The kinds of blocks of a stage, and how many there are of each."""
    return tuple(Counter(stage_blocks(facts, stages, stage)).items())


@cache
def stage_units(facts: Facts, stages: int, stage: int) -> tuple[tuple[Unit, int], ...]:
    """The same for dense FSDP2 groups; the embedding is on the first stage, the head on the last, both if tied."""
    units = [(unit, times) for block, times in stage_kinds(facts, stages, stage) for unit in block.units]
    units += [(facts.embedding, 1)] if stage == 0 and facts.embedding is not None else []
    units += [(facts.root, 1)] if has_root(facts, stages, stage) else []
    return tuple(units)


def has_root(facts: Facts, stages: int, stage: int) -> bool:
    """Whether a stage has what is around the blocks behind them (tied: before them as well)."""
    return stage == stages - 1 or (stage == 0 and facts.embedding is None)
