"""Processes that stand by for a restart: they have imported what a rank imports, and wait to be told which rank to be.

Most of the time from the death of a rank to the next step would else go by while Python imports torch and transformers.
A standby holds no device, belongs to no process group, opens no file of the run and uses no processor while it waits.
It ends with its launcher, however that ends.

Not one process that forks the ranks, which would cost the memory of one import alone: they would be its children, not
the launcher's, and whatever an import has started (a thread, a CUDA driver) is broken in a fork.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from expertmesh.io.parent import end_with_parent
from expertmesh.launcher import worker
from expertmesh.launcher.lazy_imports import lazy_imports

KILL_SECONDS = 30.0


@dataclass(slots=True)
class _Standby:
    """`orders`: our end of its connection."""

    process: "subprocess.Popen[bytes]"
    orders: socket.socket
    has_imported: bool = False

    def is_ready(self) -> bool:
        """Whether it has imported everything, or never will."""
        if not self.has_imported:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                self.has_imported = self.orders.recv(1, socket.MSG_DONTWAIT) != b""
        return self.has_imported or self.process.poll() is not None

    def end(self) -> None:
        self.orders.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_SECONDS)


@dataclass(slots=True)
class Standbys:
    """Of a launcher, for `count` ranks that run `function` in `environment`. What is left ends with the context."""

    function: str
    count: int
    environment: Mapping[str, str]
    _waiting: list[_Standby] = field(default_factory=list)

    def __enter__(self) -> "Standbys":
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def prepare(self) -> None:
        """Start the next one, unless one still imports: beside training they take one core at most. To be called
        again and again. One that ends by itself is not replaced before the next restart.
        """
        if len(self._waiting) == self.count or not all(standby.is_ready() for standby in self._waiting):
            return
        ours, its = socket.socketpair()
        with its:
            command = [sys.executable, "-u", "-m", __name__, str(its.fileno()), self.function]
            process = subprocess.Popen(command, env=self.environment, start_new_session=True, pass_fds=[its.fileno()])
        self._waiting.append(_Standby(process, ours))

    def take(self, arguments: Sequence[str], variables: Mapping[str, str]) -> "subprocess.Popen[bytes] | None":
        """One that from now on is the rank of these arguments of launcher/worker.py and environment variables; None if
        there is none left that runs. One that still imports is ahead of a new process all the same.
        """
        while self._waiting:
            standby = self._waiting.pop(0)
            if standby.process.poll() is None:
                with contextlib.suppress(ConnectionError), standby.orders as orders:
                    orders.sendall(f"{json.dumps([list(arguments), dict(variables)])}\n".encode())
                    return standby.process
            standby.end()
        return None

    def end(self) -> None:
        while self._waiting:
            self._waiting.pop().end()


def main() -> None:
    """Stand by, and be the rank that the launcher names. On the command line: the descriptor of the connection, and the
    function that ranks run.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()
    descriptor, function = sys.argv[1:]
    worker.take_allocator_settings()
    with socket.socket(fileno=int(descriptor)) as launcher:
        with lazy_imports():
            importlib.import_module(function.partition(":")[0])
        said = ""
        with contextlib.suppress(ConnectionError):  # it may have given its orders, and closed its end, long since
            launcher.sendall(b".")
        with contextlib.suppress(ConnectionError), launcher.makefile() as lines:
            said = lines.readline()
    if not said.endswith("\n"):  # the launcher has ended
        return
    arguments, variables = json.loads(said)
    os.environ.update(variables)
    sys.argv[1:] = arguments
    worker.main()


if __name__ == "__main__":
    main()
