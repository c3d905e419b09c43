"""Text for a terminal: from elsewhere, made harmless, and sizes."""

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
