"""Define the sections `data`, `eval` and `train.early_stop`: sources, how rows become tokens, what evaluations decide.

Nothing here reads a row.
"""

import itertools
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from expertmesh.config.base import Listed, Mapped, Name, Plain, Section, refuse
from expertmesh.config.explain import close_to

DataFormat = Literal[
    "auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "preference", "unpaired_preference"
]
WhatToDo = Literal["keep", "drop", "stop"]
Role = Literal["system", "developer", "user", "assistant", "tool"]

COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "images", "tools", "functions", "chat_template_kwargs"),
    "sharegpt": ("conversations", "messages", "system", "tools", "functions", "chat_template_kwargs"),
    "alpaca": ("instruction", "input", "output", "system", "history"),
    "prompt_completion": ("prompt", "completion", "tools", "functions", "chat_template_kwargs"),
    "text": ("text",),
    "preference": ("prompt", "chosen", "rejected", "tools", "functions", "chat_template_kwargs"),
    "unpaired_preference": ("prompt", "completion", "label", "tools", "functions", "chat_template_kwargs"),
}
"""The columns that each format reads."""
WITHOUT_ROLES = ("alpaca", "text")
"""Formats whose rows never say roles."""


class DataSource(Section):
    """One source of samples."""

    path: Name
    """File (JSON, JSONL, Parquet, Arrow, CSV), directory of such files, URL of either, or hub id of a data set."""
    format: DataFormat = "auto"
    """Layout of a row; auto detects and prints it."""
    columns: Mapped[Annotated[str, Field(min_length=1)] | None] = Field({}, validate_default=True)
    """Names of the format's columns in the rows, as {prompt: question, completion: answer}; null leaves one out."""
    roles: Mapped[Role] = Field({}, validate_default=True)
    """Standard role of each role name in the rows, as {bot: assistant}; usual names are known."""
    weight: float | None = Field(default=None, ge=1e-9, le=1e9)
    """Share of the rows, relative to other sources' weights; all sources have one, or none."""
    repeat: int = Field(default=1, ge=1, le=10_000)
    """Times that an epoch has each row."""
    max_rows: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Only the first so many rows; null for all."""
    name: str | None = Field(default=None, max_length=64, pattern=r"^[A-Za-z0-9][\w.-]*$")
    """In data.eval, its set: figures are reported of each, as eval_NAME_loss."""

    def unmatched(self, format_name: str) -> Iterator[str]:
        """Yield what columns and roles say to no effect about rows of a format (auto: any), as sentences about their
        keys.
        """
        known = COLUMNS.get(format_name) or tuple(dict.fromkeys(itertools.chain(*COLUMNS.values())))
        of = "any format" if format_name == "auto" else f"format {format_name}"
        for ours, theirs in self.columns.items():
            if theirs is not None and ours not in known:
                yield f"columns.{ours} is no column of {of}; {close_to(ours, known)}"
        if self.roles and format_name in WITHOUT_ROLES:
            yield f"roles does nothing with {of}, whose rows say no roles; remove it"


Source = Annotated[
    DataSource,
    BeforeValidator(
        lambda value: {"path": value} if isinstance(value, str) else value, json_schema_input_type=DataSource | Name
    ),
]
"""A source, or its path alone."""


class DataConfig(Section):
    """Samples, and how they become token sequences."""

    section: ClassVar[str] = "data"

    train: Listed[Source] = Field(min_length=1)
    """Sources to train on, read one after the other; a path alone is a source too."""
    eval: Listed[Source] = ()
    """Sources to evaluate on; empty for no evaluation."""
    format: DataFormat = "auto"
    """Layout of the rows of all sources that say none themselves."""
    max_length: int = Field(default=4096, ge=2, le=2**24)
    """Longest sequence, in tokens."""
    on_overlong: Literal["cut", "drop", "stop"] = "cut"
    """For a sample longer than max_length; counted."""
    on_error: Literal["stop", "skip"] = "stop"
    """For a malformed row; counted."""
    on_empty_answer: WhatToDo = "keep"
    """For a row with an empty answer; counted."""
    on_unanswered: WhatToDo = "keep"
    """For a conversation that does not end with an answer; counted."""
    on_dropped_thinking: WhatToDo = "keep"
    """For a row whose thinking the chat template leaves out; counted."""
    on_broken_thinking: WhatToDo = "keep"
    """For an answer with an unclosed <think>, an unopened </think>, or several blocks; counted."""
    chat_template: Plain | None = None
    """File of a chat template (Jinja) in place of the tokenizer's; saved with the model."""
    template_args: Mapped[Any] = Field(default_factory=dict, validate_default=True)
    """Arguments of the chat template beside messages and tools, as enable_thinking: false."""
    thinking: Literal["auto", "drop", "keep_last", "every_turn"] = "auto"
    """Thinking in answers: as the template has it (auto), none, the last answer's, or every answer's; a row then
    becomes several samples where the template keeps only the last."""
    stream: bool = False
    """Read and tokenize data.train while training goes; train.max_steps ends the run."""
    stream_rows: int = Field(default=8192, ge=1, le=2**20)
    """Rows of a stream that are read, tokenized, shuffled and packed together."""
    prepared_path: str | None = None
    """Directory for tokens, which runs may share; null for prepared in output_dir."""
    packing: bool = True
    """Fill each sequence with several samples; attention stays inside each. Off with objectives of responses."""
    loss_on: Literal["assistant", "completion", "all"] = "assistant"
    """Tokens that are targets: every assistant turn, the last turn only, or all tokens."""
    shuffle: bool = True
    """Shuffle in every epoch, by train.seed; false keeps the order of the sources."""

    @model_validator(mode="after")
    def _combine(self) -> Self:
        unmatched = (
            f"{self.key_of(source)}.{problem}"
            for source in (*self.train, *self.eval)
            for problem in source.unmatched(self.format_of(source))
        )
        refuse(*self._mixing_problems(), *unmatched)
        if self.thinking == "every_turn" and self.loss_on != "assistant":
            refuse(
                f"data.thinking every_turn does nothing with data.loss_on {self.loss_on}; set data.loss_on to "
                "assistant or data.thinking to auto"
            )
        return self

    def eval_sets(self) -> dict[str, tuple[DataSource, ...]]:
        """Return the sources of data.eval by the name of their set, which is empty for those without."""
        names = dict.fromkeys(source.name or "" for source in self.eval)
        return {name: tuple(source for source in self.eval if (source.name or "") == name) for name in names}

    def _mixing_problems(self) -> Iterator[str]:
        if not self.stream and "stream_rows" in self.model_fields_set and self.stream_rows != 8192:
            yield "data.stream_rows does nothing without data.stream; set data.stream to true, or remove it"
        for at, source in enumerate(self.train if self.stream else ()):
            if source.max_rows is not None:
                yield f"data.train.{at}.max_rows does nothing with data.stream, which reads all rows; remove it"
        named = [source.name is not None for source in self.train]
        if any(named):
            yield f"data.train.{named.index(True)}.name does nothing, as it names a set of data.eval; remove it"
        for at, source in enumerate(self.eval):
            if source.weight is not None or source.repeat > 1:
                key = "repeat" if source.weight is None else "weight"
                yield f"data.eval.{at}.{key} does nothing, as evaluation reads every row once; remove it"
        weighted = [source.weight is not None for source in self.train]
        if not any(weighted):
            return
        if not all(weighted):
            at = weighted.index(False)
            yield f"data.train.{at}.weight is missing, and other sources have one; give all of them one, or none"
        if not self.shuffle:
            yield "data.shuffle is false, but data.train has weights, by which rows are drawn; set data.shuffle to true"
        for at, source in enumerate(self.train):
            if source.repeat > 1:
                yield f"data.train.{at}.repeat does nothing beside weights, by which rows are drawn; remove it"

    def configured(self, source: DataSource) -> tuple[str, DataSource]:
        """Return where a source, or one of fewer of its rows, stands in the file (data.train.0), and how."""
        listed = ((f"data.{key}.{at}", each) for key in ("train", "eval") for at, each in enumerate(getattr(self, key)))
        whole = source.model_copy(update={"max_rows": None})
        return next((key, each) for key, each in listed if each.model_copy(update={"max_rows": None}) == whole)

    def key_of(self, source: DataSource) -> str:
        """Return where one of the sources stands in the file: data.train.0."""
        return self.configured(source)[0]

    def format_of(self, source: DataSource) -> DataFormat:
        """Return the configured one."""
        return self.format if source.format == "auto" else source.format


class EvalConfig(Section):
    """Answers that the model gives at evaluations."""

    section: ClassVar[str] = "eval"

    samples: int = Field(default=0, ge=0, le=1000)
    """Number of first prompts of each evaluation set to answer at every evaluation."""
    sample_tokens: int = Field(default=64, ge=1, le=2**16)
    """Longest answer, in tokens; none goes beyond data.max_length."""

    def idle(self) -> dict[str, str]:
        return {} if self.samples else {"sample_tokens": "with eval.samples 0; set eval.samples, or remove it"}


class EarlyStopConfig(Section):
    """The end of a run whose evaluations no longer improve."""

    section: ClassVar[str] = "train.early_stop"

    figure: Name = "eval_loss"
    """A figure of evaluations: a loss is better when it is lower, any other when it is higher."""
    patience: int = Field(default=3, ge=1, le=2**31 - 1)
    """So many evaluations in a row without a better figure end the run."""
    min_change: float = Field(default=0.0, ge=0, le=1e6)
    """A figure is better when it is so by more than this."""
