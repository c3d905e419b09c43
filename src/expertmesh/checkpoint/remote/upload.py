"""Upload the checkpoints of a run while it trains.

A thread of rank 0 takes each checkpoint from the run's directory when it is published there, and has all ranks upload
their shares (shares.py). A failed upload is reported, and tried again with the next checkpoint and at the end; training
continues. A checkpoint that waits for its upload stays in the run's directory. If uploads are slower than saves, only
the best and the newest of the waiting checkpoints are uploaded.
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
    """The uploads of one run.

    Args:
        keep_last: The number of newest checkpoints that are not removed from storage; None for all.
        before: Uploads the other files of the run, before each checkpoint.
        put: Uploads the files of a checkpoint.
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
        # A daemon: a run that fails does not wait for it, and the next start cleans up what it leaves.
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    def submit(self, checkpoint: Path, keep_step: int | None) -> None:
        """Upload `checkpoint` next; `keep_step` is the step of the best one. Never waits."""
        with self._changed:
            self._keep_step, self._called = keep_step, True
            best = [path for path in self._waiting if keep_step is not None and path.name == step_name(keep_step)]
            self._waiting = [*best, checkpoint]
            self._changed.notify_all()

    def held(self) -> set[int | None]:
        """Return the steps that wait for their upload or are being uploaded, and must stay in the run's directory."""
        with self._changed:
            return {step_of(path) for path in (*self._waiting, self._under_way) if path is not None}

    def kept(self) -> set[int | None]:
        """Return the steps of `held`, and the step of the best checkpoint."""
        return self.held() | {self._keep_step}

    def finish(self, within_seconds: float | None = None) -> None:
        """Wait until all checkpoints are uploaded.

        Raises:
            InputError: An upload failed or took too long; the checkpoint is still in the run's directory.
        """
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
        """Upload what waits, until `finish`. Runs on the thread.

        After a failure it tries again when the next checkpoint is submitted, and at the end.
        """
        try:
            ending = False
            while not ending:
                with self._changed:
                    self._changed.wait_for(lambda: self._called or self._ending)
                    self._called, ending = False, self._ending
                while self._upload_next():
                    pass
        except Exception as error:  # a bug of ours: `finish` raises it
            self._error = error

    def _upload_next(self) -> bool:
        """Upload the first waiting checkpoint; return False if none waits, or the upload failed."""
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
