"""Uploads the checkpoints of a run while it goes on: a thread of rank 0 takes each from the run's directory when it is
published there, and has all ranks upload their shares (shares.py).

An upload that fails is said, and tried again with the next checkpoint and at the end; training goes on. What waits for
its upload stays in the run's directory. If uploads are slower than saves, the newest goes next, and the best one.
"""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from expertmesh.checkpoint.directory import step_name
from expertmesh.checkpoint.manifest import step_of
from expertmesh.checkpoint.remote.store import Put, RemoteCheckpoints
from expertmesh.config.errors import ExpertmeshError, InputError
from expertmesh.io.storage import Storage

log = logging.getLogger(__name__)


class Uploads:
    """The uploads of one run; `before` uploads what else belongs to it, before each checkpoint is published, and `put`
    the files of that.
    """

    def __init__(
        self, remote: RemoteCheckpoints, keep_last: int | None, before: Callable[[], None], put: Put = Storage.put
    ) -> None:
        self.remote, self.keep_last, self._before, self._put = remote, keep_last, before, put
        self._keep_step: int | None = None
        self._waiting: list[Path] = []
        self._under_way: Path | None = None
        self._error: Exception | None = None
        self._called = self._ending = False
        self._changed = threading.Condition()
        # Nobody waits for it when the run fails: what it leaves is cleaned up at the next start.
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    def submit(self, checkpoint: Path, keep_step: int | None) -> None:
        """Upload `checkpoint` next; `keep_step` is that of the best one. Never waits."""
        with self._changed:
            self._keep_step, self._called = keep_step, True
            best = [path for path in self._waiting if keep_step is not None and path.name == step_name(keep_step)]
            self._waiting = [*best, checkpoint]
            self._changed.notify_all()

    def held(self) -> set[int | None]:
        """The steps that must stay in the run's directory for now."""
        with self._changed:
            return {step_of(path) for path in (*self._waiting, self._under_way) if path is not None}

    def kept(self) -> set[int | None]:
        """`held`, and the step of the best one."""
        return self.held() | {self._keep_step}

    def finish(self, within_seconds: float | None = None) -> None:
        """Wait until all is uploaded. `InputError` if that fails; what is left is in the run's directory."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join(within_seconds)
        if self._thread.is_alive():
            raise InputError(
                f"checkpoint.remote: not all is uploaded in {within_seconds:.0f} s; the next start uploads the rest",
                key="storage.upload-failed",
            )
        if self._waiting and isinstance(self._error, ExpertmeshError):
            left = self._waiting[-1]
            raise InputError(
                f"checkpoint.remote: {left.name} is not uploaded: {self._error}. It is complete in {left.parent}; copy "
                "it, or start the same command again",
                key="storage.upload-failed",
            ) from self._error
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        """On the thread. After a failure, what waits is tried again when there is more of it, or at the end."""
        try:
            ending = False
            while not ending:
                with self._changed:
                    self._changed.wait_for(lambda: self._called or self._ending)
                    self._called, ending = False, self._ending
                while self._upload_next():
                    pass
        except Exception as error:  # ours: `finish` raises it
            self._error = error

    def _upload_next(self) -> bool:
        """Upload what waits first; False if nothing does, or it failed."""
        with self._changed:
            if not self._waiting:
                return False
            checkpoint = self._under_way = self._waiting.pop(0)
            keep_step, self._error = self._keep_step, None
        started = time.monotonic()
        try:
            self._before()
            if self.remote.publish(checkpoint, self._put):
                seconds = time.monotonic() - started
                log.info(f"uploaded   {checkpoint.name} to {self.remote.storage.url} in {seconds:.1f} s")
            self.remote.prune(self.keep_last, {keep_step})
        except ExpertmeshError as error:
            self._error = error
            log.warning(f"warning: {checkpoint.name} is not uploaded, which is tried again later: {error}")
        with self._changed:
            self._under_way = None
            if self._error is not None and (not self._waiting or checkpoint.name == step_name(self._keep_step or -1)):
                self._waiting.insert(0, checkpoint)
        return self._error is None
