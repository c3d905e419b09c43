"""Access a directory of object storage (`s3://`, `gs://`, `az://`) or a mounted one (`file://`), with fsspec.

Such storage has no directories and no rename: objects appear one by one, each complete when its upload ends.
Credentials and endpoints come from the environment. The content is not trusted: a name that would leave the directory
is refused, and no more bytes are read than expected. A failed operation is repeated, and then reported. Nothing here
communicates between ranks.
"""

import errno
import hashlib
import importlib.util
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar

from expertmesh.config.errors import ExpertmeshError, InputError, SecurityError
from expertmesh.io.directory import make_synced, replace_synced, sync
from expertmesh.io.reading import MAX_MANIFEST_BYTES, open_file, shortened, too_large
from expertmesh.io.terminal import first_line

# The package behind each scheme; None: fsspec itself.
PACKAGES = {
    "file": None, "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs",
    "abfss": "adlfs",
}  # fmt: skip
_PLACE = re.compile(r"[^/\s]*/?[^\s]*")


def is_url(path: str) -> bool:
    """Return whether `path` is a URL."""
    return "://" in path


def url_problem(url: str) -> str | None:
    """Return why `url` cannot be a directory of object storage, or None if it can."""
    scheme, separator, place = url.partition("://")
    host = place.partition("/")[0]
    if not separator or scheme not in PACKAGES:
        return f"is no URL of storage that is read and written: {', '.join(f'{each}://' for each in PACKAGES)}"
    if not place.strip("/") or not _PLACE.fullmatch(place) or ".." in place.split("/"):
        return "names no directory; write s3://BUCKET/DIRECTORY"
    if ":" in host or any(each in place for each in "?#"):
        return (
            "holds credentials or options, which would be copied into logs and config.yaml; set them in the environment"
        )
    return None


def refuse_url(url: str, what: str) -> None:
    """Raise `InputError` for a URL that cannot be opened here, also if a package is missing. No network access."""
    if (problem := url_problem(url)) is not None:
        shown = re.sub(r"//.*[@?#].*", "//...", url)  # the message must not contain credentials
        raise InputError(f"{what} {shown}: {problem}", key="storage.unsupported-url")
    package = PACKAGES[url.partition("://")[0]]
    if package is not None and importlib.util.find_spec(package) is None:
        raise InputError(
            f"{what} {url}: needs the {package} package; pip install {package}", key="install.missing-package"
        )


ATTEMPTS = 5
# Before the second attempt; each later pause is twice as long.
PAUSE_SECONDS = 1.0
# The number of files transferred at the same time: one connection rarely uses the full bandwidth.
AT_ONCE = 8
_BLOCK = 1 << 24
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Operations for which a missing object is not an error.
_MAY_MISS = ("read", "listed", "removed")
T = TypeVar("T")


class Storage:
    """Objects below `url`, by their paths relative to it. Any number of threads may use it."""

    def __init__(self, url: str, what: str = "the URL") -> None:
        refuse_url(url, what)
        import fsspec

        self.url = url.rstrip("/")
        self.is_mounted = url.startswith("file://")
        options = {"auto_mkdir": True} if self.is_mounted else {}
        try:
            self._filesystem, self._root = fsspec.core.url_to_fs(self.url, **options)
        except Exception as error:  # each backend raises its own classes, here and below
            raise self._failed("", "opened", error) from error

    def below(self, name: str) -> "Storage":
        """Return the storage of the directory `name` inside this one."""
        other = object.__new__(Storage)
        other.url, other.is_mounted, other._filesystem = f"{self.url}/{name}", self.is_mounted, self._filesystem
        other._root = f"{self._root}/{name}"
        return other

    def sizes(self) -> dict[str, int]:
        """Return every object with its size in bytes.

        Raises:
            SecurityError: A name leads out of the directory.
        """
        return {name: int(facts["size"]) for name, facts in self._listed().items()}

    def objects(self) -> dict[str, tuple[int, str]]:
        """Return every object with its size in bytes and a stamp that changes when its content may have changed."""
        known = ("size", "etag", "mtime", "lastmodified", "last_modified", "updated", "md5hash", "content-md5")
        found = {name: {str(key).lower(): facts[key] for key in facts} for name, facts in self._listed().items()}
        stamps = {name: str([str(facts.get(key)) for key in known]) for name, facts in found.items()}
        return {name: (int(facts["size"]), stamps[name]) for name, facts in found.items()}

    def read(self, name: str, limit: int = MAX_MANIFEST_BYTES) -> bytes | None:
        """Return the content of an object of at most `limit` bytes, or None if it does not exist.

        Raises:
            InputError: It is larger, or storage failed.
        """

        def read() -> bytes:
            with self._open(name) as file:
                return bytes(file.read(limit + 1))

        try:
            content = self._tried(name, "read", read)
        except FileNotFoundError:
            return None
        if len(content) > limit:
            raise too_large(f"{self.url}/{name}", "has more", limit)
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write the object completely or not at all; an existing one is replaced."""

        def write() -> None:
            if self.is_mounted:
                make_synced(Path(self._path(name)).parent)
                replace_synced(Path(self._path(name)), content)
            else:
                self._filesystem.pipe_file(self._path(name), content)

        self._tried(name, "written", write)

    def put(self, directory: Path, names: Iterable[str]) -> None:
        """Upload files of `directory`, large ones in several parts."""

        def put(name: str) -> None:
            self._filesystem.put_file(str(directory / name), self._path(name))
            if self.is_mounted:
                sync(Path(self._path(name)))

        names = list(names)
        self._all("uploaded", put, names)
        if self.is_mounted:  # the entries of its files and directories, as far as the root's own
            around = {parent for name in names for parent in Path(name).parents}
            for directory in sorted(around, reverse=True):
                sync(Path(self._root, directory))
            sync(Path(self._root).parent)

    def get(self, directory: Path, sizes: Mapping[str, int]) -> dict[str, str]:
        """Download objects of exactly these sizes into new files of `directory`, synced to disk.

        Returns:
            The sha256 of each object.
        """
        hashes: dict[str, str] = {}

        def get(name: str) -> None:
            path = directory / name
            path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            hashes[name] = self._download(name, path, sizes[name])

        self._all("downloaded", get, sizes)
        return hashes

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; an object that does not exist is ignored."""
        names = list(names)

        def remove(name: str) -> None:
            with suppress(FileNotFoundError):
                self._filesystem.rm_file(self._path(name))

        self._all("removed", remove, names)
        if self.is_mounted:  # only a file system has directories, and would leave them empty
            directories = {path for name in names for path in PurePosixPath(name).parents if path.name}
            for path in sorted(directories, key=lambda path: -len(path.parts)):
                with suppress(OSError):
                    os.rmdir(f"{self._root}/{path}")

    def abort_uploads(self) -> None:
        """Abort unfinished uploads of large files by processes that were killed; S3 stores and bills them invisibly."""
        if not hasattr(self._filesystem, "list_multipart_uploads"):
            return
        bucket, _, prefix = f"{self._root}/".partition("/")

        def abort() -> None:
            for upload in self._filesystem.list_multipart_uploads(bucket):
                if upload["Key"].startswith(prefix):
                    key, token = upload["Key"], upload["UploadId"]
                    self._filesystem.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=token)

        self._tried("", "rid of unfinished uploads", abort)

    def _listed(self) -> dict[str, Mapping[str, Any]]:
        def find() -> dict[str, Mapping[str, Any]]:
            self._filesystem.invalidate_cache()
            return dict(self._filesystem.find(self._root, detail=True))

        try:
            found = self._tried("", "listed", find)
        except FileNotFoundError:
            return {}
        start, listed = f"{self._root}/", {}
        for path, facts in found.items():
            name = path.removeprefix(start)
            # Some tools mark a directory by an empty object whose key ends in "/".
            if facts.get("type") == "directory" or path.rstrip("/") == self._root or name.endswith("/"):
                continue
            if not path.startswith(start) or not is_plain(name):
                raise SecurityError(
                    f"{self.url}: holds {shortened(name)!r}, which is not a plain path inside it; remove it",
                    key="storage.unsafe-name",
                )
            listed[name] = facts
        return listed

    def _open(self, name: str) -> IO[bytes]:
        if self.is_mounted:  # `open_file` refuses pipes and devices
            return os.fdopen(open_file(Path(self._path(name))), "rb")
        return self._filesystem.open(self._path(name), "rb")  # type: ignore[no-any-return]

    def _path(self, name: str) -> str:
        assert is_plain(name)
        return f"{self._root}/{name}"

    def _download(self, name: str, path: Path, size: int) -> str:
        digest, left = hashlib.sha256(), size
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "wb") as target, self._open(name) as source:
            while block := source.read(min(_BLOCK, left + 1)):
                left -= len(block)
                if left < 0:
                    break
                digest.update(block)
                target.write(block)
            if left:
                raise ValueError(
                    f"it has {'more' if left < 0 else 'fewer'} than the {size:,} bytes that it should have"
                )
            target.flush()
            os.fsync(target.fileno())
        return digest.hexdigest()

    def _all(self, done: str, what: Callable[[str], None], names: Iterable[str]) -> None:
        """Run `what` for each object, several at the same time.

        The first failure cancels the operations that have not started and is raised when the running ones have ended.
        """
        with ThreadPoolExecutor(max_workers=AT_ONCE, thread_name_prefix="storage") as threads:
            doing = [threads.submit(self._tried, name, done, lambda name=name: what(name)) for name in names]
            try:
                for each in doing:
                    each.result()
            finally:
                for each in doing:
                    each.cancel()

    def _tried(self, name: str, done: str, operation: Callable[[], T]) -> T:
        """Return the result of `operation`, which is attempted several times.

        `FileNotFoundError` is raised as it is for operations where a missing object is a valid answer.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return operation()
            except ExpertmeshError:
                raise
            except Exception as error:
                missing = isinstance(error, FileNotFoundError)
                if missing and done in _MAY_MISS:
                    raise
                final = missing or isinstance(error, PermissionError) or getattr(error, "errno", 0) in _FULL
                if final or attempt == ATTEMPTS:
                    raise self._failed(name, done, error) from error
            time.sleep(PAUSE_SECONDS * 2 ** (attempt - 1))
        raise AssertionError("unreachable")

    def _failed(self, name: str, done: str, error: Exception) -> InputError:
        where = f"{self.url}/{name}" if name else self.url
        return InputError(
            f"{where}: cannot be {done} ({shortened(first_line(error))}); check the URL, the network, and the "
            "credentials in the environment",
            key="storage.failed",
        )


def is_plain(name: str) -> bool:
    """Return whether `name` is a relative path of plain names with `/` between them."""
    return all(part not in ("", ".", "..") and not set(part) & set("\\\0") for part in name.split("/"))
