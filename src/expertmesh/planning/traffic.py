"""Bytes that one rank hands to each axis in an optimizer step, counted as the census counts them on real ranks.

All-to-all counts its input, rows to itself included; the other collectives the whole gathered or reduced tensor. What
crosses a link is less by the rank's own part: `Transfer.wire`. docs/planning.md derives the counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from expertmesh.config.sections import BYTES_OF
from expertmesh.mesh import Layout
from expertmesh.planning.facts import Block, Facts, Unit
from expertmesh.planning.memory import CHUNK_TOKENS, Batch, Mode, in_flight
from expertmesh.planning.routing import expected
from expertmesh.planning.state import sizes_of, stage_blocks, stage_kinds, stage_units

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One kind of collective over one axis: `calls` and `bytes` of a rank in an optimizer step, over `ranks` ranks.

    `prefetched`: issued before its result is needed, so that compute can hide it.
    """

    axis: str
    kind: Kind
    calls: float
    bytes: float
    ranks: int
    prefetched: bool

    @property
    def wire(self) -> float:
        """Bytes that leave this rank."""
        share = (self.ranks - 1) / self.ranks
        return self.bytes * (1.0 if self.kind == "send" else 2 * share if self.kind == "all_reduce" else share)


def traffic_of(
    facts: Facts, layout: Layout, batch: Batch, mode: Mode, *, stage: int = 0, imbalance: float = 1.0
) -> tuple[Transfer, ...]:
    """All transfers of one rank of a pipeline stage in an optimizer step; axes of one rank have none."""
    found: dict[tuple[str, Kind, bool], list[float]] = {}
    ranks: dict[tuple[str, Kind, bool], int] = {}
    for transfer in _transfers(facts, layout, batch, mode, stage, imbalance):
        if transfer.ranks > 1 and transfer.bytes:
            key = (transfer.axis, transfer.kind, transfer.prefetched)
            entry = found.setdefault(key, [0.0, 0.0])
            entry[0] += transfer.calls
            entry[1] += transfer.bytes
            ranks[key] = transfer.ranks
    return tuple(
        Transfer(axis, kind, calls, size, ranks[axis, kind, prefetched], prefetched)
        for (axis, kind, prefetched), (calls, size) in found.items()
    )


def _transfers(
    facts: Facts, layout: Layout, batch: Batch, mode: Mode, stage: int, imbalance: float
) -> Iterator[Transfer]:
    last = stage == layout.pp - 1
    splits = {block.split for block, _ in stage_kinds(facts, layout.pp, stage)}
    for unit, times in stage_units(facts, layout.pp, stage):
        # In one group with its block, but for what tp has split; so its calls count once.
        calls = times if layout.tp > 1 or unit not in splits else 0
        yield from _of_unit(unit, times, calls, 1 if unit is facts.root else 2, facts, layout, batch)
    if in_flight(layout, batch, stage) > 1:
        # The first backward's last prefetch finds a second forward recorded, and gathers that one's last block.
        block = stage_blocks(facts, layout.pp, stage)[-1]
        sizes = [sizes_of(unit, layout).flat for unit in (block.unit, None if layout.tp > 1 else block.split)]
        yield Transfer("fsdp", "all_gather", 1, sum(sizes), layout.fsdp * layout.cp * layout.tp, True)
    for block, times in stage_kinds(facts, layout.pp, stage):
        for transfer in _of_block(block, facts, layout, batch, mode, imbalance):
            yield replace(transfer, calls=times * transfer.calls, bytes=times * transfer.bytes)
    if last:
        yield from _of_vocabulary(facts, layout, batch)
    if stage == 0 and not facts.embeds_trained:
        # The first gather of positions is of what has no gradient.
        whole = _positions(facts, layout, batch) * facts.hidden * BYTES_OF[facts.precision.compute]
        yield Transfer("tp", "reduce_scatter", -batch.accumulation, -batch.accumulation * whole, layout.tp, False)
    if layout.pp > 1:
        hidden = batch.rows * facts.length / (layout.cp * layout.tp) * facts.hidden * BYTES_OF[facts.precision.compute]
        ends = (stage > 0) + (not last)
        yield Transfer("pp", "send", ends * batch.accumulation, ends * batch.accumulation * hidden, 2, False)


def _of_block(
    block: Block, facts: Facts, layout: Layout, batch: Batch, mode: Mode, imbalance: float
) -> Iterator[Transfer]:
    if block.experts is not None:
        yield from _of_experts(block, facts, layout, batch)
        yield from _of_dispatch(block, facts, layout, batch, mode, imbalance)
    yield from _of_sequence(block, facts, layout, batch, mode)


def _of_unit(
    unit: Unit, units: int, calls: int, gathers: int, facts: Facts, layout: Layout, batch: Batch
) -> Iterator[Transfer]:
    """FSDP2 gathers a dense group before forward and again before backward (the root only once), and reduces once."""
    reduce = max(BYTES_OF[facts.precision.reduce], BYTES_OF[facts.precision.compute])
    sizes, ranks = sizes_of(unit, layout), layout.fsdp * layout.cp
    ranks *= 1 if unit.weights and unit.weights[0].split is not None else layout.tp
    reduced, times = units * sizes.reduced * reduce, batch.accumulation
    yield Transfer("fsdp", "all_gather", gathers * times * calls, gathers * times * units * sizes.flat, ranks, True)
    yield Transfer("fsdp", "reduce_scatter", times * calls, times * reduced, ranks, True)
    yield Transfer("replicate", "all_reduce", calls, reduced / ranks, layout.replicate, True)


def _of_experts(block: Block, facts: Facts, layout: Layout, batch: Batch) -> Iterator[Transfer]:
    """The same for a rank's experts over efsdp."""
    assert block.experts is not None
    compute, reduce = BYTES_OF[facts.precision.compute], BYTES_OF[facts.precision.reduce]
    here = block.experts.spec.num_experts / layout.ep
    gathered = here * sum(size for size, _, _ in block.experts.matrices) * compute
    reduced = here * sum(size for size, trains, _ in block.experts.matrices if trains) * max(reduce, compute)
    times = batch.accumulation
    yield Transfer("efsdp", "all_gather", 2 * times, 2 * times * gathered, layout.efsdp, True)
    yield Transfer("efsdp", "reduce_scatter", times, times * reduced, layout.efsdp, True)
    yield Transfer("replicate", "all_reduce", 1, reduced / layout.efsdp, layout.replicate, True)


def _of_dispatch(
    block: Block, facts: Facts, layout: Layout, batch: Batch, mode: Mode, imbalance: float
) -> Iterator[Transfer]:
    """Counts, rows and pairs there and rows back in forward; rows, weights and rows in backward (dispatch.py)."""
    assert block.experts is not None
    experts, ranks, compute = block.experts, layout.ep, BYTES_OF[facts.precision.compute]
    tokens = batch.rows * facts.length / (layout.cp * layout.tp)
    route = expected(tokens, experts.choice, ranks, imbalance)
    row = experts.spec.hidden_size * compute
    weight = max(4, compute)
    counts = (ranks + experts.spec.num_experts) * 8
    forward = counts + route.sent * row + tokens * experts.choice.top_k * 2 * weight + route.rows * row
    backward = route.sent * row + route.rows * row + route.pairs * weight
    runs = 2 if mode == "full" else 1
    calls = (4 * runs + 3) * batch.accumulation
    yield Transfer("ep", "all_to_all", calls, (forward * runs + backward) * batch.accumulation, ranks, False)


def _of_sequence(block: Block, facts: Facts, layout: Layout, batch: Batch, mode: Mode) -> Iterator[Transfer]:
    """tp gathers the sequence before each split part and scatters its sums; cp exchanges heads for positions."""
    compute = BYTES_OF[facts.precision.compute]
    forwards, parts = 1 if mode == "none" else 2, block.parts
    positions = _positions(facts, layout, batch)
    whole = positions * facts.hidden * compute
    gathers = ((parts.split + parts.whole) * forwards + parts.split) * batch.accumulation
    # A block's second run ends with the last tensor that backward needs, which a last sum is not.
    sums = (parts.split * (forwards + 1) - (parts.last and forwards == 2) + parts.whole) * batch.accumulation
    features = positions * parts.features * compute * batch.accumulation
    yield Transfer("tp", "all_gather", gathers, gathers * whole + forwards * features, layout.tp, False)
    yield Transfer("tp", "reduce_scatter", sums, sums * whole + features, layout.tp, False)
    tokens = batch.rows * facts.length / (layout.cp * layout.tp)
    heads = 2 * facts.heads + 2 * max(facts.key_value_heads, layout.cp * layout.tp)
    times = (forwards + 1) * batch.accumulation
    yield Transfer("cp", "all_to_all", 4 * times, times * tokens * heads * facts.head_width * compute, layout.cp, False)


def _of_vocabulary(facts: Facts, layout: Layout, batch: Batch) -> Iterator[Transfer]:
    """tp gathers positions before the head and sums their gradients; three numbers per target (vocabulary.py)."""
    times = batch.accumulation
    whole = _positions(facts, layout, batch) * facts.hidden * BYTES_OF[facts.precision.compute]
    yield Transfer("tp", "all_gather", times, times * whole, layout.tp, False)
    yield Transfer("tp", "reduce_scatter", times, times * whole, layout.tp, False)
    targets = batch.rows * (facts.length - 1) / layout.cp
    calls = 2 * -(-targets // CHUNK_TOKENS) * times
    numbers = 3 * targets * max(4, BYTES_OF[facts.precision.compute]) * times
    yield Transfer("tp", "all_reduce", calls, numbers, layout.tp, False)


def _positions(facts: Facts, layout: Layout, batch: Batch) -> float:
    """That a tp group holds together."""
    return batch.rows * facts.length / layout.cp
