"""`expertmesh plan --placement RUN --ep N`: which EP rank holds which expert, by what the experts of a run got.

Reads expert_load.json alone, and writes a file for `moe.placement`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from expertmesh.cli.options import PlanOptions
from expertmesh.cli.printing import Terminal, print_rows
from expertmesh.config.errors import InputError
from expertmesh.experts.placement import (
    Placement,
    balanced_order,
    busiest,
    least_busiest,
    read_loads,
    write_placement,
)


@dataclass(frozen=True, slots=True)
class Load:
    """The tokens of the busiest of `ep` ranks over the mean: in the mean of all layers, and in the worst."""

    ep: int
    """EP ranks."""
    contiguous: tuple[float, float]
    """With the experts in the model's order."""
    balanced: tuple[float, float]
    """With the balanced placement."""
    at_least: tuple[float, float]
    """A bound that no placement is below."""


def load_of(loads: Mapping[str, Sequence[int]], ep: int) -> Load:
    """Return what contiguous and balanced placement make of the tokens of each layer's experts."""
    layers = list(loads.values())
    contiguous = [busiest(load_E, range(len(load_E)), ep) for load_E in layers]
    balanced = [busiest(load_E, balanced_order(load_E, ep), ep) for load_E in layers]
    at_least = [least_busiest(load_E, ep) for load_E in layers]
    return Load(ep, *((sum(each) / len(layers), max(each)) for each in (contiguous, balanced, at_least)))


def print_loads(console: Console, source: str, loads: Mapping[str, Sequence[int]], eps: Sequence[int]) -> None:
    """Print a line for each ep: what contiguous and balanced placement make of `loads`, read from `source`."""
    found = [load_of(loads, ep) for ep in eps]
    columns = ("ep", "contiguous", "worst", "balanced", "worst", "at least", "worst")
    rows = [
        (str(each.ep), *(f"{value:.2f}" for pair in (each.contiguous, each.balanced, each.at_least) for value in pair))
        for each in found
    ]
    title = f"busiest EP rank over the mean, of all {len(loads)} layers and the worst, by {source}"
    print_rows(console, title, columns, rows)


def run(options: PlanOptions) -> int:
    """Write the placement and print what it gains; returns 0. `InputError` for bad options and loads."""
    assert options.placement is not None
    if (ep := options.ep) is None:
        raise InputError("--placement: give --ep, the EP ranks that experts are placed on", key="cli.usage")
    path = Path(options.output or "placement.json")
    if path.exists():
        raise InputError(f"{path} exists already and stays as it is; choose another --output", key="placement.exists")
    loads = read_loads(options.placement)
    for name, load_E in loads.items():
        if len(load_E) % ep:
            raise InputError(
                f"--ep {ep}: does not divide the {len(load_E)} experts of {name}", key="layout.ep-divides-experts"
            )
    write_placement(Placement(ep, {name: balanced_order(load_E, ep) for name, load_E in loads.items()}), path)
    console = Terminal()
    print_loads(console, options.placement, loads, [ep])
    console.print(f"wrote {path}; train with moe.placement={path} parallel.ep={ep}", soft_wrap=True)
    return 0
