"""Hold the tokenized data set: every sample's tokens in a few flat arrays, in memory or mapped from files.

Built by `build_dataset` or opened by `prepared.py`, and only read afterwards, by packing, by the batches and by
`check`. A sample here fits `max_length` and has at least one target. A token is one int32: its id, or `~id` where it
is no target.
"""

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.data.images import from_blob
from expertmesh.data.sources import SourceFile

IGNORE = -100
"""The label of a token that is no target, as in Hugging Face and `torch.nn.functional.cross_entropy`."""

_TOKENS_AT_A_TIME = 1 << 22

Tokens = npt.NDArray[np.int32]
Samples = npt.NDArray[np.int64]
"""Numbers of samples."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Ids and labels of one sample, both [S] int64.

    Labels are aligned with the ids, as in Hugging Face (the loss shifts them); -100 is no target.
    """

    input_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampleIndex:
    """An index of samples; each array is `[samples]`."""

    lengths: npt.NDArray[np.int32]
    """Tokens."""
    target_counts: npt.NDArray[np.int32]
    """Target tokens."""
    shards: npt.NDArray[np.int16]
    """Number of the shard that holds it."""
    starts: npt.NDArray[np.int64]
    """Position of its first token in the shard."""
    files: npt.NDArray[np.int32]
    """Number of the file that its row came from."""
    rows: npt.NDArray[np.int64]
    """Number of the row in that file."""
    checksums: npt.NDArray[np.uint32]
    """crc32 of its tokens."""
    picture_starts: npt.NDArray[np.int64]
    """Position of the blob of its images in the shard's bytes of pictures."""
    picture_sizes: npt.NDArray[np.int64]
    """Bytes of that; 0 without images."""
    desirable: npt.NDArray[np.bool_]
    """Its label; True where rows have none."""


class TokenizedDataset:
    """Samples in the order of the sources.

    `shards` are arrays of tokens, which may be memory-mapped: nothing but the requested samples is read. `pictures` are
    for each of them the bytes that describe the images of its samples (images.py), or nothing if no sample has any.
    `samples_per_row` is 2 for preferences: samples 2p and 2p + 1 are the chosen and the rejected one of pair p, and
    belong together wherever they go. `desirable` (`[samples]` bool) are the labels of responses that are `judged`, else
    None. `sha256`, where it is known already, is that of `sha256()`. `reference` (`[samples]` float64) may be given
    later: the log-probability of each sample's targets under the reference of objectives dpo and kto; for kto also
    `mismatched_reference`, that of the rows of `mismatched`: of every row of the run, or of an evaluation.
    """

    __slots__ = (
        "_index", "_pictures", "_sha256", "_shards", "desirable", "files", "lengths", "mismatched_reference",
        "reference", "samples_per_row", "target_counts", "target_tokens", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        shards: Sequence[Tokens],
        index: SampleIndex,
        *,
        files: Sequence[SourceFile] = (),
        samples_per_row: int = 1,
        judged: bool = False,
        sha256: str | None = None,
        pictures: Sequence[npt.NDArray[np.uint8]] = (),
    ) -> None:
        self._pictures = tuple(pictures)
        self._shards, self._index, self._sha256 = tuple(shards), index, sha256
        self.files = tuple(files)
        self.samples_per_row = samples_per_row
        self.lengths, self.target_counts = index.lengths, index.target_counts
        self.tokens, self.target_tokens = int(self.lengths.sum()), int(self.target_counts.sum())
        self.desirable = index.desirable if judged else None
        self.reference: npt.NDArray[np.float64] | None = None
        self.mismatched_reference: npt.NDArray[np.float64] | None = None

    @classmethod
    def of_samples(
        cls, input_ids: Sequence[npt.NDArray[Any]], targets: Sequence[npt.NDArray[np.bool_]], **facts: Any
    ) -> "TokenizedDataset":
        """Return a data set in memory, of the ids and targets of each sample; `facts` as for `in_memory`."""
        return cls.in_memory([coded(*each) for each in zip(input_ids, targets, strict=True)], **facts)

    @classmethod
    def in_memory(
        cls,
        samples: Sequence[Tokens],
        file_of: Sequence[int] = (),
        rows: Sequence[int] = (),
        desirable: Sequence[bool] = (),
        pictures: Sequence[bytes] = (),
        **facts: Any,
    ) -> "TokenizedDataset":
        """Return a data set of coded samples, each of a row of a file, with its label and images; `facts` as for the
        class.
        """
        origin = np.zeros(len(samples), np.int64)
        index = index_of(
            samples, 0, 0, file_of if len(file_of) else origin, rows if len(rows) else origin, desirable, pictures
        )
        held = [np.frombuffer(b"".join(pictures), np.uint8)] if any(pictures) else []
        return cls([np.concatenate([np.empty(0, np.int32), *samples])], index, pictures=held, **facts)

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, index: int) -> Sample:
        """Sample `index` as int64 arrays; the label of its first token is always -100.

        Raises `IntegrityError` for a sample whose tokens on the disk have changed.
        """
        start, shard = int(self._index.starts[index]), int(self._index.shards[index])
        tokens = self._shards[shard][start : start + int(self.lengths[index])]
        if zlib.crc32(np.ascontiguousarray(tokens).data) != int(self._index.checksums[index]):
            where = getattr(self._shards[shard], "filename", None) or "the tokens in memory"
            raise IntegrityError(
                f"{where}: the tokens of {self.position(index)} are damaged; remove the directory, and they are made "
                "anew",
                key="data.damaged-preparation",
            )
        is_target = tokens >= 0
        input_ids = np.where(is_target, tokens, ~tokens).astype(np.int64)
        return Sample(input_ids, np.where(is_target, input_ids, IGNORE))

    @property
    def images_of(self) -> npt.NDArray[np.bool_]:
        """Return whether each sample has images, `[samples]`."""
        return self._index.picture_sizes > 0

    @property
    def has_images(self) -> bool:
        return bool(self.images_of.any())

    def pictures(self, index: int) -> bytes:
        """Return the images of a sample, as `images.to_blob` returned them; empty without any."""
        start, size = int(self._index.picture_starts[index]), int(self._index.picture_sizes[index])
        return self._pictures[int(self._index.shards[index])][start : start + size].tobytes() if size else b""

    def position(self, index: int) -> str:
        """Return where sample `index` came from: `train.jsonl:12`; its number if it was not read from a file."""
        if not self.files:
            return f"sample {index + 1}"
        return self.files[int(self._index.files[index])].position(int(self._index.rows[index]))

    def sha256(self) -> str:
        """Return a hash of every sample's ids and targets, in order: the same for data that trains the same."""
        if self._sha256 is None:
            digest = hashlib.sha256(np.ascontiguousarray(self.lengths, dtype=np.int64).data)
            for tokens in self._in_order():
                digest.update(np.where(tokens >= 0, tokens, ~tokens).data)
            for tokens in self._in_order():
                digest.update((tokens >= 0).data)
            for index in np.flatnonzero(self._index.picture_sizes).tolist():
                shown = [picture.sha256 for picture, _ in from_blob(self.pictures(index))]
                digest.update(f"{index} {shown}".encode())
            if self.desirable is not None:
                digest.update(np.ascontiguousarray(self.desirable).data)
            self._sha256 = digest.hexdigest()
        return self._sha256

    def mismatched(self, prompts: Samples, completions: Samples, max_length: int) -> "TokenizedDataset":
        """Return the prompts of some samples, each with the completion of another one, as a data set that reads this
        one: what comes before the targets, and the targets, cut to `max_length` tokens.
        """
        return _Mismatched(self, prompts, completions, max_length)

    def _in_order(self) -> Iterator[Tokens]:
        """Yield all tokens, in stretches that lie together."""
        starts, shards = self._index.starts, self._index.shards
        ends = starts + self.lengths
        breaks = np.flatnonzero((starts[1:] != ends[:-1]) | (shards[1:] != shards[:-1])) + 1
        bounds = [0, *breaks.tolist(), len(self)] if len(self) else [0]
        for first, last in pairwise(bounds):
            end = int(ends[last - 1])
            for start in range(int(starts[first]), end, _TOKENS_AT_A_TIME):
                yield self._shards[int(shards[first])][start : min(start + _TOKENS_AT_A_TIME, end)]


class _Mismatched(TokenizedDataset):
    """See `TokenizedDataset.mismatched`."""

    __slots__ = ("_completions", "_of", "_prompts")

    def __init__(self, of: TokenizedDataset, prompts: Samples, completions: Samples, max_length: int) -> None:
        self._of, self._prompts, self._completions = of, prompts, completions
        before = of.lengths[prompts] - of.target_counts[prompts]
        self.lengths = np.minimum(before + of.target_counts[completions], max_length)
        self.target_counts = self.lengths - before
        self.tokens, self.target_tokens = int(self.lengths.sum()), int(self.target_counts.sum())
        self.samples_per_row, self.desirable, self.reference, self.mismatched_reference = 1, None, None, None
        self._index, self._pictures = index_of([], 0, 0, [], []), ()

    def sample(self, index: int) -> Sample:
        prompt, other = (self._of.sample(int(each[index])) for each in (self._prompts, self._completions))
        length, targets = int(self.lengths[index]), int(self.target_counts[index])
        answer = other.input_ids[len(other.input_ids) - int(self._of.target_counts[self._completions[index]]) :]
        input_ids = np.concatenate([prompt.input_ids[: length - targets], answer[:targets]])
        return Sample(input_ids, np.where(np.arange(length) < length - targets, IGNORE, input_ids))


def coded(input_ids: npt.NDArray[Any], targets: npt.NDArray[np.bool_]) -> Tokens:
    """Return a sample as one number for each token.

    Nothing predicts a document's first token, so it is no target. That also keeps a packed document from being
    predicted by its neighbour's last token.
    """
    tokens = np.where(targets, input_ids, ~input_ids).astype(np.int32, copy=False)
    tokens[:1] = ~input_ids[:1]
    return tokens


def index_of(
    samples: Sequence[Tokens],
    shard: int,
    start: int,
    file_of: Sequence[int] | npt.NDArray[Any],
    rows: Any,
    desirable: Sequence[bool] = (),
    pictures: Sequence[bytes] = (),
    picture_start: int = 0,
) -> SampleIndex:
    """Return the index of samples that are in `shard`, one after the other from token `start`.

    Args:
        file_of: Number of the file that each sample came from.
        rows: Number of the row in that file, for each sample.
        desirable: The label of each sample; empty for all True.
        pictures: The bytes that describe each sample's images; empty for none. The first are at `picture_start`.
    """
    sizes = np.array([len(each) for each in pictures] or [0] * len(samples), dtype=np.int64)
    lengths = np.array([len(each) for each in samples], dtype=np.int32)
    return SampleIndex(
        lengths=lengths,
        target_counts=np.array([np.count_nonzero(each >= 0) for each in samples], dtype=np.int32),
        shards=np.full(len(samples), shard, dtype=np.int16),
        starts=start + np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))[:-1],
        files=np.array(file_of, dtype=np.int32),
        rows=np.array(rows, dtype=np.int64),
        checksums=np.array([zlib.crc32(each.data) for each in samples], dtype=np.uint32),
        picture_starts=picture_start + np.concatenate(([0], np.cumsum(sizes)))[:-1].astype(np.int64),
        picture_sizes=sizes,
        desirable=np.array(desirable, dtype=np.bool_) if len(desirable) else np.ones(len(samples), dtype=np.bool_),
    )


def no_data(what: str, mend: str) -> InputError:
    return InputError(f"{what}; {mend}.", key="data.empty")


def refuse_unknown_id(position: str, token_id: int, vocab_size: int) -> NoReturn:
    """Raise the `InputError` for a token id that the model has no embedding for."""
    raise InputError(
        f"{position}: contains token id {token_id}, but the model has embeddings for ids 0 to "
        f"{vocab_size - 1} only; use the model's own tokenizer, or a model whose embeddings were resized "
        "for it.",
        key="data.unknown-token-id",
    )
