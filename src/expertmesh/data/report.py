"""Count what became of each row, for `train` and `check` to print."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from expertmesh.io.terminal import plural

POSITIONS_KEPT = 20
"""Number of positions of each kind of rejected row are named, and how many columns; the counts are always complete."""

LENGTH_BINS = 8

ODD_ROWS = {
    "empty_answer": "an answer, or a text, is empty",
    "unanswered": "the conversation does not end with an answer",
    "dropped_thinking": "the chat template leaves out thinking of an answer that is a target",
    "broken_thinking": "an answer has thinking that is not closed, not opened, or in several blocks",
}
"""Rows that can be trained on and are seldom meant: kind, for which there is a key `data.on_<kind>`, and sentence."""


@dataclass(slots=True)
class SourceReport:
    """One entry of `data.train` or `data.eval`: the format its rows were read in, and what it holds."""

    path: str
    format: str
    detected: bool
    """True if the format was found by the first rows, not configured."""
    also_fits: tuple[str, ...]
    """Other formats that the first rows have the keys of."""
    files: int = 0
    rows: int = 0
    samples: int = 0
    tokens: int = 0
    unused: list[str] = field(default_factory=list)
    """Columns with values that the format does not read, the first POSITIONS_KEPT."""
    repeat: int = 1
    """Times that an epoch has each of its rows."""
    epoch_rows: int | None = None
    """Rows that an epoch draws from it; None without weights."""

    def lines(self, *, tokens: bool) -> list[str]:
        how = "detected" if self.detected else "configured"
        also = f"; its rows also fit {', '.join(self.also_fits)}: set `format` to choose" if self.also_fits else ""
        line = f"{self.path}: format {self.format} ({how}{also}), {plural(self.rows, 'row')} in "
        line += plural(self.files, "file")
        line += f", {self.tokens:,} tokens" * tokens
        if self.repeat > 1:
            line += f"; {self.repeat} times in an epoch"
        if self.epoch_rows is not None:
            line += f"; {self.epoch_rows:,} rows of an epoch, by its weight"
        more = " and perhaps more" * (len(self.unused) >= POSITIONS_KEPT)
        return [line, *([f"  columns that are not used: {', '.join(self.unused)}{more}"] if self.unused else [])]


@dataclass(frozen=True, slots=True)
class HistogramBin:
    """Samples with lengths in one range, before cutting."""

    above: int
    """Tokens that each sample has more than."""
    up_to: int | None
    """Tokens that each sample has at most; None for the last bin, which is open."""
    samples: int


@dataclass(slots=True)
class DataReport:
    """Counts of one data set, or of one block of its rows; those of blocks are added up in their order.

    `rows` = `samples` + `skipped` + `dropped` + `left_out` + `no_target`, unless `data.thinking: every_turn` makes
    several samples of a row. The `*_at` fields name the first rows concerned.
    """

    max_length: int
    sources: list[SourceReport] = field(default_factory=list)
    rows: int = 0
    samples: int = 0
    unused: list[str] = field(default_factory=list)
    """Columns that the format does not read; a source's are collected from its blocks."""
    skipped: int = 0
    """Malformed rows."""
    skipped_at: list[str] = field(default_factory=list)
    cut: int = 0
    """Samples shortened to `max_length`."""
    dropped: int = 0
    """Rows longer than `max_length`."""
    no_target: int = 0
    """Rows without a target token."""
    no_target_at: list[str] = field(default_factory=list)
    no_target_after_cut: int = 0
    """Rows among `no_target` whose targets were all cut off."""
    odd: Counter[str] = field(default_factory=Counter)
    """Rows by their kind in ODD_ROWS, used or not."""
    odd_at: dict[str, list[str]] = field(default_factory=dict)
    left_out: int = 0
    """Rows that `data.on_*` drops."""
    tokens: int = 0
    target_tokens: int = 0
    length_counts: list[int] = field(default_factory=lambda: [0] * (LENGTH_BINS + 1))
    """Samples in each bin of `histogram`."""
    methods: Counter[str] = field(default_factory=Counter)
    """Samples by how their targets were found."""
    ends: Counter[int] = field(default_factory=Counter)
    """Samples by the token that ends them."""
    unwritten: Counter[str] = field(default_factory=Counter)
    """Rows by what the chat template leaves out."""
    open_ended: int = 0
    """Samples whose last answer ends without a special token."""
    empty_thoughts: int = 0
    """Thinking blocks without a thought."""
    same_pairs: int = 0
    """Pairs whose two responses have the same tokens."""
    desirable: int = 0
    """Samples that no label calls undesirable."""
    dated: int = 0
    """Blocks whose chat template may have written the date."""
    with_images: int = 0
    """Rows that have images."""
    images: int = 0
    image_tokens: int = 0
    """Tokens of the images, among `tokens`."""
    notes: list[str] = field(default_factory=list)
    """Sentences to print, made when all blocks are added."""

    def add(self, block: "DataReport") -> None:
        """Count the next block of rows as well."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(block, name))
        self.odd.update(block.odd)
        self.methods.update(block.methods)
        self.ends.update(block.ends)
        self.unwritten.update(block.unwritten)
        self.length_counts = [mine + more for mine, more in zip(self.length_counts, block.length_counts, strict=True)]
        self.skipped_at = (self.skipped_at + block.skipped_at)[:POSITIONS_KEPT]
        self.no_target_at = (self.no_target_at + block.no_target_at)[:POSITIONS_KEPT]
        for kind, positions in block.odd_at.items():
            self.odd_at[kind] = (self.odd_at.get(kind, []) + positions)[:POSITIONS_KEPT]

    def lost(self) -> str:
        """Return how many rows are not trained on, and why; empty if all of them are."""
        counts = {"malformed": self.skipped, "too long": self.dropped, "without a target": self.no_target}
        counts |= {"left out by data.on_*": self.left_out}
        named = ", ".join(f"{count:,} {why}" for why, count in counts.items() if count)
        first = next(iter((*self.skipped_at, *self.no_target_at)), None)
        return f"not trained on: {named}" + (f" (first: {first})" if first else "") if named else ""

    @property
    def histogram(self) -> tuple[HistogramBin, ...]:
        """Bins of equal width up to `max_length`, and one for everything longer."""
        edges = length_edges(self.max_length)
        uppers: list[int | None] = [*edges[1:], None]
        return tuple(HistogramBin(*each) for each in zip(edges, uppers, self.length_counts, strict=True))

    def lines(self) -> list[str]:
        """Return the report for a terminal or a log, without markup; the histogram is left to `check`."""
        share = self.target_tokens / self.tokens if self.tokens else 0.0
        lines = [line for source in self.sources for line in source.lines(tokens=len(self.sources) > 1)]
        lines.append(f"samples {self.samples:,} of {self.rows:,} rows, tokens {self.tokens:,}")
        lines.append(f"target tokens {self.target_tokens:,} ({share:.1%})")
        if self.images:
            rows = plural(self.with_images, "row")
            lines.append(f"images {self.images:,} in {rows}, {self.image_tokens:,} of the tokens")
        found = sorted(self.methods.items(), key=lambda each: (-each[1], each[0]))
        methods = (f"{method}: {count:,}" for method, count in found)
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
        for kind, count in ((kind, self.odd[kind]) for kind in ODD_ROWS if self.odd[kind]):
            rows = plural(count, "row")
            lines.append(f"{ODD_ROWS[kind]}: {rows} ({_listed(self.odd_at[kind], count)}); data.on_{kind} decides")
        if self.unwritten:
            found = sorted(self.unwritten.items(), key=lambda each: (-each[1], each[0]))
            parts = (f"{name} in {plural(count, 'row')}" for name, count in found)
            lines.append(f"left out by the chat template: {', '.join(parts)}")
        if self.left_out:
            lines.append(f"left out by data.on_*: {self.left_out:,}")
        return lines + [f"note: {note}" for note in self.notes]


# What blocks add up as numbers.
_COUNTS = tuple(each.name for each in fields(DataReport) if each.default == 0)


def length_edges(max_length: int) -> list[int]:
    """Return where the bins of lengths begin; the last one is that of samples longer than `max_length`."""
    return [max_length * i // LENGTH_BINS for i in range(LENGTH_BINS + 1)]


def length_counts(lengths: Sequence[int], max_length: int) -> list[int]:
    """Return how many lengths (tokens) are in each bin of `length_edges`; a length of zero is in the first."""
    counts, _ = np.histogram(np.maximum(np.array(lengths), 1) - 1, bins=[*length_edges(max_length), np.inf])
    return [int(count) for count in counts]


def _listed(positions: Sequence[str], total: int) -> str:
    more = total - len(positions)
    return ", ".join(positions) + (f" and {more:,} more" if more else "")
