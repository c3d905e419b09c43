"""Seconds of one optimizer step: a roofline over what a rank computes, moves and sends, and what of it overlaps.

Products run at a share of the device's peak, everything else at a share of its memory bandwidth, and none of it faster
than the host can launch it. FSDP2's collectives are prefetched and hide behind compute as far as it lasts; dispatch,
tp and cp do not. docs/formulas.md derives it and compares it with published runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import gcd

from expertmesh.config.sections import BYTES_OF
from expertmesh.distributed.layout import DENSE_AXES, EXPERT_AXES, Layout
from expertmesh.planning.hardware import Devices
from expertmesh.planning.model_figures import Block, ModelFigures, group_bytes
from expertmesh.planning.stages import PipelineRank, Workload, resident_state, runs_shared_beside
from expertmesh.planning.traffic import Transfer, host_copies, stride_of, traffic_of

# Operations of one expert layer, forward and backward, and those of its forward from the activation on, counted in
# benchmarks/planning.py.
EXPERT_OPERATIONS, LAST_OPERATIONS = (75, 60), 7
# Bytes read and written for each packed weight: code, index, fp32 value looked up, scaled and cast (codes.py).
DEQUANTISING = 22


@dataclass(frozen=True, slots=True)
class Link:
    """One transfer's part of a step."""

    transfer: Transfer
    seconds: float
    exposed: float
    """Seconds of it that compute does not hide."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of one optimizer step on the slowest pp rank, and what they are spent on."""

    products: float
    experts: float
    attention: float
    memory: float
    """Reads and writes of device memory by all else."""
    host: float
    """Waits for the host's launches."""
    head: float
    optimizer: float
    """Gradient norm and optimizer."""
    links: tuple[Link, ...]
    bubble: float
    """Idle time of the pipeline, as a share of the other seconds."""
    tokens: int
    """Input tokens of the step, full job."""
    model_flops: float
    """FLOPs of the step, full job, recomputation not counted."""
    peak_flops: float
    """FLOP/s of all devices at their peak."""

    @property
    def compute(self) -> float:
        """Seconds of the device, with its waits for the host."""
        return self.products + self.experts + self.attention + self.memory + self.host + self.head + self.optimizer

    @property
    def exposed(self) -> float:
        return sum(link.exposed for link in self.links)

    @property
    def seconds(self) -> float:
        return (self.compute + self.exposed) * (1 + self.bubble)

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation."""
        return self.model_flops / self.seconds / self.peak_flops


def speed_of(workload: Workload, devices: Devices) -> Speed:
    """Return the time of a step on `devices`, by the pp rank whose micro-batch takes longest."""
    model, layout, batch = workload.model, workload.layout, workload.batch
    rates, times, shares = _Rates.of(model, devices), batch.accumulation, (layout.cp, layout.tp)
    beside, each = runs_shared_beside(layout, workload.ep_nodes), {}
    for stage in workload.distinct_stages():
        routing = layout.ep, workload.mean_imbalance(stage), beside
        each[stage] = _micro_batch(model, workload.rank(stage), shares, batch.rows, routing, rates)
    # All others wait for the pp rank whose micro-batch takes longest.
    stage = max(each, key=lambda stage: each[stage].seconds)
    slowest, state = each[stage], resident_state(model, layout, stage, workload.optimizer)
    muon = 0.0
    if workload.optimizer == "muon":
        # Each of five Newton-Schulz steps computes the gram matrix of s rows and l columns, its square, and its product
        # with the matrix; ranks share all matrices.
        rank = workload.rank(stage)
        shapes = [(weight.shape, times) for group, times in rank.groups for weight in group.weights if weight.is_muons]
        for block, times in rank.blocks:
            if (experts := block.experts) is not None:
                shapes += [(m.one, times * experts.spec.num_experts) for m in experts.matrices if m.is_muons]
        flops = sum(5 * times * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s, times in shapes)
        muon = flops / (layout.fsdp * layout.cp * layout.tp)
    tokens = batch.rows * times * model.length * layout.data_ranks
    return Speed(
        products=times * slowest.products,
        experts=times * slowest.experts,
        attention=times * slowest.attention,
        memory=times * slowest.memory + _copied(workload, stage) / rates.bandwidth,
        host=times * slowest.host,
        head=times * slowest.head,
        # Parameters and moments are read and written; gradients are read by the norm, scaled, and read again.
        optimizer=(6 * state.master + 2 * state.moments) / rates.bandwidth + muon / rates.products,
        links=tuple(_links(workload, stage, devices, times * slowest.of_blocks)),
        bubble=(layout.pp - 1) / (layout.pp_virtual_stages * times),
        tokens=tokens,
        model_flops=model_flops(model) * tokens,
        peak_flops=devices.hardware.peak(model.precision.compute) * devices.count,
    )


def _copied(workload: Workload, stage: int) -> float:
    """Return the bytes of device memory that casts and copies of masters and gradients move in a step.

    FSDP2 casts a shard, copies it into the buffer that is gathered and copies the result out of it, before forward and
    again before backward; it copies gradients into the buffer that is reduced, and scales what it gets. By layer it
    does so once a round, and adds up each micro-batch's gradients. Experts that nothing gathers are cast for each use.
    """
    model, layout, rank, batch = workload.model, workload.layout, workload.rank(stage), workload.batch
    ranks, compute, reduce = layout.fsdp * layout.cp, model.compute_bytes, model.reduce_bytes
    master = BYTES_OF[model.precision.params]
    cast = master + compute if master != compute else 0
    added = batch.accumulation * (compute + 2 * reduce) if batch.together else 0
    summed = reduce if batch.together else compute

    def gathered(times: float, size: float, over: int, trained: float) -> float:
        through = 2 * size * (1 + 1 / over if over > 1 else 1) + cast * trained / over
        one_pass = times * through + trained * (summed + reduce + 2 * reduce / over)
        return batch.passes * one_pass + trained * added

    total = 0.0
    for group, times in rank.groups:
        sizes, over = group_bytes(group, ranks, layout.tp), group.sharded_over(ranks, layout.tp)
        total += times * gathered(1 if group is model.root else 2, sizes.gathered, over, sizes.reduced)
    for block, times in rank.blocks:
        if (experts := block.experts) is None:
            continue
        here = experts.spec.num_experts / layout.ep
        trained = experts.elements(trains=True) * here
        if layout.efsdp > 1 or layout.replicate > 1 or layout.offload == "experts":
            total += times * gathered(2, experts.gathered(compute) * here, layout.efsdp, trained)
        else:
            uses = 4 if workload.mode == "full" else 3
            total += batch.accumulation * times * trained * uses * cast
    return total


@cache
def model_flops(model: ModelFigures) -> float:
    """Return FLOPs per token, forward and backward: 6 per active parameter (4 if frozen), and causal attention."""
    total = 0.0
    for block in model.blocks:
        products = block.figures.products / model.length
        attention = block.figures.attention / model.length / 2
        if block.experts is not None:
            products += 2 * block.experts.elements() * block.experts.router.top_k
        total += products * (2 if model.adapted else 3) + attention * 3
    return total + 2 * model.head * (3 if model.head_trains else 2)


@dataclass(frozen=True, slots=True)
class _Rates:
    """The rates that a device reaches."""

    products: float
    """FLOP/s of dense products."""
    experts: float
    """FLOP/s of grouped products."""
    attention: float
    """FLOP/s of attention."""
    bandwidth: float
    """Bytes per second of device memory."""
    launch: float
    """Seconds that the host takes for one operation."""

    @classmethod
    def of(cls, model: ModelFigures, devices: Devices) -> "_Rates":
        hardware, reach = devices.hardware, devices.hardware.efficiency
        peak = hardware.peak(model.precision.compute)
        products, experts, attention = (peak * share for share in (reach.products, reach.experts, reach.attention))
        return cls(products, experts, attention, hardware.memory_bandwidth * reach.memory, hardware.launch_seconds)


@dataclass(slots=True)
class _MicroBatch:
    """Seconds of one micro-batch on one pp rank, forward and backward; all but `head` are of its blocks."""

    head: float
    products: float = 0.0
    experts: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    host: float = 0.0

    @property
    def of_blocks(self) -> float:
        return self.products + self.experts + self.attention + self.memory + self.host

    @property
    def seconds(self) -> float:
        return self.of_blocks + self.head

    def add(
        self, count: int, products: float, experts: float, attention: float, memory: float, launches: float
    ) -> None:
        """Add one direction of `count` blocks."""
        self.products += count * products
        self.experts += count * experts
        self.attention += count * attention
        self.memory += count * memory
        self.host += count * max(0.0, launches - products - experts - attention - memory)


@cache
def _micro_batch(
    model: ModelFigures,
    rank: PipelineRank,
    shares: tuple[int, int],
    rows: int,
    routing: tuple[int, float, bool],
    rates: _Rates,
) -> _MicroBatch:
    """Return the seconds of `rows` sequences, `shares` ranks of cp and of tp, on one pp rank.

    Args:
        routing: ep, imbalance, and whether shared experts run while rows are in flight.
    """
    (ep, imbalance, beside), (cp, tp) = routing, shares
    share, tokens = rows / (cp * tp), rows * model.length / (cp * tp)
    found = _MicroBatch(head=0.0)
    if rank.is_last:  # the head's products, forward and backward, and the softmax's memory traffic
        found.head = tokens * 2 * model.head * (3 if model.head_trains else 2) / rates.products
        found.head += tokens * model.vocabulary * 30 / rates.bandwidth
    grows = 1 if model.adapted else 2
    for (block, mode), count in rank.pieces:
        figures, again, full = block.figures, mode != "none", mode == "full"
        # What every rank of cp computes for full rows.
        repeated, attended, moved = ((cp - 1) * each for each in figures.whole)
        products = (figures.products + repeated) * share / rates.products
        attention = (figures.attention / 2 + figures.hidden + attended) * share / rates.attention
        experts, moving = _expert_seconds(model, block, tokens, (ep, imbalance), rates)
        last = (0.0, 0.0)
        if ends := block.ends_in_experts(mode, shared_beside=beside):
            last = _expert_seconds(model, block, tokens, (ep, imbalance), rates, last=True)
        unpacking = sum(sum(group.packed) for group in block.groups) * DEQUANTISING / rates.bandwidth
        more = 1 + moved / max(1, figures.moved[0])
        own = [size * more * share / rates.bandwidth + unpacking for size in figures.moved]
        operations = (0, 0) if block.experts is None else EXPERT_OPERATIONS
        launches = [own + routed for own, routed in zip(figures.operations, operations, strict=True)]
        found.add(count, products, experts, attention, own[0] + moving, launches[0] * rates.launch)
        # A second run has all of the block, but under `selective` neither experts nor attention.
        launched_again = again * figures.operations[0] + full * (operations[0] - ends * LAST_OPERATIONS)
        found.add(
            count,
            products * (grows + again),
            experts * (grows + full) - last[0],
            attention * (2.5 + full),
            own[1] + 2 * moving + again * own[0] + full * moving - last[1],
            (launches[1] + launched_again) * rates.launch,
        )
    return found


def _expert_seconds(
    model: ModelFigures, block: Block, tokens: float, routing: tuple[int, float], rates: _Rates, *, last: bool = False
) -> tuple[float, float]:
    """Return the forward's seconds of a block's grouped products, and of the memory traffic of its routed experts.

    Args:
        tokens: Tokens of one rank.
        routing: ep and imbalance.
        last: Count only the part after the last tensor that backward needs is saved: activation, down projection and
            combine all-to-all.
    """
    experts = block.experts
    if experts is None:
        return 0.0, 0.0
    (ep, imbalance), spec, compute = routing, experts.spec, model.compute_bytes
    routed, elements = experts.router.routed(tokens, ep, imbalance), experts.last if last else experts.elements()
    # A grouped product takes at least as long as reading its weights.
    reading = elements * spec.num_experts / ep * compute / rates.bandwidth
    hidden, inner = spec.hidden_size * compute, spec.intermediate_size * compute
    packed = min(experts.packed, spec.intermediate_size * spec.hidden_size) if last else experts.packed
    if last:
        travelling = (routed.sent + routed.rows) * hidden
        pairs = routed.pairs * (hidden + experts.width * compute + 4 * inner)
    else:
        travelling = (3 * routed.sent + 2 * routed.rows) * hidden
        pairs = routed.pairs * (3 * hidden + 2 * experts.width * compute + 4 * inner)
    dequantising = packed * spec.num_experts / ep * DEQUANTISING / rates.bandwidth
    products = max(2 * elements * routed.pairs / rates.experts, reading) + dequantising
    return products, (travelling + pairs) / rates.bandwidth


def _links(workload: Workload, stage: int, devices: Devices, compute: float) -> Iterator[Link]:
    """Yield the time of each transfer: prefetched ones hide behind a share of compute and slow it, others add to it."""
    reach = devices.hardware.efficiency
    room = compute * reach.overlap
    in_node = _ranks_in_node(workload.layout, devices.per_node)
    copies = host_copies(workload, stage)
    if copies.bytes:
        seconds = copies.bytes / (devices.hardware.host_link * reach.links)
        hidden = min(seconds, room)
        room -= hidden
        yield Link(copies, seconds, seconds - hidden)
    for transfer in traffic_of(workload, stage):
        together = in_node.get(transfer.axis, 1)
        if transfer.axis == "fsdp":  # whose groups go along cp too, and along tp for what tp does not split
            together = _together(stride_of(transfer, workload.layout), transfer.ranks, devices.per_node)
        seconds = _transfer_seconds(transfer, together, devices)
        hidden = min(seconds, room) if transfer.prefetched else 0.0
        room -= hidden
        yield Link(transfer, seconds, seconds - hidden * (1 - reach.interference))


def _transfer_seconds(transfer: Transfer, in_node: int, devices: Devices) -> float:
    """Return the seconds of a transfer; `in_node` ranks of a group share a node.

    A ring over nodes uses the network adapters of all the group's ranks in a node; an all-to-all sends what leaves the
    node through each rank's own adapter.
    """
    hardware, reach = devices.hardware, devices.hardware.efficiency
    local = min(transfer.ranks, in_node)
    latency = transfer.calls * hardware.collective_seconds
    if transfer.kind == "all_to_all":
        outside = transfer.bytes * (1 - local / transfer.ranks) / hardware.between_nodes
        inside = transfer.bytes * (local - 1) / transfer.ranks / hardware.within_node
        return max(inside, outside) / reach.all_to_all + latency
    if local == transfer.ranks:
        bandwidth = hardware.within_node
    else:
        bandwidth = min(hardware.within_node, hardware.between_nodes * local)
    return transfer.wire / (bandwidth * reach.links) + latency


def _ranks_in_node(layout: Layout, per_node: int) -> dict[str, int]:
    """Return how many ranks of a group along each axis share a node, at least; the last axis is contiguous."""
    found: dict[str, int] = {}
    for axes in (EXPERT_AXES, DENSE_AXES):  # those of both views are those of the dense one
        stride = 1
        for axis in reversed(axes):
            size = layout.size(axis)
            found[axis] = _together(stride, size, per_node)
            stride *= size
    return found


def _together(stride: int, ranks: int, per_node: int) -> int:
    """Return how many of `ranks`, each `stride` behind the one before, share a node, at least."""
    return max(1, gcd(stride * ranks, per_node) // stride)
