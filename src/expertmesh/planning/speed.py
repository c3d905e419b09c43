"""Seconds of one optimizer step: a roofline over what a rank computes, moves and sends, and what of it overlaps.

Products run at a share of the device's peak, everything else at a share of its memory bandwidth, and none of it faster
than the host can launch it. FSDP2's collectives are prefetched and hide behind compute as far as it lasts; dispatch,
tp and cp do not. docs/planning.md derives it and compares it with published runs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from expertmesh.config.sections import BYTES_OF
from expertmesh.mesh import DENSE_AXES, EXPERT_AXES, Layout
from expertmesh.planning.facts import Block, Facts
from expertmesh.planning.hardware import Devices
from expertmesh.planning.memory import Batch, Mode
from expertmesh.planning.routing import expected
from expertmesh.planning.state import stage_kinds, state_of
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
    facts: Facts, layout: Layout, batch: Batch, mode: Mode, devices: Devices, *, imbalance: float = 1.0
) -> Speed:
    """The step of `layout` on `devices`; `imbalance` is how much more the busiest expert rank has than the mean."""
    hardware = devices.hardware
    peak = hardware.peak(facts.precision.compute)
    forward, backward = _Time(), _Time()
    for block, count in stage_kinds(facts, layout.pp, 0):
        _add_block(block, count, facts, layout, batch, mode, devices, peak, imbalance, forward, backward)
    per_micro = forward.total + backward.total
    times = batch.accumulation
    trains = state_of(facts, layout)
    links = tuple(_links(facts, layout, batch, mode, devices, imbalance, per_micro * times))
    tokens = batch.rows * times * facts.length * layout.data_ranks
    return Speed(
        products=times * (forward.products + backward.products),
        experts=times * (forward.experts + backward.experts),
        attention=times * (forward.attention + backward.attention),
        memory=times * (forward.memory + backward.memory),
        host=times * (forward.host + backward.host),
        head=times * _head_seconds(facts, layout, batch, devices, peak),
        # AdamW reads parameter, gradient and moments and writes all but the gradient; the norm reads gradients once.
        optimizer=8 * trains.master / (hardware.memory_bandwidth * hardware.efficiency.memory),
        links=links,
        bubble=(layout.pp - 1) / times,
        tokens=tokens,
        model_flops=model_flops(facts) * tokens,
        peak_flops=peak * devices.count,
    )


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
    layout: Layout,
    batch: Batch,
    mode: Mode,
    devices: Devices,
    peak: float,
    imbalance: float,
    forward: _Time,
    backward: _Time,
) -> None:
    hardware, reach = devices.hardware, devices.hardware.efficiency
    share = batch.rows / (layout.cp * layout.tp)
    figures, compute = block.figures, BYTES_OF[facts.precision.compute]
    bandwidth = hardware.memory_bandwidth * reach.memory
    products = figures.products * share / (peak * reach.products)
    attention = figures.attention / 2 * share / (peak * reach.attention)
    moved = [size * share / bandwidth for size in figures.moved]
    launches = [count * hardware.launch_seconds for count in figures.operations]
    experts = kept = 0.0
    if block.experts is not None:
        tokens = batch.rows * facts.length / (layout.cp * layout.tp)
        route = expected(tokens, block.experts.choice, layout.ep, imbalance)
        spec = block.experts.spec
        elements = _expert_elements(block)
        # A grouped product takes at least as long as reading its weights.
        reading = elements * spec.num_experts / layout.ep * compute / bandwidth
        experts = max(2 * elements * route.pairs / (peak * reach.experts), reading)
        hidden, inner = spec.hidden_size * compute, spec.intermediate_size * compute
        rows = (3 * route.sent + 2 * route.rows) * hidden
        pairs = route.pairs * (3 * hidden + 2 * block.experts.width * compute + 4 * inner)
        travelling = (rows + pairs) / bandwidth
        moved = [moved[0] + travelling, moved[1] + 2 * travelling]
        launches = [a + b * hardware.launch_seconds for a, b in zip(launches, EXPERT_OPERATIONS, strict=True)]
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


def _head_seconds(facts: Facts, layout: Layout, batch: Batch, devices: Devices, peak: float) -> float:
    """Products of the head and its gradients, and what the softmax moves, on the last stage."""
    tokens = batch.rows * facts.length / (layout.cp * layout.tp)
    products = tokens * 2 * facts.head * (3 if facts.head_trains else 2)
    moved = tokens * facts.vocabulary * 30
    reach = devices.hardware.efficiency
    return products / (peak * reach.products) + moved / (devices.hardware.memory_bandwidth * reach.memory)


def _links(
    facts: Facts, layout: Layout, batch: Batch, mode: Mode, devices: Devices, imbalance: float, compute: float
) -> Iterable[Link]:
    """Prefetched transfers hide behind a share of a step's compute and slow what they hide behind; the others add."""
    reach = devices.hardware.efficiency
    room = compute * reach.overlap
    for transfer in traffic_of(facts, layout, batch, mode, imbalance=imbalance):
        seconds = transfer_seconds(transfer, layout, devices)
        hidden = min(seconds, room) if transfer.prefetched else 0.0
        room -= hidden
        yield Link(transfer, seconds, seconds - hidden * (1 - reach.interference))


def transfer_seconds(transfer: Transfer, layout: Layout, devices: Devices) -> float:
    """Time on the wire. A ring over nodes has all adapters of a node's ranks in the group at its disposal; an
    all-to-all sends what leaves the node through each rank's own.
    """
    hardware, reach = devices.hardware, devices.hardware.efficiency
    local = min(transfer.ranks, ranks_in_node(transfer.axis, layout, devices.per_node))
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


def ranks_in_node(axis: str, layout: Layout, per_node: int) -> int:
    """How many ranks of one group along `axis` share a node; ranks are contiguous, the last axis fastest."""
    axes = DENSE_AXES if axis in DENSE_AXES else EXPERT_AXES
    stride = 1
    for inner in axes[axes.index(axis) + 1 :]:
        stride *= layout.size(inner)
    return max(1, min(layout.size(axis), per_node // stride if stride < per_node else 1))
