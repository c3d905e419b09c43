"""Look at the first rows of a data source through the tokenizer's template: all that `expertmesh init` knows of it.

A few rows take a moment and show nearly every mistake; `expertmesh check` reads all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from expertmesh.config import Config, DataSource, ObjectiveConfig
from expertmesh.config.errors import InputError
from expertmesh.config.objective import ObjectiveName
from expertmesh.data import build_dataset
from expertmesh.data.sources import locations

ROWS = 500
# Tried where sft cannot train on the rows, and no objective is given.
_OTHERS: tuple[ObjectiveName, ...] = ("dpo", "kto")


@dataclass(frozen=True, slots=True)
class FirstRows:
    """The kind of the data, by their first rows."""

    objective: ObjectiveConfig
    """The one that trains on them."""
    what: str
    """Format and targets, in a few words."""
    lengths: str
    """The longest row, or how many are cut, in a few words."""
    longest: int
    """Tokens of the longest sample."""
    tokens: float
    """Mean tokens of a sample."""
    rows: int | None
    """Rows that an epoch trains on, if the first ones are like the others; None for enough."""
    all_read: bool
    """True if these are all."""


def first_rows(config: Config, tokenizer: PreTrainedTokenizerBase, vocab_size: int, enough: int) -> FirstRows:
    """Read the first rows of `data.train` and count no more than `enough`.

    Rows of preferences, in pairs or with a label, are taken as such unless `objective` says sft. Raises `InputError`
    for what training would refuse about them, template included.
    """
    sources = [
        source.model_copy(update={"max_rows": min(ROWS, source.max_rows or ROWS)}) for source in config.data.train
    ]
    data, others = config.data.model_copy(update={"stream": False}), [ObjectiveConfig(name=name) for name in _OTHERS]
    for objective in (config.objective, *others):
        try:
            dataset, report = build_dataset(
                sources, data, tokenizer, model_vocab_size=vocab_size, responses=objective.facts.format
            )
            break
        except InputError as error:
            given = "objective" in config.model_fields_set or objective == others[-1]
            if error.key != "data.other-objective" or given:
                raise
    how = report.methods.most_common(1)[0][0]
    share = report.target_tokens / report.tokens
    counted = enough if config.data.stream else _counted(config.data.train, max(enough, ROWS + 1))
    longest = int(dataset.lengths.max())
    lengths = f"the longest of the first {report.rows} rows has {longest:,} tokens"
    if report.cut:
        lengths = f"cuts {report.cut} of the first {report.rows} rows, which are longer"
    return FirstRows(
        objective,
        f"{report.sources[0].format}; {share:.0%} of the tokens are targets, found by {how}",
        lengths,
        longest,
        report.tokens / len(dataset),
        max(1, counted * report.samples // report.rows) if counted < enough else None,
        counted == report.rows,
    )


def _counted(sources: Sequence[DataSource], most: int) -> int:
    """Count the rows of an epoch, reading at most `most` of each source."""
    count = 0
    for source in sources:
        left = min(most, source.max_rows or most)
        rows = (row for location in locations(source.path) for row in location.rows(lambda number: True, {}))
        count += source.repeat * sum(1 for _, row in zip(range(left), rows, strict=False) if row is not None)
    return count
