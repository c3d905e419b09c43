"""Write `output_dir/data.json`, for `expertmesh report`: a run's first samples with their targets, and the lengths of
all.

Rank 0 writes it when a run starts; training never reads it back.
"""

from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict
from transformers import PreTrainedTokenizerBase

from expertmesh.data import IGNORE, Sample
from expertmesh.io.safetensors_writer import replace_synced

if TYPE_CHECKING:
    from expertmesh.training.startup.prepare import Prepared

DATA_FILE = "data.json"
# How many samples, and how much of each.
_SAMPLES, _TOKENS = 3, 512


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class TextPiece(_Strict):
    """Consecutive tokens that are all targets, or all none."""

    text: str
    is_target: bool


class ShownSample(_Strict):
    """One sample of the training data."""

    source: str
    """File and row or line."""
    tokens: int
    """All of the sample."""
    targets: int
    """Target tokens, all of the sample."""
    pieces: list[TextPiece]
    """Text of its first tokens."""


class Bin(_Strict):
    """Samples with lengths in one range, before cutting."""

    above: int
    """Tokens that each sample has more than."""
    up_to: int | None
    """Tokens that each sample has at most; None for any number."""
    samples: int


class DataRecord(_Strict):
    """The content of data.json."""

    format: Literal["expertmesh-data"] = "expertmesh-data"
    schema_version: Literal[1] = 1
    samples: list[ShownSample]
    lengths: list[Bin]


def pieces_of(sample: Sample, tokenizer: PreTrainedTokenizerBase, most: int) -> list[TextPiece]:
    """Return the text of a sample's first `most` tokens, target by target."""
    tokens = zip(sample.input_ids[:most].tolist(), (sample.labels[:most] != IGNORE).tolist(), strict=True)
    pieces = []
    for is_target, group in groupby(tokens, key=itemgetter(1)):
        text = tokenizer.decode([token for token, _ in group], clean_up_tokenization_spaces=False)
        pieces.append(TextPiece(text=str(text), is_target=is_target))
    return pieces


def write_data_record(run: "Prepared") -> None:
    """Write the record. For rank 0."""
    dataset, tokenizer = run.data.training, run.data.tokenizer
    shown = []
    for number in range(min(_SAMPLES, len(dataset))):
        sample = dataset.sample(number)
        shown.append(
            ShownSample(
                source=dataset.position(number),
                tokens=len(sample.labels),
                targets=int((sample.labels != IGNORE).sum()),
                pieces=pieces_of(sample, tokenizer, _TOKENS),
            )
        )
    lengths = [Bin(above=b.above, up_to=b.up_to, samples=b.samples) for b in run.data.reports[0].histogram]
    content = DataRecord(samples=shown, lengths=lengths).model_dump_json(indent=1).encode() + b"\n"
    replace_synced(Path(run.config.output_dir) / DATA_FILE, content)
