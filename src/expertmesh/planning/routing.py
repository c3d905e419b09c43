"""How many rows and pairs a rank exchanges and computes, when every set of K experts is equally likely.

A token travels once to each rank that holds any of its experts (experts/dispatch.py), so it makes
`D (1 - C(E - E/D, K) / C(E, K))` rows over D ranks instead of K; docs/planning.md derives it. Natural routing is less
even: `imbalance` is how much more than the mean the busiest rank gets.
"""

from dataclasses import dataclass
from math import comb


def rows_per_token(experts: int, top_k: int, ranks: int) -> float:
    """The expected number of ranks that hold any of a token's experts."""
    return ranks * (1 - comb(experts - experts // ranks, top_k) / comb(experts, top_k))


@dataclass(frozen=True, slots=True)
class Routing:
    """One rank and micro-batch: `tokens` here, `sent` rows, `rows` received, `pairs` computed."""

    tokens: float
    sent: float
    rows: float
    pairs: float


def expected(tokens: float, experts: int, top_k: int, ranks: int, imbalance: float = 1.0) -> Routing:
    """For `tokens` tokens on each of `ranks` ranks of the EP group; the busiest rank receives `imbalance` times the mean."""
    if ranks == 1:
        return Routing(tokens, 0.0, tokens, tokens * top_k)
    rows = tokens * rows_per_token(experts, top_k, ranks)
    return Routing(tokens, rows, rows * imbalance, tokens * top_k * imbalance)
