"""Run untrusted programs in a child process, under the kernel's limits of time and memory.

For encode.py: a chat template is a program that came with a model. Jinja's sandbox limits what it may touch, but not
the time and memory of one operation (`'a' * 10**12`, `10 ** 10**8`), during which no signal handler runs; the kernel's
timer and address-space limit always work. The child is forked, as data loaders' workers are: it has the tokenizer and
imports nothing. It lives as long as its `Sandbox`, so that a call costs two copies of its data. Its answers are JSON,
never a pickle. The limit on memory holds on Linux only. The child never touches a device.
"""

import gc
import json
import multiprocessing
import os
import resource
import signal
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from expertmesh.io.parent import end_with_parent

TIME_LIMIT_SECONDS = 10
MEMORY_LIMIT_BYTES = 1 << 30
_BLOCK_CHARACTERS = 1 << 16


class LimitExceeded(Exception):
    """The child's offence, as a verb phrase: "does not finish within 10 s"."""


class Sandbox:
    """Applies `function` to items in a child process; it may raise `LimitExceeded` and must return JSON values.

    Each item has `TIME_LIMIT_SECONDS` before the kernel ends the child.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._connection, connection_of_child = multiprocessing.Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self._connection.close()
            _serve(connection_of_child, function)
        connection_of_child.close()
        self._end = weakref.finalize(self, _end, self._pid, self._connection, os.getpid())

    def map(self, items: Sequence[Any]) -> list[Any]:
        """Return the function's results in the order of `items`. After `LimitExceeded` the child has ended."""
        try:
            self._connection.send(items)
            results: list[Any] = []
            while len(results) < len(items):
                results += [_result(answer) for answer in json.loads(self._connection.recv_bytes())]
            return results
        except (EOFError, ConnectionError):
            status = self._end() or 0
            how = "ends the process that renders it"
            if os.WIFSIGNALED(status):
                how = f"makes the process that renders it end by signal {os.WTERMSIG(status)}"
                if os.WTERMSIG(status) == signal.SIGALRM:
                    how = f"does not finish within {TIME_LIMIT_SECONDS} s"
            raise LimitExceeded(how) from None
        except BaseException:
            self._end()
            raise


def _result(answer: Any) -> Any:
    if "exceeded" in answer:
        raise LimitExceeded(answer["exceeded"])
    if "traceback" in answer:
        raise RuntimeError(f"in the child process: {answer['traceback']}")
    return answer["result"]


def _serve(connection: Connection, function: Callable[[Any], Any]) -> NoReturn:
    """Run the child; it ends without the parent's exit handlers."""
    try:
        end_with_parent()
        # The parent's handlers must not run here as well; the parent handles Ctrl-C.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        # The finalizers of the parent's objects must not run here either.
        gc.freeze()
        while True:
            items = connection.recv()
            with _limited_memory():
                for block in _blocks(_answer(function, item) for item in items):
                    connection.send_bytes(block)
    except (EOFError, ConnectionError):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _blocks(answers: Iterable[str]) -> Iterator[bytes]:
    """Yield JSON lists of answers, some at a time: to wake the parent for each would take longer than to render it."""
    held: list[str] = []
    for answer in answers:
        held.append(answer)
        if sum(map(len, held)) > _BLOCK_CHARACTERS:
            yield f"[{','.join(held)}]".encode()
            held = []
    if held:
        yield f"[{','.join(held)}]".encode()


def _answer(function: Callable[[Any], Any], item: Any) -> str:
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_SECONDS)
    try:
        return json.dumps({"result": function(item)})
    except LimitExceeded as error:
        return json.dumps({"exceeded": str(error)})
    except MemoryError:
        return json.dumps({"exceeded": f"needs more than {MEMORY_LIMIT_BYTES >> 20:,} MiB of memory"})
    except Exception:  # the parent raises it, with this traceback
        return json.dumps({"traceback": traceback.format_exc()})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Let the process grow by `MEMORY_LIMIT_BYTES`; what it has already (a device's address range too) is free."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        limit = pages * resource.getpagesize() + MEMORY_LIMIT_BYTES
        if soft == resource.RLIM_INFINITY or limit < soft:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _end(pid: int, connection: Connection, owner: int) -> int:
    """End the child and return its wait status. Other processes forked from the owner leave it alone."""
    if os.getpid() != owner:
        return 0
    connection.close()
    done, status = os.waitpid(pid, os.WNOHANG)
    if done == 0:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    return status
