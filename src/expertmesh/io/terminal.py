"""Text for a terminal: what a process logs, bars, sizes, and text from elsewhere made harmless.

`log` is the logger of all that a run says. Whoever runs it (a verb, a rank) calls `print_log`; without that only
warnings appear, as Python has it. On a terminal bars stand below the lines; in a file long work leaves a line now and
then.
"""

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

log = logging.getLogger("expertmesh")
T = TypeVar("T")
# From when on work is long, and how often it says how far it is where there is no bar.
_LONG_SECONDS, _EVERY_SECONDS = 10.0, 30.0
_shown: "Progress | None" = None


class _Lines(logging.Handler):
    """To what is standard output now, line by line."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self.start = start

    def emit(self, record: logging.LogRecord) -> None:
        print(f"{self.start}{record.getMessage()}", flush=True)


def print_log(level: str, rank: int = 0) -> None:
    """Print what this process logs from `level` (debug, info, warning) on. Of ranks other than 0 only at debug."""
    log.handlers = [_Lines(f"rank {rank}: " if rank else "")]
    log.propagate = False
    log.setLevel(level.upper() if rank == 0 or level == "debug" else logging.CRITICAL)


@contextmanager
def bars() -> "Iterator[Progress]":
    """The bars of this terminal, below what is printed. One set, however many ask for it at once."""
    global _shown
    if _shown is not None:
        yield _shown
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(16), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as _shown:
        try:
            yield _shown
        finally:
            _shown = None


def has_bars() -> bool:
    """Whether lines of `log` are shown, on a terminal."""
    return log.isEnabledFor(logging.INFO) and sys.stdout.isatty()


def tracked(items: Iterable[T], count: int, what: str, unit: str) -> Iterator[T]:
    """The `count` items one by one, showing how far they are: `loading weights  40 of 300 tensors`."""
    if has_bars():
        with bars() as shown:
            task = shown.add_task(what, total=count)
            for number, item in enumerate(items, start=1):
                yield item
                shown.update(task, completed=number, description=f"{what}  {number:,} of {count:,} {unit}")
            shown.remove_task(task)
            shown.refresh()
        return
    began, due = time.monotonic(), _LONG_SECONDS
    for number, item in enumerate(items, start=1):
        yield item
        passed = time.monotonic() - began
        if passed >= due and number < count:
            left = duration(round(passed / number * (count - number)))
            log.info(f"{what}  {number:,} of {count:,} {unit}, {left} left")
            due = passed + _EVERY_SECONDS


# Of one line: a name of 20 million characters must not fill a log.
_MAX_LINE = 4000


def printable(text: str) -> str:
    """Control characters as escapes, so that data cannot drive the terminal, and no line without end."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    return "\n".join(map(_cut, shown.split("\n"))) if len(shown) > _MAX_LINE else shown


def _cut(line: str) -> str:
    return line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]} ... ({len(line):,} characters)"


def gib(size: int) -> str:
    """Bytes as text."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"


def duration(seconds: float) -> str:
    """`3.2 s`, `4 min 10 s`, `5 h 3 min`, `4.1 days`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 72 * 60 else f"{seconds / 86400:.1f} days"
