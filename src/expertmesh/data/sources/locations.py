"""Find where rows lie: local files, files of object storage and the web (through fsspec), and hub data sets.

`locations` turns one path of the configuration into what can be read: each location has its rows, a `stamp` that
changes when its content may have changed, and a hash of the content itself.
"""

import hashlib
import importlib
import io
import lzma
import os
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from expertmesh.compat import fingerprint_of
from expertmesh.config.errors import InputError
from expertmesh.data.sources.rows import (
    Columns,
    RawRow,
    SourceFile,
    Takes,
    read_arrow,
    read_csv,
    read_examples,
    read_json,
    read_lines,
    read_parquet,
    read_table,
    with_columns,
)
from expertmesh.io.hub import hub_mend
from expertmesh.io.reading import open_file
from expertmesh.io.terminal import first_line

_READERS = {
    **{".jsonl": read_lines, ".ndjson": read_lines, ".json": read_json, ".parquet": read_parquet},
    **{".arrow": read_arrow, ".feather": read_arrow},
}
# The separator of cells.
_CSV = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (*_READERS, *_CSV)
# The modules whose `open` reads compressed files; all of their files can be read again from the beginning.
_ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": _ZSTD}
# `name` or `org/name`, then an optional split: what the hub allows, and nothing that looks like a local path.
_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?::(?P<split>[\w.-]+))?")
_FILE_LIKE = (*SUFFIXES, *_COMPRESSED, ".txt", ".zip", ".yaml", ".yml")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://.+", re.IGNORECASE)
_STAMPS = ("etag", "mtime", "last_modified", "lastmodified", "last-modified", "updated", "md5hash", "content-md5")


class Location(Protocol):
    """A file, or a table without one."""

    @property
    def name(self) -> str: ...
    def rows(self, takes: Takes, columns: Columns) -> Iterator[RawRow | None]:
        """Return all rows with `columns` under their new names, None in the place of those that `takes` refuses."""

    def stamp(self) -> str:
        """Return a text that changes if the content may have changed, without reading the content."""

    def content(self) -> str:
        """Return a hash of the content; reads all of it."""


def locations(path: str, stream: bool = False) -> list[Location]:
    """Return where the rows of `path` lie: a file, a directory, a URL or a hub data set (`name`, `org/name:split`),
    which is downloaded unless it is to `stream`.

    Raises `InputError` when it is none of these.
    """
    if _URL.fullmatch(path):
        return list(_remote_files(path))
    local = Path(path).expanduser()
    if not local.exists():
        return list(_hub_shards(path)) if stream else [_Table(*_hub_data(path, streaming=False))]
    if _is_saved_table(local):
        return [_saved_table(local)]
    return list(_local_files(path, local))


def refuse_source(path: str) -> None:
    """Raise `InputError` for a path that is no data by names alone; reads no row and uses no network."""
    local = Path(path).expanduser()
    if _URL.fullmatch(path):
        refuse_url(path)
    elif not local.exists():
        _hub_name(path)
    elif not _is_saved_table(local):
        for file in _local_files(path, local):
            file.refuse()


def _is_saved_table(local: Path) -> bool:
    return (local / "dataset_info.json").is_file() or (local / "dataset_dict.json").is_file()


def _local_files(path: str, local: Path) -> Iterator["_File"]:
    files = [local]
    if local.is_dir():
        files = sorted(each for each in local.iterdir() if each.is_file() and _is_data(each.name))
        if not files:
            raise _no_files(path)
    yield from (_File(str(file), file) for file in files)


def read_source(path: str) -> Iterator[RawRow]:
    """Yield all rows of a source, in file order (files of a directory sorted by name)."""
    for location in locations(path):
        yield from filter(None, location.rows(lambda number: True, {}))


@dataclass(frozen=True, slots=True)
class _File:
    """A file: `path` is local, or that of a file system of fsspec."""

    name: str
    path: Any  # Path, or str of a file system; only `filesystem` tells
    filesystem: Any = None  # fsspec has no types

    def rows(self, takes: Takes, columns: Columns) -> Iterator[RawRow | None]:
        plain, compression = self._suffixes()
        codec = None if compression is None else self._codec(compression)
        damage = getattr(codec, "ZstdError", EOFError)
        try:
            with self._open() as file, file if codec is None else codec.open(file, "rb") as stream:
                if plain in _CSV:
                    yield from read_csv(stream, self.name, takes, columns, _CSV[plain])
                else:
                    yield from with_columns(_READERS[plain](stream, self.name, takes), columns)
        except (OSError, EOFError, zlib.error, lzma.LZMAError, damage) as error:
            raise _unreadable(self.name, error) from error

    def refuse(self) -> None:
        """Raise `InputError` for a file of another kind, or that cannot be opened or decompressed."""
        _, compression = self._suffixes()
        if compression is not None:
            self._codec(compression)
        try:
            self._open().close()
        except OSError as error:
            raise _unreadable(self.name, error) from error

    def _suffixes(self) -> tuple[str, str | None]:
        plain, compression = _suffixes(self.name)
        if plain not in SUFFIXES:
            raise InputError(
                f"the data file {self.name} ends in {plain or 'no suffix'!r}, which is not one of "
                f"{', '.join(SUFFIXES)}; convert it to JSON lines.",
                key="data.unsupported-file",
            )
        return plain, compression

    def stamp(self) -> str:
        try:
            if self.filesystem is None:
                facts = self.path.stat()
                return f"{facts.st_size} bytes, {facts.st_mtime_ns}"
            info = {str(key).lower(): value for key, value in self.filesystem.info(self.path).items()}
        except OSError as error:
            raise _unreadable(self.name, error) from error
        known = {key: str(info[key]) for key in ("size", *_STAMPS) if info.get(key) is not None}
        return f"{known}" if len(known) > ("size" in known) else self.content()

    def content(self) -> str:
        with self._open() as stream:
            digest = hashlib.sha256()
            while part := stream.read(1 << 22):
                digest.update(part)
            return digest.hexdigest()

    def _codec(self, module: str) -> Any:
        """Return the module that decompresses the file."""
        try:
            return importlib.import_module(module)
        except ImportError as error:
            raise InputError(
                f"the data file {self.name} is compressed, and reading it needs the {module} package; pip install "
                f"{module}, or decompress the file.",
                key="install.missing-package",
            ) from error

    def _open(self) -> IO[bytes]:
        if self.filesystem is None:
            return os.fdopen(open_file(self.path), "rb")
        # Reads ranges, a block at a time. Of its own classes some have no `readline` with a limit.
        return io.BufferedReader(self.filesystem.open(self.path, "rb"))


@dataclass(frozen=True, slots=True)
class _Table:
    """A data set of the package datasets, read from its own files on the disk."""

    name: str
    table: Any  # datasets.Dataset, imported where one is read

    def rows(self, takes: Takes, columns: Columns) -> Iterator[RawRow | None]:
        return with_columns(read_table(self.table, SourceFile(self.name, by_line=False), takes), columns)

    def stamp(self) -> str:
        return fingerprint_of(self.table)

    def content(self) -> str:
        return self.stamp()


@dataclass(frozen=True, slots=True)
class _Shard:
    """Rows of a data set of the hub, as the package datasets streams them."""

    name: str
    examples: Any  # datasets.IterableDataset, imported where one is read

    def rows(self, takes: Takes, columns: Columns) -> Iterator[RawRow | None]:
        try:
            yield from with_columns(read_examples(self.examples, SourceFile(self.name, by_line=False), takes), columns)
        except InputError:
            raise
        except Exception as error:  # of the hub client, of pyarrow and of what decompresses
            reason = first_line(error)
            raise InputError(
                f"the data set {self.name} cannot be read ({reason}); check the network, and start again.",
                key="data.unreadable",
            ) from error

    def stamp(self) -> str:
        return self.name

    def content(self) -> str:
        return self.name


def refuse_url(url: str) -> None:
    """Raise `InputError` for a URL of a kind that fsspec cannot open here. Uses no network."""
    import fsspec

    try:
        fsspec.get_filesystem_class(url.partition("://")[0].rpartition("::")[2])
    except ImportError as error:
        raise InputError(
            f"the data path {url} needs a package that is not installed ({error}); install it.",
            key="install.missing-package",
        ) from error
    except ValueError as error:
        raise InputError(
            f"the data path {url} cannot be opened ({error}); correct it.", key="data.not-found"
        ) from error


def _remote_files(url: str) -> Iterator[_File]:
    import fsspec

    refuse_url(url)
    scheme = url.partition("://")[0]
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
        if scheme in ("http", "https") or not filesystem.isdir(path):
            if not filesystem.exists(path):
                raise FileNotFoundError("there is no such file")
            yield _File(url, path, filesystem)
            return
        found = sorted(each["name"] for each in filesystem.ls(path, detail=True) if each["type"] == "file")
    except Exception as error:  # each backend has its own classes, for credentials, buckets and networks
        reason = first_line(error)
        raise InputError(
            f"the data path {url} cannot be read ({reason}); correct the path, or give the credentials that its "
            "storage asks for.",
            key="data.not-found",
        ) from error
    files = [each for each in found if _is_data(each.rpartition("/")[2])]
    if not files:
        raise _no_files(url)
    for each in files:
        yield _File(f"{url.rstrip('/')}/{each.rpartition('/')[2]}", each, filesystem)


def _suffixes(name: str) -> tuple[str, str | None]:
    """Return `.jsonl` and the module `gzip` for `a.jsonl.gz`."""
    path = Path(name.partition("?")[0] if "://" in name else name)
    compression = _COMPRESSED.get(path.suffix)
    return (path.with_suffix("").suffix if compression else path.suffix), compression


def _is_data(name: str) -> bool:
    return _suffixes(name)[0] in SUFFIXES and name[0] != "."


def _unreadable(name: str, error: Exception) -> InputError:
    return InputError(
        f"the data file {name} cannot be read ({error}); check the path and its permissions.", key="data.unreadable"
    )


def _no_files(path: str) -> InputError:
    return InputError(
        f"the data directory {path} holds no {', '.join(SUFFIXES)} file (sub-directories are not "
        "searched); name the directory that holds the data files.",
        key="data.no-files",
    )


def _saved_table(directory: Path) -> _Table:
    """Return what `Dataset.save_to_disk` wrote."""
    import datasets

    try:
        table = datasets.load_from_disk(str(directory))
    except Exception as error:  # pyarrow's classes and several of datasets
        reason = first_line(error)
        raise InputError(
            f"the data set in {directory} cannot be loaded ({reason}); save it anew.", key="data.damaged-file"
        ) from error
    if isinstance(table, datasets.DatasetDict):
        first, *_ = table
        raise InputError(
            f"{directory} holds the splits {', '.join(table)} of a data set; name one of them, as {directory / first}.",
            key="data.no-files",
        )
    return _Table(str(directory), table)


def _hub_shards(path: str) -> Iterator["_Shard"]:
    """Yield the files of a hub data set, none of which is stored on the disk."""
    name, table = _hub_data(path, streaming=True)
    for index in range(table.num_shards):
        shard = table.shard(num_shards=table.num_shards, index=index)
        yield _Shard(f"{name}, part {index + 1}" if table.num_shards > 1 else name, shard)


def _hub_name(path: str) -> re.Match[str]:
    """Return what may be a data set of the hub."""
    match = _HUB_ID.fullmatch(path)
    if match is None or path.endswith(_FILE_LIKE):
        raise InputError(
            f"the data path {path} does not exist; name a file, a directory or a hub data set.", key="data.not-found"
        )
    return match


def _hub_data(path: str, streaming: bool) -> tuple[str, Any]:
    match = _hub_name(path)
    import datasets

    split = match["split"] or "train"
    try:
        table = datasets.load_dataset(match["id"], split=split, streaming=streaming)
    except Exception as error:  # the hub client raises a dozen unrelated classes; every one becomes this sentence
        reason = first_line(error)
        mend = hub_mend(error, "name a file or a directory", "correct the path or the split")
        raise InputError(
            f"the data path {path} is no local file or directory, and split {split!r} of the hub data set "
            f"{match['id']} cannot be loaded ({reason}); {mend}.",
            key="data.not-found",
        ) from error
    return f"{match['id']}:{split}", table
