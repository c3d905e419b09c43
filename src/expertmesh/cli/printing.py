"""Print and write what several verbs share: sizes, counts, tables, the checkpoint that is meant, the report's place."""

import os
import resource
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from expertmesh.io.directory import report_errors
from expertmesh.io.terminal import printable


def count_text(count: int) -> str:
    """Format a number of parameters to four digits: `30.53 B`, `212.1 M`, `1,024`."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:,}"


class Terminal(Console):
    """stdout, where what is printed as text has its control characters visible, that of tables too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(file=sys.stdout, highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def print_rows(console: Console, title: str, header: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> None:
    """Print a table under a title: drawn on a terminal, aligned text otherwise. No header: label and value."""
    numeric = header is not None
    if console.is_terminal:
        table = Table(title=Text(printable(title)), title_justify="left", show_header=numeric)
        for name in header or ("", ""):
            table.add_column(name, justify="right" if numeric else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    lines = [*([header] if header else []), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    print(printable(title), file=console.file)
    for line in lines:
        cells = [cell.rjust(w) if numeric else cell.ljust(w) for cell, w in zip(line, widths, strict=True)]
        print(printable("  " + "  ".join(cells).rstrip()), file=console.file)
    print(file=console.file)


def located_text(checkpoint: Path, found: int | None) -> str:
    """Say which checkpoint is meant, and that it is the newest of `found`; None if it was named itself."""
    chosen = "" if found is None else f", the newest of {found}" if found > 1 else ", the only one"
    return f"{checkpoint}{chosen}"


def peak_bytes() -> int:
    """Return the most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def refuse_unwritable(report: str | None) -> None:
    """Raise `InputError` where the file of `--json` cannot be written, before the work that it is about."""
    if report is None:
        return
    path = Path(report)
    with report_errors(path):
        if path.exists():
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
