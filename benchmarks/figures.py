"""The pictures drawn from data of real runs, and the docs' diagrams: `make figures`.

    python -m benchmarks.figures [--output docs/pictures]

At the top of the README, left, the losses of benchmarks/data/curves.json (what `benchmarks.layouts --json` wrote):
three layouts on the curve of the unsharded model, and their relative difference below. Right, the rows that one token
sends, whose number is computed from the model's published sizes. In RESULTS.md, what a micro-batch costs by their
number in a step, from benchmarks/data/accumulation.json. Each picture is written for light and for dark pages, as SVG
that no font has to be installed for, and equal bytes on every machine; but for two figures of the report of a run of
`make demo` (benchmarks/data/demo), which matplotlib places.
"""

import argparse
import hashlib
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.diagrams import diagrams
from expertmesh.distributed.layout import TopKRouter, rows_per_token
from expertmesh.report.plots import draw
from expertmesh.report.run import read_run

ROOT = Path(__file__).parents[1]
CURVES = ROOT / "benchmarks" / "data" / "curves.json"
ACCUMULATION = ROOT / "benchmarks" / "data" / "accumulation.json"
DEMO = ROOT / "benchmarks" / "data" / "demo"
PICTURES = ROOT / "docs" / "pictures"
REPORT = "report.svg"
WIDTH, HEIGHT = 980, 372
BOUND = 1e-4


class Theme(NamedTuple):
    """Colours: of text, of lines that carry no data, of boxes, of the reference, and of the three layouts."""

    ink: str
    faint: str
    box: str
    reference: str
    layouts: tuple[str, str, str]


THEMES = {
    "light": Theme("#1f2328", "#8c959f", "#eef1f4", "#b6bec8", ("#0969da", "#cf5b00", "#1a7f37")),
    "dark": Theme("#e6edf3", "#7d8590", "#21262d", "#57606a", ("#58a6ff", "#f0883e", "#56d364")),
}


class Curve(NamedTuple):
    """A run's loss at each step."""

    name: str
    losses: list[float]


class Panel(NamedTuple):
    """A plot's rectangle in the picture, and the values at its borders."""

    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        across, up = (x - self.x[0]) / (self.x[1] - self.x[0]), (y - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + across * self.width, self.top + (1 - up) * self.height


def main() -> int:
    """Write all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PICTURES)
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    for name, text in (pictures() | {REPORT: report()}).items():
        (output / name).write_text(text, encoding="utf-8")
        print(f"wrote {output / name}")
    return 0


def pictures() -> dict[str, str]:
    """By file name, the text of each picture."""
    parity = {f"parity-{name}.svg": "\n".join(_picture(theme)) + "\n" for name, theme in THEMES.items()}
    accumulated = {f"accumulation-{name}.svg": "\n".join(_accumulation(theme)) + "\n" for name, theme in THEMES.items()}
    return parity | accumulated | diagrams()


def report() -> str:
    """Return two figures of the demo's report side by side, in the colours of the page that shows them."""
    figures, width = draw(read_run(DEMO)), WIDTH // 2
    shown = {"loss": "Loss", "expert_tokens": "Tokens of each expert, over the mean of its layer"}
    style = (ROOT / "src" / "expertmesh" / "report" / "style.css").read_text(encoding="utf-8")
    light, dark, *_ = re.findall(r"(--ink[^}]*)}", style)
    rules = f"svg {{{light}; color: var(--ink)}} @media (prefers-color-scheme: dark) {{svg {{{dark}}}}}"
    parts = [*_opening(THEMES["light"]._replace(ink="currentColor"), 280), f"<desc>{demo_hash()}</desc>"]
    parts += ["<title>Two figures of the demo's report</title>", f"<style>{rules}</style>"]
    for place, (key, title) in enumerate(shown.items()):
        drawn = re.sub(r' data-hover="[^"]*"', "", figures[key])
        size = f'x="{place * width}" y="30" width="{width - 10}" height="{(width - 10) * 3.1 / 6:.0f}"'
        parts.append(_text(place * width + 12, 20, title, weight=600))
        parts.append(re.sub(r'width="[^"]*" height="[^"]*"', size, drawn, count=1))
    return "\n".join(line.rstrip() for line in "\n".join([*parts, "</svg>"]).splitlines()) + "\n"


def demo_hash() -> str:
    """Return the SHA-256 of the rows that the report's picture is drawn from."""
    return hashlib.sha256((DEMO / "metrics.jsonl").read_bytes()).hexdigest()


def curves() -> list[Curve]:
    """Return the unsharded model's curve, then those of three layouts."""
    runs = json.loads(CURVES.read_text(encoding="utf-8"))["runs"]
    return [Curve(run["name"], run["losses"]) for run in runs if "micro-batches" not in run["name"]]


def _picture(theme: Theme) -> Iterator[str]:
    yield from _opening(theme, HEIGHT)
    yield "<title>Three layouts on the loss curve of the unsharded model; a token travels once to each rank</title>"
    yield from _curves(theme)
    yield from _rows(theme)
    yield "</svg>"


def _opening(theme: Theme, height: int) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif" font-size="12" fill="{theme.ink}">'
    )


def _accumulation(theme: Theme) -> Iterator[str]:
    """Draw seconds and gigabytes of a micro-batch by the number of micro-batches in a step."""
    first, second, third = theme.layouts
    systems = {
        "transformers_fsdp4": ("transformers, FSDP2", theme.reference, ""),
        "transformers_no_sync_fsdp4": ("transformers, FSDP2, no_sync", theme.reference, "6 4"),
        "expertmesh_by_layer_ep1": ("ours by layer, ep 1", first, ""),
        "transformers_ep4": ("transformers, ep 4", second, ""),
        "expertmesh_by_layer_ep4": ("ours by layer, ep 4", third, ""),
    }
    rows = [
        row for row in json.loads(ACCUMULATION.read_text(encoding="utf-8"))["rows"] if row["system"] in systems
    ]  # fmt: skip
    most = max(row["micro_batches"] for row in rows)
    height = 290
    yield from _opening(theme, height)
    yield "<title>Seconds and gigabytes of a micro-batch, by the number of micro-batches in a step</title>"
    figures: dict[str, Callable[[dict[str, Any]], float]] = {
        "CPU seconds of a micro-batch, all ranks": lambda row: statistics.median(row["cpu"]),
        "GB gathered and reduced for a micro-batch, by rank": lambda row: (
            (row["all_gather"][0] + row["reduce_scatter"][0]) / 1e9
        ),
    }
    for (title, figure), left in zip(figures.items(), (52, 420), strict=True):
        top = max(figure(row) / row["micro_batches"] for row in rows)
        panel = Panel(left, 40, 310, 210, (0, math.log2(most)), (0, 1.05 * top))
        step = next(size for size in (0.5, 1, 2, 5, 10) if top / size < 6)
        yield _text(left, 22, title, weight=600)
        yield from _axes(theme, panel, {step * n: f"{step * n:g}" for n in range(int(1.05 * top / step) + 1)})
        for number in sorted({row["micro_batches"] for row in rows}):
            x, y = panel.at(math.log2(number), 0)
            yield _text(x, y + 16, f"M = {number}", anchor="middle", fill=theme.faint)
        for system, (_, colour, dashes) in systems.items():
            points = sorted((row["micro_batches"], figure(row)) for row in rows if row["system"] == system)
            yield _line(panel, ((math.log2(number), value / number) for number, value in points), colour, 2.4, dashes)
    for place, (name, colour, dashes) in enumerate(systems.values()):
        y = 60 + 22 * place
        yield f'<path d="M756 {y}h26" stroke="{colour}" stroke-width="2.4" stroke-dasharray="{dashes or "none"}"/>'
        yield _text(790, y + 4, name)
    yield "</svg>"


def _curves(theme: Theme) -> Iterator[str]:
    (_, losses), *layouts = curves()
    steps = len(losses)
    above = Panel(52, 40, 420, 178, (1, steps), (min(losses) - 0.05, max(losses) + 0.05))
    below = Panel(52, 248, 420, 84, (1, steps), (-9, -3.5))
    yield _text(52, 22, "Three layouts train on the unsharded model's curve", weight=600)
    yield from _axes(theme, above, {6.2: "6.2", 6.4: "6.4", 6.6: "6.6", 6.8: "6.8"})
    yield from _axes(theme, below, {-8: "1e-8", -6: "1e-6", -4: "1e-4"})
    yield _text(
        below.left + below.width, below.top + below.height + 16, f"step {steps}", anchor="end", fill=theme.faint
    )
    yield _text(below.left, below.top + below.height + 16, "step 1", fill=theme.faint)
    yield _line(above, enumerate(losses, 1), theme.reference, 7)
    yield _text(above.left + 22, above.top + 10, "loss", fill=theme.faint)
    yield _text(below.left + 8, below.top + 32, "relative difference of the loss", fill=theme.faint)
    end = below.at(steps, math.log10(BOUND))
    yield _dashed(theme, (below.left, end[1]), end)
    yield _text(end[0] - 4, end[1] - 5, "bound", anchor="end", fill=theme.faint)
    legend = [("one process, plain transformers", theme.reference, 7.0)]
    for layout, colour, dashes in zip(layouts, theme.layouts, ("", "7 5", "2 5"), strict=True):
        yield _line(above, enumerate(layout.losses, 1), colour, 2, dashes)
        # Equal losses have no logarithm; they are drawn at the border.
        differences = (max(abs(a / b - 1), 1e-9) for a, b in zip(layout.losses, losses, strict=True))
        yield _line(below, ((step, math.log10(value)) for step, value in enumerate(differences, 1)), colour, 1.4)
        legend.append((layout.name, colour, 2.0))
    for row, (name, colour, thickness) in enumerate(legend):
        y = above.top + 16 + 18 * row
        yield f'<path d="M{above.left + 150} {y}h26" stroke="{colour}" stroke-width="{thickness}"/>'
        yield _text(above.left + 184, y + 4, name)


def _axes(theme: Theme, panel: Panel, ticks: dict[float, str]) -> Iterator[str]:
    for tick, name in ticks.items():
        x, y = panel.at(panel.x[0], tick)
        yield f'<path d="M{x:.1f} {y:.1f}h{panel.width}" stroke="{theme.faint}" stroke-opacity="0.25"/>'
        yield _text(x - 6, y + 4, name, anchor="end", fill=theme.faint)


def _rows(theme: Theme) -> Iterator[str]:
    """Draw one token whose four experts are on two ranks, sent to experts and sent to ranks."""
    left, usual, here = 528, 62, 208
    ranks, experts = 4, 8
    chosen, homes = (4, 5, 6, 7), (2, 3)
    yield _text(left, 22, "A token travels once to each rank, not to each expert", weight=600)
    for top, name, rows in ((usual, "row by expert", chosen), (here, "row by rank", homes)):
        yield _text(left, top - 6, f"{name}: {len(rows)} rows", fill=theme.faint)
        yield _box(left, top + 36, 74, 30, theme.box, theme.faint)
        yield _text(left + 37, top + 55, "token", anchor="middle")
        for rank in range(ranks):
            x, y = left + 250, top + 28 * rank - 4
            yield _box(x, y, 150, 24, theme.box, theme.layouts[0] if rank in homes else theme.faint)
            yield _text(x + 158, y + 16, f"rank {rank}", fill=theme.faint)
            for place in range(experts // ranks):
                expert = rank * (experts // ranks) + place
                fill = theme.layouts[0] if expert in chosen else theme.faint
                yield _text(x + 38 + 74 * place, y + 16, f"expert {expert}", anchor="middle", fill=fill)
        for row in rows:
            y = top + 28 * row + 8 if rows is homes else top + 28 * (row // 2) + (12 if row % 2 else 4)
            end = left + 250
            yield (
                f'<path d="M{left + 74} {top + 51}C{left + 150} {top + 51} {end - 90} {y} {end - 3} {y}" fill="none" '
                f'stroke="{theme.layouts[0]}" stroke-width="2"/>'
            )
            yield f'<path d="M{end} {y}l-8 -4v8z" fill="{theme.layouts[0]}"/>'
    qwen3, ep = TopKRouter(experts=128, top_k=8), 4
    sent = rows_per_token(qwen3, ep)
    yield _text(left, here + 128, f"Qwen3-30B-A3B over ep {ep}: {sent:.1f} rows a token in the place of {qwen3.top_k}.")
    yield _text(left, here + 146, "Experts' outputs are summed before they return.")


def _line(panel: Panel, points: Iterable[tuple[float, float]], colour: str, thickness: float, dashes: str = "") -> str:
    path = " ".join("{:.1f},{:.1f}".format(*panel.at(x, y)) for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{thickness}" '
        f'stroke-linejoin="round"{dashed}/>'
    )


def _dashed(theme: Theme, start: tuple[float, float], end: tuple[float, float]) -> str:
    return f'<path d="M{start[0]:.1f} {start[1]:.1f}H{end[0]:.1f}" stroke="{theme.faint}" stroke-dasharray="4 4"/>'


def _box(x: float, y: float, width: float, height: float, fill: str, stroke: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" stroke="{stroke}"/>'


def _text(x: float, y: float, words: str, *, anchor: str = "start", fill: str = "", weight: int = 400) -> str:
    colour = f' fill="{fill}"' if fill else ""
    heavy = f' font-weight="{weight}" font-size="14"' if weight != 400 else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{colour}{heavy}>{words}</text>'


if __name__ == "__main__":
    sys.exit(main())
