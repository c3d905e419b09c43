"""Compute what a rank moves for one MoE layer and micro-batch: rows of tokens over ep, experts over efsdp.

`ep: auto` takes the layout that moves least by it (layout.py), and the planner counts the same rows.
docs/parallelism.md has the formula. No process group, no model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import comb
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expertmesh.distributed.layout import Layout

# An all-to-all reaches about half of what a gather does of a link, and compute hides about half of what FSDP2 gathers.
BYTE_OF_ROWS = 4
# A rank's links within its node carry some ten times what its adapter does: 9 on H100, 12 on A100 nodes.
LINK_OF_NODE = 10
# What a link would carry while one collective starts: 8 MB on H100 nodes, 1 MB between processes over gloo.
START = 4 * 2**20


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
        """Return the rows for `tokens` tokens on each of an EP group's `ranks`; the busiest rank gets `imbalance` times
        the mean, but no token's row twice.
        """
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
