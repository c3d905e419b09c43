"""Seconds of one optimizer step: a roofline over what a rank computes, moves and sends, and what of it overlaps.

Products run at a share of the device's peak, everything else at a share of its memory bandwidth, and none of it faster
than the host can launch it. FSDP2's collectives are prefetched and hide behind compute as far as it lasts; dispatch,
tp and cp do not. docs/planning.md derives it and compares it with published runs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from expertmesh.config.sections import BYTES_OF
from expertmesh.distributed.layout import DENSE_AXES, EXPERT_AXES, Layout
from expertmesh.planning.facts import Block, Facts
from expertmesh.planning.hardware import Devices
from expertmesh.planning.memory import Batch
from expertmesh.planning.routing import expected
from expertmesh.planning.state import CheckpointedLayers, Cut, Mode, cut_of, distinct_stages, stage_pieces, state_of
from expertmesh.planning.traffic import Transfer, traffic_of

# Operations of one expert layer, forward and backward, counted in benchmarks/planning.py.
EXPERT_OPERATIONS = (75, 60)


@dataclass(frozen=True, slots=True)
class Link:
    """One axis's part of a step: what it sends, how long that takes, and how much of it compute does not hide."""

    transfer: Transfer
    seconds: float
    exposed: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of one optimizer step and where they go; `model_flops` are those of the whole job's step, nothing
    recomputed counted.
    """

    products: float
    experts: float
    attention: float
    memory: float
    host: float
    head: float
    optimizer: float
    links: tuple[Link, ...]
    bubble: float
    tokens: int
    model_flops: float
    peak_flops: float

    @property
    def compute(self) -> float:
        """Of the device, with what it waits for the host."""
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


@dataclass(slots=True)
class _Time:
    """Seconds of one direction of one micro-batch, summed over blocks."""

    products: float = 0.0
    experts: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.experts + self.attention + self.memory + self.host

    def add(
        self, count: int, products: float, experts: float, attention: float, memory: float, launches: float
    ) -> None:
        self.products += count * products
        self.experts += count * experts
        self.attention += count * attention
        self.memory += count * memory
        self.host += count * max(0.0, launches - products - experts - attention - memory)


def speed_of(
    facts: Facts,
    layout: Layout,
    batch: Batch,
    mode: Mode,
    devices: Devices,
    *,
    layers: CheckpointedLayers = "all",
    imbalance: float = 1.0,
) -> Speed:
    """The step of `layout` on `devices`; `imbalance` is how much more the busiest expert rank has than the mean."""
    rates = _rates(facts, devices)
    shares = layout.cp * layout.tp
    stage, forward, backward, head = _slowest(
        facts, cut_of(layout), shares, layout.ep, batch.rows, mode, layers, imbalance, rates
    )
    times = batch.accumulation
    trains = state_of(facts, layout, stage)
    compute = (forward.total + backward.total) * times
    links = tuple(_links(facts, layout, batch, mode, layers, stage, devices, imbalance, compute))
    tokens = batch.rows * times * facts.length * layout.data_ranks
    return Speed(
        products=times * (forward.products + backward.products),
        experts=times * (forward.experts + backward.experts),
        attention=times * (forward.attention + backward.attention),
        memory=times * (forward.memory + backward.memory),
        host=times * (forward.host + backward.host),
        head=times * head,
        # AdamW reads parameter, gradient and moments and writes all but the gradient; the norm reads gradients once.
        optimizer=8 * trains.master / rates.bandwidth,
        links=links,
        bubble=(layout.pp - 1) / (layout.pp_virtual_stages * times),
        tokens=tokens,
        model_flops=model_flops(facts) * tokens,
        peak_flops=devices.hardware.peak(facts.precision.compute) * devices.count,
    )


@dataclass(frozen=True, slots=True)
class _Rates:
    """What a device reaches: FLOP/s of each kind of product, bytes per second of everything else, seconds a launch."""

    products: float
    experts: float
    attention: float
    bandwidth: float
    launch: float


def _rates(facts: Facts, devices: Devices) -> _Rates:
    hardware, reach = devices.hardware, devices.hardware.efficiency
    peak = hardware.peak(facts.precision.compute)
    bandwidth = hardware.memory_bandwidth * reach.memory
    products, experts, attention = (peak * share for share in (reach.products, reach.experts, reach.attention))
    return _Rates(products, experts, attention, bandwidth, hardware.launch_seconds)


@cache
def _slowest(
    facts: Facts,
    cut: Cut,
    shares: int,
    ep: int,
    rows: int,
    mode: Mode,
    layers: CheckpointedLayers,
    imbalance: float,
    rates: _Rates,
) -> tuple[int, _Time, _Time, float]:
    """The pp rank whose micro-batch takes longest, for which all others wait; its passes, and its head's seconds."""
    found = []
    for stage in distinct_stages(facts, cut, mode, layers):
        forward, backward = _passes(facts, cut, stage, shares, ep, rows, mode, layers, imbalance, rates)
        head = _head_seconds(facts, rows * facts.length / shares, rates) if stage == cut[0] - 1 else 0.0
        found.append((stage, forward, backward, head))
    return max(found, key=lambda each: each[1].total + each[2].total + each[3])


def _passes(
    facts: Facts,
    cut: Cut,
    stage: int,
    shares: int,
    ep: int,
    rows: int,
    mode: Mode,
    layers: CheckpointedLayers,
    imbalance: float,
    rates: _Rates,
) -> tuple[_Time, _Time]:
    """Forward and backward of a micro-batch of `rows` sequences over `shares` ranks of cp and tp, on one pp rank."""
    forward, backward = _Time(), _Time()
    for (block, kept), count in stage_pieces(facts, cut, stage, mode, layers):
        _add_block(block, count, facts, shares, ep, rows, kept, rates, imbalance, forward, backward)
    return forward, backward


@cache
def model_flops(facts: Facts) -> float:
    """FLOPs per token, forward and backward: 6 per active parameter (4 where it is frozen), and causal attention."""
    total = 0.0
    for block in facts.blocks:
        products = block.figures.products / facts.length
        attention = block.figures.attention / facts.length / 2
        if block.experts is not None:
            products += 2 * _expert_elements(block) * block.experts.choice.top_k
        total += products * (2 if facts.adapted else 3) + attention * 3
    return total + 2 * facts.head * (3 if facts.head_trains else 2)


def _expert_elements(block: Block) -> float:
    assert block.experts is not None
    return sum(size for size, _, _ in block.experts.matrices)


def _add_block(
    block: Block,
    count: int,
    facts: Facts,
    shares: int,
    ep: int,
    rows: int,
    mode: Mode,
    rates: _Rates,
    imbalance: float,
    forward: _Time,
    backward: _Time,
) -> None:
    share = rows / shares
    figures, compute = block.figures, BYTES_OF[facts.precision.compute]
    products = figures.products * share / rates.products
    attention = figures.attention / 2 * share / rates.attention
    moved = [size * share / rates.bandwidth for size in figures.moved]
    launches = [operations * rates.launch for operations in figures.operations]
    experts = kept = 0.0
    if block.experts is not None:
        route = expected(rows * facts.length / shares, block.experts.choice, ep, imbalance)
        spec = block.experts.spec
        elements = _expert_elements(block)
        # A grouped product takes at least as long as reading its weights.
        reading = elements * spec.num_experts / ep * compute / rates.bandwidth
        experts = max(2 * elements * route.pairs / rates.experts, reading)
        hidden, inner = spec.hidden_size * compute, spec.intermediate_size * compute
        travelling = (3 * route.sent + 2 * route.rows) * hidden
        pairs = route.pairs * (3 * hidden + 2 * block.experts.width * compute + 4 * inner)
        seconds = (travelling + pairs) / rates.bandwidth
        moved = [moved[0] + seconds, moved[1] + 2 * seconds]
        launches = [a + b * rates.launch for a, b in zip(launches, EXPERT_OPERATIONS, strict=True)]
        kept = experts if mode == "selective" else 0.0
    grows = 1 if facts.adapted else 2
    forward.add(count, products, experts, attention, moved[0], launches[0])
    again = mode != "none"
    backward.add(
        count,
        products * (grows + again),
        experts * (grows + again) - kept,
        attention * (2.5 + again),
        moved[1] + again * moved[0],
        launches[1] + again * launches[0],
    )


def _head_seconds(facts: Facts, tokens: float, rates: _Rates) -> float:
    """Products of the head and its gradients, and what the softmax moves."""
    products = tokens * 2 * facts.head * (3 if facts.head_trains else 2)
    return products / rates.products + tokens * facts.vocabulary * 30 / rates.bandwidth


def _links(
    facts: Facts,
    layout: Layout,
    batch: Batch,
    mode: Mode,
    layers: CheckpointedLayers,
    stage: int,
    devices: Devices,
    imbalance: float,
    compute: float,
) -> Iterable[Link]:
    """Prefetched transfers hide behind a share of a step's compute and slow what they hide behind; the others add."""
    reach = devices.hardware.efficiency
    room = compute * reach.overlap
    in_node = ranks_in_node(layout, devices.per_node)
    for transfer in traffic_of(facts, layout, batch, mode, layers=layers, stage=stage, imbalance=imbalance):
        seconds = transfer_seconds(transfer, in_node[transfer.axis], devices)
        hidden = min(seconds, room) if transfer.prefetched else 0.0
        room -= hidden
        yield Link(transfer, seconds, seconds - hidden * (1 - reach.interference))


def transfer_seconds(transfer: Transfer, in_node: int, devices: Devices) -> float:
    """Time on the wire; `in_node` ranks of a group share a node. A ring over nodes has all adapters of a node's ranks
    in the group at its disposal; an all-to-all sends what leaves the node through each rank's own.
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


def ranks_in_node(layout: Layout, per_node: int) -> dict[str, int]:
    """How many ranks of one group along each axis share a node; ranks are contiguous, the last axis fastest."""
    found: dict[str, int] = {}
    for axes in (EXPERT_AXES, DENSE_AXES):  # those of both views are those of the dense one
        stride = 1
        for axis in reversed(axes):
            size = layout.size(axis)
            found[axis] = max(1, min(size, per_node // stride))
            stride *= size
    return found
