"""The busiest EP rank under contiguous and balanced placement, of skewed routing; no rank is started.

    python -m benchmarks.placement

A token takes the top k of Zipf(1.0) log-probabilities with Gumbel noise of its own, so that experts are drawn without
replacement. Which expert is how popular is drawn anew for each layer. The placement is made from one half of the tokens
and judged on the other half. Rows are what travels: a token once to each rank that holds any of its experts.

    T tokens, K top-k, E experts
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertmesh.experts.placement import balanced_order, busiest, least_busiest

EPS = (8, 16, 32, 64, 128, 256)
LAYERS, TOKENS, SEED = 16, 32_768, 0
# All over the mean of ranks, but the total of rows, which is over that of contiguous placement.
COLUMNS = (
    "contiguous: pairs",
    "rows",
    "balanced: pairs",
    "rows",
    "rows in total",
    "pairs of one expert alone",
    "of any rank with it, at least",
)


@dataclass(frozen=True, slots=True)
class Routing:
    """The routing of a published model."""

    name: str
    experts: int
    top_k: int


ROUTINGS = (Routing("Qwen3-30B-A3B", 128, 8), Routing("DeepSeek-V3", 256, 8))


def choices(routing: Routing, draw: np.random.Generator) -> npt.NDArray[np.intp]:
    """Return the experts of each token of one layer, `[2T, K]`."""
    weight_E = draw.permutation(-np.log(np.arange(1, routing.experts + 1))).astype(np.float32)
    scores_TE = weight_E + draw.gumbel(size=(2 * TOKENS, routing.experts)).astype(np.float32)
    return np.argpartition(-scores_TE, routing.top_k, axis=1)[:, : routing.top_k]


def rows_of_ranks(chosen_TK: npt.NDArray[np.intp], order: Sequence[int], ep: int) -> npt.NDArray[np.intp]:
    """Return the rows that each of `ep` ranks receives, `[ep]`."""
    rank_E = np.empty(len(order), dtype=np.intp)
    rank_E[np.asarray(order)] = np.arange(len(order)) // (len(order) // ep)
    rank_TK = np.sort(rank_E[chosen_TK], axis=1)
    return np.bincount(rank_TK[np.diff(rank_TK, axis=1, prepend=-1) > 0], minlength=ep)


def figures(chosen: npt.NDArray[np.intp], experts: int, ep: int) -> list[float]:
    """Return one layer's figures, in the order of `COLUMNS`."""
    seen, later = (np.bincount(half.ravel(), minlength=experts).tolist() for half in np.split(chosen, 2))
    contiguous, balanced = range(experts), balanced_order(seen, ep)
    before, after = (rows_of_ranks(chosen[TOKENS:], order, ep) for order in (contiguous, balanced))
    return [
        busiest(later, contiguous, ep),
        before.max() / before.mean(),
        busiest(later, balanced, ep),
        after.max() / after.mean(),
        after.sum() / before.sum(),
        max(later) * ep / sum(later),
        least_busiest(later, ep),
    ]


def main() -> None:
    print(f"| model | ep | {' | '.join(COLUMNS)} |")
    print("|---" * (2 + len(COLUMNS)) + "|")
    for routing in ROUTINGS:
        draw = np.random.default_rng(SEED)
        layers = [choices(routing, draw) for _ in range(LAYERS)]
        for ep in (ep for ep in EPS if routing.experts % ep == 0):
            found = np.array([figures(chosen, routing.experts, ep) for chosen in layers])
            cells = [f"{mean:.2f} ({worst:.2f})" for mean, worst in zip(found.mean(0), found.max(0), strict=True)]
            print(f"| {routing.name} | {ep} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
