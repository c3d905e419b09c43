"""The tokenized data set: every sample's ids and targets in a few flat arrays, plus where each row came from.

Built once by `build_dataset` (each rank holds all of it: about 5 bytes per token) and only read afterwards,
by packing, by the batches and by `check`. A sample here fits `max_length` and has at least one target.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from expertmesh.config.errors import InputError
from expertmesh.data.sources import SourceFile

IGNORE = -100
"""The label of a token that is no target, as in Hugging Face and `torch.nn.functional.cross_entropy`."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Ids and labels of one sample, both [S] int64.

    Labels are aligned with the ids, as in Hugging Face (the loss shifts them); -100 is no target.
    """

    input_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]


class TokenizedDataset:
    """Samples in file order, in compact arrays.

    `input_ids` int32 and `targets` bool hold all samples end to end; sample `i` lies between `offsets[i]` and
    `offsets[i + 1]` (int64), and came from row `rows[i]` of `files[file_of[i]]`. `samples_per_row` is 2 for
    preferences: samples 2p and 2p + 1 are the chosen and the rejected one of pair p, and belong together wherever they
    go. `reference` (`[samples]` float64) may be given later: the log-probability of each sample's targets under the
    reference of objective dpo.
    """

    __slots__ = (
        "_input_ids", "_offsets", "_targets", "file_of", "files", "lengths", "reference", "rows", "samples_per_row",
        "target_counts",
    )  # fmt: skip

    def __init__(
        self,
        input_ids: Sequence[npt.NDArray[np.int32]],
        targets: Sequence[npt.NDArray[np.bool_]],
        *,
        files: Sequence[SourceFile] = (),
        file_of: Sequence[int] = (),
        rows: Sequence[int] = (),
        samples_per_row: int = 1,
    ) -> None:
        self.lengths = np.array([len(ids) for ids in input_ids], dtype=np.int64)
        self._offsets = np.concatenate(([0], np.cumsum(self.lengths))).astype(np.int64)
        self._input_ids = np.concatenate([np.empty(0, np.int32), *input_ids]).astype(np.int32, copy=False)
        self._targets = np.concatenate([np.empty(0, np.bool_), *targets]).astype(np.bool_, copy=False)
        assert self._input_ids.shape == self._targets.shape
        # Nothing predicts a document's first token. Clearing it here also keeps a packed document from being
        # predicted by its neighbour's last token.
        self._targets[self._offsets[:-1][self.lengths > 0]] = False
        running = np.concatenate(([0], np.cumsum(self._targets)))
        self.target_counts = running[self._offsets[1:]] - running[self._offsets[:-1]]
        self.files = tuple(files)
        self.file_of = np.array(file_of, dtype=np.int32)
        self.rows = np.array(rows, dtype=np.int64)
        self.samples_per_row = samples_per_row
        self.reference: npt.NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return len(self._input_ids)

    @property
    def target_tokens(self) -> int:
        """Tokens of all samples that a loss is computed on."""
        return int(self._targets.sum())

    def sample(self, index: int) -> Sample:
        """Sample `index` as int64 arrays; the label of its first token is always -100."""
        part = slice(self._offsets[index], self._offsets[index + 1])
        input_ids = self._input_ids[part].astype(np.int64)
        return Sample(input_ids, np.where(self._targets[part], input_ids, IGNORE))

    def position(self, index: int) -> str:
        """Where sample `index` came from: `train.jsonl:12`."""
        return self.files[int(self.file_of[index])].position(int(self.rows[index]))

    def sha256(self) -> str:
        """A hash of every sample's ids and targets, in order: the same for data that trains the same."""
        digest = hashlib.sha256()
        for array in (self.lengths, self._input_ids, self._targets):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def largest_id(self) -> tuple[int, int] | None:
        """The largest token id and the first sample that holds it, or None without tokens."""
        if not len(self._input_ids):
            return None
        at = int(self._input_ids.argmax())
        return int(self._input_ids[at]), int(np.searchsorted(self._offsets, at, side="right")) - 1


def check_vocabulary(dataset: TokenizedDataset, vocab_size: int) -> None:
    """Raise `InputError` if a token id has no row among the model's `vocab_size` embeddings."""
    largest = dataset.largest_id()
    if largest is not None and largest[0] >= vocab_size:
        refuse_unknown_id(dataset.position(largest[1]), largest[0], vocab_size)


def refuse_unknown_id(position: str, token_id: int, vocab_size: int) -> NoReturn:
    """Raise the `InputError` for a token id that the model has no embedding for."""
    raise InputError(
        f"{position}: contains token id {token_id}, but the model has embeddings for ids 0 to "
        f"{vocab_size - 1} only; use the model's own tokenizer, or a model whose embeddings were resized "
        "for it.",
        key="data.unknown-token-id",
    )
