"""How many rows and pairs a rank exchanges and computes, when every set of K experts is equally likely.

A token travels once to each rank that holds any of its experts (experts/dispatch.py), so it makes
`D (1 - C(E - E/D, K) / C(E, K))` rows over D ranks instead of K; docs/planning.md derives it. Where
experts are chosen group by group (DeepSeek-V3), tokens reach fewer ranks. Natural routing is less
even: `imbalance` is how much more than the mean the busiest rank gets.
"""

from dataclasses import dataclass
from functools import cache
from math import comb


@dataclass(frozen=True, slots=True)
class Choice:
    """How a token chooses: `top_k` of `experts`, all of them in the `kept` best of `groups` groups of neighbours."""

    experts: int
    top_k: int
    groups: int = 1
    kept: int = 1


@cache
def rows_per_token(choice: Choice, ranks: int) -> float:
    """The expected number of ranks that hold any of a token's experts."""
    in_group = choice.experts // choice.groups
    open_experts, here = in_group * choice.kept, choice.experts // ranks
    # A rank holds `shares` whole groups or a part of one; how many of those a token keeps is hypergeometric.
    shares = max(1, choice.groups // ranks)
    used = 0.0
    for kept_here in range(1, min(shares, choice.kept) + 1):
        chance = comb(shares, kept_here) * comb(choice.groups - shares, choice.kept - kept_here)
        reachable = min(here, in_group * kept_here)
        none = comb(open_experts - reachable, choice.top_k) / comb(open_experts, choice.top_k)
        used += chance / comb(choice.groups, choice.kept) * (1 - none)
    return ranks * used


@dataclass(frozen=True, slots=True)
class Routing:
    """One rank and micro-batch: `tokens` here, `sent` rows, `rows` received, `pairs` computed."""

    tokens: float
    sent: float
    rows: float
    pairs: float


def expected(tokens: float, choice: Choice, ranks: int, imbalance: float = 1.0) -> Routing:
    """For `tokens` tokens on each of the EP group's `ranks`; the busiest receives `imbalance` times the mean."""
    if ranks == 1:
        return Routing(tokens, 0.0, tokens, tokens * choice.top_k)
    rows = tokens * rows_per_token(choice, ranks)
    return Routing(tokens, rows, rows * imbalance, tokens * choice.top_k * imbalance)
