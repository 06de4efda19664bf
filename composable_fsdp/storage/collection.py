"""Pauses Python's garbage collector while many small objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """Let the garbage collector wait until the end of the block; also a decorator.

    A collector that is off stays off.
    """
    # A checkpoint of 10,000 parameters has some hundred thousand records, and none is
    # garbage before the end. The collector would look at all objects of the process
    # again and again, which took 40 % of a load.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Of two threads in such a block, the first that entered switches on again.
        if was_on:
            gc.enable()
