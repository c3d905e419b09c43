"""Object storage in memory for tests, as weak as any: no rename, no directories, an upload that ends early leaves half
an object, and operations fail or the process dies when a test says so.
"""

import io
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
from fsspec.spec import AbstractFileSystem

import expertmesh.io.storage
from expertmesh.io.storage import Storage


class Killed(BaseException):
    """The process would be gone."""


class ObjectStore(AbstractFileSystem):  # type: ignore[misc]
    """`die_at`: the number of the changing operation, from 0, in which the process dies. `fail`: how many operations
    still fail with `error`. Uploads of files wait for `go_on`. `read` counts the bytes that were asked for.
    """

    protocol = "s3"
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}
        self.seen, self.read, self.attempts = 0, 0, 0
        self.die_at: int | None = None
        self.fail, self.error = 0, OSError("connection reset")
        self.go_on = threading.Event()
        self.go_on.set()
        self._lock = threading.Lock()

    def _change(self, path: str, content: bytes | None) -> None:
        """Of an operation that dies in its middle, half is left."""
        self._maybe_fail()
        with self._lock:
            here, self.seen = self.seen, self.seen + 1
            if self.die_at is not None and here > self.die_at:
                raise Killed
            dies = here == self.die_at
            if content is not None:
                self.objects[path] = content[: len(content) // 2] if dies else content
            elif not dies and self.objects.pop(path, None) is None:
                raise FileNotFoundError(path)
            if dies:
                raise Killed

    def _maybe_fail(self) -> None:
        with self._lock:
            self.attempts += 1
            if self.fail:
                self.fail -= 1
                raise self.error

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        self.go_on.wait()
        self._change(rpath, Path(lpath).read_bytes())

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        self._change(path, value)

    def rm_file(self, path: str) -> None:
        self._change(path, None)

    def find(self, path: str, detail: bool = False, **_: Any) -> dict[str, Any]:
        self._maybe_fail()
        names = [name for name in self.objects if name.startswith(f"{path}/")]
        return {name: {"name": name, "size": len(self.objects[name]), "type": "file"} for name in names}

    def open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        assert mode == "rb"
        self._maybe_fail()
        if path not in self.objects:
            raise FileNotFoundError(path)
        store = self

        class Counted(io.BytesIO):
            def read(self, size: int | None = -1, /) -> bytes:
                block = super().read(size)
                store.read += len(block)
                return block

        return Counted(self.objects[path])

    def storage(self, path: str = "bucket/run") -> Storage:
        """The directory `path` of this store, as if s3fs had opened it."""
        with (
            mock.patch.dict(expertmesh.io.storage.PACKAGES, {"s3": None}),
            mock.patch.object(fsspec.core, "url_to_fs", lambda url, **_: (self, url.partition("://")[2])),
        ):
            return Storage(f"s3://{path}")
