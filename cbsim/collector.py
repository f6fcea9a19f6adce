"""The search for reference cycles: imports and runs leave hardly any, and it would take a sixth of their time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Disable the garbage collector. This decorates functions, too."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
