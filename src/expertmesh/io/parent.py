"""Processes that end when the process that started them does, however that ends."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
BEAT_SECONDS = 0.5


def end_with_parent() -> None:
    """Let the kernel end this process by SIGKILL with the thread that started it, also while it is stopped or stuck.

    Linux only. For children of a thread that lives as long as its process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def watch_parent(parent: int, beat: Callable[[], None]) -> None:
    """In a thread: call `beat` twice a second, and end this process when `parent` no longer is its parent."""

    def watch() -> None:
        while os.getppid() == parent:
            beat()
            time.sleep(BEAT_SECONDS)
        os._exit(128 + signal.SIGHUP)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
