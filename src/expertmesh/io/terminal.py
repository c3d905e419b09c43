"""Print to a terminal: log lines, progress bars, sizes, and text from others made harmless.

`log` is the logger of everything that a run reports. Its caller (a verb, a rank) calls `print_log`; without it Python
shows only warnings. On a terminal, bars stand below the lines; in a file, long work writes a line from time to time.

Paths, configurations, records and templates are text from others. All of it reaches a terminal through `log`, `tell` or
a console of cli/printing.py, which make control characters visible, so that none can change a title, a colour, or
earlier output.
"""

import contextlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

if TYPE_CHECKING:
    from rich.progress import Progress

log = logging.getLogger("expertmesh")
T = TypeVar("T")
# Without a bar: the time after which work is long, and the interval between its progress lines.
_LONG_SECONDS, _EVERY_SECONDS = 10.0, 30.0
_shown: "Progress | None" = None


class _Lines(logging.Handler):
    """Writes each record as a line to the current standard output."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self.start = start

    def emit(self, record: logging.LogRecord) -> None:
        tell(f"{self.start}{record.getMessage()}")


def print_log(level: str, rank: int = 0) -> None:
    """Print the log of this process from `level` (debug, info, warning) on; ranks other than 0 only at debug."""
    log.handlers = [_Lines(f"rank {rank}: " if rank else "")]
    log.propagate = False
    log.setLevel(level.upper() if rank == 0 or level == "debug" else logging.CRITICAL)


@contextmanager
def bars() -> "Iterator[Progress]":
    """Show progress bars below the printed lines, for the block. Nested calls share one set of bars."""
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
    """Return whether lines of `log` are shown, and on a terminal."""
    return log.isEnabledFor(logging.INFO) and sys.stdout.isatty()


def tracked(items: Iterable[T], count: int, what: str, unit: str) -> Iterator[T]:
    """Yield the `count` items one by one and show the progress: `loading weights  40 of 300 tensors`."""
    with counted(what, unit, count) as done:
        for item in items:
            yield item
            done(1)


def plural(count: int, word: str) -> str:
    """Return a count and its noun as text: 1 rank, 1,024 ranks."""
    return f"{count:,} {word}{'s' * (count != 1)}"


@contextmanager
def counted(what: str, unit: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show the progress of work, with its speed if its size is unknown: `tokenizing  40,960 rows, 900 rows/s`.

    Yields a function to call with the number of further units that are done.
    """
    began = time.monotonic()
    done, due = 0, _LONG_SECONDS

    def count(more: int) -> None:
        nonlocal done, due
        done += more
        passed = max(time.monotonic() - began, 1e-9)
        line = f"{what}  {done:,} {unit}, {done / passed:,.0f} {unit}/s"
        if total is not None:
            line = f"{what}  {done:,} of {total:,} {unit}"
        if shown is not None and task is not None:
            shown.update(task, completed=done, description=line)
        elif passed >= due and done != total:
            left = "" if total is None else f", {duration(round(passed / done * (total - done)))} left"
            log.info(f"{line}{left}")
            due = passed + _EVERY_SECONDS

    with bars() if has_bars() else contextlib.nullcontext() as shown:
        task = None if shown is None else shown.add_task(what, total=total)
        yield count
        if shown is not None and task is not None:
            shown.remove_task(task)
            shown.refresh()


# The most characters of one line: a name of 20 million characters must not fill a log.
_MAX_LINE = 4000


def visible(text: str) -> str:
    """Return `text` with control characters, bidirectional overrides and what is no Unicode character as escapes."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def printable(text: str) -> str:
    """Return `text` with control characters as escapes and long lines cut, so that data cannot control the terminal."""
    shown = visible(text)
    if len(shown) <= _MAX_LINE:
        return shown
    lines = shown.split("\n")
    return "\n".join(
        each if len(each) <= _MAX_LINE else f"{each[:_MAX_LINE]} ... ({len(each):,} characters)" for each in lines
    )


def tell(*lines: str, error: bool = False) -> None:
    """Print `lines` at once with control characters visible; to stderr if `error`."""
    print("\n".join(map(printable, lines)), file=sys.stderr if error else None, flush=True)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Let this process continue when nobody reads its output any more (`| head`), or when the disk is full.

    Its results are in files, so output that cannot be written is dropped. For ranks, and for their launcher.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Lasting(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Lasting:
    """A text stream that drops text that it cannot write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:  # the rest of the buffer would fail again at every later write, and at exit
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def prepare_output() -> None:
    """Prepare the standard streams at the start of a process.

    Control characters become visible in the logs and warnings of libraries too, which quote configurations. And stdin,
    stdout and stderr are opened if they are closed, because the next opened file would take their place.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        if descriptor == 1:
            sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        elif descriptor == 2:
            sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    os.close(descriptor)
    if logging.getLogRecordFactory() is _Record:
        return
    logging.setLogRecordFactory(_Record)
    original = warnings.formatwarning
    warnings.formatwarning = lambda *arguments, **named: printable(original(*arguments, **named))


class _Record(logging.LogRecord):
    def getMessage(self) -> str:
        return printable(super().getMessage())


def bytes_text(count: float) -> str:
    """Format a number of bytes: `57.0 GiB`."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:.{0 if unit == 'B' else 1}f} {unit}"


def duration(seconds: float) -> str:
    """Format a duration: `3.2 s`, `4 min 10 s`, `5 h 3 min`, `4.1 days`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 72 * 60 else f"{seconds / 86400:.1f} days"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, for the end of a sentence; without a text its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
