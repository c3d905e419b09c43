"""Compute the sizes of all axes of a job, and what a rank moves in a layout. Plain arithmetic: no group, no model.

    dense view    world = pp x replicate x fsdp x cp x tp
    expert view   world = pp x replicate x efsdp x ep        efsdp = fsdp * cp * tp / ep, always derived

The last axis varies fastest, so an EP group is `ep` contiguous ranks and stays inside a node whose ranks it divides.
For one MoE layer and micro-batch rows of tokens move over ep, experts over efsdp: `ep: auto` takes the layout that
moves least, and the planner counts the same rows. docs/parallelism.md has the formula.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import comb

from expertmesh.config import ParallelConfig
from expertmesh.config.errors import InputError

# An all-to-all reaches about half of what a gather does of a link, and compute hides about half of what FSDP2 gathers.
BYTE_OF_ROWS = 4
# A rank's links within its node carry some ten times what its adapter does: 9 on H100, 12 on A100 nodes.
LINK_OF_NODE = 10
# What a link would carry while one collective starts: 8 MB on H100 nodes, 1 MB between processes over gloo.
START = 4 * 2**20
DENSE_AXES = ("pp", "replicate", "fsdp", "cp", "tp")
EXPERT_AXES = ("pp", "replicate", "efsdp", "ep")
CONFIGURED_AXES = (*DENSE_AXES, "ep")
# Ranks of a node where the launcher does not say (LOCAL_WORLD_SIZE).
RANKS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """The tokens and rows of one rank and micro-batch."""

    tokens: float
    """Tokens on this rank."""
    sent: float
    """Rows that leave it: one for each token and rank that holds any of its experts."""
    rows: float
    """Rows that it receives."""
    pairs: float
    """Pairs of token and expert that it computes."""


@dataclass(frozen=True, slots=True)
class TopKRouter:
    """A router's choice: K experts a token."""

    experts: int
    """Number of experts."""
    top_k: int
    """Experts that a token takes."""
    groups: int = 1
    """Groups of neighbouring experts."""
    top_groups: int = 1
    """Groups that a token's experts may come from."""

    def routed(self, tokens: float, ranks: int, imbalance: float = 1.0) -> RoutedTokens:
        """Return the rows for `tokens` on each of `ranks` EP ranks; the busiest gets `imbalance` times the mean."""
        if ranks == 1:
            return RoutedTokens(tokens, 0.0, tokens, tokens * self.top_k)
        rows = tokens * rows_per_token(self, ranks)
        return RoutedTokens(tokens, rows, min(rows * imbalance, tokens * ranks), tokens * self.top_k * imbalance)


@cache
def rows_per_token(router: TopKRouter, ranks: int) -> float:
    """Return the expected number of ranks that hold any of a token's experts, if all sets of K are equally likely.

    A token is sent once to each of them (experts/dispatch.py). docs/formulas.md derives it.
    """
    in_group = router.experts // router.groups
    open_experts, here = in_group * router.top_groups, router.experts // ranks
    # A rank holds whole groups or a part of one; how many of those a token keeps is hypergeometric.
    held = max(1, router.groups // ranks)
    used = 0.0
    for kept_here in range(1, min(held, router.top_groups) + 1):
        chance = comb(held, kept_here) * comb(router.groups - held, router.top_groups - kept_here)
        reachable = min(here, in_group * kept_here)
        none = comb(open_experts - reachable, router.top_k) / comb(open_experts, router.top_k)
        used += chance / comb(router.groups, router.top_groups) * (1 - none)
    return ranks * used


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of all axes, the order of stages, and what is in host memory.

    Build it with `resolve_layout`, which refuses impossible combinations.
    """

    pp: int = 1
    """Ranks along which blocks are cut into pipeline stages."""
    replicate: int = 1
    """Replicas of the sharded model, with rows of their own."""
    fsdp: int = 1
    """Ranks that shard the dense parameters, with rows of their own."""
    cp: int = 1
    """Ranks that share the positions of a row."""
    tp: int = 1
    """Ranks that share the heads and features of a layer."""
    ep: int = 1
    """Ranks that together hold all routed experts once."""
    pp_schedule: str = "1f1b"
    """A value of parallel.pp_schedule, resolved."""
    pp_virtual_stages: int = 1
    """Stages of each pp rank."""
    offload: str = "none"
    """parallel.offload."""

    @property
    def efsdp(self) -> int:
        """Ranks over which one expert slice is sharded further."""
        return self.fsdp * self.cp * self.tp // self.ep

    @property
    def world_size(self) -> int:
        return self.pp * self.replicate * self.fsdp * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """The number of ranks that read rows of their own: cp and tp ranks share rows."""
        return self.replicate * self.fsdp

    @property
    def ranks_per_stage(self) -> int:
        """The number of ranks that hold one pipeline stage (or the same several stages): contiguous ranks."""
        return self.world_size // self.pp

    def data_rank(self, rank: int) -> int:
        """Return which share of the batch `rank` reads, in `range(data_ranks)`."""
        return rank // (self.cp * self.tp) % self.data_ranks

    def size(self, axis: str) -> int:
        return int(getattr(self, axis))

    def groups(self, axis: str) -> list[list[int]]:
        """Return the rank lists of every group along `axis`, in the order of their first rank."""
        axes = DENSE_AXES if axis in DENSE_AXES else EXPERT_AXES
        stride = math.prod(self.size(inner) for inner in axes[axes.index(axis) + 1 :])
        size = self.size(axis)
        firsts = (rank for rank in range(self.world_size) if rank // stride % size == 0)
        return [[first + step * stride for step in range(size)] for first in firsts]

    def table(self) -> str:
        """Return both views as text, one axis a line, with the group of rank 0."""
        lines = [f"{'view':<8}{'axis':<11}{'size':>5}  ranks of the first group"]
        for view, axes in (("dense", DENSE_AXES), ("expert", EXPERT_AXES)):
            for axis in axes:
                if self.size(axis) > 1 or axis in ("fsdp", "efsdp", "ep"):
                    ranks = self.groups(axis)[0]
                    shown = ranks if len(ranks) <= 8 else [*ranks[:3], "...", ranks[-1]]
                    lines.append(f"{view:<8}{axis:<11}{self.size(axis):>5}  {' '.join(map(str, shown))}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class ExpertTraffic:
    """The cost of moving the experts of one layer, in any layout."""

    router: TopKRouter
    """Experts that a token is sent to."""
    expert: float
    """Bytes of one expert in a micro-batch's collectives: two gathers in the compute dtype, one reduction of what
    trains."""
    row: int
    """Bytes of one token's hidden states."""
    tokens: int
    """Tokens of a data rank's micro-batch."""
    trips: int = 4
    """All-to-alls of rows: dispatch and combine, forward and backward; one more if full blocks are recomputed."""
    can_have: Callable[["Layout"], bool] = lambda layout: True
    """True if the experts can be sharded so."""

    def gathered(self, layout: "Layout") -> float:
        """Return the bytes of experts that a rank receives and sends over efsdp."""
        return self.expert * self.router.experts / layout.ep * (1 - 1 / layout.efsdp)

    def sent(self, layout: "Layout") -> float:
        """Return the bytes of rows that leave a rank over ep."""
        tokens = self.tokens / (layout.cp * layout.tp)
        return self.trips * self.router.routed(tokens, layout.ep).sent * self.row * (1 - 1 / layout.ep)

    def weighed(self, layout: "Layout", ranks_per_node: int) -> float:
        """Return both, with the starts of their collectives, in bytes of a gather within a node.

        Between nodes a ring has the network adapters of all its ranks in a node, and rows leave through the adapter of
        their own rank.
        """
        gathered, sent, ep = self.gathered(layout), BYTE_OF_ROWS * self.sent(layout), layout.ep
        in_node = max(1, ranks_per_node // ep)  # ranks of an efsdp group that share a node
        if layout.efsdp > in_node:
            gathered *= max(1.0, LINK_OF_NODE / in_node)
        if ep > ranks_per_node:
            sent *= max(ranks_per_node - 1, LINK_OF_NODE * (ep - ranks_per_node)) / (ep - 1)
        starts = 3 * (layout.efsdp > 1) + (self.trips + 3) * (ep > 1)
        return gathered + sent + START * starts


def resolve_layout(
    parallel: ParallelConfig,
    world_size: int,
    num_experts: int | None = None,
    ranks_per_node: int | None = None,
    traffic: ExpertTraffic | None = None,
) -> Layout:
    """Turn the configured axes into sizes that multiply to `world_size`, and fill in every `auto`.

    `ep: auto` takes the ep that moves least by `traffic`, of those that divide the experts and the ranks that share
    them. Its groups never have parts of nodes, but may have several nodes.

    Args:
        num_experts: The number of routed experts of a layer, against which `ep` is checked.
        ranks_per_node: Ranks of a node; by default LOCAL_WORLD_SIZE, else 8. A given ep whose groups have parts of
            nodes is refused, unless `ep_across_nodes` is set.
        traffic: The cost by which `ep: auto` chooses.

    Raises:
        InputError: With the numbers and the valid choices.
    """
    fixed = {axis: getattr(parallel, axis) for axis in ("pp", "replicate", "cp", "tp")}
    product = math.prod(fixed.values())
    named = " * ".join(f"{axis} {size}" for axis, size in fixed.items() if size > 1) or "1"
    if parallel.fsdp == "auto":
        if world_size % product:
            raise InputError(
                f"parallel: {named} = {product} does not divide the world size {world_size}; "
                f"start a multiple of {product} ranks or lower one of these axes",
                key="layout.axes-divide-world-size",
            )
        fsdp = world_size // product
    else:
        fsdp = parallel.fsdp
        if fsdp * product != world_size:
            fits = f"set parallel.fsdp to auto or {world_size // product}"
            other = f"start {fsdp * product} ranks, or lower one of these axes"
            raise InputError(
                f"parallel: fsdp {fsdp} * {named} = {fsdp * product}, but the job has {world_size} ranks; "
                f"{fits if world_size % product == 0 else other}",
                key="layout.product-is-world-size",
            )
    schedule = parallel.pp_schedule
    if schedule == "auto":
        schedule = "1f1b" if parallel.pp_virtual_stages == 1 else "interleaved_1f1b"
    virtual, offload = parallel.pp_virtual_stages, parallel.offload
    layout = Layout(fsdp=fsdp, pp_schedule=schedule, pp_virtual_stages=virtual, offload=offload, **fixed)
    choices, node = _ep_choices(layout.efsdp, num_experts), _ranks_per_node(ranks_per_node)
    if parallel.ep == "auto":
        return least_moved([replace(layout, ep=ep) for ep in choices], traffic, node)
    layout = replace(layout, ep=_checked_ep(parallel.ep, layout.efsdp, num_experts))
    crossing = node_crossing(layout, ranks_per_node)
    if crossing is not None and layout.ep % node and not parallel.ep_across_nodes:
        within = _listed([size for size in choices if node % size == 0 or size % node == 0])
        raise InputError(
            f"parallel.{crossing}; set parallel.ep to auto or one of {within}, whose groups are within a node or whole "
            "nodes, or parallel.ep_across_nodes to true",
            key="layout.ep-crosses-nodes",
        )
    return layout


def least_moved(choices: Sequence[Layout], traffic: ExpertTraffic | None, ranks_per_node: int) -> Layout:
    """Return the layout that moves least, of layouts that differ in ep and without parts of nodes: `ep: auto`."""
    if len(choices) == 1:
        return choices[0]
    if traffic is None:
        raise InputError(
            "parallel.ep: auto weighs the bytes of a model's experts and of a micro-batch's tokens, and they are not "
            "known here; set ep to a number (`expertmesh plan MODEL --devices ...` proposes one)",
            key="layout.auto-ep-without-experts",
        )
    node = min(ranks_per_node, choices[0].world_size)
    whole = [each for each in choices if node % each.ep == 0 or each.ep % node == 0] or choices
    possible = [each for each in whole if traffic.can_have(each)] or whole  # which is refused with its reason
    return min(possible, key=lambda each: traffic.weighed(each, node))


def _checked_ep(ep: int, expert_ranks: int, num_experts: int | None) -> int:
    choices = _listed(_ep_choices(expert_ranks, num_experts))
    if expert_ranks % ep:
        raise InputError(
            f"parallel.ep {ep} does not divide fsdp * cp * tp = {expert_ranks} ranks; valid values: {choices}",
            key="layout.ep-divides-ranks",
        )
    if num_experts is not None:
        refuse_divided_experts(f"parallel.ep {ep}", ep, num_experts, expert_ranks)
    return ep


def refuse_divided_experts(what: str, ep: int, num_experts: int, expert_ranks: int, of: str = "") -> None:
    """Raise `InputError` unless ep, one of the divisors of `expert_ranks`, divides the experts."""
    if num_experts % ep:
        choices = _listed(_ep_choices(expert_ranks, num_experts))
        raise InputError(
            f"{what} does not divide the model's {num_experts} experts{of}; valid values: {choices}",
            key="layout.ep-divides-experts",
        )


def explicit(layout: Layout) -> ParallelConfig:
    """Return the configuration that resolves to this layout and nothing else, for any size of nodes."""
    axes = ("ep", "fsdp", "replicate", "tp", "cp", "pp", "pp_schedule", "pp_virtual_stages", "offload")
    return ParallelConfig.model_validate({axis: getattr(layout, axis) for axis in axes} | {"ep_across_nodes": True})


def ep_reason(
    parallel: ParallelConfig, layout: Layout, traffic: ExpertTraffic | None, ranks_per_node: int | None = None
) -> str | None:
    """Explain why `ep: auto` became `layout.ep`, or what a given ep does at node boundaries.

    Returns:
        A sentence, or None if there is nothing to report. Arguments as in `resolve_layout`.
    """
    if parallel.ep != "auto":
        return node_crossing(layout, ranks_per_node)
    choices = [] if traffic is None else _ep_choices(layout.efsdp * layout.ep, traffic.router.experts)
    if traffic is None or len(choices) == 1:
        return None
    node, assumed = _ranks_per_node(ranks_per_node), ranks_per_node is None and "LOCAL_WORLD_SIZE" not in os.environ
    nodes = f", on nodes of {node} ranks" if layout.world_size > node else ""
    nodes += ", assumed as LOCAL_WORLD_SIZE is not set" if nodes and assumed else ""
    gathered, sent = (f"{size / 2**20:,.1f} MiB" for size in (traffic.gathered(layout), traffic.sent(layout)))
    return (
        f"ep {layout.ep} of {_listed(choices)} moves least: {gathered} of experts and {sent} of rows a layer and "
        f"micro-batch{nodes}"
    )


def node_crossing(layout: Layout, ranks_per_node: int | None = None) -> str | None:
    """Name the EP groups that have ranks on several nodes of `ranks_per_node` (by default LOCAL_WORLD_SIZE) ranks.

    Returns:
        A sentence, or None if no group has, or if the size of a node is unknown.
    """
    node = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", layout.world_size))
    if layout.world_size <= node or node % layout.ep == 0:
        return None
    groups = layout.groups("ep")
    crossing = [group for group in groups if group[0] // node != group[-1] // node]
    ranks = " and ".join(f"{group[0]} to {group[-1]}" for group in crossing[:3]) + " ..." * (len(crossing) > 3)
    return (
        f"ep {layout.ep} crosses the borders of nodes of {node} ranks in {len(crossing)} of its {len(groups)} "
        f"groups (ranks {ranks}), whose tokens travel between nodes"
    )


def nodes_of_ep(layout: Layout, ranks_per_node: int | None = None) -> int:
    """Return how many whole nodes of `ranks_per_node` (by default LOCAL_WORLD_SIZE) ranks each EP group has, else 1."""
    node = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", layout.world_size))
    return layout.ep // node if layout.ep % node == 0 else 1


def _ep_choices(expert_ranks: int, num_experts: int | None) -> list[int]:
    return [size for size in divisors(expert_ranks) if num_experts is None or num_experts % size == 0]


def _ranks_per_node(known: int | None) -> int:
    return known or int(os.environ.get("LOCAL_WORLD_SIZE", RANKS_PER_NODE))


def divisors(number: int) -> list[int]:
    """Return the divisors, smallest first."""
    return [size for size in range(1, number + 1) if number % size == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)
