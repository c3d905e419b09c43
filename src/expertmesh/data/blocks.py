"""Make samples of blocks of rows: each row becomes samples, or is counted under the reason why not.

A block holds neighbouring rows of one file. Blocks are made independently of each other, by one process or by many;
their order is that of their `place`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from expertmesh.config import DataConfig, DataSource
from expertmesh.config.errors import InputError
from expertmesh.data.encoding.encode import Encoded, Encoder
from expertmesh.data.formats import (
    Conversation,
    Judged,
    MalformedRow,
    PlainText,
    Preference,
    PromptCompletion,
    Record,
    convert,
    unused_columns,
    visible,
)
from expertmesh.data.images import ends_of, from_blob
from expertmesh.data.report import ODD_ROWS, POSITIONS_KEPT, DataReport, length_counts
from expertmesh.data.sources import RawRow, SourceFile
from expertmesh.data.tokenized import Tokens, coded, refuse_unknown_id

Place = tuple[int, int, int]
"""Number of the source, of the file in it, and of the block in that."""


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """The facts of a block beside its samples."""

    place: Place
    file: SourceFile
    samples: int
    """Number of its samples."""
    report: DataReport


@dataclass(slots=True)
class Block:
    """The coded samples of a block of rows."""

    place: Place
    file: SourceFile
    report: DataReport
    samples: list[Tokens] = field(default_factory=list)
    """Coded tokens and targets, as `tokenized.coded` returns them."""
    rows: list[int] = field(default_factory=list)
    """The number of the row that each sample came from."""
    pictures: list[bytes] = field(default_factory=list)
    """The images of each sample, as `images.to_blob` returns them."""
    desirable: list[bool] = field(default_factory=list)
    """The label of each sample, of format unpaired_preference; True in the others."""

    def facts(self) -> BlockFacts:
        return BlockFacts(self.place, self.file, len(self.samples), self.report)


class BlockEncoder:
    """Makes blocks of the rows of `sources` with one tokenizer, as the keys of `data` say.

    Raises `InputError` for what they stop at, and for a token id without an embedding.
    """

    def __init__(self, sources: Sequence[DataSource], config: DataConfig, encoder: Encoder, vocab_size: int) -> None:
        self._sources, self._config, self._encoder, self._vocab_size = sources, config, encoder, vocab_size

    def encode(self, place: Place, rows: Sequence[RawRow], format_name: str) -> Block:
        """Return the block of these rows, of which there is at least one."""
        block = Block(place, rows[0].file, DataReport(self._config.max_length, rows=len(rows)))
        usable: list[tuple[RawRow, Record, list[str]]] = []
        roles = self._sources[place[0]].roles
        for raw in rows:
            try:
                if raw.value is None:
                    raise MalformedRow(raw.problem or "")
                record = convert(raw.value, format_name, roles)
            except MalformedRow as error:
                self._skip(block, raw, error)
                continue
            for column in unused_columns(raw.value, format_name):
                if column not in block.report.unused:
                    _keep(block.report.unused, column)
            odd = _odd_kinds(record)
            if self._keeps(block, raw, odd):
                usable.append((raw, record, odd))
        lengths: list[int] = []
        results = self._encoded([record for _, record, _ in usable], rows[0].file.directory)
        for (raw, record, counted), result in zip(usable, results, strict=True):
            if isinstance(result, MalformedRow):
                self._skip(block, raw, result)
                continue
            in_text = dict.fromkeys(kind for each in result for kind in each.odd if kind not in counted)
            if self._keeps(block, raw, list(in_text)):
                lengths += [len(each.input_ids) for each in result]
                before = len(block.samples)
                self._add_samples(block, raw, result)
                added = len(block.samples) - before
                desirable = not isinstance(record, Judged) or record.desirable
                block.desirable += [desirable] * added
                block.report.desirable += desirable * added
        block.report.dated = int(self._encoder.date_written is not None)
        block.report.length_counts = length_counts(lengths, self._config.max_length)
        return block

    def _encoded(self, records: list[Record], directory: Path | None) -> Iterator[Sequence[Encoded] | MalformedRow]:
        """Yield the samples of each record, of responses one for each."""
        responses = [record for record in records if isinstance(record, Preference | Judged)]
        if responses:  # records of one source are of one format
            yield from self._encoder.encode_responses(responses)
            return
        others = [record for record in records if not isinstance(record, Preference | Judged)]
        yield from self._encoder.encode(others, directory)

    def _keeps(self, block: Block, raw: RawRow, kinds: Sequence[str]) -> bool:
        """Return whether `data.on_*` keeps a row of these kinds, each of which is counted."""
        report, decisions = block.report, [getattr(self._config, f"on_{kind}") for kind in kinds]
        for kind, decision in zip(kinds, decisions, strict=True):
            if decision == "stop":
                raise InputError(
                    f"{raw.position}: {ODD_ROWS[kind]}; correct the row, or set data.on_{kind} to keep or drop.",
                    key="data.odd-row",
                )
            report.odd[kind] += 1
            _keep(report.odd_at.setdefault(kind, []), raw.position)
        report.left_out += "drop" in decisions
        return "drop" not in decisions

    def _skip(self, block: Block, raw: RawRow, error: MalformedRow) -> None:
        message = f"{raw.position}: {error}"
        if self._config.on_error == "stop":
            raise InputError(
                f"{message}; {error.mend}, or set data.on_error: skip to leave such rows out.",
                key="data.malformed-row",
            )
        block.report.skipped += 1
        _keep(block.report.skipped_at, message)

    def _add_samples(self, block: Block, raw: RawRow, encoded: Sequence[Encoded]) -> None:
        """Add the samples of one row: all of them, or none."""
        report, limit = block.report, self._config.max_length
        longest = max(len(each.input_ids) for each in encoded)
        for each in encoded:
            if len(each.input_ids) and int(each.input_ids.max()) >= self._vocab_size:
                refuse_unknown_id(raw.position, int(each.input_ids.max()), self._vocab_size)
        if longest > limit:
            if self._config.on_overlong == "stop":
                raise InputError(
                    f"{raw.position}: the sample has {longest:,} tokens, more than data.max_length "
                    f"{limit:,}; raise data.max_length, or set data.on_overlong to cut or drop.",
                    key="data.overlong-sample",
                )
            # An image is whole or not there: its tokens and its pixels belong together.
            in_image = any(ends_of(each.pictures) > limit for each in encoded)
            if self._config.on_overlong == "drop" or in_image:
                report.dropped += 1
                return
        # The first token is never a target (see `coded`), so it alone is none.
        if not all(each.targets[1:limit].any() for each in encoded):
            report.no_target += 1
            report.no_target_after_cut += all(bool(each.targets[1:].any()) for each in encoded)
            _keep(report.no_target_at, raw.position)
            return
        report.cut += longest > limit
        report.methods[encoded[0].method] += 1
        report.open_ended += any(each.end is None for each in encoded)
        report.ends.update(each.taught_end for each in encoded if each.taught_end is not None and longest <= limit)
        report.empty_thoughts += any(each.empty_thoughts for each in encoded)
        report.unwritten.update({name for each in encoded for name in each.unwritten})
        kept = [each.input_ids[:limit] for each in encoded]
        report.same_pairs += len(kept) > 1 and np.array_equal(kept[0], kept[1])
        samples = [coded(each.input_ids[:limit], each.targets[:limit]) for each in encoded]
        report.tokens += sum(map(len, samples))
        report.target_tokens += sum(int(np.count_nonzero(each >= 0)) for each in samples)
        block.samples += samples
        block.rows += [raw.number] * len(samples)
        block.pictures += [each.pictures for each in encoded]
        found = [picture for each in encoded for picture, _ in from_blob(each.pictures)]
        report.with_images += bool(found)
        report.images += len(found)
        report.image_tokens += sum(picture.tokens for picture in found)


def _keep(positions: list[str], position: str) -> None:
    if len(positions) < POSITIONS_KEPT:
        positions.append(position)


def _odd_kinds(record: Record) -> list[str]:
    """Return which of ODD_ROWS a record is, as far as it shows before a template has written it."""
    if isinstance(record, PromptCompletion | PlainText):
        text = record.text if isinstance(record, PlainText) else record.completion
        return [] if text.strip() else ["empty_answer"]
    if not isinstance(record, Conversation):
        return []
    answers = [
        message
        for place, message in enumerate(record.messages)
        if message["role"] == "assistant" and place not in record.untrained
    ]
    is_empty = any(not visible(message) and not message.get("tool_calls") for message in answers)
    unanswered = record.messages[-1]["role"] != "assistant"
    return ["empty_answer"] * is_empty + ["unanswered"] * unanswered
