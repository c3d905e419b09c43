"""Text from elsewhere, fit for a terminal."""


def printable(text: str) -> str:
    """Control characters as escapes, so that data cannot drive the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
