"""Text for a terminal: from elsewhere, made harmless, and sizes.

Paths, configurations, records and templates are other people's text. All of it reaches a terminal through `tell` (or a
console of cli/printing.py), where control characters become visible: none can change a title, a colour, or what has
been printed before.
"""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

# Of one line: a name of 20 million characters must not fill a log.
_MAX_LINE = 4000


def printable(text: str) -> str:
    """Control characters as escapes, so that data cannot drive the terminal, and no line without end."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    return "\n".join(map(_cut, shown.split("\n"))) if len(shown) > _MAX_LINE else shown


def _cut(line: str) -> str:
    return line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]} ... ({len(line):,} characters)"


def tell(*lines: str, error: bool = False) -> None:
    """Print `lines`, with all that they hold visible, at once; as an error on stderr."""
    print("\n".join(map(printable, lines)), file=sys.stderr if error else None, flush=True)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Inside, this process goes on when nobody reads its output any more (`| head`), or the disk under it is full: what
    it is for is in files. What cannot be written is left out. For ranks, and for their launcher.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Lasting(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Lasting:
    """A text stream that drops what it cannot write."""

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
        except OSError:  # what the buffer holds would fail again at every later write, and at exit
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def prepare_output() -> None:
    """For the start of a process of ours: control characters are visible in what libraries log and warn too, which
    quotes configurations; and stdin, stdout and stderr are open, or the next file would take the place of one.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        if descriptor == 1:
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        elif descriptor == 2:
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    os.close(descriptor)
    if logging.getLogRecordFactory() is _Record:
        return
    logging.setLogRecordFactory(_Record)
    original = warnings.formatwarning
    warnings.formatwarning = lambda *arguments, **named: printable(original(*arguments, **named))


class _Record(logging.LogRecord):
    def getMessage(self) -> str:
        return printable(super().getMessage())


def gib(size: int) -> str:
    """Bytes as text."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"
