"""Bytes that one rank hands to each axis in an optimizer step, counted as the trackers count them on real ranks.

All-to-all counts its input, rows to itself included; the other collectives the whole gathered or reduced tensor. What
crosses a link is less by the rank's local part: `Transfer.wire`. docs/formulas.md derives the counts.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import gcd, lcm
from typing import Literal

from expertmesh.config.sections import BYTES_OF
from expertmesh.distributed.layout import Layout, RoutedTokens, rows_per_token
from expertmesh.parallel.checkpointing import CheckpointingMode
from expertmesh.planning.memory import CHUNK_TOKENS, RankMemory
from expertmesh.planning.model_figures import Block, Experts, ModelFigures, group_bytes
from expertmesh.planning.stages import (
    PipelineRank,
    Workload,
    inputs_that_wait,
    parts_of_last_dim,
    prefetches_in_vain,
    runs_shared_beside,
)
from expertmesh.training.optimizers.adamw import is_quantised, scale_shape

# The ranks of an EP group with the same place in their nodes.
EP_NODES = "ep, between nodes"
CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One kind of collective over one axis, in an optimizer step of one rank."""

    axis: str
    """Name of the axis; `EP_NODES`, or "host" for copies from host memory."""
    kind: CollectiveKind
    calls: float
    bytes: float
    """Bytes of all calls together, as the module docstring counts them."""
    ranks: int
    prefetched: bool = False
    """True if it is issued before its result is needed, so that compute can hide it."""

    @property
    def wire(self) -> float:
        """Bytes that leave this rank."""
        share = (self.ranks - 1) / self.ranks
        return self.bytes * (1.0 if self.kind == "send" else 2 * share if self.kind == "all_reduce" else share)

    def times(self, factor: int) -> "Transfer":
        return Transfer(self.axis, self.kind, factor * self.calls, factor * self.bytes, self.ranks, self.prefetched)

    def plus(self, other: "Transfer") -> "Transfer":
        """Return both together, with the ranks of `other`: groups of one axis may differ (what tp splits)."""
        calls, size = self.calls + other.calls, self.bytes + other.bytes
        return Transfer(self.axis, self.kind, calls, size, other.ranks, self.prefetched)


def traffic_of(workload: Workload, stage: int = 0) -> tuple[Transfer, ...]:
    """Return all transfers of one rank of pp rank `stage` in an optimizer step; axes of one rank have none."""
    model, layout, rank, times = workload.model, workload.layout, workload.rank(stage), workload.batch.accumulation
    passes, stays = workload.batch.passes, stays_gathered(workload)
    ranks, virtual = layout.fsdp * layout.cp, layout.pp_virtual_stages
    # What layouts have in common is added up once: a plan of a large job computes thousands.
    axes = Layout(pp=layout.pp, cp=layout.cp, tp=layout.tp, ep=layout.ep, pp_virtual_stages=virtual)
    imbalance = workload.mean_imbalance(stage)
    per_token = _of_tokens(model, rank, axes, workload.batch.rows, imbalance, workload.ep_nodes)
    dense, calls, reduced = _dense(model, rank, virtual, stays, ranks, layout.tp)
    found = [*(each.times(passes) for each in dense), *(each.times(times) for each in per_token)]
    found += _of_experts(model, rank, layout, passes, stays)
    found += _gathers_in_vain(rank, layout, times)
    found.append(Transfer("replicate", "all_reduce", calls, reduced, layout.replicate, True))
    if layout.pp > 1 and rank.has_root and model.embedding is None and model.head_trains:
        # The two stages that hold a tied weight add up its gradient.
        size = model.head / (ranks * layout.tp) * BYTES_OF[model.precision.params]
        found.append(Transfer("pp", "send", 1, size, 2))
    if workload.optimizer == "adamw_8bit":
        found += _of_shared_blocks(rank, layout)
    if workload.optimizer == "muon":
        found += _of_matrices(model, rank, layout)
    return _summed(found)


def stays_gathered(workload: Workload) -> tuple[Block, ...]:
    """Return the blocks that stay gathered between forward and backward: by layer those of the last one."""
    model = workload.model
    return tuple(model.blocks[n] for n in model.feasibility.layers[-1]) if workload.batch.together else ()


def stride_of(transfer: Transfer, layout: Layout) -> int:
    """Return the distance in ranks between neighbours of the group of a transfer, of two or more."""
    if transfer.axis == EP_NODES:
        return layout.ep // transfer.ranks
    if transfer.axis == "fsdp":
        return layout.tp if transfer.ranks == layout.fsdp * layout.cp else 1
    first, second, *_ = layout.groups(transfer.axis)[0]
    return second - first


def bytes_between_nodes(transfer: Transfer, layout: Layout, per_node: int) -> float:
    """Return the bytes of `transfer` that a rank sends to other nodes in a step, the mean over ranks.

    An all-to-all sends each of its ranks an equal part; all else goes around a ring in the order of ranks.

    Args:
        per_node: Ranks of a node.
    """
    world, ranks = layout.world_size, transfer.ranks
    if world <= per_node or ranks == 1:
        return 0.0
    stride = stride_of(transfer, layout)
    if world % lcm(stride * ranks, per_node) == 0:
        world = lcm(stride * ranks, per_node)  # from there on all repeats
    crossing = 0.0  # of all ranks, the shares of what leaves them
    for first in (rank for rank in range(world) if rank // stride % ranks == 0):
        nodes = [(first + place * stride) // per_node for place in range(ranks)]
        if transfer.kind == "all_to_all":
            crossing += sum(1 - count / ranks for count in Counter(nodes).values() for _ in range(count))
        else:
            crossing += sum(node != after for node, after in zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    return crossing / world * (transfer.bytes if transfer.kind == "all_to_all" else transfer.wire)


def host_copies(workload: Workload, stage: int) -> Transfer:
    """Return the copies between device and host memory in a step of one rank of pp rank `stage`.

    With parallel.offload packed experts are copied before forward and again before backward, where they do not stay;
    with train.keep_inputs: host the inputs of layers in both directions.
    """
    copies = size = 0.0
    stay = stays_gathered(workload)
    for block, times in workload.rank(stage).blocks:
        if block.experts is not None:
            packed = sum(each.elements * each.bytes for each in block.experts.matrices if each.packed)
            uses = 2 * times - stay.count(block)
            copies += uses
            size += uses * packed * block.experts.spec.num_experts / workload.layout.ep / workload.layout.efsdp
    passes = workload.batch.passes if workload.layout.offload == "experts" else 0
    inputs = 2 * inputs_that_wait(workload) * workload.batch.accumulation
    moved = passes * size + inputs * RankMemory(workload).hidden
    return Transfer("host", "send", passes * copies + inputs, moved, 1, True)


def _summed(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """Return one for each axis and kind, in the order of the first; those of one rank or no bytes left out."""
    found: dict[tuple[str, CollectiveKind, bool], Transfer] = {}
    for each in transfers:
        if each.ranks > 1 and each.bytes:
            key = (each.axis, each.kind, each.prefetched)
            found[key] = found[key].plus(each) if key in found else each
    return tuple(found.values())


def _of_shared_blocks(rank: PipelineRank, layout: Layout) -> Iterator[Transfer]:
    """Yield the all-reduces of 8-bit AdamW: block maxima of both moments, where ranks hold parts of the same rows."""
    over = layout.fsdp * layout.cp
    for group, times in rank.groups:
        for weight in group.weights:
            if weight.trains and weight.is_split_on_last and is_quantised(weight.shape):
                size = 2 * 4 * -(-weight.shape[0] // over) * scale_shape(weight.shape)[-1]
                yield Transfer("tp", "all_reduce", 2 * times, times * size, layout.tp)
    for block, times in rank.blocks:
        if (experts := block.experts) is None:
            continue
        for matrix in experts.matrices:
            parts = parts_of_last_dim(experts, matrix, layout)
            if matrix.trains and parts > 1 and is_quantised(matrix.shape):
                rows = matrix.elements // matrix.shape[-1] * experts.spec.num_experts // layout.ep
                size = 2 * 4 * rows * scale_shape(matrix.shape)[-1]
                yield Transfer("efsdp", "all_reduce", 2 * times, times * size, parts)


def _of_matrices(model: ModelFigures, rank: PipelineRank, layout: Layout) -> Iterator[Transfer]:
    """Yield Muon's all-to-alls: parts of matrices to the rank that orthogonalises each, and back, spread evenly."""
    width, over = model.compute_bytes, layout.fsdp * layout.cp * layout.tp
    for group, times in rank.groups:
        for weight in group.weights:
            if weight.is_muons:
                size = 2 * times * weight.numel / over * width
                yield Transfer("fsdp", "all_to_all", 2 * times / over, size, over)
    for block, times in rank.blocks:
        experts = block.experts
        if experts is None or experts.spec.num_experts // layout.ep % layout.efsdp == 0:
            continue  # whole experts
        here = experts.spec.num_experts // layout.ep
        for matrix in experts.matrices:
            if matrix.is_muons:
                size = 2 * times * here * matrix.elements / layout.efsdp * width
                yield Transfer("efsdp", "all_to_all", 2 * times * -(-here // layout.efsdp), size, layout.efsdp)


@cache
def _dense(
    model: ModelFigures, rank: PipelineRank, virtual: int, stays: tuple[Block, ...], ranks: int, tp: int
) -> tuple[tuple[Transfer, ...], int, float]:
    """Return the transfers of dense groups over fsdp, and calls and bytes of a step's all-reduce over replicas.

    FSDP2 gathers a group before forward and again before backward (the root and what `stays` only once), and reduces
    once, in each micro-batch or round; `_gathers_in_vain` has what else it gathers.
    """
    found, calls_over_replicas, over_replicas = [], 0, 0.0
    parts = {block.split: block.parts.split for block, _ in rank.blocks}
    stay = [group for block in stays for group in block.groups]
    for group, times in rank.groups:
        sizes, over = group_bytes(group, ranks, tp), group.sharded_over(ranks, tp)
        # What tp splits is in a group for each part; otherwise in one with its block.
        each = 1 if group not in parts else parts[group] if tp > 1 else 0
        calls = times * each
        # What is around the blocks runs in the forward of every chunk, and what is behind them in its backward as well.
        # On the first stage of several the head is there as the embedding that it is tied to.
        is_root = group is model.root and rank.is_last
        is_embedding = group is model.embedding or (group is model.root and not is_root)
        gathers = times * (virtual + model.embeds_trained if is_embedding else virtual if is_root else 2)
        gathers -= stay.count(group)
        reduces = virtual if is_root else 1
        reduced = times * sizes.reduced * model.reduce_bytes
        found.append(Transfer("fsdp", "all_gather", gathers * each, gathers * sizes.flat, over, True))
        found.append(Transfer("fsdp", "reduce_scatter", reduces * calls, reduces * reduced, over, True))
        calls_over_replicas += calls if sizes.reduced else 0
        over_replicas += reduced / over
    return _summed(found), calls_over_replicas, over_replicas


def _gathers_in_vain(rank: PipelineRank, layout: Layout, accumulation: int) -> Iterator[Transfer]:
    """Yield the gathers over fsdp that nothing uses: the root's backward prefetches another chunk's last block."""
    tp, ranks = layout.tp, layout.fsdp * layout.cp
    if rank.is_last and layout.pp_virtual_stages > 1:
        for chunk, times in prefetches_in_vain(layout, accumulation, rank.stage).items():
            block, _ = rank.chunks[chunk][-1]
            size = sum(group_bytes(group, ranks, tp).flat for group in (block.own, None if tp > 1 else block.split))
            yield Transfer("fsdp", "all_gather", times, times * size, ranks * tp, True)


@cache
def _of_tokens(
    model: ModelFigures, rank: PipelineRank, layout: Layout, rows: int, imbalance: float, ep_nodes: int
) -> tuple[Transfer, ...]:
    """Return a micro-batch's, over ep, tp, cp and pp. Of `layout` these axes alone count."""
    found, whole = list[Transfer](), _full_bytes(model, layout, rows)
    for (block, mode), times in rank.pieces:
        if block.experts is not None:
            tokens, runs = rows * model.length / (layout.cp * layout.tp), 2 if mode == "full" else 1
            routed = block.experts.router.routed(tokens, layout.ep, imbalance)
            back = runs - block.ends_in_experts(mode, shared_beside=runs_shared_beside(layout, ep_nodes))
            dispatched = _of_dispatch(block.experts, model.compute_bytes, routed, (runs, back), (layout.ep, ep_nodes))
            found += [each.times(times) for each in dispatched]
        found += [each.times(times) for each in _of_sequence(block, model, layout, rows, mode)]
    if rank.is_last:
        found += _of_vocabulary(model, layout, rows)
    if rank.stage == 0 and not model.embeds_trained:
        # The first gather of positions is of what has no gradient.
        found.append(Transfer("tp", "reduce_scatter", -1, -whole, layout.tp))
    if layout.pp > 1:
        ends = 2 * layout.pp_virtual_stages - (rank.stage == 0) - rank.is_last
        found.append(Transfer("pp", "send", ends, ends * whole / layout.tp, 2))
    return _summed(found)


def _of_experts(
    model: ModelFigures, rank: PipelineRank, layout: Layout, passes: int, stays: tuple[Block, ...]
) -> Iterator[Transfer]:
    """Yield a rank's experts over efsdp, and over replicas, and the adapters of copies over ep.

    Experts of `stays` are gathered once in a pass.
    """
    layers, gathered, reduced = _experts(model, rank.blocks)
    once, stay, _ = _experts(model, tuple((block, 1) for block in stays))
    calls, size = passes * (2 * layers - once), passes * (2 * gathered - stay) / layout.ep
    reduced /= layout.ep
    yield Transfer("efsdp", "all_gather", calls, size, layout.efsdp, True)
    yield Transfer("efsdp", "reduce_scatter", passes * layers, passes * reduced, layout.efsdp, True)
    yield Transfer("replicate", "all_reduce", layers, reduced / layout.efsdp, layout.replicate, True)
    adapted = sum(times * each.experts.elements(trains=True) for each, times in rank.blocks if each.experts)
    if copied := model.replicas * adapted:  # values before the first forward, gradients after the last backward
        yield Transfer("ep", "all_to_all", 2 * layers, 2 * copied * BYTES_OF[model.precision.params], layout.ep)


@cache
def _experts(model: ModelFigures, blocks: tuple[tuple[Block, int], ...]) -> tuple[int, float, float]:
    """Return the blocks' layers with routed experts, and the bytes of all their experts as gathered and as reduced."""
    layers, gathered, reduced = 0, 0.0, 0.0
    for block, times in blocks:
        if block.experts is not None:
            every = times * block.experts.spec.num_experts
            layers += times
            gathered += every * block.experts.gathered(model.compute_bytes)
            reduced += every * block.experts.elements(trains=True) * model.reduce_bytes
    return layers, gathered, reduced


def _of_dispatch(
    experts: Experts, width: int, routed: RoutedTokens, runs: tuple[int, int], ranks: tuple[int, int]
) -> Iterator[Transfer]:
    """Yield a micro-batch's all-to-alls of one block over ep, as experts/dispatch.py issues them.

    Forward sends counts, pairs and rows, and the rows' results; backward sends rows, weights and rows. Recomputation
    sends no counts. The busiest rank receives more than it sends, and sends as much back: both directions count the
    larger. If rows go to nodes first (experts/dispatch.py), expert ids and weights go with them.

    Args:
        width: Bytes of a value.
        runs: Dispatches and combines of forward, recomputation included.
        ranks: Ranks of an EP group, and the nodes that rows go to first (1: directly to ranks).
    """
    (ep, nodes), (there, back), spec, top_k = ranks, runs, experts.spec, experts.router.top_k
    row, weight = spec.hidden_size * width, max(4, width)
    counts = (ep + spec.num_experts) // nodes * 8
    forward = there * (routed.rows * row + routed.pairs * 2 * weight) + back * routed.rows * row
    backward = 2 * routed.rows * row + routed.pairs * weight
    yield Transfer("ep", "all_to_all", 4 + 2 * there + back, counts + forward + backward, ep // nodes)
    if nodes > 1:
        rows, counts = routed.tokens * rows_per_token(experts.router, nodes), 8 * (nodes + ep + spec.num_experts)
        forward = rows * (there * (row + top_k * (4 + weight)) + back * row)
        backward = rows * (2 * row + top_k * weight)
        yield Transfer(EP_NODES, "all_to_all", 4 + 3 * there + back, counts + forward + backward, nodes)


def _of_sequence(
    block: Block, model: ModelFigures, layout: Layout, rows: int, mode: CheckpointingMode
) -> Iterator[Transfer]:
    """Yield the transfers of positions.

    tp gathers the sequence before each split part and scatters its sums; cp exchanges heads for positions, or gathers
    rows for what needs them whole, and where ranks share its heads scatters the sums.
    """
    forwards, parts = 1 if mode == "none" else 2, block.parts
    whole = _full_bytes(model, layout, rows)
    gathers = (parts.split + parts.whole) * forwards + parts.split
    # A block's second run ends with the last tensor that backward needs, which a last sum is not.
    sums = parts.split * (forwards + 1) - (parts.last and forwards == 2) + parts.whole
    features = rows * model.length / layout.cp * parts.features * model.compute_bytes
    again = parts.gathered
    yield Transfer("tp", "all_gather", gathers + forwards * again, gathers * whole + forwards * features, layout.tp)
    yield Transfer("tp", "reduce_scatter", sums + again, sums * whole + features, layout.tp)
    if layout.cp > 1 and (gathered := parts.rows_by_heads + parts.rows_whole):
        rows_whole = whole * layout.cp
        there, back = gathered * forwards + parts.rows_by_heads, parts.rows_by_heads * forwards + gathered
        yield Transfer("cp", "all_gather", there, there * rows_whole, layout.cp)
        yield Transfer("cp", "reduce_scatter", back, back * rows_whole, layout.cp)
    elif (queries := block.figures.heads) and layout.cp > 1:
        # Keys and values go together with the queries, repeated as far as a rank's queries need (parallel/context.py).
        groups = queries // model.key_value_heads
        keys = model.key_value_heads * groups // gcd(queries // (layout.cp * layout.tp), groups)
        exchanged = (block.figures.queries + keys * block.figures.keys) * rows / (layout.cp * layout.tp)
        times = forwards + 1
        yield Transfer("cp", "all_to_all", 2 * times, times * exchanged, layout.cp)


def _of_vocabulary(model: ModelFigures, layout: Layout, rows: int) -> Iterator[Transfer]:
    """Yield the head's: tp gathers positions and sums their gradients, and reduces three numbers per target."""
    targets, full = rows * (model.length - 1) / layout.cp, _full_bytes(model, layout, rows)
    yield Transfer("tp", "all_gather", 1, full, layout.tp)
    yield Transfer("tp", "reduce_scatter", 1, full, layout.tp)
    numbers = 3 * targets * max(4, model.compute_bytes)
    yield Transfer("tp", "all_reduce", 2 * -(-targets // CHUNK_TOKENS), numbers, layout.tp)


def _full_bytes(model: ModelFigures, layout: Layout, rows: int) -> float:
    """Return the bytes of the hidden states of all positions that a tp group holds together."""
    return rows * model.length / layout.cp * model.hidden * model.compute_bytes
