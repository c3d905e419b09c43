"""What the first rows of a data source are, through the tokenizer's template: what `expertmesh init` says of the data.

A few rows take a moment and show nearly every mistake; `expertmesh check` reads all of them.
"""

import datetime
from collections import Counter
from itertools import islice

from transformers import PreTrainedTokenizerBase

from expertmesh.config import DataConfig
from expertmesh.config.errors import InputError
from expertmesh.data.encoding.encode import Encoder
from expertmesh.data.encoding.targets import ChatOptions
from expertmesh.data.formats import PREFERENCE, MalformedRow, convert, fitting_formats
from expertmesh.data.sources import RawRow, read_source

ROWS = 100


def first_rows(path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """(format and targets, lengths) of the first rows of `path`, each as a few words.

    Raises `InputError` for what training would refuse about them, template included, and for preferences.
    """
    rows = list(islice(read_source(path), ROWS))
    if not rows:
        raise InputError(f"the data source {path} holds no row; name a source that does", key="data.empty")
    name = _format_of(rows[0])
    records = []
    for row in rows:
        try:
            record = convert(row.value or {}, name)
        except MalformedRow as error:
            raise _malformed(row, row.problem or str(error)) from None
        records.append(record)
    defaults = DataConfig.model_fields
    options = ChatOptions(defaults["loss_on"].default, defaults["thinking"].default, {}, datetime.date.today())
    samples, methods = [], Counter[str]()
    for row, encoded in zip(rows, Encoder(tokenizer, options).encode(records), strict=True):  # type: ignore[arg-type]
        if isinstance(encoded, MalformedRow):
            raise _malformed(row, str(encoded))
        samples += encoded
        methods.update(each.method for each in encoded)
    tokens = sum(len(each.input_ids) for each in samples)
    targets = sum(int(each.targets[1:].sum()) for each in samples)
    if not targets:
        raise InputError(
            f"{path}: its first {len(rows)} rows, as {name}, have no target token; correct the data, or the chat "
            "template of the tokenizer",
            key="data.no-targets",
        )
    how = methods.most_common(1)[0][0]
    longest = max(len(each.input_ids) for each in samples)
    found = f"{name}; {targets / tokens:.0%} of the tokens are targets, found by {how}"
    return found, f"the longest of the first {len(rows)} rows has {longest:,} tokens"


def _format_of(row: RawRow) -> str:
    fits = fitting_formats(row.value) if row.value is not None else ()
    if not fits:
        keys = ", ".join(map(str, row.value or ())) or "none"
        raise _malformed(row, row.problem or f"the row's keys ({keys}) fit no format")
    if fits[0] == PREFERENCE:
        raise InputError(
            f"{row.position}: the row is a preference, for objective.name dpo; start from "
            "examples/qwen3-30b-a3b-dpo.yaml and expertmesh plan",
            key="data.other-objective",
        )
    return fits[0]


def _malformed(row: RawRow, problem: str) -> InputError:
    return InputError(f"{row.position}: {problem}; correct the row", key="data.malformed-row")
