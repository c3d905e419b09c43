"""What became of each row: the counts that `train` and `check` print."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

POSITIONS_KEPT = 20
"""How many positions of each kind of rejected row are named; the counts are always complete."""

ODD_ROWS = {
    "empty_answer": "an answer is empty",
    "unanswered": "the conversation does not end with an answer",
    "dropped_thinking": "the chat template leaves out thinking of an answer that is a target",
}
"""Rows that can be trained on and are seldom meant: kind, for which there is a key `data.on_<kind>`, and sentence."""


@dataclass(frozen=True, slots=True)
class SourceReport:
    """One entry of `data.train` or `data.eval`: the format its rows were read in and how that was decided."""

    path: str
    format: str
    detected: bool
    also_fits: tuple[str, ...]
    files: int
    rows: int

    def line(self) -> str:
        how = "detected" if self.detected else "configured"
        also = f"; its rows also fit {', '.join(self.also_fits)}: set `format` to choose" if self.also_fits else ""
        files = f"{self.files} file{'s' * (self.files != 1)}"
        return f"{self.path}: format {self.format} ({how}{also}), {self.rows:,} rows in {files}"


@dataclass(frozen=True, slots=True)
class HistogramBin:
    """Samples of `above` < tokens <= `up_to`, before cutting; the last bin is open (`up_to` None)."""

    above: int
    up_to: int | None
    samples: int


@dataclass(slots=True)
class DataReport:
    """Counts of one data set, added up while it is built.

    `rows` = `samples` + `skipped` + `dropped` + `left_out` + `no_target`, unless `data.thinking: every_turn` makes
    several samples of a row. `cut` counts samples shortened to `max_length`; `no_target_after_cut` are those among
    `no_target` whose targets were all cut off. `odd` counts rows by their kind in ODD_ROWS, kept or not; `left_out` are
    those that `data.on_*` drops. The `*_at` fields name the first rows concerned. `methods` counts samples by how their
    targets were found.
    """

    max_length: int
    sources: list[SourceReport] = field(default_factory=list)
    rows: int = 0
    samples: int = 0
    skipped: int = 0
    skipped_at: list[str] = field(default_factory=list)
    cut: int = 0
    dropped: int = 0
    no_target: int = 0
    no_target_at: list[str] = field(default_factory=list)
    no_target_after_cut: int = 0
    odd: Counter[str] = field(default_factory=Counter)
    odd_at: dict[str, list[str]] = field(default_factory=dict)
    left_out: int = 0
    tokens: int = 0
    target_tokens: int = 0
    histogram: tuple[HistogramBin, ...] = ()
    methods: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report for a terminal or a log, without markup; the histogram is left to `check`."""
        share = self.target_tokens / self.tokens if self.tokens else 0.0
        lines = [source.line() for source in self.sources]
        lines.append(f"samples {self.samples:,} of {self.rows:,} rows, tokens {self.tokens:,}")
        lines.append(f"target tokens {self.target_tokens:,} ({share:.1%})")
        methods = (f"{method}: {count:,}" for method, count in self.methods.most_common())
        lines.append(f"targets found by {', '.join(methods)}")
        if self.cut:
            lines.append(f"cut to {self.max_length:,} tokens: {self.cut:,}")
        if self.dropped:
            lines.append(f"dropped, longer than {self.max_length:,} tokens: {self.dropped:,}")
        if self.skipped:
            first = f", the first {len(self.skipped_at)}" if len(self.skipped_at) < self.skipped else ""
            lines.append(f"skipped, malformed: {self.skipped:,}{first}:")
            lines += [f"  {reason}" for reason in self.skipped_at]
        if self.no_target:
            cut = f", {self.no_target_after_cut:,} of them because of the cut" if self.no_target_after_cut else ""
            lines.append(
                f"left out, no target token: {self.no_target:,}{cut} ({_listed(self.no_target_at, self.no_target)})"
            )
        for kind, count in self.odd.items():
            rows = f"{count:,} row{'s' * (count != 1)}"
            lines.append(f"{ODD_ROWS[kind]}: {rows} ({_listed(self.odd_at[kind], count)}); data.on_{kind} decides")
        if self.left_out:
            lines.append(f"left out by data.on_*: {self.left_out:,}")
        return lines + [f"note: {note}" for note in self.notes]


def histogram_of(lengths: Sequence[int], max_length: int, bins: int = 8) -> tuple[HistogramBin, ...]:
    """`bins` bins of equal width up to `max_length`, and one for everything longer."""
    edges = [max_length * i // bins for i in range(bins + 1)]
    # A zero-length sample belongs to the first bin.
    counts, _ = np.histogram(np.maximum(np.array(lengths), 1) - 1, bins=[*edges, np.inf])
    uppers: list[int | None] = [*edges[1:], None]
    return tuple(HistogramBin(low, high, int(n)) for low, high, n in zip(edges, uppers, counts, strict=True))


def _listed(positions: Sequence[str], total: int) -> str:
    more = total - len(positions)
    return ", ".join(positions) + (f" and {more:,} more" if more else "")
