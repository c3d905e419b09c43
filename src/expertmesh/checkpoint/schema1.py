"""Manifests of schema version 1: each part of each tensor on its own. Read, and turned into what readers know today."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from expertmesh.checkpoint.schema import Manifest, ManifestHeader, Strict, TensorEntry, Tiling, writer_of
from expertmesh.io.boxes import Box, volume

_Size = Field(ge=0, lt=2**63)
_Extent = Annotated[int, _Size]


class Schema1Chunk(Strict):
    """A box of a tensor in file number `file`; `copies` ranks held it, and computed `fingerprint` if several."""

    file: int = _Size
    offset: list[_Extent] = Field(max_length=64)
    shape: list[_Extent] = Field(max_length=64)
    copies: int = Field(default=1, ge=1)
    fingerprint: int | None = Field(default=None, ge=-(2**63), lt=2**63)

    @property
    def box(self) -> Box:
        return tuple((start, start + size) for start, size in zip(self.offset, self.shape, strict=True))


class Schema1Tensor(Strict):
    dtype: str
    shape: list[_Extent] = Field(max_length=64)
    chunks: list[Schema1Chunk]


class Schema1Manifest(ManifestHeader):
    schema_version: Literal[1] = 1
    model: dict[str, Schema1Tensor]
    optimizer: dict[str, Schema1Tensor]


def upgraded(old: Schema1Manifest) -> Manifest:
    """The same checkpoint as a manifest of today. `ValueError` names a tensor whose chunks cannot be its parts."""
    writers_of = {file.name: writer_of(file.name, old.world_size) for file in old.files}
    tilings: dict[str, tuple[int, Tiling]] = {}
    fingerprints: dict[str, dict[str, int]] = {}

    def entry(kind: str, name: str, tensor: Schema1Tensor) -> TensorEntry:
        writers: dict[Box, int] = {}
        for chunk in tensor.chunks:
            if chunk.file >= len(old.files) or not len(chunk.offset) == len(chunk.shape) == len(tensor.shape):
                raise ValueError(f"tensor {name} has chunks that cannot be part of it")
            file = old.files[chunk.file].name
            of_kind, rank = writers_of[file]
            if of_kind != kind:
                raise ValueError(f"looks for {name} in {file}")
            if chunk.box in writers:
                raise ValueError(f"tensor {name} is not whole: two of its parts overlap")
            if volume(chunk.box):
                writers[chunk.box] = rank
            if chunk.fingerprint is not None:
                fingerprints.setdefault(file, {})[name] = chunk.fingerprint
        try:
            tiling = Tiling.of(tensor.shape, writers, max((chunk.copies for chunk in tensor.chunks), default=1))
        except ValueError as error:
            raise ValueError(f"tensor {name} is not whole: {error}") from error
        number, _ = tilings.setdefault(tiling.model_dump_json(), (len(tilings), tiling))
        return TensorEntry(dtype=tensor.dtype, shape=tensor.shape, tiling=number)

    def entries(kind: str, tensors: Mapping[str, Schema1Tensor]) -> dict[str, TensorEntry]:
        return {name: entry(kind, name, tensor) for name, tensor in tensors.items()}

    model, optimizer = entries("model", old.model), entries("optimizer", old.optimizer)
    manifest = Manifest(
        **old.model_dump(exclude={"schema_version", "model", "optimizer"}),
        tilings=[tiling for _, tiling in tilings.values()],
        model=model,
        optimizer=optimizer,
    )
    return manifest.with_fingerprints(fingerprints)
