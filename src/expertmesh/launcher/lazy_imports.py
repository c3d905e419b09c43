"""Import torch and transformers for a command line, in two thirds of the time."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lazy_imports() -> Iterator[None]:
    """Make imports of torch inside the block faster.

    They make a million objects that stay. Python's garbage collector would search them again and again meanwhile, and
    later in every full collection.
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
