"""Text for a terminal: from elsewhere, made harmless, and sizes."""


def printable(text: str) -> str:
    """Control characters as escapes, so that data cannot drive the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def gib(size: int) -> str:
    """Bytes as text."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"
