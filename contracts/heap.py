"""Python's garbage collector in a process that loads a lot and then serves for long."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Python's own. A start may have been told to look more rarely; many objects at once are a pause of many streams.
_WHILE_SERVING = (700, 10, 10)


@contextmanager
def loading() -> Iterator[None]:
    """Within, nothing is collected; what is there at the end is kept and never looked at again.

    What a start makes is no garbage: looking for some among its 280,000 objects makes imports slower by a fifth.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.set_threshold(*_WHILE_SERVING)
        gc.enable()
