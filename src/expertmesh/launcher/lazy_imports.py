"""Import torch and transformers for a command line, in two thirds of the time."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lazy_imports() -> Iterator[None]:
    """Speed up imports of torch inside the block.

    They make a million objects that stay. Python would search them for garbage meanwhile again and again, and later
    with every full collection.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
