"""Training data: rows of six formats → tokens and targets → batches, every row accounted for.

`build_dataset` reads and tokenizes, `TrainingBatches` and `EvaluationBatches` hand out what each data rank
trains on. Nothing here communicates.
"""

from expertmesh.data.build import Recipe, build_dataset
from expertmesh.data.loader import BatchLayout, EvaluationBatches, Mixture, Step, TrainingBatches, padding_token_id
from expertmesh.data.prepared import Preparation, PreparedData, found_or_built
from expertmesh.data.report import DataReport
from expertmesh.data.sources import refuse_source
from expertmesh.data.stream import Ranks, Stream, StreamBatches, StreamPosition
from expertmesh.data.tokenized import IGNORE, Sample, TokenizedDataset
from expertmesh.data.tokenizer import load_tokenizer

__all__ = [
    "IGNORE",
    "BatchLayout",
    "DataReport",
    "EvaluationBatches",
    "Mixture",
    "Preparation",
    "PreparedData",
    "Ranks",
    "Recipe",
    "Sample",
    "Step",
    "Stream",
    "StreamBatches",
    "StreamPosition",
    "TokenizedDataset",
    "TrainingBatches",
    "build_dataset",
    "found_or_built",
    "load_tokenizer",
    "padding_token_id",
    "refuse_source",
]
