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
    balanced,
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
    """A bound that no placement without copies is below."""


def load_of(loads: Mapping[str, Sequence[int]], placement: Placement) -> Load:
    """Return what contiguous placement and `placement` make of the tokens of each layer's experts."""
    at_least = [least_busiest(load_E, placement.ep) for load_E in loads.values()]
    bound = sum(at_least) / len(at_least), max(at_least)
    return Load(placement.ep, Placement(placement.ep, {}).over(loads), placement.over(loads), bound)


def print_loads(
    console: Console, source: str, loads: Mapping[str, Sequence[int]], placements: Sequence[Placement]
) -> None:
    """Print a line for each placement: what contiguous placement and it make of `loads`, read from `source`."""
    found = [load_of(loads, placement) for placement in placements]
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
        if options.replicas is not None and options.replicas > len(load_E) - len(load_E) // ep:
            raise InputError(
                f"--replicas {options.replicas}: a rank holds {len(load_E) // ep} of {len(load_E)} experts of {name}, "
                "and can copy the others alone",
                key="moe.replicas-unsupported",
            )
    placement = balanced(loads, ep, options.replicas or 0)
    write_placement(placement, path)
    console = Terminal()
    print_loads(console, options.placement, loads, [placement])
    also = f" moe.replicas={options.replicas}" if options.replicas else ""
    console.print(f"wrote {path}; train with moe.placement={path}{also} parallel.ep={ep}", soft_wrap=True)
    return 0
