"""Turn `data.train` or `data.eval` into a `TokenizedDataset` and a `DataReport`.

`BlockReader` makes the blocks of a recipe, all of them or the share of one process; `joined` adds up what they count.
`build_dataset` does both in this process and in memory; `prepared.py` does them in several and on the disk. Nothing
here communicates.
"""

import datetime
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from expertmesh.config import Config, DataConfig, DataSource
from expertmesh.config.data import DataFormat
from expertmesh.config.errors import InputError
from expertmesh.config.explain import close_to
from expertmesh.config.objective import objectives_of
from expertmesh.config.yaml_text import dump_yaml
from expertmesh.data.blocks import Block, BlockEncoder, BlockFacts, Place
from expertmesh.data.encoding.encode import Encoder
from expertmesh.data.encoding.targets import ChatOptions
from expertmesh.data.formats import FORMATS, PREFERENCE, UNPAIRED, fitting_formats, names_of, suggested_columns
from expertmesh.data.images import Images
from expertmesh.data.report import POSITIONS_KEPT, DataReport, SourceReport
from expertmesh.data.sources import BLOCK_ROWS, Columns, RawRow, RowShare, SourceFile, locations
from expertmesh.data.tokenized import TokenizedDataset, no_data

_ROWS_TRIED_FOR_A_FORMAT = 1000


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides which tokens a data set has."""

    sources: Sequence[DataSource]
    config: DataConfig
    tokenizer: PreTrainedTokenizerBase
    model_vocab_size: int
    """Rows of the model's embedding."""
    responses: DataFormat | None = None
    """The format of rows whose responses an objective compares, of which `preference` gives two samples a row, the
    chosen one first; None for the formats of sft."""
    images: Images | None = None
    """The images of the model; None refuses rows that have some."""
    date: datetime.date | None = None
    """The date that a chat template writes as today's; None takes today's."""

    @classmethod
    def of(
        cls,
        config: Config,
        sources: Sequence[DataSource],
        tokenizer: PreTrainedTokenizerBase,
        model: tuple[PreTrainedConfig, Path],
        date: datetime.date | None = None,
    ) -> "Recipe":
        """Return the recipe of a run for one of its lists of sources; `model` are its config and directory."""
        vocabulary = int(model[0].get_text_config().vocab_size)
        dtype = getattr(torch, config.precision.compute)
        images = None if config.data.stream else Images(*model, tokenizer, config.model.trust_remote_code, dtype)
        return cls(sources, config.data, tokenizer, vocabulary, config.objective.facts.format, images, date)

    @property
    def samples_per_row(self) -> int:
        return 2 if self.responses == PREFERENCE else 1

    @property
    def judged(self) -> bool:
        """True if rows have a label."""
        return self.responses == UNPAIRED

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats that rows may have."""
        if self.responses is not None:
            return (self.responses,)
        return tuple(name for name in FORMATS if name not in (PREFERENCE, UNPAIRED))

    @property
    def required(self) -> tuple[str, ...]:
        """The columns that rows must have, or those of one of their formats."""
        if self.responses == PREFERENCE:
            return "prompt", "chosen", "rejected"
        return ("prompt", "completion", "label") if self.judged else ("prompt", "completion")


def build_dataset(recipe: Recipe) -> tuple[TokenizedDataset, DataReport]:
    """Read and tokenize the sources of `recipe`, in memory.

    Raises `InputError` for data that cannot be used: a malformed row under `on_error: stop`, another row that
    `data.on_*` stops at, a token id without an embedding, a chat template without a trustworthy mask, or a data set
    without a single target token.
    """
    reader = BlockReader(recipe)
    blocks = list(reader)
    report, files = joined(recipe, reader.sources, [block.facts() for block in blocks])
    number = {place: at for at, place in enumerate(sorted({block.place[:2] for block in blocks}))}
    dataset = TokenizedDataset.in_memory(
        [sample for block in blocks for sample in block.samples],
        [number[block.place[:2]] for block in blocks for _ in block.samples],
        [row for block in blocks for row in block.rows],
        [label for block in blocks for label in block.desirable],
        [pictures for block in blocks for pictures in block.pictures],
        judged=recipe.judged,
        files=files,
        samples_per_row=recipe.samples_per_row,
    )
    return dataset, report


class BlockReader:
    """The blocks of a recipe, of which this process makes its share, in order.

    `sources` say, as far as they have been read, in which format; `place` is that of the block that is being made.
    """

    def __init__(self, recipe: Recipe, share: RowShare | None = None) -> None:
        if not recipe.sources:
            raise InputError(
                "no data source is configured; name at least one file, directory or hub data set.",
                key="data.no-source",
            )
        self._recipe, self._share = recipe, share or RowShare()
        self._encoder = encoder_of(recipe)
        self.sources: list[SourceReport] = []
        self.place: Place = (0, -1, -1)

    def __iter__(self) -> Iterator[Block]:
        for number, source in enumerate(self._recipe.sources):
            self.place = (number, -1, -1)
            self.sources.append(source_report(self._recipe, source))
            for rows in self._blocks(number, source):
                yield self._encoder.encode(self.place, rows, self.sources[-1].format)

    def _blocks(self, number: int, source: DataSource) -> Iterator[list[RawRow]]:
        """Yield the rows of each block of a source that falls to this process."""
        seen = itertools.count()
        for file, location in enumerate(locations(source.path)):
            takes = self._share.of_file(file)
            self.place = (number, file, 0)
            all_rows = location.rows(takes, source.columns)
            if source.max_rows is not None:
                all_rows = itertools.takewhile(lambda row: next(seen) < (source.max_rows or 0), all_rows)
            rows = (row for row in all_rows if row is not None)
            for block, of_block in itertools.groupby(rows, key=lambda row: (row.number - 1) // BLOCK_ROWS):
                self.place = (number, file, block)
                yield list(of_block)


def encoder_of(recipe: Recipe) -> BlockEncoder:
    """Return the encoder of blocks of rows."""
    config = recipe.config
    options = ChatOptions(config.loss_on, config.thinking, config.template_args, recipe.date or datetime.date.today())
    encoder = Encoder(recipe.tokenizer, options, recipe.images)
    return BlockEncoder(recipe.sources, config, encoder, recipe.model_vocab_size)


def source_report(recipe: Recipe, source: DataSource) -> SourceReport:
    """Find the format of a source, before anything is counted.

    Raises `InputError` for rows of no format, and for `columns` and `roles` that do nothing in the rows.
    """
    _refuse_missing_columns(recipe, source)
    name: str = recipe.config.format_of(source)
    if name != "auto":
        return SourceReport(source.path, name, False, ())
    name, also_fits = _detect(recipe, source)
    for problem in source.unmatched(name):
        raise InputError(
            f"{source.path} is of format {name} (detected, as none is set): {recipe.config.key_of(source)}.{problem}",
            key="data.unmatched-names",
        )
    return SourceReport(source.path, name, True, also_fits)


def _refuse_missing_columns(recipe: Recipe, source: DataSource) -> None:
    """Refuse a name in `columns` that no row has: it is a mistake even where the format can do without the column."""
    missing = [theirs or ours for ours, theirs in source.columns.items()]
    first: Mapping[str, Any] = {}
    tried = 0
    for raw in _first_rows(recipe, source, {}) if missing else ():
        tried += 1
        first = first or raw.value or {}
        missing = [name for name in missing if name not in (raw.value or ())]
        if not missing:
            return
    if first:  # else none of the rows can be read, and each is reported
        none = f"none of the first {tried:,} rows" if tried == _ROWS_TRIED_FOR_A_FORMAT else "no row"
        raise InputError(
            f"{recipe.config.key_of(source)}.columns names {missing[0]!r}, and {none} of {source.path} has it; "
            f"{close_to(missing[0], names_of(first))}",
            key="data.unmatched-names",
        )


def joined(
    recipe: Recipe, sources: Sequence[SourceReport], blocks: Sequence[BlockFacts]
) -> tuple[DataReport, tuple[SourceFile, ...]]:
    """Return the report of all blocks together, in their order, and the files that they are from, in order of use."""
    report = DataReport(recipe.config.max_length, sources=list(sources))
    for number, source in enumerate(report.sources):
        own = [block for block in blocks if block.place[0] == number]
        source.files = len({block.file for block in own})
        source.rows = sum(block.report.rows for block in own)
        source.samples = sum(block.samples for block in own)
        source.tokens = sum(block.report.tokens for block in own)
        unused = dict.fromkeys(column for block in own for column in block.report.unused)
        source.unused = list(unused)[:POSITIONS_KEPT]
    samples = 0
    for block in blocks:
        report.add(block.report)
        samples += block.samples
    report.samples = samples // recipe.samples_per_row
    if not samples:
        _refuse_no_targets(recipe, report)
    report.notes += _notes(recipe, report)
    files = {block.place[:2]: block.file for block in blocks}
    return report, tuple(files[place] for place in sorted(files))


def _detect(recipe: Recipe, source: DataSource) -> tuple[str, tuple[str, ...]]:
    """Return the format of the first usable row, and what else would fit."""
    tried, unreadable, unfit = 0, None, None
    for raw in _first_rows(recipe, source, source.columns):
        tried += 1
        found = fitting_formats(raw.value) if raw.value is not None else ()
        fits = tuple(name for name in found if name in recipe.formats)
        labelled = UNPAIRED in found and isinstance((raw.value or {})["label"], bool)
        if fits and (fits == (UNPAIRED,) or not labelled or recipe.config.on_error == "skip"):
            return fits[0], fits[1:]
        if found:
            other = UNPAIRED if labelled else found[0]
            raise InputError(
                f"{raw.position}: the row is of format {other}, which only objective.name {objectives_of(other)} "
                "trains on; correct objective.name or the data.",
                key="data.other-objective",
            )
        unreadable, unfit = (unreadable or raw, unfit) if raw.value is None else (unreadable, unfit or raw)
        if recipe.config.on_error == "stop":
            break
    none = f"none of the first {tried:,} rows of {source.path} can be used: " if tried > 1 else ""
    if unreadable is not None:
        none += f"{unreadable.position}: {unreadable.problem}"
    if unfit is not None and unfit.value is not None:
        keys = ", ".join(names_of(unfit.value)) or "none"
        header = ", which the first line of the file names," if source.path.endswith((".csv", ".tsv")) else ""
        formats = f"fit none of the formats {', '.join(recipe.formats)}"
        if len(recipe.formats) == 1:
            formats = f"do not fit format {recipe.formats[0]}"
        raise InputError(
            f"{none}{', and ' * (unreadable is not None)}{unfit.position}: the row's keys ({keys}){header} {formats}; "
            f"{_how_to_name(recipe, source, unfit.value)} (docs/data.md).",
            key="data.unknown-format",
        )
    if unreadable is not None:
        skip = ", or set data.on_error: skip" * (recipe.config.on_error == "stop")
        raise InputError(f"{none}; correct the row{'s' * (tried > 1)}{skip}.", key="data.malformed-row")
    raise no_data(f"the data source {source.path} holds no row", "name a source that does")


def _how_to_name(recipe: Recipe, source: DataSource, row: Mapping[str, Any]) -> str:
    """Return what to write so that the row fits a format: the source as it is, and `columns` that were guessed."""
    guesses = suggested_columns(row, recipe.required) or [dict.fromkeys(recipe.required, "COLUMN")]
    if recipe.tokenizer.chat_template is None:
        guesses = guesses[:1]
    key, source = recipe.config.configured(source)
    alone = len(recipe.config.train if key.startswith("data.train") else recipe.config.eval) == 1
    entries = []
    for guess in guesses:
        # What is named already stands under the format's name in `row`.
        columns = {ours: source.columns.get(theirs) or theirs for ours, theirs in guess.items()}
        kept = {ours: theirs for ours, theirs in source.columns.items() if theirs not in columns.values()}
        # Not `max_rows`, which may be that of a first look (`expertmesh init`).
        given = source.model_dump(exclude_defaults=True, exclude={"max_rows"}) | {"columns": kept | columns}
        entries.append(dump_yaml([given] if alone else given, one_line=True))
    chat = f", or {entries[1]} for conversations by the chat template" if len(entries) > 1 else ""
    return f"write {key.removesuffix('.0') if alone else key}: {entries[0]}{chat}"


def _first_rows(recipe: Recipe, source: DataSource, columns: Columns) -> Iterator[RawRow]:
    left = _ROWS_TRIED_FOR_A_FORMAT
    for location in locations(source.path, recipe.config.stream):
        for row in location.rows(lambda number: True, columns):
            if not left:
                return
            assert row is not None
            left -= 1
            yield row


def _refuse_no_targets(recipe: Recipe, report: DataReport) -> None:
    first = next(iter((*report.skipped_at, *report.no_target_at)), None)
    lost = report.no_target_after_cut
    cut = f", {lost:,} of them because of the cut to data.max_length {report.max_length:,}" if lost else ""
    raise InputError(
        f"the data has no target token at all: of {report.rows:,} rows {report.skipped:,} are "
        f"malformed, {report.dropped:,} too long, {report.left_out:,} left out by data.on_* and "
        f"{report.no_target:,} without a target "
        f"under data.loss_on: {recipe.config.loss_on}{cut}"
        + (f" (first: {first})" if first else "")
        + f"; correct the data{', data.max_length' if cut else ''} or data.loss_on.",
        key="data.no-targets",
    )


def _notes(recipe: Recipe, report: DataReport) -> Iterator[str]:
    if len(recipe.tokenizer) > recipe.model_vocab_size:
        yield (
            f"the tokenizer knows {len(recipe.tokenizer):,} tokens but the model has {recipe.model_vocab_size:,} "
            "embeddings: is it the model's own tokenizer?"
        )
    if report.open_ended:
        yield (
            f"in {report.open_ended:,} samples the last answer ends without a special token, so "
            "the model is not taught where to stop"
        )
    if report.empty_thoughts:
        yield f"in {report.empty_thoughts:,} samples there are thinking blocks without a thought, which are no targets"
    if report.dated:
        yield f"the chat template may write the date, which is {recipe.date or datetime.date.today()}"
    if recipe.judged:
        yield f"{report.desirable:,} of {report.samples:,} responses are desirable"
    if report.same_pairs:
        yield (
            f"in {report.same_pairs:,} pairs chosen and rejected response have the same tokens, so that they teach "
            "nothing"
        )
