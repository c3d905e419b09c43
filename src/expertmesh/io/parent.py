"""End a process when the process that started it ends, for whatever reason.

Children of the launcher, of `expertmesh prepare` and of the sandbox of chat templates call it, so that none is left
behind by a crash. It never ends another process than the one that calls it.
"""

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
    """Let the kernel end this process with SIGKILL when the thread that started it ends, even if this process hangs.

    Linux only. For children of a thread that lives as long as its process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def watch_parent(parent: int, beat: Callable[[], None]) -> None:
    """Start a thread that calls `beat` twice a second and ends this process when `parent` is no longer its parent."""

    def watch() -> None:
        while os.getppid() == parent:
            beat()
            time.sleep(BEAT_SECONDS)
        # `sys.exit` would end only this thread, and the main thread may hang.
        os._exit(128 + signal.SIGHUP)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
