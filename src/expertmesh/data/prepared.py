"""Keep tokens on the disk: made once, by several processes together, and mapped by every rank of every start.

A `Preparation` is one recipe in a directory that recipes share. Below it each set of tokens has a directory of its own:
`KEY-CONTENT`, where KEY stands for tokenizer, template, settings and code, CONTENT for the rows. In it are the tokens
that each process wrote (`tokens-*.bin`), an index of all samples (`*.npy`), and `manifest.json` with what the rows were
read from and the report. It appears by one rename, and nothing in it changes afterwards, so that jobs may share it.
Nothing here communicates: processes meet in a directory that they have agreed on.

Fingerprints say what tokens depend on: tokenizer, template, settings and code, and the rows that they were made from.
"""

import datetime
import hashlib
import importlib.metadata
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from expertmesh.config import Config
from expertmesh.config.errors import InputError, IntegrityError, SecurityError
from expertmesh.data.blocks import BlockFacts, Place
from expertmesh.data.build import BlockReader, Recipe, build_dataset, joined
from expertmesh.data.report import DataReport, SourceReport
from expertmesh.data.sources import RowShare, SourceFile, locations
from expertmesh.data.stream import first_rows
from expertmesh.data.tokenized import SampleIndex, TokenizedDataset, index_of
from expertmesh.io.directory import rename_synced, replace_synced, sync
from expertmesh.io.reading import read_versioned

# Keys of `data` that tokens do not depend on; the template's text counts, not its file.
_NO_MATTER = {"train", "eval", "packing", "shuffle", "chat_template", "prepared_path", "stream", "stream_rows"}
# Files of this package that only read tokens.
_READERS = {"loader", "prepared", "stream", "__init__"}


class Origin(BaseModel):
    """One location as it was read."""

    name: str
    stamp: str
    """A text that changes if the content may have changed."""
    content: str
    """The result of the location's `content()`, equal for equal content."""


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """Return all but the rows that the tokens of a recipe depend on."""
    return {
        "code": _code_sha256(),
        "versions": {name: importlib.metadata.version(name) for name in ("transformers", "tokenizers", "jinja2")},
        "tokenizer": _tokenizer_sha256(recipe),
        "model_vocab_size": recipe.model_vocab_size,
        "images": None if recipe.images is None else recipe.images.settings(),
        "responses": recipe.responses,
        "sources": [source.model_dump(mode="json", exclude={"weight", "repeat", "name"}) for source in recipe.sources],
        "data": recipe.config.model_dump(mode="json", exclude=_NO_MATTER),
    }


class Origins:
    """The locations of a recipe, looked at once."""

    def __init__(self, recipe: Recipe) -> None:
        self._locations = [each for source in recipe.sources for each in locations(source.path)]
        self._contents: dict[int, str] = {}

    def are(self, before: list[Origin]) -> bool:
        """Return whether these are the locations that were read, with the same content."""
        if [each.name for each in self._locations] != [origin.name for origin in before]:
            return False
        return all(
            location.stamp() == origin.stamp or self._content(at) == origin.content
            for at, (location, origin) in enumerate(zip(self._locations, before, strict=True))
        )

    def stamps(self) -> list[str]:
        return [location.stamp() for location in self._locations]

    def now(self) -> list[Origin]:
        return [
            Origin(name=location.name, stamp=location.stamp(), content=self._content(at))
            for at, location in enumerate(self._locations)
        ]

    def _content(self, at: int) -> str:
        if at not in self._contents:
            self._contents[at] = self._locations[at].content()
        return self._contents[at]


def sha256_of(text: str) -> str:
    """Return the hash of the text's UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def _code_sha256() -> str:
    """Return the hash of the code that makes tokens of rows: the results of an earlier version are not taken."""
    here = Path(__file__).parent
    return sha256_of(
        "".join(path.read_text("utf-8") for path in sorted(here.rglob("*.py")) if path.stem not in _READERS)
    )


def _tokenizer_sha256(recipe: Recipe) -> str:
    tokenizer = recipe.tokenizer
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        for state in ("truncation", "padding"):  # calls change them
            backend.pop(state, None)
    else:
        files = [Path(str(getattr(tokenizer, name, ""))) for name in tokenizer.vocab_files_names]
        backend = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()}
        backend |= {"vocabulary": tokenizer.get_vocab(), "arguments": repr(sorted(tokenizer.init_kwargs.items()))}
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    return sha256_of(json.dumps([type(tokenizer).__name__, backend, tokenizer.chat_template, special], sort_keys=True))


DIRECTORY = "prepared"
MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
_BUILDING = ".building-"
_PICTURES = "pictures-"
_ERRORS = {kind.__name__: kind for kind in (InputError, IntegrityError, SecurityError)}
_ABANDONED_AFTER_SECONDS = 24 * 3600


class _Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Literal["expertmesh-prepared"] = "expertmesh-prepared"
    schema_version: int = SCHEMA_VERSION
    settings: dict[str, Any]
    date: datetime.date | None
    origins: list[Origin]
    files: list[SourceFile]
    shard_bytes: dict[str, int]
    index_sha256: str
    data_sha256: str
    report: DataReport


class _Written(BaseModel):
    """The notes of one process about its share of the rows."""

    stamps: list[str]
    """Stamps of the locations, from before they were read."""
    sources: list[SourceReport]
    blocks: list[BlockFacts]


class _Failure(BaseModel):
    place: Place
    kind: str
    message: str
    key: str


@dataclass(frozen=True, slots=True)
class PreparedData:
    """Tokens found on the disk."""

    directory: Path
    dataset: TokenizedDataset
    report: DataReport
    date: datetime.date | None
    """The date that the chat template may have written; None if it writes none."""


@dataclass(frozen=True)
class Preparation:
    """The tokens of `recipe` in `directory`, there or to be made.

    A recipe without a date takes tokens with any; a new preparation has today's then.
    """

    directory: Path
    recipe: Recipe

    @classmethod
    def of(cls, config: Config, recipe: Recipe) -> "Preparation":
        """Return where `data.prepared_path` says, by default in `output_dir`."""
        return cls(Path(config.data.prepared_path or Path(config.output_dir) / DIRECTORY).expanduser(), recipe)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All but the rows that tokens depend on."""
        return settings_of(self.recipe)

    @cached_property
    def key(self) -> str:
        """Names the settings."""
        return sha256_of(json.dumps(self.settings, sort_keys=True))[:16]

    def find(self) -> PreparedData | None:
        """Return the tokens, if they have been prepared from the rows as they are now.

        Raises `IntegrityError` for files that are not what the manifest says.
        """
        fitting: list[tuple[str, Path, _Manifest]] = []
        now = Origins(self.recipe)
        for path in sorted(self.directory.glob(f"{self.key}-*/{MANIFEST}")):
            manifest = read_versioned(path, _Manifest, SCHEMA_VERSION, key="data.damaged-preparation")
            wanted = self.recipe.date is None or manifest.date in (None, self.recipe.date)
            if wanted and now.are(manifest.origins):
                fitting.append((f"{manifest.date}", path.parent, manifest))
        if not fitting:
            return None
        _, directory, manifest = max(fitting)
        return PreparedData(directory, _opened(directory, manifest, self.recipe), manifest.report, manifest.date)

    def is_stale(self) -> bool:
        """Return whether rows have been prepared with these settings that are not those of now."""
        there = [path.name for path in self.directory.glob(f"{self.key}-*")]
        if not there:  # before all rows are read for it
            return False
        now = _content_sha256(Origins(self.recipe).now())
        return any(not name.startswith(f"{self.key}-{now}") for name in there)

    def building(self, name: str) -> Path:
        """Return where the processes that know this name make the tokens together."""
        return self.directory / f"{_BUILDING}{self.key}-{name}"

    def write_share(self, building: Path, share: RowShare, progress: Callable[[int], None]) -> None:
        """Tokenize the share of this process into `building`. Bad rows are noted, and raised by `finish`.

        Args:
            progress: Called with the number of rows of each block.
        """
        with _unwritable(building):
            building.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(self.directory, but=building)
        reader = BlockReader(replace(self.recipe, date=self.recipe.date or datetime.date.today()), share)
        stamps = Origins(self.recipe).stamps()
        facts: list[BlockFacts] = []
        indices: list[SampleIndex] = []
        tokens = described = 0
        with (
            _unwritable(building),
            _shard(building, share.index).open("wb") as stream,
            _pictures(building, share.index).open("wb") as shown,
        ):
            try:
                for block in reader:
                    facts.append(block.facts())
                    origin = [0] * len(block.rows), block.rows, block.desirable, block.pictures
                    indices.append(index_of(block.samples, share.index, tokens, *origin, described))
                    described += shown.write(b"".join(block.pictures))
                    for sample in block.samples:
                        stream.write(sample.data)
                        tokens += len(sample)
                    progress(block.report.rows)
                    if any(failure.place < reader.place for failure in _failures(building)):
                        break
            except (InputError, SecurityError) as error:
                failure = _Failure(place=reader.place, kind=type(error).__name__, message=str(error), key=error.key)
                replace_synced(building / f"failed-{share.index:05d}.json", failure.model_dump_json().encode())
        with _unwritable(building):
            parts = [index_of([], 0, 0, [], []), *indices]
            index: Any = {field: np.concatenate([getattr(each, field) for each in parts]) for field in _FIELDS}
            np.savez(building / f"index-{share.index:05d}.npz", **index)
            written = _Written(stamps=stamps, sources=reader.sources, blocks=facts)
            (building / f"facts-{share.index:05d}.json").write_bytes(written.model_dump_json().encode())

    def finish(self, building: Path, processes: int) -> None:
        """Publish what the processes 0 … `processes`-1 have written into `building`; one of them calls it.

        Raises the error of the first row, in the order of the data, that stopped one of them.
        """
        try:
            self._finish(building, processes)
        finally:
            shutil.rmtree(building, ignore_errors=True)

    def _finish(self, building: Path, processes: int) -> None:
        if failures := _failures(building):
            first = min(failures, key=lambda failure: failure.place)
            raise _ERRORS[first.kind](first.message, key=first.key)
        written = [
            _Written.model_validate_json((building / f"facts-{process:05d}.json").read_bytes())
            for process in range(processes)
        ]
        order = sorted(
            (block.place, process, at) for process, each in enumerate(written) for at, block in enumerate(each.blocks)
        )
        blocks = [written[process].blocks[at] for _, process, at in order]
        recipe = replace(self.recipe, date=self.recipe.date or datetime.date.today())
        origins = Origins(self.recipe).now()
        for each in written:
            changed = [now.name for now, stamp in zip(origins, each.stamps, strict=True) if now.stamp != stamp]
            if changed:
                raise InputError(
                    f"{changed[0]} has changed while it was read; start again when it is complete.",
                    key="data.changed-while-read",
                )
        report, files = joined(recipe, written[0].sources, blocks)
        with _unwritable(building):
            index = _in_order(building, order, written)
            paths = [of(building, process) for of in (_shard, _pictures) for process in range(processes)]
            shards = {path.name: path for path in paths}
            for field, values in index.items():
                np.save(building / f"{field}.npy", values)
            for scratch in (*building.glob("facts-*"), *building.glob("index-*")):
                scratch.unlink()
            for path in building.iterdir():
                sync(path)
            manifest = _Manifest(
                settings=self.settings,
                date=recipe.date if report.dated else None,
                origins=origins,
                files=list(files),
                shard_bytes={name: path.stat().st_size for name, path in shards.items()},
                index_sha256=_index_sha256(building),
                data_sha256="",
                report=report,
            )
            manifest.data_sha256 = _opened(building, manifest, self.recipe).sha256()
            replace_synced(building / MANIFEST, manifest.model_dump_json(indent=1).encode())
            content = _content_sha256(manifest.origins)
            final = self.directory / f"{self.key}-{content}{f'-{manifest.date}' if manifest.date else ''}"
            try:
                rename_synced(building, final)
            except OSError:
                if not (final / MANIFEST).is_file():  # else another job was there first, with the same tokens
                    raise


def _content_sha256(origins: list[Origin]) -> str:
    return sha256_of(json.dumps([[origin.name, origin.content] for origin in origins]))[:16]


def found_or_built(config: Config, recipe: Recipe) -> tuple[TokenizedDataset, DataReport]:
    """Return the prepared tokens of `recipe`, or make them in memory (of a stream, the first). Write nothing."""
    if config.data.stream and recipe.sources == config.data.train:
        return first_rows(recipe)
    found = Preparation.of(config, recipe).find()
    if found is not None:
        return found.dataset, found.report
    return build_dataset(recipe)


def _opened(directory: Path, manifest: _Manifest, recipe: Recipe) -> TokenizedDataset:
    """Return the data set, mapped."""
    mend = "remove the directory, and they are made anew"
    for name, size in manifest.shard_bytes.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != size:
            raise IntegrityError(
                f"{path}: the prepared tokens are damaged: the file has not the {size:,} bytes that it had; {mend}",
                key="data.damaged-preparation",
            )
    if _index_sha256(directory) != manifest.index_sha256:
        raise IntegrityError(
            f"{directory}: the prepared tokens are damaged: the index has changed; {mend}",
            key="data.damaged-preparation",
        )
    index = {field: np.asarray(np.load(directory / f"{field}.npy", mmap_mode="r")) for field in _FIELDS}
    shards: list[npt.NDArray[np.int32]] = []
    pictures: list[npt.NDArray[np.uint8]] = []
    for name, size in manifest.shard_bytes.items():
        if name.startswith(_PICTURES):
            pictures.append(np.memmap(directory / name, np.uint8, mode="r") if size else np.empty(0, np.uint8))
        else:
            shards.append(np.memmap(directory / name, np.int32, mode="r") if size else np.empty(0, np.int32))
    return TokenizedDataset(
        shards,
        SampleIndex(**index),
        files=manifest.files,
        samples_per_row=recipe.samples_per_row,
        judged=recipe.judged,
        sha256=manifest.data_sha256 or None,
        pictures=pictures,
    )


_FIELDS = tuple(field.name for field in fields(SampleIndex))


def _shard(directory: Path, process: int) -> Path:
    return directory / f"tokens-{process:05d}.bin"


def _pictures(directory: Path, process: int) -> Path:
    return directory / f"{_PICTURES}{process:05d}.bin"


def _in_order(building: Path, order: list[tuple[Place, int, int]], written: list[_Written]) -> dict[str, Any]:
    """Return the index of all samples in the order of the data; each process has its blocks in that order already."""
    ends = [np.cumsum([0, *(block.samples for block in each.blocks)]).tolist() for each in written]
    number = {place: at for at, place in enumerate(sorted({place[:2] for place, _, _ in order}))}
    loaded = [np.load(building / f"index-{process:05d}.npz") for process in range(len(written))]
    index = {}
    for field in _FIELDS:
        of_process = [each[field] for each in loaded]
        index[field] = np.concatenate(
            [of_process[process][ends[process][at] : ends[process][at + 1]] for _, process, at in order]
        )
    counts = [written[process].blocks[at].samples for _, process, at in order]
    index["files"] = np.repeat(np.array([number[place[:2]] for place, _, _ in order], np.int32), counts)
    return index


def _index_sha256(directory: Path) -> str:
    digest = hashlib.sha256()
    for field in _FIELDS:
        try:
            digest.update((directory / f"{field}.npy").read_bytes())
        except FileNotFoundError:
            continue
    return digest.hexdigest()


def _failures(building: Path) -> list[_Failure]:
    return [_Failure.model_validate_json(path.read_bytes()) for path in building.glob("failed-*.json")]


def _remove_abandoned(directory: Path, but: Path) -> None:
    """Remove what killed preparations have left, if nothing was written into it for a day.

    Clocks may jump: `but`, which this preparation writes, stays.
    """
    for path in {*directory.glob(f"{_BUILDING}*")} - {but}:
        try:
            written = max(each.stat().st_mtime for each in (path, *path.glob("*")))
        except FileNotFoundError:  # another process removes it, or publishes it
            continue
        if time.time() - written > _ABANDONED_AFTER_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _unwritable(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{error.filename or directory}: the prepared tokens cannot be written: {error.strerror or error}; free "
            "space, or set data.prepared_path to another directory",
            key="output.unwritable",
        ) from error
