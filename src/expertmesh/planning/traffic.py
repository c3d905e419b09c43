"""Bytes that one rank hands to each axis in an optimizer step, counted as the census counts them on real ranks.

All-to-all counts its input, rows to itself included; the other collectives the whole gathered or reduced tensor. What
crosses a link is less by the rank's own part: `Transfer.wire`. docs/planning.md derives the counts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Literal

from expertmesh.config.sections import BYTES_OF
from expertmesh.distributed.layout import Layout
from expertmesh.planning.facts import Block, Facts, Unit
from expertmesh.planning.memory import CHUNK_TOKENS, Batch
from expertmesh.planning.routing import expected
from expertmesh.planning.schedule import prefetching
from expertmesh.planning.state import (
    CheckpointedLayers,
    Cut,
    Mode,
    Sizes,
    chunk_blocks,
    cut_of,
    has_root,
    sizes_of,
    sizes_over,
    stage_kinds,
    stage_pieces,
    stage_units,
)

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

    def times(self, factor: int) -> "Transfer":
        return Transfer(self.axis, self.kind, factor * self.calls, factor * self.bytes, self.ranks, self.prefetched)

    def plus(self, other: "Transfer") -> "Transfer":
        """Both together. Groups of one axis may differ in their ranks (what tp splits): the second's are given."""
        calls, size = self.calls + other.calls, self.bytes + other.bytes
        return Transfer(self.axis, self.kind, calls, size, other.ranks, self.prefetched)


def traffic_of(
    facts: Facts,
    layout: Layout,
    batch: Batch,
    mode: Mode,
    *,
    layers: CheckpointedLayers = "all",
    stage: int = 0,
    imbalance: float = 1.0,
) -> tuple[Transfer, ...]:
    """All transfers of one rank of pp rank `stage` in an optimizer step; axes of one rank have none."""
    cut, cp, tp = cut_of(layout), layout.cp, layout.tp
    tokens = Layout(pp=layout.pp, cp=cp, tp=tp, ep=layout.ep, pp_virtual_stages=layout.pp_virtual_stages)
    # What layouts have in common is added up once: a plan of a large job asks for thousands.
    found = [each.times(batch.accumulation) for each in _of_groups(facts, cut, layout.fsdp * cp, tp, stage)]
    found += [
        each.times(batch.accumulation) for each in _of_tokens(facts, tokens, batch.rows, mode, layers, stage, imbalance)
    ]
    found += _of_experts(facts, layout, batch, stage)
    found += _prefetched(facts, layout, batch, stage)
    if layout.replicate > 1:
        calls, size = _reduced(facts, cut, layout.fsdp * cp, tp, stage)
        found.append(Transfer("replicate", "all_reduce", calls, size, layout.replicate, True))
    return _summed(found)


def _prefetched(facts: Facts, layout: Layout, batch: Batch, stage: int) -> Iterator[Transfer]:
    """What FSDP2 gathers over fsdp beside each group's forward and backward. The embedding runs in the forward of every
    chunk; a backward prefetches what ran before its chunk's last forward: the embedding, or a block of another
    micro-batch, which nobody waits for.
    """
    tp, ranks = layout.tp, layout.fsdp * layout.cp * layout.tp
    if ranks == 1:
        return
    blocks = chunk_blocks(facts, cut_of(layout), stage)
    embedding = facts.embedding if stage == 0 else None
    root = has_root(facts, layout.pp, stage)
    for found in prefetching(layout, batch.accumulation, stage):
        if embedding is not None and found.recorded and (found.chunk or not facts.embeds_trained):
            yield Transfer(
                "fsdp", "all_gather", found.times, found.times * sizes_of(embedding, layout).flat, ranks, True
            )
            continue
        # The root ends every forward, so that its own backward prefetches the last block of the latest.
        behind = found.other if root else found.behind
        # A block that is alone on its stage would be what is behind itself: it is gathered already.
        alone = embedding is None and behind == found.chunk and len(blocks[found.chunk]) == 1
        if behind is not None and not alone:
            block = blocks[behind][-1]
            sizes = [sizes_of(unit, layout).flat for unit in (block.unit, None if tp > 1 else block.split)]
            yield Transfer("fsdp", "all_gather", found.times, found.times * sum(sizes), ranks, True)


def _summed(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """One for each axis and kind, in the order of the first; those of one rank or no bytes left out."""
    found: dict[tuple[str, Kind, bool], Transfer] = {}
    for each in transfers:
        if each.ranks > 1 and each.bytes:
            key = (each.axis, each.kind, each.prefetched)
            before = found.get(key)
            found[key] = each if before is None else before.plus(each)
    return tuple(found.values())


@cache
def _of_groups(facts: Facts, cut: Cut, ranks: int, tp: int, stage: int) -> tuple[Transfer, ...]:
    """A micro-batch's, over fsdp: FSDP2 gathers a dense group before forward and again before backward (the root only
    once), and reduces once. What it prefetches in vain is not in it.
    """
    reduce = max(BYTES_OF[facts.precision.reduce], BYTES_OF[facts.precision.compute])
    found = []
    for unit, units, calls, sizes in _groups(facts, cut, ranks, tp, stage):
        over = ranks if unit.weights and unit.weights[0].split is not None else ranks * tp
        # What is around the blocks runs in the forward of every chunk, and what is behind them in its backward as well.
        root, embedding = unit is facts.root, unit is facts.embedding
        gathers = cut[1] if root else cut[1] + facts.embeds_trained if embedding else 2
        reduces = cut[1] if root else 1
        found.append(Transfer("fsdp", "all_gather", gathers * calls, gathers * units * sizes.flat, over, True))
        reduced = reduces * units * sizes.reduced * reduce
        found.append(Transfer("fsdp", "reduce_scatter", reduces * calls, reduced, over, True))
    return _summed(found)


@cache
def _reduced(facts: Facts, cut: Cut, ranks: int, tp: int, stage: int) -> tuple[int, float]:
    """Calls and bytes of a step's all-reduce of a rank's dense shards over replicas."""
    reduce = max(BYTES_OF[facts.precision.reduce], BYTES_OF[facts.precision.compute])
    number, total = 0, 0.0
    for unit, units, calls, sizes in _groups(facts, cut, ranks, tp, stage):
        over = ranks if unit.weights and unit.weights[0].split is not None else ranks * tp
        number, total = number + (calls if sizes.reduced else 0), total + units * sizes.reduced * reduce / over
    return number, total


def _groups(facts: Facts, cut: Cut, ranks: int, tp: int, stage: int) -> Iterator[tuple[Unit, int, int, Sizes]]:
    """Dense FSDP2 groups of a stage: how many alike, and how many of them have calls of their own."""
    splits = {block.split: block.parts.split for block, _ in stage_kinds(facts, cut, stage)}
    for unit, times in stage_units(facts, cut, stage):
        # In one group with its block; what tp has split is in a group for each part.
        calls = times * (splits[unit] if tp > 1 else 0) if unit in splits else times
        yield unit, times, calls, sizes_over(unit, ranks, tp)


@cache
def _of_tokens(
    facts: Facts, layout: Layout, rows: int, mode: Mode, layers: CheckpointedLayers, stage: int, imbalance: float
) -> tuple[Transfer, ...]:
    """A micro-batch's, over ep, tp, cp and pp. Of `layout` these axes alone count."""
    last = stage == layout.pp - 1
    found: list[Transfer] = []
    for (block, kept), times in stage_pieces(facts, cut_of(layout), stage, mode, layers):
        own = [_of_dispatch(block, facts, layout, rows, kept, imbalance)] if block.experts is not None else []
        found += [each.times(times) for each in (*own, *_of_sequence(block, facts, layout, rows, kept))]
    if last:
        found += _of_vocabulary(facts, layout, rows)
    whole = _positions(facts, layout, rows) * facts.hidden * BYTES_OF[facts.precision.compute]
    if stage == 0 and not facts.embeds_trained:
        # The first gather of positions is of what has no gradient.
        found.append(Transfer("tp", "reduce_scatter", -1, -whole, layout.tp, False))
    if layout.pp > 1:
        ends = 2 * layout.pp_virtual_stages - (stage == 0) - last
        found.append(Transfer("pp", "send", ends, ends * whole / layout.tp, 2, False))
    return _summed(found)


def _of_experts(facts: Facts, layout: Layout, batch: Batch, stage: int) -> Iterator[Transfer]:
    """The same for a rank's experts over efsdp, and over replicas."""
    layers, gathered, reduced = _experts(facts, cut_of(layout), stage)
    gathered, reduced, times = gathered / layout.ep, reduced / layout.ep, batch.accumulation
    if layout.efsdp > 1:
        yield Transfer("efsdp", "all_gather", 2 * times * layers, 2 * times * gathered, layout.efsdp, True)
        yield Transfer("efsdp", "reduce_scatter", times * layers, times * reduced, layout.efsdp, True)
    if layout.replicate > 1:
        yield Transfer("replicate", "all_reduce", layers, reduced / layout.efsdp, layout.replicate, True)


@cache
def _experts(facts: Facts, cut: Cut, stage: int) -> tuple[int, float, float]:
    """Layers with routed experts of a stage, and bytes of all their experts as gathered and as reduced."""
    compute = BYTES_OF[facts.precision.compute]
    reduce = max(BYTES_OF[facts.precision.reduce], compute)
    layers, gathered, reduced = 0, 0.0, 0.0
    for block, times in stage_kinds(facts, cut, stage):
        if block.experts is not None:
            every = times * block.experts.spec.num_experts
            layers += times
            gathered += every * sum(size for size, _, _ in block.experts.matrices) * compute
            reduced += every * sum(size for size, trains, _ in block.experts.matrices if trains) * reduce
    return layers, gathered, reduced


def _of_dispatch(block: Block, facts: Facts, layout: Layout, rows: int, mode: Mode, imbalance: float) -> Transfer:
    """Counts, rows and pairs there and rows back in forward; rows, weights and rows in backward (dispatch.py)."""
    assert block.experts is not None
    experts, ranks, compute = block.experts, layout.ep, BYTES_OF[facts.precision.compute]
    tokens = rows * facts.length / (layout.cp * layout.tp)
    route = expected(tokens, experts.choice, ranks, imbalance)
    row = experts.spec.hidden_size * compute
    weight = max(4, compute)
    counts = (ranks + experts.spec.num_experts) * 8
    forward = counts + route.sent * row + tokens * experts.choice.top_k * 2 * weight + route.rows * row
    backward = route.sent * row + route.rows * row + route.pairs * weight
    runs = 2 if mode == "full" else 1
    return Transfer("ep", "all_to_all", 4 * runs + 3, forward * runs + backward, ranks, False)


def _of_sequence(block: Block, facts: Facts, layout: Layout, rows: int, mode: Mode) -> Iterator[Transfer]:
    """tp gathers the sequence before each split part and scatters its sums; cp exchanges heads for positions."""
    compute = BYTES_OF[facts.precision.compute]
    forwards, parts = 1 if mode == "none" else 2, block.parts
    positions = _positions(facts, layout, rows)
    whole = positions * facts.hidden * compute
    gathers = (parts.split + parts.whole) * forwards + parts.split
    # A block's second run ends with the last tensor that backward needs, which a last sum is not.
    sums = parts.split * (forwards + 1) - (parts.last and forwards == 2) + parts.whole
    features = positions * parts.features * compute
    yield Transfer("tp", "all_gather", gathers, gathers * whole + forwards * features, layout.tp, False)
    yield Transfer("tp", "reduce_scatter", sums, sums * whole + features, layout.tp, False)
    if (queries := block.figures.heads) and layout.cp > 1:
        # Keys and values go together with the queries, repeated as far as a rank's queries need (context.py).
        groups = queries // facts.key_value_heads
        keys = facts.key_value_heads * groups // gcd(queries // (layout.cp * layout.tp), groups)
        exchanged = (block.figures.queries + keys * block.figures.keys) * rows / (layout.cp * layout.tp)
        times = forwards + 1
        yield Transfer("cp", "all_to_all", 2 * times, times * exchanged, layout.cp, False)


def _of_vocabulary(facts: Facts, layout: Layout, rows: int) -> tuple[Transfer, ...]:
    """tp gathers positions before the head and sums their gradients; three numbers per target (vocabulary.py)."""
    whole = _positions(facts, layout, rows) * facts.hidden * BYTES_OF[facts.precision.compute]
    targets = rows * (facts.length - 1) / layout.cp
    numbers = 3 * targets * max(4, BYTES_OF[facts.precision.compute])
    return (
        Transfer("tp", "all_gather", 1, whole, layout.tp, False),
        Transfer("tp", "reduce_scatter", 1, whole, layout.tp, False),
        Transfer("tp", "all_reduce", 2 * -(-targets // CHUNK_TOKENS), numbers, layout.tp, False),
    )


def _positions(facts: Facts, layout: Layout, rows: int) -> float:
    """That a tp group holds together."""
    return rows * facts.length / layout.cp
