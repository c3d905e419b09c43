"""From `data.train` or `data.eval` to a `TokenizedDataset` and a `DataReport`.

Each row either becomes a sample or is counted under the reason why not. Every rank reads all rows and issues no
collective; data of billions of tokens should be tokenized elsewhere first.
"""

import datetime
from collections.abc import Iterator, Sequence
from itertools import chain, islice

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from expertmesh.config import DataConfig, DataSource
from expertmesh.config.errors import InputError
from expertmesh.data.encoding.encode import Encoded
from expertmesh.data.formats import (
    FORMATS,
    PREFERENCE,
    Conversation,
    MalformedRow,
    Preference,
    PromptCompletion,
    Record,
    convert,
    fitting_formats,
    visible,
)
from expertmesh.data.encoding.preference import PairEncoder
from expertmesh.data.report import ODD_ROWS, POSITIONS_KEPT, DataReport, SourceReport, histogram_of
from expertmesh.data.sources import RawRow, SourceFile, read_source
from expertmesh.data.encoding.targets import ChatOptions
from expertmesh.data.tokenized import TokenizedDataset, refuse_unknown_id

_ROWS_PER_TOKENIZER_CALL = 512
_ROWS_TRIED_FOR_A_FORMAT = 1000


def build_dataset(
    sources: Sequence[DataSource],
    data_config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    model_vocab_size: int,
    pairs: bool = False,
    date: datetime.date | None = None,
) -> tuple[TokenizedDataset, DataReport]:
    """Read and tokenize `sources` (`data.train` or `data.eval`) as `data_config` says.

    `model_vocab_size` is the number of the model's embeddings. With `pairs` rows are preferences, and each gives two
    samples, the chosen one first. `date` is what a chat template writes that asks for today's, by default today's.
    Raises `InputError` for data that cannot be used: a malformed row under `on_error: stop`, another row that
    `data.on_*` stops at, a token id without an embedding, a chat template without a trustworthy mask, or a data set
    without a single target token.
    """
    if not sources:
        raise InputError(
            "no data source is configured; name at least one file, directory or hub data set.", key="data.no-source"
        )
    options = ChatOptions(
        data_config.loss_on, data_config.thinking, data_config.template_args, date or datetime.date.today()
    )
    builder = _Builder(data_config, PairEncoder(tokenizer, options), model_vocab_size, pairs)
    if len(tokenizer) > model_vocab_size:
        builder.note(
            f"the tokenizer knows {len(tokenizer):,} tokens but the model has {model_vocab_size:,} embeddings: "
            "is it the model's own tokenizer?"
        )
    for source in sources:
        builder.add(source)
    return builder.finish()


class _Builder:
    def __init__(self, config: DataConfig, encoder: PairEncoder, vocab_size: int, pairs: bool) -> None:
        self._config = config
        self._encoder = encoder
        self._formats = tuple(name for name in FORMATS if (name == PREFERENCE) is pairs)
        self._samples_per_row = 2 if pairs else 1
        self._vocab_size = vocab_size
        self._report = DataReport(config.max_length)
        self._input_ids: list[npt.NDArray[np.int32]] = []
        self._targets: list[npt.NDArray[np.bool_]] = []
        self._file_of: list[int] = []
        self._rows: list[int] = []
        self._files: dict[SourceFile, int] = {}
        self._lengths: list[int] = []
        self._open_ended = self._empty_thoughts = self._same = 0

    def note(self, note: str) -> None:
        self._report.notes.append(note)

    def add(self, source: DataSource) -> None:
        rows, files = 0, len(self._files)
        also_fits: tuple[str, ...] = ()
        raw_rows: Iterator[RawRow] = read_source(source.path)
        format_name: str = self._config.format if source.format == "auto" else source.format
        if detected := format_name == "auto":
            format_name, also_fits, raw_rows = self._detect(raw_rows, source.path)
        while chunk := list(islice(raw_rows, _ROWS_PER_TOKENIZER_CALL)):
            rows += len(chunk)
            self._add_chunk(chunk, format_name)
        files = len(self._files) - files
        self._report.sources.append(SourceReport(source.path, format_name, detected, also_fits, files, rows))
        self._report.rows += rows

    def _detect(self, raw_rows: Iterator[RawRow], path: str) -> tuple[str, tuple[str, ...], Iterator[RawRow]]:
        """The format of the first usable row, what else would fit, and all rows again."""
        seen: list[RawRow] = []
        for raw in islice(raw_rows, _ROWS_TRIED_FOR_A_FORMAT):
            seen.append(raw)
            found = fitting_formats(raw.value) if raw.value is not None else ()
            fits = tuple(name for name in found if name in self._formats)
            if fits:
                return fits[0], fits[1:], chain(seen, raw_rows)
            if found:
                wanted = "sft" if PREFERENCE in self._formats else "dpo"
                raise InputError(
                    f"{raw.position}: the row is of format {found[0]}, which only objective.name {wanted} trains on; "
                    "correct objective.name or the data.",
                    key="data.other-objective",
                )
            if self._config.on_error == "stop":
                if raw.problem:
                    mend = "correct the row, or set data.on_error: skip."
                    raise InputError(f"{raw.position}: {raw.problem}; {mend}", key="data.malformed-row")
                keys = ", ".join(map(str, raw.value or ())) or "none"
                raise InputError(
                    f"{raw.position}: the row's keys ({keys}) fit none of the formats {', '.join(self._formats)}; "
                    "rename the keys.",
                    key="data.unknown-format",
                )
        if not seen:
            raise InputError(f"the data source {path} holds no row; name a source that does.", key="data.empty")
        raise InputError(
            f"none of the first {len(seen):,} rows of {path} fits one of the formats {', '.join(self._formats)}; "
            "rename the rows' keys or correct the path.",
            key="data.unknown-format",
        )

    def _add_chunk(self, chunk: Sequence[RawRow], format_name: str) -> None:
        usable: list[tuple[RawRow, Record]] = []
        for raw in chunk:
            self._files.setdefault(raw.file, len(self._files))
            if raw.value is None:
                self._skip(raw, raw.problem or "")
                continue
            try:
                record = convert(raw.value, format_name)
            except MalformedRow as error:
                self._skip(raw, str(error))
                continue
            if self._keeps(raw, _odd_kinds(record)):
                usable.append((raw, record))
        for (raw, _), result in zip(usable, self._encode([record for _, record in usable]), strict=True):
            if isinstance(result, MalformedRow):
                self._skip(raw, str(result))
            elif self._keeps(raw, ["dropped_thinking"] if any(each.dropped_thinking for each in result) else []):
                self._add_samples(raw, result)

    def _encode(self, records: list[Record]) -> Iterator[Sequence[Encoded] | MalformedRow]:
        """The samples of each record, one or the two of a pair."""
        pairs = [record for record in records if isinstance(record, Preference)]
        if pairs:  # records of one source are of one format
            yield from self._encoder.encode_pairs(pairs)
            return
        yield from self._encoder.encode([record for record in records if not isinstance(record, Preference)])

    def _keeps(self, raw: RawRow, kinds: Sequence[str]) -> bool:
        """Whether `data.on_*` keeps a row of these kinds, each of which is counted."""
        decisions = [getattr(self._config, f"on_{kind}") for kind in kinds]
        for kind, decision in zip(kinds, decisions, strict=True):
            if decision == "stop":
                raise InputError(
                    f"{raw.position}: {ODD_ROWS[kind]}; correct the row, or set data.on_{kind} to keep or drop.",
                    key="data.odd-row",
                )
            self._report.odd[kind] += 1
            _keep(self._report.odd_at.setdefault(kind, []), raw.position)
        self._report.left_out += "drop" in decisions
        return "drop" not in decisions

    def _skip(self, raw: RawRow, reason: str) -> None:
        message = f"{raw.position}: {reason}"
        if self._config.on_error == "stop":
            raise InputError(
                f"{message}; correct the row, or set data.on_error: skip to leave such rows out.",
                key="data.malformed-row",
            )
        self._report.skipped += 1
        _keep(self._report.skipped_at, message)

    def _add_samples(self, raw: RawRow, encoded: Sequence[Encoded]) -> None:
        """Those of one row: all of them, or none."""
        limit, longest = self._config.max_length, max(len(each.input_ids) for each in encoded)
        for each in encoded:
            if len(each.input_ids) and int(each.input_ids.max()) >= self._vocab_size:
                refuse_unknown_id(raw.position, int(each.input_ids.max()), self._vocab_size)
            self._lengths.append(len(each.input_ids))
        if longest > limit:
            if self._config.on_overlong == "stop":
                raise InputError(
                    f"{raw.position}: the sample has {longest:,} tokens, more than data.max_length "
                    f"{limit:,}; raise data.max_length, or set data.on_overlong to cut or drop.",
                    key="data.overlong-sample",
                )
            if self._config.on_overlong == "drop":
                self._report.dropped += 1
                return
        # The first token is never a target (see TokenizedDataset), so it alone is none.
        if not all(each.targets[1:limit].any() for each in encoded):
            self._report.no_target += 1
            self._report.no_target_after_cut += all(bool(each.targets[1:].any()) for each in encoded)
            _keep(self._report.no_target_at, raw.position)
            return
        self._report.cut += longest > limit
        self._report.methods[encoded[0].method] += 1
        self._open_ended += any(each.open_ended for each in encoded)
        self._empty_thoughts += any(each.empty_thoughts for each in encoded)
        kept = [each.input_ids[:limit] for each in encoded]
        self._same += len(kept) > 1 and np.array_equal(kept[0], kept[1])
        self._input_ids += kept
        self._targets += [each.targets[:limit] for each in encoded]
        self._file_of += [self._files[raw.file]] * len(encoded)
        self._rows += [raw.number] * len(encoded)

    def finish(self) -> tuple[TokenizedDataset, DataReport]:
        report = self._report
        if not self._input_ids:
            first = next(iter((*report.skipped_at, *report.no_target_at)), None)
            raise InputError(
                f"the data has no target token at all: of {report.rows:,} rows {report.skipped:,} are "
                f"malformed, {report.dropped:,} too long, {report.left_out:,} left out by data.on_* and "
                f"{report.no_target:,} without a target "
                f"under data.loss_on: {self._config.loss_on}"
                + (f" (first: {first})" if first else "")
                + "; correct the data or data.loss_on.",
                key="data.no-targets",
            )
        if self._open_ended:
            report.notes.append(
                f"in {self._open_ended:,} samples the last answer ends without a special token, so "
                "the model is not taught where to stop"
            )
        if self._empty_thoughts:
            report.notes.append(
                f"in {self._empty_thoughts:,} samples there are thinking blocks without a thought, which are no targets"
            )
        if self._encoder.date_written is not None:
            report.notes.append(f"the chat template may write the date, which is {self._encoder.date_written}")
        if self._same:
            report.notes.append(
                f"in {self._same:,} pairs chosen and rejected response have the same tokens, so that they teach nothing"
            )
        dataset = TokenizedDataset(
            self._input_ids,
            self._targets,
            files=tuple(self._files),
            file_of=self._file_of,
            rows=self._rows,
            samples_per_row=self._samples_per_row,
        )
        report.samples = len(dataset) // self._samples_per_row
        report.tokens, report.target_tokens = dataset.tokens, dataset.target_tokens
        report.histogram = histogram_of(self._lengths, self._config.max_length)
        return dataset, report


def _keep(positions: list[str], position: str) -> None:
    if len(positions) < POSITIONS_KEPT:
        positions.append(position)


def _odd_kinds(record: Record) -> list[str]:
    """Which of ODD_ROWS a record is, as far as it shows before a template has written it."""
    if isinstance(record, PromptCompletion):
        return [] if record.completion.strip() else ["empty_answer"]
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
